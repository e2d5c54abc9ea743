"""The modules that a CPU has no half kernel for, which run in float32 there."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import Module

from ampatch import lists


def select_without_kernel(models: Iterable[Module]) -> list[Module]:
    """Returns the modules that a CPU cannot run in half, of the models that are on one.

    A model without parameters may be called on any device, and counts as one on a CPU.
    """
    rows = lists.MODULES_ON_CPU.select(torch.__version__).rows
    classes = tuple(getattr(torch.nn, row.name) for row in rows)
    return [
        module
        for model in models
        if "cpu" in ({param.device.type for param in model.parameters()} or {"cpu"})
        for module in model.modules()
        if isinstance(module, classes)
    ]
