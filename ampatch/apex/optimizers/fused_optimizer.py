"""What the optimizers of `apex.optimizers` share: gradients, half parameters, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import required

import ampatch as amp
from ampatch.apex.drop_in.missing import explain
from ampatch.apex.optimizers.batch import Batch, align, can_fuse, find_params, group_by_kind, working_copy
from ampatch.levels.precision import HALF_TYPES
from ampatch.steps.masters.tensors import refine

Group = dict[str, object]
Params = Iterable[Tensor] | Iterable[Group]


class FusedOptimizer(Optimizer):
    """Base of the fused optimizers.

    Half parameters are updated in float32 and rounded once, and what is remembered of their gradients
    is float32. With `master_weights` so are the parameters themselves, apart from the model's.
    """

    fused_devices: ClassVar[tuple[str, ...]] = ()  # for torch's fused kernel, where the class has one

    def __init__(
        self, params: Params, defaults: Group, set_grad_none: bool = True, master_weights: bool = False
    ) -> None:
        if defaults["lr"] is None:  # then each group has its own, else torch says which lacks it
            defaults = {**defaults, "lr": required}
        names = ("lr", "momentum", "eps", "weight_decay")
        given = {name: defaults[name] for name in names if name in defaults}
        self._check_positive(**{name: value for name, value in given.items() if value is not required})
        self.set_grad_none = set_grad_none
        self.master_weights = master_weights
        self._marks: dict[Tensor, tuple[int, int]] = {}  # by parameter, of the master as a step left it
        self._shown: dict[Tensor, Tensor] = {}  # parameters whose masters a script has, as a step left them
        super().__init__(params, defaults)
        # As apex's had it: subclasses of FusedAdam hand it to `multi_tensor_applier`, with its kernel.
        devices = (param.device for group in self.param_groups for param in group["params"])
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32, device=next(devices, None))

    def _check_positive(self, **values: object) -> None:
        wrong = [f"{key}={value!r}" for key, value in values.items() if value is None or value < 0.0]
        if wrong:
            raise amp.AmpValueError(f"{type(self).__name__}: {', '.join(wrong)}: expected 0 or more")

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
                if self.master_weights:
                    self._marks |= zip(batch.owners, map(_mark, batch.params), strict=True)
                for owner in [owner for owner in batch.owners if owner in self._shown]:
                    self._shown[owner].copy_(owner)

    def _update(self, group: Group, batch: Batch) -> None:
        raise NotImplementedError

    def _batches(self, group: Group) -> list[Batch]:
        params = find_params(type(self).__name__, group["params"])
        return group_by_kind((param, self._working_copy(param)) for param in params)

    def _working_copy(self, param: Tensor) -> Tensor:
        return self._master(param) if self._has_master(param) else working_copy(param)

    def _has_master(self, param: Tensor) -> bool:
        return self.master_weights and param.dtype in HALF_TYPES

    def _master(self, param: Tensor) -> Tensor:
        """Returns a parameter's master, with what was written into the parameter since the last step.

        What was written into the master stays, and counts more.
        """
        half, state = param.detach(), self.state[param]
        state["master_param"] = master = align(state.get("master_param", half), half.float())
        left = self._shown.get(param)
        if left is not None:  # a script may write through the `.data` of either, which leaves no mark
            master.copy_(torch.where(half == left, master, half.float()))
            left.copy_(half)
        elif self._marks.get(param) in (None, _mark(master)):
            master.copy_(refine(master, half))
        self._marks[param] = _mark(master)
        return master

    def _lists(self, batch: Batch, *names: str) -> tuple[list[Tensor], ...]:
        """Returns the lists that an update takes: gradients, parameters, and the state of these names."""
        return batch.grads, batch.params, *(self._moments(name, batch) for name in names)

    def _moments(self, name: str, batch: Batch) -> list[Tensor]:
        """Returns the state of that name for each parameter: zeros at first."""
        for owner, param in zip(batch.owners, batch.params, strict=True):
            state = self.state[owner]  # in half or in another layout, where a checkpoint held it so
            state[name] = align(state[name], param) if name in state else torch.zeros_like(param)
        return [self.state[owner][name] for owner in batch.owners]

    def _fused_options(self, batch: Batch) -> dict[str, object]:
        scaling = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        return {"fused": can_fuse(batch.params[0], self.fused_devices) or None, **scaling}

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a step takes `found_inf`, and skips on the device."""
        params = (param for group in self.param_groups for param in group["params"])
        return self._takes_scaled_grads and all(can_fuse(param, self.fused_devices) for param in params)

    @property
    def _takes_scaled_grads(self) -> bool:
        return True

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears the gradients: to None or to zero, by `set_grad_none` if not said."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads a copy of a checkpoint: ours, apex's or that of the optimizer of torch with the same name."""
        super().load_state_dict(copy.deepcopy(state_dict))
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for key, param in zip(keys, params, strict=True):
            if param.dtype in HALF_TYPES:  # to which torch has rounded the state
                self._load_float32(param, state_dict["state"].get(key, {}))

    def _load_float32(self, param: Tensor, saved: dict[str, object]) -> None:
        for name, value in saved.items():
            if isinstance(value, Tensor) and value.dtype is torch.float32 and name != "step":
                self.state[param][name] = value.to(param.device, copy=True)

    def __getattr__(self, name: str) -> object:
        kernel = explain(f"amp_C.{name}") if name.startswith("multi_tensor_") else None
        text = kernel or f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=self)

    def __getstate__(self) -> dict[str, object]:
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        options = {name: value for name, value in public.items() if isinstance(value, (bool, int, float))}
        return {**super().__getstate__(), **options}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._marks, self._shown = {}, {}
        if isinstance(self.defaults["lr"], type(required)):  # a copy, which torch does not know
            self.defaults["lr"] = required
        self.defaults.pop("differentiable", None)  # an option of torch's optimizers, which torch adds
        for group in self.param_groups:  # a checkpoint of torch's lacks some of ours
            for name, value in self.defaults.items():
                group.setdefault(name, value)


