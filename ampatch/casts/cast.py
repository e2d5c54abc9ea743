"""What is eligible for a cast, and what patched functions consult."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ampatch.casts.cast_cache import CONVERT, CastCache
from ampatch.casts.cast_tree import TensorCast, cast_tree
from ampatch.casts.thread import OpenForward, ThreadState
from ampatch.levels.precision import ELIGIBLE
from ampatch.levels.private import graph_task

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

    def note(tensor: Tensor) -> Tensor:
        if tensor.dtype in ELIGIBLE and tensor.device.type in CASTS.device_types:
            dtypes.add(tensor.dtype)
        return tensor

    cast_tree(values, note)
    return dtypes
