"""A kept cast, and whether it still holds: who else has the weight or the cast, and was one written."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from ampatch.levels.private import count_holders, count_users, find_stream

count_references = sys.getrefcount
NEIGHBOURS = "_ampatch_neighbours"  # of a cast: how many others are in its block of memory


@dataclass(eq=False, slots=True)
class KeptCast:
    """The cast of a parameter, with what the parameter was when the cast was made or written.

    Not frozen: that takes five times as long to make. Slots are read as fast as a tuple is unpacked.
    """

    cast: Tensor
    version: int  # of the parameter
    pointer: int
    requires_grad: bool
    device: int | None  # index of the CUDA device; elsewhere there are no streams
    stream: int | None
    parameter: Tensor  # kept, so that its id stays its own
    memory: torch.UntypedStorage | None  # of the parameter, if the cast may outlive an iteration
    written: int  # version of the cast

    def holds(self) -> bool:
        """Whether the cast is still right for sure: nobody else reaches the memory, or wrote the cast."""
        is_alone = self.memory is not None and not is_shared(self.memory)
        return is_alone and self.parameter._version == self.version and self._is_in_place()

    def is_writable(self) -> bool:
        """Whether the cast may be written again: nobody holds it, and its parameter still has its shape."""
        cast, parameter = self.cast, self.parameter
        # `count_holders` and `_is_in_place`, written out: each weight is asked at each step.
        holders = count_users(cast.untyped_storage()._cdata), count_references(cast), count_holders(cast)
        return (
            (holders == _OWN_HOLDERS or self._are_neighbours(holders))
            and cast._version == self.written
            and parameter.data_ptr() == self.pointer
            and parameter.requires_grad == self.requires_grad
            and cast.shape == parameter.shape
            and (self.device is None or self._can_write_on_stream())
        )

    def _can_write_on_stream(self) -> bool:
        is_same = find_stream(self.device) == self.stream
        return is_same and not torch.cuda.is_current_stream_capturing()

    def _is_in_place(self) -> bool:
        """Whether the parameter has the memory that it was cast from, and nobody else wrote the cast."""
        return (
            self.cast._version == self.written
            and self.parameter.data_ptr() == self.pointer
            and self.parameter.requires_grad == self.requires_grad
            and (self.device is None or find_stream(self.device) == self.stream)
        )

    def _are_neighbours(self, holders: tuple[int | None, int, int | None]) -> bool:
        """Whether what holds the cast beside us are other casts in its block of memory: no graph does."""
        users, *others = holders
        neighbours = getattr(self.cast, NEIGHBOURS, 0)
        return bool(neighbours) and users is not None and (users - neighbours, *others) == _OWN_HOLDERS

    def count_holders(self) -> tuple[int | None, int, int | None]:
        """Counts the users of the cast's memory, and what holds the cast itself: in Python, and in C++."""
        cast = self.cast
        return count_users(cast.untyped_storage()._cdata), count_references(cast), count_holders(cast)

    def is_only_here(self) -> bool:
        return self.count_references() <= _OWN_REFERENCES[self.requires_grad]

    def count_references(self) -> int:
        """Counts what holds the parameter in Python."""
        parameter = self.parameter
        return count_references(parameter)


def _make_alone(requires_grad: bool) -> KeptCast:
    """Makes a cast, and has nothing but it hold the parameter: what is counted then is our own."""
    parameter = Parameter(torch.empty(1), requires_grad)
    with torch.enable_grad():
        cast = parameter.half()
    return KeptCast(cast, 0, 0, requires_grad, None, None, parameter, parameter.untyped_storage(), 0)


def _count_own_holders() -> tuple[int | None, int, int | None] | None:
    """What `count_holders` gives where nobody else holds a cast; None if it sees no graph that does."""
    kept = _make_alone(requires_grad=True)
    own = kept.count_holders()
    with torch.enable_grad():
        graph = torch.ones(1, dtype=torch.float16, requires_grad=True) * kept.cast
    held = kept.count_holders()
    del graph
    return own if own != held else None


_ALONE = {requires_grad: _make_alone(requires_grad) for requires_grad in (False, True)}
_OWN_USERS = count_users(_ALONE[False].memory._cdata) or 0  # type: ignore[union-attr]
_OWN_REFERENCES = {requires_grad: kept.count_references() for requires_grad, kept in _ALONE.items()}
_OWN_HOLDERS = _count_own_holders()
CAN_SEE_GRAPHS = _OWN_HOLDERS is not None  # that hold a cast


def is_shared(memory: torch.UntypedStorage) -> bool:
    """Whether others than a parameter and its kept cast have its memory, or may have."""
    users = count_users(memory._cdata)
    return users is None or users > _OWN_USERS


def find_memory(parameter: Tensor) -> torch.UntypedStorage | None:
    """Returns the memory of a parameter if whoever else may write there can be seen; else None."""
    memory = parameter.untyped_storage()
    # NumPy's memory is not resizable; `detach_` leaves no trace.
    if is_shared(memory) or not (memory.resizable() and parameter.is_leaf):
        return None
    # Other processes have shared memory.
    return memory if parameter.is_cuda or not memory.is_shared() else None
