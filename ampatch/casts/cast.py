"""What patched functions consult: what is eligible, and casts of weights, each made once and never stale."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from contextlib import nullcontext
from threading import get_ident
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ampatch.casts.cast_tree import TensorCast, cast_tree
from ampatch.casts.kept_cast import CAN_SEE_GRAPHS, KeptCast, find_memory
from ampatch.casts.thread import OpenForward, ThreadState
from ampatch.levels.precision import CONVERT, ELIGIBLE
from ampatch.levels.private import (
    PROXY,
    dispatch_mode,
    find_stream,
    graph_task,
    is_transformed,
    run_when_ready,
    tracing_state,
)

Function = Callable[..., object]
Call = Callable[[tuple, dict], object]  # what a wrapper does with its arguments while casts are on

# Bound here: after a backward the machine has forgotten all of this, and each look-up costs a microsecond.
_is_distributed = torch.distributed.is_initialized if torch.distributed.is_available() else bool


class PendingGraph:
    """Stands for the graph behind a forward's output: lives as long, and notes its first backward.

    The graph holds it as a hook of its last node, and nothing else does.
    """

    __slots__ = ("__weakref__", "was_used")

    def __init__(self) -> None:
        self.was_used = False

    def __call__(self, grads: object) -> None:
        self.was_used = True


class CastState:
    """What patched functions consult on each call: the thread, the devices and the caches.

    `half` is the type that torch is patched for, None while it is not patched; `allow_banned` says
    that banned functions are cast to float32 where they would raise, and `bans_in_place` that functions in
    place raise on half tensors, as in apex.
    """

    def __init__(self) -> None:
        self.thread = ThreadState()
        self.half: torch.dtype | None = None
        self.device_types: set[str] = set()
        self.allow_banned = self.bans_in_place = False
        self.devices: set[torch.device] = set()  # those of these types that were met: quicker to look up
        self._graphs: list[weakref.ref[PendingGraph]] = []
        self._caches: dict[torch.dtype, CastCache] = {}

    def __reduce__(self) -> str:
        return "CASTS"

    def get_cache(self, dtype: torch.dtype) -> CastCache:
        """Returns the cache of casts to `dtype`, made on first use."""
        if dtype not in self._caches:
            self._caches[dtype] = CastCache(dtype, self.thread, self.is_on_device)
        return self._caches[dtype]

    def is_on_device(self, tensor: Tensor) -> bool:
        """Whether a tensor is where casts are made."""
        is_known = tensor.device.type in self.device_types
        if is_known and not torch.compiler.is_dynamo_compiling():
            self.devices.add(tensor.device)
        return is_known

    def forget(self, parameter: Tensor) -> None:
        for cache in self._caches.values():
            cache.forget(parameter)

    def forget_memory(self, tensor: Tensor) -> None:
        """Forgets the cached casts of the parameter that a tensor shares memory with."""
        for cache in self._caches.values():
            cache.forget_memory(tensor)

    def clear_cache(self) -> None:
        """Forgets every cached cast, and begins an iteration."""
        self._graphs.clear()
        self.forget_casts()

    def forget_casts(self) -> None:
        for cache in self._caches.values():
            cache.clear()

    def end_casts(self, optimizer: Optimizer) -> None:
        """Begins an iteration at a step of an optimizer, which changes its parameters."""
        self._graphs.clear()
        changed: set[int] | None = None
        for cache in self._caches.values():
            if cache.entries or cache.waiting:  # not after a step whose beginning has ended them
                if changed is None:
                    changed = {id(param) for group in optimizer.param_groups for param in group["params"]}
                cache.end(changed)
        if changed is not None:
            self.recheck_casts()  # of what it does not step, after collectives as well

    def end_iteration(self) -> None:
        """Begins an iteration: casts of parameters that may change unseen are made again."""
        if not torch.compiler.is_dynamo_compiling():  # graphs keep no casts; a count would be a guard
            self._graphs.clear()
            self.recheck_casts()

    def recheck_casts(self) -> None:
        """Has the cached casts of parameters that may change unseen checked, or made again."""
        # Among ranks: collectives write without a trace, and shards are gathered into new memory.
        is_among_ranks = _is_distributed()
        for cache in self._caches.values():
            if is_among_ranks:
                cache.forget_others()
            elif cache.entries or cache.waiting:
                cache.recheck()

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._caches.values())

    def enter_forward(self, forward: OpenForward) -> None:
        """Begins a forward of an initialized model, or of a part of it that runs uncast."""
        thread = self.thread
        if thread.forwards and thread.forget_ended():
            self.recheck_casts()  # an earlier forward never came to its end
        if not thread.forwards and self._begins_iteration():
            self.clear_cache()  # without `scale_loss`, nothing says that a step is one of ours
        thread.push(forward)

    def exit_forward(self, owner: int) -> bool:
        """Ends a module's forward; returns whether it was the outermost."""
        self.thread.pop(owner)
        return not self.thread.forwards

    def watch(self, graph: PendingGraph) -> None:
        """Remembers that a forward left a graph, which may wait for its backward."""
        self._graphs.append(weakref.ref(graph))

    def _begins_iteration(self) -> bool:
        """Whether a graph was used by a backward, or dropped, since the last clearing.

        Not inside of a backward, where activation checkpointing repeats what an iteration did.
        """
        if graph_task() != -1:
            return False
        for find in self._graphs:
            graph = find()
            if graph is None or graph.was_used:
                return True
        return False

    def hand_over(self, original: Function, call: Call, args: tuple, kwargs: dict) -> object:
        """Calls a function that a class or a mode overrides; replaced while torch is patched."""
        return call(args, kwargs)

    def narrow(self, device_types: set[str], allow_banned: bool, bans_in_place: bool) -> None:
        """Casts no more than before: on these devices, banned functions and those in place, or not."""
        self.device_types.intersection_update(device_types)
        self.allow_banned, self.bans_in_place = allow_banned, bans_in_place
        self.devices.clear()
        self.forget_casts()

    def close(self) -> None:
        """Forgets the casts, the devices, the half type and what this thread is doing."""
        self.thread.reset()
        self.half = None
        self._graphs.clear()
        self.narrow(set(), allow_banned=False, bans_in_place=False)


