"""Tells classes with `__torch_function__` which function was called: torch's own, not what stands for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ampatch.patching.patcher import Patcher, peel

Function = Callable[..., object]


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
