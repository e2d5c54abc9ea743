"""Deep copies of an optimizer with masters: a model that is copied with it follows the copy."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

from torch.optim import Optimizer

from ampatch.levels.precision import HALF_TYPES
from ampatch.steps.masters import MasterParams
from ampatch.steps.optimizer import AmpOptimizer
from ampatch.steps.step import StepListener
from ampatch.steps.weight import Weight


class CopyWithMasters:
    """Copies an optimizer and its masters; what `copy.deepcopy` finds on it as `__deepcopy__`.

    The copy is no part of the session. It takes the gradients of plain backward passes, steps masters of
    its own and rounds them into the copied half weights: `copy.deepcopy((model, optimizer))` trains.
    """

    def __init__(self, amp: AmpOptimizer) -> None:
        self._amp = amp

    def __call__(self, memo: dict) -> Optimizer:
        copied = self._copy_plain(memo)
        masters = self._amp.masters.make_empty([copied])
        for pair in self._amp.masters:
            # The memo hands the same copy to a model that is copied together with the optimizer.
            masters.adopt(copy.deepcopy(pair.half, memo), copy.deepcopy(pair.master, memo))
        _follow(copied, masters)
        return copied

    def _copy_plain(self, memo: dict) -> Optimizer:
        optimizer = self._amp.optimizer
        del optimizer.__deepcopy__
        try:
            return copy.deepcopy(optimizer, memo)
        finally:
            optimizer.__deepcopy__ = self  # type: ignore[attr-defined]


def _follow(optimizer: Optimizer, masters: MasterParams) -> None:
    """Has an optimizer that nobody knows step masters, and half weights follow them."""
    amp = AmpOptimizer(optimizer, masters, StepListener())
    optimizer.register_step_pre_hook(amp.before_step)
    optimizer.register_step_post_hook(amp.after_step)
    zero_grad = functools.partial(amp.zero_grad, optimizer.zero_grad)
    optimizer.zero_grad = functools.update_wrapper(zero_grad, optimizer.zero_grad)  # type: ignore[method-assign]
    add_group = functools.partial(_add_param_group, amp, optimizer.add_param_group)
    optimizer.add_param_group = functools.update_wrapper(add_group, optimizer.add_param_group)  # type: ignore[method-assign]
    optimizer.__deepcopy__ = CopyWithMasters(amp)  # type: ignore[attr-defined]


def _add_param_group(amp: AmpOptimizer, original: Callable, group: dict) -> None:
    original(group)
    for param in amp.optimizer.param_groups[-1]["params"]:
        if param.dtype in HALF_TYPES:
            amp.masters.add(Weight(param))
    amp.masters.install()
