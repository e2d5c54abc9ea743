"""Has a program that was written for a GPU run on the CPU: what `ampatch run --device cpu` sets up."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from threading import Thread
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel, scatter_gather
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from ampatch.apex.changes import ProgramChanges, is_library, wrap

Replacement = tuple[object, str, object]  # an attribute of a module or class, and its new value
CPU = torch.device("cpu")
DEVICE = re.compile(r"cuda(:\d+)?")
TYPES = ("Float", "Half", "BFloat16", "Double", "Byte", "Char", "Short", "Int", "Long", "Bool")

DO_NOTHING = {"range_push", "range_pop", "range_start", "range_end", "mark", "start", "stop", "init"}
MOVES = ("to", "_parse_to")  # of tensors, and what modules ask: a number there is a GPU's

MEMORY = 2**34  # which scripts divide by

# What functions of torch.cuda answer to a script: None where they do nothing.
NOTHING = """
    synchronize empty_cache init ipc_collect manual_seed manual_seed_all seed seed_all set_rng_state
    set_rng_state_all reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached
    reset_accumulated_memory_stats set_per_process_memory_fraction set_sync_debug_mode
"""
ZERO = """
    memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached
    max_memory_cached utilization memory_usage initial_seed get_sync_debug_mode
"""
ANSWERS: dict[str, object] = {
    **dict.fromkeys(NOTHING.split()),
    **dict.fromkeys(ZERO.split(), 0),
    "is_available": True,
    "can_device_access_peer": True,
    "get_device_name": "cpu",
    "get_device_capability": (0, 0),
    "get_arch_list": [],
    "get_rng_state_all": [],
    "mem_get_info": (MEMORY, MEMORY),
    "memory_stats": Counter(),
    "memory_summary": "",
    "memory_snapshot": [],
    "get_device_properties": SimpleNamespace(
        name="cpu", total_memory=MEMORY, major=0, minor=0, multi_processor_count=1
    ),
    "cudart": SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0),
}


def to_cpu(value: object) -> object:
    """Returns the CPU for a CUDA device, its name or the name of a type there; anything else as it is.

    >>> to_cpu("cuda:1"), to_cpu(torch.device("cuda")), to_cpu("torch.cuda.FloatTensor"), to_cpu(3)
    ('cpu', device(type='cpu'), 'torch.FloatTensor', 3)
    """
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    if isinstance(value, str):
        return "cpu" if DEVICE.fullmatch(value) else value.replace("torch.cuda.", "torch.")
    return value


def is_number(value: object) -> bool:
    """Whether a value is a number of a device, which stands for a GPU."""
    return isinstance(value, int) and not isinstance(value, bool)


class CpuMode(TorchFunctionMode):
    """Has functions of torch that are given a CUDA device use the CPU, in the thread that enters it."""

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: Mapping | None = None
    ) -> object:
        """Calls a function of torch with the CPU for what is a CUDA device; scripts ask one for its type."""
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if func is torch.device:
            first = args[0] if args else (kwargs or {}).get("type")
            return func("cuda", first) if is_number(first) else func(*args, **(kwargs or {}))
        named = {name: to_cpu(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if is_number(named.get("device")):
            named["device"] = CPU
        moves = func.__name__ in MOVES
        return func(*(CPU if moves and is_number(value) else to_cpu(value) for value in args), **named)


def start_mapped(start: Callable, /, thread: Thread) -> None:
    """Starts a thread that maps devices, too."""
    thread.run = wrap(thread.run, run_mapped)  # type: ignore[method-assign]
    start(thread)


def run_mapped(run: Callable, /) -> None:
    with CpuMode():
        run()


def answer_scripts(function: Callable, answer: Callable, /, *args: object, **kwargs: object) -> object:
    """Gives a script another answer; torch and ampatch get the function's, which is the truth."""
    caller = sys._getframe(2).f_globals.get("__name__", "").partition(".")[0]
    return (function if caller in ("torch", "ampatch") else answer)(*args, **kwargs)


def change_arguments(
    function: Callable, change: Callable[[str, object], object], /, *args: object, **kwargs: object
) -> object:
    """Calls a function whose keyword arguments, and the first one, are changed."""
    args = (change("", args[0]), *args[1:]) if args else args
    return function(*args, **{name: change(name, value) for name, value in kwargs.items()})


def to_gloo(name: str, value: object) -> object:
    """Returns gloo for the backend of GPUs, and None for a GPU."""
    if name == "device_id":
        return None
    return "gloo" if name in ("", "backend") and isinstance(value, str) and "nccl" in value else value


def load_there(
    load: Callable, /, f: object, map_location: object = None, *args: object, **kwargs: object
) -> object:
    """Loads what was saved on a GPU to the CPU."""
    if isinstance(map_location, Mapping):
        map_location = {saved: to_cpu(place) for saved, place in map_location.items()}
    place = "cpu" if map_location is None or is_number(map_location) else to_cpu(map_location)
    return load(f, place, *args, **kwargs)


