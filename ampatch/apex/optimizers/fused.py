"""The fused optimizers of `apex.optimizers`, by torch's own functions where torch has the step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.sgd import sgd

import ampatch as amp
from ampatch.apex.amp_C import adam_, clip_divisor, multi_tensor_adam, multi_tensor_l2norm, norms
from ampatch.apex.optimizers.fused_optimizer import (
    Batch,
    CountingOptimizer,
    FusedOptimizer,
    Group,
    GroupCountingOptimizer,
    Params,
    average_,
    bias_corrections,
    decay_apart,
)
from ampatch.levels.precision import HALF_TYPES


class FusedAdam(CountingOptimizer):
    """AdamW, or Adam with `adam_w_mode=False`, with the arguments that apex's FusedAdam had.

    `capturable` is accepted: a fused step can be captured in a CUDA graph anyway (give `lr` as a tensor
    to change it between replays). `eps_inside_sqrt` and `max_grad_norm`, which clips the gradients of
    each group, are arguments of apex's first FusedAdam.
    """

    fused_devices = ("cpu", "cuda", "xpu", "mps")
    multi_tensor_adam = staticmethod(multi_tensor_adam)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        eps_inside_sqrt: bool = False,
        max_grad_norm: float = 0.0,
    ) -> None:
        if eps_inside_sqrt:
            raise amp.AmpValueError(
                "FusedAdam: eps_inside_sqrt=True is not supported, as in every apex since 2019: leave it out"
            )
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.amsgrad = amsgrad
        self.capturable = capturable
        self.max_grad_norm = max_grad_norm
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        self._check_positive({"max_grad_norm": max_grad_norm})
        self.takes_scaled_grads = not max_grad_norm
        super().__init__(params, {**defaults, "weight_decay": weight_decay}, set_grad_none, master_weights)

    @property
    def param_groups_master(self) -> list[dict[str, list[Tensor | None]]]:
        """The masters, by param group; None for each parameter without `master_weights`.

        From then on what is written into them counts, however: at 2 bytes and two passes for each value.
        """
        show = self._show_master if self.master_weights else lambda _: None
        return [{"params": [show(param) for param in group["params"]]} for group in self.param_groups]

    def _show_master(self, param: Tensor) -> Tensor:
        master = self._working_copy(param)
        if param.dtype in HALF_TYPES:
            self._shown.setdefault(param, param.detach().clone())
        return master

    def step(self, closure: Callable[[], object] | None = None, **gone: object) -> object:
        """Updates the parameters that have gradients; returns what the closure returns.

        Raises AmpError for the other arguments, which apex gave up in 2019.
        """
        if any(argument is not None for argument in gone.values()):
            raise amp.AmpError(
                "FusedAdam.step no longer takes grads=, output_params=, scale= and grad_norms=: set the "
                ".grad of the parameters and call step(), or let amp or FP16_Optimizer scale and clip"
            )
        return super().step(closure)

    def _batches(self, group: Group, params: Sequence[Tensor]) -> list[Batch]:
        batches = super()._batches(group, params)
        divisor = clip_divisor([param.grad for param in params], self.max_grad_norm)
        for batch in batches if divisor is not None else ():
            batch.grads = [grad / divisor.to(grad.device) for grad in batch.grads]
        return batches

    def _update(self, group: Group, batch: Batch) -> None:
        fused = self._fused_options(batch)
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if self.amsgrad else 2]
        steps = self._steps(batch, fused)
        steps = steps if group["bias_correction"] else _count(steps, fused["found_inf"])
        moments = [self._moments(name, batch) for name in names]
        adam_([batch.grads, batch.params, *moments], steps, group, self.adam_w_mode == 1, **fused)


def _count(steps: list[Tensor], found_inf: Tensor | None) -> list[Tensor]:
    """Counts a step, and returns counts with which torch corrects nothing: infinitely many."""
    torch._foreach_add_(steps, 1.0)
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf.to(step.device) for step in steps])
    return [torch.full_like(step, float("inf")) for step in steps]


class FusedAdagrad(CountingOptimizer):
    """Adagrad with the arguments that apex's FusedAdagrad had; `adagrad_w_mode` decays weights apart."""

    fused_devices = ("cpu", "cuda")

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.adagrad_w_mode = 1 if adagrad_w_mode else 0
        self.takes_scaled_grads = not adagrad_w_mode
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, set_grad_none)

    def _update(self, group: Group, batch: Batch) -> None:
        fused = self._fused_options(batch)
        adagrad(
            batch.params,
            batch.grads,
            self._moments("sum", batch),
            self._steps(batch, fused),
            lr=group["lr"],
            eps=group["eps"],
            weight_decay=decay_apart(batch.params, group, bool(self.adagrad_w_mode)),
            lr_decay=0.0,
            has_complex=any(param.is_complex() for param in batch.params),
            maximize=False,
            **fused,
        )


