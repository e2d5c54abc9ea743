"""Where an operation stands: the user's line, the model, the module, and which call of it."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from types import FrameType, ModuleType

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

import ampatch
from ampatch.doctor.instruments.values import is_finite, is_mask, key_of

OURS = (os.path.dirname(ampatch.__file__) + os.sep, os.path.dirname(torch.__file__) + os.sep)
INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})
LIBRARIES = (*OURS, *INSTALLED, "<frozen ")
DOCTOR = os.path.dirname(os.path.dirname(__file__)) + os.sep
# What torch puts between a caller and a function under a mode, the mode of `--device cpu`, and we.
BETWEEN = (DOCTOR, "<frozen ", os.path.join(OURS[0], "apex", "on_cpu.py"))
BETWEEN += tuple(os.path.join(OURS[1], name) for name in ("overrides.py", "_tensor.py", "_jit_internal.py"))
SHOWN = os.getcwd() + os.sep
SCALERS = (os.path.join("steps", "scaler.py"), os.path.join("amp", "grad_scaler.py"))

WRAPPERS = ("module", "_orig_mod")  # of DistributedDataParallel and torch.compile


@dataclass(frozen=True, slots=True)
class Place:
    """A module of a model, by its dotted path ("" is the model), and which call of it in this forward."""

    model: str | None
    module: str
    call: int


Standing = tuple[list[Place | None], Counter[int]]  # the modules that run, and the calls so far


class Models:
    """Follows the modules that run."""

    def __init__(self) -> None:
        self.roots: list[Module] = []
        self._names: dict[int, tuple[str, str]] = {}  # of modules
        self._parameters: dict[int, str] = {}
        self._stack: list[Place | None] = []
        self._calls: Counter[int] = Counter()
        self._listed: list[Parameter] | None = None  # until a model runs again

    @property
    def is_inside(self) -> bool:
        return self.place is not None

    @property
    def place(self) -> Place | None:
        return next((place for place in reversed(self._stack) if place is not None), None)

    @property
    def depth(self) -> int:
        return len(self._stack)

    def enter(self, module: Module) -> bool:
        """Notes that a module begins; returns whether it is the outermost of a model."""
        is_root = not self.is_inside and next(module.parameters(), None) is not None
        self._listed = None if is_root else self._listed  # parameters may have been added or replaced
        if is_root and id(module) not in self._names:
            self._learn(module)
        named = self._names.get(id(module)) if is_root or self.is_inside else None
        self._stack.append(None if named is None else Place(*named, self._calls[id(module)]))
        self._calls[id(module)] += 1
        return is_root

    def save(self) -> Standing:
        return self._stack.copy(), self._calls.copy()

    def restore(self, stack: Iterable[Place | None] = (), calls: Mapping[int, int] | None = None) -> None:
        """Goes back to where it stood, or counts calls from 0 again, as each micro-step does."""
        self._stack, self._calls = list(stack), Counter(calls)

    def learn_masters(self, optimizer: Optimizer) -> None:
        """Gives float32 masters, which an optimizer steps, the names of the half parameters they follow."""
        for half, master in masters_of(optimizer):
            self._parameters.setdefault(id(master), self._parameters.get(id(half)))

    def leave(self) -> None:
        if self._stack:
            self._stack.pop()

    def like_place(self) -> list[str]:
        """Returns the modules of the class of the one that runs, in its model."""
        place = self.place
        owners = (root for root in self.roots if place and self._names[id(root)][0] == place.model)
        modules = {path: type(module) for root in owners for path, module in root.named_modules()}
        return [path for path, kind in modules.items() if place and kind is modules.get(place.module)]

    def name_of(self, parameter: object) -> str | None:
        return self._parameters.get(id(parameter))

    def name_beside(self, tensor: Tensor, outputs: list[Tensor], inputs: list[Tensor]) -> str | None:
        """Names the parameter that an optimizer computed a result of: its lists stand in step."""
        results = list({id(each): None for each in outputs})  # in place, they may be given twice
        beside = inputs[results.index(id(tensor)) :: len(results)]
        names = (*map(self.name_of, beside), *map(self.name_held, beside))  # weights may be detached
        return next(filter(None, names), None)

    def name_held(self, tensor: Tensor) -> str | None:
        """Names the parameter or buffer in whose memory a tensor lies."""
        key = key_of(tensor)
        held = (pair for root in self.roots for pair in (*root.named_parameters(), *root.named_buffers()))
        return next((path for path, tensor in held if key_of(tensor) == key), None)

    def name_of_buffer(self, tensor: Tensor) -> str | None:
        """Names the buffer that a tensor is, of models that have run or are in sight, as in `initialize`."""
        key = key_of(tensor)
        roots = (*self.roots, *(() if self.roots else (module for _, module in modules_in_sight())))
        held = (buffer for root in roots for buffer in root.named_buffers())
        return next((path for path, buffer in held if buffer is tensor or key_of(buffer) == key), None)

    def parameters(self) -> list[Parameter]:
        """Returns the parameters of all models that have run."""
        if self._listed is None:
            self._listed = [parameter for root in self.roots for parameter in root.parameters()]
        return self._listed

    def lost_buffers(self, first: int = 0) -> list[Tensor]:
        """Returns the buffers of models, from one on, that hold inf or NaN, as a running mean may."""
        held = (buffer for root in self.roots[first:] for buffer in root.buffers())
        return [buffer for buffer in held if not (is_finite(buffer) or is_mask(buffer))]

    def named_parameters(self) -> Iterator[tuple[str, str, Parameter]]:
        for root in self.roots:
            for path, parameter in root.named_parameters():
                yield self._names[id(root)][0], path, parameter

    def _learn(self, module: Module) -> None:
        name, root = find_owner(unwrap(module))
        self.roots.append(root)
        for path, each in root.named_modules():
            self._names.setdefault(id(each), (name, path))
        self._names.setdefault(id(module), (name, ""))
        for path, parameter in root.named_parameters():
            self._parameters.setdefault(id(parameter), path)


def masters_of(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """Returns the half weights of an optimizer and their masters, none where it is not ours."""
    try:
        return list(ampatch.master_pairs(optimizer))
    except ampatch.AmpError:
        return []


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def unwrap(module: Module) -> Module:
    """Returns the user's own module out of what distributes or compiles it."""
    while type(module).__module__.startswith("torch."):
        inner = next((getattr(module, name, None) for name in WRAPPERS if name in module._modules), None)
        if inner is None:
            break
        module = inner
    return module


