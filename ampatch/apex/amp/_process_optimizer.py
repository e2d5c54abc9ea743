"""What scripts find on an optimizer after `initialize`: `_amp_stash`, and methods with apex's names."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import ampatch as amp
from ampatch.apex.amp.scaler import LossScaler
from ampatch.apex.master_lists import MasterLists, Pick
from ampatch.steps.foreign_step import list_wrapped


class AmpOptimizerState(MasterLists):
    """Shows the parameters of one optimizer: half ones, their masters, and float32 ones.

    What scripts assign is kept and, since nothing is lazy here, changes nothing.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.lazy_init_called = True
        self.already_patched = False
        self.params_have_scaled_gradients = False
        self.process_zero_grad = True
        self.set_aside: list[tuple[Parameter, Tensor | None]] = []

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return amp.master_pairs(self._optimizer)

    def _stepped(self) -> list[list[Tensor]]:
        params = amp.master_params(self._optimizer)  # which has masters, and their gradients, up to date
        return [[*islice(params, len(group["params"]))] for group in self._optimizer.param_groups]

    def _pick(self, pick: Pick, by_group: bool) -> list[list[Tensor]]:
        # As in apex there are groups only where there are masters: scripts ask with `hasattr`.
        if by_group and not any(True for _ in self._pairs()):
            raise AttributeError("there are groups of masters at O2 and O5 alone")
        return super()._pick(pick, by_group)

    all_fp32_params = MasterLists.all_fp32_from_fp32_params

    def model_params(self) -> Iterator[Tensor]:
        """The parameters that backward gives gradients to."""
        yield from self.all_fp16_params
        yield from self.all_fp32_from_fp32_params


def _mark_initialized(optimizer: Optimizer) -> None:
    """Notes that masters are there: `initialize` has made them."""
    optimizer._amp_stash.lazy_init_called = True


@torch.no_grad()
def _copy_masters(optimizer: Optimizer) -> None:
    for half, master in amp.master_pairs(optimizer):
        half.copy_(master)


def _prepare_backward(optimizer: Optimizer) -> None:
    """Sets the gradients aside, as at the beginning of a block of `scale_loss`."""
    stash = optimizer._amp_stash
    stash.set_aside = [(param, param.grad) for param in stash.model_params()]
    for param, _ in stash.set_aside:
        param.grad = None


def _end_backward(optimizer: Optimizer, scaler: LossScaler) -> None:
    """Unscales the gradients made since by a scaler's scale, as at the end of a block of `scale_loss`.

    The scale is left to `scaler.update_scale()`, and with it the check of overflows.
    """
    stash = optimizer._amp_stash
    made = [(param, param.grad) for param, _ in stash.set_aside]
    for param, earlier in stash.set_aside:
        param.grad = earlier
    stash.set_aside = []
    device = made[0][0].device if made else None
    ones = torch.ones((), device=device)
    with amp.scale_loss(ones, optimizer, scaler.loss_id, delay_overflow_check=True, of_last_call=True):
        for param, grad in made:
            if grad is not None:
                param.grad = grad if param.grad is None else param.grad + grad


METHODS = {
    "_amp_lazy_init": _mark_initialized,
    "_lazy_init_maybe_master_weights": _mark_initialized,
    "_prepare_amp_backward": _prepare_backward,
    "_post_amp_backward": _end_backward,
    "_master_params_to_model_params": _copy_masters,
}


def attach(outer: object) -> list[weakref.ref[Optimizer]]:
    """Gives an initialized optimizer, or the one inside a wrapper, what apex gave it; returns which."""
    optimizer = next((each for each in list_wrapped(outer) if isinstance(each, Optimizer)), None)
    if optimizer is None:
        return []
    vars(optimizer)["_amp_stash"] = AmpOptimizerState(optimizer)
    has_masters = any(True for _ in amp.master_pairs(optimizer))
    for name, function in METHODS.items():
        if has_masters or function is not _copy_masters:
            vars(optimizer)[name] = functools.partial(function, optimizer)
    return [weakref.ref(optimizer)]


def detach(optimizer: Optimizer) -> None:
    for name in ("_amp_stash", *METHODS):
        vars(optimizer).pop(name, None)
