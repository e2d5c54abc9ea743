"""An optimizer around another, with float32 masters in its param groups in the place of half params."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch.nn import Parameter
from torch.optim import Optimizer

import ampatch as amp
from ampatch.apex.master_lists import MasterLists
from ampatch.levels.precision import HALF_TYPES
from ampatch.steps.masters import MasterParams, Weight, fit_states


def attribute_of(part: str, name: str, *default: object) -> property:
    """Makes a property that is an attribute of a part of the object; `default` where the part has none."""
    return property(
        lambda self: getattr(getattr(self, part), name, *default),
        lambda self, value: setattr(getattr(self, part), name, value),
        doc=f"The `{name}` of `{part}`.",
    )


class MasterOptimizer(MasterLists, Optimizer):
    """Puts float32 masters in the place of an optimizer's half parameters, with their state.

    It shows the param groups, state and hooks of the optimizer inside it, and is an `Optimizer` so that
    torch's LR schedulers take it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # Not that of the base class, which would make param groups of its own.
        _validate_optimizer(optimizer)
        self.optimizer = optimizer
        self._masters = MasterParams([optimizer], set())
        self._make_masters()

    # ---- Masters ----

    def _make_masters(self) -> None:
        """Makes masters for the half parameters that have none yet: new ones, and those unfrozen."""
        known = len(self._masters.pairs)
        for param in self._params():
            if param.requires_grad and param.dtype in HALF_TYPES:
                self._masters.add(Weight(param))
        if len(self._masters.pairs) > known:
            self._masters.install()
            fit_states([weakref.ref(self.optimizer)])

    def _master_params_to_model_params(self) -> None:
        self._masters.copy_to_model()

    def _params(self) -> Iterator[Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    def _pairs(self) -> Iterator[tuple[Parameter, Parameter]]:
        return ((pair.half, pair.master) for pair in self._masters)

    def _stepped(self) -> list[list[Parameter]]:
        self._make_masters()  # of a model that became half since
        return [group["params"] for group in self.param_groups]

    def add_param_group(self, param_group: dict) -> None:
        """Adds a param group to the inner optimizer, and makes masters for its half parameters."""
        self.optimizer.add_param_group(param_group)
        self._make_masters()

    # ---- What the inner optimizer has ----

    state = attribute_of("optimizer", "state")
    param_groups = attribute_of("optimizer", "param_groups")
    defaults = attribute_of("optimizer", "defaults")
    # Hooks of theirs run around each step that is not skipped.
    register_step_pre_hook = attribute_of("optimizer", "register_step_pre_hook")
    register_step_post_hook = attribute_of("optimizer", "register_step_post_hook")

    def __getstate__(self) -> dict[str, object]:
        self._masters.show_edits()
        pairs = [(pair.half, pair.master) for pair in self._masters]
        # A scheduler puts a `step` of its own here, which knows this object and no copy.
        return {name: value for name, value in vars(self).items() if name != "step"} | {"_masters": pairs}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._masters = MasterParams([self.optimizer], set())
        for half, master in state["_masters"]:
            self._masters.add(Weight(half), master)


def _validate_optimizer(optimizer: object) -> None:
    kind = type(optimizer).__name__
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
        raise amp.AmpTypeError(f"FP16_Optimizer: found a {kind}, expected an optimizer to wrap")
    if isinstance(optimizer, MasterOptimizer):
        raise amp.AmpTypeError("FP16_Optimizer: found an FP16_Optimizer, expected the optimizer to wrap")
    validate_no_masters_of_amp(optimizer)


def validate_no_masters_of_amp(optimizer: object) -> None:
    """Raises AmpError for an optimizer whose gradients `scale_loss` unscales, into masters of its own."""
    try:
        has_masters = any(True for _ in amp.master_pairs(optimizer))
    except amp.AmpError:  # nothing is initialized, or not with this one
        return
    if has_masters:
        raise amp.AmpError(
            f"FP16_Optimizer: amp.initialize has given this {type(optimizer).__name__} masters already (O2, "
            f"O5): use amp.scale_loss with it, or make FP16_Optimizer instead of calling amp.initialize"
        )
