"""What is wrong in a tensor: which numbers are not finite, how many, and how large the others are."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

import ampatch as amp
from ampatch.levels.private import unwrap
from ampatch.tools.tensors import tensors_in

Tensors = list[Tensor]
Kept = tuple[Tensors, float | None]  # what is bad among what an operation takes, and the largest number
PLAIN = (Tensor, Parameter)
HALF = ("float16", "bfloat16")  # in `Damage.dtype`


@dataclass(frozen=True, slots=True)
class Damage:
    """The numbers of a tensor that are not finite.

    `kind` is "nan" if there is one, else "inf"; `element` is the index of the first; `largest_finite` is the
    largest magnitude among the others, None if there are none.
    """

    kind: str
    element: tuple[int, ...]
    count: int
    largest_finite: float | None
    shape: tuple[int, ...]
    dtype: str


def plain(tensor: Tensor) -> Tensor:
    """Returns the values of a tensor: of a sparse one the sums that it holds, of a DTensor the local ones."""
    tensor = unwrap(tensor).detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    return tensor if tensor.layout is torch.strided else tensor.values()


def is_inexact(tensor: Tensor) -> bool:
    """Says whether a tensor can hold inf and NaN; complex ones can as well."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_finite(tensor: Tensor) -> bool:
    """Says whether all numbers of a tensor are finite; costs a host sync."""
    if not is_inexact(tensor) or tensor.is_meta:
        return True
    return bool(torch.isfinite(plain(tensor)).all())


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Says whether all numbers of some tensors are finite; costs a host sync."""
    inexact = [tensor for tensor in tensors if is_inexact(tensor) and not tensor.is_meta and tensor.numel()]
    if len(inexact) > 1 and all(
        type(tensor) in PLAIN and tensor.layout is torch.strided for tensor in inexact
    ):
        with suppress(RuntimeError):  # of tensors on several devices
            # On a CPU faster than the largest.
            lengths = torch._foreach_norm([tensor.detach() for tensor in inexact])
            if torch.isfinite(torch.stack(lengths)).all():  # else a square may have overflowed
                return True
    return all(map(is_finite, inexact))


def is_mask(tensor: Tensor) -> bool:
    """Says whether a tensor holds nothing but 0 and -inf."""
    values = plain(tensor)
    return bool(((values == 0) | (values == -math.inf)).all())


def examine(tensor: Tensor, took_inf: bool = False) -> Damage | None:
    """Returns what is wrong in a tensor, None where all is finite; costs some host syncs.

    Where NaN came of infinities that were no fault, as those of a mask, these are not counted.
    """
    if is_finite(tensor):
        return None
    values = plain(tensor)
    others = values[torch.isfinite(values)].abs()
    broken = torch.isnan(values)
    kind = "nan" if broken.any() else "inf"
    if not took_inf or kind == "inf":
        broken = ~torch.isfinite(values)
    return Damage(
        kind,
        tuple(broken.nonzero()[0].tolist()),
        int(broken.sum()),
        others.max().item() if others.numel() else None,
        tuple(values.shape),
        str(values.dtype).removeprefix("torch."),
    )


def inexact_in(value: object) -> Tensors:
    return [tensor for tensor in tensors_in(value) if is_inexact(tensor)]


def floating_in(value: object) -> Tensors:
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]


def holds_no_number(value: object, depth: int = 4) -> bool:
    """Says whether an argument names inf or NaN itself, as the fill value of a mask does."""
    if isinstance(value, float):
        return value != value or value in (float("inf"), float("-inf"))
    if depth and isinstance(value, (tuple, list)):
        return any(holds_no_number(each, depth - 1) for each in value)
    return False


def largest_of(tensors: list[Tensor]) -> float | None:
    """Returns the largest magnitude in some tensors, None of none."""
    values = [plain(tensor).abs().float() for tensor in tensors if tensor.numel() and not tensor.is_meta]
    return max(
        (each[torch.isfinite(each)].amax().item() for each in values if torch.isfinite(each).any()),
        default=None,
    )


def examine_all(tensors: Tensors) -> Kept:
    return [tensor for tensor in tensors if not is_finite(tensor)], largest_of(tensors)


def node_of(tensor: Tensor) -> object:
    """Returns the node of the graph that made a tensor, None where torch refuses to tell.

    That is of a view made under `no_grad` and written to, as `nn.Embedding(padding_idx=0)` does.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def key_of(tensor: Tensor) -> Hashable:
    """Returns what stands for a tensor's memory, which its views share; it keeps no number alive."""
    held = unwrap(tensor)
    held = held.to_local() if hasattr(held, "to_local") else held
    try:
        return StorageWeakRef((held._values() if held.is_sparse else held).untyped_storage())
    except (RuntimeError, NotImplementedError):
        return tensor


@contextmanager
def quiet() -> Iterator[None]:
    """Has what we compute be neither cast, nor recorded, nor seen."""
    with torch._C.DisableTorchFunction(), torch.no_grad(), off_casts():
        yield


@contextmanager
def off_casts() -> Iterator[None]:
    """Turns casts off, of `initialize` where it is in use."""
    with ExitStack() as stack:
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        with suppress(amp.NotInitializedError):
            stack.enter_context(amp.disable_casts())
        yield


def random_of(device: torch.device) -> dict[str, Tensor]:
    """Returns the states of torch's generators, of the CPU and of a GPU, by device; no host sync."""
    states = {"cpu": torch.default_generator.get_state()}
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        states[str(device)] = torch.cuda.get_rng_state(device)
    return states


def set_random(states: Mapping[str, Tensor]) -> None:
    """Sets torch's generators to what `random_of` returned."""
    with torch._C.DisableTorchFunction():
        for device, state in states.items():
            if device == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)


def drop_alike(
    dropout: Callable[..., Tensor],
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Drops the same elements at any type: on a GPU what is drawn depends on the type."""
    if not training:
        return input
    return input * dropout(torch.ones_like(input, dtype=torch.float32), p).to(input.dtype)
