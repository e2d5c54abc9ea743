"""`amp.init`, the way in before there was `initialize`, with the decorators and registrations."""

from __future__ import annotations

import torch
from torch.nn import Parameter, ParameterList

import ampatch
from ampatch.apex.amp._amp_state import _amp_state
from ampatch.apex.amp.frontend import OVERRIDES
from ampatch.apex.amp.handle import AmpHandle, NoOpHandle
from ampatch.apex.amp.lists.edits import register_edits
from ampatch.levels.stack import LOG_ALONE

bfloat16_function = ampatch.bfloat16_function
float_function = ampatch.float_function
half_function = ampatch.half_function
promote_function = ampatch.promote_function
register_bfloat16_function = ampatch.register_bfloat16_function
register_float_function = ampatch.register_float_function
register_half_function = ampatch.register_half_function
register_promote_function = ampatch.register_promote_function


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle:
    """Patches torch as O1 does, for all models; returns a handle that scales losses.

    Functions cast tensors on the GPU, and on the CPU where there is none. `enable_caching` has no
    effect: the casts of weights are never stale.
    """
    if not enabled:
        with _amp_state.listening():
            _amp_state.switch_to(NoOpHandle())
        return _amp_state.handle
    allow_banned |= register_edits(OVERRIDES)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    everywhere = ParameterList([Parameter(torch.empty(0, device=device))])
    with _amp_state.listening():
        ampatch.initialize(
            everywhere, opt_level="O1", verbosity=2 if verbose else LOG_ALONE, allow_banned=allow_banned
        )
    level = _amp_state.opt_properties.opt_level
    if ampatch.OPT_LEVELS[level].casts_model:
        ampatch.uninitialize()
        patching = [name for name, policy in ampatch.OPT_LEVELS.items() if policy.patch_torch_functions]
        raise ampatch.AmpValueError(
            f"amp.init gets no models for {level} to cast, it patches torch's functions: use "
            f"--opt-level {' or '.join(patching)} with this script"
        )
    _amp_state.switch_to(AmpHandle(loss_scale, verbose))
    return _amp_state.handle