def device_of(module: Module) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def find_owner(module: Module) -> tuple[str, Module]:
    """Returns the user's name for a model, and the model: the largest module in sight that holds `module`."""
    best, name, size = module, type(module).__name__, 0
    for variable, value in modules_in_sight():
        modules = list(unwrap(value).modules())
        if len(modules) > size and any(each is module for each in modules):
            best, name, size = unwrap(value), variable, len(modules)
    return name, best


def modules_in_sight() -> Iterator[tuple[str, Module]]:
    """Yields the modules of the user's variables, the innermost first, and those that objects hold."""
    for frame in frames():
        if frame.f_code.co_filename.startswith(LIBRARIES):
            continue
        for variable, value in {**frame.f_globals, **frame.f_locals}.items():
            if isinstance(value, Module) and variable != "self":
                yield variable, value
            elif not isinstance(value, (Module, ModuleType, type)):
                held = getattr(value, "__dict__", None) or {}
                yield from (
                    (f"{variable}.{key}", each) for key, each in held.items() if isinstance(each, Module)
                )


def frames() -> Iterator[FrameType]:
    """Yields the frames of whoever calls, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_line() -> str | None:
    """Returns "file:line" of whoever calls, from the working directory on.

    None if nobody does, as on a thread of the autograd engine.
    """
    frame = user_frame()
    return None if frame is None else f"{frame.f_code.co_filename.removeprefix(SHOWN)}:{frame.f_lineno}"


def user_frame() -> FrameType | None:
    """Returns the innermost frame of the user's own code, of other libraries where there is none."""
    second = None
    for frame in frames():
        name = frame.f_code.co_filename
        if not name.startswith((*OURS, "<frozen ")):
            if not name.startswith(INSTALLED):
                return frame
            second = second or frame
    return second


def is_called_by_scaler() -> bool:
    """Says whether a loss scaler calls, ours or `torch.amp.GradScaler`."""
    files = (frame.f_code.co_filename for frame in frames())
    inside = takewhile(lambda path: path.startswith((*OURS, "<frozen ")), files)
    return any(path.endswith(SCALERS) for path in inside)


def caller() -> str:
    """Returns the file that calls, but for the doctor and what torch puts between; torch's of a thread."""
    frame = next((frame for frame in frames() if not frame.f_code.co_filename.startswith(BETWEEN)), None)
    return OURS[1] if frame is None else frame.f_code.co_filename


def is_called_by_user() -> bool:
    return not caller().startswith(OURS)


def is_called_by_ampatch() -> bool:
    return caller().startswith(OURS[0])


def is_called_by_doctor() -> bool:
    """Says whether the doctor itself calls a function that it has replaced."""
    wrapper = sys._getframe(2)  # what stands in the function's place
    return wrapper.f_back is not None and wrapper.f_back.f_code.co_filename.startswith(DOCTOR)
