"""An optimizer around another, with float32 masters in its param groups in the place of half params."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

import ampatch as amp
from ampatch.levels.precision import HALF_TYPES
from ampatch.steps.masters import MasterParams, fit_states
from ampatch.steps.weight import Weight


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
    def all_fp16_params(self) -> list[Parameter]:
        """The half parameters of the model that have masters."""
        return [param for group in self.fp16_groups for param in group]

    @property
    def all_fp32_from_fp16_params(self) -> list[Parameter]:
        """Their masters, in the same order."""
        return [param for group in self.fp32_from_fp16_groups for param in group]

    @property
    def all_fp32_from_fp32_params(self) -> list[Parameter]:
        """The parameters that are stepped as they are; frozen ones are in no list."""
        return [param for group in self.fp32_from_fp32_groups for param in group]

    @property
    def fp16_groups(self) -> list[list[Parameter]]:
        """The half parameters that have masters, by param group."""
        halves = {id(pair.master): pair.half for pair in self._masters}
        return [[halves[id(master)] for master in group] for group in self.fp32_from_fp16_groups]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Parameter]]:
        """The masters, by param group."""
        return [
            [param for param in group["params"] if self._masters.owns(param)] for group in self.param_groups
        ]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Parameter]]:
        """The parameters that are stepped as they are, by param group."""
        others = [self._masters.select_others(group["params"]) for group in self.param_groups]
        return [[param for param in group if param.requires_grad] for group in others]

    def add_param_group(self, param_group: dict) -> None:
        """Adds a param group to the inner optimizer, and makes masters for its half parameters."""
        self.optimizer.add_param_group(param_group)
        self._make_masters()

    # ---- What the inner optimizer has ----

    @property
    def state(self) -> dict:
        """The state of the inner optimizer, by master."""
        return self.optimizer.state

    @state.setter
    def state(self, value: dict) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict]:
        """The param groups of the inner optimizer, with masters in them."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict]) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> dict:
        """The options of the inner optimizer for param groups that do not say."""
        return self.optimizer.defaults

    def register_step_pre_hook(self, hook: Callable[..., object]) -> RemovableHandle:
        """Registers a hook that runs before each step of the inner optimizer that is not skipped."""
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., object]) -> RemovableHandle:
        """Registers a hook that runs after each step of the inner optimizer that is not skipped."""
        return self.optimizer.register_step_post_hook(hook)

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
