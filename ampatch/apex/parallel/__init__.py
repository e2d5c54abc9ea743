"""What `apex.parallel` resolves to for scripts that were written for apex."""

from torch.distributed import ReduceOp

from ampatch.apex.parallel.distributed import DistributedDataParallel, Reducer
from ampatch.apex.parallel.LARC import LARC
from ampatch.apex.parallel.sync_batchnorm import (
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]

# `import apex.parallel.LARC as larc` finds the class in the place of the module.
LARC.LARC = LARC
