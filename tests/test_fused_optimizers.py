"""FusedAdam and its kin: torch's optimizers bit for bit, or plain references, with apex's arguments."""

import copy
import functools
import inspect

import pytest
import torch
from torch.nn import Parameter

import ampatch as amp
from ampatch.apex import amp_C, optimizers
from ampatch.apex.optimizers import (
    FP16_Optimizer,
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedNovoGrad,
    FusedSGD,
)
from apex_rows import shows
from fused import (
    EVERY,
    HALF_TYPES,
    INF,
    STEPS,
    make_grads,
    make_params,
    named,
    run,
    state_of,
    step_with,
    twins,
)
from helpers import Dense, Scalar, assert_same_bits, scaled_backward, snapshot
from stepping import run_iteration

# Against torch, bit for bit


ADAM = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


@shows("companions-optimizers")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("make", "make_torch"),
    [
        (named(FusedAdam, lr=0.1), named(torch.optim.AdamW, lr=0.1, weight_decay=0.0)),
        (named(FusedAdam, **ADAM, amsgrad=True), named(torch.optim.AdamW, **ADAM, amsgrad=True)),
        (named(FusedAdam, **ADAM, adam_w_mode=False), named(torch.optim.Adam, **ADAM)),
        (
            named(FusedAdam, lr=torch.tensor(0.1)),
            named(torch.optim.AdamW, lr=torch.tensor(0.1), weight_decay=0.0),
        ),
        *[
            (named(FusedSGD, lr=0.1, **options), named(torch.optim.SGD, lr=0.1, **options))
            for options in (
                {"weight_decay": 0.1},
                {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
                {"momentum": 0.9, "nesterov": True},
            )
        ],
        (named(FusedAdagrad, lr=0.1, eps=1e-6), named(torch.optim.Adagrad, lr=0.1, eps=1e-6)),
        (named(FusedAdagrad, weight_decay=0.1), named(torch.optim.Adagrad, weight_decay=0.1)),
    ],
)
def test_a_step_is_that_of_torchs_fused_optimizer(make, make_torch, dtype):
    params = make_params(dtype)
    expected = twins(params)
    history = make_grads(params)
    run(make(params), params, history)
    run(make_torch(expected, fused=True), expected, history)
    assert_same_bits(params, expected)


def test_complex_parameters_take_the_way_that_is_not_fused():
    params = [Parameter(torch.randn(3, dtype=torch.complex64))]
    expected = twins(params)
    history = [[torch.randn(3, dtype=torch.complex64)] for _ in range(STEPS)]
    optimizer = FusedAdam(params, 0.1)
    run(optimizer, params, history)
    run(torch.optim.AdamW(expected, 0.1, weight_decay=0.0), expected, history)
    assert_same_bits(params, expected)
    assert not optimizer._step_supports_amp_scaling


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
    assert_like(named(FusedAdam, lr=0.01, bias_correction=False, **options), update)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_that_decays_after_the_momentum(nesterov):
    def update(w, g, state, t, norm):
        state["m"] = g if t == 1 else 0.9 * state["m"] + g
        step = g + 0.9 * state["m"] if nesterov else state["m"]
        return w - 0.1 * (step + 0.2 * w)

    options = {"momentum": 0.9, "weight_decay": 0.2, "nesterov": nesterov, "wd_after_momentum": True}
    assert_like(named(FusedSGD, lr=0.1, **options), update)


def test_adagrad_that_decays_weights_apart():
    def update(w, g, state, t, norm):
        state["h"] = state.get("h", 0.0) + g * g
        return w - 0.1 * (g / (state["h"].sqrt() + 1e-10) + 0.2 * w)

    assert_like(named(FusedAdagrad, lr=0.1, weight_decay=0.2, adagrad_w_mode=True), update)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize(
    ("adam_w_mode", "weight_decay", "max_grad_norm", "use_nvlamb"),
    [(True, 0.1, 1.0, False), (False, 0.1, 0.0, False), (True, 0.0, None, False), (False, 0.0, 1.0, True)],
)
def test_lamb(adam_w_mode, weight_decay, max_grad_norm, use_nvlamb, correct, average):
    def update(w, g, state, t, norm):
        g = g / max(norm / max_grad_norm, 1.0) if max_grad_norm else g
        g = g if adam_w_mode else g + weight_decay * w
        state["m"] = 0.9 * state.get("m", 0.0) + (0.1 if average else 1.0) * g
        state["v"] = 0.95 * state.get("v", 0.0) + 0.05 * g * g
        first, second = (1 - 0.9**t, 1 - 0.95**t) if correct else (1.0, 1.0)
        step = (state["m"] / first) / ((state["v"] / second).sqrt() + 1e-6) + weight_decay * w * adam_w_mode
        is_scaled = (weight_decay or use_nvlamb) and w.norm() and step.norm()
        return w - 0.1 * (w.norm() / step.norm() if is_scaled else 1.0) * step

    options = {"weight_decay": weight_decay, "adam_w_mode": adam_w_mode, "max_grad_norm": max_grad_norm}
    options |= {"use_nvlamb": use_nvlamb, "bias_correction": correct, "grad_averaging": average}

    def make(params):  # in groups of their own, which are clipped together
        groups = [{"params": [param]} for param in params]
        return FusedLAMB(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-6, **options)

    assert_like(make, update)


