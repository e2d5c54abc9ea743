"""FusedLAMB: LAMB, whose steps are as long as each layer's weights allow."""

from __future__ import annotations

from torch import Tensor

from ampatch.apex.amp_C import multi_tensor_l2norm
from ampatch.apex.multi_tensor_apply.norms import norms, total_norm
from ampatch.apex.multi_tensor_apply.updates import clip_divisor, lamb_
from ampatch.apex.optimizers.batch import Batch
from ampatch.apex.optimizers.fused_optimizer import Group, GroupCountingOptimizer, Params


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

    def _prepare(self, batches: list[Batch]) -> None:
        # As apex did, the bound that the optimizer was made with counts, for all groups together.
        norm = total_norm(norms([grad for batch in batches for grad in batch.grads]))
        self._divisor = clip_divisor(norm, self.defaults["max_grad_norm"])

    def _update(self, group: Group, batch: Batch) -> None:
        lists = self._lists(batch, "exp_avg", "exp_avg_sq")
        divisor = None if self._divisor is None else self._divisor.to(batch.device)
        lamb_(lists, group, self.adam_w_mode == 1, self.use_nvlamb, divisor)
