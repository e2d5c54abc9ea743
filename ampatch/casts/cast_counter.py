"""How many casts patched functions use, for tools that ask; nothing is counted for others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from ampatch.casts.cast import Casts
from ampatch.casts.cast_cache import CastCache
from ampatch.casts.cast_tree import TensorCast

is_compiling = torch.compiler.is_dynamo_compiling


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

    def watch_all(self, casts: Casts, cache: CastCache) -> Casts:
        """Returns the casts of a patched function's arguments, counted; `cache` is that of the weights."""
        return Casts(
            self.watch(casts.any, cache),
            self.watch_tensor(casts.plain_tensor),
            self.watch_parameter(casts.plain_parameter, cache),
        )

    def watch(self, cast: TensorCast, cache: CastCache) -> TensorCast:
        """Returns a cast that is counted, except under Dynamo, where a count would be a constant.

        A closure, as the casts are: it runs at every one of them.
        """
        counted_tensor, counted_parameter = self.watch_tensor(cast), self.watch_parameter(cast, cache)

        def counted(tensor: Tensor) -> Tensor:
            if is_compiling():
                return cast(tensor)
            return counted_parameter(tensor) if isinstance(tensor, Parameter) else counted_tensor(tensor)

        return counted

    def watch_tensor(self, cast: TensorCast) -> TensorCast:
        """Returns a cast of what is no weight, counted."""

        def counted(tensor: Tensor) -> Tensor:
            result = cast(tensor)
            if result is not tensor:
                self.made += 1
            return result

        return counted

    def watch_parameter(self, cast: TensorCast, cache: CastCache) -> TensorCast:
        """Returns a cast of weights, counted."""

        def counted(parameter: Tensor) -> Tensor:
            made_before = cache.made
            result = cast(parameter)
            if result is parameter:
                return result
            if cache.made == made_before:
                self.reused += 1
            else:
                self.made += 1
            return result

        return counted
