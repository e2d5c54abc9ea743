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
                lists = check_lists(function.__name__, tensor_lists, count)
                return function(noop_flag, lists, *args, **kwargs)

        del run.__wrapped__  # which takes other arguments than help and inspect are to show
        return run

    return decorate


def check_lists(name: str, tensor_lists: Lists, count: int) -> list[list[Tensor]]:
    """Returns the lists, as lists of tensors without a graph or a version.

    Raises AmpValueError if there are not `count` of them, or if they do not fit.
    """
    lists = [[tensor.data for tensor in tensors] for tensors in tensor_lists]
    if len(lists) != count:
        raise amp.AmpValueError(f"{name}: found {len(lists)} lists of tensors, expected {count}")
    if len({len(tensors) for tensors in lists}) > 1:
        raise amp.AmpValueError(
            f"{name}: the lists have {', '.join(str(len(tensors)) for tensors in lists)} tensors: "
            f"expected the same number in each"
        )
    for index, row in enumerate(zip(*lists, strict=True)):
        _check_row(name, index, row)
    return lists


def _check_row(name: str, index: int, row: Sequence[Tensor]) -> None:
    if any(tensor.layout is not torch.strided for tensor in row):
        raise amp.AmpValueError(f"{name}: does not support sparse tensors, and tensor {index} is one")
    if len({tensor.numel() for tensor in row}) > 1:
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in row)
        raise amp.AmpValueError(
            f"{name}: tensors {index} have shapes {shapes}: expected equal numbers of elements"
        )


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