def init_on_cpu(init: Callable, /, self: object, module: object, *args: object, **kwargs: object) -> None:
    """Runs the `__init__` of DistributedDataParallel without the numbers of GPUs."""
    others = {name: kwargs[name] for name in kwargs if name not in ("device_ids", "output_device")}
    init(self, module, None, None, *args[2:], **others)


def to_pageable(name: str, value: object) -> object:
    return False if name == "pin_memory" else "" if name == "pin_memory_device" else value


@contextmanager
def on_cpu() -> Iterator[None]:
    """Maps CUDA devices, streams, events and nccl to the CPU while the context is open.

    What torch itself asks about CUDA is answered with the truth. Threads that are started meanwhile map
    devices, too; extensions in CUDA fail as before.
    """
    with ProgramChanges() as changes, CpuMode():
        changes.show_warnings_in_script()
        for replacements in (replace_cuda(), replace_copies(), replace_others(), replace_distributed()):
            for owner, name, value in replacements:
                changes.set_attribute(owner, name, value)
        changes.set_class(torch.version, Version)
        try:
            yield
        finally:
            getattr(torch.get_device_module, "cache_clear", bool)()  # it has learned that CUDA is the CPU


def replace_cuda() -> Iterator[Replacement]:
    """Yields what stands for functions, classes and types of torch.cuda."""
    cuda = torch.cuda
    chosen = Chosen()
    for place in (cuda, cuda.memory, cuda.random, cuda.profiler):
        for name in ANSWERS.keys() & vars(place).keys():
            yield place, name, wrap(getattr(place, name), answer_scripts, lambda *_, a=ANSWERS[name], **__: a)
    for place, number in ((torch.backends.cudnn, CUDNN_VERSION), (cuda.nccl, NCCL_VERSION)):
        yield place, "version", wrap(place.version, answer_scripts, lambda number=number: number)
    count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    yield cuda, "device_count", wrap(cuda.device_count, answer_scripts, count)
    yield cuda, "current_device", wrap(cuda.current_device, answer_scripts, chosen.number)
    yield cuda, "set_device", wrap(cuda.set_device, answer_scripts, chosen.choose)
    for place in (cuda.nvtx, cuda.profiler):
        yield from ((place, name, lambda *_, **__: 0) for name in DO_NOTHING & vars(place).keys())
    yield torch.autograd.profiler, "emit_nvtx", lambda *_, **__: nullcontext()
    device = type("device", (Device,), {"chosen": chosen})
    for name, value in {"Event": Event, "Stream": Stream, "device": device, "stream": Context}.items():
        yield cuda, name, value
    for name in ("current_stream", "default_stream"):
        yield cuda, name, lambda *_, **__: Stream()
    yield cuda, "set_stream", lambda _: None
    for place in (cuda, cuda.random):
        yield place, "get_rng_state", lambda *_, **__: torch.get_rng_state()
    yield from ((cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor")) for kind in TYPES)


def replace_copies() -> Iterator[Replacement]:
    """Yields what stands for functions that copy from GPU to GPU."""
    yield from ((torch.nn.parallel.comm, name, function) for name, function in COMM.items())
    yield from ((torch.nn.parallel, name, function) for name, function in PARALLEL.items())
    for name, function in APPLIED.items():
        yield getattr(scatter_gather, name), "apply", staticmethod(function)


def replace_others() -> Iterator[Replacement]:
    """Yields what stands for other functions of torch that know of GPUs."""
    yield Thread, "start", wrap(Thread.start, start_mapped)
    yield Tensor, "record_stream", lambda *_: None  # which takes no stream but its own
    for kind in (torch.UntypedStorage, torch.TypedStorage):
        yield kind, "cuda", lambda storage, *_, **__: storage
    yield torch, "load", wrap(torch.load, load_there)
    yield torch, "Generator", Generator
    yield DataLoader, "__init__", wrap(DataLoader.__init__, change_arguments, to_pageable)
    yield nn.SyncBatchNorm, "forward", nn.BatchNorm1d.forward
    fork = torch.random.fork_rng
    yield torch.random, "fork_rng", lambda _=(), enabled=True, **__: fork((), enabled)
    for name in ("set_default_device", "set_default_tensor_type"):
        yield torch, name, wrap(getattr(torch, name), change_arguments, lambda _, value: to_cpu(value))


def replace_distributed() -> Iterator[Replacement]:
    """Yields what makes process groups of gloo where a script asks for nccl."""
    yield DistributedDataParallel, "__init__", wrap(DistributedDataParallel.__init__, init_on_cpu)
    distributed = torch.distributed
    if distributed.is_available():
        for name in ("init_process_group", "new_group"):
            yield distributed, name, wrap(getattr(distributed, name), change_arguments, to_gloo)
        yield (
            distributed,
            "is_nccl_available",
            wrap(distributed.is_nccl_available, answer_scripts, lambda: True),
        )


# ---- What stands in for names of torch.cuda that do something ----

CUDA_VERSION, CUDNN_VERSION, NCCL_VERSION = "12.6", 90500, (2, 21, 5)


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
