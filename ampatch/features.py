"""What features of torch need to work on half models and on patched functions."""

from __future__ import annotations

from ampatch.batch_norm import patch_batch_norm
from ampatch.before_graph import refresh_compiled
from ampatch.cast import CastState
from ampatch.checkpoint import patch_checkpoint
from ampatch.overrides import name_originals
from ampatch.patcher import Patcher, SessionPatch


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
