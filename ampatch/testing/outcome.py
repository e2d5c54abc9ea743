"""What one call of a function gave: its result, its arguments afterwards, its gradients, or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves, tree_map_only

# What is cast: float64, complex and 8-bit types are not.
ELIGIBLE = (torch.float32, torch.float16, torch.bfloat16)
Function = Callable[..., object]
Arguments = tuple[tuple[object, ...], dict[str, object]]


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What a call gave; everything is detached."""

    result: tuple[object, ...] = ()
    arguments: tuple[object, ...] = ()  # after the call: a function may write into them
    gradients: tuple[object, ...] = ()  # of the floating arguments
    error: Exception | None = None

    def differences(self, expected: CallOutcome) -> Iterator[str]:
        """Yields how this outcome differs from `expected`; values are compared bit by bit."""
        if self.error is not None or expected.error is not None:
            own, wanted = _error(self.error), _error(expected.error)
            if own != wanted:
                yield f"it {own}, expected: it {wanted}"
            return
        for part in ("result", "arguments", "gradients"):
            yield from _compare(part, getattr(self, part), getattr(expected, part))

    def is_same(self, other: CallOutcome) -> bool:
        return not any(True for _ in self.differences(other))


def observe(
    function: Function, arguments: Arguments, gradients: bool, dtype: torch.dtype | None = None
) -> CallOutcome:
    """Calls a function with copies of the arguments, cast to `dtype` by hand, and says what it gave."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor if dtype is None or tensor.dtype not in ELIGIBLE else tensor.to(dtype)

    leaves = tree_map_only(Tensor, lambda each: _copy(each, gradients), arguments)
    # A copy of the copy: a leaf that wants a gradient must not be written.
    copies = tree_map_only(Tensor, lambda each: each if isinstance(each, Parameter) else each.clone(), leaves)
    args, kwargs = tree_map_only(Tensor, cast, copies)
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    devices = {each.device.index for each in tensors if each.device.type == "cuda"}
    try:
        # Every call begins at the same random numbers, for a function that draws some.
        with torch.random.fork_rng(devices=sorted(devices)):
            result = function(*args, **kwargs)
            grads = _gradients(result, leaves) if gradients else ()
    except Exception as error:
        return CallOutcome(error=error)
    return CallOutcome(_detach(result), _detach(copies), grads)


def _copy(tensor: Tensor, gradients: bool) -> Tensor:
    copy = tensor.detach().clone()
    if isinstance(tensor, Parameter):
        return Parameter(copy, requires_grad=tensor.requires_grad)
    return copy.requires_grad_(gradients and copy.is_floating_point())


def _gradients(result: object, leaves: object) -> tuple[object, ...]:
    """The gradients of all floating arguments, for a result of which each element has the gradient 1."""
    outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.requires_grad]
    inputs = [each for each in tree_leaves(leaves) if isinstance(each, Tensor) and each.requires_grad]
    if not outputs or not inputs:
        return ()
    ones = [torch.ones_like(each) for each in outputs]
    return tuple(torch.autograd.grad(outputs, inputs, ones, allow_unused=True))


def _detach(tree: object) -> tuple[object, ...]:
    leaves = tree_leaves(tree)
    return tuple(each.detach().clone() if isinstance(each, Tensor) else each for each in leaves)


def _error(error: Exception | None) -> str:
    return "returns" if error is None else f"raises {type(error).__name__}: {error}"


def _compare(part: str, found: tuple[object, ...], expected: tuple[object, ...]) -> Iterator[str]:
    if len(found) != len(expected):
        yield f"{part} has {len(found)} parts, expected {len(expected)}"
        return
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        name = part if len(found) == 1 else f"{part}[{index}]"
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            yield from _compare_tensors(name, one, other)
        elif type(one) is not type(other):
            yield f"{name} is {_describe(one)}, expected {_describe(other)}"


def _compare_tensors(name: str, found: Tensor, expected: Tensor) -> Iterator[str]:
    if found.dtype is not expected.dtype:
        yield f"{name} is {found.dtype}, expected {expected.dtype}"
    elif found.shape != expected.shape:
        yield f"{name} has the shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    else:
        try:
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        except AssertionError:
            yield f"{name} has other values than expected, in {found.dtype}"


def _describe(item: object) -> str:
    return str(item.dtype) if isinstance(item, Tensor) else repr(item)
