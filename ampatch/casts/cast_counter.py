"""How many casts patched functions use, for tools that ask; nothing is counted for others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from ampatch.casts.cast_cache import CastCache
from ampatch.casts.cast_tree import TensorCast


@dataclass(frozen=True, slots=True)
class CastCounts:
    """Casts of patched functions' arguments since the session opened: `made`, and `reused` ones of weights.

    `cached_bytes` are those of the casts of weights that are kept now.
    """

    made: int
    reused: int
    cached_bytes: int


class CastCounter:
    """Counts the casts that functions use: those that were made for them, and those that were there."""

    def __init__(self) -> None:
        self.made = 0
        self.reused = 0

    def watch(self, cast: TensorCast, cache: CastCache) -> TensorCast:
        """Returns a cast that is counted, except under Dynamo, where a count would be a constant.

        A closure, as the casts are: it runs at every one of them. `cache` is that of the weights.
        """

        def counted(tensor: Tensor) -> Tensor:
            if torch.compiler.is_dynamo_compiling():
                return cast(tensor)
            made_before = cache.made
            result = cast(tensor)
            if result is tensor:
                return result
            if isinstance(tensor, Parameter) and cache.made == made_before:
                self.reused += 1
            else:
                self.made += 1
            return result

        return counted
