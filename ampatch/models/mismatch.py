"""Words for torch's errors in a half model's forward: what in it is float32, and what has no half kernel."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from ampatch.models.hooks import CastInputs

_NO_KERNEL = re.compile(r"(not implemented for|Unsupported dtype|support tensors of type:) '?(Half|BFloat16)")
_TYPES_DIFFER = re.compile(r"same dtype|scalar type|dtypes match|type .* should be the same")


@dataclass(frozen=True, slots=True)
class ExplainMismatch:
    """Adds to torch's error that two types met what is float32 in the model; a forward hook that always runs.

    To one that there is no half kernel it adds which module called what has none, and how to keep that one.
    The error stays what it is, and its text begins with torch's.
    """

    half: torch.dtype

    def __call__(self, module: Module, args: tuple, output: object) -> None:
        error = sys.exc_info()[1] if output is None else None
        if not isinstance(error, RuntimeError):
            return
        if _NO_KERNEL.search(str(error)):
            words = [self._say_where(module, error)]
        elif _TYPES_DIFFER.search(str(error)):
            words = list(self._find_words(module))
        else:
            return
        if words and words[0] not in str(error):  # as a model around this one has not said them
            error.args = (". ".join([str(error), *words]), *error.args[1:])

    def _say_where(self, model: Module, error: RuntimeError) -> str:
        names = {part: name for name, part in model.named_modules()}
        frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        inside = (part for part in reversed(frames) if isinstance(part, Module) and part in names)
        caller = next(inside, model)
        keep = "cast to float32 there"
        if names[caller]:
            keep = f"keep it in float32 by name or class, as in keep_fp32=[{names[caller]!r}]"
        level = "O1" if self.half is torch.float16 else "O4"
        return (
            f"ampatch: {names[caller]!r} ({type(caller).__name__}) calls what has no kernel of {self.half} "
            f"here: {keep}, or use {level}, which casts functions"
        )

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
