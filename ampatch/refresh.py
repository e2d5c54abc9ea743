"""The hook that keeps a half model up with masters that others write."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Module

from ampatch.masters import MasterParams


class RefreshWeights:
    """Brings masters that were written outside of a step into the model; a forward pre-hook.

    Optimizers such as SAM and Lookahead write to parameters by themselves, and so do users who clip
    `master_params`. A deep copy or a pickled model has no masters, and its hook nothing to do.
    """

    def __init__(self, masters: Sequence[MasterParams] = ()) -> None:
        self._masters = masters

    def __call__(self, module: Module, args: tuple) -> None:
        if not torch.compiler.is_dynamo_compiling():
            for masters in self._masters:
                masters.copy_edits_to_model()

    def __deepcopy__(self, memo: dict) -> RefreshWeights:
        return RefreshWeights()

    def __reduce__(self) -> tuple:
        return RefreshWeights, ()
