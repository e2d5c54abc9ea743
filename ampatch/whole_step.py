"""The step of a wrapper around an optimizer, such as LARC or Lookahead: skipped as a whole."""

from __future__ import annotations

from contextlib import ExitStack
from types import MethodType

from ampatch.optimizer import AmpOptimizer


class WholeStep:
    """Stands in for `wrapper.step`, which has no hooks: on an overflow the optimizer inside steps alone.

    Its own hooks make that step a no-op, and settle the gradients. Otherwise gradients of masters are
    there until the whole step is over: Lookahead asks for them. A method of the wrapper, because
    LR schedulers take `step` apart into function and object; they may have wrapped it when we close,
    and then it stays there and does nothing. A copy of the wrapper has the step of its class.
    """

    __name__ = "step"  # by which a method pickles

    def __init__(self, wrapper: object, amp: AmpOptimizer) -> None:
        self._wrapper = wrapper
        self._own = vars(wrapper).get("step")  # what a scheduler put there
        self._step = wrapper.step  # type: ignore[attr-defined]
        self._amp: AmpOptimizer | None = amp

    def __get__(self, wrapper: object, kind: type | None = None) -> MethodType:
        return MethodType(self, wrapper)

    def __call__(self, wrapper: object, *args: object, **kwargs: object) -> object:
        if wrapper is not self._wrapper:
            return type(wrapper).step(wrapper, *args, **kwargs)  # type: ignore[attr-defined]
        amp = self._amp
        if amp is None:
            return self._step(*args, **kwargs)
        if amp.must_skip():
            return amp.optimizer.step()
        # As a step with hooks would: what is inside of it is a part of it.
        changed = amp.before_step(amp.optimizer, (wrapper, *args), kwargs)
        (_, *args), kwargs = changed or ((wrapper, *args), kwargs)  # type: ignore[assignment]
        result = self._step(*args, **kwargs)
        amp.after_step(amp.optimizer, (), {})
        return result

    def open(self, undo: ExitStack) -> None:
        """Takes its place; `undo` receives the way back."""
        self._wrapper.step = MethodType(self, self._wrapper)  # type: ignore[attr-defined]
        undo.callback(self._close)

    def _close(self) -> None:
        self._amp = None
        if getattr(vars(self._wrapper).get("step"), "__func__", None) is not self:
            return
        if self._own is None:
            del self._wrapper.step  # type: ignore[attr-defined]
        else:
            self._wrapper.step = self._own  # type: ignore[attr-defined]
