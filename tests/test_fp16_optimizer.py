"""FP16_Optimizer: float32 masters of half params behind an optimizer, their gradients, loss scales."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

import ampatch as amp
from ampatch.apex.fp16_utils import DynamicLossScaler, FP16_Optimizer, LossScaler
from apex_rows import shows
from fp16_optimizers import (
    BF16,
    FLOAT,
    OPTIMIZERS,
    backward,
    batches,
    each_optimizer,
    freeze,
    loss_of,
    make,
    make_net,
    overflow,
    states,
    train,
)
from helpers import assert_same_bits, snapshot

# ---- Masters ----


def test_each_param_group_has_its_lists_and_schedulers_find_defaults():
    net = make_net()
    layers = [list(layer.parameters()) for layer in net[1] if list(layer.parameters())]
    optimizer = FP16_Optimizer(SGD([{"params": params, "lr": i} for i, params in enumerate(layers)]))
    masters = [[param.float() for param in params] for params in (layers[0], [], layers[2])]
    for shown, expected in (
        (optimizer.fp16_groups, [layers[0], [], layers[2]]),
        (optimizer.fp32_from_fp16_groups, masters),
        (optimizer.fp32_from_fp32_groups, [[], layers[1], []]),
        ([optimizer.all_fp32_from_fp32_params], [layers[1]]),
    ):
        assert [*map(snapshot, shown)] == [*map(snapshot, expected)]
    assert [group["lr"] for group in optimizer.param_groups] == [0, 1, 2]
    assert optimizer.defaults["momentum"] == 0
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    assert scheduler.get_last_lr() == [pytest.approx(1 / 25)] * 3


@shows("companions-fp16-utils")
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


def test_state_and_attributes_from_before_follow_to_the_masters():
    net = make_net().half()
    for index, param in enumerate(net.parameters()):
        param.index = index
    sgd = SGD(net.parameters(), lr=0.1, momentum=0.9)
    for param in net.parameters():
        sgd.state[param]["momentum_buffer"] = torch.full_like(param, 1 / 3)
    optimizer = FP16_Optimizer(sgd)
    assert set(optimizer.state) == set(optimizer.all_fp32_from_fp16_params)
    assert [master.index for master in optimizer.all_fp32_from_fp16_params] == [*range(6)]
    for master, state in optimizer.state.items():
        assert_same_bits([state["momentum_buffer"]], [torch.full_like(master, 1 / 3).half().float()])


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


def test_a_model_that_became_half_later_shows_its_masters_before_the_first_backward():
    net = nn.Linear(4, 3)
    optimizer = FP16_Optimizer(SGD(net.parameters(), lr=0.1))
    net.half()
    assert optimizer.fp32_from_fp32_groups == [[]]
    shown = optimizer.state_dict()["fp32_from_fp16"][0]  # as scripts do that prune through them
    assert [master.dtype for master in shown] == [FLOAT, FLOAT]
    assert_same_bits(net.parameters(), [master.half() for master in shown])


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


@pytest.mark.parametrize("scale", [1.0, 128.0])
@pytest.mark.parametrize("updates", [(True, True, True), (False, False, True), (True, False, True)], ids=str)
def test_gradients_accumulate_in_half_and_float32_params_alike(scale, updates):
    net, optimizer = make(static_loss_scale=scale)
    net.eval()  # the same function each time
    data = list(batches(3))
    for (x, y), update in zip(data, updates, strict=True):
        optimizer.backward(loss_of(net, x, y), update_master_grads=update)
    found = [param.grad.clone() for param in amp.master_params(optimizer)]
    assert snapshot(optimizer.inspect_master_grad_data()) == snapshot([found])
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


def test_master_gradients_are_clipped_by_their_norm_together():
    net, optimizer = make(static_loss_scale=128.0)
    backward(net, optimizer)
    copies = [nn.Parameter(param.detach()) for param in amp.master_params(optimizer)]
    for copied, param in zip(copies, amp.master_params(optimizer), strict=True):
        copied.grad = param.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(copies, 0.01, norm_type=1)
    assert optimizer.clip_fp32_grads(0.01, norm_type=1) == expected  # the first name of clip_master_grads
    assert_same_bits([p.grad for p in amp.master_params(optimizer)], [p.grad for p in copies])


@pytest.mark.parametrize(
    ("arguments", "to_none"),
    [({}, False), ({"set_grads_to_None": True}, True), ({"set_to_none": True}, True)],
)
def test_zero_grad_clears_the_gradients_of_model_and_masters(arguments, to_none):
    net, optimizer = make()
    train(net, optimizer, batches(1))
    optimizer.zero_grad(**arguments)
    grads = [param.grad for param in (*net.parameters(), *amp.master_params(optimizer))]
    assert len(grads) == 12
    assert all(grad is None if to_none else not grad.any() for grad in grads)


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
    loss_of(net, *next(batches(1))).backward()
    with pytest.warns(UserWarning, match=r"call optimizer.backward\(loss\) instead of loss.backward"):
        optimizer.step()


# ---- Loss scales ----


def test_a_static_scale_may_be_written_as_text_and_changed():
    _, optimizer = make(static_loss_scale="128.0")
    assert type(optimizer.loss_scaler) is LossScaler
    assert optimizer.loss_scale == 128.0
    optimizer.loss_scale = 2**10
    assert optimizer.loss_scale == optimizer.loss_scaler.loss_scale == 1024


def test_a_dynamic_scale_begins_as_amps_does_or_as_its_arguments_say():
    scaler = make(dynamic_loss_scale=True)[1].loss_scaler
    assert type(scaler) is DynamicLossScaler
    assert (scaler.cur_scale, scaler.scale_factor, scaler.scale_window) == (2**16, 2, 2000)
    assert scaler.max_loss_scale == 2**24
    arguments = {"init_scale": 2**30, "scale_factor": 4.0, "scale_window": 3}
    scaler = make(dynamic_loss_scale=True, dynamic_loss_args=arguments)[1].loss_scaler
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
    net[1][1].weight.register_hook(lambda grad: grad * float("nan"))
    backward(net, optimizer)
    assert all(param.grad.isfinite().all() for param in optimizer.all_fp16_params)
    assert optimizer.overflow
    optimizer.update_fp32_grads()  # the first name of update_master_grads
    assert optimizer.overflow


def test_an_overflow_in_one_of_several_backward_passes_counts_once():
    net, optimizer = make(dynamic_loss_scale=True)
    overflow(net, optimizer)
    for x, y in batches(2):
        optimizer.backward(loss_of(net, x, y))
        assert optimizer.overflow
    optimizer.step()
    assert optimizer.loss_scale == 2**15


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


@pytest.mark.parametrize(("verbose", "level"), [(True, logging.WARNING), (False, logging.INFO)])
def test_an_overflow_is_logged(caplog, capfd, verbose, level):
    net, optimizer = make(dynamic_loss_scale=True, verbose=verbose)
    with caplog.at_level(logging.INFO, "ampatch"):
        overflow(net, optimizer)
        optimizer.step()
    told = "Gradient overflow.  Skipping step, loss scale 65536.0 becomes 32768.0"
    assert caplog.record_tuples == [("ampatch", level, told)]
    assert capfd.readouterr().out == ""
