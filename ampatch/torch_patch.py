"""Torch's functions as the cast tables and the user's registrations want them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ampatch import lists
from ampatch.cast import CastState
from ampatch.checkpoint import patch_checkpoint
from ampatch.errors import AmpValueError
from ampatch.patcher import Patcher, place_rows, qualify
from ampatch.policy import Policy
from ampatch.recurrent import allow_half_input
from ampatch.registration import Registration, bind
from ampatch.scripting import ScriptNames
from ampatch.wrapper import wrap


class TorchPatch:
    """Patches torch once a session, and keeps what users registered for the next one."""

    def __init__(self, casts: CastState) -> None:
        self._casts = casts
        self._registrations: dict[tuple[int, str], Registration] = {}
        self._patcher: Patcher | None = None
        self._blocked: list[Patcher] = []  # what others had patched over when we closed

    def validate(self, policy: Policy) -> None:
        """Raises if torch is patched for another half type already."""
        half = self._casts.half
        if half is not None and policy.patch_torch_functions and policy.half is not half:
            raise AmpValueError(
                f"{policy.opt_level} in {policy.half}, but an earlier initialize patched torch for {half}: "
                f"use one half type for all models, or uninitialize first"
            )

    def open(
        self,
        policy: Policy,
        device_types: Iterable[str],
        trace: Callable[[str], None] | None,
        undo: ExitStack,
    ) -> None:
        """Patches every row and registration; if torch is patched already, only adds to what it casts.

        `undo` receives the way back, step by step.
        """
        casts = self._casts
        undo.callback(casts.narrow, set(casts.device_types), casts.allow_banned)
        casts.device_types.update(device_types)
        casts.allow_banned |= policy.allow_banned
        if self._patcher is not None:
            return
        undo.callback(self._close)
        casts.half = policy.half
        self._patcher = Patcher()
        # Weights change in a step, and fused optimizers do not bump their version.
        hook = register_optimizer_step_post_hook(lambda *_: casts.clear_cache())
        undo.callback(hook.remove)
        names = ScriptNames()
        undo.callback(names.close)
        self._patch_rows(self._patcher, policy, trace, names)
        self._patcher.replace(torch.nn.RNNBase, "check_input", allow_half_input(casts.thread))
        patch_checkpoint(self._patcher, casts.thread)
        for registration in self._registrations.values():
            self._bind(registration)

    def _patch_rows(
        self, patcher: Patcher, policy: Policy, trace: Callable[[str], None] | None, names: ScriptNames
    ) -> None:
        for (parent, attribute), row in place_rows(lists.TABLES, torch.__version__):
            if (id(parent), attribute) in self._registrations:
                continue
            original = patcher.find_original(parent, attribute)
            place = qualify(parent, attribute)
            wrapper = wrap(original, row.cast, self._casts, policy.half, place=place, trace=trace)
            patcher.replace(parent, attribute, wrapper)
            names.add(wrapper, original)

    def _close(self) -> None:
        patcher, self._patcher = self._patcher, None
        self._casts.close()
        self._blocked.append(patcher)
        patcher.close()

    def retry(self) -> None:
        """Undoes what somebody else's patch kept from being undone, where that is gone by now."""
        self._blocked = [patcher for patcher in reversed(self._blocked) if patcher.retry()][::-1]

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
