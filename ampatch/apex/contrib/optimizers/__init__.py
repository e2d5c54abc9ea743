"""Where apex kept its first optimizers once `apex.optimizers` had others of these names: the same here."""

from ampatch.apex.optimizers import FP16_Optimizer, FusedAdam, FusedLAMB, FusedSGD

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"]
