"""Optimizers that others wrote, and wrappers around one: what is inside, and a step skipped as a whole."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from types import MethodType

from torch.optim import Optimizer

from ampatch.levels.patcher import Patcher
from ampatch.levels.stack import wrap_closure
from ampatch.levels.undo import weakly
from ampatch.steps.optimizer import AmpOptimizer


def list_wrapped(optimizer: object) -> Iterator[object]:
    """Yields a wrapper such as LARC or Lookahead, what it keeps, and so on to the innermost optimizer.

    A wrapper keeps it as `optim` or `optimizer`, or else as an attribute of another name.
    """
    while optimizer is not None:
        yield optimizer
        named = getattr(optimizer, "optim", None) or getattr(optimizer, "optimizer", None)
        attributes = vars(optimizer).values() if hasattr(optimizer, "__dict__") else ()
        optimizer = named or next((value for value in attributes if isinstance(value, Optimizer)), None)


def find_hooked(optimizer: object) -> Optimizer | None:
    """Returns the first of these that has hooks of its own, None if none has.

    Accelerate's wrapper derives from Optimizer and never calls its `__init__`; Lightning's hands on whatever
    it is asked for, hooks too.
    """
    for one in list_wrapped(optimizer):
        if "_optimizer_step_pre_hooks" in getattr(one, "__dict__", {}):
            return one  # type: ignore[return-value]  # only an Optimizer has these
    return None


def needs_whole_step(outer: object, optimizer: Optimizer) -> bool:
    """Whether the hooks of an optimizer's step are not enough to skip it.

    They can hide the gradients, and torch's own classes change nothing without. Others count steps, or
    raise where they find no gradient; and what a wrapper such as Lookahead does, no hook knows of. Our
    LARC changes nothing but gradients.
    """
    if not hasattr(outer, "step") or not hasattr(outer, "__dict__"):
        return False
    if outer is not optimizer and not (
        _package(outer) == "ampatch" and vars(outer).get("optim") is optimizer
    ):
        return True
    is_own = _package(optimizer) in ("torch", "ampatch")
    return not (is_own or getattr(optimizer, "_step_supports_amp_scaling", False))


def _package(value: object) -> str:
    return type(value).__module__.partition(".")[0]


class WholeStep:
    """Stands in for the `step` of an object, and on an overflow does not call it.

    Gradients of masters are there until the whole step is over: Lookahead asks for them. It is a
    method of the object, because LR schedulers take `step` apart into function and object; they may have
    wrapped it when we close, and then it stays there and does nothing. A copy of the object has the step
    of its class.
    """

    __name__ = "step"  # by which a method pickles

    def __init__(self, owner: object, amp: AmpOptimizer) -> None:
        self._owner, self._patcher = owner, Patcher()
        self._step = owner.step  # type: ignore[attr-defined]
        self._amp: AmpOptimizer | None = amp
        if hasattr(self._step, "_wrapped_by_lr_sched"):
            self._wrapped_by_lr_sched = True  # or the scheduler warns that its step is gone

    def __get__(self, owner: object, kind: type | None = None) -> MethodType:
        return MethodType(self, owner)

    def __call__(self, owner: object, *args: object, **kwargs: object) -> object:
        if owner is not self._owner:
            return type(owner).step(owner, *args, **kwargs)  # type: ignore[attr-defined]
        amp = self._amp
        if amp is None:
            return self._step(*args, **kwargs)
        # As the hooks of a step: those that run inside of it find that it has begun already.
        changed = amp.before_step(amp.optimizer, (owner, *args), kwargs)
        amp.masters.adopt_writes()
        if changed is not None:
            (_, *args), kwargs = wrap_closure(*changed, amp.around.call_closure)  # type: ignore[misc]
        result = None
        if amp.was_skipped():
            for each in (amp.optimizer, owner):
                if isinstance(each, Optimizer):
                    each._opt_called = True  # or its scheduler takes the step for one that was forgotten
            averager = getattr(owner, "averager", None)
            if averager is not None:  # of PostLocalSGDOptimizer: other ranks, which did not skip, wait for it
                amp.show_grads()
                averager.average_parameters(params=amp.optimizer.param_groups)
        else:
            amp.around.begin_step(frame := sys._getframe())  # which is more than the optimizer's own
            result = self._step(*args, **kwargs)
            amp.around.end_step(frame)
        amp.after_step(amp.optimizer, (), {})
        return result

    def open(self, undo: ExitStack) -> None:
        """Takes its place; `undo` receives the way back."""
        self._patcher.put(self._owner, "step", MethodType(self, self._owner))
        undo.callback(weakly(type(self)._close, self))  # the optimizer inside may outlive its wrapper

    def _close(self) -> None:
        self._amp = None
        self._patcher.retry()