class FusedSGD(FusedOptimizer):
    """SGD with the arguments that apex's FusedSGD had.

    With `wd_after_momentum` weights decay apart from the momentum. `materialize_master_grads=False`
    saved apex a copy of the gradients at O2; it has no meaning here, which a warning says.
    """

    fused_devices = ("cpu", "cuda", "xpu", "mps")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor | None = None,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise amp.AmpValueError(
                f"FusedSGD: nesterov=True with momentum={momentum!r} and dampening={dampening!r}: "
                f"expected a momentum above 0 and a dampening of 0"
            )
        if not materialize_master_grads:
            warnings.warn(
                "FusedSGD: materialize_master_grads=False has no meaning with ampatch and is ignored",
                stacklevel=2,
            )
        self.wd_after_momentum = wd_after_momentum
        self.takes_scaled_grads = not wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        super().__init__(params, {**defaults, "weight_decay": weight_decay}, set_grad_none)

    def _step_group(self, group: Group, params: Sequence[Tensor]) -> None:
        # Torch's kernels take parameters that have a momentum, or such that have none yet.
        old, new = [], []
        for param in params:
            has_none = self.state.get(param, {}).get("momentum_buffer") is None
            (new if has_none else old).append(param)
        if old:
            super()._step_group(group, old)
        found_inf = getattr(self, "found_inf", None)
        # Torch's kernel would skip, and leave a new momentum uninitialized: one host sync, once.
        if new and (group["momentum"] == 0 or found_inf is None or not found_inf):
            super()._step_group(group, new)

    def _update(self, group: Group, batch: Batch) -> None:
        states = [self.state[owner] for owner in batch.owners] if group["momentum"] else []
        buffers = [None] * len(batch.params)
        if states and states[0].get("momentum_buffer") is not None:
            buffers = self._moments("momentum_buffer", batch)
        sgd(
            batch.params,
            batch.grads,
            buffers,
            **{name: group[name] for name in ("lr", "momentum", "dampening", "nesterov")},
            weight_decay=decay_apart(batch.params, group, self.wd_after_momentum),
            maximize=False,
            **self._fused_options(batch),
        )
        for state, buffer in zip(states, buffers, strict=False):
            state["momentum_buffer"] = buffer


class FusedLAMB(GroupCountingOptimizer):
    """LAMB with the arguments that apex's FusedLAMB had.

    Gradients are first clipped, all groups together, to a norm of `max_grad_norm` (0 or None: not). Layers
    without weight decay take Adam's step, unless `use_nvlamb` is set. No host sync.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2019.
    """

    multi_tensor_l2norm = staticmethod(multi_tensor_l2norm)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        self._refuse_amsgrad(amsgrad)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        self._divisor: Tensor | None = None
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        more = {"weight_decay": weight_decay, "grad_averaging": grad_averaging}
        super().__init__(params, {**defaults, **more, "max_grad_norm": max_grad_norm}, set_grad_none)

    def _prepare(self, grads: Sequence[Tensor]) -> None:
        # As apex did, the bound that the optimizer was made with counts, for all groups together.
        self._divisor = clip_divisor(grads, self.defaults["max_grad_norm"])

    def _update(self, group: Group, batch: Batch) -> None:
        grads, params, decay = batch.grads, batch.params, group["weight_decay"]
        exp_avgs, exp_avg_sqs = (self._moments(name, batch) for name in ("exp_avg", "exp_avg_sq"))
        first, second = bias_corrections(group)
        if self._divisor is not None:
            grads = torch._foreach_div(grads, self._divisor.to(batch.device))
        if decay and not self.adam_w_mode:
            grads = torch._foreach_add(grads, params, alpha=decay)
        average_(exp_avgs, grads, group)
        torch._foreach_mul_(exp_avg_sqs, group["betas"][1])
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - group["betas"][1])
        root = torch._foreach_div(exp_avg_sqs, second)
        torch._foreach_sqrt_(root)
        torch._foreach_add_(root, group["eps"])
        direction = torch._foreach_div(exp_avgs, first)
        torch._foreach_div_(direction, root)
        if decay and self.adam_w_mode:
            torch._foreach_add_(direction, params, alpha=decay)
        if self.use_nvlamb or decay:
            torch._foreach_mul_(direction, _trust_ratios(norms(params), norms(direction)))
        torch._foreach_mul_(direction, group["lr"])
        torch._foreach_sub_(params, direction)


