"""FP16_Optimizer: float32 masters of half params behind an optimizer, loss scales, closures, checkpoints."""

import copy
import io
import itertools
import logging
import pickle
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

import ampatch as amp
from ampatch.apex.fp16_utils import DynamicLossScaler, FP16_Optimizer, LossScaler, network_to_half
from helpers import assert_same_bits, snapshot

HALF, FLOAT, BF16 = torch.float16, torch.float32, torch.bfloat16
OPTIMIZERS = {
    "SGD": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD, fused": (SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adam": (Adam, {"lr": 0.01}),
    "Adam, foreach": (Adam, {"lr": 0.01, "foreach": True, "amsgrad": True}),
    "Adam, fused": (Adam, {"lr": 0.01, "fused": True}),
    "AdamW": (AdamW, {"lr": 0.01}),
    "AdamW, fused": (AdamW, {"lr": 0.01, "fused": True}),
    "Adagrad, fused": (Adagrad, {"lr": 0.1, "fused": True}),
    "RMSprop": (RMSprop, {"lr": 0.01, "momentum": 0.9}),
}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def make_net():
    """Half linear layers with a float32 BatchNorm between them."""
    torch.manual_seed(0)
    return network_to_half(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))


def make(name="SGD", **options):
    net = make_net()
    kind, arguments = OPTIMIZERS[name]
    return net, FP16_Optimizer(kind(net.parameters(), **arguments), **options)


