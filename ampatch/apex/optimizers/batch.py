"""The parameters that one call of an update takes, in the type and layout that it computes in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import ampatch as amp
from ampatch.apex.multi_tensor_apply.kernels import write_
from ampatch.apex.multi_tensor_apply.norms import Kind, is_plain, kind_of
from ampatch.levels.precision import HALF_TYPES

# The fused kernels take these alone, and no subclasses.
FUSED_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(slots=True)
class Batch:
    """Parameters with gradients, of one group, device and type.

    `params` are what an update writes into: the parameters themselves, or float32 copies of half ones.
    """

    owners: list[Tensor] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)

    def add(self, owner: Tensor, param: Tensor) -> None:
        """Takes a parameter, and its gradient in the type and layout of `param`."""
        self.owners.append(owner)
        self.params.append(param)
        self.grads.append(align(owner.grad, param))

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.params[0].device

    def write_back(self) -> None:
        """Rounds what was computed apart into the parameters."""
        pairs = zip(self.owners, self.params, strict=True)
        apart = [(owner, param) for owner, param in pairs if owner is not param]
        write_([owner for owner, _ in apart], [param for _, param in apart])

    def select(self, indices: Iterable[int]) -> Batch:
        """Returns some of the parameters as a batch of its own."""
        lists = (self.owners, self.params, self.grads)
        indices = list(indices)
        return Batch(*([items[index] for index in indices] for items in lists))


def align(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns a tensor in the type, place and strides of another: itself where it has them."""
    is_there = tensor.dtype is like.dtype and tensor.device == like.device
    if is_there and tensor.stride() == like.stride():
        return tensor
    # Fused kernels on a CPU walk through memory whatever the strides are (torch 2.13).
    return torch.empty_like(like).copy_(tensor) if is_plain(like) else tensor.to(like.device, like.dtype)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of a tensor fill its memory, in any order."""
    return tensor.is_contiguous() or torch.empty_like(tensor).stride() == tensor.stride()


def working_copy(param: Tensor) -> Tensor:
    """Returns what an update of a parameter computes on: float32 and dense, itself where it is."""
    if param.dtype in HALF_TYPES:
        return param.detach().float()
    if is_plain(param) and not is_dense(param):
        return param.detach().contiguous()
    return param


def find_params(name: str, params: Iterable[Tensor]) -> list[Tensor]:
    """Returns the parameters that have gradients; raises AmpError for a sparse one."""
    found = [param for param in params if param.grad is not None]
    for param in found:
        if param.grad.is_sparse:
            raise amp.AmpError(
                f"{name} does not take sparse gradients, and a parameter of shape {tuple(param.shape)} "
                f"has one: give it to torch.optim.SparseAdam or torch.optim.SGD, or build its layer with "
                f"sparse=False"
            )
    return found


def can_fuse(param: Tensor, devices: Collection[str]) -> bool:
    """Whether torch's fused kernel takes a parameter, on these types of device."""
    return param.dtype in FUSED_TYPES and param.device.type in devices and is_plain(param)


def group_by_kind(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[Batch]:
    """Returns batches of (parameter, working copy)."""
    batches: dict[Kind, Batch] = defaultdict(Batch)
    for owner, param in pairs:
        batches[(*kind_of(param)[:2], is_plain(owner))].add(owner, param)
    return list(batches.values())
