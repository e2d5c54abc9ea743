"""Whether a kept cast still holds: who else has the weight, its memory or the cast, and was one written."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn import Parameter

from ampatch.levels.private import count_holders, count_users, find_stream

count_references = sys.getrefcount
NEIGHBOURS = "_ampatch_neighbours"  # of a cast: how many others are in its block of memory


def _count_own(requires_grad: bool) -> tuple[int | None, int]:
    """How many users its memory and how many references itself a parameter has that only an entry holds."""
    parameter = Parameter(torch.empty(1), requires_grad)
    with torch.enable_grad():
        entries = {0: (parameter.half(), parameter, parameter.untyped_storage())}
    del parameter
    ((_, parameter, memory),) = [entry for _, entry in list(entries.items())]
    return count_users(memory._cdata), count_references(parameter)


def _count_holders(entry: tuple) -> tuple[int | None, int, int | None]:
    """How many users the memory of an entry's cast has, how many references in Python, and holders in C++."""
    cast = entry[0]
    return count_users(cast.untyped_storage()._cdata), count_references(cast), count_holders(cast)


def _count_own_holders() -> tuple[int | None, int, int | None] | None:
    """What `_count_holders` gives where only an entry holds a cast; None if it sees no graph that does."""
    with torch.enable_grad():
        entry = (Parameter(torch.empty(1)).half(),)
        own = _count_holders(entry)
        graph = torch.ones(1, dtype=torch.float16, requires_grad=True) * entry[0]
        held = _count_holders(entry)
    del graph
    return own if own != held else None


_OWN_USERS = _count_own(requires_grad=False)[0]
OWN_REFERENCES = {requires_grad: _count_own(requires_grad)[1] for requires_grad in (False, True)}

_OWN_HOLDERS = _count_own_holders()
CAN_SEE_GRAPHS = _OWN_HOLDERS is not None  # that hold a cast


def is_held(entry: tuple) -> bool:
    """Whether others hold the cast that an entry begins with, or its memory: a graph, or who looked at it."""
    found = _count_holders(entry)
    if found == _OWN_HOLDERS:
        return False
    users, *others = found
    neighbours = getattr(entry[0], NEIGHBOURS, 0)
    return not neighbours or users is None or (users - neighbours, *others) != _OWN_HOLDERS


def is_shared(memory: torch.UntypedStorage) -> bool:
    """Whether others than a parameter and its entry have its memory, or may have."""
    users = count_users(memory._cdata)
    return users is None or users > _OWN_USERS  # type: ignore[operator]


def find_memory(parameter: Tensor) -> torch.UntypedStorage | None:
    """Returns the memory of a parameter that nobody writes without a trace who cannot be seen to share it.

    Not if other processes or libraries have it.
    """
    memory = parameter.untyped_storage()
    # NumPy's memory is not resizable; `detach_` leaves no trace.
    if is_shared(memory) or not (memory.resizable() and parameter.is_leaf):
        return None
    return memory if parameter.is_cuda or not memory.is_shared() else None


# An entry of a cache, as CastCache describes it


def is_as_it_was(entry: tuple) -> bool:
    """Whether a cast still holds for sure: nobody else reaches the memory, and no function wrote the cast."""
    memory, parameter = entry[7], entry[6]
    is_alone = memory is not None and not is_shared(memory)
    return is_alone and parameter._version == entry[1] and _is_in_place(entry)


def fits(entry: tuple) -> bool:
    """Whether a cast may be written again: its parameter still has its shape, and nobody holds the cast."""
    if is_held(entry) or not _is_in_place(entry) or entry[0].shape != entry[6].shape:
        return False
    return entry[4] is None or not torch.cuda.is_current_stream_capturing()


def _is_in_place(entry: tuple) -> bool:
    """Whether a parameter has the memory that it was cast from, and its cast was written by nobody else."""
    cast, _, pointer, requires_grad, device, stream, parameter, _, written = entry
    return (
        cast._version == written
        and parameter.data_ptr() == pointer
        and parameter.requires_grad == requires_grad
        and (device is None or find_stream(device) == stream)
    )