def batches(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(16, 4, generator=generator)
        yield x, x[:, :3].argmax(1)


def loss_of(net, x, y):
    return F.cross_entropy(net(x).float(), y)


def train(net, optimizer, data):
    for x, y in data:
        optimizer.zero_grad()
        optimizer.backward(loss_of(net, x, y))
        optimizer.step()


def overflow(net, optimizer):
    """Runs a backward pass whose gradients are not finite."""
    optimizer.zero_grad()
    x, y = next(batches(1))
    optimizer.backward(loss_of(net, x, y) * float("inf"))


def states(optimizer):
    """The state of each parameter in bits, in the order of the parameters."""
    return [snapshot(optimizer.state.get(param)) for param in amp.master_params(optimizer)]


def freeze(net, optimizer):
    """Everything that a step changes, in bits."""
    return snapshot([list(net.parameters()), optimizer.param_groups]), states(optimizer)


# ---- Masters ----


def test_masters_take_the_place_of_half_parameters_alone():
    net, optimizer = make()
    params = list(net.parameters())
    half = [param for param in params if param.dtype == HALF]
    own = [param for param in params if param.dtype == FLOAT]
    (group,) = optimizer.param_groups
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.all_fp16_params == optimizer.fp16_groups[0] == half
    assert optimizer.all_fp32_from_fp32_params == optimizer.fp32_from_fp32_groups[0] == own
    masters = optimizer.all_fp32_from_fp16_params
    assert masters == optimizer.fp32_from_fp16_groups[0]
    assert_same_bits(masters, [param.float() for param in half])
    stand_ins = iter(masters)
    expected = [next(stand_ins) if param.dtype == HALF else param for param in params]
    assert [id(param) for param in group["params"]] == [id(param) for param in expected]
    assert list(amp.master_params(optimizer)) == expected
    assert group["momentum"] == optimizer.defaults["momentum"] == 0.9


def test_each_param_group_has_its_lists():
    net = make_net()
    layers = [list(layer.parameters()) for layer in net[1] if list(layer.parameters())]
    optimizer = FP16_Optimizer(SGD([{"params": params, "lr": i} for i, params in enumerate(layers)]))
    assert [len(group) for group in optimizer.fp16_groups] == [2, 0, 2]
    assert [len(group) for group in optimizer.fp32_from_fp32_groups] == [0, 2, 0]
    assert [group["lr"] for group in optimizer.param_groups] == [0, 1, 2]


@each_optimizer
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_masters_go_as_a_float32_optimizer_goes_with_the_same_gradients(name, dynamic):
    net, optimizer = make(name, static_loss_scale=128.0, dynamic_loss_scale=dynamic)
    kind, arguments = OPTIMIZERS[name]
    reference = [nn.Parameter(param.detach().clone()) for param in amp.master_params(optimizer)]
    expected = kind(reference, **arguments)
    params = list(net.parameters())
    for x, y in batches(6):
        optimizer.zero_grad()
        scale = optimizer.loss_scale
        net.zero_grad()
        (loss_of(net, x, y) * scale).backward()
        scaled = [param.grad.clone() for param in params]
        net.zero_grad()
        optimizer.backward(loss_of(net, x, y))
        optimizer.step()
        for param, grad in zip(reference, scaled, strict=True):
            param.grad = grad.float() / scale
        expected.step()
        assert_same_bits(amp.master_params(optimizer), reference)
        assert states(optimizer) == states(expected)
        assert_same_bits(params, [p.to(q.dtype) for p, q in zip(reference, params, strict=True)])


def test_state_from_before_follows_in_float32():
    net = make_net().half()
    sgd = SGD(net.parameters(), lr=0.1, momentum=0.9)
    for param in net.parameters():
        sgd.state[param]["momentum_buffer"] = torch.full_like(param, 1 / 3)
    optimizer = FP16_Optimizer(sgd)
    assert set(optimizer.state) == set(optimizer.all_fp32_from_fp16_params)
    for master, state in optimizer.state.items():
        assert_same_bits([state["momentum_buffer"]], [torch.full_like(master, 1 / 3).half().float()])


def test_the_step_count_of_an_optimizer_survives():
    net = make_net().half()
    adam = Adam(net.parameters())
    F.cross_entropy(net(torch.randn(4, 4)).float(), torch.zeros(4, dtype=torch.long)).backward()
    adam.step()
    optimizer = FP16_Optimizer(adam)
    assert {state["step"].item() for state in optimizer.state.values()} == {1.0}
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {FLOAT}
    train(net, optimizer, batches(1))


def test_attributes_of_parameters_are_there_on_their_masters():
    param = nn.Parameter(torch.ones(2).half())
    param.no_weight_decay = True
    optimizer = FP16_Optimizer(SGD([param], lr=0.1))
    assert optimizer.all_fp32_from_fp16_params[0].no_weight_decay is True


def test_bfloat16_parameters_have_masters_as_well():
    net = nn.Linear(4, 3).to(BF16)
    optimizer = FP16_Optimizer(SGD(net.parameters(), lr=0.1))
    train(net.forward, optimizer, [(x.to(BF16), y) for x, y in batches(3)])
    assert_same_bits(net.parameters(), [p.to(BF16) for p in optimizer.all_fp32_from_fp16_params])


def test_a_frozen_parameter_stays_and_has_a_master_once_it_is_trained():
    net = make_net()
    frozen = net[1][0].weight.requires_grad_(False)
    optimizer = FP16_Optimizer(SGD(net.parameters(), lr=0.1))
    before = frozen.detach().clone()
    assert len(optimizer.all_fp16_params) == 3
    assert any(param is frozen for param in optimizer.param_groups[0]["params"])
    train(net, optimizer, batches(1))
    assert_same_bits([frozen], [before])
    frozen.requires_grad_(True)
    train(net, optimizer, batches(1))
    assert len(optimizer.all_fp16_params) == 4
    assert {param.dtype for param in amp.master_params(optimizer)} == {FLOAT}
    assert not torch.equal(frozen, before)


@pytest.mark.parametrize("inner", [False, True], ids=["ours", "inner"])
def test_a_param_group_added_later_has_masters_too(inner):
    first, second = nn.Linear(4, 3).half(), nn.Linear(4, 3).half()
    optimizer = FP16_Optimizer(SGD(first.parameters(), lr=0.1))
    (optimizer.optimizer if inner else optimizer).add_param_group({"params": second.parameters(), "lr": 0.2})
    x, y = next(batches(1))
    optimizer.backward(F.cross_entropy((first(x.half()) + second(x.half())).float(), y))
    optimizer.step()
    assert [len(group) for group in optimizer.fp16_groups] == [2, 2]
    assert {param.dtype for param in amp.master_params(optimizer)} == {FLOAT}
    assert_same_bits(second.parameters(), [p.half() for p in optimizer.fp32_from_fp16_groups[1]])


def test_weights_that_are_loaded_into_the_model_reach_the_masters():
    net, optimizer = make()
    train(net, optimizer, batches(2))
    masters = [master.detach().clone() for master in optimizer.all_fp32_from_fp16_params]
    state = {name: value.clone() for name, value in net.state_dict().items()}
    state["1.0.bias"].fill_(7)
    net.load_state_dict(state)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(net, optimizer, batches(1))
    assert net[1][0].bias.tolist() == [7.0] * 8
    edited = [i for i, param in enumerate(optimizer.all_fp16_params) if param is net[1][0].bias]
    for i, (master, before) in enumerate(zip(optimizer.all_fp32_from_fp16_params, masters, strict=True)):
        # Weights that were loaded as they were keep the precision of their masters.
        assert_same_bits([master], [torch.full_like(before, 7) if i in edited else before])


def test_a_sparse_gradient_reaches_its_master():
    table = nn.Embedding(6, 3, sparse=True).half()
    optimizer = FP16_Optimizer(SGD(table.parameters(), lr=0.5), static_loss_scale=128.0)
    reference = table.weight.detach().float()
    for _ in range(2):
        optimizer.zero_grad(set_grads_to_None=True)
        optimizer.backward(table(torch.tensor([1, 1, 4])).sum())
        optimizer.step()
        assert optimizer.all_fp32_from_fp16_params[0].grad.is_sparse
        reference[1] -= 1.0
        reference[4] -= 0.5
    # The reference subtracts once what torch adds up row by row: the last bit may differ.
    torch.testing.assert_close(
        optimizer.all_fp32_from_fp16_params[0].detach(), reference, rtol=1e-6, atol=1e-6
    )


# ---- Gradients ----


def test_gradients_of_masters_are_the_models_unscaled():
    net, optimizer = make(static_loss_scale=64.0)
    x, y = next(batches(1))
    optimizer.backward(loss_of(net, x, y))
    for half, master in zip(optimizer.all_fp16_params, optimizer.all_fp32_from_fp16_params, strict=True):
        assert_same_bits([master.grad], [half.grad.float() / 64])
    (grads,) = optimizer.inspect_master_grad_data()
    assert_same_bits(grads, [param.grad for param in amp.master_params(optimizer)])


@pytest.mark.parametrize("scale", [1.0, 128.0])
@pytest.mark.parametrize("updates", [(True, True, True), (False, False, True), (True, False, True)], ids=str)
def test_gradients_accumulate_in_half_and_float32_params_alike(scale, updates):
    net, optimizer = make(static_loss_scale=scale)
    net.eval()  # the same function each time
    data = list(batches(3))
    for (x, y), update in zip(data, updates, strict=True):
        optimizer.backward(loss_of(net, x, y), update_master_grads=update)
    found = [param.grad.clone() for param in amp.master_params(optimizer)]
    net.zero_grad()
    for x, y in data:
        (loss_of(net, x, y) * scale).backward()
    assert_same_bits(found, [param.grad.float() / scale for param in net.parameters()])


def test_master_gradients_are_updated_at_the_step_if_nobody_did():
    (net, optimizer), (other, expected) = make(static_loss_scale=128.0), make(static_loss_scale=128.0)
    for x, y in batches(2):
        optimizer.zero_grad()
        optimizer.backward(loss_of(net, x, y), update_master_grads=False)
        optimizer.step()
    train(other, expected, batches(2))
    assert freeze(net, optimizer) == freeze(other, expected)


def test_updating_master_gradients_twice_unscales_them_once():
    net, optimizer = make(static_loss_scale=128.0)
    x, y = next(batches(1))
    optimizer.backward(loss_of(net, x, y))
    before = snapshot([param.grad for param in amp.master_params(optimizer)])
    optimizer.update_master_grads()
    assert snapshot([param.grad for param in amp.master_params(optimizer)]) == before


def test_a_loss_that_the_script_scaled_itself_works_with_update_master_grads():
    net, optimizer = make(dynamic_loss_scale=True)
    other, expected = make(dynamic_loss_scale=True)
    for (x, y), factor in zip(batches(4), (1.0, float("inf"), 1.0, 1.0), strict=True):
        net.zero_grad()
        (loss_of(net, x, y) * factor * optimizer.loss_scale).backward()
        optimizer.update_master_grads()
        optimizer.step()
        expected.zero_grad()
        expected.backward(loss_of(other, x, y) * factor)
        expected.step()
    assert freeze(net, optimizer) == freeze(other, expected)
    assert optimizer.loss_scale == expected.loss_scale == 2**15


def test_gradients_that_are_cleared_do_not_count_as_unscaled():
    net, optimizer = make(static_loss_scale=128.0)
    net.eval()
    x, y = next(batches(1))
    optimizer.backward(loss_of(net, x, y))
    found = [param.grad.clone() for param in amp.master_params(optimizer)]
    optimizer.zero_grad()
    (loss_of(net, x, y) * 128.0).backward()
    optimizer.update_master_grads()
    assert_same_bits([param.grad for param in amp.master_params(optimizer)], found)


def test_a_graph_may_be_kept_for_another_backward():
    net, optimizer = make()
    x, y = next(batches(1))
    loss = loss_of(net, x, y)
    optimizer.backward(loss, retain_graph=True)
    optimizer.backward(loss)
    with pytest.raises(RuntimeError, match="second time"):
        optimizer.backward(loss)


def test_master_gradients_are_clipped_by_their_norm_together():
    net, optimizer = make(static_loss_scale=128.0)
    x, y = next(batches(1))
    optimizer.backward(loss_of(net, x, y))
    copies = [nn.Parameter(param.detach()) for param in amp.master_params(optimizer)]
    for copied, param in zip(copies, amp.master_params(optimizer), strict=True):
        copied.grad = param.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(copies, 0.01, norm_type=1)
    assert optimizer.clip_master_grads(0.01, norm_type=1) == expected
    assert_same_bits([p.grad for p in amp.master_params(optimizer)], [p.grad for p in copies])


@pytest.mark.parametrize("arguments", [{"set_grads_to_None": True}, {"set_to_none": True}], ids=str)
def test_zero_grad_sets_gradients_to_none(arguments):
    net, optimizer = make()
    train(net, optimizer, batches(1))
    optimizer.zero_grad(**arguments)
    assert [p.grad for p in (*net.parameters(), *amp.master_params(optimizer)) if p.grad is not None] == []


def test_zero_grad_sets_gradients_to_zero():
    net, optimizer = make()
    train(net, optimizer, batches(1))
    optimizer.zero_grad()
    grads = [param.grad for param in (*net.parameters(), *amp.master_params(optimizer))]
    assert len(grads) == 12
    assert not any(grad.any() for grad in grads)


def test_a_parameter_that_gets_no_gradient_is_not_stepped():
    net, optimizer = make()
    train(net, optimizer, batches(2))
    before = freeze(net, optimizer)
    net.zero_grad()
    optimizer.update_master_grads()  # nothing: a gradient of the step before must not come back
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    assert freeze(net, optimizer) == before


def test_a_plain_backward_is_told():
    net, optimizer = make()
    x, y = next(batches(1))
    loss_of(net, x, y).backward()
    with pytest.warns(UserWarning, match=r"call optimizer.backward\(loss\) instead of loss.backward"):
        optimizer.step()


# ---- Loss scales ----


def test_a_static_scale_may_be_written_as_text_and_changed():
    _, optimizer = make(static_loss_scale="128.0")
    assert type(optimizer.loss_scaler) is LossScaler
    assert optimizer.loss_scale == 128.0
    optimizer.loss_scale = 2**10
    assert optimizer.loss_scale == optimizer.loss_scaler.loss_scale == 1024


def test_a_dynamic_scale_begins_as_amps_does():
    _, optimizer = make(dynamic_loss_scale=True)
    scaler = optimizer.loss_scaler
    assert type(scaler) is DynamicLossScaler
    assert (scaler.cur_scale, scaler.scale_factor, scaler.scale_window) == (2**16, 2, 2000)
    assert scaler.max_loss_scale == 2**24


def test_a_dynamic_scale_takes_arguments():
    arguments = {"init_scale": 2**30, "scale_factor": 4.0, "scale_window": 3}
    _, optimizer = make(dynamic_loss_scale=True, dynamic_loss_args=arguments)
    scaler = optimizer.loss_scaler
    assert (scaler.cur_scale, scaler.scale_factor, scaler.scale_window) == (2**30, 4.0, 3)


@pytest.mark.parametrize("bad", [0, -1.0, float("inf"), float("nan"), "much"])
def test_a_scale_that_cannot_work_is_refused(bad):
    with pytest.raises(amp.AmpValueError, match="loss_scale"):
        make(static_loss_scale=bad)


@each_optimizer
def test_a_step_after_an_overflow_changes_nothing_but_the_scale(name):
    net, optimizer = make(name, dynamic_loss_scale=True)
    train(net, optimizer, batches(2))
    net.eval()
    before = freeze(net, optimizer)
    overflow(net, optimizer)
    assert optimizer.overflow is True
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    assert optimizer.step() is None
    assert optimizer.overflow is True  # scripts ask after the step
    assert freeze(net, optimizer) == before
    assert optimizer.loss_scale == 2**15
    optimizer.step()  # the same gradients
    assert freeze(net, optimizer) == before
    assert optimizer.loss_scale == 2**15
    train(net, optimizer, batches(1))
    assert optimizer.overflow is False
    assert freeze(net, optimizer) != before


def test_an_overflow_in_a_float32_parameter_alone_counts():
    net, optimizer = make(dynamic_loss_scale=True)
    x, y = next(batches(1))
    net[1][1].weight.register_hook(lambda grad: grad * float("nan"))
    optimizer.backward(loss_of(net, x, y))
    assert all(param.grad.isfinite().all() for param in optimizer.all_fp16_params)
    assert optimizer.overflow
    optimizer.update_master_grads()
    assert optimizer.overflow


def test_an_overflow_in_one_of_several_backward_passes_counts_once():
    net, optimizer = make(dynamic_loss_scale=True)
    overflow(net, optimizer)
    for x, y in batches(2):
        optimizer.backward(loss_of(net, x, y))
        assert optimizer.overflow
    optimizer.step()
    assert optimizer.loss_scale == 2**15


def test_a_static_scale_does_not_look_for_overflows():
    net, optimizer = make(static_loss_scale=128.0)
    overflow(net, optimizer)
    assert optimizer.overflow is False
    optimizer.step()
    assert optimizer.loss_scale == 128.0
    assert not torch.isfinite(optimizer.all_fp32_from_fp16_params[0]).all()


def test_the_scale_follows_overflows_as_grad_scaler_does():
    arguments = {"init_scale": 2.0**10, "scale_window": 3}
    net, optimizer = make(dynamic_loss_scale=True, dynamic_loss_args=arguments)
    expected = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    other = nn.Linear(4, 3)
    sgd = SGD(other.parameters(), lr=0.1)
    for (x, y), fails in zip(batches(14), "00010000010000", strict=True):
        factor = float("inf") if fails == "1" else 1.0
        sgd.zero_grad()
        expected.scale(F.cross_entropy(other(x), y) * factor).backward()
        expected.step(sgd)
        expected.update()
        optimizer.zero_grad()
        optimizer.backward(loss_of(net, x, y) * factor)
        optimizer.step()
        assert optimizer.loss_scale == expected.get_scale()
    assert optimizer.loss_scale > 2.0**10


@pytest.mark.parametrize("clear", ["optimizer", "model"])
def test_a_loop_that_leaves_the_step_out_after_an_overflow_gets_a_smaller_scale(clear):
    net, optimizer = make(dynamic_loss_scale=True)
    net[1][0].bias.register_hook(lambda grad: grad * (1 if optimizer.loss_scale <= 2**14 else float("inf")))
    steps = 0
    for x, y in batches(6):
        (optimizer if clear == "optimizer" else net).zero_grad()
        optimizer.backward(loss_of(net, x, y))
        if optimizer.overflow:
            continue
        optimizer.step()
        steps += 1
    assert steps == 4
    assert optimizer.loss_scale == 2**14


@pytest.mark.parametrize("verbose", [True, False], ids=["verbose", "quiet"])
def test_an_overflow_is_logged(caplog, capfd, verbose):
    net, optimizer = make(dynamic_loss_scale=True, verbose=verbose)
    with caplog.at_level(logging.INFO, "ampatch"):
        overflow(net, optimizer)
        optimizer.step()
    (record,) = caplog.records
    assert record.levelno == (logging.WARNING if verbose else logging.INFO)
    expected = "Gradient overflow.  Skipping step, loss scale 65536.0 becomes 32768.0"
    assert record.message == expected
    assert capfd.readouterr().out == ""


def test_the_first_names_of_the_methods_are_there():
    net, optimizer = make(static_loss_scale=128.0)
    x, y = next(batches(1))
    optimizer.backward(loss_of(net, x, y), update_master_grads=False)
    optimizer.update_fp32_grads()
    assert optimizer.clip_fp32_grads(1e9) == optimizer.clip_master_grads(1e9)


# ---- Closures ----


@each_optimizer
def test_a_step_with_a_closure_is_a_step(name):
    (net, optimizer), (other, expected) = make(name, dynamic_loss_scale=True), make(name)
    expected.loss_scale = 2**16
    for x, y in batches(3):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_of(net, x, y)
            optimizer.backward(loss)
            return loss.detach()

        with torch.no_grad():
            wanted = loss_of(copy.deepcopy(net), x, y)
        assert optimizer.step(closure) == wanted
    train(other, expected, batches(3))
    assert freeze(net, optimizer) == freeze(other, expected)
    assert optimizer.loss_scaler.cur_iter == 3


def test_a_closure_that_overflows_is_called_again_with_a_smaller_scale():
    net, optimizer = make(dynamic_loss_scale=True)
    scales = []
    x, y = next(batches(1))

    def closure():
        scales.append(optimizer.loss_scale)
        optimizer.zero_grad()
        loss = loss_of(net, x, y)
        optimizer.backward(loss * (float("inf") if scales[-1] > 2**13 else 1.0))
        return loss.detach()

    before = freeze(net, optimizer)
    optimizer.step(closure)
    assert scales == [2**16, 2**15, 2**14, 2**13]
    assert optimizer.loss_scale == 2**13
    assert optimizer.overflow is False
    assert freeze(net, optimizer) != before


def test_a_closure_that_is_never_finite_ends_in_an_error():
    net, optimizer = make(dynamic_loss_scale=True)
    before = snapshot(list(amp.master_params(optimizer)))
    with pytest.raises(amp.AmpError, match="not finite at the smallest loss scale, 1"):
        optimizer.step(lambda: overflow(net, optimizer))
    assert snapshot(list(amp.master_params(optimizer))) == before


def test_a_step_that_was_skipped_does_not_keep_a_closure_from_running():
    net, optimizer = make(dynamic_loss_scale=True)
    overflow(net, optimizer)
    optimizer.step()
    before = freeze(net, optimizer)
    optimizer.step(lambda: train_once(net, optimizer))
    assert freeze(net, optimizer) != before


def test_a_closure_may_make_no_gradients_or_leave_them_scaled():
    net, optimizer = make(dynamic_loss_scale=True)
    other, expected = make(dynamic_loss_scale=True)
    overflow(net, optimizer)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    before = freeze(net, optimizer)
    assert optimizer.step(lambda: 5) == 5
    assert freeze(net, optimizer) == before
    x, y = next(batches(1))
    net[1][1].load_state_dict(other[1][1].state_dict())  # its statistics went on
    optimizer.step(lambda: optimizer.backward(loss_of(net, x, y), update_master_grads=False))
    train(other, expected, batches(1))
    assert_same_bits(amp.master_params(optimizer), amp.master_params(expected))


def train_once(net, optimizer):
    x, y = next(batches(1))
    optimizer.zero_grad()
    loss = loss_of(net, x, y)
    optimizer.backward(loss)
    return loss.detach()


def test_a_closure_sees_the_weights_that_lbfgs_tries():
    net = make_net()
    optimizer = FP16_Optimizer(torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=5))
    seen = []

    def closure():
        params = list(net.parameters())
        assert_same_bits(
            params, [m.to(p.dtype) for p, m in zip(params, amp.master_params(optimizer), strict=True)]
        )
        seen.append(train_once(net, optimizer))
        return seen[-1]

    for _ in range(3):
        optimizer.step(closure)
    assert len(seen) > 5
    assert seen[-1] < 0.5 * seen[0]
    assert optimizer.first_closure_call_this_step is True


