"""What scripts written for apex expect of O1 and O4, row by row of docs/apex-behaviour.md."""

import operator
import threading
from operator import methodcaller
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch
from ampatch.apex import amp
from apex_rows import EVERY_LEVEL, PATCHED, X, initialized, shows, step

FULL, HALF = torch.float32, torch.bfloat16
CASTS = (Path(__file__).parents[1] / "docs/casts.md").read_text()


def open_o1(level="O4", **kwargs):
    """Opens a session that patches; O4, as most tests: float16 is slow on a CPU."""
    return amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0, **kwargs)


def half(*shape):
    return torch.rand(shape).to(HALF)


def later(module, name, *args, **kwargs):
    """Calls a function that is looked up then, when a session has patched it."""
    return lambda *x: getattr(module, name)(*x, *args, **kwargs)


# ---- Whitelist and blacklist ----

M, V, B = torch.rand(3, 3), torch.rand(3), torch.rand(2, 3, 3)
OF_MATRICES = {
    "addmm": (M, M, M),
    "addmv": (V, M, V),
    "addr": (M, V, V),
    "matmul": (M, M),
    "mm": (M, M),
    "mv": (M, V),
    "bmm": (B, B),
    "addbmm": (M, B, B),
    "baddbmm": (B, B, B),
    "conv_tbc": (B, torch.rand(1, 3, 2), torch.rand(2)),
}
LOWER = {
    **{f"conv{n}d": (torch.rand(1, 2, *[5] * n), torch.rand(3, 2, *[3] * n)) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": (torch.rand(1, 2, *[5] * n), torch.rand(2, 3, *[3] * n)) for n in (1, 2, 3)},
    "linear": (M, M),
    "prelu": (M, torch.tensor([0.1])),
}
LOWER = {name: later(F, name, *args) for name, args in LOWER.items()}
LOWER |= {name: later(torch, name, *args) for name, args in OF_MATRICES.items()}
LOWER |= {"Tensor.matmul": lambda: M.matmul(M), "a @ b": lambda: M @ M}
LOWER |= {name: lambda name=name: getattr(nn, name)(3, 2)(B)[0] for name in ("RNN", "LSTM", "GRU")}
LOWER |= {
    name: lambda name=name: getattr(nn, name)(3, 2)(M)[0] for name in ("RNNCell", "LSTMCell", "GRUCell")
}


@pytest.mark.exhaustive(keep=12)
@shows("o1-whitelist")
@pytest.mark.parametrize("level", PATCHED)
@pytest.mark.parametrize("name", LOWER)
def test_what_is_fast_in_half_runs_in_half(name, level):
    open_o1(level)
    assert LOWER[name]().dtype is PATCHED[level]


LABELS = torch.tensor([0, 2, 1])
METHODS = (
    *("exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt"),
    *("acos", "asin", "cosh", "sinh", "tan", "sum", "prod", "norm"),
)
OF_TWO = ("cosine_similarity", "mse_loss", "l1_loss", "smooth_l1_loss", "poisson_nll_loss")
FP32 = {
    **{name: methodcaller(name) for name in METHODS},
    **{name: lambda x, name=name: getattr(F, name)(x, x) for name in OF_TWO},
    **{name: later(F, name, dim=1) for name in ("softmax", "log_softmax", "softmin")},
    **{name: later(F, name, target=LABELS) for name in ("cross_entropy", "nll_loss")},
    "pow": lambda x: torch.pow(x, 2),
    "x ** 2": lambda x: x**2,
    "2 ** x": lambda x: 2**x,
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "dist": lambda x: torch.dist(x, x),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "layer_norm": lambda x: F.layer_norm(x, [3]),
    "group_norm": lambda x: F.group_norm(x, 3),
    "local_response_norm": lambda x: F.local_response_norm(x[None], 2),
    "normalize": later(F, "normalize"),
    "softplus": later(F, "softplus"),
    "interpolate": lambda x: F.interpolate(x[None], scale_factor=2),
    "kl_div": lambda x: F.kl_div(x, x, reduction="sum"),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, x, torch.ones(3)),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, torch.ones(3, 3)),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x, x, torch.ones(3, 3)),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, torch.ones(3, 3)),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, LABELS),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, x, x),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x.float()),
}


