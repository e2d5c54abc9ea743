"""Words for torch's error where float32 meets half in a forward: what in the model is float32, and why."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from ampatch.models.hooks import CastInputs

_TYPES_DIFFER = re.compile(r"same dtype|scalar type|dtypes match|type .* should be the same")


@dataclass(frozen=True, slots=True)
class ExplainMismatch:
    """Adds to torch's error that two types met what is float32 in the model; a forward hook that always runs.

    The error stays what it is, and its text begins with torch's.
    """

    half: torch.dtype

    def __call__(self, module: Module, args: tuple, output: object) -> None:
        error = sys.exc_info()[1] if output is None else None
        if not isinstance(error, RuntimeError) or not _TYPES_DIFFER.search(str(error)):
            return
        words = list(self._find_words(module))
        if words and words[0] not in str(error):  # as a model around this one has not said them
            error.args = (". ".join([str(error), *words]), *error.args[1:])

    def _find_words(self, model: Module) -> Iterator[str]:
        kept = {inner: part for part in model.modules() if _is_kept(part) for inner in part.modules()}
        late, read = [], []
        for name, part in model.named_modules():
            said = f"{name!r} ({type(part).__name__})"
            if part in kept:
                read += [said] * (_has_float32(part.buffers()) and not any(True for _ in part.parameters()))
            elif not isinstance(part, _BatchNorm):
                late += [said] * _has_float32(part.parameters(recurse=False))
        if late:
            yield (
                f"ampatch: the parameters of {', '.join(late)} are float32 among {self.half}: put into the "
                f"model after initialize, or cast by .float(). Call ampatch.uninitialize(), then initialize "
                f"again, with an optimizer of the parameters that are there now"
            )
        if read:
            yield (
                f"ampatch: {', '.join(read)} computes in float32. Where others read its buffers, cast them, "
                f"as in buffer.to(x.dtype)"
            )


def _has_float32(tensors: Iterator[Tensor]) -> bool:
    return any(tensor.dtype is torch.float32 for tensor in tensors)


def _is_kept(module: Module) -> bool:
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(hook, CastInputs) and hook.dtype is torch.float32 for hook in hooks)
