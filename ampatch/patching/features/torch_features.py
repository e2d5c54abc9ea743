"""What features of torch need to work on half models and on patched functions."""

from __future__ import annotations

import functools

import torch
from torch.nn import Module

from ampatch.casts.cast import CastState
from ampatch.errors import AmpValueError
from ampatch.patching.features.batch_norm import patch_batch_norm
from ampatch.patching.features.before_graph import refresh_compiled
from ampatch.patching.features.checkpoint import patch_checkpoint
from ampatch.patching.features.overrides import name_originals
from ampatch.patching.patcher import Patcher, SessionPatch


class TorchFeatures(SessionPatch):
    """Has checkpointing, transforms, overrides and compiled models work at every level but O0."""

    def __init__(self, casts: CastState) -> None:
        super().__init__()
        self._casts = casts

    def patch(self, patcher: Patcher) -> None:
        """Patches what these features look up."""
        patch_checkpoint(patcher, self._casts)
        patch_batch_norm(patcher)
        name_originals(patcher)
        refresh_compiled(patcher)
        refuse_hooks_of_ours(patcher)


def refuse_hooks_of_ours(patcher: Patcher) -> None:
    """Has `torch.cuda.make_graphed_callables`, which takes no module with hooks, name the way out."""
    original = torch.cuda.make_graphed_callables

    @functools.wraps(original)
    def make_graphed_callables(callables: object, *args: object, **kwargs: object) -> object:
        for module in callables if isinstance(callables, tuple) else (callables,):
            hooks = list(module._forward_pre_hooks.values()) if isinstance(module, Module) else []
            if any(type(hook).__module__.partition(".")[0] == "ampatch" for hook in hooks):
                raise AmpValueError(
                    f"torch.cuda.make_graphed_callables takes no module with hooks, and initialize put some "
                    f"on this {type(module).__name__}: give it torch.nn.Sequential(model), which has none"
                )
        return original(callables, *args, **kwargs)

    patcher.replace(torch.cuda, "make_graphed_callables", make_graphed_callables)
