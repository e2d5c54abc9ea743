"""Gradients travel between ranks in buckets, many in one message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ampatch.levels.private import is_expanded


@dataclass(frozen=True, slots=True)
class Averaging:
    """How the gradients of all ranks become one; the words are those of apex."""

    message_size: int = 10_000_000  # elements of a bucket, at least
    trigger_params: frozenset[int] = frozenset()  # ids of parameters that end a bucket; instead of a size
    is_delayed: bool = False  # until backward is over
    always_fp32: bool = False
    average: bool = True
    predivide_factor: float = 1.0

    def ends_bucket(self, param: Tensor, size: int) -> bool:
        """Whether a bucket is sent without waiting for more than it has."""
        if self.is_delayed:
            return False
        if self.trigger_params:
            return id(param) in self.trigger_params
        return size >= self.message_size

    def weight(self, world_size: int) -> float:
        """What a new gradient is multiplied by, so that the average over ranks is what was asked for.

        To multiply each gradient as it comes, rather than the result, keeps a sum right where earlier
        gradients are there already: these have been summed before.
        """
        return 1.0 if self.average else world_size / self.predivide_factor


class Bucket:
    """Gradients of one dtype and device that travel together, with a flag each: whether it was used."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params
        self.is_stale = False
        self._waiting = {id(param) for param in params}
        self._used: list[bool] = []
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def is_complete(self) -> bool:
        """Whether backward has reached every parameter."""
        return not self._waiting

    def note(self, param: Tensor) -> None:
        """Notes that backward has added to a gradient.

        It may do so again: reentrant checkpoints that share a weight each have a backward of their own.
        What was sent by then is too early.
        """
        self._waiting.discard(id(param))
        self.is_stale = self._work is not None

    @torch.no_grad()
    def send(self, group: dist.ProcessGroup | None, averaging: Averaging, used: set[int]) -> None:
        """Starts adding up the gradients of all ranks; a missing one counts as zeros."""
        self.wait()
        self.is_stale = False
        self._used = [id(param) in used for param in self.params]
        flat = torch.cat([*(_flatten_grad(param) for param in self.params), self._make_flags()])
        self._flat = flat.float() if averaging.always_fp32 and flat.dtype != torch.float64 else flat
        if averaging.predivide_factor != 1.0:
            self._flat.div_(averaging.predivide_factor)
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def _make_flags(self) -> Tensor:
        if all(self._used):
            return self.params[0].new_ones(len(self.params))  # made on the device
        return self.params[0].new_tensor(self._used)

    def wait(self) -> None:
        """Waits for what was sent, if it is under way."""
        if self._work is not None:
            self._work.wait()
        self._work = None

    @torch.no_grad()
    def receive(self, averaging: Averaging, world_size: int) -> None:
        """Writes the averages into the gradients.

        A parameter that no rank used keeps what it has. Costs one host sync if this rank left one out.
        """
        self.wait()
        self._flat.div_(world_size / averaging.predivide_factor)
        *averages, flags = self._flat.split([*(param.numel() for param in self.params), len(self.params)])
        is_used = self._used if all(self._used) else flags.ne(0).tolist()
        _write_grads(
            [
                (param, average.view(param.shape))
                for param, average, used in zip(self.params, averages, is_used, strict=True)
                if used
            ]
        )
        self._flat = None


def _flatten_grad(param: Tensor) -> Tensor:
    grad = param.grad
    if grad is None:
        return param.new_zeros(param.numel())
    grad = grad.detach()
    return (grad.to_dense() if grad.is_sparse else grad).reshape(-1)


def _write_grads(averages: list[tuple[Tensor, Tensor]]) -> None:
    """Writes in place where that is possible: others may hold the gradient."""
    dense = [(param.grad.detach(), average) for param, average in averages if _is_writable(param.grad)]
    if dense:
        torch._foreach_copy_([grad for grad, _ in dense], [average for _, average in dense])
    for param, average in averages:
        if param.grad is not None and param.grad.is_sparse:
            param.grad = average.to(param.dtype).to_sparse(param.grad.sparse_dim())
        elif not _is_writable(param.grad):
            param.grad = torch.empty_like(param).copy_(average)


def _is_writable(grad: Tensor | None) -> bool:
    """Whether a gradient has a place in memory for each of its elements; one that was expanded has not."""
    return grad is not None and not grad.is_sparse and not is_expanded(grad)


def make_buckets(params: Iterable[Tensor], averaging: Averaging) -> list[Bucket]:
    """Groups parameters, the last ones first: backward reaches them in that order."""
    filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    buckets = []
    for param in reversed(list(params)):
        kind = param.dtype, param.device
        filling.setdefault(kind, []).append(param)
        sizes[kind] = sizes.get(kind, 0) + param.numel()
        if averaging.ends_bucket(param, sizes[kind]):
            buckets.append(Bucket(filling.pop(kind)))
            sizes[kind] = 0
    return buckets + [Bucket(group) for group in filling.values()]