# The one of this process, as torch's namespace is one. Hooks on modules pickle it by this name.
CASTS = CastState()


class Casts(NamedTuple):
    """The casts of a patched function's arguments to one dtype, each as quick as it can be.

    The second and the third may be called only where nothing is compiled, traced or done in a dispatch mode,
    and the second only for a tensor that has another dtype of ours.
    """

    any: TensorCast
    plain_tensor: TensorCast
    plain_parameter: TensorCast


def cast_eligible(dtype: torch.dtype) -> Casts:
    """Returns the casts of a patched function's arguments to `dtype`: parameters through the cache."""
    sources, devices, is_on_device = ELIGIBLE - {dtype}, CASTS.devices, CASTS.is_on_device
    convert, cache = CONVERT[dtype], CASTS.get_cache(dtype)
    is_compiling, cached = torch.compiler.is_dynamo_compiling, cache.cast

    def cast(tensor: Tensor) -> Tensor:
        if tensor.dtype not in sources:
            return tensor
        if not is_compiling() and issubclass(type(tensor), Parameter):
            return cached(tensor)
        return convert(tensor) if is_on_device(tensor) else tensor

    def cast_plain_tensor(tensor: Tensor) -> Tensor:
        return convert(tensor) if tensor.device in devices or is_on_device(tensor) else tensor

    return Casts(cast, cast_plain_tensor, cache.cast_plain)


def eligible_dtypes(values: object) -> set[torch.dtype]:
    """The types of the tensors in a tree that a cast may touch."""
    dtypes: set[torch.dtype] = set()

    def collect(tensor: Tensor) -> Tensor:
        if tensor.dtype in ELIGIBLE and tensor.device.type in CASTS.device_types:
            dtypes.add(tensor.dtype)
        return tensor

    cast_tree(values, collect)
    return dtypes


Entries = dict[int, KeptCast]  # by id of the parameter

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
            self._reuse_waiting(key)
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

    def _reuse_waiting(self, key: int) -> None:
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
