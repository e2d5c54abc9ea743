"""What a run is made to use: float32 throughout, or in some modules under `torch.autocast`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ampatch.doctor.instruments.clock import MOST_MICRO_STEPS, Clock, Instrument, wrap
from ampatch.doctor.instruments.places import device_of, is_called_by_user, user_line
from ampatch.doctor.instruments.values import floating_in, largest_of, quiet
from ampatch.levels.precision import HALF_TYPES

HALVING = ("half", "bfloat16")
LARGE = torch.finfo(torch.float16).max / 2


def make_with(kind: type, undo: ExitStack, **given: object) -> None:
    """Has objects of a class be made as if a script had given these arguments, until undone."""

    def make(init: Callable[..., None], *args: object, **kwargs: object) -> None:
        bound = inspect.signature(init).bind(*args, **kwargs)
        bound.arguments.update(given)
        init(*bound.args, **bound.kwargs)

    wrap(kind, "__init__", make, undo)


def without_casts(undo: ExitStack) -> None:
    """Has `torch.autocast` and `GradScaler` do nothing."""
    make_with(torch.amp.GradScaler, undo, enabled=False)
    make_with(torch.autocast, undo, enabled=False)


class OwnFloat32(TorchFunctionMode):
    """Has what a script itself makes half be float32: its tensors, its models, and what these are given."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        arguments = (*args, *kwargs.values())
        dtypes = (each for each in arguments if isinstance(each, torch.dtype))
        is_halving = name in HALVING or any(dtype in HALF_TYPES for dtype in dtypes)
        if is_halving and is_called_by_user():
            func = Tensor.float if name in HALVING else func
            args, kwargs = tree_map_only(torch.dtype, widen, (args, kwargs))
        return func(*args, **kwargs)

    def follow(self, undo: ExitStack) -> None:
        """Is in force until undone."""
        for name in (*HALVING, "to"):
            wrap(Module, name, self._cast_module, undo)
        undo.callback(register_module_forward_pre_hook(self._enter).remove)
        undo.enter_context(self)

    def _cast_module(self, cast: Callable[..., Module], module: Module, *args, **kwargs) -> Module:
        if not is_called_by_user():
            return cast(module, *args, **kwargs)
        if cast.__name__ in HALVING:
            return module.float()
        args, kwargs = tree_map_only(torch.dtype, widen, (args, kwargs))
        return cast(module, *args, **kwargs)

    def _enter(self, module: Module, args: tuple) -> tuple | None:
        """Casts half data that a layer in float32 is given."""
        own = {parameter.dtype for parameter in module.parameters(recurse=False)}
        if torch.float32 not in own or not any(tensor.dtype in HALF_TYPES for tensor in floating_in(args)):
            return None
        return tree_map_only(
            Tensor, lambda tensor: tensor.float() if tensor.dtype in HALF_TYPES else tensor, args
        )


def widen(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF_TYPES else dtype


def note_halved(undo: ExitStack) -> dict[str, None]:
    """Returns what gets the lines at which a script itself makes models half, until undone."""
    lines: dict[str, None] = {}

    def noted(cast: Callable[..., Module], module: Module, *args: object, **kwargs: object) -> Module:
        cast(module, *args, **kwargs)
        if is_called_by_user() and any(parameter.dtype in HALF_TYPES for parameter in module.parameters()):
            lines[str(user_line())] = None
        return module

    for name in (*HALVING, "to"):
        wrap(Module, name, noted, undo)
    return lines


def note_autocast_without_gpu(undo: ExitStack) -> set[str]:
    """Returns a set that gets the lines that turn on autocast for CUDA where there is none, until undone.

    torch warns there, and computes in float32.
    """
    lines: set[str] = set()

    def noted(init: Callable[..., None], *args: object, **kwargs: object) -> None:
        init(*args, **kwargs)
        if "cuda" not in (*args[1:], *kwargs.values()) or torch.cuda.is_available():
            return
        arguments = inspect.signature(init).bind(*args, **kwargs).arguments
        if arguments["device_type"] == "cuda" and arguments.get("enabled", True):
            lines.add(str(user_line()))

    wrap(torch.autocast, "__init__", noted, undo)
    return lines


class LoweredRates(Instrument):
    """Multiplies the learning rates of each step, whoever sets them; an optimizer finds None by itself."""

    def __init__(self, clock: Clock, factor: float) -> None:
        super().__init__(clock)
        self._factor = factor
        self._given: list[tuple[dict, object]] = []

    def begin_attempt(self, optimizer: Optimizer, scaler: object) -> None:
        self._given = [
            (group, group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None
        ]
        for group, rate in self._given:
            group["lr"] = rate * self._factor

    def end_attempt(self, optimizer: Optimizer) -> None:
        for group, rate in self._given:
            group["lr"] = rate


class Keeper(Instrument):
    """Has modules, named by their paths, run in float32 under torch.autocast, by the lines of `Keep`."""

    def __init__(self, names: Collection[str], clock: Clock) -> None:
        super().__init__(clock)
        self._names, self._models = names, 0

    def enter_model(self, model: Module, args: tuple) -> None:
        """Wraps those of a model that runs for the first time."""
        for root in self.clock.models.roots[self._models :]:
            for part in (module for name, module in root.named_modules() if name in self._names):
                kind = device_of(part).type
                part.forward = torch.amp.custom_fwd(part.forward, device_type=kind, cast_inputs=torch.float32)
        self._models = len(self.clock.models.roots)


class Oversized(Instrument):
    """Notes, in a run in float32, the layers that take or give more than half of what float16 holds."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.names: dict[str, None] = {}

    def see_output(self, module: Module, output: object) -> None:
        """Looks at what a layer gives, and at what it takes."""
        place = self.clock.models.place
        if torch.compiler.is_compiling() or place is None or place.module in self.names:
            return
        if self.clock.micro_step >= MOST_MICRO_STEPS:
            return
        if any(True for _ in module.parameters(False)):
            with quiet():
                if (largest_of(floating_in(output)) or 0.0) > LARGE:
                    self.names[place.module] = None

    enter_module = see_output
