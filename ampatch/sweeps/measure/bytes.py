"""How many bytes the tensors take that training keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass

from torch import Tensor
from torch.nn import Module

import ampatch as amp
from ampatch.sweeps.records.record import Bytes


def count_bytes(models: Iterable[Module], optimizers: Iterable[object], casts: int) -> Bytes:
    """Looks at the tensors as they are; each counts once, whoever shares it. `casts` is passed on."""
    optimizers = list(optimizers)
    params = {id(param): param for model in models for param in model.parameters()}
    masters = {id(master): master for optimizer in optimizers for _, master in amp.master_pairs(optimizer)}
    grads = {id(param.grad): param.grad for param in [*params.values(), *masters.values()]}
    states = {id(one): one for it in optimizers for one in tensors_in(getattr(it, "state", {}))}
    return Bytes(
        parameters=nbytes_of(params.values()),
        masters=nbytes_of(masters.values()),
        gradients=nbytes_of(grad for grad in grads.values() if grad is not None),
        optimizer_state=nbytes_of(states.values()),
        casts=casts,
    )


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Adds up the bytes of tensors; of sparse ones, those of their values and indices."""
    return sum(_nbytes(tensor) for tensor in tensors)


def _nbytes(tensor: Tensor) -> int:
    if tensor.is_sparse:
        return tensor._values().nbytes + tensor._indices().nbytes
    return tensor.nbytes


def tensors_in(value: object) -> Iterator[Tensor]:
    """Iterates over the tensors in nested containers, as optimizers keep them and models are given them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value):
        yield from tensors_in([getattr(value, it.name, None) for it in fields(value)])
