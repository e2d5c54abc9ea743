"""`initialize` and the checkpoint functions of apex.amp, on those of ampatch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, MutableMapping
from types import MappingProxyType

import torch
from torch.nn import Parameter, ParameterList

import ampatch as amp
from ampatch.apex.amp._amp_state import Properties, _amp_state, attach, list_options
from ampatch.apex.amp.handle import AmpHandle, NoOpHandle
from ampatch.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from ampatch.apex.amp.lists.edits import register_edits
from ampatch.apex.fp16_utils import FP16_Optimizer
from ampatch.levels.ranks import say
from ampatch.levels.stack import LOG_ALONE

__all__ = ["Properties", "initialize", "load_state_dict", "opt_levels", "state_dict"]


def set_level(policy: amp.Policy, properties: Properties) -> Properties:
    """Sets the defaults of a level on options, and returns them."""
    properties.update(list_options(policy))
    return properties


opt_levels = MappingProxyType(
    {name: functools.partial(set_level, policy) for name, policy in amp.OPT_LEVELS.items()}
)

PLACE_OF_LEVEL = 4  # among what is passed by position
OVERRIDES = (functional_overrides, torch_overrides, tensor_overrides)


@functools.wraps(amp.initialize)
def initialize(*args: object, **kwargs: object) -> object:
    """Does what `ampatch.initialize` does, and shows it under apex's private names as well."""
    if _amp_state.allow_incoming_model_not_fp32:
        kwargs.setdefault("allow_half_params", True)
    if register_edits(OVERRIDES):
        kwargs.setdefault("allow_banned", True)
    optimizers = kwargs.get("optimizers", args[1] if len(args) > 1 else None)
    optimizers = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    if kwargs.get("enabled", args[2] if len(args) > 2 else True):
        _refuse_fp16_optimizers(optimizers)
    if len(args) < PLACE_OF_LEVEL and kwargs.get("opt_level") is None:
        kwargs["opt_level"] = "O1"
    with _amp_state.listening():
        returned = amp.initialize(*args, **kwargs)
        bound = inspect.signature(amp.initialize).bind(*args, **kwargs)
        bound.apply_defaults()
        for name in ("verbosity", "min_loss_scale", "max_loss_scale"):
            setattr(_amp_state, name, bound.arguments[name])
        if _amp_state.was_enabled:
            if _amp_state.verbosity >= 1:
                say(format_options(_amp_state.policy))
            for optimizer in optimizers:
                _amp_state.attached += attach(optimizer)
    return returned


def _refuse_fp16_optimizers(optimizers: Iterable[object]) -> None:
    for index, optimizer in enumerate(optimizers):
        if isinstance(optimizer, FP16_Optimizer):
            raise amp.AmpTypeError(
                f"optimizers[{index}] is an FP16_Optimizer, which has masters and a loss scale of its own: "
                f"expected the optimizer inside it; initialize does what FP16_Optimizer did"
            )


def format_options(policy: amp.Policy) -> str:
    """The options of a policy, a line each, with the level's default where it differs."""
    overridden = policy.overridden()
    lines = []
    for name, value in policy.options().items():
        mark = f"  (overrides {overridden[name]})" if name in overridden else ""
        lines.append(f"  {name:<27}: {value}{mark}")
    return "\n".join(lines)


def _signature() -> inspect.Signature:
    """That of `ampatch.initialize` with apex's default of the level."""
    signature = inspect.signature(amp.initialize)
    parameters = dict(signature.parameters)
    parameters["opt_level"] = parameters["opt_level"].replace(default="O1")
    return signature.replace(parameters=list(parameters.values()))


# `inspect.getfullargspec`, by which trainers select the arguments, does not look behind a wrapper.
initialize.__signature__ = _signature()  # type: ignore[attr-defined]


def state_dict(destination: MutableMapping | None = None) -> MutableMapping:
    """Returns the state of the loss scalers of the last `initialize`, in `destination` if there is one."""
    destination = {} if destination is None else destination
    destination.update(amp.state_dict(of_last_call=True))
    return destination


def load_state_dict(state_dict: MutableMapping) -> None:
    """Restores the loss scalers of the last `initialize`; see `ampatch.load_state_dict`."""
    amp.load_state_dict(state_dict, of_last_call=True)


bfloat16_function = amp.bfloat16_function
float_function = amp.float_function
half_function = amp.half_function
promote_function = amp.promote_function
register_bfloat16_function = amp.register_bfloat16_function
register_float_function = amp.register_float_function
register_half_function = amp.register_half_function
register_promote_function = amp.register_promote_function


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
        amp.initialize(
            everywhere, opt_level="O1", verbosity=2 if verbose else LOG_ALONE, allow_banned=allow_banned
        )
    level = _amp_state.opt_properties.opt_level
    if amp.OPT_LEVELS[level].casts_model:
        amp.uninitialize()
        patching = [name for name, policy in amp.OPT_LEVELS.items() if policy.patch_torch_functions]
        raise amp.AmpValueError(
            f"amp.init has no models that {level} could cast, it only patches torch's functions: "
            f"use --opt-level {' or '.join(patching)} with this script"
        )
    _amp_state.switch_to(AmpHandle(loss_scale, verbose))
    return _amp_state.handle
