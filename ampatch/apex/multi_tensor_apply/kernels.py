"""What the functions of `amp_C` share: reading lists, computing past autograd, writing between types."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import ampatch as amp
from ampatch.apex.multi_tensor_apply.norms import is_plain

Lists = Sequence[Sequence[Tensor]]
Kernel = Callable[..., object]


def kernel(count: int) -> Callable[[Kernel], Kernel]:
    """Decorates a function of `amp_C` on `count` lists: it gets the flag and these lists.

    It runs without a graph, and without the casts of a session.
    """

    def decorate(function: Kernel) -> Kernel:
        @functools.wraps(function)
        def run(
            chunk_size: int, noop_flag: Tensor | None, tensor_lists: Lists, *args: object, **kwargs: object
        ) -> object:
            with torch.no_grad(), amp.disable_casts():
                lists = without_graph(function.__name__, tensor_lists, count)
                return function(noop_flag, lists, *args, **kwargs)

        del run.__wrapped__  # which takes other arguments than help and inspect are to show
        return run

    return decorate


def without_graph(name: str, tensor_lists: Lists, count: int) -> list[list[Tensor]]:
    """Returns the lists, with tensors that have no graph and no version; raises AmpValueError for others."""
    lists = [[tensor.data for tensor in tensors] for tensors in tensor_lists]
    lengths = [len(tensors) for tensors in lists]
    if len(lists) != count or len({*lengths}) > 1:
        raise amp.AmpValueError(
            f"{name}: found lists of {lengths} tensors, expected {count} lists of the same length"
        )
    return lists


def write_(targets: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Writes results into tensors of any type, on any device."""
    rows = [
        (target, result if result.shape == target.shape else result.reshape(target.shape))
        for target, result in zip(targets, results, strict=True)
    ]
    together = [row for row in rows if is_plain(row[0]) and row[0].numel()]
    if together:
        torch._foreach_copy_([target for target, _ in together], [result for _, result in together])
    for target, result in rows:
        if not is_plain(target):
            target.copy_(result)


def set_flag_(flag: Tensor | None, is_finite: Tensor | None) -> None:
    """Sets the flag to 1 unless `is_finite`; leaves it as it is otherwise. No host sync."""
    if flag is None or is_finite is None:
        return
    flag.data.masked_fill_(~is_finite.to(flag.device), 1)
