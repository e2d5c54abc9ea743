"""The hook that keeps a half model up with float32 values that others write."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence

import torch
from torch.nn import Module

from ampatch.models.cast_tensor import Float32Values
from ampatch.patching.torch_features import BeforeGraph
from ampatch.steps.masters import MasterParams
from ampatch.steps.weight import Weight


class RefreshWeights(BeforeGraph):
    """Brings float32 values that were written outside of a step into the model; a forward pre-hook.

    Optimizers such as SAM and Lookahead write to parameters by themselves, and so do users who clip
    `master_params`, or average into what `state_dict()` shows. A deep copy or a pickled model has no
    masters, and values of its own.
    """

    def __init__(self, values: Sequence[Float32Values], masters: Sequence[MasterParams] = ()) -> None:
        self._values = values
        self._notices = list({id(own.notice): own.notice for own in values}.values())
        self._masters = [weakref.ref(one) for one in masters]  # a model keeps no optimizer alive

    def __call__(self, module: Module, args: tuple) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self.refresh()

    def refresh(self) -> None:
        """Rounds what was written into the model; no host sync."""
        for notice in self._notices:
            if notice.any:
                self._follow(Weight.follow_shown)
        for reference in self._masters:
            masters = reference()
            if masters is None:
                self._follow(Weight.follow)
            else:
                masters.copy_edits_to_model()

    def _follow(self, follow: Callable[[Weight], None]) -> None:
        for values in self._values:
            for weight in values:
                follow(weight)

    def __deepcopy__(self, memo: dict) -> RefreshWeights:
        return RefreshWeights(copy.deepcopy(self._values, memo))

    def __reduce__(self) -> tuple:
        return RefreshWeights, (self._values,)
