"""Lets torch.jit.script take models with hooks, and patched functions for what they stand in for."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch.nn import Module

from ampatch.casts.cast import CastState
from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.private import BUILTINS, SCRIPT_MODULE
from ampatch.patching.patcher import Patcher, SessionPatch

logger = logging.getLogger("ampatch")


class StandsFor:
    """Tells TorchScript what to compile in the place of something."""

    def __init__(self, original: object) -> None:
        self._original = original

    def __call__(self) -> object:
        return self._original


class ScriptNames:
    """Tells TorchScript what patched functions are: scripted code runs the originals, uncast.

    Torch itself scripts functions when they are first needed, those of forward-mode AD among them.
    TorchScript knows builtins by identity, and would read the source of anything else.
    """

    def __init__(self) -> None:
        # The table is made on first use, from torch's namespace as it is then: before any patch.
        self._table: dict[int, str] = BUILTINS.find(dict)()
        self._added: list[int] = []

    def add(self, wrapper: Callable[..., object], original: object) -> None:
        """Makes `wrapper` stand for `original` in scripted code."""
        name = self._table.get(id(original))
        if name is not None:
            self._table[id(wrapper)] = name
            self._added.append(id(wrapper))
        elif inspect.isfunction(original):
            # What TorchScript asks anything for. Dynamo, unlike it, must see the wrapper.
            wrapper.__prepare_scriptable__ = StandsFor(original)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Takes it back."""
        while self._added:
            self._table.pop(self._added.pop(), None)


class ScriptModels(SessionPatch):
    """Has torch.jit.script leave our hooks out, whose source it would compile; says once what that means."""

    def __init__(self, casts: CastState) -> None:
        super().__init__()
        self._casts = casts
        self._has_said = False

    def patch(self, patcher: Patcher) -> None:
        """Replaces the function that scripts a module."""
        if SCRIPT_MODULE.is_missing():
            return
        original = SCRIPT_MODULE.find()

        def create_script_module(model: Module, *args: object, **kwargs: object) -> object:
            self._say(model)
            with _without_hooks(model):
                return original(model, *args, **kwargs)

        patcher.replace(*SCRIPT_MODULE.find_place(), create_script_module)

    def forget(self) -> None:
        """Lets the next session say it again."""
        self._has_said = False

    def _say(self, model: Module) -> None:
        has_half = any(param.dtype in HALF_TYPES for param in model.parameters())
        is_traced = type(model).__module__.startswith("torch.jit.")  # which holds what a trace recorded
        if not self._has_said and not is_traced and (has_half or self._casts.half is not None):
            self._has_said = True
            logger.warning(
                "torch.jit.script(%s): scripted code runs uncast, in the types that its weights and inputs "
                "have; torch.jit.trace and torch.export keep the casts",
                type(model).__name__,
            )


@contextmanager
def _without_hooks(model: Module) -> Iterator[None]:
    """Takes our forward hooks away from a model and its parts for a moment."""
    with ExitStack() as stack:
        for module in model.modules():
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                given = dict(hooks)
                stack.callback(hooks.update, given)
                stack.callback(hooks.clear)
                hooks.clear()
                hooks.update({key: hook for key, hook in given.items() if not _is_ours(hook)})
        yield


def _is_ours(hook: object) -> bool:
    return type(hook).__module__.partition(".")[0] == "ampatch"
