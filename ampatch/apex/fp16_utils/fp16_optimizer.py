"""FP16_Optimizer: an optimizer over half params that steps float32 masters of them, and scales the loss."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import ampatch as amp
from ampatch.apex.fp16_utils.fp16util import MasterLists, clip_grad_norm, model_grads_to_master_grads
from ampatch.apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.stack import asked
from ampatch.steps.foreign_step import list_wrapped
from ampatch.steps.masters import MasterParams, Weight, fit_states
from ampatch.steps.scaler import Agreement, agree_

# ---- Masters in the param groups of another optimizer ----


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


# ---- FP16_Optimizer ----

# As those of `amp`; a DynamicLossScaler alone begins at 2**32.
DYNAMIC = {"init_scale": 2.0**16, "scale_window": 2000, "max_loss_scale": 2.0**24}
Closure = Callable[[], object]


class FP16_Optimizer(MasterOptimizer):
    """Puts float32 masters in the place of an optimizer's half parameters, and scales the loss.

    ```python
    optimizer = FP16_Optimizer(torch.optim.SGD(model.half().parameters(), lr=0.1), dynamic_loss_scale=True)
    optimizer.zero_grad()
    optimizer.backward(loss)
    optimizer.step()
    ```

    Parameters that are not half are stepped as they are. `loss_scale` is a number or, with
    `dynamic_loss_scale`, one that follows overflows: it begins at 2**16, doubles after 2000 clean steps
    up to 2**24, and `dynamic_loss_args` are other arguments for `DynamicLossScaler`.

    `overflow` says whether the last gradients had an inf or NaN. That is looked for with a dynamic scale
    alone, and costs one host sync for each `update_master_grads`.

    It is an `Optimizer` for the sake of torch's LR schedulers; what it holds is that of `optimizer`.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, float] | None = None,
        verbose: bool = True,
    ) -> None:
        super().__init__(init_optimizer)
        self.verbose = verbose
        self.dynamic_loss_scale = bool(dynamic_loss_scale) or static_loss_scale == "dynamic"
        if self.dynamic_loss_scale:
            self.loss_scaler: LossScaler = DynamicLossScaler(**{**DYNAMIC, **(dynamic_loss_args or {})})
        else:
            self.loss_scaler = LossScaler()
            self.loss_scale = static_loss_scale
        self.overflow = False
        self.first_closure_call_this_step = True
        self.clip_grad_norm = clip_grad_norm
        self._are_scaled: bool | None = None  # the gradients of `backward`; None where it has made none
        self._must_back_off = False  # whether the scale has yet to follow what `overflow` says

    # Gradients

    def zero_grad(self, set_grads_to_None: bool = False, set_to_none: bool | None = None) -> None:
        """Clears the gradients of the model and of the masters: to zero, unless told to None."""
        self._back_off()
        self._are_scaled = None
        to_none = set_grads_to_None if set_to_none is None else set_to_none
        for param in (*self.all_fp16_params, *self._params()):
            if to_none:
                param.grad = None
            elif param.grad is not None:
                if param.grad.grad_fn is not None:
                    param.grad.detach_()
                param.grad.requires_grad_(False).zero_()

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Runs the backward pass of the loss times the loss scale, and hands the masters its gradients.

        To accumulate gradients of several losses, call it for each before a step. With
        `update_master_grads=False` the gradients stay scaled until `update_master_grads()`, which
        saves time (and with a dynamic scale host syncs).
        """
        self._prepare_backward()
        self._are_scaled = True
        scaled_loss = loss.float() * self.loss_scale
        scaled_loss.backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Gives the masters the gradients of the model, in float32 and unscaled, and sets `overflow`.

        Gradients of parameters that are not half are unscaled in place, once. With a dynamic scale it
        costs one host sync.
        """
        validate_no_masters_of_amp(self.optimizer)
        self._make_masters()
        with amp.disable_casts():
            model_grads_to_master_grads(self.all_fp16_params, self.all_fp32_from_fp16_params)
            grads = _find_grads(self.all_fp32_from_fp16_params)
            if self._are_scaled is not False:
                self.overflow = False
                grads += _find_grads(self.all_fp32_from_fp32_params)
            self.overflow = self._unscale_(grads) or self.overflow
        self._are_scaled = False
        self._must_back_off = True

    @torch.no_grad()
    def _prepare_backward(self) -> None:
        own = _find_grads(self.all_fp32_from_fp32_params)
        if self.overflow and not own and not _find_grads(self.all_fp16_params):
            self._back_off()  # the gradients that overflowed were dropped, without a step
        if self._are_scaled is False:
            for grad in own:
                grad.mul_(self.loss_scale)  # as those are that will be added

    def _unscale_(self, grads: list[Tensor]) -> bool:
        """Divides gradients by the loss scale; says whether one overflowed, if the scale is dynamic."""
        params = list(self._params())
        if not params or (self.loss_scale == 1 and not self.dynamic_loss_scale):
            return False
        scaler = amp.LossScaler(0, self.loss_scale, params[0].device)
        found_inf = scaler.new_found_inf()
        scaler.unscale_(grads, found_inf)
        if self.dynamic_loss_scale:  # whether this rank has gradients or not
            agree_(found_inf, Agreement().list_groups(params))
        return self.dynamic_loss_scale and bool(found_inf)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Tensor | int:
        """Clips the gradients of the masters, and of parameters that are not half, by their norm together.

        Returns that norm before clipping, or -1 if a gradient overflowed: the step will be skipped.
        """
        if self._are_scaled:
            self.update_master_grads()
        if self.overflow:
            return -1
        return self.clip_grad_norm(list(self._params()), max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Returns the gradients of what is stepped, by param group, or None after an overflow."""
        if self.overflow:
            asked.warning("inspect_master_grad_data: the gradients overflowed, there is nothing to look at")
            return None
        return [
            [None if param.grad is None else param.grad.detach() for param in group["params"]]
            for group in self.param_groups
        ]

    # What these were called in the first scripts.
    update_fp32_grads = update_master_grads
    clip_fp32_grads = clip_master_grads

    # A step

    def step(self, closure: Closure | None = None) -> object:
        """Steps the masters, and rounds them into the model; skips if the gradients overflowed.

        A closure calls `backward` of this optimizer; it is called again, with a smaller scale, until
        its gradients do not overflow. Returns what the step of the inner optimizer does.
        """
        if closure is not None:
            self._back_off()
            self.overflow = False  # of gradients that the closure makes anew
            evaluate = functools.partial(self._evaluate, closure)
            return self._update(functools.partial(self.optimizer.step, evaluate))
        if self._are_scaled:
            self.update_master_grads()
        if self.overflow:
            self._skip()
            return None
        self._warn_if_forgotten()
        with amp.disable_casts():
            return self._update(self.optimizer.step)

    def _warn_if_forgotten(self) -> None:
        if _find_grads(self.all_fp16_params) and not _find_grads(self.all_fp32_from_fp16_params):
            warnings.warn(
                "FP16_Optimizer.step: the model has gradients and the masters have none: call "
                "optimizer.backward(loss) instead of loss.backward(), or update_master_grads() after it",
                stacklevel=3,
            )

    def _update(self, step: Closure) -> object:
        self._masters.adopt_edits()
        result = step()
        self.loss_scaler.update_scale(False)
        self._are_scaled = None
        self.first_closure_call_this_step = True
        self._master_params_to_model_params()
        return result

    def _evaluate(self, closure: Closure) -> object:
        """Runs a closure inside a step: on the weights as they are by now, until nothing overflows."""
        if not self.first_closure_call_this_step:
            self._master_params_to_model_params()
        self.first_closure_call_this_step = False
        while True:
            result = closure()
            if self._are_scaled:
                self.update_master_grads()
            if not self.overflow:
                return result
            attempted = self.loss_scale
            self._back_off()
            if self.loss_scale >= attempted:
                raise amp.AmpError(
                    f"step: the gradients that the closure makes are not finite at the smallest loss scale, "
                    f"{attempted}: look for inf or NaN in the loss and the weights"
                )

    def _skip(self) -> None:
        self._back_off()
        self._are_scaled = None
        for inner in list_wrapped(self.optimizer):
            inner._opt_called = True  # or its LR scheduler takes the step for one that was forgotten

    def _back_off(self) -> None:
        """Lets the loss scale follow an overflow, once."""
        if not (self.overflow and self._must_back_off):
            return
        self._must_back_off = False
        attempted = self.loss_scale
        self.loss_scaler.update_scale(True)
        asked.log(
            logging.WARNING if self.verbose else logging.INFO,
            f"Gradient overflow.  Skipping step, loss scale {attempted} becomes {self.loss_scale}",
        )

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by; a number above 0 may be assigned."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float | str) -> None:
        self.loss_scaler.cur_scale = amp.LossScaler(0, value, torch.device("cpu")).get_scale()

    # Checkpoints

    def state_dict(self) -> dict[str, object]:
        """Returns the state of the inner optimizer, the masters and the loss scaler, in apex's format.

        ```python
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "saved.pt")
        ```

        As in apex they are the objects themselves, which scripts prune through: `copy.deepcopy` keeps them.
        """
        return {
            "loss_scaler": self.loss_scaler,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self.fp32_from_fp16_groups,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Restores a `state_dict`, also one that apex wrote, and rounds its masters into the model.

        Training goes on bit for bit as it would have. The loss scale is static or dynamic as saved.
        Raises AmpValueError for a state of other parameters, and changes nothing then.
        """
        scaler = _read_loss_scaler(state_dict)
        is_apart = "fp32_from_fp16" in state_dict  # else masters are among all that is stepped
        stepped = [group["params"] for group in self.param_groups]
        groups = self.fp32_from_fp16_groups if is_apart else stepped
        masters = _read_masters(state_dict, groups)
        self.optimizer.load_state_dict(copy.deepcopy(state_dict["optimizer_state_dict"]))
        self.loss_scaler, self.dynamic_loss_scale = scaler, bool(state_dict["dynamic_loss_scale"])
        self.overflow = state_dict.get("overflow", False)
        self.first_closure_call_this_step = state_dict.get("first_closure_call_this_step", True)
        self._must_back_off, self._are_scaled = False, None
        for master, saved in zip(itertools.chain(*groups), masters, strict=True):
            master.copy_(saved)
        self._master_params_to_model_params()


def _find_grads(params: list[Parameter]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


# ---- Checkpoints: our own, and those that apex's several FP16_Optimizers wrote ----


def _read_loss_scaler(state: Mapping[str, object]) -> LossScaler:
    """Returns a loss scaler of its own, in the state that a checkpoint holds.

    Checkpoints hold an object of `apex.fp16_utils`, one of `apex.amp`, or the bare numbers.
    """
    values = state["loss_scaler"].__reduce_ex__(2)[2] if "loss_scaler" in state else state
    if "_loss_scale" in values:
        return _read_scaler_of_amp(values)
    if "cur_scale" not in values:
        raise amp.AmpValueError(
            f"load_state_dict: found {sorted(state)}, and no loss scale among them: expected what "
            f"FP16_Optimizer.state_dict() returns; the state of a plain optimizer goes into .optimizer"
        )
    is_dynamic = "scale_factor" in values
    scaler = DynamicLossScaler() if is_dynamic else LossScaler()
    vars(scaler).update({name: values[name] for name in vars(scaler) if name in values})
    return scaler


def _read_scaler_of_amp(values: Mapping[str, object]) -> LossScaler:
    if not values["dynamic"]:
        return LossScaler(values["_loss_scale"])
    scaler = DynamicLossScaler(
        values["_loss_scale"],
        scale_window=values["_scale_seq_len"],
        min_loss_scale=values["_min_loss_scale"],
        max_loss_scale=values["_max_loss_scale"],
    )
    scaler.cur_iter = values["_unskipped"]  # counted from the last change
    return scaler


def _read_masters(state: Mapping[str, object], groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Returns the values of the masters, in the order of `groups`, the masters they are for.

    Raises AmpValueError if they are not of the same shapes.
    """
    saved = state.get("fp32_from_fp16", state.get("fp32_groups", []))
    shapes = [[tuple(master.shape) for master in group] for group in saved]
    expected = [[tuple(master.shape) for master in group] for group in groups]
    if shapes != expected:
        raise amp.AmpValueError(
            f"load_state_dict: the checkpoint has {_describe(shapes)}, this optimizer {_describe(expected)}: "
            f"make the optimizer of the same half parameters, in the same groups, before loading"
        )
    return [master for group in saved for master in group]


def _describe(shapes: list[list[tuple[int, ...]]]) -> str:
    count = sum(map(len, shapes))
    return f"{count} float32 masters in {len(shapes)} groups, of shapes {shapes!r}"
