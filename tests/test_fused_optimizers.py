"""FusedAdam and its kin: torch's optimizers bit for bit, or plain references, with apex's arguments."""

import copy
import functools
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch as amp
from ampatch.apex.multi_tensor_apply import multi_tensor_applier
from ampatch.apex.optimizers import (
    FP16_Optimizer,
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from helpers import Dense, Scalar, assert_same_bits, snapshot

INF = float("inf")
SHAPES = [(3, 4), (5,), (), (0, 2), (2, 1, 3)]
STEPS = 4
HALF_TYPES = [torch.float16, torch.bfloat16]
LAMB_OPTIONS = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-6}


def named(kind, **options):
    """A way to make an optimizer, with a readable id."""
    text = ",".join(f"{name}={value}" for name, value in options.items())
    return pytest.param(functools.partial(kind, **options), id=f"{kind.__name__}({text})")


EVERY = pytest.mark.parametrize(
    "make",
    [
        named(FusedAdam, lr=0.05),
        named(FusedAdam, lr=0.05, bias_correction=False, weight_decay=0.1),
        named(FusedAdam, lr=0.05, max_grad_norm=1.0, amsgrad=True),
        named(FusedSGD, lr=0.05),
        named(FusedSGD, lr=0.05, momentum=0.9, weight_decay=0.1),
        named(FusedSGD, lr=0.05, momentum=0.9, weight_decay=0.1, wd_after_momentum=True),
        named(FusedAdagrad, lr=0.1),
        named(FusedAdagrad, lr=0.1, weight_decay=0.1, adagrad_w_mode=True),
        named(FusedLAMB, lr=0.05),
        named(FusedNovoGrad, lr=0.05),
        named(FusedMixedPrecisionLamb, lr=0.05),
    ],
)


def make_params(dtype=torch.float32, shapes=SHAPES):
    return [Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def twins(params):
    return [Parameter(param.detach().clone()) for param in params]


def make_grads(params, steps=STEPS):
    return [[torch.randn(param.shape).to(param.dtype) for param in params] for _ in range(steps)]


def step_with(optimizer, params, grads):
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    optimizer.step()


def run(optimizer, params, history):
    for grads in history:
        step_with(optimizer, params, grads)


def state_of(optimizer):
    """State and options, bit for bit."""
    states = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
    return snapshot([dict(state) for state in states]), snapshot(optimizer.state_dict()["param_groups"])


def assert_like_torch(make, make_torch, dtype=torch.float32):
    params = make_params(dtype)
    expected = twins(params)
    history = make_grads(params)
    run(make(params), params, history)
    run(make_torch(expected), expected, history)
    assert_same_bits(params, expected)


# Against torch, bit for bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize(("mode", "kind"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_adam_is_that_of_torch(mode, kind, amsgrad, dtype):
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "amsgrad": amsgrad}
    assert_like_torch(
        lambda params: FusedAdam(params, adam_w_mode=mode, **options),
        lambda params: kind(params, fused=True, **options),
        dtype,
    )


