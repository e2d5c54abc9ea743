"""Backward passes: after each of them half weights and their masters hold the same gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from threading import get_ident
from types import GetSetDescriptorType

import torch
from torch import Tensor

from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.private import RUN_BACKWARD, TAKES_ANY_GRAD, graph_task, set_data
from ampatch.patching.patcher import Patcher, SessionPatch, get_raw
from ampatch.session.members import Members
from ampatch.steps.masters.weight import Weight


class Backwards(SessionPatch):
    """Tells optimizers with masters when a backward begins and has ended; no hook of torch's does.

    `torch.autograd.backward` calls torch's engine by a name that is patched: whoever patches
    `torch.autograd.backward`, as the doctor does, sees afterwards what scripts will see.
    """

    def __init__(self, members: Members, weights: Mapping[int, Weight]) -> None:
        super().__init__()
        self._members, self._weights = members, weights

    def patch(self, patcher: Patcher) -> None:
        """Replaces what makes gradients, and in an older torch how they are assigned."""
        is_missing = RUN_BACKWARD.is_missing()
        place = (torch.autograd, "backward") if is_missing else RUN_BACKWARD.find_place()
        patcher.replace(*place, self._watch(getattr(*place)))
        if not TAKES_ANY_GRAD:
            patcher.replace(Tensor, "grad", self._take_any(get_raw(Tensor, "grad")))

    def _take_any(self, original: GetSetDescriptorType) -> property:
        """Lets half weights take float32 gradients, as `param.grad *= 0.5` assigns one."""
        weights = self._weights

        def write(tensor: Tensor, grad: Tensor | None) -> None:
            is_other = grad is not None and grad.dtype is torch.float32 and tensor.dtype in HALF_TYPES
            weight = weights.get(id(tensor)) if is_other else None
            if weight is None or weight.is_wrapper:
                original.__set__(tensor, grad)
            else:
                original.__set__(tensor, torch.empty_like(tensor))
                set_data(original.__get__(tensor), grad)

        return property(original.__get__, write, doc=original.__doc__)

    def _watch(self, run: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(run)
        def backward(*args: object, **kwargs: object) -> object:
            is_inner = graph_task() != -1 or torch.compiler.is_dynamo_compiling()
            if is_inner or not kwargs.get("accumulate_grad", True):  # of torch.autograd.grad
                return run(*args, **kwargs)
            amps = self._members.optimizers(of_thread=get_ident())
            for amp in amps:
                if amp.masters.pairs:
                    amp.begin_backward()
            try:
                return run(*args, **kwargs)
            finally:
                for amp in amps:
                    if amp.masters.pairs:
                        amp.end_backward()

        return backward
