"""Collectives on many tensors in one call, and what ranks settle first: a group, equal parameters."""

from __future__ import annotations

import atexit
import gc
import time
import zlib
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

import ampatch as amp
from ampatch.apex.apex_C import flatten, unflatten
from ampatch.levels.ranks import has_ranks

Collective = Callable[..., object]


def split_by_type(tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """Groups tensors by what `Tensor.type()` says: dtype and type of device."""
    groups: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.type(), []).append(tensor)
    return groups


@torch.no_grad()
def apply_flat_dist_call(bucket: Sequence[Tensor], call: Collective, extra_args: tuple | None = None) -> None:
    """Runs a collective on tensors of one type at once; `dist.all_reduce` averages over ranks."""
    coalesced = flatten(bucket)
    call(coalesced, *(extra_args or ()))
    if call is dist.all_reduce:
        coalesced /= dist.get_world_size()
    for tensor, synced in zip(bucket, unflatten(coalesced, bucket), strict=True):
        tensor.detach().copy_(synced)


def flat_dist_call(tensors: Iterable[Tensor], call: Collective, extra_args: tuple | None = None) -> None:
    """Runs a collective on tensors of any types, one call a type; `dist.all_reduce` averages over ranks."""
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)


def require_process_group(name: str) -> None:
    if not has_ranks():
        raise amp.AmpValueError(
            f"{name}: there is no process group: call torch.distributed.init_process_group first, in one of "
            f"the processes that torchrun or apex.parallel.multiproc starts"
        )


def wait_for_gloo_at_exit() -> None:
    """Has Python's end wait until gloo's threads have released their last results.

    One that waits for the interpreter's lock while the interpreter ends aborts the process, and
    torchrun calls that a failure ("terminate called without an active exception", torch 2.13).
    """
    if not dist.is_initialized() or dist.get_backend() != "nccl":
        atexit.unregister(_wait_for_gloo)  # once is enough
        atexit.register(_wait_for_gloo)


def _wait_for_gloo() -> None:
    gc.collect()  # which lets go of what a group of processes holds
    time.sleep(0.1)


def broadcast_params(module: Module, name: str) -> None:
    """Gives every rank the parameters of rank 0, and what a half model has in float32."""
    _require_same_params(module, name)
    flat_dist_call(list(module.parameters()), dist.broadcast, (0,))
    # A half model's state_dict has the float32 values that its optimizer steps: equal halves may come
    # from different ones. Not by methods that the model may override, to save and load what it likes.
    halves = dict(module.named_parameters())
    saved = Module.state_dict(module)
    precise = {key: saved[key].clone() for key in halves if _is_more_precise(saved.get(key), halves[key])}
    if precise:
        flat_dist_call(precise.values(), dist.broadcast, (0,))
        Module.load_state_dict(module, precise, strict=False)


def _is_more_precise(saved: object, param: Tensor) -> bool:
    return isinstance(saved, Tensor) and saved.dtype.itemsize > param.dtype.itemsize


def _require_same_params(module: Module, name: str) -> None:
    """Raises where ranks have other parameters than rank 0: a collective would hang or mix them up."""
    params = list(module.parameters())
    if not params:
        return
    kinds = [(tuple(param.shape), str(param.dtype)) for param in params]
    own = [len(params), sum(param.numel() for param in params), zlib.crc32(repr(kinds).encode())]
    print_of_rank = torch.tensor(own, device=params[0].device)
    prints = [torch.empty_like(print_of_rank) for _ in range(dist.get_world_size())]
    dist.all_gather(prints, print_of_rank)
    for rank, (count, elements, checksum) in enumerate(torch.stack(prints).tolist()):
        if [count, elements, checksum] != prints[0].tolist():
            raise amp.AmpValueError(
                f"{name}: rank {rank} has {count} parameters with {elements} elements, rank 0 has "
                f"{prints[0][0]} with {prints[0][1]}: expected the same names, shapes and dtypes in the same "
                f"order on every rank"
            )
