"""What stands in on the CPU for names of torch.cuda that do something: streams, generators, copies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn


class Event:
    """Stands in for `torch.cuda.Event`: what was called before is over."""

    def __init__(self, *_: object, **__: object) -> None:
        self._seconds = 0.0

    def record(self, *_: object) -> None:
        """Notes the time."""
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """The milliseconds from here to another event."""
        return (end._seconds - self._seconds) * 1000

    def wait(self, *_: object) -> None:
        """Does nothing."""

    synchronize = wait

    def query(self) -> bool:
        """Whether all is done: it is."""
        return True


class Stream(Event):
    """Stands in for `torch.cuda.Stream`."""

    wait_event = wait_stream = Event.wait
    cuda_stream = stream_id = device_index = priority = 0
    device = torch.device("cpu")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        """Notes the time in an event."""
        event = event or Event()
        event.record()
        return event


class Context(nullcontext):
    """Stands in for `torch.cuda.device` and `torch.cuda.stream`: a class, as torch uses it as a type."""

    def __init__(self, given: object = None) -> None:
        super().__init__(given)


class AnyGenerator(type(torch.Generator)):
    """Has each generator be one of the class that stands in for theirs."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, GENERATOR)


GENERATOR = torch.Generator


class Generator(GENERATOR, metaclass=AnyGenerator):
    """Stands in for `torch.Generator`: each is one of the CPU."""

    def __new__(cls, device: object = None) -> Generator:
        """Makes a generator, whatever device it is for."""
        return super().__new__(cls)


# ---- Copies from GPU to GPU ----


def broadcast(tensor: Tensor, devices: Sequence[object] = (0,), **_: object) -> tuple[Tensor, ...]:
    """Does what `torch.cuda.comm.broadcast` does."""
    return (tensor,) * len(devices)


def broadcast_all(tensors: Sequence[Tensor], devices: Sequence[object], *_: object) -> list[Sequence[Tensor]]:
    """Does what `torch.cuda.comm.broadcast_coalesced` does."""
    return [tensors for _ in devices]


def scatter_tensor(
    tensor: Tensor,
    devices: Sequence[object] = (0,),
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    *_: object,
    **__: object,
) -> tuple[Tensor, ...]:
    """Does what `torch.cuda.comm.scatter` does."""
    return tensor.split(list(chunk_sizes), dim) if chunk_sizes else tensor.chunk(len(devices), dim)


def gather_tensors(tensors: Sequence[Tensor], dim: int = 0, *_: object, **__: object) -> Tensor:
    """Does what `torch.cuda.comm.gather` does."""
    return torch.cat(tuple(tensors), dim)


def add(tensors: Sequence[Tensor], *_: object, **__: object) -> Tensor:
    """Does what `torch.cuda.comm.reduce_add` does."""
    return torch.stack(tuple(tensors)).sum(0)


def add_all(lists: Sequence[Sequence[Tensor]], *_: object, **__: object) -> tuple[Tensor, ...]:
    """Does what `torch.cuda.comm.reduce_add_coalesced` does."""
    return tuple(map(add, zip(*lists, strict=True)))


def data_parallel(
    module: nn.Module,
    inputs: object,
    *_: object,
    module_kwargs: dict[str, object] | None = None,
    **__: object,
) -> object:
    """Does what `torch.nn.parallel.data_parallel` does."""
    return module(*(inputs if isinstance(inputs, tuple) else (inputs,)), **(module_kwargs or {}))


def replicate(network: nn.Module, devices: Sequence[object], *_: object, **__: object) -> list[nn.Module]:
    """Does what `torch.nn.parallel.replicate` does, with one module for all."""
    return [network for _ in devices]


def parallel_apply(
    modules: Sequence[nn.Module], inputs: Sequence[object], kwargs: Sequence | None = None, *_: object
) -> list[object]:
    """Does what `torch.nn.parallel.parallel_apply` does, one after the other."""
    return [
        data_parallel(module, given, module_kwargs=named)
        for module, given, named in zip(modules, inputs, kwargs or [{}] * len(modules), strict=True)
    ]


COMM = {
    **{"broadcast": broadcast, "broadcast_coalesced": broadcast_all, "scatter": scatter_tensor},
    **{"gather": gather_tensors, "reduce_add": add, "reduce_add_coalesced": add_all},
}
# What `scatter` and `gather` of torch.nn.parallel apply.
APPLIED = {
    "Scatter": lambda devices, sizes, dim, tensor: scatter_tensor(tensor, devices, sizes, dim),
    "Gather": lambda _, dim, *tensors: gather_tensors([torch.atleast_1d(each) for each in tensors], dim),
}
