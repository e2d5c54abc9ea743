"""Lets `torch.autocast(enabled=False)` inside a model's forward turn our casts off, too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

import torch

from ampatch.casts.cast import CASTS
from ampatch.levels.private import ENTER_AUTOCAST
from ampatch.levels.stack import is_running
from ampatch.patching.patcher import Patcher


def patch_autocast(patcher: Patcher) -> None:
    """Has `with torch.autocast(device, enabled=False)` mean float32 here as it does under autocast.

    Authors of models write it around what must not be rounded, such as rotary embeddings. Outside of a
    forward it says nothing: there it is how scripts turn torch's own mixed precision off.
    """
    block = torch.amp.autocast_mode.autocast
    patcher.replace(block, "__enter__", _enter_uncast(block.__enter__))
    patcher.replace(block, "__exit__", _exit_uncast(block.__exit__))


def _enter_uncast(original: Callable) -> Callable:
    thread = CASTS.thread
    in_graph = getattr(ENTER_AUTOCAST.find(), "__code__", None)

    def enter(self: torch.autocast) -> object:
        result = original(self)
        forwards = thread.forwards
        is_off = not self._enabled and self.device in CASTS.device_types
        # Dynamo enters one to trace what is inside, and would take our state for that of the whole graph.
        is_traced = sys._getframe(1).f_code is in_graph
        is_inside = bool(forwards) and is_running(forwards[-1].frame)
        thread.enter_autocast(self, is_off and is_inside and not is_traced)
        return result

    return enter


def _exit_uncast(original: Callable) -> Callable:
    thread = CASTS.thread

    def leave(
        self: torch.autocast,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> object:
        thread.exit_autocast(self)
        return original(self, kind, error, traceback)

    return leave
