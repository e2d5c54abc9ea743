"""FP16_Optimizer as other code meets it: closures, schedulers, hooks, copies, checkpoints."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import ampatch as amp
from ampatch.apex.fp16_utils import DynamicLossScaler, FP16_Optimizer, LossScaler
from fp16_optimizers import (
    FLOAT,
    HALF,
    batches,
    each_optimizer,
    evaluate,
    freeze,
    loss_of,
    make,
    make_net,
    names_of_apex,
    overflow,
    train,
)
from helpers import assert_same_bits, snapshot

# ---- Closures ----


@each_optimizer
def test_a_step_with_a_closure_is_a_step(name):
    (net, optimizer), (other, expected) = make(name, dynamic_loss_scale=True), make(name)
    expected.loss_scale = 2**16
    for batch in batches(3):
        with torch.no_grad():
            wanted = loss_of(copy.deepcopy(net), *batch)
        assert optimizer.step(partial(evaluate, net, optimizer, batch)) == wanted
    train(other, expected, batches(3))
    assert freeze(net, optimizer) == freeze(other, expected)
    assert optimizer.loss_scaler.cur_iter == 3


def test_a_closure_that_overflows_is_called_again_with_a_smaller_scale():
    net, optimizer = make(dynamic_loss_scale=True)
    scales = []

    def closure():
        scales.append(optimizer.loss_scale)
        return evaluate(net, optimizer, next(batches(1)), float("inf") if scales[-1] > 2**13 else 1.0)

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


def test_a_closure_sees_the_weights_that_lbfgs_tries():
    net = make_net()
    optimizer = FP16_Optimizer(torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=5))
    seen = []

    def closure():
        params = list(net.parameters())
        assert_same_bits(
            params, [m.to(p.dtype) for p, m in zip(params, amp.master_params(optimizer), strict=True)]
        )
        seen.append(evaluate(net, optimizer, next(batches(1))))
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
    net, optimizer = make("Adam, foreach", dynamic_loss_scale=True)
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

    def __getattr__(self, name):
        return getattr(self.optim, name)

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
    for wrong, message in (
        (nn.Linear(1, 1), "a Linear, expected an optimizer"),
        (make()[1], "an FP16_Optimizer, expected the optimizer"),
    ):
        with pytest.raises(amp.AmpTypeError, match=f"found {message}"):
            FP16_Optimizer(wrong)


# ---- Beside amp ----


@pytest.mark.parametrize("is_first", [True, False])
def test_an_optimizer_with_masters_of_amp_is_refused(is_first):
    net = nn.Linear(4, 3)
    sgd = SGD(net.parameters(), lr=0.1)
    optimizer = None if is_first else FP16_Optimizer(sgd)
    amp.initialize(net, sgd if is_first else optimizer, opt_level="O2", verbosity=0)
    refused = partial(FP16_Optimizer, sgd) if is_first else partial(train, net, optimizer, batches(1))
    with pytest.raises(amp.AmpError, match="initialize has given this SGD masters already"):
        refused()


def test_an_optimizer_that_amp_gave_no_masters_is_taken():
    net = nn.Linear(4, 3)
    sgd = SGD(net.parameters(), lr=0.1)
    amp.initialize(net, sgd, opt_level="O1", verbosity=0)
    assert FP16_Optimizer(sgd).optimizer is sgd


def test_an_optimizer_computes_in_float32_while_casts_are_on():
    class Products(SGD):
        def step(self, closure=None):
            (param,) = self.param_groups[0]["params"]
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
    net, optimizer = make("Adam, foreach")
    train(net, optimizer, batches(4))
    saved = reload({"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    other, resumed = make("Adam, foreach")
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


def test_a_state_has_the_keys_of_apex():
    _, optimizer = make(dynamic_loss_scale=True)
    assert list(optimizer.state_dict()) == [
        "loss_scaler",
        "dynamic_loss_scale",
        "overflow",
        "first_closure_call_this_step",
        "optimizer_state_dict",
        "fp32_from_fp16",
    ]


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


@each_optimizer
def test_a_state_that_was_loaded_stays_as_it_is(name):
    (net, optimizer), (other_net, other) = make(name, dynamic_loss_scale=True), make(name)
    train(net, optimizer, batches(2))
    saved = optimizer.state_dict()
    other.load_state_dict(saved)
    before = snapshot(saved["optimizer_state_dict"]), saved["loss_scaler"].loss_scale
    train(other_net, other, batches(2))
    overflow(other_net, other)
    other.step()
    assert (snapshot(saved["optimizer_state_dict"]), saved["loss_scaler"].loss_scale) == before


@pytest.mark.parametrize(
    ("module", "values", "grown"),
    [
        ("amp.scaler.LossScaler", AMP_SCALER, 8192.0),
        ("amp.scaler.LossScaler", AMP_SCALER | {"dynamic": False}, 4096.0),
        ("fp16_utils.loss_scaler.DynamicLossScaler", FP16_SCALER, 8192.0),
    ],
    ids=["amp", "amp, static", "fp16_utils"],
)
def test_a_checkpoint_of_apex_goes_on_with_its_scale(monkeypatch, module, values, grown):
    is_dynamic = values.get("dynamic", True)
    net, optimizer = make(dynamic_loss_scale=is_dynamic)
    module, _, name = f"apex.{module}".rpartition(".")
    with names_of_apex(monkeypatch, module, name, values) as saved:
        scaler = pickle.loads(pickle.dumps(saved))
    masters = [[torch.full_like(m, 1 / 3) for m in group] for group in optimizer.fp32_from_fp16_groups]
    optimizer.load_state_dict(
        {**optimizer.state_dict(), "loss_scaler": scaler, "fp32_from_fp16": masters, "overflow": True}
    )
    assert optimizer.loss_scale == 4096.0
    assert type(optimizer.loss_scaler) is (DynamicLossScaler if is_dynamic else LossScaler)
    assert_same_bits(optimizer.all_fp32_from_fp16_params, masters[0])
    assert_same_bits(optimizer.all_fp16_params, [master.half() for master in masters[0]])
    optimizer.zero_grad()  # an overflow from before loading does not count
    assert optimizer.loss_scale == 4096.0
    train(net, optimizer, batches(1))
    assert optimizer.loss_scale == grown  # after the 2000th clean iteration


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
    net, optimizer = make("Adam, foreach", static_loss_scale=128.0)
    train(net, optimizer, batches(1))
    other = FP16_Optimizer(Adam(nn.Linear(2, 2).half().parameters()), dynamic_loss_scale=True)
    before = freeze(net, optimizer)
    with pytest.raises(amp.AmpValueError, match=r"2 float32 masters in 1 groups.*this optimizer 4 float32"):
        optimizer.load_state_dict(other.state_dict())
    assert freeze(net, optimizer) == before
    assert optimizer.loss_scale == 128.0