def _mark(master: Tensor) -> tuple[int, int]:
    return master._version, master.data_ptr()


class CountingOptimizer(FusedOptimizer):
    """Base of those that count the steps of each parameter, as torch does.

    Apex counted those of a group, in `group["step"]`: there is the count of its first parameter.
    """

    def _steps(self, batch: Batch, fused: dict[str, object]) -> list[Tensor]:
        device = batch.device if fused["fused"] else torch.device("cpu")
        states = [self.state[owner] for owner in batch.owners]
        for state in states:  # a checkpoint may hold a number, or a tensor on the CPU
            done = state["step"] if "step" in state else torch.zeros((), device=device)
            state["step"] = torch.as_tensor(done, dtype=torch.float32, device=device)
        return [state["step"] for state in states]

    def _step(self) -> None:
        for group in self.param_groups:
            self._take_count(group)
        super()._step()
        for group in self.param_groups:
            self._name_count(group)

    def _find_count(self, group: Group) -> Tensor | None:
        states = (self.state.get(param, {}) for param in group["params"])
        return next((state["step"] for state in states if "step" in state), None)

    def _name_count(self, group: Group) -> None:
        if (count := self._find_count(group)) is not None:
            group["step"] = count

    def _take_count(self, group: Group) -> None:
        """Has a count that a script has put into the group, or a checkpoint of apex, be that of all."""
        count = self._find_count(group)
        given = group.get("step", count)
        if given is not count and (count is None or float(given) != float(count)):
            for param in group["params"]:
                if param in self.state:
                    self.state[param]["step"] = torch.tensor(float(given))

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
            self._take_count(group)
            self._name_count(group)


class GroupCountingOptimizer(FusedOptimizer):
    """Base of those that count the steps of a group, in `group["step"]`, as apex did."""

    def _step(self) -> None:
        found = [(group, self._batches(group)) for group in self.param_groups]
        self._prepare([batch for _, batches in found for batch in batches])
        for group, batches in found:
            if batches:  # a step that is skipped has no gradients, and counts nothing
                group["step"] = int(group.get("step", 0)) + 1
            for batch in batches:
                self._update(group, batch)
                batch.write_back()

    def _prepare(self, batches: list[Batch]) -> None:
        """Sees the gradients of all groups, before any update."""

    def _refuse_amsgrad(self, amsgrad: bool) -> None:
        if amsgrad:  # as apex did
            name = type(self).__name__
            raise amp.AmpError(f"{name} does not take amsgrad=True: leave it out, or use FusedAdam")
