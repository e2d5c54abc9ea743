"""What `apex.optimizers` resolves to for scripts that were written for apex."""

from ampatch.apex.optimizers.fp16_optimizer import FP16_Optimizer
from ampatch.apex.optimizers.fused import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

__all__ = [
    "FP16_Optimizer",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedNovoGrad",
    "FusedSGD",
]
