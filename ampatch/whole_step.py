"""The step of a wrapper around an optimizer, such as LARC or Lookahead: skipped as a whole."""

from __future__ import annotations

from contextlib import ExitStack
from types import MethodType

from ampatch.optimizer import AmpOptimizer


class WholeStep:
    """Stands in for `wrapper.step`, which has no hooks: on an overflow the optimizer inside steps alone.

    Its own hooks make that step a no-op, and settle the gradients. A method of the wrapper, because
    LR schedulers take `step` apart into function and object; they may have wrapped it when we close,
    and then it stays there and does nothing.
    """

    def __init__(self, wrapper: object, amp: AmpOptimizer) -> None:
        self._own = vars(wrapper).get("step")  # what a scheduler put there
        self._step = wrapper.step  # type: ignore[attr-defined]
        self._amp: AmpOptimizer | None = amp

    def __get__(self, wrapper: object, kind: type | None = None) -> MethodType:
        return MethodType(self, wrapper)

    def __call__(self, wrapper: object, *args: object, **kwargs: object) -> object:
        if self._amp is not None and self._amp.must_skip():
            return self._amp.optimizer.step()
        return self._step(*args, **kwargs)

    def open(self, wrapper: object, undo: ExitStack) -> None:
        """Takes its place; `undo` receives the way back."""
        wrapper.step = MethodType(self, wrapper)  # type: ignore[attr-defined]
        undo.callback(self._close, wrapper)

    def _close(self, wrapper: object) -> None:
        self._amp = None
        if getattr(vars(wrapper).get("step"), "__func__", None) is not self:
            return
        if self._own is None:
            del wrapper.step  # type: ignore[attr-defined]
        else:
            wrapper.step = self._own  # type: ignore[attr-defined]
