"""FP32 master params behind one optimizer: it steps them, and the model's half params follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer


def refine(precise: Tensor, half: Tensor) -> Tensor:
    """Returns `precise` where `half` is its rounding, and `half` in float32 where it was changed."""
    return torch.where(precise.to(half.dtype) == half, precise, half.to(precise.dtype))


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor wraps others, as a DTensor does: foreach functions may not know it."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


class MasterParam:
    """One half parameter of a model and the float32 parameter that stands for it in the optimizer."""

    __slots__ = (
        *("_grad", "_master_version", "_pointer", "_touched", "_version"),
        *("_last", "_seen", "_seen_version", "half", "is_wrapper", "master", "optimizers", "steps"),
    )

    def __init__(self, half: Parameter, precise: Tensor, touched: set[int]) -> None:
        self.half = half
        self.is_wrapper = is_wrapper(half)
        self._touched = touched
        is_made = isinstance(precise, Parameter)
        self.master = precise if is_made else Parameter(precise, requires_grad=half.requires_grad)
        # Attributes that optimizers look for; what a wrapper holds is its own.
        self.master.__dict__.update(half.__dict__ | self.master.__dict__)
        self._grad: Tensor | None = None  # the half gradient that has gone into the master's
        self._seen: Tensor | None = None  # the half gradient that the last block left
        self._last: Tensor | None = None  # the one from before the block that is open
        self._seen_version = 0
        self.optimizers = 0  # how many step the master
        self.steps = 0  # how many of them have used its gradient
        self.mark_synced()

    def mark_synced(self) -> None:
        """Notes that the half parameter holds the master's rounding."""
        self._version, self._pointer = self.half._version, self.half.data_ptr()
        self._master_version = self.master._version
        self._touched.difference_update((id(self.half), id(self.master)))

    @torch.no_grad()
    def take(self, precise: Tensor) -> None:
        """Takes over float32 values that the half parameter holds the rounding of."""
        self.master.copy_(precise)
        self.mark_synced()

    def copy_to_half(self) -> None:
        """Rounds the master into the half parameter; no host sync."""
        _round([self])

    def was_master_edited(self) -> bool:
        """Whether the master may have been written since `mark_synced`, by whom so ever."""
        return self._master_version != self.master._version or id(self.master) in self._touched

    def was_edited(self) -> bool:
        """Whether the half parameter may have been written or swapped since `mark_synced`."""
        half = self.half
        if self._version != half._version or self._pointer != half.data_ptr():
            return True
        return id(half) in self._touched

    def mark_grad_used(self) -> None:
        """Notes that the half gradient, as it is now, has gone into the master's."""
        self._grad = self.half.grad
        self._mark_grad_seen()

    def _mark_grad_seen(self) -> None:
        self._seen = self.half.grad
        self._seen_version = 0 if self._seen is None else self._seen._version

    def begin_backward(self) -> None:
        """Takes the half gradient away, so that what is there afterwards is new."""
        self._last, self.half.grad = self.half.grad, None
        self.mark_grad_used()

    def continue_backward(self) -> None:
        """Lets the gradient of an earlier block, which stayed scaled, count together with new ones."""
        self._grad = None

    def end_backward(self) -> None:
        """Notes what a block leaves; one that made no gradient leaves the one from before."""
        last, self._last = self._last, None
        if self.half.grad is None and last is not None:
            self.half.grad = last
            self.mark_grad_used()
        self._mark_grad_seen()

    def has_fresh_grad(self) -> bool:
        """Whether there is a half gradient that has not gone into the master's.

        DistributedDataParallel moves gradients to another tensor when it rebuilds its buckets, so
        another tensor with the same bits is the same gradient (to compare them costs a host sync).
        """
        grad = self.half.grad
        if grad is None or grad is self._grad:
            return False
        return self._grad is None or not _is_same(grad, self._grad)

    def was_grad_edited(self) -> bool:
        """Whether the half gradient was changed in place after a block."""
        seen = self._seen
        return seen is not None and seen is self.half.grad and seen._version != self._seen_version

    def was_grad_used(self) -> bool:
        """Whether the half gradient has gone into the master's."""
        return self._grad is not None and self._grad is self.half.grad

    def clear_grad(self, *, set_to_none: bool) -> None:
        """Clears the half gradient, as `Optimizer.zero_grad` does."""
        if set_to_none or self.half.grad is None:
            self.half.grad = None
        else:
            self.half.grad = self.half.grad.detach().zero_()
        self.mark_grad_used()

    def clear_master_grad(self) -> None:
        """Clears the master's gradient."""
        self.master.grad = None
        self.steps = 0

    def was_grad_cleared(self) -> bool:
        """Whether the half gradient was set to None after a block."""
        return self._seen is not None and self.half.grad is None


def _is_same(grad: Tensor, other: Tensor) -> bool:
    if grad.is_sparse or other.is_sparse or grad.dtype != other.dtype:
        return False
    return torch.equal(grad.detach().view(torch.int16), other.detach().view(torch.int16))


