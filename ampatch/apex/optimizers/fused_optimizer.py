"""What the optimizers of `apex.optimizers` share: gradients, half parameters, checkpoints."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import required

import ampatch as amp
from ampatch.apex.amp_C import Kind, kind_of, write_
from ampatch.apex.missing import explain
from ampatch.levels.precision import HALF_TYPES
from ampatch.steps.masters import is_wrapper, make_dense, refine

Group = dict[str, object]
Params = Iterable[Tensor] | Iterable[Group]
# What torch's fused kernels take.
FUSED_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(slots=True)
class Batch:
    """Parameters with gradients, of one group, device and type.

    `params` are what an update writes into: the parameters themselves, or float32 copies of half ones.
    """

    owners: list[Tensor] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    def add(self, owner: Tensor, param: Tensor, grad: Tensor) -> None:
        """Adds a parameter, what is computed on, and its gradient."""
        self.owners.append(owner)
        self.params.append(param)
        self.grads.append(align(grad, param))

    def write_back(self) -> None:
        """Rounds what was computed apart into the parameters."""
        pairs = zip(self.owners, self.params, strict=True)
        apart = [(owner, param) for owner, param in pairs if owner is not param]
        write_([owner for owner, _ in apart], [param for _, param in apart])


def align(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns a tensor in the type, place and strides of another: itself where it has them."""
    is_there = tensor.dtype is like.dtype and tensor.device == like.device
    if is_there and tensor.stride() == like.stride():
        return tensor
    # Fused kernels on a CPU walk through memory whatever the strides are (torch 2.13).
    return tensor.to(like.device, like.dtype) if is_wrapper(like) else torch.empty_like(like).copy_(tensor)


def select_with_grads(name: str, params: Iterable[Tensor]) -> list[Tensor]:
    """Returns the parameters that have gradients; raises AmpError for a sparse one."""
    selected = [param for param in params if param.grad is not None]
    for param in selected:
        if param.grad.is_sparse:
            raise amp.AmpError(
                f"{name} does not take sparse gradients, and a parameter of shape {tuple(param.shape)} "
                f"has one: give it to torch.optim.SparseAdam or torch.optim.SGD, or build its layer with "
                f"sparse=False"
            )
    return selected