# ---- Schedulers, hooks, copies, wrappers ----


@pytest.mark.parametrize("around", [True, False], ids=["ours", "inner"])
def test_a_scheduler_drives_the_learning_rate_and_minds_no_skipped_first_step(around):
    net = make_net()
    sgd = SGD(net.parameters(), lr=0.5)
    scheduler = None if around else torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    optimizer = FP16_Optimizer(sgd, dynamic_loss_scale=True)
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    overflow(net, optimizer)
    optimizer.step()
    scheduler.step()  # would warn, which is an error here
    train(net, optimizer, batches(1))
    scheduler.step()
    assert [group["lr"] for group in sgd.param_groups] == [0.125]


def test_schedulers_that_read_defaults_work():
    _, optimizer = make()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    assert scheduler.get_last_lr() == [pytest.approx(1 / 25)]


def test_hooks_run_for_the_steps_that_are_taken():
    net, optimizer = make(dynamic_loss_scale=True)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    overflow(net, optimizer)
    optimizer.step()
    assert calls == []
    train(net, optimizer, batches(1))
    assert calls == ["before", "after"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_of_model_and_optimizer_trains_alike(duplicate):
    net, optimizer = make("Adam", dynamic_loss_scale=True)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(net, optimizer, batches(2))
    other, copied = duplicate((net, optimizer))
    assert freeze(other, copied) == freeze(net, optimizer)
    train(net, optimizer, batches(3))
    train(other, copied, batches(3))
    assert freeze(other, copied) == freeze(net, optimizer)


class Wrapper:
    """An optimizer around another that is no Optimizer, in the manner of LARC."""

    def __init__(self, optim):
        self.optim = optim

    param_groups = property(lambda self: self.optim.param_groups)
    state = property(lambda self: self.optim.state)

    def state_dict(self):
        return self.optim.state_dict()

    def load_state_dict(self, state):
        self.optim.load_state_dict(state)

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad *= 0.5
        return self.optim.step(closure)


def test_a_wrapper_that_is_no_optimizer_is_stepped_with_its_masters():
    net = make_net()
    optimizer = FP16_Optimizer(Wrapper(SGD(net.parameters(), lr=0.2)), static_loss_scale=128.0)
    other = make_net()
    expected = FP16_Optimizer(SGD(other.parameters(), lr=0.1), static_loss_scale=128.0)
    train(net, optimizer, batches(3))
    train(other, expected, batches(3))
    assert_same_bits(amp.master_params(optimizer), amp.master_params(expected))
    optimizer.load_state_dict(optimizer.state_dict())


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(amp.AmpTypeError, match="found a Linear, expected an optimizer"):
        FP16_Optimizer(nn.Linear(1, 1))
    with pytest.raises(amp.AmpTypeError, match="found one already"):
        FP16_Optimizer(make()[1])


# ---- Beside amp ----


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_optimizer_that_has_masters_of_amp_is_refused(level):
    net = nn.Linear(4, 3)
    net, sgd = amp.initialize(net, SGD(net.parameters(), lr=0.1), opt_level=level, verbosity=0)
    with pytest.raises(amp.AmpError, match="initialize has given this SGD masters already"):
        FP16_Optimizer(sgd)


def test_masters_of_amp_that_come_later_are_refused_at_the_first_backward():
    net = nn.Linear(4, 3)
    optimizer = FP16_Optimizer(SGD(net.parameters(), lr=0.1))
    net, optimizer = amp.initialize(net, optimizer, opt_level="O2", verbosity=0)
    x, y = next(batches(1))
    with pytest.raises(amp.AmpError, match="initialize has given this SGD masters already"):
        optimizer.backward(loss_of(net, x, y))


@pytest.mark.parametrize("scaled_by", ["FP16_Optimizer", "amp"])
def test_a_float32_model_trains_under_casts_with_either_loss_scale(scaled_by):
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    optimizer = FP16_Optimizer(SGD(net.parameters(), lr=0.5), static_loss_scale=128.0)
    net, optimizer = amp.initialize(net, optimizer, opt_level="O1", verbosity=0)
    losses = []
    for x, y in batches(20):
        optimizer.zero_grad()
        losses.append(loss_of(net, x, y))
        if scaled_by == "amp":
            with amp.scale_loss(losses[-1], optimizer) as scaled:
                scaled.backward()
        else:
            optimizer.backward(losses[-1])
        optimizer.step()
    assert losses[-1] < 0.6 * losses[0]


def test_an_optimizer_computes_in_float32_while_casts_are_on():
    class Products(SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    kinds.append(torch.mm(param, param.grad.t()).dtype)
            return super().step(closure)

    kinds = []
    net = nn.Linear(4, 3, bias=False).half()
    optimizer = FP16_Optimizer(Products(net.parameters(), lr=0.5))
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype == HALF
    train(lambda x: net(x.half()), optimizer, batches(2))
    assert kinds == [FLOAT, FLOAT]


# ---- Checkpoints ----


def reload(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()))


@each_optimizer
def test_training_resumes_bit_for_bit(name):
    options = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**18, "scale_window": 3}}
    net, optimizer = make(name, **options)
    train(net, optimizer, batches(4))
    overflow(net, optimizer)
    optimizer.step()
    saved = reload({"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    other, resumed = make(name)  # the scale is dynamic because the checkpoint says so
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert freeze(other, resumed) == freeze(net, optimizer)
    train(net, optimizer, batches(5))
    train(other, resumed, batches(5))
    assert freeze(other, resumed) == freeze(net, optimizer)
    assert vars(resumed.loss_scaler) == vars(optimizer.loss_scaler)


@pytest.mark.parametrize("order", ["model", "optimizer", "optimizer alone"])
def test_masters_and_model_agree_in_whatever_order_they_are_loaded(order):
    net, optimizer = make("Adam")
    train(net, optimizer, batches(4))
    saved = reload({"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    other, resumed = make("Adam")
    loads = [(other, "model"), (resumed, "optimizer")]
    for item, name in {"model": loads, "optimizer": loads[::-1], "optimizer alone": loads[1:]}[order]:
        item.load_state_dict(saved[name])
    half = [param for param in other.parameters() if param.dtype == HALF]
    assert_same_bits(half, optimizer.all_fp16_params)
    if order == "optimizer alone":
        return  # BatchNorm is float32, and in the model's state alone
    train(net, optimizer, batches(2))
    train(other, resumed, batches(2))
    assert freeze(other, resumed) == freeze(net, optimizer)


def test_a_state_has_the_keys_of_apex_and_stays_as_it_was_saved():
    net, optimizer = make(dynamic_loss_scale=True)
    state = optimizer.state_dict()
    assert list(state) == [
        "loss_scaler",
        "dynamic_loss_scale",
        "overflow",
        "first_closure_call_this_step",
        "optimizer_state_dict",
        "fp32_from_fp16",
    ]
    overflow(net, optimizer)
    optimizer.step()
    assert state["loss_scaler"].loss_scale == 2**16
    other, resumed = make()
    resumed.load_state_dict(state)
    overflow(other, resumed)
    resumed.step()
    assert state["loss_scaler"].loss_scale == 2**16


def test_an_overflow_from_before_loading_does_not_count():
    net, optimizer = make(dynamic_loss_scale=True)
    overflow(net, optimizer)
    state = optimizer.state_dict()
    assert state["overflow"] is True
    optimizer.load_state_dict(state)
    optimizer.zero_grad()
    assert optimizer.loss_scale == 2**16


def as_object_of_apex(monkeypatch, module, name, values):
    """What torch.load makes of an object that a class of apex was saved as, with apex's names there again."""
    kind = type(name, (), {"__module__": module})
    item = kind()
    vars(item).update(values)
    for parent in itertools.accumulate(module.split("."), "{}.{}".format):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    setattr(sys.modules[module], name, kind)
    return pickle.loads(pickle.dumps(item))


AMP_SCALER = {
    "dynamic": True,
    "_loss_scale": 4096.0,
    "_max_loss_scale": 2.0**24,
    "_min_loss_scale": None,
    "_scale_seq_len": 2000,
    "_unskipped": 1999,
    "_has_overflow": False,
    "_overflow_buf": torch.zeros(1, dtype=torch.int32),
}
FP16_SCALER = {
    "cur_scale": 4096.0,
    "cur_iter": 2520,
    "last_overflow_iter": 520,
    "scale_factor": 2.0,
    "scale_window": 2000,
}


@pytest.mark.parametrize(
    ("module", "name", "values"),
    [
        ("apex.amp.scaler", "LossScaler", AMP_SCALER),
        ("apex.fp16_utils.loss_scaler", "DynamicLossScaler", FP16_SCALER),
    ],
    ids=["amp", "fp16_utils"],
)
def test_a_checkpoint_of_apex_goes_on_with_its_scale(monkeypatch, module, name, values):
    net, optimizer = make(dynamic_loss_scale=True)
    scaler = as_object_of_apex(monkeypatch, module, name, values)
    masters = [[torch.full_like(m, 1 / 3) for m in group] for group in optimizer.fp32_from_fp16_groups]
    optimizer.load_state_dict(
        {**optimizer.state_dict(), "loss_scaler": scaler, "fp32_from_fp16": masters, "overflow": True}
    )
    assert optimizer.loss_scale == 4096.0
    assert type(optimizer.loss_scaler) is DynamicLossScaler
    assert_same_bits(optimizer.all_fp32_from_fp16_params, masters[0])
    assert_same_bits(optimizer.all_fp16_params, [master.half() for master in masters[0]])
    train(net, optimizer, batches(1))
    assert optimizer.loss_scale == 8192.0  # the 2000th clean iteration


def test_a_static_scale_of_apex_is_loaded(monkeypatch):
    _, optimizer = make()
    values = {**AMP_SCALER, "dynamic": False, "_loss_scale": 128.0}
    scaler = as_object_of_apex(monkeypatch, "apex.amp.scaler", "LossScaler", values)
    optimizer.load_state_dict({**optimizer.state_dict(), "loss_scaler": scaler})
    assert type(optimizer.loss_scaler) is LossScaler
    assert optimizer.loss_scale == 128.0


def test_a_checkpoint_of_the_optimizer_for_fused_adam_is_loaded():
    net = make_net().half()
    optimizer = FP16_Optimizer(SGD(net.parameters(), lr=0.1))
    masters = [[torch.full_like(m, 1 / 3) for m in group] for group in optimizer.fp32_from_fp16_groups]
    optimizer.load_state_dict(
        {
            "dynamic_loss_scale": True,
            **FP16_SCALER,
            "optimizer_state_dict": optimizer.optimizer.state_dict(),
            "fp32_groups": masters,
        }
    )
    assert_same_bits(optimizer.all_fp32_from_fp16_params, masters[0])
    assert vars(optimizer.loss_scaler).items() >= FP16_SCALER.items()


def test_the_state_of_a_plain_optimizer_is_refused():
    _, optimizer = make()
    with pytest.raises(amp.AmpValueError, match=r"no loss scale among them: .* goes into .optimizer"):
        optimizer.load_state_dict(optimizer.optimizer.state_dict())


def test_a_state_of_other_masters_is_refused_and_changes_nothing():
    net, optimizer = make("Adam", static_loss_scale=128.0)
    train(net, optimizer, batches(1))
    other = FP16_Optimizer(Adam(nn.Linear(2, 2).half().parameters()), dynamic_loss_scale=True)
    before = freeze(net, optimizer)
    with pytest.raises(amp.AmpValueError, match=r"2 float32 masters in 1 groups.*this optimizer 4 float32"):
        optimizer.load_state_dict(other.state_dict())
    assert freeze(net, optimizer) == before
    assert optimizer.loss_scale == 128.0


# ---- As scripts use it ----


def train_script(fp16):
    """A loop in the manner of published ones: gradients accumulated, clipped, with a scheduler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    model = network_to_half(model) if fp16 else model
    optimizer = Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    if fp16:
        optimizer = FP16_Optimizer(
            optimizer, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2**12}
        )
    losses = []
    for i, (x, y) in enumerate(batches(160)):
        loss = loss_of(model, x, y) / 2
        losses.append(2 * loss.item())
        if fp16:
            optimizer.backward(loss)
        else:
            loss.backward()
        if i % 2 == 0:
            continue
        if fp16:
            optimizer.clip_master_grads(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses


def test_a_script_with_accumulation_clipping_and_a_schedule_learns_as_in_float32():
    losses, expected = train_script(True), train_script(False)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    # Losses are below 1.5, and float16 keeps 11 bits of weights and activations.
    torch.testing.assert_close(losses, expected, rtol=0.05, atol=0.02)
