"""What the functions of `amp_C` share: reading lists, computing past autograd, writing between types."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

import ampatch as amp
from ampatch.apex.multi_tensor_apply.norms import compute_type, is_plain

P = ParamSpec("P")
R = TypeVar("R")


def past_autograd(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function to run without a graph, and without the casts of a session."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad(), amp.disable_casts():
            return function(*args, **kwargs)

    return run


def check_lists(
    name: str, tensor_lists: Sequence[Sequence[Tensor]], count: int, most: int | None = None
) -> list[list[Tensor]]:
    """Returns the lists, as lists of tensors without a graph or a version.

    Raises AmpValueError if there are not `count` of them (up to `most`), or if they do not fit.
    """
    lists = [[tensor.data for tensor in tensors] for tensors in tensor_lists]
    if not count <= len(lists) <= (most or count):
        raise amp.AmpValueError(f"{name}: found {len(lists)} lists of tensors, expected {most or count}")
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


def widen(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors in the type that is computed in; those that have it are returned themselves."""
    return [tensor.to(compute_type(tensor.dtype)) for tensor in tensors]


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
