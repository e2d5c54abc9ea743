"""How keyword arguments of `initialize` override an opt level."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ampatch.errors import AmpTypeError, AmpValueError
from ampatch.levels.float8 import find_recipe
from ampatch.levels.loss_scale import DynamicLossScale, LossScale, parse_loss_scale
from ampatch.levels.policy import OPT_LEVELS, ModelType, Policy
from ampatch.levels.precision import HALF_TYPES


@dataclass(frozen=True, slots=True)
class Overrides:
    """The keyword arguments of `initialize` that override a level; None leaves its default."""

    cast_model_type: object = None
    patch_torch_functions: object = None
    patch_torch_functions_type: object = None
    keep_batchnorm_fp32: object = None
    master_weights: object = None
    loss_scale: object = None
    cast_model_outputs: object = None
    min_loss_scale: float | None = None
    max_loss_scale: float | None = 2.0**24
    dtype: object = None
    allow_banned: object = False
    float8_recipe: object = None


def find_level(opt_level: object) -> Policy:
    """Returns the defaults of a level; raises AmpValueError for an unknown name."""
    if isinstance(opt_level, str) and opt_level in OPT_LEVELS:
        return OPT_LEVELS[opt_level]
    expected = ", ".join(repr(name) for name in OPT_LEVELS)
    meant = opt_level.upper().replace("0", "O", 1) if isinstance(opt_level, str) else None
    hint = f" (the letter O: {meant!r})" if meant in OPT_LEVELS else ""
    raise AmpValueError(f"unknown opt_level {opt_level!r}: expected one of {expected}{hint}")


def resolve(opt_level: object, overrides: Overrides) -> Policy:
    """Applies the overrides to a level's defaults.

    Raises AmpValueError or AmpTypeError for a value that cannot be read, or that contradicts the
    level; the message says what to do instead.
    """
    level = find_level(opt_level)
    policy = _resolve_half_type(level, overrides)
    policy = _resolve_flags(policy, overrides)
    return replace(
        policy,
        loss_scale=_resolve_loss_scale(level, policy, overrides),
        cast_model_outputs=parse_dtype("cast_model_outputs", overrides.cast_model_outputs),
        allow_banned=bool(parse_flag("allow_banned", overrides.allow_banned)),
        float8_recipe=_resolve_recipe(policy, overrides),
    )


def parse_dtype(name: str, value: object) -> torch.dtype | None:
    """Reads a floating dtype, or its name in a string; None and False mean none, also in a string."""
    if value is None or value is False or value in ("None", "False", ""):
        return None
    dtype = value
    if isinstance(value, str):
        dtype = getattr(torch, value.strip().removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise AmpTypeError(f"{name}={value!r}: expected a floating dtype such as torch.float16")
    return dtype


def parse_flag(name: str, value: object) -> bool | None:
    """Reads a boolean, 0 or 1, or "True" and "False" as argparse passes them; None stays None."""
    if value in ("None", ""):
        return None
    if value is None or (isinstance(value, int) and value in (0, 1)):
        return value if value is None else bool(value)
    if value in ("True", "False"):
        return value == "True"
    hint = (
        f"; a level is passed by name, opt_level={value!r}"
        if isinstance(value, str) and value in OPT_LEVELS
        else ""
    )
    raise AmpTypeError(f"{name}={value!r}: expected True, False or None{hint}")


def _resolve_half_type(level: Policy, overrides: Overrides) -> Policy:
    dtype = parse_half("dtype", overrides.dtype)
    patch_type = parse_half("patch_torch_functions_type", overrides.patch_torch_functions_type)
    model_type = _parse_model_type(overrides.cast_model_type)
    if level.patch_torch_functions:
        _refuse_half_model(level, model_type)
        half = _agree(dtype=dtype, patch_torch_functions_type=patch_type) or level.half
        return replace(level, patch_torch_functions_type=half, cast_model_type=model_type or None)
    if patch_type is not None:
        raise AmpValueError(
            f"patch_torch_functions_type={patch_type} contradicts {level.opt_level}, which patches "
            f"nothing: use opt_level='O1' or 'O4', or dtype= for the model's half type"
        )
    if not level.casts_model:
        _refuse_half_model(level, model_type)
        dtype = None
    model_type = _agree(dtype=dtype, cast_model_type=model_type)
    return replace(level, cast_model_type=level.cast_model_type if model_type is None else model_type or None)


def _parse_model_type(value: object) -> ModelType:
    if value is False or value == "False":
        return False
    dtype = parse_dtype("cast_model_type", value)
    if dtype not in (None, torch.float32, *HALF_TYPES):
        raise AmpValueError(
            f"cast_model_type={value!r}: expected torch.float16, torch.bfloat16, torch.float32 or False"
        )
    return dtype


def parse_half(name: str, value: object) -> torch.dtype | None:
    """Reads a half type, or its name in a string; raises AmpValueError for other floating dtypes."""
    dtype = parse_dtype(name, value)
    if dtype not in (None, *HALF_TYPES):
        raise AmpValueError(f"{name}={value!r}: expected torch.float16 or torch.bfloat16")
    return dtype


def _agree(**dtypes: ModelType) -> ModelType:
    named = {name: dtype for name, dtype in dtypes.items() if dtype is not None}
    if len(set(named.values())) > 1:
        text = " and ".join(f"{name}={dtype}" for name, dtype in named.items())
        raise AmpValueError(f"{text} contradict each other: give one of them")
    return next(iter(named.values()), None)


def _refuse_half_model(level: Policy, model_type: ModelType) -> None:
    if model_type in HALF_TYPES:
        why = "whose weights stay float32" if level.patch_torch_functions else "which is float32 throughout"
        raise AmpValueError(
            f"cast_model_type={model_type} contradicts {level.opt_level}, {why}: leave it out, or use "
            f"opt_level='O3' for a half model, 'O2' or 'O5' for one with master weights"
        )


def _resolve_flags(policy: Policy, overrides: Overrides) -> Policy:
    patch = parse_flag("patch_torch_functions", overrides.patch_torch_functions)
    batchnorm = parse_flag("keep_batchnorm_fp32", overrides.keep_batchnorm_fp32)
    masters = parse_flag("master_weights", overrides.master_weights)
    level = policy.opt_level
    if patch and not policy.patch_torch_functions:
        raise AmpValueError(
            f"patch_torch_functions=True contradicts {level}: only O1, O4 and O6 patch torch's functions; "
            f"leave it out, or use one of those"
        )
    if policy.patch_torch_functions and batchnorm is not None:
        raise AmpValueError(
            f"keep_batchnorm_fp32={batchnorm} contradicts {level}, where BatchNorm always runs on "
            f"float32 weights: leave it out, or use opt_level='O2', 'O3' or 'O5'"
        )
    if masters is not None and (policy.patch_torch_functions or (masters and level == "O0")):
        raise AmpValueError(
            f"master_weights={masters} contradicts {level}, whose weights are float32 themselves: "
            f"leave it out, or use opt_level='O2' or 'O5'"
        )
    return replace(
        policy,
        patch_torch_functions=policy.patch_torch_functions if patch is None else patch,
        keep_batchnorm_fp32=policy.keep_batchnorm_fp32 if batchnorm is None else batchnorm,
        master_weights=policy.master_weights if masters is None else masters,
    )


def _resolve_recipe(policy: Policy, overrides: Overrides) -> str | None:
    recipe, level = overrides.float8_recipe, policy.opt_level
    if policy.float8_recipe is not None and not policy.patch_torch_functions:
        raise AmpValueError(
            f"patch_torch_functions=False contradicts {level}, whose float8 layers need the casts of "
            f"functions: leave it out, or use opt_level='O0'"
        )
    if recipe in (None, "None"):
        return policy.float8_recipe
    if policy.float8_recipe is None:
        raise AmpValueError(
            f"float8_recipe={recipe!r} contradicts {level}: use opt_level='O6', or leave it out"
        )
    find_recipe(recipe)
    return str(recipe)


def _resolve_loss_scale(level: Policy, policy: Policy, overrides: Overrides) -> LossScale:
    low, high = overrides.min_loss_scale, overrides.max_loss_scale
    value = overrides.loss_scale
    if isinstance(value, DynamicLossScale) and (low is not None or high != 2.0**24):
        raise AmpValueError(
            f"min_loss_scale={low!r} and max_loss_scale={high!r} beside {value!r}: "
            f"give the bounds only in the DynamicLossScale"
        )
    if value in (None, "None"):
        # float16 gradients underflow without a scale, so O4 and O5 in float16 take that of O1 and O2.
        dynamic = isinstance(level.loss_scale, DynamicLossScale) or (
            level.half is torch.bfloat16 and policy.half is torch.float16
        )
        value = "dynamic" if dynamic else level.loss_scale
    return parse_loss_scale(value, low, high)