@pytest.mark.exhaustive(keep=12)
@shows("o1-blacklist")
@pytest.mark.parametrize("name", FP32)
def test_what_leaves_the_half_range_runs_in_float32(name):
    x = torch.rand(3, 3).mul(0.5).add(0.25).to(HALF)
    expected = FP32[name](x.float())
    open_o1()
    found = FP32[name](x)
    assert found.dtype is FULL
    assert torch.equal(found, expected)


DIFFERENCES = CASTS.partition("## Differences from apex.amp")[2].partition("\n## ")[0]
KERNELS = {"gelu": F.gelu, "std": torch.std, "var": torch.var}


@shows("o1-differences")
@pytest.mark.parametrize("name", KERNELS)
def test_what_computes_in_float32_inside_stays_half_and_is_listed(name):
    x = half(64)
    expected = KERNELS[name](x.float()).to(HALF)
    open_o1()
    found = KERNELS[name](x)
    assert found.dtype is HALF
    assert torch.equal(found, expected)
    assert f"`{name}`" in DIFFERENCES


@shows("o1-differences")
@pytest.mark.parametrize("grid_type", [HALF, FULL], ids=str)
def test_grid_sample_follows_the_wider_type_and_is_listed(grid_type):
    open_o1()
    grid = torch.zeros(1, 2, 2, 2, dtype=grid_type)
    assert F.grid_sample(half(1, 1, 3, 3), grid, align_corners=False).dtype is grid_type
    assert "`grid_sample`" in DIFFERENCES


# ---- In place, banned, copies ----


@shows("o1-in-place")
@pytest.mark.parametrize("name", ["exp_", "log_", "rsqrt_", "acos_", "tan_"])
@pytest.mark.parametrize("level", PATCHED)
def test_a_blacklisted_op_in_place_raises_by_its_name_and_leaves_the_tensor(name, level):
    x = torch.full((2,), 0.5, dtype=PATCHED[level])
    open_o1(level)
    with pytest.raises(NotImplementedError, match=name):
        getattr(x, name)()
    with pytest.raises(NotImplementedError, match=name):
        getattr(torch, name)(x)
    assert torch.equal(x, torch.full_like(x, 0.5))
    assert getattr(torch.full((2,), 0.5), name)().dtype is FULL


# The arguments of each, for an x of ones and a y of halves, and what it makes of x.
IN_PLACE_METHODS = {
    "add_": (lambda y: (y,), 1.5),
    "mul_": (lambda y: (y,), 0.5),
    "addmm_": (lambda y: (y, y), 1.5),
    "index_add_": (lambda y: (0, torch.tensor([0, 1]), y), 1.5),
    "lerp_": (lambda y: (y, 0.5), 0.75),
}


@shows("o1-in-place-mixed")
@pytest.mark.parametrize(("own", "other"), [(FULL, HALF), (HALF, FULL)], ids=str)
@pytest.mark.parametrize("name", IN_PLACE_METHODS)
def test_an_op_in_place_on_mixed_types_follows_self(name, own, other):
    arguments, expected = IN_PLACE_METHODS[name]
    x, y = torch.ones(2, 2, dtype=own), torch.full((2, 2), 0.5, dtype=other)
    open_o1()
    assert getattr(x, name)(*arguments(y)) is x
    assert x.dtype is own
    assert torch.equal(x, torch.full((2, 2), expected, dtype=own))


@shows("o1-in-place-power")
@pytest.mark.parametrize("level", PATCHED)
def test_a_power_in_place_by_its_operator_is_a_new_float32_tensor(level):
    open_o1(level)
    x = old = torch.tensor([300.0, 1e-4]).to(PATCHED[level])
    x **= 2
    assert x.dtype is FULL
    assert torch.equal(x, old.float() ** 2)
    assert old.dtype is PATCHED[level]
    with pytest.raises(NotImplementedError, match=r"pow_ .*use pow, which"):
        old.pow_(2)


