"""The casts of weights: each made once while its weight stays as it is, and never stale."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from threading import get_ident

import torch
from torch import Tensor
from torch.nn import Parameter

from ampatch.casts.kept_cast import CAN_SEE_GRAPHS, KeptCast, find_memory
from ampatch.casts.thread import ThreadState
from ampatch.levels.precision import ELIGIBLE
from ampatch.levels.private import (
    PROXY,
    dispatch_mode,
    find_stream,
    is_transformed,
    run_when_ready,
    tracing_state,
)

Entries = dict[int, KeptCast]  # by id of the parameter

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

    A cast is used only while the parameter is the same object with the same memory, version and
    requires_grad. A write through a tensor that shares the memory and not the version (an earlier
    `.data`, an array of NumPy) changes none of these. So after an iteration a cast is used only if nobody
    else can reach the memory. A step ends the casts of what an optimizer steps, since fused ones leave no
    trace: when the first of them is asked for, all are written again, at once and into the same memory, but
    for those that a graph, or anybody else, still holds.

    On CUDA a cast is used only on the stream that made it. Another stream would have to wait for it,
    and the memory would have to wait for that stream; a cast of its own takes no longer.

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
        # frees a model: so loops go over a copy, and a move puts a cast into the other dictionary first, in
        # place, where another thread that forgets it finds it as well.
        self.entries: Entries = {}
        self.waiting: Entries = {}  # of iterations that ended, not used since
        # By thread: what its steps have changed. That thread writes it again, since no other knows that no
        # step is under way.
        self._stale: dict[int, Entries] = {}
        self._rechecks = 0
        self._is_checked = False  # whether what waits was looked at since the last recheck
        self.made = 0  # casts of parameters, ever
        self._by_memory: dict[int, list[int]] = {}  # keys of entries; sorted when they are asked for
        self.cast_plain = self._make_cast_plain()

    @property
    def _all(self) -> tuple[Entries, ...]:
        return self.entries, self.waiting, *self._stale.values()

    @property
    def nbytes(self) -> int:
        return sum(kept.cast.nbytes for _, kept in self._list())

    def _list(self) -> list[tuple[int, KeptCast]]:
        return [item for entries in self._all for item in entries.copy().items()]

    def forget_others(self) -> None:
        """Forgets every cast but those that are written again before use."""
        self.entries.clear()
        self.waiting.clear()

    def clear(self) -> None:
        for entries in (*self._all, self._by_memory):
            entries.clear()

    def forget(self, parameter: Tensor) -> None:
        self._drop(id(parameter))

    def _drop(self, key: int) -> None:
        for entries in (*self._all, self.entries):  # twice: a waiting one may have moved there meanwhile
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
        for key, kept in entries:
            by_memory.setdefault(kept.parameter.untyped_storage()._cdata, []).append(key)
        is_whole = len(entries) == sum(map(len, self._all))
        self._by_memory = by_memory if is_whole else {}
        return by_memory

    def recheck(self) -> None:
        """Has each cast checked before it is used again: its parameter may have changed unseen.

        Not at once: most often a step comes first, and ends them all.
        """
        if self.entries:
            _merge(self.entries, into=self.waiting)
            self.entries.clear()
        self._is_checked = False
        self._rechecks += 1
        if self._rechecks % SWEEP == 0:
            self._drop_unowned()

    def _drop_unowned(self) -> None:
        """Forgets the casts of parameters that nobody else has any more."""
        for entries in self._all[1:]:
            for key, kept in entries.copy().items():
                if kept.is_only_here():
                    entries.pop(key, None)

    def end(self, changed: Collection[int]) -> None:
        """Ends the casts of parameters, by id, that are changed now: they are written again before use."""
        waiting = self.waiting
        if self.entries:
            _merge(self.entries, into=waiting)
            self.entries.clear()
        ended = waiting.copy()
        if ended.keys() <= changed:
            waiting.clear()
        else:
            ended = {key: kept for key, kept in ended.items() if key in changed}
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
        find, make = self.entries.get, self._make

        def cast_plain(parameter: Tensor) -> Tensor:
            """What `cast` does where nothing is recorded: the hot path."""
            kept = find(id(parameter))
            if (
                kept is not None
                and parameter._version == kept.version
                and parameter.data_ptr() == kept.pointer
                and parameter.requires_grad == kept.requires_grad
                and (kept.device is None or find_stream(kept.device) == kept.stream)
            ):
                return kept.cast
            return make(parameter)

        return cast_plain

    def _make(self, parameter: Tensor) -> Tensor:
        key = id(parameter)
        stale = self._stale.get(get_ident(), {})
        if key in stale:
            self._write_again(stale)
            if key in self.entries:
                return self.cast_plain(parameter)
        if key in self.waiting:
            self._take_waiting(key)
            if key in self.entries:
                return self.cast_plain(parameter)
            self.waiting.pop(key, None)
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
        if cast.grad_fn is not None:
            # It is the oldest node of every later graph, and would run after all of them: the gradients of
            # weights would come together, at the end.
            run_when_ready(cast.grad_fn)
        # Fake tensors and those of a running torch.func transform are dead once it ends.
        if type(cast) is Tensor and not is_transformed():
            for stale in tuple(self._stale.values()):  # other threads need theirs no more
                stale.pop(key, None)
            self.entries[key] = KeptCast(cast, *state, parameter, find_memory(parameter), cast._version)
            if self._by_memory:
                self._by_memory = {}
        return cast

    def _take_waiting(self, key: int) -> None:
        """Takes a cast that holds into use again, and with the first of an iteration all that do."""
        entries, waiting = self.entries, self.waiting
        keys, self._is_checked = [key] if self._is_checked else list(waiting), True
        for each in keys:
            kept = waiting.get(each)
            if kept is not None and kept.holds():
                entries[each] = kept
                if waiting.pop(each, None) is None:  # another thread has forgotten it
                    entries.pop(each, None)

    def _write_again(self, stale: Entries) -> None:
        """Casts all that steps have changed into the memory of their earlier casts."""
        holders, versions, casts, parameters = [], [], [], []
        while stale:
            try:
                kept = stale.popitem()[1]
            except KeyError:  # another thread drops some at the same time
                break
            if kept.is_writable():
                holders.append(kept)
                versions.append(kept.parameter._version)  # before: another thread may write meanwhile
                casts.append(kept.cast)
                parameters.append(kept.parameter)
        if not holders:
            return
        is_inference = torch.is_inference_mode_enabled()
        with torch.inference_mode(mode=False) if is_inference else nullcontext(), torch.no_grad():
            torch._foreach_copy_(casts, parameters)
        self.made += len(holders)
        for kept, version in zip(holders, versions, strict=True):
            kept.version, kept.written = version, kept.cast._version
            self.entries[id(kept.parameter)] = kept


def _merge(entries: Entries, into: Entries) -> None:
    """Adds entries in place; again if another thread changed them while a cast that is replaced was freed."""
    while True:
        try:
            return into.update(entries)
        except RuntimeError:  # "dict mutated during update"
            continue


def _find_device(parameter: Tensor) -> int | None:
    """Returns the index of the CUDA device that a parameter is on; elsewhere there are no streams."""
    return parameter.get_device() if parameter.is_cuda else None


def is_recorded() -> bool:
    """Whether torch.jit.trace or make_fx records operations: an earlier cast would be a constant there."""
    return tracing_state() is not None or dispatch_mode(_PROXY) is not None
