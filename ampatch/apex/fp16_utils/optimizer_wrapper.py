"""An optimizer around another: what it holds, and its hooks, are those of the inner one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

import ampatch as amp


class OptimizerWrapper(Optimizer):
    """Shows the param groups, state and hooks of the optimizer inside it.

    It is an `Optimizer` so that torch's LR schedulers take it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # Not that of the base class, which would make param groups of its own.
        _validate_optimizer(optimizer)
        self.optimizer = optimizer

    def _params(self) -> Iterator[Parameter]:
        for group in self.param_groups:
            yield from group["params"]

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
        # A scheduler puts a `step` of its own here, which knows this object and no copy.
        return {name: value for name, value in vars(self).items() if name != "step"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)


def _validate_optimizer(optimizer: object) -> None:
    kind = type(optimizer).__name__
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
        raise amp.AmpTypeError(f"FP16_Optimizer: found a {kind}, expected an optimizer to wrap")
    if isinstance(optimizer, OptimizerWrapper):
        raise amp.AmpTypeError("FP16_Optimizer: found one already, expected the optimizer to wrap")
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
