"""What `apex.optimizers` resolves to for scripts that were written for apex."""

from ampatch.apex.optimizers.fp16_optimizer import FP16_Optimizer
from ampatch.apex.optimizers.fused_adagrad import FusedAdagrad
from ampatch.apex.optimizers.fused_adam import FusedAdam
from ampatch.apex.optimizers.fused_lamb import FusedLAMB
from ampatch.apex.optimizers.fused_novograd import FusedNovoGrad
from ampatch.apex.optimizers.fused_sgd import FusedSGD

__all__ = [
    "FP16_Optimizer",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedNovoGrad",
    "FusedSGD",
]
