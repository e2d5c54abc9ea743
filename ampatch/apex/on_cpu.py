"""Has a program that was written for a GPU run on the CPU: what `ampatch run --device cpu` sets up."""

from __future__ import annotations

import functools
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from ampatch.apex.changes import Changes

CPU = torch.device("cpu")
DEVICE = re.compile(r"cuda(:\d+)?")
TYPES = ("Float", "Half", "BFloat16", "Double", "Byte", "Char", "Short", "Int", "Long", "Bool")

MOVES = ("to", "_parse_to")  # of tensors, and what modules ask: a number there is a GPU's

# What functions of torch.cuda answer to a script; None where they do nothing.
ANSWERS: dict[str, object] = {
    **{"is_available": True, "device_count": 1, "current_device": 0},
    **{"get_device_name": "cpu", "get_device_capability": (0, 0), "get_arch_list": []},
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "init", "ipc_collect")),
    **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all")),
    **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached")),
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), 0),
    **dict.fromkeys(("max_memory_reserved", "memory_cached", "max_memory_cached"), 0),
    **{"mem_get_info": (0, 0), "get_rng_state_all": [], "set_rng_state": None, "set_rng_state_all": None},
    **{"memory_stats": Counter(), "memory_summary": "", "memory_snapshot": []},
    "get_device_properties": SimpleNamespace(name="cpu", total_memory=0, major=0, minor=0),
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
        """Calls a function of torch with the CPU for what is a CUDA device."""
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        given = {name: to_cpu(value) for name, value in (kwargs or {}).items()}
        if is_number(given.get("device")):
            given["device"] = CPU
        moves = func.__name__ in MOVES
        return func(*(CPU if moves and is_number(value) else to_cpu(value) for value in args), **given)


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

    def record_event(self, event: Event | None = None) -> Event:
        """Notes the time in an event."""
        event = event or Event()
        event.record()
        return event


def answer_scripts(function: Callable, answer: object) -> Callable:
    """Returns a function with one answer; to torch and ampatch it says the truth."""

    @functools.wraps(function)
    def answering(*args: object, **kwargs: object) -> object:
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return function(*args, **kwargs) if caller in ("torch", "ampatch") else answer

    return answering


class Context(nullcontext):
    """Stands in for `torch.cuda.device` and `torch.cuda.stream`: a class, as torch uses it as a type."""

    def __init__(self, given: object = None) -> None:
        super().__init__(given)


def with_arguments(function: Callable, change: Callable[[str, object], object]) -> Callable:
    """Returns a function whose keyword arguments, and the first one, are changed."""

    @functools.wraps(function)
    def changed(*args: object, **kwargs: object) -> object:
        args = (change("", args[0]), *args[1:]) if args else args
        return function(*args, **{name: change(name, value) for name, value in kwargs.items()})

    return changed


def to_gloo(name: str, value: object) -> object:
    """Returns gloo for the backend of GPUs."""
    return "gloo" if name in ("", "backend") and isinstance(value, str) and "nccl" in value else value


def load_on_cpu(load: Callable) -> Callable:
    """Returns `torch.load` that puts on the CPU what was saved on a GPU."""

    @functools.wraps(load)
    def load_there(f: object, map_location: object = None, *args: object, **kwargs: object) -> object:
        if isinstance(map_location, Mapping):
            map_location = {saved: to_cpu(place) for saved, place in map_location.items()}
        place = "cpu" if map_location is None or is_number(map_location) else to_cpu(map_location)
        return load(f, place, *args, **kwargs)

    return load_there


def without_devices(init: Callable) -> Callable:
    """Returns the `__init__` of DistributedDataParallel without the numbers of GPUs."""

    @functools.wraps(init)
    def init_on_cpu(self: object, module: object, *args: object, **kwargs: object) -> None:
        others = {name: kwargs[name] for name in kwargs if name not in ("device_ids", "output_device")}
        init(self, module, None, None, *args[2:], **others)

    return init_on_cpu


@contextmanager
def on_cpu() -> Iterator[None]:
    """Maps CUDA devices, streams, events and nccl to the CPU while the context is open.

    What torch itself asks about CUDA is answered with the truth. Only the thread that opens it maps
    devices; extensions in CUDA and `torch.Generator("cuda")` fail as before.
    """
    with Changes() as changes, CpuMode():
        cuda = torch.cuda
        for name in ANSWERS:
            if hasattr(cuda, name):
                changes.set_attribute(cuda, name, answer_scripts(getattr(cuda, name), ANSWERS[name]))
        for name, value in replacements():
            changes.set_attribute(cuda, name, value)
        changes.set_attribute(Tensor, "record_stream", lambda *_: None)  # which takes no stream but its own
        for kind in (torch.UntypedStorage, torch.TypedStorage):
            changes.set_attribute(kind, "cuda", lambda storage, *_, **__: storage)
        changes.set_attribute(torch, "load", load_on_cpu(torch.load))
        for name in ("set_default_device", "set_default_tensor_type"):
            mapped = with_arguments(getattr(torch, name), lambda _, value: to_cpu(value))
            changes.set_attribute(torch, name, mapped)
        changes.set_attribute(
            DistributedDataParallel, "__init__", without_devices(DistributedDataParallel.__init__)
        )
        if torch.distributed.is_available():
            change_backend(changes, torch.distributed)
        yield


def replacements() -> Iterator[tuple[str, object]]:
    """The names of torch.cuda that stand for something else, and what."""
    yield from {"Event": Event, "Stream": Stream, "device": Context, "stream": Context}.items()
    yield from dict.fromkeys(("current_stream", "default_stream"), lambda *_: Stream()).items()
    yield "get_rng_state", lambda *_: torch.get_rng_state()
    yield from ((f"{kind}Tensor", getattr(torch, f"{kind}Tensor")) for kind in TYPES)


def change_backend(changes: Changes, distributed: ModuleType) -> None:
    """Makes process groups of gloo where a script asks for nccl."""
    for name in ("init_process_group", "new_group"):
        changes.set_attribute(distributed, name, with_arguments(getattr(distributed, name), to_gloo))
    changes.set_attribute(
        distributed, "is_nccl_available", answer_scripts(distributed.is_nccl_available, True)
    )
