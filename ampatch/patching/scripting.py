"""Lets torch.jit take models with hooks, and patched functions for what they stand in for."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch.nn import Module

from ampatch.casts.cast import CASTS
from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.private import FIND_BUILTIN, FUNCTIONS_IN_SCRIPTS, SCRIPT_MODULE
from ampatch.patching.patcher import Patcher, SessionPatch, peel

UNCAST = (
    "%s: scripted code runs uncast, in the types that its weights and inputs have; "
    "torch.jit.trace and torch.export of an initialized model keep the casts"
)

logger = logging.getLogger("ampatch")


class ScriptModels(SessionPatch):
    """Has scripted code run the originals, uncast, and leaves our hooks out of it; says so once a session.

    Torch itself scripts functions when they are first needed, those of forward-mode AD among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_said = False

    def patch(self, patcher: Patcher) -> None:
        """Replaces the functions by which TorchScript gets to know another one, or a module."""
        self._has_said = False
        FIND_BUILTIN.find(len)("")  # which makes a table of torch's namespace as it is now: before any patch
        for name in FUNCTIONS_IN_SCRIPTS:
            if not name.is_missing():
                patcher.replace(*name.find_place(), _take_original(name.find()))
        if not SCRIPT_MODULE.is_missing():
            patcher.replace(*SCRIPT_MODULE.find_place(), self._script_without_hooks(SCRIPT_MODULE.find()))

    def _script_without_hooks(self, original: Callable[..., object]) -> Callable[..., object]:
        def create_script_module(model: Module, *args: object, is_tracing: bool = False, **kwargs) -> object:
            if not is_tracing:
                self._say(model)
            with ExitStack() as undo:
                undo.callback((patcher := Patcher()).close)
                _hide_hooks(patcher, model)
                return original(model, *args, is_tracing=is_tracing, **kwargs)

        return create_script_module

    def _say(self, model: Module) -> None:
        has_half = any(param.dtype in HALF_TYPES for param in model.parameters())
        if not self._has_said and (has_half or CASTS.half is not None):
            self._has_said = True
            logger.warning(UNCAST, f"torch.jit.script({type(model).__name__})")


def say_scripted(models: Sequence[Module]) -> None:
    """Says of models with scripted or traced parts that casts of torch's functions do not reach these."""
    parts = [part for model in models for part in model.named_modules()]
    scripted = [name for name, part in parts if isinstance(part, torch.jit.ScriptModule)]
    if scripted:
        logger.warning(UNCAST, f"module {scripted[0]!r} is scripted")


def _take_original(look_up: Callable[..., object]) -> Callable[..., object]:
    return lambda function, *args: look_up(peel(function), *args)


def _hide_hooks(patcher: Patcher, model: Module) -> None:
    """Takes the forward hooks that `initialize` put on a model and its parts away."""
    for part in model.modules():
        for table in ("_forward_hooks", "_forward_pre_hooks"):
            hooks = getattr(part, table).items()
            others = [(key, hook) for key, hook in hooks if not is_ours(hook)]
            if len(others) < len(hooks):
                patcher.replace(part, table, OrderedDict(others))


def is_ours(hook: object) -> bool:
    """Whether a hook is one that `initialize` put on a module."""
    return type(hook).__module__.partition(".")[0] == "ampatch"