def _have_bits(grads: Sequence[Tensor]) -> bool:
    """Whether any gradient has a bit that is not 0, a sign among them; one host sync."""
    found = [grad.detach().view(torch.int16).any().to(grads[0].device) for grad in grads]
    return bool(torch.stack(found).any())


class MasterParams:
    """The masters of one optimizer, put into its param groups in the place of half parameters.

    `optimizers` are the optimizer and those inside it. `touched` holds the ids of parameters that may
    have been written without a trace.
    """

    def __init__(self, optimizers: Sequence[Optimizer], touched: set[int]) -> None:
        self._touched = touched
        self.pairs: list[MasterParam] = []
        self._by_half: dict[int, MasterParam] = {}
        self._by_master: dict[int, MasterParam] = {}
        self._optimizers = optimizers

    def __iter__(self) -> Iterator[MasterParam]:
        return iter(self.pairs)

    def get(self, half: Tensor) -> MasterParam | None:
        """Returns the pair of a half parameter, None if it has no master here."""
        return self._by_half.get(id(half))

    def owns(self, param: Tensor) -> bool:
        """Whether a parameter is one of the masters."""
        return id(param) in self._by_master

    def add(self, half: Parameter, precise: Tensor) -> MasterParam:
        """Makes a master from the float32 values of a half parameter."""
        pair = MasterParam(half, precise, self._touched)
        self.share(pair)
        return pair

    def make_empty(self, optimizers: Sequence[Optimizer]) -> MasterParams:
        """Returns those of a copied optimizer, still without any."""
        return MasterParams(optimizers, self._touched)

    def adopt(self, half: Parameter, master: Parameter) -> None:
        """Takes a master that is in the param groups already."""
        self.share(MasterParam(half, master, self._touched))

    def share(self, pair: MasterParam) -> None:
        """Takes a master that another optimizer steps as well."""
        pair.optimizers += 1
        self.pairs.append(pair)
        self._by_half[id(pair.half)] = pair
        self._by_master[id(pair.master)] = pair

    def install(self) -> None:
        """Puts masters into the param groups, and their state under their name, bit for bit."""
        self._replace({key: pair.master for key, pair in self._by_half.items()})

    def remove(self) -> None:
        """Puts the model's parameters back, with the state that the masters have by now."""
        self._replace({key: pair.half for key, pair in self._by_master.items()})

    def _replace(self, by_id: dict[int, Parameter]) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                params = group["params"]
                params[:] = [by_id.get(id(param), param) for param in params]
            state = optimizer.state
            items = [(by_id.get(id(param), param), value) for param, value in state.items()]
            state.clear()
            state.update(items)

    @torch.no_grad()
    def take_edits(self) -> None:
        """Feeds masters with what was written into the model's parameters since the last step."""
        for pair in self.pairs:
            if pair.was_edited():
                pair.master.copy_(refine(pair.master.detach(), pair.half.detach()))

    def copy_to_model(self) -> None:
        """Rounds the masters into the model's parameters; no host sync."""
        _round(self.pairs)

    def copy_edits_to_model(self) -> None:
        """Rounds the masters that were written outside of a step, as some optimizers do; no host sync."""
        _round([pair for pair in self.pairs if pair.was_master_edited()])

    def drop_restarted(self) -> bool:
        """Drops masters' gradients where the model's were cleared: a wish to start over.

        Returns whether a model's gradient was changed otherwise, which masters do not follow. Costs
        one host sync, and that only if one was changed in place.
        """
        edited = [pair for pair in self.pairs if pair.was_grad_edited() and not pair.half.grad.is_sparse]
        # Zeroing leaves +0 everywhere; clipping by an infinite norm, for one, leaves -0 and nan as well.
        is_zeroed = bool(edited) and not _have_bits([pair.half.grad for pair in edited])
        for pair in [
            *(pair for pair in self.pairs if pair.was_grad_cleared()),
            *(edited if is_zeroed else []),
        ]:
            pair.clear_master_grad()
            pair.mark_grad_used()
        return not is_zeroed and any(pair.was_grad_used() for pair in edited)

    def drop_grads(self) -> None:
        """Clears the masters' gradients once every optimizer that steps them has used them.

        Those of the model stay where they are.
        """
        for pair in self.pairs:
            pair.mark_grad_used()
            pair.steps += 1
            if pair.steps >= pair.optimizers:
                pair.clear_master_grad()

    def begin_backward(self) -> None:
        """Clears the model's gradients, so that what is there afterwards is new."""
        for pair in self.pairs:
            if pair.steps:
                pair.clear_master_grad()
            pair.begin_backward()


@torch.no_grad()
def _round(pairs: list[MasterParam]) -> None:
    plain = [pair for pair in pairs if not pair.is_wrapper]
    if plain:
        torch._foreach_copy_([pair.half for pair in plain], [pair.master for pair in plain])
    for pair in pairs if len(plain) < len(pairs) else ():
        if pair.is_wrapper:
            pair.half.copy_(pair.master)
    for pair in pairs:
        pair.mark_synced()
