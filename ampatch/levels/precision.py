"""The floating types that casts move between."""

import torch

HALF_TYPES = (torch.float16, torch.bfloat16)

# float64 is never cast, and neither are complex and 8-bit types.
ELIGIBLE = frozenset({torch.float32, *HALF_TYPES})


def name_dtype(dtype: torch.dtype) -> str:
    """Writes a dtype as messages do: "float16".

    >>> name_dtype(torch.float16)
    'float16'
    """
    return str(dtype).removeprefix("torch.")
