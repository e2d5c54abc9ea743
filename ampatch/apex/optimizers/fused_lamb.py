"""FusedLAMB: LAMB, whose steps are as long as each layer's weights allow."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ampatch.apex.amp_C import multi_tensor_l2norm
from ampatch.apex.multi_tensor_apply.norms import norms, total_norm
from ampatch.apex.multi_tensor_apply.optimizer_kernels import multi_tensor_lamb
from ampatch.apex.multi_tensor_apply.updates import Moments, clip_divisor, lamb_
from ampatch.apex.optimizers.batch import Batch
from ampatch.apex.optimizers.fused_optimizer import FusedOptimizer, Group, check_positive, refuse_amsgrad


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

    @staticmethod
    def _read_moments(group: Group) -> Moments:
        beta1, beta2 = group["betas"]
        return Moments(
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            step=group["step"],
            bias_correction=bool(group["bias_correction"]),
            grad_averaging=bool(group["grad_averaging"]),
            weight_decay=group["weight_decay"],
        )


class FusedLAMB(GroupCountingOptimizer):
    """LAMB with the arguments that apex's FusedLAMB had.

    Gradients are first clipped, all groups together, to a norm of `max_grad_norm` (0 or None: not). Layers
    without weight decay take Adam's step, unless `use_nvlamb` is set. No host sync.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2019.
    """

    multi_tensor_lamb = staticmethod(multi_tensor_lamb)
    multi_tensor_l2norm = staticmethod(multi_tensor_l2norm)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
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
        refuse_amsgrad(type(self).__name__, amsgrad)
        check_positive(type(self).__name__, lr=lr, eps=eps, weight_decay=weight_decay)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        self._divisor: Tensor | None = None
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none)

    def _prepare(self, batches: list[Batch]) -> None:
        # As apex did, the bound that the optimizer was made with counts, for all groups together.
        norm = total_norm(norms([grad for batch in batches for grad in batch.grads]))
        self._divisor = clip_divisor(norm, self.defaults["max_grad_norm"])

    def _update(self, group: Group, batch: Batch) -> None:
        lamb_(
            batch.params,
            batch.grads,
            self._moments("exp_avg", batch),
            self._moments("exp_avg_sq", batch),
            lr=group["lr"],
            moments=self._read_moments(group),
            adam_w_mode=self.adam_w_mode == 1,
            use_nvlamb=self.use_nvlamb,
            divisor=None if self._divisor is None else self._divisor.to(batch.device),
        )
