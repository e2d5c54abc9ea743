"""The casts of weights: each made once while its weight stays as it is, and never stale."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from threading import get_ident

import torch
from torch import Tensor
from torch.nn import Parameter

from ampatch.casts.holders import (
    CAN_SEE_GRAPHS,
    OWN_REFERENCES,
    count_references,
    find_memory,
    fits,
    is_as_it_was,
)
from ampatch.casts.thread import ThreadState
from ampatch.levels.precision import ELIGIBLE
from ampatch.levels.private import (
    PROXY,
    dispatch_mode,
    find_stream,
    is_transformed,
    tracing_state,
)

# Bound before anything is patched, and quicker than Tensor.to (1.5 against 2.4 µs).
CONVERT: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
    torch.float32: Tensor.float,
}

is_grad_enabled, _PROXY = torch.is_grad_enabled, PROXY.find()

SWEEP = 64  # rechecks, after which casts of parameters that are gone are looked for


class CastCache:
    """The casts of parameters to one dtype, each made once while the parameter stays as it is.

    An entry is used only while the parameter is the same object with the same memory, version and
    requires_grad. A write through a tensor that shares the memory and not the version (an earlier
    `.data`, an array of NumPy) changes none of these. So after an iteration a cast is used only if nobody
    else can reach the memory. A step ends the casts of what an optimizer steps, since fused ones leave no
    trace: the first that is asked for has them all written again, at once and into the same memory, but for
    those that a graph, or anybody else, still holds.

    On CUDA an entry is used only on the stream that it was made on. Another one would have to wait for it,
    and the memory would have to wait for that one; a cast of its own takes no longer.

    A cast is made with gradients on, whatever the mode, and serves every mode: the node behind it saves
    no tensors, and without grad mode nobody asks for it.
    """

    def __init__(
        self, dtype: torch.dtype, thread: ThreadState, is_on_device: Callable[[Tensor], bool]
    ) -> None:
        self.dtype = dtype
        self._convert = CONVERT[dtype]
        self._thread = thread
        self._sources = ELIGIBLE - {dtype}
        self._is_on_device = is_on_device
        # Other threads may add and forget some at any time, and the garbage collector clears them all when it
        # frees a model: who goes through them goes through a copy. Who moves one puts it into the other
        # dictionary first, in place, so that whoever forgets it finds it there as well.
        # By id: cast, version, pointer, requires_grad, device and stream (None but on CUDA), the parameter
        # (kept, so that its id stays its own), its memory if the cast may outlive an iteration, and the
        # version of the cast. Plain tuples unpack fastest.
        self._entries: dict[int, tuple] = {}
        self._waiting: dict[int, tuple] = {}  # entries of iterations that ended, not used since
        # By thread: entries of what its steps have changed, to be written again, by itself: only there is no
        # other step on the way.
        self._stale: dict[int, dict[int, tuple]] = {}
        self._rechecks = 0
        self._is_checked = False  # whether what waits was looked at since the last recheck
        self.made = 0  # casts of parameters, ever
        self._by_memory: dict[int, list[int]] = {}  # keys of entries; sorted when they are asked for
        self.cast_plain = self._make_cast_plain()

    @property
    def _all(self) -> tuple[dict[int, tuple], ...]:
        return self._entries, self._waiting, *self._stale.values()

    @property
    def nbytes(self) -> int:
        """The bytes of the casts that are kept."""
        return sum(entry[0].nbytes for _, entry in self._list())

    def _list(self) -> list[tuple[int, tuple]]:
        return [item for entries in self._all for item in entries.copy().items()]

    def forget_others(self) -> None:
        """Forgets every cast but those that are written again before use."""
        self._entries.clear()
        self._waiting.clear()

    def clear(self) -> None:
        """Forgets every cast."""
        for entries in (*self._all, self._by_memory):
            entries.clear()

    def forget(self, parameter: Tensor) -> None:
        """Forgets the cast of one parameter."""
        self._drop(id(parameter))

    def _drop(self, key: int) -> None:
        for entries in (*self._all, self._entries):  # into which what waits may have gone meanwhile
            entries.pop(key, None)

    def forget_memory(self, tensor: Tensor) -> None:
        """Forgets the casts of the parameters that a tensor shares memory with."""
        if not any(self._all):
            return
        if type(tensor) not in (Tensor, Parameter) or tensor.layout is not torch.strided:
            return
        by_memory = self._by_memory or self._sort_by_memory()
        for key in by_memory.get(tensor.untyped_storage()._cdata, ()):
            self._drop(key)

    def _sort_by_memory(self) -> dict[int, list[int]]:
        by_memory: dict[int, list[int]] = {}
        entries = self._list()
        for key, (*_, parameter, _, _) in entries:
            by_memory.setdefault(parameter.untyped_storage()._cdata, []).append(key)
        is_whole = len(entries) == sum(map(len, self._all))
        self._by_memory = by_memory if is_whole else {}
        return by_memory

    def recheck(self) -> None:
        """Has each cast checked before it is used again: its parameter may have changed unseen.

        That comes later, because most often a step comes first, and ends them all.
        """
        _merge(self._entries, into=self._waiting)
        self._entries.clear()
        self._is_checked = False
        self._rechecks += 1
        if self._rechecks % SWEEP == 0:
            self._drop_unowned()

    def _drop_unowned(self) -> None:
        """Forgets the casts of parameters that nobody else has any more."""
        for entries in self._all[1:]:
            for key, (_, _, _, requires_grad, *_, parameter, _, _) in entries.copy().items():
                if count_references(parameter) <= OWN_REFERENCES[requires_grad]:
                    entries.pop(key, None)

    @property
    def is_used(self) -> bool:
        """Whether there are casts that a step may end."""
        return bool(self._entries or self._waiting)

    def end(self, changed: Collection[int]) -> None:
        """Ends the casts of parameters, by id, that are changed now: they are written again before use."""
        waiting = self._waiting
        _merge(self._entries, into=waiting)
        self._entries.clear()
        ended = waiting.copy()
        if ended.keys() <= changed:
            waiting.clear()
        else:
            ended = {key: entry for key, entry in ended.items() if key in changed}
            for key in ended:
                waiting.pop(key, None)
        if CAN_SEE_GRAPHS:
            self._stale.setdefault(get_ident(), {}).update(ended)

    def cast(self, parameter: Tensor) -> Tensor:
        """Returns a parameter in the cache's dtype, cast now or earlier; others as they are."""
        # Without grad mode and outside of a forward nothing says when an iteration ends.
        if (is_grad_enabled() or self._thread.forwards) and not is_recorded():
            return self.cast_plain(parameter)
        if not self._is_eligible(parameter):
            return parameter
        self.made += 1
        return self._convert(parameter)

    def _is_eligible(self, parameter: Tensor) -> bool:
        return parameter.dtype in self._sources and self._is_on_device(parameter)

    def _make_cast_plain(self) -> Callable[[Tensor], Tensor]:
        find, make = self._entries.get, self._make

        def cast_plain(parameter: Tensor) -> Tensor:
            """What `cast` does where nothing is recorded: the hot path."""
            entry = find(id(parameter))
            if entry is not None:
                cast, version, pointer, requires_grad, device, stream, _, _, _ = entry
                if (
                    parameter._version == version
                    and parameter.data_ptr() == pointer
                    and parameter.requires_grad == requires_grad
                    and (device is None or find_stream(device) == stream)
                ):
                    return cast
            return make(parameter)

        return cast_plain

    def _make(self, parameter: Tensor) -> Tensor:
        key = id(parameter)
        stale = self._stale.get(get_ident(), {})
        if key in stale:
            self._write_again(stale)
            if key in self._entries:
                return self.cast_plain(parameter)
        if key in self._waiting:
            self._take_waiting(key)
            if key in self._entries:
                return self.cast_plain(parameter)
            self._waiting.pop(key, None)
        if not self._is_eligible(parameter):
            return parameter
        self.made += 1
        if parameter.layout is not torch.strided:
            return self._convert(parameter)
        try:
            version = parameter._version
        except RuntimeError:  # made in inference mode, where tensors have none
            return self._convert(parameter)
        device = _find_device(parameter)
        stream = None if device is None else find_stream(device)
        # All of it is read before the conversion: another thread may write at the same time.
        state = version, parameter.data_ptr(), parameter.requires_grad, device, stream
        if is_grad_enabled():
            cast = self._convert(parameter)
        else:
            with torch.inference_mode(mode=False):  # which turns gradients on
                cast = self._convert(parameter)
        # Fake tensors and those of a running torch.func transform are dead once it ends.
        if type(cast) is Tensor and not is_transformed():
            for stale in tuple(self._stale.values()):  # other threads need theirs no more
                stale.pop(key, None)
            self._entries[key] = (cast, *state, parameter, find_memory(parameter), cast._version)
            if self._by_memory:
                self._by_memory = {}
        return cast

    def _take_waiting(self, key: int) -> None:
        """Takes a cast that holds into use again, and with the first of an iteration all that do."""
        entries, waiting = self._entries, self._waiting
        keys, self._is_checked = [key] if self._is_checked else list(waiting), True
        for each in keys:
            entry = waiting.get(each)
            if entry is not None and is_as_it_was(entry):
                entries[each] = entry
                if waiting.pop(each, None) is None:  # another thread has forgotten it
                    entries.pop(each, None)

    def _write_again(self, stale: dict[int, tuple]) -> None:
        """Casts all that steps have changed into the memory of their earlier casts."""
        found = [(entry, entry[6]._version) for entry in _take_all(stale) if fits(entry)]
        if not found:
            return
        is_inference = torch.is_inference_mode_enabled()
        with torch.inference_mode(mode=False) if is_inference else nullcontext(), torch.no_grad():
            torch._foreach_copy_([entry[0] for entry, _ in found], [entry[6] for entry, _ in found])
        self.made += len(found)
        for entry, version in found:
            cast, parameter = entry[0], entry[6]
            self._entries[id(parameter)] = (cast, version, *entry[2:8], cast._version)


def _merge(entries: dict[int, tuple], into: dict[int, tuple]) -> None:
    """Adds entries in place; again if another thread changed them while a cast that is replaced was freed."""
    while True:
        try:
            return into.update(entries)
        except RuntimeError:  # "dict mutated during update"
            continue


def _take_all(entries: dict[int, tuple]) -> Iterator[tuple]:
    """Yields entries, and takes them out; another thread may drop some of them at the same time."""
    while entries:
        try:
            yield entries.popitem()[1]
        except KeyError:
            return


def _find_device(parameter: Tensor) -> int | None:
    """Returns the index of the CUDA device that a parameter is on; elsewhere there are no streams."""
    return parameter.get_device() if parameter.is_cuda else None


def is_recorded() -> bool:
    """Whether torch.jit.trace or make_fx records operations: an earlier cast would be a constant there."""
    return tracing_state() is not None or dispatch_mode(_PROXY) is not None
