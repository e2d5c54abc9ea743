"""What the optimizers of `apex.optimizers` share: gradients, half parameters, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

import ampatch as amp
from ampatch.apex.optimizers.batch import (
    Batch,
    align,
    can_fuse,
    find_params,
    group_by_kind,
    working_copy,
)
from ampatch.levels.precision import HALF_TYPES
from ampatch.steps.weight import refine

Group = dict[str, object]


class FusedOptimizer(Optimizer):
    """Base of the fused optimizers.

    Half parameters are updated in float32 and rounded once, and what is remembered of their gradients
    is float32. With `master_weights` so are the parameters themselves, apart from the model's.
    """

    fused_devices: ClassVar[tuple[str, ...]] = ()  # for torch's fused kernel, where the class has one

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        defaults: Group,
        *,
        set_grad_none: bool = True,
        master_weights: bool = False,
    ) -> None:
        self.set_grad_none = set_grad_none
        self.master_weights = master_weights
        super().__init__(params, defaults)
        # As apex's had it: subclasses hand it to `multi_tensor_applier`, with the kernel of the class.
        first = self.param_groups[0]["params"][0]
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32, device=first.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> object:
        """Updates the parameters that have gradients; returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    def _step(self) -> None:
        for group in self.param_groups:
            for batch in self._batches(group):
                self._update(group, batch)
                batch.write_back()

    def _update(self, group: Group, batch: Batch) -> None:
        raise NotImplementedError

    def _batches(self, group: Group) -> list[Batch]:
        params = find_params(type(self).__name__, group["params"])
        return group_by_kind((param, self._working_copy(param)) for param in params)

    def _working_copy(self, param: Tensor) -> Tensor:
        if not self.master_weights or param.dtype not in HALF_TYPES:
            return working_copy(param)
        full = param.detach().float()
        state = self.state[param]
        state["master_param"] = master = align(state.get("master_param", full), full)
        # The model's weights count where somebody wrote into them, as load_state_dict does.
        master.copy_(refine(master, param.detach()))
        return master

    def _moments(self, name: str, batch: Batch) -> list[Tensor]:
        """Returns the state of that name for each parameter: zeros at first."""
        found, new = [], []
        for owner, param in zip(batch.owners, batch.params, strict=True):
            state = self.state[owner]
            if name in state:  # in half or in another layout, where a checkpoint held it so
                state[name] = align(state[name], param)
            else:
                state[name] = torch.empty_like(param)
                new.append(state[name])
            found.append(state[name])
        _zero_(new)
        return found

    @property
    def _can_fuse(self) -> bool:
        devices = self.fused_devices
        return all(can_fuse(param, devices) for group in self.param_groups for param in group["params"])

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears the gradients: to None or to zero, by `set_grad_none` if not said."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads a checkpoint: ours, apex's or that of the optimizer of torch with the same name."""
        super().load_state_dict(state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for key, param in zip(keys, params, strict=True):
            if param.dtype in HALF_TYPES:  # to which torch has rounded the state
                self._load_float32(param, state_dict["state"].get(key, {}))

    def _load_float32(self, param: Tensor, saved: dict[str, object]) -> None:
        for name, value in saved.items():
            if isinstance(value, Tensor) and value.dtype is torch.float32 and name != "step":
                self.state[param][name] = value.to(param.device, copy=True)

    def __getstate__(self) -> dict[str, object]:
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        options = {name: value for name, value in public.items() if isinstance(value, (bool, int, float))}
        return {**super().__getstate__(), **options}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # an option of torch's optimizers, which torch adds
        for group in self.param_groups:  # a checkpoint of torch's lacks some of ours
            for name, value in self.defaults.items():
                group.setdefault(name, value)


class CountingOptimizer(FusedOptimizer):
    """Base of those that count the steps of each parameter, as torch does.

    Apex counted those of a group, in `group["step"]`: there is the count of its first parameter.
    """

    def _steps(self, batch: Batch, fused: bool) -> list[Tensor]:
        device = batch.device if fused else torch.device("cpu")
        new = [state for state in map(self.state.__getitem__, batch.owners) if "step" not in state]
        for state in new:
            state["step"] = torch.empty((), dtype=torch.float32, device=device)
        _zero_([state["step"] for state in new])
        for owner in batch.owners:  # a checkpoint may hold a number, or a tensor on the CPU
            state = self.state[owner]
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=device)
        return [self.state[owner]["step"] for owner in batch.owners]

    def _step(self) -> None:
        super()._step()
        for group in self.param_groups:
            self._name_step(group)

    def _name_step(self, group: Group) -> None:
        counted = (param for param in group["params"] if "step" in self.state.get(param, {}))
        first = next(counted, None)
        if first is not None:
            group["step"] = self.state[first]["step"]

    def state_dict(self) -> dict[str, object]:
        """Returns the checkpoint, with the steps in it as apex counted them, too; one host sync."""
        found = super().state_dict()
        for group in found["param_groups"]:
            if "step" in group:
                group["step"] = int(group["step"])
        return found

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            done = float(group.pop("step", 0))
            for param in group["params"]:
                if param in self.state:
                    self.state[param].setdefault("step", torch.tensor(done))
            self._name_step(group)


def _zero_(tensors: list[Tensor]) -> None:
    if tensors:
        torch._foreach_zero_(tensors)


def refuse_amsgrad(name: str, amsgrad: bool) -> None:
    """Raises AmpError for `amsgrad`, which apex refused as well."""
    if amsgrad:
        raise amp.AmpError(f"{name} does not take amsgrad=True: leave it out, or use FusedAdam")


def check_positive(name: str, **values: object) -> None:
    """Raises AmpValueError for numbers below 0, all at once."""
    wrong = [f"{key}={value!r}" for key, value in values.items() if value is None or value < 0.0]
    if wrong:
        raise amp.AmpValueError(f"{name}: {', '.join(wrong)}: expected 0 or more")
