"""What features of torch need to work on half models and on patched functions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import torch
import torch.utils.checkpoint
from torch import Tensor, overrides
from torch.nn import Module, Parameter

from ampatch.casts.cast import CASTS, Call, Function
from ampatch.casts.thread import OpenForward
from ampatch.casts.wrapper import METHODS
from ampatch.errors import AmpValueError
from ampatch.levels.private import (
    POP_MODE,
    REENTRANT,
    REFERENCES,
    count_function_modes,
    function_mode,
    has_function_modes,
)
from ampatch.patching.bound_names import BoundNames
from ampatch.patching.layers import widen_in_transforms
from ampatch.patching.patcher import Patcher, SessionPatch, peel
from ampatch.patching.scripting import is_ours

# What `checkpoint` calls: in torch 2.14, and before.
_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")


class BeforeGraph:
    """A forward pre-hook that does nothing in a graph, and is asked to `refresh` before one runs."""

    def refresh(self, args: tuple, kwargs: dict) -> None:
        """Brings up to date what the graph reads, given what the model is."""
        raise NotImplementedError


class TorchFeatures(SessionPatch):
    """Has checkpointing, transforms, overrides and compiled models work at every level but O0."""

    def patch(self, patcher: Patcher) -> None:
        """Patches what these features look up."""
        keep_tables(patcher)
        patch_checkpoint(patcher)
        widen_in_transforms(patcher)
        name_originals(patcher)
        refresh_compiled(patcher)
        refuse_hooks_of_ours(patcher)


def name_originals(patcher: Patcher) -> None:
    """Has functions that are written in Python introduce themselves by the originals.

    They look themselves up in their module, find the wrapper there and pass it on; but classes look
    what is passed up in tables of theirs, which hold the originals.
    """
    for module in (torch.functional, torch.nn.functional, torch._tensor):
        call = _call_with_original(module.handle_torch_function)  # type: ignore[attr-defined]
        patcher.replace(module, "handle_torch_function", call)


def _call_with_original(dispatch: Function) -> Function:
    def call(function: Function, relevant_args: Iterable[object], *args: object, **kwargs: object) -> object:
        return dispatch(peel(function), relevant_args, *args, **kwargs)

    return call


def keep_tables(patcher: Patcher) -> None:
    """Has `torch.overrides` know a function by what stands in its place as well as by itself.

    It makes tables of torch's functions when it is first asked, and keeps them: so before any patch.
    """
    overrides.is_tensor_method_or_property(Tensor.add)
    REFERENCES.find(dict)()
    for name in ("resolve_name", "is_tensor_method_or_property"):
        patcher.replace(overrides, name, _of_original(getattr(overrides, name)))
    table, keys = overrides.get_testing_overrides(), overrides.get_overridable_functions()
    places = [place for place in keys if isinstance(place, (type, ModuleType))]

    @functools.wraps(overrides.get_testing_overrides)
    def get_testing_overrides() -> dict:
        functions = [value for place in places for value in vars(place).values() if callable(value)]
        wrappers = [(each, peel(each)) for each in functions if peel(each) is not each]
        return table | {wrapper: table[original] for wrapper, original in wrappers if original in table}

    patcher.replace(overrides, "get_testing_overrides", get_testing_overrides)


def _of_original(look_up: Function) -> Function:
    @functools.wraps(look_up)
    def look_up_original(function: Function) -> object:
        return look_up(peel(function))

    return look_up_original


def hand_over_originals(patcher: Patcher, names: BoundNames) -> None:
    """Has what overrides functions of torch be handed the originals.

    Torch keeps its functions in C and hands over those; but methods it looks up on Tensor, where the wrappers
    are.
    """

    def hand_over(original: Function, call: Call, args: tuple, kwargs: dict) -> object:
        others = [value for value in _list_values(args, kwargs) if _overrides(value)]
        if not others and not has_function_modes():
            return call(args, kwargs)  # only the mode of `set_default_device` is there
        modes = [function_mode(index) for index in range(count_function_modes())]
        names.look_for_tables(set(map(type, others + modes)), original)
        are_tensors = all(isinstance(other, Tensor) for other in others)
        with _Originals() if type(original) in METHODS and not POP_MODE.is_missing() else nullcontext():
            # What others call in turn is cast, as under torch.autocast.
            return call(args, kwargs) if are_tensors else original(*args, **kwargs)

    patcher.replace(CASTS, "hand_over", hand_over)


def _list_values(args: tuple, kwargs: dict) -> list:
    """Arguments, and what is in lists and tuples among them."""
    values = [*args, *kwargs.values()]
    return [item for value in values for item in (value if isinstance(value, (list, tuple)) else (value,))]


def _overrides(value: object) -> bool:
    return type(value) not in (Tensor, Parameter) and hasattr(type(value), "__torch_function__")


class _Originals(overrides.TorchFunctionMode):
    """Passes what torch looked up on as what it was before the patch, to the next mode or to classes."""

    def __torch_function__(
        self, func: Function, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs, function, count = kwargs or {}, peel(func), count_function_modes()
        if count:
            # What that mode calls may go on to another, or to a class.
            is_last = count == 1 and not types
            with POP_MODE.find()() as mode, nullcontext() if is_last else _Originals():
                result = mode.__torch_function__(function, types, args, kwargs)
            if result is not NotImplemented:
                return result
        for kind in types:  # in torch's order
            first = next(value for value in _list_values(args, kwargs) if type(value) is kind)
            result = first.__torch_function__(function, types, args, kwargs)
            if result is not NotImplemented:
                return result
        return NotImplemented if count or types else function(*args, **kwargs)


def refresh_compiled(patcher: Patcher) -> None:
    """Has a model that `torch.compile` returned run such hooks of its own before its graph.

    Without an optimizer nothing may have imported Dynamo yet, and there are no masters to write into.
    """
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:
        return
    original = eval_frame.OptimizedModule.__call__

    @functools.wraps(original)
    def call(self: Module, *args: object, **kwargs: object) -> object:
        if not torch.compiler.is_dynamo_compiling():
            for hook in self._orig_mod._forward_pre_hooks.values():  # type: ignore[union-attr]
                if isinstance(hook, BeforeGraph):
                    hook.refresh(args, kwargs)
        return original(self, *args, **kwargs)

    patcher.replace(eval_frame.OptimizedModule, "__call__", call)


def refuse_hooks_of_ours(patcher: Patcher) -> None:
    """Has `torch.cuda.make_graphed_callables`, which takes no module with hooks, name the way out."""
    original = torch.cuda.make_graphed_callables

    @functools.wraps(original)
    def make_graphed_callables(callables: object, *args: object, **kwargs: object) -> object:
        for module in callables if isinstance(callables, tuple) else (callables,):
            hooks = list(module._forward_pre_hooks.values()) if isinstance(module, Module) else []
            if any(map(is_ours, hooks)):
                raise AmpValueError(
                    f"torch.cuda.make_graphed_callables takes no module with hooks, and initialize put some "
                    f"on this {type(module).__name__}: give it torch.nn.Sequential(model), which has none"
                )
        return original(callables, *args, **kwargs)

    patcher.replace(torch.cuda, "make_graphed_callables", make_graphed_callables)


def patch_checkpoint(patcher: Patcher) -> None:
    """Has both kinds of checkpointing repeat what was around the checkpoint: models, disabled casts.

    The recomputation runs inside backward, where neither is around it. What is replaced are two names
    that `torch.utils.checkpoint.checkpoint` looks up: it may itself be bound to other names by now,
    and torch.compile knows it by identity.
    """
    module = torch.utils.checkpoint
    name = next((name for name in _GENERATORS if hasattr(module, name)), None)
    if name is not None:
        patcher.replace(module, name, _repeat_generator(getattr(module, name)))
    reentrant = REENTRANT.find()

    def apply(function: Function, *args: object) -> object:
        return reentrant.apply(_repeat(function), *args)

    if reentrant is not None:
        patcher.replace(*REENTRANT.find_place(), SimpleNamespace(apply=apply, __wrapped__=reentrant))


def _repeat_generator(original: Function) -> Function:
    no_context = torch.utils.checkpoint.noop_context_fn

    @functools.wraps(original)
    def generate(function: Function, *args: object, **kwargs: object) -> object:
        by_place = args[1] if len(args) > 1 and callable(args[1]) else no_context
        is_selective = kwargs.get("context_fn", by_place) is not no_context
        if is_selective:
            # It counts operations, casts of weights among them, so that both runs must begin alike: with no
            # casts in the cache.
            CASTS.forget_casts()
        return original(_repeat(function, begins_empty=is_selective), *args, **kwargs)

    return generate


def _repeat(function: Function, *, begins_empty: bool = False) -> Function:
    """Returns `function` with casts on or off, and inside of the forward, as it is now."""
    thread = CASTS.thread
    switch = thread.disabled if thread.off and thread.is_off() else thread.enabled
    dtype = thread.forwards[-1].dtype if thread.forwards else None

    def run(*args: object, **kwargs: object) -> object:
        if begins_empty:
            CASTS.forget_casts()
        with switch():
            if not is_inside:
                return function(*args, **kwargs)
            thread.push(OpenForward(id(run), False, dtype, sys._getframe()))
            try:
                return function(*args, **kwargs)
            finally:
                thread.pop(id(run))

    is_inside = bool(thread.forwards)
    return run
