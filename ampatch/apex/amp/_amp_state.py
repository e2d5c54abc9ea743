"""What `amp._amp_state` shows: the loss scalers and options of the session, as apex kept them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

import ampatch as amp
from ampatch.apex.amp.handle import AmpHandle, NoOpHandle
from ampatch.apex.amp.properties import Properties, list_options
from ampatch.apex.amp.scaler import LossScaler

master_params = amp.master_params


class AmpState(amp.Observer):
    """Shows the state of ampatch's session under the names that apex had for it.

    `opt_properties`, `handle` and `loss_scalers` are there from `initialize` on; before it they raise
    an AttributeError, which is how scripts find out. Attributes that scripts assign are kept.
    """

    master_params = staticmethod(amp.master_params)

    def __init__(self) -> None:
        self.verbosity = 1
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.min_loss_scale: float | None = None
        self.max_loss_scale: float | None = 2.0**24
        self._views: dict[int, LossScaler] = {}
        self._undo = ExitStack()
        self._is_listening = False
        self.is_told = False  # whether the last call of `initialize` was an enabled one

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """The loss scalers of the session; what is assigned to their attributes takes effect."""
        scalers = amp.loss_scalers()
        return [self._views.setdefault(id(scaler), LossScaler.show(scaler)) for scaler in scalers]

    @contextmanager
    def listening(self) -> Iterator[ExitStack]:
        """Follows what `initialize` does; yields what is undone by `uninitialize`."""
        if not self._is_listening:
            self._undo.enter_context(amp.observe(self))
            self._is_listening = True
        self.is_told = False
        try:
            yield self._undo
        except BaseException:
            if not hasattr(self, "opt_properties"):
                self.on_uninitialize()
            raise
        if not self.is_told and not hasattr(self, "opt_properties"):
            self._show(Properties({"enabled": False}), NoOpHandle())

    def on_initialize(self, policy: amp.Policy) -> None:
        """Shows the options of an enabled call."""
        self.is_told = True
        handle = getattr(self, "handle", NoOpHandle())
        if policy.patch_torch_functions and not handle.is_active():
            handle = AmpHandle()
        self._show(Properties(list_options(policy)), handle)

    def _show(self, properties: Properties, handle: AmpHandle | NoOpHandle) -> None:
        self.opt_properties = properties
        self.handle = handle

    def on_uninitialize(self) -> None:
        """Shows nothing any more."""
        undo, self._undo = self._undo, ExitStack()
        self._is_listening = False
        self._views.clear()
        with undo:
            handle = vars(self).pop("handle", None)
            vars(self).pop("opt_properties", None)
            if handle is not None:
                handle.close()


# apex's own global object; scripts read it, and assign to its attributes.
_amp_state = AmpState()


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Prints a script's message where the verbosity is above 0; on rank 0 alone if asked."""
    distributed = torch.distributed
    is_other = distributed.is_available() and distributed.is_initialized() and distributed.get_rank() != 0
    if _amp_state.verbosity > 0 and not (rank0 and is_other):
        print(msg)


def warn_or_err(msg: str) -> None:
    """Raises an AmpError, or warns if `_amp_state.hard_override` is set."""
    if not _amp_state.hard_override:
        raise amp.AmpError(msg)
    warnings.warn(msg, stacklevel=2)
