"""What stands in on the CPU for names of torch.cuda that do something: streams, generators, copies."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from types import ModuleType

import torch
from torch import Tensor, nn

from ampatch.apex.changes import is_library

CUDA_VERSION, CUDNN_VERSION, NCCL_VERSION = "12.6", 90500, (2, 21, 5)


def count_devices() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


class Version(ModuleType):
    """Stands in for the class of the module torch.version."""

    @property
    def cuda(self) -> str | None:
        """The version of CUDA, which scripts parse; libraries, which compare it, get the truth."""
        is_of_library = is_library(sys._getframe(1).f_code.co_filename)
        return vars(self)["cuda"] if is_of_library else CUDA_VERSION


class Chosen:
    """Remembers the number of the GPU that a script has chosen: some ask for it to see who they are."""

    def __init__(self) -> None:
        self._number = 0

    def choose(self, device: object) -> None:
        """Stands in for `torch.cuda.set_device`; a `torch.device` is the CPU and has lost its number."""
        if device is None:
            raise ValueError("set_device(None): expected a torch.device with an index, or an integer")
        self.exchange(device, int(os.environ.get("LOCAL_RANK") or 0))

    def exchange(self, device: object, otherwise: int) -> int:
        """Chooses a GPU, or another where none is named, and returns the one before; negative: nothing."""
        before, digits = self._number, re.search(r"-?\d+$", str(device))
        number = int(digits[0]) if digits else otherwise
        self._number = before if number < 0 else number
        return before

    def number(self) -> int:
        return self._number


class Event:
    """Stands in for `torch.cuda.Event`: what was called before is over."""

    def __init__(self, *_: object, **__: object) -> None:
        self._seconds = 0.0

    def record(self, *_: object) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """The milliseconds from here to another event."""
        return (end._seconds - self._seconds) * 1000

    def wait(self, *_: object) -> None:
        """Does nothing."""

    synchronize = wait

    def query(self) -> bool:
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


class Device:
    """Stands in for `torch.cuda.device`: a class, as torch uses it as a type."""

    chosen: Chosen

    def __init__(self, device: object) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._before = self.chosen.exchange(self._device, -1)

    def __exit__(self, *_: object) -> None:
        self.chosen.exchange(self._before, -1)


class Context(nullcontext):
    """Stands in for `torch.cuda.stream`: a class, as torch uses it as a type."""

    def __init__(self, stream: object = None) -> None:
        super().__init__(stream)


class AnyGenerator(type(torch.Generator)):
    """Has each generator be one of the class that stands in for theirs."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, GENERATOR)


GENERATOR = torch.Generator


class Generator(GENERATOR, metaclass=AnyGenerator):
    """Stands in for `torch.Generator`: each is one of the CPU."""

    def __new__(cls, device: object = None) -> Generator:
        return super().__new__(cls)


# ---- Copies from GPU to GPU ----


def scatter(
    tensor: Tensor,
    devices: Sequence[object] = (0,),
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    *_: object,
    **__: object,
) -> tuple[Tensor, ...]:
    return tensor.split(list(chunk_sizes), dim) if chunk_sizes else tensor.chunk(len(devices), dim)


def add(tensors: Sequence[Tensor], *_: object, **__: object) -> Tensor:
    return torch.stack(tuple(tensors)).sum(0)


def data_parallel(
    module: nn.Module, inputs: object, *_: object, module_kwargs: dict | None = None, **__: object
) -> object:
    return module(*(inputs if isinstance(inputs, tuple) else (inputs,)), **(module_kwargs or {}))


def parallel_apply(
    modules: Sequence[nn.Module], inputs: Sequence[object], kwargs: Sequence | None = None, *_: object
) -> list[object]:
    """Stands in for `torch.nn.parallel.parallel_apply`: one after the other."""
    rows = zip(modules, inputs, kwargs or [{}] * len(modules), strict=True)
    return [data_parallel(module, input, module_kwargs=named) for module, input, named in rows]


COMM = {
    "broadcast": lambda tensor, devices=(0,), **_: (tensor,) * len(devices),
    "broadcast_coalesced": lambda tensors, devices, *_: [tensors for _ in devices],
    "scatter": scatter,
    "gather": lambda tensors, dim=0, *_, **__: torch.cat(tuple(tensors), dim),
    "reduce_add": add,
    "reduce_add_coalesced": lambda lists, *_, **__: tuple(map(add, zip(*lists, strict=True))),
}
PARALLEL = {
    **{"data_parallel": data_parallel, "parallel_apply": parallel_apply},
    "replicate": lambda network, devices, *_, **__: [network for _ in devices],  # one module for all
}
# What `scatter` and `gather` of torch.nn.parallel apply.
APPLIED = {
    "Scatter": lambda devices, sizes, dim, tensor: scatter(tensor, devices, sizes, dim),
    "Gather": lambda _, dim, *tensors: torch.cat([torch.atleast_1d(each) for each in tensors], dim),
}
