"""What scripts written for apex expect of casts, of optimizers and of private names, row by row."""

import json
import operator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampatch.apex import amp
from apex_rows import (
    EVERY_LEVEL,
    INF,
    MASTERED,
    PATCHED,
    backward,
    changed,
    initialized,
    scaler_state,
    set_scale,
    shows,
    step,
)

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
M = torch.rand(3, 3)


def listed(kind):
    """The functions of a list, as scripts read and edit it."""
    modules = (amp.lists.functional_overrides, amp.lists.torch_overrides, amp.lists.tensor_overrides)
    return {name for module in modules for name in getattr(module, kind)}


@shows("o1-whitelist", "o1-blacklist")
def test_the_functions_that_apex_cast_are_in_its_lists():
    assert WHITELIST - listed("FP16_FUNCS") == WHITELIST - listed("BFLOAT16_FUNCS") == set()
    assert BLACKLIST - listed("FP32_FUNCS") == set()


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


# ---- Functions of the user's ----


@shows("o1-register-einsum", "never-more-functions")
@pytest.mark.parametrize("level", PATCHED)
def test_einsum_is_registered_before_initialize(level):
    amp.register_half_function(torch, "einsum")
    open_o1(level)
    assert torch.einsum("ij,jk->ik", M, M).dtype is PATCHED[level]
    assert torch.einsum("ij,jk->ik", [M, M]).dtype is PATCHED[level]


# ---- amp._amp_state ----


@shows("private-scalers")
def test_loss_scalers_show_scale_count_interval_and_overflow():
    net, optimizer = initialized(num_losses=2)
    scaler = amp._amp_state.loss_scalers[1]
    assert len(amp._amp_state.loss_scalers) == 2
    assert (scaler.loss_scale(), scaler._loss_scale, scaler._unskipped) == (65536.0, 65536.0, 0)
    assert scaler._scale_seq_len == 2000
    backward(net, optimizer, 0.0, loss_id=1)
    assert scaler._unskipped == 1
    assert not scaler._has_overflow
    backward(net, optimizer, INF, loss_id=1)
    assert scaler._has_overflow
    assert (scaler.loss_scale(), scaler._unskipped) == (32768.0, 0)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 65536.0


@shows("private-scale-assigned", "patterns-scale-assigned")
@pytest.mark.parametrize("value", [2**20, 5, 1, 128.0])
def test_a_scale_that_is_assigned_right_after_initialize_is_used(value):
    _, optimizer = initialized()
    set_scale(value)
    with amp.scale_loss(torch.tensor(3.0), optimizer) as scaled_loss:
        assert scaled_loss == 3.0 * value
    read = amp._amp_state.loss_scalers[0].loss_scale()
    assert json.loads(json.dumps({"scale": read})) == {"scale": value}
    assert scaler_state()["loss_scale"] == value


@shows("private-options", "patterns-by-hand")
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_the_options_can_be_read(level):
    initialized(level)
    options = amp._amp_state.opt_properties
    assert options.enabled
    assert options.opt_level == level
    assert options.loss_scale == ("dynamic" if level in ("O1", "O2") else 1.0)
    assert bool(options.master_weights) == (level in MASTERED)
    assert options.options["opt_level"] == level
    assert options.options["patch_torch_functions"] == (level in PATCHED)


@shows("private-half-models")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_half_models_are_taken_where_the_script_allows_them(level, monkeypatch):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half())
    with pytest.raises(RuntimeError, match=r"1\.weight"):
        initialized(level, net=net)
    monkeypatch.setattr(amp._amp_state, "allow_incoming_model_not_fp32", True)
    _, optimizer = initialized(level, net=net)
    assert net[1].weight.dtype is torch.float16
    step(net, optimizer, 2.0**-10)


@shows("private-master-params", "private-frontend")
def test_master_params_and_frontend_are_found_where_apex_had_them():
    _, optimizer = initialized("O5")
    expected = [id(param) for param in amp.master_params(optimizer)]
    assert [id(param) for param in amp._amp_state.master_params(optimizer)] == expected
    assert amp.frontend.initialize is amp.initialize
    assert amp.frontend.state_dict is amp.state_dict
    assert amp.frontend.Properties().options["enabled"] is False
    for level in ("O0", "O1", "O2", "O3"):
        properties = amp.frontend.opt_levels[level](amp.frontend.Properties())
        assert (properties.opt_level, properties.enabled) == (level, True)


# ---- What apex put on an optimizer ----


@shows("private-lazy-init", "patterns-by-hand")
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_masters_may_be_asked_for_by_hand(level):
    net, optimizer = initialized(level, loss_scale=4.0)
    assert hasattr(optimizer, "_amp_stash")
    masters = [id(param) for param in amp.master_params(optimizer)]
    if not optimizer._amp_stash.lazy_init_called:
        optimizer._lazy_init_maybe_master_weights()
        optimizer._amp_stash.lazy_init_called = True
    optimizer._amp_lazy_init()
    assert [id(param) for param in amp.master_params(optimizer)] == masters
    with changed(net):
        step(net, optimizer)


@shows("private-copy-masters")
@pytest.mark.parametrize("level", MASTERED)
def test_masters_are_copied_into_the_model_by_hand(level):
    net, optimizer = initialized(level)
    with torch.no_grad():
        for master in amp.master_params(optimizer):
            master.fill_(0.3)
    optimizer._master_params_to_model_params()
    for param in net.parameters():
        assert torch.equal(param, torch.full_like(param, 0.3))