@pytest.mark.parametrize(("reg_inside_moment", "norm_type"), [(False, 2), (True, 2), (True, 0)])
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


@pytest.mark.exhaustive(keep=15)
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
    with pytest.raises(RuntimeError, match=r"does not take sparse gradients.*SparseAdam"):
        optimizer.step()


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
}


def test_every_optimizer_of_the_room_meets_the_tests_of_all():
    expected = {getattr(optimizers, name) for name in optimizers.__all__} - {optimizers.FP16_Optimizer}
    assert {make.func for make in EVERY.kwargs["argvalues"]} == expected == set(SIGNATURES)


@pytest.mark.parametrize("kind", SIGNATURES)
def test_positional_arguments_come_in_the_order_of_apex(kind):
    parameters = list(inspect.signature(kind).parameters.values())
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    assert names == ["params", *SIGNATURES[kind].split()]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (named(FusedAdam, lr=-1.0), ValueError, r"lr=-1.0"),
        (named(FusedAdam, eps_inside_sqrt=True), ValueError, "eps_inside_sqrt=True"),
        (FusedSGD, ValueError, "didn't specify a value of required optimization parameter lr"),
        (named(FusedAdam, lr=None), ValueError, "required optimization parameter lr"),
        (named(FusedSGD, lr=0.1, nesterov=True), ValueError, "expected a momentum above 0"),
        (named(FusedSGD, lr=0.1, momentum=0.9, dampening=0.1, nesterov=True), ValueError, "a dampening of 0"),
        (named(FusedNovoGrad, norm_type=1), ValueError, "norm_type=1"),
        (named(FusedLAMB, amsgrad=True), RuntimeError, "FusedLAMB does not take amsgrad=True"),
        (named(FusedNovoGrad, amsgrad=True), RuntimeError, "FusedNovoGrad does not take amsgrad=True"),
        (named(FusedSGD, lr=0.1, materialize_master_grads=False), UserWarning, "has no meaning"),
        (lambda params: FusedAdam(params).step(grads=1), RuntimeError, r"no longer takes grads="),
    ],
)
def test_bad_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):  # a warning is an error here
        make(make_params())


@pytest.mark.parametrize("kind", SIGNATURES)
def test_groups_may_have_all_learning_rates(kind):
    params = make_params(shapes=[(3,), (2,)])
    expected = twins(params)
    rates, history = (0.1, 0.01), make_grads(params)
    groups = [{"params": [param], "lr": rate} for param, rate in zip(params, rates, strict=True)]
    optimizer = copy.deepcopy(kind([{"params": [], "lr": 1.0}, *groups], lr=None))
    copies = [param for group in optimizer.param_groups for param in group["params"]]
    with pytest.raises(ValueError, match="required optimization parameter lr"):
        optimizer.add_param_group({"params": make_params(shapes=[(2,)])})
    run(optimizer, copies, history)
    alike = [{"params": [param], "lr": rate} for param, rate in zip(expected, rates, strict=True)]
    run(kind(alike, lr=7.0), expected, history)
    assert_same_bits(copies, expected)


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


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_does_as_the_constructor_says_if_it_is_not_told(to_none):
    params = make_params()
    for make in (FusedAdam, FusedLAMB, FusedNovoGrad, FusedAdagrad, named(FusedSGD, lr=0.1)):
        optimizer = make(params, set_grad_none=to_none)
        for clear in (optimizer.zero_grad, named(optimizer.zero_grad, set_to_none=not to_none)):
            for param in params:
                param.grad = torch.ones_like(param)
            clear()
            is_none = to_none is (clear == optimizer.zero_grad)
            assert all((param.grad is None) is is_none for param in params)
            assert is_none or not any(param.grad.any() for param in params)
    assert FusedAdam(params).set_grad_none
    assert not FusedSGD(params, 0.1).set_grad_none


