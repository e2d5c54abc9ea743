"""Notices what is written to weights through `.data`, which leaves no trace on the tensor."""

from __future__ import annotations

from contextlib import ExitStack

from torch import Tensor
from torch.nn import Parameter

from ampatch.cast import CastState
from ampatch.patcher import Patcher, get_raw


class DataWatch:
    """Watches `Parameter.data` while a session depends on weights that it copied.

    Who asks for `.data` may write: a cached cast is forgotten, and the parameter noted in `touched` if
    it is in `watched` (half weights and their masters), so that the two are compared before they are
    used. Idioms such as `p.data.clamp_(-c, c)` work.
    """

    def __init__(self, casts: CastState) -> None:
        self._casts = casts
        self._is_open = False
        self.watched: set[int] = set()
        self.touched: set[int] = set()

    def open(self, undo: ExitStack) -> None:
        """Puts a property on Parameter, once a session; `undo` receives the way back."""
        if self._is_open:
            return
        self._is_open = True
        patcher = Patcher()
        undo.callback(self._close, patcher)
        original = get_raw(Parameter, "data")

        def read(parameter: Parameter) -> Tensor:
            self._note(parameter)
            return original.__get__(parameter)

        def write(parameter: Parameter, value: Tensor) -> None:
            self._note(parameter)
            original.__set__(parameter, value)

        patcher.replace(Parameter, "data", property(read, write, doc=original.__doc__))

    def _note(self, parameter: Parameter) -> None:
        self._casts.forget(parameter)
        if id(parameter) in self.watched:
            self.touched.add(id(parameter))

    def _close(self, patcher: Patcher) -> None:
        self._is_open = False
        self.watched.clear()
        self.touched.clear()
        patcher.close()
