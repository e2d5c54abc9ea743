"""What `apex.amp` resolves to for scripts that were written for apex."""

from ampatch import DynamicLossScale
from ampatch.apex.amp import lists
from ampatch.apex.amp._amp_state import _amp_state, master_params
from ampatch.apex.amp.frontend import (
    bfloat16_function,
    float_function,
    half_function,
    init,
    initialize,
    load_state_dict,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
    state_dict,
)
from ampatch.apex.amp.handle import disable_casts, scale_loss

__all__ = [
    "DynamicLossScale",
    "_amp_state",
    "bfloat16_function",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "lists",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
