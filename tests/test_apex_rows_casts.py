"""What scripts written for apex expect of O1 and O4, row by row of docs/apex-behaviour.md."""

import operator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch
from ampatch.apex import amp
from apex_rows import EVERY_LEVEL, PATCHED, Recorder, X, initialized, shows

FULL, HALF = torch.float32, torch.bfloat16
CASTS = (Path(__file__).parents[1] / "docs/casts.md").read_text()


def open_o1(level="O4", **kwargs):
    """Opens a session that patches; O4, as most tests: float16 is slow on a CPU."""
    return amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0, **kwargs)


def half(*shape):
    return torch.rand(shape).to(HALF)


# ---- Whitelist and blacklist: test_casts_against_autocast.py runs every function of both ----

WHITELIST = {
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc"),
    *("linear", "addmm", "addmv", "addr", "matmul", "mm", "mv", "bmm", "addbmm", "baddbmm", "__matmul__"),
    *("prelu", "rnn_tanh", "rnn_relu", "lstm", "gru", "rnn_tanh_cell", "lstm_cell", "gru_cell"),
}
BLACKLIST = {
    *("exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "acos", "asin", "cosh", "sinh"),
    *("tan", "pow", "__pow__", "__rpow__", "sum", "prod", "cumsum", "cumprod", "norm", "dist", "renorm"),
    *("softmax", "log_softmax", "softmin", "layer_norm", "group_norm", "normalize", "cosine_similarity"),
    *("softplus", "interpolate", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss"),
    *("kl_div", "poisson_nll_loss", "cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss"),
    *("soft_margin_loss", "multi_margin_loss", "triplet_margin_loss", "binary_cross_entropy_with_logits"),
}
M, B = torch.rand(3, 3), torch.rand(2, 3, 3)
LOWER = {
    "conv2d": lambda: F.conv2d(torch.rand(1, 2, 5, 5), torch.rand(3, 2, 3, 3)),
    "linear": lambda: F.linear(M, M),
    "a @ b": lambda: M @ M,
    "prelu": lambda: F.prelu(M, torch.tensor([0.1])),
    "LSTM": lambda: nn.LSTM(3, 2)(B)[0],
    "GRUCell": lambda: nn.GRUCell(3, 2)(M),
}
FP32 = {
    "exp": lambda x: x.exp(),
    "2 ** x": lambda x: 2**x,
    "norm": lambda x: x.norm(),
    "softmax": lambda x: F.softmax(x, dim=1),
    "local_response_norm": lambda x: F.local_response_norm(x[None], 2),
    "mse_loss": lambda x: F.mse_loss(x, x),
}


def listed(kind):
    """The functions of a list, as scripts read and edit it."""
    modules = (amp.lists.functional_overrides, amp.lists.torch_overrides, amp.lists.tensor_overrides)
    return {name for module in modules for name in getattr(module, kind)}


@shows("o1-whitelist", "o1-blacklist")
def test_the_functions_that_apex_cast_are_in_its_lists():
    assert WHITELIST - listed("FP16_FUNCS") == WHITELIST - listed("BFLOAT16_FUNCS") == set()
    assert BLACKLIST - listed("FP32_FUNCS") == set()


@shows("o1-whitelist")
@pytest.mark.parametrize("level", PATCHED)
@pytest.mark.parametrize("name", LOWER)
def test_what_is_fast_in_half_runs_in_half(name, level):
    open_o1(level)
    assert LOWER[name]().dtype is PATCHED[level]


@shows("o1-blacklist")
@pytest.mark.parametrize("name", FP32)
def test_what_leaves_the_half_range_runs_in_float32(name):
    x = half(3, 3)
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


IN_PLACE = [operator.iadd, operator.isub, operator.imul, operator.itruediv]


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


class CountsCasts(ampatch.Observer):
    counts_casts = True


@shows("o1-cache", "o1-one-gradient")
def test_a_weight_is_cast_once_an_iteration_and_has_one_gradient():
    def run(x, weight):
        return (F.linear(x, weight) @ weight + torch.mm(x, weight)).float().sum()

    # Small integers, which bfloat16 holds.
    net = Recorder()
    net.weight = nn.Parameter(torch.tensor([[0.0, 1, 2], [1, 1, 0], [2, 0, 1]]))
    with ampatch.observe(CountsCasts()):
        _, optimizer = initialized("O4", net=net)
    inputs = [torch.ones(2, 3).to(HALF), torch.tensor([[0.0, 1, 2]]).to(HALF)]
    by_hand = net.weight.detach().to(HALF).requires_grad_()
    with amp.disable_casts():
        sum(run(x, by_hand) for x in inputs).backward()
    with amp.scale_loss(sum(run(x, net.weight) for x in inputs), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert torch.equal(net.weight.grad, by_hand.grad.float())
    counts = ampatch.cast_counts()
    assert (counts.made, counts.reused) == (1, 5)


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


@shows("o1-register-einsum", "never-more-functions")
@pytest.mark.parametrize("level", PATCHED)
def test_einsum_is_registered_before_initialize(level):
    amp.register_half_function(torch, "einsum")
    open_o1(level)
    assert torch.einsum("ij,jk->ik", M, M).dtype is PATCHED[level]
    assert torch.einsum("ij,jk->ik", [M, M]).dtype is PATCHED[level]


# ---- Where nothing is cast ----
