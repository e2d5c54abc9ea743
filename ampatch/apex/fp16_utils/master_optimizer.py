"""An optimizer around another, with float32 masters in its param groups in the place of half params."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch.nn import Parameter
from torch.optim import Optimizer

import ampatch as amp
from ampatch.levels.precision import HALF_TYPES
from ampatch.steps.masters.params import MasterParams, fit_states
from ampatch.steps.masters.weight import Weight


def of_inner(name: str) -> property:
    """Makes a property that is the inner optimizer's attribute of that name."""
    return property(
        lambda self: getattr(self.optimizer, name),
        lambda self, value: setattr(self.optimizer, name, value),
        doc=f"The inner optimizer's `{name}`.",
    )


def of_all(groups: property) -> property:
    """Makes a property with the parameters of all groups in one list."""
    return property(
        lambda self: [param for group in groups.__get__(self) for param in group], doc=groups.__doc__
    )


class MasterOptimizer(Optimizer):
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

    @property
    def fp16_groups(self) -> list[list[Parameter]]:
        """The half parameters of the model that have masters, by param group."""
        groups = self.fp32_from_fp16_groups
        halves = {id(pair.master): pair.half for pair in self._masters}
        return [[halves[id(master)] for master in group] for group in groups]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Parameter]]:
        """Their masters, in the same order; made here if the model became half since."""
        self._make_masters()
        return [
            [param for param in group["params"] if self._masters.owns(param)] for group in self.param_groups
        ]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Parameter]]:
        """The parameters that are stepped as they are; frozen ones are in no list."""
        self._make_masters()
        others = [self._masters.select_others(group["params"]) for group in self.param_groups]
        return [[param for param in group if param.requires_grad] for group in others]

    all_fp16_params = of_all(fp16_groups)
    all_fp32_from_fp16_params = of_all(fp32_from_fp16_groups)
    all_fp32_from_fp32_params = of_all(fp32_from_fp32_groups)

    def add_param_group(self, param_group: dict) -> None:
        """Adds a param group to the inner optimizer, and makes masters for its half parameters."""
        self.optimizer.add_param_group(param_group)
        self._make_masters()

    # ---- What the inner optimizer has ----

    state = of_inner("state")
    param_groups = of_inner("param_groups")
    defaults = of_inner("defaults")
    # Hooks of theirs run around each step that is not skipped.
    register_step_pre_hook = of_inner("register_step_pre_hook")
    register_step_post_hook = of_inner("register_step_post_hook")

    def __getstate__(self) -> dict[str, object]:
        self._masters.take_edits()
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
