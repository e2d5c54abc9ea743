"""The hook that keeps a half model up with float32 values that others write."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch.nn import Module

from ampatch.before_graph import BeforeGraph
from ampatch.masters import MasterParams
from ampatch.values import Float32Values


class RefreshWeights(BeforeGraph):
    """Brings float32 values that were written outside of a step into the model; a forward pre-hook.

    Optimizers such as SAM and Lookahead write to parameters by themselves, and so do users who clip
    `master_params`, or average into what `state_dict()` shows. A deep copy or a pickled model has no
    masters, and values of its own.
    """

    def __init__(self, values: Float32Values, masters: Sequence[MasterParams] = ()) -> None:
        self._values = values
        self._masters = masters

    def __call__(self, module: Module, args: tuple) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self.refresh()

    def refresh(self) -> None:
        """Rounds what was written into the model; no host sync."""
        self._values.follow_shown()
        for masters in self._masters:
            masters.copy_edits_to_model()

    def __deepcopy__(self, memo: dict) -> RefreshWeights:
        return RefreshWeights(copy.deepcopy(self._values, memo))

    def __reduce__(self) -> tuple:
        return RefreshWeights, (self._values,)
