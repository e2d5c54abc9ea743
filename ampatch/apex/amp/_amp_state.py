"""What `amp._amp_state` shows: the loss scalers and options of the session, as apex kept them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import ampatch as amp
from ampatch.apex.amp.handle import AmpHandle, NoOpHandle
from ampatch.apex.amp.scaler import LossScaler
from ampatch.apex.fp16_utils.fp16util import MasterLists, Pick
from ampatch.levels.ranks import has_ranks
from ampatch.patching.torch_patch import ban_in_place
from ampatch.steps.foreign_step import list_wrapped

master_params = amp.master_params
DEFAULTS = (
    ("enabled", False),
    ("opt_level", None),
    ("cast_model_type", None),
    ("patch_torch_functions", False),
    ("keep_batchnorm_fp32", None),
    ("master_weights", None),
    ("loss_scale", 1.0),
)


class Properties:
    """Options by name, as attributes and in `options`: `loss_scale` is "dynamic" or a number."""

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        self.options = dict(DEFAULTS)
        self.update(options or {})

    def update(self, options: Mapping[str, object]) -> None:
        """Sets some of the options."""
        self.options.update(options)
        vars(self).update(self.options)

    def __repr__(self) -> str:
        return f"Properties({self.options!r})"


def list_options(policy: amp.Policy) -> dict[str, object]:
    """Returns the options of an enabled policy."""
    scale = policy.loss_scale
    shown = "dynamic" if isinstance(scale, amp.DynamicLossScale) else scale.value
    return {"enabled": True, "opt_level": policy.opt_level, **policy.options(), "loss_scale": shown}


class Scalers(list[LossScaler]):
    """Views of loss scalers: one that a script puts in the place of another takes effect."""

    def __setitem__(self, index: object, value: object) -> None:  # type: ignore[override]
        after: list = [*self]
        after[index] = value
        if len(after) != len(self):
            self._refuse()
        new = {place: view for place, view in enumerate(after) if view is not self[place]}
        for place, view in new.items():
            if type(view) is not LossScaler:  # methods of a subclass would not be called
                raise amp.AmpTypeError(
                    f"loss_scalers[{place}] = {view!r}: expected an apex.amp.scaler.LossScaler, no subclass"
                )
        if len({*map(id, self), *map(id, new.values())}) < len(self) + len(new):
            raise amp.AmpValueError(
                f"loss_scalers[{index}]: one scaler is put into two places, or into that of another: "
                f"expected a new LossScaler for each, or assign to the attributes of those that are there"
            )
        for place, view in new.items():
            view.replace(self[place])
            super().__setitem__(place, view)

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise amp.AmpTypeError(
            f"loss_scalers holds one for each of num_losses, {len(self)} here, and keeps their order: "
            f"expected initialize(num_losses=...), or loss_scalers[0] = LossScaler(...)"
        )

    append = extend = insert = pop = remove = clear = reverse = sort = _refuse  # type: ignore[assignment]
    __delitem__ = __iadd__ = __imul__ = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple:
        return list, ([*self],)  # a copy is no part of the session


class AmpState(amp.Observer):
    """Shows the state of ampatch's session under the names that apex had for it.

    `opt_properties`, `handle` and `loss_scalers` are there from `initialize` on; before it they raise
    an AttributeError, which is how scripts find out. Attributes that scripts assign are kept.
    """

    master_params = staticmethod(amp.master_params)

    def __init__(self) -> None:
        self.verbosity = 1
        self.allow_incoming_model_not_fp32 = False
        self.min_loss_scale: float | None = None
        self.max_loss_scale: float | None = 2.0**24
        self._views = Scalers()
        self.attached: list[weakref.ref[Optimizer]] = []  # optimizers with names of apex's
        self._listening: AbstractContextManager[None] | None = None
        self.was_enabled = False  # whether the last call of `initialize` was an enabled one

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """Those of the last `initialize`; what is assigned to their attributes takes effect."""
        scalers = amp.loss_scalers(of_last_call=True)
        if [view.scaler for view in self._views] != [*scalers]:
            self._views = Scalers(LossScaler.show(scaler, index) for index, scaler in enumerate(scalers))
        return self._views

    @loss_scalers.setter
    def loss_scalers(self, views: Iterable[LossScaler]) -> None:
        self.loss_scalers[:] = views

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Follows what `initialize` does, from now on until `uninitialize`."""
        if self._listening is None:
            self._listening = amp.observe(self)
            self._listening.__enter__()
        self.was_enabled = False
        self.attached = [reference for reference in self.attached if reference() is not None]
        try:
            yield
        except BaseException:
            if not hasattr(self, "opt_properties"):
                self.on_uninitialize()
            raise
        if not self.was_enabled and not hasattr(self, "opt_properties"):
            self._show(Properties({"enabled": False}), NoOpHandle())

    def on_initialize(self, policy: amp.Policy) -> None:
        """Shows the options of an enabled call."""
        self.was_enabled, self.policy = True, policy
        if policy.patch_torch_functions_type is torch.float16:
            ban_in_place()
        handle = getattr(self, "handle", NoOpHandle())
        if policy.patch_torch_functions and not handle.is_active():
            handle = AmpHandle()
        self._show(Properties(list_options(policy)), handle)

    def _show(self, properties: Properties, handle: AmpHandle) -> None:
        self.opt_properties = properties
        self.switch_to(handle)

    def switch_to(self, handle: AmpHandle) -> None:
        """Puts a handle in the place of an earlier one, which turns casts off no more."""
        before = getattr(self, "handle", handle)
        if before is not handle:
            before.close()
        self.handle = handle

    def on_uninitialize(self) -> None:
        for optimizer in [alive for reference in self.attached if (alive := reference()) is not None]:
            detach(optimizer)
        self.attached, self._views = [], Scalers()
        listening, self._listening = self._listening, None
        listening.__exit__(None, None, None)
        vars(self).pop("opt_properties", None)
        handle = vars(self).pop("handle", None)
        if handle is not None:
            handle.close()


# apex's own global object; scripts read it, and assign to its attributes.
_amp_state = AmpState()


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Prints a script's message where the verbosity is above 0; on rank 0 alone if asked."""
    is_other = has_ranks() and torch.distributed.get_rank() != 0
    if _amp_state.verbosity > 0 and not (rank0 and is_other):
        print(msg)


# ---- What scripts find on an optimizer after `initialize` ----


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
            raise AttributeError("there are groups of masters only at O2 and O5")
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
