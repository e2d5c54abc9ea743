"""How optimizers join a session, and parameters an optimizer: hooks on its step, masters in its groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from torch import Tensor

from ampatch.levels.undo import weakly
from ampatch.patching.data_watch import DataWatch
from ampatch.patching.patcher import Patcher
from ampatch.session.optimizer_copies import CopyWithMasters
from ampatch.session.request import find_inner_optimizers, order_hooks, unwrap_optimizer
from ampatch.steps.foreign_step import WholeStep, needs_whole_step
from ampatch.steps.grads import drop_scaled_grads
from ampatch.steps.masters import MasterParams
from ampatch.steps.optimizer import AmpOptimizer
from ampatch.steps.scaler import LossScaler
from ampatch.steps.step import StepListener


class Joins:
    """Puts onto optimizers what a session needs there; `AmpOptimizer.undo` takes it away.

    A parameter that joins with a gradient which a block has scaled, nobody knows by how much, loses it.
    """

    def __init__(
        self,
        make_masters: Callable[[MasterParams, Sequence[Tensor]], None],
        data_watch: DataWatch,
    ) -> None:
        self._make_masters = make_masters
        self._touched = data_watch.touched
        self._was_scaled = False  # whether a block has made gradients that are scaled
        # The ids of parameters that ever were in an optimizer of the session, which unscales their gradients.
        self._stepped: set[int] = set()

    def note_scale(self, scaler: LossScaler) -> None:
        """Notes that a block begins: gradients that no optimizer looks after stay scaled by it."""
        self._was_scaled = self._was_scaled or scaler.is_dynamic or scaler.get_scale() != 1.0

    def make(self, given: object, listener: StepListener) -> AmpOptimizer:
        """Returns what is kept for an optimizer, or for the one in a wrapper."""
        optimizer = unwrap_optimizer(given)
        masters = MasterParams(find_inner_optimizers(optimizer), self._touched)
        return AmpOptimizer(optimizer, masters, listener, given)

    def open(self, given: object, amp: AmpOptimizer, has_masters: bool, undo: ExitStack) -> None:
        """Puts hooks and, if it is to have some, masters onto an optimizer; `undo` takes them away."""
        undo.callback(weakly(ExitStack.close, amp.undo))
        instance = Patcher()
        amp.undo.callback(instance.close)
        if has_masters:
            self._open_masters(amp, instance)
        original = amp.optimizer.add_param_group
        add_group = functools.partial(self._add_param_group, amp, has_masters, original)
        instance.replace(amp.optimizer, "add_param_group", functools.update_wrapper(add_group, original))
        for one in amp.masters.optimizers:
            order_hooks(one)
            amp.undo.callback(one.register_step_pre_hook(amp.before_step).remove)
            amp.undo.callback(one.register_step_post_hook(amp.after_step).remove)
            if hasattr(one, "_optimizer_load_state_dict_post_hooks"):
                amp.undo.callback(one.register_load_state_dict_post_hook(amp.masters.align_state).remove)
        amp.undo.callback(amp.close)
        if needs_whole_step(given, amp.optimizer):
            WholeStep(given, amp).open(amp.undo)

    def _open_masters(self, amp: AmpOptimizer, instance: Patcher) -> None:
        optimizer, masters = amp.optimizer, amp.masters
        amp.undo.callback(masters.remove)
        self._make_masters(masters, amp.params())
        zero_grad = functools.partial(amp.zero_grad, optimizer.zero_grad)
        instance.replace(optimizer, "zero_grad", functools.update_wrapper(zero_grad, optimizer.zero_grad))
        instance.replace(optimizer, "__deepcopy__", CopyWithMasters(amp), optional=True)

    def _add_param_group(self, amp: AmpOptimizer, has_masters: bool, original: Callable, group: dict) -> None:
        original(group)
        params = amp.optimizer.param_groups[-1]["params"]
        if any(amp.masters.get(param) is not None for param in params):
            del amp.optimizer.param_groups[-1]
            raise ValueError("some parameters appear in more than one parameter group")
        self.drop_scaled("add_param_group", params)
        if has_masters:
            self._make_masters(amp.masters, params)

    def drop_scaled(self, where: str, params: Sequence[Tensor]) -> None:
        """Drops gradients of parameters that join, but for those that have joined before."""
        if self._was_scaled:
            drop_scaled_grads(where, params, self._stepped)
        self._stepped.update(map(id, params))
