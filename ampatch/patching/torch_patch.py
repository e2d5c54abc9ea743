"""Torch's functions as the cast tables and the user's registrations want them."""

from __future__ import annotations

import functools
import pkgutil
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import ClassMethodDescriptorType
from typing import TypeVar

import torch
import wrapt
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampatch import lists
from ampatch.casts.cast import CASTS
from ampatch.casts.wrapper import CastCounter, peel, wrap
from ampatch.errors import AmpTypeError, AmpValueError
from ampatch.levels.patcher import Patcher, SessionPatch, qualify
from ampatch.levels.policy import Policy
from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.stack import logger, wrap_closure
from ampatch.patching import compiling
from ampatch.patching.bound_names import BoundNames
from ampatch.patching.torch_features import (
    allow_fast_path,
    allow_half_input,
    hand_over_originals,
    leave_ops_uncast,
    patch_autocast,
    say_scripted,
)
from ampatch.table import Cast, CastTable, Row

Result = TypeVar("Result")


def ban_in_place() -> None:
    """Has FP32 functions in place raise on half tensors, as apex's did, until torch is no longer patched."""
    CASTS.bans_in_place = True


def call_before_step(function: Callable[..., Result], *args: object) -> Result:
    """Calls what a hook of a step does with a forward, with casts as they were before the step."""
    return CASTS.thread.call_closure(function, *args)


def _begin_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple | None:
    """Turns casts off in the step of any optimizer, but not in its closure."""
    # Weights change in a step, and fused optimizers do not bump their version. Before it as well: a
    # closure may run inside it.
    CASTS.end_casts(optimizer)
    CASTS.thread.begin_step(sys._getframe(1))
    if len(args) > 1 or kwargs:
        return wrap_closure(args, kwargs, CASTS.thread.call_closure)
    return None


def _end_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    CASTS.thread.end_step(sys._getframe(1))
    CASTS.end_casts(optimizer)


Place = tuple[object, str]  # parent, attribute


def place_rows(tables: Iterable[CastTable], version: str) -> list[tuple[Place, Row]]:
    """Lists the rows of a torch version with their places, in patch order.

    A row whose function this torch lacks is skipped, with a warning logged.
    """
    placed: list[tuple[Place, Row]] = []
    for target, row in [(table.target, row) for table in tables for row in table.select(version).rows]:
        module, _, rest = f"{target}.{row.name}".partition(".")
        try:
            pkgutil.resolve_name(target)  # imports it, where torch does so on first use
            parent, attribute, _ = wrapt.resolve_path(module, rest)
        except (AttributeError, ImportError):
            text = "%s.%s: no such function in this torch; its row is skipped"
            logger.warning(text, target, row.name)
        else:
            placed.append(((parent, attribute), row))
    return placed


