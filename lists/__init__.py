"""The cast tables: which torch function runs in which dtype, and why. Data only."""

if __name__ != "ampatch.lists":
    raise ImportError(f"import ampatch.lists, not {__name__}: this would be a second copy of the tables")

from ampatch.lists.differences import AUTOCAST_WITHOUT_ROW, DIFFERENT_FROM_AUTOCAST
from ampatch.lists.functional import CHUNKED_LOSS, FUNCTIONAL
from ampatch.lists.on_cpu import FUNCTIONS_ON_CPU, MODULES_ON_CPU
from ampatch.lists.refused import REFUSED
from ampatch.lists.tensor_methods import TENSOR
from ampatch.lists.torch_functions import FFT, LINALG, SPECIAL, TORCH, TORCH_FUNCTIONAL, VF

__all__ = ["AUTOCAST_WITHOUT_ROW", "DIFFERENT_FROM_AUTOCAST", "MODULES_ON_CPU", "TABLES"]

_OF_NAMESPACES = (FUNCTIONAL, CHUNKED_LOSS, TORCH, TORCH_FUNCTIONAL, LINALG, SPECIAL, FFT, VF, TENSOR)
TABLES = (*_OF_NAMESPACES, *REFUSED, *FUNCTIONS_ON_CPU)
