"""What is eligible for a cast, casting a tree of arguments, and what patched functions consult."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping

import torch
from torch import Tensor
from torch.nn import Parameter

from ampatch.cast_cache import CONVERT, CastCache
from ampatch.precision import ELIGIBLE
from ampatch.thread import Forward, ThreadState

TensorCast = Callable[[Tensor], Tensor]
Other = Callable[[object], object] | None


def cast_to(dtype: torch.dtype) -> TensorCast:
    """Returns a function that casts an eligible tensor to `dtype` and leaves others as they are."""
    sources = ELIGIBLE - {dtype}
    convert = CONVERT.get(dtype) or (lambda tensor: tensor.to(dtype))

    def cast(tensor: Tensor) -> Tensor:
        return convert(tensor) if tensor.dtype in sources else tensor

    return cast


def cast_tree(value: object, cast: TensorCast, other: Other = None, around: tuple = ()) -> object:
    """Casts the tensors in a tree of containers; what holds none is returned as it is.

    Sequences, mappings, namedtuples and dataclasses keep their type. Strings, numbers, arrays and
    unknown objects stay, unless `other` says what to do with an unknown object. `around` are the
    containers that hold this one: one that holds itself is met again inside, and stays there as it is.
    """
    if isinstance(value, Tensor):
        return cast(value)
    if isinstance(value, str | bytes | range | type | torch.nn.Module):
        return value
    if around and any(_is_one(value, outer) for outer in around):
        return value
    if isinstance(value, tuple | list | deque):
        return _cast_sequence(value, cast, other, around)
    if isinstance(value, Mapping):
        return _cast_mapping(value, cast, other, around)
    if dataclasses.is_dataclass(value):
        return _cast_fields(value, cast, other, around)
    return value if other is None else other(value)


def cast_batch(value: object, dtype: torch.dtype) -> object:
    """Casts a tree as `cast_tree` does, and calls `.to(dtype)` of unknown objects that have one.

    Published scripts hand batches of their own classes to the model and rely on that call.
    """

    def cast_object(item: object) -> object:
        return item.to(dtype) if callable(getattr(item, "to", None)) else item  # type: ignore[attr-defined]

    return cast_tree(value, cast_to(dtype), cast_object)


def _is_one(value: object, other: object) -> bool:
    """Whether two values are the same object. Dynamo cannot tell of containers: there they never are."""
    if torch.compiler.is_dynamo_compiling() and isinstance(other, tuple | list | deque | Mapping):
        return False
    return value is other


def _cast_sequence(value: tuple | list | deque, cast: TensorCast, other: Other, around: tuple) -> object:
    around = (*around, value)
    items = [cast_tree(item, cast, other, around) for item in value]
    if all(_is_one(new, old) for new, old in zip(items, value, strict=True)):
        return value
    if type(value) is list:
        return items
    if hasattr(value, "_make"):
        return type(value)._make(items)  # type: ignore[attr-defined]
    if isinstance(value, tuple):
        return type(value)(items)
    result = copy.copy(value)
    for index, item in enumerate(items):
        result[index] = item
    return result


def _cast_mapping(value: Mapping, cast: TensorCast, other: Other, around: tuple) -> object:
    around = (*around, value)
    items = {key: cast_tree(item, cast, other, around) for key, item in value.items()}
    changed = {key: item for key, item in items.items() if not _is_one(item, value[key])}
    if not changed:
        return value
    if type(value) is dict:
        return items
    if not isinstance(value, MutableMapping):
        return type(value)(items)  # type: ignore[call-arg]
    result = copy.copy(value)
    for key, item in changed.items():
        result[key] = item
    return result


def _cast_fields(value: object, cast: TensorCast, other: Other, around: tuple) -> object:
    around = (*around, value)
    names = [field.name for field in dataclasses.fields(value)]  # type: ignore[arg-type]
    old = {name: getattr(value, name) for name in names if hasattr(value, name)}
    items = {name: cast_tree(item, cast, other, around) for name, item in old.items()}
    changed = {name: item for name, item in items.items() if not _is_one(item, old[name])}
    if not changed:
        return value
    result = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(result, name, new)  # a frozen dataclass refuses setattr
    return result


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
    that banned functions are cast to float32 where they would raise.
    """

    def __init__(self) -> None:
        self.thread = ThreadState()
        self.half: torch.dtype | None = None
        self.device_types: set[str] = set()
        self.allow_banned = False
        self._graphs: list[weakref.ref[PendingGraph]] = []
        self._caches: dict[torch.dtype, CastCache] = {}

    def __reduce__(self) -> str:
        return "CASTS"

    def get_cache(self, dtype: torch.dtype) -> CastCache:
        """Returns the cache of casts to `dtype`, made on first use."""
        if dtype not in self._caches:
            self._caches[dtype] = CastCache(dtype, self.thread)
        return self._caches[dtype]

    def forget(self, parameter: Tensor) -> None:
        """Forgets the cached casts of one parameter."""
        for cache in self._caches.values():
            cache.forget(parameter)

    def clear_cache(self) -> None:
        """Forgets every cached cast, and begins an iteration."""
        self._graphs.clear()
        self.forget_casts()

    def forget_casts(self) -> None:
        """Forgets every cached cast."""
        for cache in self._caches.values():
            cache.clear()

    def enter_forward(self, forward: Forward) -> None:
        """Begins a forward of an initialized model, or of a part of it that runs uncast."""
        thread = self.thread
        if not thread.forwards and self._begins_iteration():
            self.clear_cache()  # weights may have been written through `.data` since
        if not torch.is_grad_enabled():
            self._clear_no_grad()
        thread.push(forward)

    def exit_forward(self, owner: int) -> None:
        """Ends it."""
        self.thread.pop(owner)
        if not self.thread.forwards:
            self._clear_no_grad()

    def watch(self, graph: PendingGraph) -> None:
        """Remembers that a forward left a graph, which may wait for its backward."""
        self._graphs.append(weakref.ref(graph))

    def _begins_iteration(self) -> bool:
        """Whether a graph was used by a backward, or dropped, since the last clearing.

        Not inside of a backward, where activation checkpointing repeats what an iteration did.
        """
        if torch._C._current_graph_task_id() != -1:
            return False
        graphs = [ref() for ref in self._graphs]
        return any(graph is None or graph.was_used for graph in graphs)

    def _clear_no_grad(self) -> None:
        for cache in self._caches.values():
            cache.clear_no_grad()

    def narrow(self, device_types: set[str], allow_banned: bool) -> None:
        """Casts no more than before: on these devices, banned functions or not."""
        self.device_types.intersection_update(device_types)
        self.allow_banned = allow_banned

    def close(self) -> None:
        """Forgets the casts, the devices, the half type and what this thread is doing."""
        self.thread.reset()
        self.clear_cache()
        self.half, self.allow_banned = None, False
        self.device_types.clear()


# The one of this process, as torch's namespace is one. Hooks on modules pickle it by this name.
CASTS = CastState()


def cast_eligible(state: CastState, dtype: torch.dtype) -> TensorCast:
    """Returns the cast of a patched function's argument to `dtype`: parameters through the cache."""
    sources, devices = ELIGIBLE - {dtype}, state.device_types
    convert, cached = CONVERT[dtype], state.get_cache(dtype).cast

    def cast(tensor: Tensor) -> Tensor:
        if tensor.dtype not in sources or tensor.device.type not in devices:
            return tensor
        return cached(tensor) if issubclass(type(tensor), Parameter) else convert(tensor)

    return cast