class FusedOptimizer(Optimizer):
    """Base of the fused optimizers.

    Half parameters are updated in float32 and rounded once, and what is remembered of their gradients
    is float32. With `master_weights` so are the parameters themselves, apart from the model's.
    """

    fused_devices: ClassVar[tuple[str, ...]] = ()  # for torch's fused kernel, where the class has one
    takes_scaled_grads = True  # whether a fused step may unscale gradients

    def __init__(
        self, params: Params, defaults: Group, set_grad_none: bool = True, master_weights: bool = False
    ) -> None:
        if defaults["lr"] is None:  # then each group has its own, else torch says which lacks it
            defaults = {**defaults, "lr": required}
        names = {"lr", "momentum", "eps", "weight_decay"} & defaults.keys()
        self._check_positive({name: defaults[name] for name in names if defaults[name] is not required})
        self.set_grad_none = set_grad_none
        self.master_weights = master_weights
        self._shown: dict[Tensor, Tensor] = {}  # parameters whose masters a script has, as a step left them
        super().__init__(params, defaults)
        # As apex's had it: subclasses of FusedAdam hand it to `multi_tensor_applier`, with its kernel.
        device = next((param.device for param in self._params()), None)
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32, device=device)

    def _check_positive(self, values: Mapping[str, object]) -> None:
        wrong = [f"{key}={value!r}" for key, value in values.items() if value is None or value < 0.0]
        if wrong:
            raise amp.AmpValueError(f"{type(self).__name__}: {', '.join(wrong)}: expected 0 or more")

    def _params(self) -> Iterable[Tensor]:
        return (param for group in self.param_groups for param in group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> object:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [
            (group, select_with_grads(type(self).__name__, group["params"])) for group in self.param_groups
        ]
        self._prepare([param.grad for _, params in groups for param in params])
        for group, params in groups:
            if params:  # a step that is skipped has no gradients, and counts nothing
                self._step_group(group, params)
        return loss

    def _prepare(self, grads: Sequence[Tensor]) -> None:
        """Sees the gradients of all groups, before any update."""

    def _step_group(self, group: Group, params: Sequence[Tensor]) -> None:
        for batch in self._batches(group, params):
            self._update(group, batch)
            batch.write_back()
            for owner in [owner for owner in batch.owners if owner in self._shown]:
                self._shown[owner].copy_(owner)

    def _update(self, group: Group, batch: Batch) -> None:
        raise NotImplementedError

    def _batches(self, group: Group, params: Sequence[Tensor]) -> list[Batch]:
        batches: dict[Kind, Batch] = defaultdict(Batch)
        for owner in params:
            param = self._working_copy(owner)
            batches[kind_of(param)].add(owner, param, owner.grad)
        return list(batches.values())

    def _working_copy(self, param: Tensor) -> Tensor:
        """Returns what an update of a parameter computes on: float32 and dense, itself where it is."""
        if param.dtype not in HALF_TYPES:
            return make_dense(param)
        return self._master(param) if self.master_weights else param.detach().float()

    def _master(self, param: Tensor) -> Tensor:
        """Returns a parameter's master, with what was written into the parameter since the last step."""
        half, state = param.detach(), self.state[param]
        state["master_param"] = master = align(state.get("master_param", half), half.float())
        left = self._shown.get(param)
        if left is None:
            master.copy_(refine(master, half))
        else:  # a script may have written through the `.data` of either
            master.copy_(torch.where(half == left, master, half.float()))
            left.copy_(half)
        return master

    def _moments(self, name: str, batch: Batch) -> list[Tensor]:
        """Returns the state of that name for each parameter: zeros at first."""
        for owner, param in zip(batch.owners, batch.params, strict=True):
            state = self.state[owner]  # in half or in another layout, where a checkpoint held it so
            state[name] = align(state[name], param) if name in state else torch.zeros_like(param)
        return [self.state[owner][name] for owner in batch.owners]

    def _can_fuse(self, param: Tensor) -> bool:
        is_known = param.dtype in FUSED_TYPES and param.device.type in self.fused_devices
        return is_known and not is_wrapper(param)

    def _fused_options(self, batch: Batch) -> dict[str, object]:
        scaling = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        return {"fused": self._can_fuse(batch.params[0]) or None, **scaling}

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a step takes `found_inf`, and skips on the device."""
        return self.takes_scaled_grads and all(map(self._can_fuse, self._params()))

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears the gradients: to None or to zero, by `set_grad_none` if not said."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads a copy of a checkpoint: ours, apex's or that of the optimizer of torch with the same name."""
        super().load_state_dict(copy.deepcopy(state_dict))
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, param in zip(keys, self._params(), strict=True):
            saved = state_dict["state"].get(key, {}) if param.dtype in HALF_TYPES else {}
            for name, value in saved.items():
                # Torch has rounded it to the type of the parameter.
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
        self._shown = {}
        if isinstance(self.defaults["lr"], type(required)):  # a copy, which torch does not know
            self.defaults["lr"] = required
        self.defaults.pop("differentiable", None)  # an option of torch's optimizers, which torch adds
        for group in self.param_groups:  # a checkpoint of torch's lacks some of ours
            for name, value in self.defaults.items():
                group.setdefault(name, value)


class CountingOptimizer(FusedOptimizer):
    """Base of those that count the steps of each parameter, as torch does.

    Apex counted those of a group, in `group["step"]`: there is the count of its first parameter.
    """

    def _steps(self, batch: Batch, fused: Mapping[str, object]) -> list[Tensor]:
        device = batch.device if fused["fused"] else torch.device("cpu")
        states = [self.state[owner] for owner in batch.owners]
        for state in states:  # a checkpoint may hold a number, or a tensor on the CPU
            done = state["step"] if "step" in state else torch.zeros((), device=device)
            state["step"] = torch.as_tensor(done, dtype=torch.float32, device=device)
        return [state["step"] for state in states]

    def _step_group(self, group: Group, params: Sequence[Tensor]) -> None:
        self._adopt_group_count(group)
        super()._step_group(group, params)
        self._name_count(group)

    def _find_count(self, group: Group) -> Tensor | None:
        states = (self.state.get(param, {}) for param in group["params"])
        return next((state["step"] for state in states if "step" in state), None)

    def _name_count(self, group: Group) -> None:
        if (count := self._find_count(group)) is not None:
            group["step"] = count

    def _adopt_group_count(self, group: Group) -> None:
        """Has a count that a script has put into the group, or a checkpoint of apex, be that of all."""
        count = self._find_count(group)
        own = group.get("step", count)
        if own is not count and (count is None or float(own) != float(count)):
            for param in group["params"]:
                if param in self.state:
                    self.state[param]["step"] = torch.tensor(float(own))

    def state_dict(self) -> dict[str, object]:
        """Returns the checkpoint, with the steps in it as apex counted them, too; one host sync."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            if "step" in group:
                group["step"] = int(group["step"])
        return saved

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            self._adopt_group_count(group)
            self._name_count(group)


class GroupCountingOptimizer(FusedOptimizer):
    """Base of LAMB and NovoGrad, which count the steps of a group, in `group["step"]`, as apex did."""

    def _refuse_amsgrad(self, amsgrad: bool) -> None:
        if amsgrad:  # as apex did
            name = type(self).__name__
            raise amp.AmpError(f"{name} does not take amsgrad=True: leave it out, or use FusedAdam")

    def _step_group(self, group: Group, params: Sequence[Tensor]) -> None:
        group["step"] = int(group.get("step", 0)) + 1
        super()._step_group(group, params)


def bias_corrections(group: Group) -> tuple[float, float]:
    """Returns what the two running means of a group are divided by: they began with 0."""
    if not group["bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = group["betas"]
    return 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]


def average_(exp_avgs: Sequence[Tensor], grads: Sequence[Tensor], group: Group) -> None:
    """Moves the running means of gradients towards new ones."""
    beta1, _ = group["betas"]
    torch._foreach_mul_(exp_avgs, beta1)
    torch._foreach_add_(exp_avgs, grads, alpha=1 - beta1 if group["grad_averaging"] else 1.0)


def decay_apart(params: Sequence[Tensor], group: Group, is_apart: bool) -> float | Tensor:
    """Decays weights now if they do so apart, by w - lr * wd * w; returns what is left of the decay."""
    if is_apart and group["weight_decay"]:
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
    return 0.0 if is_apart else group["weight_decay"]
