"""What each level means, how arguments override it, and which of them contradict it."""

import pytest
import torch

import ampatch as amp
from ampatch.levels.loss_scale import StaticLossScale
from ampatch.levels.overrides import Overrides, resolve
from apex_rows import shows

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

FIELDS = ("cast_model_type", "patch_torch_functions", "patch_torch_functions_type", "keep_batchnorm_fp32")
# Of each level: these fields, masters, scale
LEVELS = {
    "O0": (FP32, False, None, None, False, "1.0"),
    "O1": (None, True, FP16, None, False, "dynamic"),
    "O2": (FP16, False, None, True, True, "dynamic"),
    "O3": (FP16, False, None, False, False, "1.0"),
    "O4": (None, True, BF16, None, False, "1.0"),
    "O5": (BF16, False, None, True, True, "1.0"),
}


def resolve_with(level, **overrides):
    return resolve(level, Overrides(**overrides))


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_means_what_the_table_says(level):
    policy = resolve_with(level)
    found = *(getattr(policy, name) for name in FIELDS), policy.master_weights, str(policy.loss_scale)
    assert found == LEVELS[level]
    assert policy.opt_level == level
    assert policy.cast_model_outputs is None
    assert not policy.allow_banned


@shows("initialize-keywords")
@pytest.mark.parametrize("level", LEVELS)
def test_none_overrides_nothing_and_the_string_of_argparse_neither(level):
    names = Overrides.__dataclass_fields__.keys() - {"max_loss_scale", "allow_banned"}
    assert resolve_with(level, **dict.fromkeys(names)) == resolve_with(level)
    flags = ["keep_batchnorm_fp32", "master_weights", "patch_torch_functions", "loss_scale"]
    assert resolve_with(level, **dict.fromkeys(flags, "None")) == resolve_with(level)


@pytest.mark.parametrize(("level", "meant"), [("01", "O1"), ("o2", "O2"), ("05", "O5")])
def test_a_zero_or_a_small_o_gets_a_hint(level, meant):
    with pytest.raises(amp.AmpValueError, match=f"the letter O: '{meant}'"):
        resolve_with(level)


# The half type


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("dtype", [FP16, BF16, "float16", "bfloat16", "torch.bfloat16"])
def test_dtype_is_the_half_type_of_any_level(level, dtype):
    expected = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.removeprefix("torch."))
    policy = resolve_with(level, dtype=dtype)
    assert policy.half is expected
    assert (policy.cast_model_type or policy.patch_torch_functions_type) is expected


@pytest.mark.parametrize(
    ("level", "dtype", "scale"),
    [("O1", BF16, "dynamic"), ("O2", BF16, "dynamic"), ("O3", BF16, "1.0")]
    + [(level, FP16, "dynamic") for level in ("O4", "O5")],
)
def test_a_level_in_the_other_half_type_scales_dynamically_where_one_of_the_two_does(level, dtype, scale):
    assert str(resolve_with(level, dtype=dtype).loss_scale) == scale
    assert str(resolve_with(level, dtype=dtype, loss_scale=4.0).loss_scale) == "4.0"


@pytest.mark.parametrize("name", ["dtype", "cast_model_type"])
def test_two_names_of_one_half_type_may_agree(name):
    assert resolve_with("O2", dtype=BF16, cast_model_type=BF16) == resolve_with("O2", **{name: BF16})


# Contradictions


MODEL, NORMS = "cast_model_type", "keep_batchnorm_fp32"


@shows("initialize-contradictions")
@pytest.mark.parametrize(
    ("level", "overrides"),
    [
        ("O0", {"dtype": FP16}),
        ("O0", {"dtype": BF16}),
        ("O0", {MODEL: FP32}),
        ("O0", {"patch_torch_functions": False}),
        ("O0", {"master_weights": False}),
        ("O1", {MODEL: False}),
        ("O4", {MODEL: "None"}),
        ("O1", {"patch_torch_functions": True}),
        ("O2", {MODEL: FP16}),
        ("O2", {NORMS: "True"}),
        ("O2", {"master_weights": True}),
        ("O2", {"loss_scale": "dynamic"}),
        ("O3", {"loss_scale": "1.0"}),
    ],
)
def test_an_override_that_says_what_the_level_says_changes_nothing(level, overrides):
    assert resolve_with(level, **overrides) == resolve_with(level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", [False, "False", FP32, "torch.float32"], ids=repr)
def test_a_model_type_that_is_no_half_type_casts_no_weights_and_holds_at_every_level(level, value):
    policy, half = resolve_with(level, cast_model_type=value), LEVELS[level][2]
    expected = FP32 if "float32" in str(value) else None
    assert (policy.cast_model_type, policy.output_dtype) == (expected, expected)
    assert (policy.casts_model, policy.half) == (False, half)
    assert policy.master_weights is LEVELS[level][4]


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("flag", [True, False, "True", "False"])
def test_levels_that_cast_the_model_may_choose_batchnorm_and_masters(level, flag):
    policy = resolve_with(level, keep_batchnorm_fp32=flag, master_weights=flag)
    assert policy.keep_batchnorm_fp32 is policy.master_weights is (str(flag) == "True")


# The loss scale of a level


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", [float, str])  # argparse gives strings
def test_min_and_max_bound_the_dynamic_scale_of_a_level_and_not_a_static_one_as_in_apex(kind, level):
    bounds = {"min_loss_scale": kind(2.0), "max_loss_scale": kind(1024.0)}
    scale = resolve_with(level, **bounds).loss_scale
    assert (scale.min_scale, scale.max_scale, scale.init_scale) == (2.0, 1024.0, 1024.0)
    assert resolve_with("O0", **bounds).loss_scale == StaticLossScale(1.0)
