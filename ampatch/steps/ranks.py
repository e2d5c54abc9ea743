"""Ranks that skip a step together: which they are, and how they agree on found_inf."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ampatch.levels.ranks import has_ranks


@dataclass(slots=True, eq=False)
class Agreement:
    """Knows the process groups whose ranks must agree on found_inf, because they share parameters.

    Those are the groups of every dimension of every mesh that parameters are on, sharded or replicated:
    what is on one rank alone may overflow there alone. Not the gradients' meshes: a rank may lack some.
    Parameters without a mesh need no agreement where DistributedDataParallel has averaged their gradients.
    `group` is one that the script has named.
    """

    group: dist.ProcessGroup | None = None
    _meshes: list[object] = field(default_factory=list)
    _groups: list[dist.ProcessGroup] = field(default_factory=list)

    def list_groups(self, params: Iterable[Tensor]) -> list[dist.ProcessGroup]:
        """Returns the groups for these parameters, each of several ranks, in one order on all of them."""
        if not has_ranks():
            return []
        meshes = list_meshes(params)
        if meshes != self._meshes or not self._groups:
            self._meshes, self._groups = meshes, _select_groups(meshes, self.group)
        return self._groups


def list_meshes(tensors: Iterable[Tensor]) -> list[dist.DeviceMesh]:
    """Returns the device meshes that tensors are on, each once; a plain tensor is on none."""
    others = [tensor for tensor in tensors if type(tensor) is not Parameter]  # to ask those takes longest
    found = [getattr(tensor, "device_mesh", None) for tensor in others]
    return list({id(mesh): mesh for mesh in found if mesh is not None}.values())


def _select_groups(
    meshes: Iterable[dist.DeviceMesh], given: dist.ProcessGroup | None
) -> list[dist.ProcessGroup]:
    own = [mesh for mesh in meshes if mesh.get_coordinate() is not None]  # those that this rank is in
    groups = [mesh.get_group(dim) for mesh in own for dim in range(mesh.ndim)]
    groups += [] if given is None else [given]
    by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for group in groups:  # dimension by dimension on every rank, or a found_inf does not reach all of a mesh
        by_ranks.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    return [group for ranks, group in by_ranks.items() if len(ranks) > 1]


@torch.no_grad()
def agree_(found_inf: Tensor, groups: Iterable[dist.ProcessGroup]) -> None:
    """Sets `found_inf` (0-dim, float32) to 1 if it is 1 on any rank; one collective a group, no host sync."""
    for group in groups:
        is_elsewhere = found_inf.is_cpu and dist.get_backend(group) == "nccl"  # of parameters on the CPU
        here = found_inf.cuda() if is_elsewhere else found_inf
        dist.all_reduce(here, dist.ReduceOp.MAX, group=group)
        if is_elsewhere:
            found_inf.copy_(here)


def find_values(grad: Tensor) -> Tensor:
    """Returns what holds the values of a gradient on this rank; who writes there writes the gradient."""
    if type(grad) is Tensor or not hasattr(grad, "to_local"):
        return grad._values() if grad.is_sparse else grad
    with torch.no_grad():
        local = grad.to_local()  # of a DTensor
    return local.wait() if hasattr(local, "wait") else local  # for a collective that still runs