def test_adam_is_adamw_by_default():
    assert_like_torch(FusedAdam, lambda params: torch.optim.AdamW(params, weight_decay=0.0, fused=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True},
        {"weight_decay": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sgd_is_that_of_torch(options, dtype):
    assert_like_torch(
        lambda params: FusedSGD(params, 0.1, **options),
        lambda params: torch.optim.SGD(params, 0.1, fused=True, **options),
        dtype,
    )


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adagrad_is_that_of_torch(weight_decay):
    options = {"lr": 0.1, "eps": 1e-6, "weight_decay": weight_decay}
    assert_like_torch(
        lambda params: FusedAdagrad(params, **options),
        lambda params: torch.optim.Adagrad(params, fused=True, **options),
    )


def test_complex_parameters_take_the_way_that_is_not_fused():
    params = [Parameter(torch.randn(3, dtype=torch.complex64))]
    expected = twins(params)
    history = [[torch.randn(3, dtype=torch.complex64)] for _ in range(STEPS)]
    optimizer = FusedAdam(params, 0.1)
    run(optimizer, params, history)
    run(torch.optim.AdamW(expected, 0.1, weight_decay=0.0), expected, history)
    assert_same_bits(params, expected)
    assert not optimizer._step_supports_amp_scaling


def test_a_learning_rate_may_be_a_tensor():
    assert_like_torch(
        lambda params: FusedAdam(params, torch.tensor(0.1)),
        lambda params: torch.optim.AdamW(params, torch.tensor(0.1), weight_decay=0.0, fused=True),
    )


@pytest.mark.parametrize(
    ("make", "make_torch"),
    [
        (FusedAdam, functools.partial(torch.optim.AdamW, weight_decay=0.0, fused=True)),
        (
            functools.partial(FusedSGD, lr=0.1, momentum=0.9, dampening=0.5),
            functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
        ),
        (FusedAdagrad, functools.partial(torch.optim.Adagrad, fused=True)),
    ],
    ids=["adam", "sgd", "adagrad"],
)
def test_a_parameter_that_joins_later_begins_at_its_first_step(make, make_torch):
    params = make_params(shapes=[(3,), (2,)])
    expected = twins(params)
    history = make_grads(params)
    history[0][1] = history[1][1] = None
    run(make(params), params, history)
    run(make_torch(expected), expected, history)
    # SGD's oracle is not fused: torch's fused one refuses this.
    torch.testing.assert_close(params, expected, rtol=1e-6, atol=0)


# Against plain references, in float64: one parameter at a time


def assert_like(make, update, rtol=1e-5):
    """Compares with `update(w, g, state, t, norm)`, which returns the new weight.

    The tolerance is some roundings of float32 in sums and roots.
    """
    params = make_params()
    weights = [param.detach().double() for param in params]
    states = [{} for _ in params]
    history = make_grads(params)
    run(make(params), params, history)
    for t, grads in enumerate(history, start=1):
        doubles = [grad.double() for grad in grads]
        norm = torch.cat([grad.reshape(-1) for grad in doubles]).norm()
        weights = [update(*row, t, norm) for row in zip(weights, doubles, states, strict=True)]
    for param, weight in zip(params, weights, strict=True):
        torch.testing.assert_close(param.detach().double(), weight, rtol=rtol, atol=1e-6)


def adam_moments(g, state, betas):
    for name, beta, value in (("m", betas[0], g), ("v", betas[1], g * g)):
        state[name] = beta * state.get(name, 0.0) + (1 - beta) * value
    return state["m"], state["v"]


@pytest.mark.parametrize("mode", [True, False])
def test_adam_without_bias_correction(mode):
    def update(w, g, state, t, norm):
        m, v = adam_moments(g if mode else g + 0.1 * w, state, (0.9, 0.99))
        return w * (1 - 0.01 * 0.1 * mode) - 0.01 * m / (v.sqrt() + 1e-6)

    options = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "adam_w_mode": mode}
    make = functools.partial(FusedAdam, lr=0.01, bias_correction=False, **options)
    assert_like(make, update)


def test_steps_are_counted_without_bias_correction_as_well():
    params = make_params()
    optimizer = FusedAdam(params, bias_correction=False)
    run(optimizer, params, make_grads(params))
    assert optimizer.state_dict()["param_groups"][0]["step"] == STEPS


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_that_decays_after_the_momentum(nesterov):
    def update(w, g, state, t, norm):
        state["m"] = g if t == 1 else 0.9 * state["m"] + g
        step = g + 0.9 * state["m"] if nesterov else state["m"]
        return w - 0.1 * (step + 0.2 * w)

    options = {"momentum": 0.9, "weight_decay": 0.2, "nesterov": nesterov, "wd_after_momentum": True}
    assert_like(functools.partial(FusedSGD, lr=0.1, **options), update)


def test_adagrad_that_decays_weights_apart():
    def update(w, g, state, t, norm):
        state["h"] = state.get("h", 0.0) + g * g
        return w - 0.1 * (g / (state["h"].sqrt() + 1e-10) + 0.2 * w)

    assert_like(functools.partial(FusedAdagrad, lr=0.1, weight_decay=0.2, adagrad_w_mode=True), update)


@pytest.mark.parametrize("use_nvlamb", [False, True])
@pytest.mark.parametrize("max_grad_norm", [1.0, 1e6, 0.0, None])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("kind", [FusedLAMB, FusedMixedPrecisionLamb])
def test_lamb(kind, adam_w_mode, weight_decay, max_grad_norm, use_nvlamb):
    def update(w, g, state, t, norm):
        g = g / max(norm / max_grad_norm, 1.0) if max_grad_norm else g
        m, v = adam_moments(g if adam_w_mode else g + weight_decay * w, state, (0.9, 0.95))
        step = (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-6) + weight_decay * w * adam_w_mode
        ratio = 1.0
        if (weight_decay or use_nvlamb) and w.norm() and step.norm():
            ratio = w.norm() / step.norm()
        return w - 0.1 * ratio * step

    options = LAMB_OPTIONS | {"weight_decay": weight_decay, "adam_w_mode": adam_w_mode}
    options |= {"max_grad_norm": max_grad_norm, "use_nvlamb": use_nvlamb}
    assert_like(functools.partial(kind, **options), update)


@pytest.mark.parametrize("grad_averaging", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_lamb_averages_and_corrects_as_told(bias_correction, grad_averaging):
    def update(w, g, state, t, norm):
        g = g / max(norm, 1.0)
        state["m"] = 0.9 * state.get("m", 0.0) + (0.1 if grad_averaging else 1.0) * g
        state["v"] = 0.95 * state.get("v", 0.0) + 0.05 * g * g
        first, second = (1 - 0.9**t, 1 - 0.95**t) if bias_correction else (1.0, 1.0)
        step = (state["m"] / first) / ((state["v"] / second).sqrt() + 1e-6) + 0.01 * w
        return w - 0.1 * step * (w.norm() / step.norm() if w.norm() and step.norm() else 1.0)

    options = LAMB_OPTIONS | {"bias_correction": bias_correction, "grad_averaging": grad_averaging}
    assert_like(functools.partial(FusedLAMB, **options), update)


def test_lamb_clips_all_groups_together():
    params = make_params(shapes=[(3,), (4,)])
    expected = twins(params)
    history = [[grad * 10 for grad in grads] for grads in make_grads(params)]
    run(FusedLAMB([{"params": [param]} for param in params]), params, history)
    for grads in history:
        norm = torch.cat(grads).norm()
        grads[:] = [grad / norm for grad in grads]
    run(FusedLAMB(expected, max_grad_norm=0.0), expected, history)
    # The two divide in another order.
    torch.testing.assert_close(params, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reg_inside_moment", [False, True])
@pytest.mark.parametrize("norm_type", [2, 0])
@pytest.mark.parametrize("init_zero", [False, True])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("grad_averaging", [True, False])
def test_novograd(grad_averaging, bias_correction, init_zero, norm_type, reg_inside_moment):
    def update(w, g, state, t, norm):
        size = (g.norm() if norm_type == 2 else g.abs().max()) if g.numel() else g.sum()
        old = state.get("v", 0.0 * size if init_zero else size)
        if norm_type == 2:
            state["v"] = (0.98 * old**2 + 0.02 * size**2).sqrt()
        else:
            state["v"] = 0.98 * old + 0.02 * size
        first, second = (1 - 0.95**t, (1 - 0.98**t) ** 0.5) if bias_correction else (1.0, 1.0)
        divisor = state["v"] / second + 1e-8
        g = g / divisor + 0.1 * w if reg_inside_moment else g
        state["m"] = 0.95 * state.get("m", 0.0) + (0.05 if grad_averaging else 1.0) * g
        step = state["m"] / first
        return w - 0.1 * (step if reg_inside_moment else step / divisor + 0.1 * w)

    make = functools.partial(
        FusedNovoGrad, lr=0.1, betas=(0.95, 0.98), weight_decay=0.1, bias_correction=bias_correction,
        grad_averaging=grad_averaging, init_zero=init_zero, norm_type=norm_type,
        reg_inside_moment=reg_inside_moment,
    )  # fmt: skip
    assert_like(make, update)


# Kinds of parameters


def transposed(param):
    return Parameter(param.detach().t().contiguous().t())


def with_gaps(param):
    wide = torch.full((*param.shape[:-1], 2 * param.shape[-1]), 7.0)
    wide[..., ::2] = param.detach()
    return Parameter(wide[..., ::2])


def channels_last(param):
    return Parameter(param.detach().contiguous(memory_format=torch.channels_last))


@EVERY
@pytest.mark.parametrize(
    ("shape", "lay_out"), [((3, 4), transposed), ((3, 4), with_gaps), ((2, 3, 4, 5), channels_last)]
)
def test_the_layout_of_memory_changes_no_result(make, shape, lay_out):
    plain = make_params(shapes=[shape])
    params = [lay_out(plain[0])]
    history = make_grads(plain)
    run(make(plain), plain, history)
    run(make(params), params, history)
    # Norms are sums in the order of memory.
    torch.testing.assert_close(params, plain, rtol=1e-5, atol=1e-6)


def test_what_lies_in_the_gaps_is_not_written():
    memory = torch.full((3, 8), 7.0)
    param = Parameter(memory[:, ::2])
    run(FusedAdam([param]), [param], make_grads([param]))
    assert memory[:, 1::2].eq(7.0).all()
    assert not memory[:, ::2].eq(7.0).any()


@EVERY
@pytest.mark.parametrize("half", HALF_TYPES, ids=str)
def test_half_parameters_are_updated_in_float32_and_rounded_once(make, half):
    params = make_params(half)
    optimizer = make(params)
    keeps_full = optimizer.master_weights
    full = [Parameter(param.detach().float()) for param in params]
    oracle = make(full)
    for grads in make_grads(params):
        step_with(optimizer, params, grads)
        step_with(oracle, full, [grad.float() for grad in grads])
        rounded = [param.detach().to(half) for param in full]
        assert_same_bits(params, rounded)
        if not keeps_full:
            for param, value in zip(full, rounded, strict=True):
                param.data.copy_(value)
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    assert {tensor.dtype for tensor in tensors} <= {torch.float32}


@EVERY
def test_types_may_be_mixed(make):
    params = [Parameter(torch.zeros(3, dtype=dtype)) for dtype in (torch.float64, torch.float32, *HALF_TYPES)]
    run(make(params), params, make_grads(params))
    assert all((param != 0).all() for param in params)


@EVERY
def test_parameters_without_gradients_stay(make):
    params = make_params()
    before = snapshot(params)
    optimizer = make(params)
    state = state_of(optimizer)
    optimizer.step()
    assert snapshot(params) == before
    assert state_of(optimizer) == state


@EVERY
def test_sparse_gradients_are_refused(make):
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = make(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"takes no sparse gradients.*SparseAdam"):
        optimizer.step()


def test_small_updates_are_not_lost_with_master_weights():
    param, other = (Parameter(torch.ones(1, dtype=torch.float16)) for _ in range(2))
    history = [[torch.ones(1, dtype=torch.float16)] for _ in range(20)]
    run(FusedAdam([param], 1e-4, master_weights=True), [param], history)
    run(FusedAdam([other], 1e-4), [other], history)
    assert other.item() == 1.0  # 1e-4 is below half of the spacing of float16 at 1
    assert param.item() == pytest.approx(1 - 20e-4, abs=2**-11)


def test_master_weights_follow_what_is_written_into_the_model():
    param = Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = FusedAdam([param], 1e-4, master_weights=True)
    run(optimizer, [param], [[torch.ones(1, dtype=torch.float16)]])
    param.data.fill_(4.0)
    run(optimizer, [param], [[torch.ones(1, dtype=torch.float16)]])
    assert optimizer.state[param]["master_param"].item() == pytest.approx(4 - 1e-4)


# Arguments


SIGNATURES = {
    FusedAdam: "lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none capturable "
    "master_weights",
    FusedSGD: "lr momentum dampening weight_decay nesterov wd_after_momentum materialize_master_grads "
    "set_grad_none",
    FusedAdagrad: "lr eps weight_decay set_grad_none adagrad_w_mode",
    FusedLAMB: "lr bias_correction betas eps weight_decay amsgrad adam_w_mode grad_averaging set_grad_none "
    "max_grad_norm use_nvlamb",
    FusedNovoGrad: "lr bias_correction betas eps weight_decay amsgrad reg_inside_moment grad_averaging "
    "norm_type init_zero set_grad_none",
    FusedMixedPrecisionLamb: "lr step bias_correction betas eps weight_decay amsgrad adam_w_mode "
    "grad_averaging max_grad_norm use_nvlamb reduced_precision_dtype",
}


@pytest.mark.parametrize("kind", SIGNATURES)
def test_positional_arguments_come_in_the_order_of_apex(kind):
    parameters = list(inspect.signature(kind).parameters.values())
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    assert names == ["params", *SIGNATURES[kind].split()]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (FusedAdam, {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8,
                     "weight_decay": 0.0}),
        (FusedAdagrad, {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
        (FusedLAMB, {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-6,
                     "weight_decay": 0.01, "grad_averaging": True, "max_grad_norm": 1.0}),
        (FusedNovoGrad, {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8,
                         "weight_decay": 0.0, "grad_averaging": True, "norm_type": 2, "init_zero": False}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)  # fmt: skip
def test_param_groups_hold_the_options_that_those_of_apex_did(kind, expected):
    assert kind(make_params()).state_dict()["param_groups"] == [{**expected, "params": [0, 1, 2, 3, 4]}]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda params: FusedAdam(params, lr=-1.0), r"lr=-1.0"),
        (lambda params: FusedAdam(params, eps_inside_sqrt=True), "eps_inside_sqrt=True"),
        (lambda params: FusedSGD(params), "lr=None"),
        (lambda params: FusedSGD(params, 0.1, nesterov=True), "expected a momentum above 0"),
        (lambda params: FusedSGD(params, 0.1, 0.9, 0.1, nesterov=True), "a dampening of 0"),
        (lambda params: FusedNovoGrad(params, norm_type=1), "norm_type=1"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(make_params())


@pytest.mark.parametrize("kind", [FusedLAMB, FusedNovoGrad, FusedMixedPrecisionLamb])
def test_amsgrad_is_refused_where_there_is_none(kind):
    with pytest.raises(RuntimeError, match=f"{kind.__name__} takes no amsgrad=True"):
        kind(make_params(), amsgrad=True)


def test_what_has_no_meaning_is_named():
    with pytest.warns(UserWarning, match="materialize_master_grads=False has no meaning"):
        FusedSGD(make_params(), 0.1, materialize_master_grads=False)


@pytest.mark.parametrize("name", ["grads", "output_params", "scale", "grad_norms"])
def test_what_step_took_in_2018_is_refused(name):
    with pytest.raises(RuntimeError, match=r"takes .* no more"):
        FusedAdam(make_params()).step(**{name: 1})


def test_the_first_arguments_of_adam_still_work():
    params = make_params(shapes=[(3,), (4,)])
    expected = twins(params)
    history = [[grad * 10 for grad in grads] for grads in make_grads(params)]
    optimizer = FusedAdam(params, lr=0.1, bias_correction=False, eps_inside_sqrt=False, max_grad_norm=1.0)
    run(optimizer, params, history)
    clipped = [[grad / torch.cat(grads).norm() for grad in grads] for grads in history]
    run(FusedAdam(expected, lr=0.1, bias_correction=False), expected, clipped)
    # The two divide in another order.
    torch.testing.assert_close(params, expected, rtol=1e-5, atol=1e-6)


def test_mixed_precision_lamb_begins_at_a_step():
    params = make_params()
    optimizer = FusedMixedPrecisionLamb(params, step=7, reduced_precision_dtype=torch.float16)
    run(optimizer, params, make_grads(params, 1))
    assert optimizer.param_groups[0]["step"] == 8


# What every optimizer of torch does


@EVERY
def test_a_closure_is_called_with_gradients_on(make):
    (param,) = make_params(shapes=[(3,)])
    optimizer = make([param])
    before = snapshot(param)

    def closure():
        optimizer.zero_grad()
        loss = (param - 1).square().sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.requires_grad
    assert snapshot(param) != before


@EVERY
def test_a_scheduler_changes_the_rate(make):
    params = make_params()
    optimizer = make(params)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    run(optimizer, params, make_grads(params, 1))
    scheduler.step()
    before = snapshot(params)
    run(optimizer, params, make_grads(params, 1))
    assert snapshot(params) == before


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_does_as_the_constructor_says(to_none):
    params = make_params()
    for make in (FusedAdam, FusedLAMB, FusedNovoGrad, FusedAdagrad, functools.partial(FusedSGD, lr=0.1)):
        optimizer = make(params, set_grad_none=to_none)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.zero_grad()
        assert all((param.grad is None) is to_none for param in params)
        assert to_none or not any(param.grad.any() for param in params)


def test_zero_grad_takes_set_to_none():
    params = make_params()
    optimizer = FusedAdam(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.zero_grad(set_to_none=False)
    assert [param.grad.sum().item() for param in params] == [0.0] * len(params)
    optimizer.zero_grad(True)
    assert [param.grad for param in params] == [None] * len(params)


def test_only_sgd_keeps_gradients_by_default():
    params = make_params()
    found = {kind.__name__: kind(params).set_grad_none for kind in SIGNATURES if kind is not FusedSGD}
    assert set(found.values()) == {True}
    assert FusedSGD(params, 0.1).set_grad_none is False


@EVERY
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "checkpoint"])
def test_a_copy_goes_on_as_the_original(make, how):
    params = make_params()
    optimizer = make(params)
    history = make_grads(params, 2 * STEPS)
    run(optimizer, params, history[:STEPS])
    if how == "deepcopy":
        copied_params, copied = copy.deepcopy((params, optimizer))
    elif how == "pickle":
        copied_params, copied = pickle.loads(pickle.dumps((params, optimizer)))
    else:
        copied_params = twins(params)
        copied = make(copied_params)
        copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert state_of(copied) == state_of(optimizer)
    run(optimizer, params, history[STEPS:])
    run(copied, copied_params, history[STEPS:])
    assert_same_bits(copied_params, params)
    assert state_of(copied) == state_of(optimizer)


@EVERY
@pytest.mark.parametrize("half", HALF_TYPES, ids=str)
def test_a_checkpoint_of_half_parameters_goes_on_exactly(make, half):
    params = make_params(half)
    optimizer = make(params)
    history = make_grads(params, 2 * STEPS)
    run(optimizer, params, history[:STEPS])
    loaded_params = twins(params)
    loaded = make(loaded_params)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert state_of(loaded) == state_of(optimizer)
    run(optimizer, params, history[STEPS:])
    run(loaded, loaded_params, history[STEPS:])
    assert_same_bits(loaded_params, params)


@EVERY
def test_half_state_is_taken_over(make):
    """As it is in checkpoints of apex's early optimizers."""
    params = make_params(torch.float16)
    optimizer = make(params)
    run(optimizer, params, make_grads(params))
    for state in optimizer.state.values():
        state.update({name: value.half() for name, value in state.items() if name != "step"})
    run(optimizer, params, make_grads(params))
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    assert {tensor.dtype for tensor in tensors} <= {torch.float32}


def test_the_steps_of_adam_are_where_apex_had_them():
    params = make_params()
    optimizer = FusedAdam(params)
    run(optimizer, params, make_grads(params))
    assert optimizer.param_groups[0]["step"] == STEPS
    saved = optimizer.state_dict()["param_groups"][0]["step"]
    assert (saved, type(saved)) == (STEPS, int)


def continue_torch(make_torch, params, states):
    """An optimizer of torch in a state."""
    optimizer = make_torch(params)
    for param, state in zip(params, states, strict=True):
        optimizer.state[param].update({name: value.clone() for name, value in state.items()})
    return optimizer


@pytest.mark.parametrize("step", [3, torch.tensor([3], dtype=torch.int32)], ids=["int", "capturable"])
def test_a_checkpoint_of_apexs_adam_goes_on_exactly(step):
    params = make_params()
    states = [{"exp_avg": torch.randn(s), "exp_avg_sq": torch.rand(s)} for s in SHAPES]
    group = {
        "lr": 0.02, "bias_correction": True, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.1,
        "step": step, "params": list(range(len(SHAPES))),
    }  # fmt: skip
    expected = twins(params)
    oracle = continue_torch(
        lambda ps: torch.optim.AdamW(ps, 0.02, (0.8, 0.9), weight_decay=0.1, fused=True),
        expected, [{**state, "step": torch.tensor(3.0)} for state in states],
    )  # fmt: skip
    optimizer = FusedAdam(params)
    optimizer.load_state_dict({"state": dict(enumerate(states)), "param_groups": [group]})
    assert optimizer.param_groups[0]["step"] == 3
    history = make_grads(params)
    run(optimizer, params, history)
    run(oracle, expected, history)
    assert_same_bits(params, expected)


def test_a_checkpoint_of_torchs_adamw_goes_on_exactly():
    params = make_params()
    oracle = torch.optim.AdamW(params, 0.02, weight_decay=0.1, fused=True)
    history = make_grads(params, 2 * STEPS)
    run(oracle, params, history[:STEPS])
    loaded_params = twins(params)
    loaded = FusedAdam(loaded_params)
    loaded.load_state_dict(copy.deepcopy(oracle.state_dict()))
    run(oracle, params, history[STEPS:])
    run(loaded, loaded_params, history[STEPS:])
    assert_same_bits(loaded_params, params)


def test_torchs_adamw_goes_on_from_a_checkpoint_of_ours():
    params = make_params()
    optimizer = FusedAdam(params, 0.02, weight_decay=0.1)
    history = make_grads(params, 2 * STEPS)
    run(optimizer, params, history[:STEPS])
    loaded_params = twins(params)
    oracle = torch.optim.AdamW(loaded_params, fused=True)
    oracle.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, params, history[STEPS:])
    run(oracle, loaded_params, history[STEPS:])
    assert_same_bits(loaded_params, params)


def test_a_checkpoint_of_apexs_adagrad_goes_on_exactly():
    params = make_params()
    states = [{"sum": torch.rand(shape)} for shape in SHAPES]
    group = {"lr": 0.1, "eps": 1e-10, "weight_decay": 0.0, "params": list(range(len(SHAPES)))}
    expected = twins(params)
    oracle = continue_torch(
        lambda ps: torch.optim.Adagrad(ps, 0.1, fused=True),
        expected, [{**state, "step": torch.tensor(9.0)} for state in states],
    )  # fmt: skip
    optimizer = FusedAdagrad(params)
    optimizer.load_state_dict({"state": dict(enumerate(states)), "param_groups": [group]})
    history = make_grads(params)
    run(optimizer, params, history)
    run(oracle, expected, history)
    assert_same_bits(params, expected)


def novograd_checkpoint(states, kept):
    group = {
        "lr": 0.1, "bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0,
        "grad_averaging": True, "norm_type": 2, "init_zero": False, "step": 5, "exp_avg_sq": kept,
        "params": [0, 1, 2],
    }  # fmt: skip
    return {"state": states, "param_groups": [group]}


def test_the_norms_of_novograd_do_not_share_memory():
    params = make_params()
    optimizer = FusedNovoGrad(params)
    run(optimizer, params, make_grads(params))
    # A checkpoint would hold all of it for each.
    assert [optimizer.state[param]["exp_avg_sq"].untyped_storage().nbytes() for param in params] == [4] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_checkpoint_of_apexs_novograd_keeps_the_norms_of_a_group_together(dtype):
    params = make_params(dtype, [(2,), (3,), (4,)])  # the second never had a gradient
    states = {index: {"exp_avg": torch.ones(size, dtype=dtype)} for index, size in ((0, 2), (2, 4))}
    full, none = torch.tensor([1.25, 2.5]), torch.tensor([])
    kept = [none, full] if dtype is torch.float32 else [full, none]
    optimizer = FusedNovoGrad(params)
    optimizer.load_state_dict(novograd_checkpoint(states, kept))
    assert "exp_avg_sq" not in optimizer.param_groups[0]
    assert [optimizer.state[params[index]]["exp_avg_sq"].item() for index in (0, 2)] == [1.25, 2.5]
    run(optimizer, params, make_grads(params, 1))
    assert optimizer.param_groups[0]["step"] == 6


def test_a_checkpoint_of_novograd_with_too_few_norms_is_refused():
    optimizer = FusedNovoGrad(make_params(shapes=[(2,), (3,), (4,)]))
    states = {0: {"exp_avg": torch.ones(2)}}
    with pytest.raises(ValueError, match="found 0 norms in exp_avg_sq for 1 parameters"):
        optimizer.load_state_dict(novograd_checkpoint(states, [None, None]))


# A GradScaler of torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        # With a large eps the scale of gradients counts.
        functools.partial(FusedAdam, eps=1.0),
        functools.partial(FusedSGD, lr=0.1, momentum=0.9),
        FusedAdagrad,
        functools.partial(FusedMixedPrecisionLamb, eps=1.0, max_grad_norm=0.0),
    ],
    ids=["adam", "sgd", "adagrad", "lamb"],
)
def test_a_grad_scaler_has_the_step_unscale_and_skip(kind, dtype):
    (param,) = make_params(dtype, [(3,)])
    (expected,) = twins([param])
    optimizer, oracle = kind([param]), kind([expected])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    batches = [
        torch.tensor(batch) for batch in ([INF, 1.0, 1.0], [1.0, -2.0, 3.0], [1.0, 1.0, INF], [2.0, 1.0, 1.0])
    ]
    for batch in batches:
        optimizer.zero_grad()
        before = snapshot(param)
        scaler.scale((param * batch.to(dtype)).sum().float()).backward()
        scaler.step(optimizer)
        scaler.update()
        if batch.isinf().any():
            assert snapshot(param) == before
        else:
            step_with(oracle, [expected], [batch.to(dtype)])
        assert_same_bits([param], [expected])


def test_a_grad_scaler_unscales_before_adam_clips():
    (param,) = make_params(shapes=[(3,)])
    (expected,) = twins([param])
    optimizer = FusedAdam([param], eps=1.0, max_grad_norm=1.0)
    oracle = FusedAdam([expected], eps=1.0, max_grad_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    batch = torch.tensor([0.25, -0.125, 0.5])  # of a norm below 1
    scaler.scale((param * batch).sum()).backward()
    scaler.step(optimizer)
    step_with(oracle, [expected], [batch])
    assert_same_bits([param], [expected])


# Levels


def open_level(make, level, **options):
    torch.manual_seed(1)
    model = Dense()
    optimizer = make(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return model, optimizer


def iterate(model, optimizer, batch, factor=1.0):
    optimizer.zero_grad()
    loss = model(batch).float().square().mean() * factor
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.exhaustive(keep=16)
@EVERY
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("first", [0, 2])
def test_a_skipped_step_changes_no_parameter_and_no_state(make, level, first):
    model, optimizer = open_level(make, level, loss_scale=amp.DynamicLossScale(2.0**8))
    batches = [torch.randn(5, 4) for _ in range(4)]
    for batch in batches[:first]:
        iterate(model, optimizer, batch)
    before = snapshot([list(model.parameters()), list(amp.master_params(optimizer))]), state_of(optimizer)
    iterate(model, optimizer, batches[2], INF)
    assert amp.step_was_skipped(optimizer)
    assert before == (
        snapshot([list(model.parameters()), list(amp.master_params(optimizer))]),
        state_of(optimizer),
    )
    iterate(model, optimizer, batches[3])
    assert not amp.step_was_skipped(optimizer)
    assert snapshot(list(model.parameters())) != before[0][0]


@EVERY
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_the_trajectory_is_that_of_a_float32_optimizer(make, level):
    model = Scalar(3)
    optimizer = make(model.parameters())
    expected = Parameter(model.weight.detach().clone())
    oracle = make([expected])
    dynamic = amp.DynamicLossScale(2.0**8, growth_interval=2)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=dynamic, verbosity=0)
    # Whole numbers, which no half type rounds: the gradient is the batch at every level.
    for batch in ([1.0, -2.0, 3.0], [4.0, 1.0, -1.0], [-2.0, 5.0, 2.0]):
        batch = torch.tensor(batch)
        optimizer.zero_grad()
        with amp.scale_loss(model(batch).float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        step_with(oracle, [expected], [batch])
        assert_same_bits(amp.master_params(optimizer), [expected])


@pytest.mark.exhaustive(keep=8)
@EVERY
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_regression_learns(make, level):
    model, optimizer = open_level(make, level)
    torch.manual_seed(2)
    batch = torch.randn(32, 4)
    goal = torch.tanh(batch[:, :2]) + 1.0

    def loss_now():
        return (model(batch).float() - goal).square().mean()

    first = float(loss_now().detach())
    for _ in range(80):
        optimizer.zero_grad()
        with amp.scale_loss(loss_now(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert float(loss_now().detach()) < 0.75 * first


@EVERY
def test_half_parameters_learn_at_o3(make):
    model, optimizer = open_level(make, "O3")
    torch.manual_seed(2)
    batch = torch.randn(32, 4)
    losses = [iterate(model, optimizer, batch) for _ in range(40)]
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_state_from_before_initialize_goes_to_the_masters(level):
    model = Dense()
    optimizer = FusedAdam(model.parameters())
    expected_params = twins(list(model.parameters()))
    oracle = torch.optim.AdamW(expected_params, weight_decay=0.0, fused=True)
    history = make_grads(expected_params)
    run(optimizer, list(model.parameters()), history[:2])
    run(oracle, expected_params, history[:2])
    optimizer.zero_grad()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    run(optimizer, list(amp.master_params(optimizer)), history[2:])
    run(oracle, expected_params, history[2:])
    assert_same_bits(amp.master_params(optimizer), expected_params)
    assert optimizer.param_groups[0]["step"] == STEPS


# FP16_Optimizer


@pytest.mark.parametrize("options", [{"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}], ids=str)
def test_fp16_optimizer_with_adam_over_half_parameters(options):
    model = Dense().half()
    optimizer = FP16_Optimizer(FusedAdam(model.parameters(), lr=0.05, max_grad_norm=1.0), **options)
    batch = torch.randn(16, 4).half()
    losses = []
    for _ in range(20):
        loss = model(batch).float().square().mean()
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert optimizer.cur_scale == optimizer.loss_scale
    assert all(master.dtype is torch.float32 for group in optimizer.fp32_groups for master in group)
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("level", ["O0", "O5"])
def test_a_subclass_may_hand_the_kernel_of_its_class_to_the_applier(level):
    class ByHand(FusedAdam):
        """Steps in the manner of toolkits that subclassed FusedAdam."""

        def step(self, closure=None):
            group = self.param_groups[0]
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                if not self.state[param]:
                    zeros = torch.zeros_like(param, dtype=torch.float32)
                    self.state[param] = {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}
            group["step"] = group.get("step", 0) + 1
            states = [[self.state[param][name] for param in params] for name in ("exp_avg", "exp_avg_sq")]
            multi_tensor_applier(
                self.multi_tensor_adam,
                self._dummy_overflow_buf,
                [[param.grad for param in params], params, *states],
                *(group["lr"], *group["betas"], group["eps"], group["step"], 1, 1, group["weight_decay"]),
            )

    ends = []
    for kind in (ByHand, FusedAdam):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for _ in range(3):
            optimizer.zero_grad()
            with amp.scale_loss(model(torch.ones(2, 3)).square().sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        ends.append([param.detach().clone() for param in amp.master_params(optimizer)])
        amp.uninitialize()
    # Another order of operations in the kernel: an ulp or two a step.
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-7)


class Ops(TorchDispatchMode):
    """Counts the ops that put values into memory."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count += any(word in name for word in ("copy", "zero", "fill", "full", "lift_fresh"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [FusedAdam, FusedAdagrad])
def test_a_first_step_makes_the_state_of_all_parameters_at_once(make):
    def count(size):
        params = [Parameter(torch.ones(3)) for _ in range(size)]
        for param in params:
            param.grad = torch.ones(3)
        with Ops() as ops:
            make(params).step()
        return ops.count

    assert count(9) == count(1)
