"""The other place where apex had `SyncBatchNorm`."""

from ampatch.apex.parallel.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
