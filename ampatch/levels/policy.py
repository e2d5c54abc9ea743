"""What an opt level means."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import torch

from ampatch.levels.float8 import find_lack
from ampatch.levels.loss_scale import DynamicLossScale, LossScale, StaticLossScale
from ampatch.levels.precision import HALF_TYPES, name_dtype

ModelType = torch.dtype | Literal[False] | None  # False: the model's types are left alone


@dataclass(frozen=True, slots=True)
class Policy:
    """Says what one call of `initialize` does; the field names are those of apex's options.

    `cast_model_type` is the dtype of the model: its inputs are cast to it, its weights if it is a half
    type, and its outputs to float32 (None: all of them stay). `patch_torch_functions_type` is the half
    type of the patched functions.
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
    float8_recipe: str | None = None  # of torchao, for the products of large linear layers

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

    def find_lack(self) -> str:
        """Says what this machine lacks for the level, "" if nothing; asks a GPU only if in float8."""
        return "" if self.float8_recipe is None else find_lack(self.float8_recipe)

    def options(self) -> dict[str, object]:
        """The options by name, as the banner shows them."""
        hidden = ("opt_level", "summary")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in hidden}

    def overridden(self) -> dict[str, object]:
        """The level's defaults of those options that have another value, by name."""
        defaults = OPT_LEVELS[self.opt_level].options()
        return {name: defaults[name] for name, value in self.options().items() if value != defaults[name]}


def _patching(level: str, half: torch.dtype, scale: LossScale) -> Policy:
    summary = f"float32 weights, functions cast to {name_dtype(half)} or float32"
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
    "O6": replace(
        _patching("O6", torch.bfloat16, _ONE),
        summary="as O4, with the products of large linear layers in float8",
        float8_recipe="tensorwise",
    ),
}
"""The opt levels by name, "O0" to "O6", each a `Policy` with the defaults of `initialize`."""
