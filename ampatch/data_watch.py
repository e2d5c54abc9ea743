"""Notices what is written to weights through `.data`, which leaves no trace on the tensor."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from ampatch.cast import CastState
from ampatch.patcher import Patcher, SessionPatch, get_raw


class DataWatch(SessionPatch):
    """Watches `Parameter.data` while a session depends on weights that it copied.

    Who asks for `.data` may write: a cached cast is forgotten, and the parameter noted in `touched` if
    it is in `watched` (half weights and their masters), so that the two are compared before they are
    used. Idioms such as `p.data.clamp_(-c, c)` work.
    """

    def __init__(self, casts: CastState) -> None:
        super().__init__()
        self._casts = casts
        self.watched: set[int] = set()
        self.touched: set[int] = set()

    def patch(self, patcher: Patcher) -> None:
        """Puts a property on Parameter."""
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

    def forget(self) -> None:
        """Drops the parameters."""
        self.watched.clear()
        self.touched.clear()
