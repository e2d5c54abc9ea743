"""The recipes of float8 products: which sizes gain, and which devices have them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ampatch.errors import AmpValueError

EMULATE = "AMPATCH_FLOAT8_EMULATE"
INSTALL = "pip install 'ampatch[float8]'"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What torchao documents of a recipe: which sizes gain on an H100, and which GPUs multiply so."""

    gains: Callable[[int, int], bool]  # by the features out, and in
    sizes: str
    capability: tuple[int, int]

    def find_lack(self, device: torch.device) -> str:
        """Says why a device has no such products, "" if it has, or if they are emulated."""
        if emulates():
            return ""
        if device.type != "cuda":
            return f"a {device.type} has no float8 products"
        own = torch.cuda.get_device_capability(device)
        if own >= self.capability:
            return ""
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {own[0]}.{own[1]}, and float8 "
            f"products need {self.capability[0]}.{self.capability[1]}"
        )


def _gains_tensorwise(out: int, into: int) -> bool:
    return out > 1024 or into > 4096


def _gains_rowwise(out: int, into: int) -> bool:
    return out > 2048 and into > 1024 and (out > 4096 or into > 2048)


# The sizes are those of torchao 0.18's `_auto_filter_for_recipe` (torchao/float8/float8_linear_utils.py). It
# is private, gives no reasons, and knows nothing of the third recipe.
_ROWWISE = Recipe(_gains_rowwise, "more than 2048 out and 1024 in, and more than 4096 out or 2048 in", (9, 0))
RECIPES = {  # by torchao's names
    "tensorwise": Recipe(_gains_tensorwise, "more than 1024 out or 4096 in", (8, 9)),
    "rowwise": _ROWWISE,
    "rowwise_with_gw_hp": _ROWWISE,
}


def find_recipe(name: object) -> Recipe:
    """Returns a recipe; raises AmpValueError for an unknown name."""
    if name not in RECIPES:
        raise AmpValueError(f"float8_recipe={name!r}: expected one of {', '.join(map(repr, RECIPES))}")
    return RECIPES[str(name)]


def emulates() -> bool:
    """Whether products in float8 are emulated, as an environment variable says: for trials without a GPU."""
    return os.environ.get(EMULATE, "0") not in ("", "0")


def find_lack(recipe: str, device: torch.device | None = None) -> str:
    """Says why this machine, or one device of it, cannot train by a recipe; "" if it can."""
    if importlib.util.find_spec("torchao") is None:
        return f"torchao is not installed: {INSTALL}"
    best = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return RECIPES[recipe].find_lack(device or best)