class TorchPatch(SessionPatch):
    """Patches torch once a session, and keeps what users registered for the next one."""

    def __init__(self) -> None:
        super().__init__()
        self._registrations: dict[tuple[int, str], Registration] = {}
        self._names = BoundNames()
        self._rows: tuple[object, list[tuple[Place, Row]]] = (None, [])
        self._graph_names = compiling.GraphNames()
        self.counter: CastCounter | None = None  # of the casts of this session, if somebody asks

    def validate(self, policy: Policy) -> None:
        """Raises if torch is patched for another half type already."""
        half = CASTS.half
        if half is not None and policy.patch_torch_functions and policy.half is not half:
            raise AmpValueError(
                f"{policy.opt_level} in {policy.half}, but an earlier initialize patched torch for {half}: "
                f"use one half type for all models, or call ampatch.uninitialize() first"
            )

    def open(
        self,
        policy: Policy,
        models: Sequence[torch.nn.Module],
        device_types: Iterable[str],
        trace: Callable[[str], None] | None,
        undo: ExitStack,
    ) -> None:
        """Patches every row and registration; if torch is patched already, only adds to what it casts.

        Functions that the models keep by names of their own are patched there as well. `undo` receives
        the way back, step by step.
        """
        undo.callback(CASTS.narrow, set(CASTS.device_types), CASTS.allow_banned, CASTS.bans_in_place)
        CASTS.device_types.update(device_types)
        CASTS.allow_banned |= policy.allow_banned
        is_first = self._patcher is None
        if is_first:
            self._patch(policy, trace, undo)
        say_scripted(models)
        undo.callback(self._names.replace_in(models, in_modules=is_first))
        undo.callback(self._graph_names.recompile(models))
        for model in models:
            # The casts of its weights keep these alive; of models that nobody gave us, for some steps more.
            finalizer = weakref.finalize(model, CASTS.forget_casts)
            finalizer.atexit = False
            undo.callback(finalizer.detach)

    def _patch(self, policy: Policy, trace: Callable[[str], None] | None, undo: ExitStack) -> None:
        compiling.prepare_compiler()
        undo.callback(self._names.close)
        undo.callback(compiling.restore_compiler)  # first: what is compiled holds wrappers
        patcher = self._begin(undo)
        hand_over_originals(patcher, self._names)
        CASTS.half = policy.half
        undo.callback(register_optimizer_step_pre_hook(_begin_step).remove)
        undo.callback(register_optimizer_step_post_hook(_end_step).remove)
        self._patch_rows(patcher, policy, trace)
        patcher.replace(torch.nn.RNNBase, "check_input", allow_half_input())
        patcher.replace(torch.backends.mha, "get_fastpath_enabled", allow_fast_path())
        self._graph_names.open(patcher)
        patch_autocast(patcher)
        leave_ops_uncast(patcher)
        compiling.trace_methods(patcher, policy.half)
        compiling.tag_caches(patcher, policy.half)
        compiling.forget_graphs()
        compiling.guard_compiler(policy.half, undo)
        for registration in self._registrations.values():
            self._bind(registration)

    def _patch_rows(self, patcher: Patcher, policy: Policy, trace: Callable[[str], None] | None) -> None:
        for (parent, attribute), row in self._list_rows():
            if (id(parent), attribute) in self._registrations:
                continue
            original = patcher.find_original(parent, attribute)
            place = qualify(parent, attribute)
            counter = self.counter
            wrapper = wrap(original, row.cast, policy.half, place=place, trace=trace, counter=counter)
            # What TorchScript compiles in its place, where it is told to compile a function by itself.
            wrapper.__prepare_scriptable__ = functools.partial(peel, original)  # type: ignore[attr-defined]
            patcher.replace(parent, attribute, wrapper)
            self._graph_names.add(original, place)
            self._names.add(original, wrapper)

    def _list_rows(self) -> list[tuple[Place, Row]]:
        """The rows with their places, looked up once: these do not move."""
        if self._rows[0] is not lists.TABLES:
            self._rows = lists.TABLES, place_rows(lists.TABLES, torch.__version__)
        return self._rows[1]

    def count_casts(self) -> None:
        """Has casts counted; call it before torch is patched."""
        self.counter = self.counter or CastCounter()

    def forget(self) -> None:
        self.counter = None
        CASTS.close()

    @property
    def registrations(self) -> tuple[Registration, ...]:
        return tuple(self._registrations.values())

    def register(self, registration: Registration) -> None:
        """Adds a user's function to the tables, for this session and later ones."""
        self._registrations[id(registration.parent), registration.attribute] = registration
        if self._patcher is not None:
            self._bind(registration)
            self._names.replace_everywhere()

    def _bind(self, registration: Registration) -> None:
        assert self._patcher is not None, "bound while torch is not patched"
        parent, attribute = registration.parent, registration.attribute
        original = self._patcher.find_original(parent, attribute)
        bound = bind(registration, original)
        self._patcher.replace(parent, attribute, bound)
        if not isinstance(parent, type):  # what a class inherits is registered for it alone
            self._names.add(original, bound)


Function = TypeVar("Function", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Registration:
    """One function that a user registered; `dtype` None is the half type of the level."""

    parent: object
    attribute: str
    cast: Cast
    dtype: torch.dtype | None = None


def validate_place(module: object, name: str) -> None:
    """Raises AmpValueError unless `module` has a callable attribute `name`."""
    if not isinstance(name, str):
        raise AmpTypeError(f"name is {name!r}: expected a string, the function's name in the module")
    owner = getattr(module, "__name__", None) or repr(module)
    if not hasattr(module, name):
        raise AmpValueError(f"no function named {name!r} in {owner}: check the name and the module")
    if not callable(getattr(module, name)):
        kind = type(getattr(module, name)).__name__
        raise AmpValueError(f"{owner}.{name} is a {kind}: expected a function")


def decorate(function: Function, cast: Cast, dtype: torch.dtype | None = None) -> Function:
    """Returns a function whose floating arguments are cast while a session patches torch.

    Works on plain functions, builtins, bound methods, staticmethods and classmethods.
    """
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(decorate(function.__func__, cast, dtype))
    if not callable(function):
        raise AmpTypeError(f"{function!r} is a {type(function).__name__}: expected a function to decorate")
    place = getattr(function, "__module__", None), getattr(function, "__qualname__", type(function).__name__)
    halves = HALF_TYPES if dtype is None else (dtype,)
    wrappers = {half: wrap(function, cast, half, place=place, is_users=True) for half in halves}

    @functools.wraps(function)
    def decorated(*args, **kwargs):
        half = CASTS.half
        if half is None:
            return function(*args, **kwargs)
        return wrappers[dtype or half](*args, **kwargs)

    return decorated


def bind(registration: Registration, original: object) -> object:
    """Returns what stands in for a registered function while torch is patched."""
    half = registration.dtype or CASTS.half
    assert half is not None, "bound while torch is not patched"
    binding, function = _unbind(original)
    wrapper = wrap(
        function,
        registration.cast,
        half,
        place=qualify(registration.parent, registration.attribute),
        is_users=True,
    )
    if isinstance(registration.parent, type) and not hasattr(original, "__get__"):
        binding = staticmethod  # a builtin, which is not bound to instances, and stays so
    return binding(wrapper) if binding else wrapper


def _unbind(original: object) -> tuple[type | None, Callable]:
    """Returns what binds a function to its class, if anything does, and the function itself."""
    if isinstance(original, ClassMethodDescriptorType):  # `apply` of torch.autograd.Function in torch 2.15
        return classmethod, lambda cls, *args, **kwargs: original.__get__(None, cls)(*args, **kwargs)
    if isinstance(original, (staticmethod, classmethod)):
        return type(original), original.__func__
    return None, original