IN_PLACE = [operator.iadd, operator.isub, operator.imul, operator.itruediv]


@shows("o1-in-place-operators")
@pytest.mark.parametrize("operate", IN_PLACE)
@pytest.mark.parametrize("own", [FULL, HALF], ids=str)
def test_an_operator_in_place_on_mixed_types_writes_into_its_tensor(operate, own):
    x, y = torch.full((2,), 3.0, dtype=own), torch.full((2,), 2.0, dtype=FULL if own is HALF else HALF)
    view, expected = x[:1], operate(torch.full((2,), 3.0, dtype=own), y)
    open_o1()
    assert operate(x, y) is x
    assert x.dtype is own
    assert torch.equal(x, expected)
    assert torch.equal(view, expected[:1])  # who holds the tensor, or a part of it, sees it


@shows("o1-in-place-operators")
def test_a_script_may_ask_for_operators_that_give_float32():
    x, y = torch.full((1,), 60000.0).half(), torch.full((1,), 60000.0)
    amp.register_promote_function(torch.Tensor, "__iadd__")
    open_o1("O1")
    old = x
    x += y
    assert torch.equal(x, torch.full((1,), 120000.0))
    assert old == 60000.0


@shows("o1-zero-dim")
@pytest.mark.parametrize("operate", [operator.add, operator.mul, torch.sub, torch.addcmul])
def test_a_number_in_a_tensor_without_dimensions_does_not_promote(operate):
    open_o1()
    x, number = half(2), torch.tensor(2.0)
    arguments = (x, number, x) if operate is torch.addcmul else (x, number)
    assert operate(*arguments).dtype is HALF


@shows("o1-banned", "o1-allow-banned", "never-allow-banned")
@pytest.mark.parametrize("level", PATCHED)
def test_binary_cross_entropy_on_half_raises_and_points_to_the_logits_form_unless_allowed(level):
    half, y = torch.rand(3).to(PATCHED[level]), torch.ones(3)
    expected = F.binary_cross_entropy(half.float(), y)
    open_o1(level)
    for banned in (F.binary_cross_entropy, nn.BCELoss()):
        with pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits"):
            banned(half, y.to(half.dtype))
    assert F.binary_cross_entropy(half.float(), y).dtype is FULL
    ampatch.uninitialize()
    open_o1(level, allow_banned=True)
    assert torch.equal(F.binary_cross_entropy(half, y.to(half.dtype)), expected)


@shows("o1-cpu")
@pytest.mark.parametrize("level", PATCHED)
def test_a_half_output_on_the_cpu_is_float32_for_numpy(level):
    net, _ = initialized(level)
    with torch.no_grad():
        output = net(X)
        assert output.dtype is PATCHED[level]
        array = output.cpu().numpy()
    assert array.dtype == "float32"
    assert output.cpu().tolist() == output.float().tolist()


@shows("o1-batchnorm")
@pytest.mark.parametrize("level", PATCHED)
def test_batchnorm_takes_half_with_float32_weights_and_gives_half(level):
    norm = nn.BatchNorm2d(2)
    amp.initialize(nn.Sequential(nn.Conv2d(1, 2, 3), norm), opt_level=level, verbosity=0)
    x = torch.rand(2, 2, 3, 3).to(PATCHED[level])
    assert norm(x).dtype is PATCHED[level]
    assert norm.weight.dtype is norm.running_mean.dtype is FULL
    assert norm.eval()(x).dtype is PATCHED[level]
    assert norm(x.float()).dtype is FULL


# ---- The cache ----


class CountCasts(TorchDispatchMode):
    """Counts the copies of float32 tensors of one shape to bfloat16."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = torch.Size(shape), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype is HALF:
            self.count += args[0].shape == self.shape
        return result


class Tied(nn.Module):
    """Uses one weight in several ops."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.0, 1, 2], [1, 1, 0], [2, 0, 1]]))

    def forward(self, x):
        return F.linear(x, self.weight) @ self.weight + torch.mm(x, self.weight)


