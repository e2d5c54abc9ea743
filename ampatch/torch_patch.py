"""Torch's functions as the cast tables and the user's registrations want them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ampatch import lists
from ampatch.cast import CastState
from ampatch.errors import AmpValueError
from ampatch.patcher import Patcher, place_rows, qualify
from ampatch.policy import Policy
from ampatch.recurrent import allow_half_input
from ampatch.registration import Registration, bind
from ampatch.wrapper import wrap


class TorchPatch:
    """Patches torch once a session, and keeps what users registered for the next one."""

    def __init__(self, casts: CastState) -> None:
        self._casts = casts
        self._registrations: dict[tuple[int, str], Registration] = {}
        self._patcher: Patcher | None = None

    def validate(self, policy: Policy) -> None:
        """Raises if torch is patched for another half type already."""
        half = self._casts.half
        if half is not None and policy.patch_torch_functions and policy.half is not half:
            raise AmpValueError(
                f"{policy.opt_level} in {policy.half}, but an earlier initialize patched torch for {half}: "
                f"use one half type for all models, or uninitialize first"
            )

    def open(self, policy: Policy, device_types: Iterable[str], trace: Callable[[str], None] | None) -> None:
        """Patches every row and registration; if torch is patched already, only adds the devices."""
        self._casts.device_types.update(device_types)
        if self._patcher is not None:
            return
        self._patcher = Patcher()
        self._casts.half = policy.half
        for (parent, attribute), row in place_rows(lists.TABLES, torch.__version__):
            if (id(parent), attribute) in self._registrations:
                continue
            original = self._patcher.find_original(parent, attribute)
            wrapper = wrap(
                original,
                row.cast,
                self._casts,
                policy.half,
                place=qualify(parent, attribute),
                allow_banned=policy.allow_banned,
                trace=trace,
            )
            self._patcher.replace(parent, attribute, wrapper)
        self._patcher.replace(torch.nn.RNNBase, "check_input", allow_half_input(self._casts.thread))
        for registration in self._registrations.values():
            self._bind(registration)
        self._step_hook = register_optimizer_step_post_hook(self._after_any_step)

    def close(self) -> None:
        """Puts back exactly what was there."""
        patcher, self._patcher = self._patcher, None
        if patcher is None:
            return
        self._step_hook.remove()
        self._casts.close()
        patcher.close()

    def register(self, registration: Registration) -> None:
        """Adds a user's function to the tables, for this session and later ones."""
        self._registrations[id(registration.parent), registration.attribute] = registration
        if self._patcher is not None:
            self._bind(registration)

    def _bind(self, registration: Registration) -> None:
        assert self._patcher is not None, "bound while torch is not patched"
        parent, attribute = registration.parent, registration.attribute
        original = self._patcher.find_original(parent, attribute)
        self._patcher.replace(parent, attribute, bind(registration, original, self._casts))

    def _after_any_step(self, *_: object) -> None:
        # Weights changed, and fused optimizers do not bump their version.
        self._casts.clear_cache()