def _trust_ratios(param_norms: Sequence[Tensor], update_norms: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns by how much each layer's step is longer: the norm of its weights by that of its update.

    1 where one of the two is 0.
    """
    params, updates = torch.stack(tuple(param_norms)), torch.stack(tuple(update_norms))
    return torch.where((params != 0) & (updates != 0), params / updates, 1.0).unbind()


class FusedNovoGrad(GroupCountingOptimizer):
    """NovoGrad with the arguments that apex's FusedNovoGrad had.

    The state of a parameter is `exp_avg` and, in `exp_avg_sq`, the running norm of its gradients (not
    the square; of 2-norms the squares are averaged, of infinity norms, `norm_type=0`, the norms). It
    begins with the norm of the first gradient, or with 0 (`init_zero`). No host sync.

    Source: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments", 2019.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        self._refuse_amsgrad(amsgrad)
        if norm_type not in (0, 2):
            raise amp.AmpValueError(
                f"FusedNovoGrad: norm_type={norm_type!r}: expected 2, or 0 for the infinity norm"
            )
        self.reg_inside_moment = reg_inside_moment
        self.moment_mode = 0 if reg_inside_moment else 1
        self.norm_type = norm_type
        self.init_zero = init_zero
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        more = {"weight_decay": weight_decay, "grad_averaging": grad_averaging, "norm_type": norm_type}
        super().__init__(params, {**defaults, **more, "init_zero": init_zero}, set_grad_none)

    def _update(self, group: Group, batch: Batch) -> None:
        first, second = bias_corrections(group)
        new_norms = self._blend_norms(batch, group["betas"][1])
        divisors = (new_norms / math.sqrt(second) + group["eps"]).unbind()
        exp_avgs, grads = self._moments("exp_avg", batch), batch.grads
        if self.reg_inside_moment:
            grads = _normalize(grads, divisors, batch.params, group["weight_decay"])
        average_(exp_avgs, grads, group)
        direction = torch._foreach_div(exp_avgs, first)
        if not self.reg_inside_moment:
            direction = _normalize(direction, divisors, batch.params, group["weight_decay"])
        torch._foreach_mul_(direction, group["lr"])
        torch._foreach_sub_(batch.params, direction)
        for owner, norm in zip(batch.owners, new_norms, strict=True):
            self.state[owner]["exp_avg_sq"].copy_(norm)

    def _blend_norms(self, batch: Batch, beta2: float) -> Tensor:
        """Returns the running norms with those of new gradients: squares are averaged for a 2-norm."""
        parts = norms(batch.grads, 2.0 if self.norm_type == 2 else math.inf)
        for owner, norm in zip(batch.owners, parts, strict=True):
            state = self.state[owner]
            if "exp_avg_sq" not in state:
                # Not a view of all.
                state["exp_avg_sq"] = torch.zeros_like(norm) if self.init_zero else norm.clone()
            state["exp_avg_sq"] = state["exp_avg_sq"].to(norm.device, norm.dtype)
        old = torch.stack([self.state[owner]["exp_avg_sq"] for owner in batch.owners])
        new = torch.stack(parts)
        if self.norm_type == 2:
            return (beta2 * old.square() + (1 - beta2) * new.square()).sqrt()
        return beta2 * old + (1 - beta2) * new

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads a checkpoint, ours or apex's, which had the running norms of a group together."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            by_kind = group.pop("exp_avg_sq", None)
            if by_kind is not None:
                states = [state_dict["state"].get(key, {}) for key in saved["params"]]
                self._spread_norms(group["params"], states, by_kind)

    def _spread_norms(
        self,
        params: Sequence[Tensor],
        saved: Sequence[dict[str, Tensor]],
        by_kind: Sequence[Tensor | None],
    ) -> None:
        """Gives each parameter its running norm: apex had those of float16 first, then of float32."""
        stepped = [
            (param, state["exp_avg"].dtype in HALF_TYPES)
            for param, state in zip(params, saved, strict=True)
            if "exp_avg" in state
        ]
        for norms_of_kind, is_half in zip(by_kind, (True, False), strict=True):
            values = () if norms_of_kind is None else norms_of_kind.float().unbind()
            kind_params = [param for param, kind in stepped if kind is is_half]
            if len(values) != len(kind_params):
                raise amp.AmpValueError(
                    f"FusedNovoGrad.load_state_dict: found {len(values)} norms in exp_avg_sq for "
                    f"{len(kind_params)} parameters with an exp_avg: expected one for each"
                )
            for param, value in zip(kind_params, values, strict=True):
                self.state[param]["exp_avg_sq"] = value.to(param.device, copy=True)


def _normalize(
    update: Sequence[Tensor], divisors: Sequence[Tensor], params: Sequence[Tensor], weight_decay: float
) -> Sequence[Tensor]:
    update = torch._foreach_div(update, divisors)
    if weight_decay:
        torch._foreach_add_(update, params, alpha=weight_decay)
    return update