@shows("o1-cache", "o1-one-gradient")
def test_a_weight_is_cast_once_an_iteration_and_has_one_gradient():
    net = Tied()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    amp.initialize(net, optimizer, opt_level="O4", verbosity=0)
    inputs = [torch.ones(2, 3).to(HALF), torch.tensor([[0.0, 1, 2]]).to(HALF)]
    for _ in range(2):
        by_hand = net.weight.detach().to(HALF).requires_grad_()
        with amp.disable_casts():
            for x in inputs:
                (F.linear(x, by_hand) @ by_hand + torch.mm(x, by_hand)).float().sum().backward()
        optimizer.zero_grad()
        with CountCasts((3, 3)) as casts:
            outputs = [net(x) for x in inputs]
        assert casts.count == 1
        with amp.scale_loss(sum(output.float().sum() for output in outputs), optimizer) as scaled_loss:
            scaled_loss.backward()
        assert torch.equal(net.weight.grad, by_hand.grad.float())  # small integers, which bfloat16 holds
        optimizer.step()


# ---- Functions of the user's ----


@amp.half_function
def halved(x):
    return x.dtype


@amp.float_function
def widened(x):
    return x.dtype


@amp.promote_function
def promoted(x, y):
    return x.dtype, y.dtype


@shows("o1-decorators", "never-early-names")
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_decorators_applied_at_import_act_while_a_session_that_patches_is_open(level):
    def found():
        x = torch.ones(2)
        return halved(x), widened(x.to(lower)), promoted(x, x.to(lower))

    lower = PATCHED.get(level, HALF)
    outside = (FULL, lower, (FULL, lower))
    assert found() == outside
    open_o1(level)
    assert found() == ((lower, FULL, (FULL, FULL)) if level in PATCHED else outside)
    ampatch.uninitialize()
    assert found() == outside


@shows("o1-register-missing")
@pytest.mark.parametrize("kind", ["half", "bfloat16", "float", "promote"])
def test_registering_a_missing_name_raises_value_error(kind):
    with pytest.raises(ValueError, match="no_such_function"):
        getattr(amp, f"register_{kind}_function")(torch, "no_such_function")


@shows("o1-register-einsum", "never-more-functions")
@pytest.mark.parametrize("level", PATCHED)
def test_einsum_is_registered_before_initialize(level):
    amp.register_half_function(torch, "einsum")
    open_o1(level)
    assert torch.einsum("ij,jk->ik", M, M).dtype is PATCHED[level]
    assert torch.einsum("ij,jk->ik", [M, M]).dtype is PATCHED[level]


# ---- Where nothing is cast ----


@shows("o1-disable-casts-defect")
def test_blocks_of_disabled_casts_nest_and_end_by_an_exception_too():
    open_o1()
    with amp.disable_casts():
        with pytest.raises(KeyError, match="float32"), amp.disable_casts():
            raise KeyError((M @ M).dtype)
        assert (M @ M).dtype is FULL
    assert (M @ M).dtype is HALF


@shows("o1-disable-casts-defect")
def test_a_block_of_disabled_casts_holds_for_its_thread():
    open_o1()
    found = []
    with amp.disable_casts():
        thread = threading.Thread(target=lambda: found.append((M @ M).dtype))
        thread.start()
        thread.join()
        assert (M @ M).dtype is FULL
    assert found == [HALF]


class Norms(torch.optim.SGD):
    """Multiplies matrices in its step."""

    def step(self, closure=None):
        self.seen = [(p @ p.T).dtype for group in self.param_groups for p in group["params"]]
        return super().step(closure)


@shows("o1-step-uncast")
@pytest.mark.parametrize("level", PATCHED)
def test_a_step_runs_with_casts_off(level):
    net = nn.Linear(3, 3, bias=False)
    net, optimizer = initialized(level, Norms, net, loss_scale=8.0)
    step(net, optimizer, x=M)
    assert optimizer.seen == [FULL]
    assert (M @ M).dtype is PATCHED[level]
