"""What an opt level means, and how keyword arguments override it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import torch

from ampatch.errors import AmpTypeError, AmpValueError
from ampatch.levels.loss_scale import DynamicLossScale, LossScale, StaticLossScale, parse_loss_scale
from ampatch.levels.precision import HALF_TYPES, name_dtype

ModelType = torch.dtype | Literal[False] | None  # False: the model's types are left alone


@dataclass(frozen=True, slots=True)
class Policy:
    """Says what one call of `initialize` does; the field names are those of apex's options.

    `cast_model_type` is the dtype of the model: its inputs are cast to it, its weights if it is a half
    type, and its outputs to float32 (None: all of them stay). `patch_torch_functions_type` is the dtype
    that whitelisted functions run in.
    """

    opt_level: str
    summary: str
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool = False
    patch_torch_functions_type: torch.dtype | None = None
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool = False
    loss_scale: LossScale = StaticLossScale(1.0)  # noqa: RUF009 - frozen, so safely shared
    cast_model_outputs: torch.dtype | None = None
    allow_banned: bool = False

    @property
    def half(self) -> torch.dtype | None:
        """The half type of this policy; None where nothing is cast to one, as at O0."""
        return self.patch_torch_functions_type or (self.cast_model_type if self.casts_model else None)

    @property
    def casts_model(self) -> bool:
        """Whether the model's weights are cast to a half type."""
        return self.cast_model_type in HALF_TYPES

    @property
    def has_half_weights(self) -> bool:
        """Whether the model may have half weights with float32 values behind them."""
        return self.casts_model or self.master_weights

    @property
    def is_pure_half(self) -> bool:
        """Whether the model is cast with no masters to keep its float32 values."""
        return self.casts_model and not self.master_weights

    @property
    def output_dtype(self) -> torch.dtype | None:
        """The dtype that the model's outputs are cast to; None leaves them alone."""
        if self.cast_model_outputs is not None or self.cast_model_type is None:
            return self.cast_model_outputs
        return torch.float32

    def options(self) -> dict[str, object]:
        """The options by name, as the banner shows them."""
        hidden = ("opt_level", "summary")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in hidden}


def _patching(level: str, half: torch.dtype, scale: LossScale) -> Policy:
    summary = f"float32 weights, whitelisted functions in {name_dtype(half)}"
    return Policy(
        level,
        summary,
        patch_torch_functions=True,
        patch_torch_functions_type=half,
        loss_scale=scale,
    )


def _casting(level: str, half: torch.dtype, scale: LossScale) -> Policy:
    summary = f"{name_dtype(half)} model, float32 BatchNorm and master weights"
    return Policy(
        level,
        summary,
        cast_model_type=half,
        keep_batchnorm_fp32=True,
        master_weights=True,
        loss_scale=scale,
    )


_DYNAMIC, _ONE = DynamicLossScale(), StaticLossScale(1.0)

OPT_LEVELS: dict[str, Policy] = {
    "O0": Policy("O0", "float32 throughout, the baseline of accuracy", cast_model_type=torch.float32),
    "O1": _patching("O1", torch.float16, _DYNAMIC),
    "O2": _casting("O2", torch.float16, _DYNAMIC),
    "O3": Policy(
        "O3",
        "float16 throughout, the baseline of speed",
        cast_model_type=torch.float16,
        keep_batchnorm_fp32=False,
    ),
    "O4": _patching("O4", torch.bfloat16, _ONE),
    "O5": _casting("O5", torch.bfloat16, _ONE),
}
"""The opt levels by name, "O0" to "O5", each a `Policy` with the defaults of `initialize`."""


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
    dtype = _parse_half("dtype", overrides.dtype)
    patch_type = _parse_half("patch_torch_functions_type", overrides.patch_torch_functions_type)
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
    given = _agree(dtype=dtype, cast_model_type=model_type)
    return replace(level, cast_model_type=level.cast_model_type if given is None else given or None)


def _parse_model_type(value: object) -> ModelType:
    if value is False or value == "False":
        return False
    dtype = parse_dtype("cast_model_type", value)
    if dtype not in (None, torch.float32, *HALF_TYPES):
        raise AmpValueError(
            f"cast_model_type={value!r}: expected torch.float16, torch.bfloat16, torch.float32 or False"
        )
    return dtype


def _parse_half(name: str, value: object) -> torch.dtype | None:
    dtype = parse_dtype(name, value)
    if dtype not in (None, *HALF_TYPES):
        raise AmpValueError(f"{name}={value!r}: expected torch.float16 or torch.bfloat16")
    return dtype


def _agree(**dtypes: ModelType) -> ModelType:
    given = {name: dtype for name, dtype in dtypes.items() if dtype is not None}
    if len(set(given.values())) > 1:
        text = " and ".join(f"{name}={dtype}" for name, dtype in given.items())
        raise AmpValueError(f"{text} contradict each other: give one of them")
    return next(iter(given.values()), None)


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
            f"patch_torch_functions=True contradicts {level}: only O1 and O4 patch torch's functions; "
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


def _resolve_loss_scale(level: Policy, policy: Policy, overrides: Overrides) -> LossScale:
    low, high = overrides.min_loss_scale, overrides.max_loss_scale
    value = overrides.loss_scale
    if isinstance(value, DynamicLossScale) and (low is not None or high != 2.0**24):
        raise AmpValueError(
            f"min_loss_scale={low!r} and max_loss_scale={high!r} beside {value!r}: "
            f"give the bounds in DynamicLossScale alone"
        )
    if value in (None, "None"):
        # float16 gradients underflow without a scale, so O4 and O5 in float16 take that of O1 and O2.
        dynamic = isinstance(level.loss_scale, DynamicLossScale) or (
            level.half is torch.bfloat16 and policy.half is torch.float16
        )
        value = "dynamic" if dynamic else level.loss_scale
    return parse_loss_scale(value, low, high)