# A GradScaler of torch


# With a large eps the scale of gradients counts.
STEPPED_BY_SCALER = [
    named(FusedAdam, eps=1.0),
    named(FusedSGD, lr=0.1, momentum=0.9),
    named(FusedAdagrad),
]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, dtype) for kind in STEPPED_BY_SCALER for dtype in (torch.float32, torch.float16)),
        (named(FusedAdam, eps=1.0, max_grad_norm=1.0), torch.float32),  # before it clips
    ],
)
def test_a_grad_scaler_has_the_step_unscale_and_skip(kind, dtype):
    (param,) = make_params(dtype, [(3,)])
    (expected,) = twins([param])
    optimizer, oracle = kind([param]), kind([expected])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    batches = [
        torch.tensor(batch)  # the second is of a norm below 1
        for batch in ([INF, 1.0, 1.0], [0.25, -0.125, 0.5], [1.0, 1.0, INF], [2.0, 1.0, 1.0])
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


# Levels


def open_level(make, level, **options):
    torch.manual_seed(1)
    model = Dense()
    optimizer = make(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return model, optimizer


@pytest.mark.exhaustive(keep=12)
@EVERY
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("first", [0, 2])
def test_a_skipped_step_changes_no_parameter_and_no_state(make, level, first):
    model, optimizer = open_level(make, level, loss_scale=amp.DynamicLossScale(2.0**8))
    batches = [torch.randn(5, 4) for _ in range(4)]
    for batch in batches[:first]:
        run_iteration(model, optimizer, batch)
    before = snapshot([list(model.parameters()), list(amp.master_params(optimizer))]), state_of(optimizer)
    run_iteration(model, optimizer, batches[2], INF)
    assert amp.step_was_skipped(optimizer)
    assert before == (
        snapshot([list(model.parameters()), list(amp.master_params(optimizer))]),
        state_of(optimizer),
    )
    run_iteration(model, optimizer, batches[3])
    assert not amp.step_was_skipped(optimizer)
    assert snapshot(list(model.parameters())) != before[0][0]


@pytest.mark.exhaustive(keep=11)
@EVERY
@pytest.mark.parametrize("level", ["O1", "O5"])
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
        scaled_backward(model(batch).float().sum(), optimizer)
        optimizer.step()
        step_with(oracle, [expected], [batch])
        assert_same_bits(amp.master_params(optimizer), [expected])


# FP16_Optimizer


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_fp16_optimizer_has_its_first_names_over_an_adam_that_clips(is_dynamic):
    params = make_params(torch.float16, [(3,), (4,)])
    expected = [param.detach().float().requires_grad_() for param in params]
    scale = {"dynamic_loss_scale": True} if is_dynamic else {"static_loss_scale": 128.0}
    optimizer = FP16_Optimizer(FusedAdam(params, lr=0.05, max_grad_norm=1.0), **scale)
    optimizer.backward(sum(param.float().sum() / 2 for param in params))
    optimizer.step()
    grads = [torch.full_like(param, 0.5) for param in expected]
    step_with(FusedAdam(expected, lr=0.05, max_grad_norm=1.0), expected, grads)
    assert_same_bits(optimizer.fp32_groups[0], expected)
    assert optimizer.cur_scale == optimizer.loss_scale
    assert optimizer.cur_iter == optimizer.state_dict()["cur_iter"] == optimizer.dynamic_loss_scale
    optimizer.zero_grad()
    assert all(param.grad is None for param in params)


@pytest.mark.parametrize("kind", [FusedLAMB, FusedSGD, FusedAdagrad, FusedNovoGrad])
def test_a_kernel_that_there_is_none_of_is_explained(kind):
    name = kind.__name__.removeprefix("Fused")
    optimizer = kind(make_params(), lr=0.1)
    with pytest.raises(AttributeError, match=f"does not provide: use apex.optimizers.Fused{name}"):
        getattr(optimizer, f"multi_tensor_{name.lower()}")
    with pytest.raises(AttributeError, match=f"'Fused{name}' object has no attribute 'scales'"):
        optimizer.scales


def test_a_subclass_has_the_kernels_of_its_class_and_the_flag_that_toolkits_hand_to_the_applier():
    for kind, name in ((FusedAdam, "multi_tensor_adam"), (FusedLAMB, "multi_tensor_l2norm")):
        optimizer = type("ByHand", (kind,), {})(make_params())
        assert getattr(optimizer, name) is getattr(amp_C, name)
        assert snapshot(optimizer._dummy_overflow_buf) == snapshot(torch.zeros(1, dtype=torch.int32))
