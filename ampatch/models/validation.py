"""Which models `initialize` takes: float32 modules of Python, and what to do about others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from ampatch.errors import AmpTypeError, AmpValueError
from ampatch.levels.policy import Policy
from ampatch.levels.precision import HALF_TYPES
from ampatch.models import hooks
from ampatch.models.cast_tensor import Float32Values

ValuesById = Mapping[int, Float32Values]  # what knows a tensor, by the tensor's id


def validate_models(models: Sequence[object], policy: Policy, values: ValuesById, allow_half: bool) -> None:
    """Raises for anything that is no Module, or not float32; several faults are told one at a time."""
    for index, model in enumerate(models):
        if not isinstance(model, Module):
            hint = ": models come first, then optimizers" if hasattr(model, "param_groups") else ""
            raise AmpTypeError(
                f"models[{index}] is a {type(model).__name__}: expected a torch.nn.Module or a list of "
                f"them{hint}"
            )
        if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
            raise AmpValueError(
                f"models[{index}] is wrapped in {type(model).__name__} already: call initialize on the "
                f"bare model, then wrap what it returns"
            )
        _validate_dtypes(index, model, policy, values, allow_half)
        if policy.patch_torch_functions and any(map(_turns_casts_off, model._forward_pre_hooks.values())):
            raise AmpValueError(
                f"models[{index}] runs without casts since an earlier initialize, by its opt level or its "
                f"keep_fp32: {policy.opt_level} would change nothing in it; call ampatch.uninitialize() "
                f"first, or pass a copy that was made before"
            )
        _validate_scripted(index, model, policy)


def _validate_dtypes(index: int, model: Module, policy: Policy, values: ValuesById, allow_half: bool) -> None:
    for name, param in model.named_parameters():
        if policy.casts_model and is_lazy(param):
            raise AmpValueError(
                f"models[{index}]: parameter {name!r} is not initialized yet: run one forward first, so "
                f"that {policy.opt_level} has a weight to cast"
            )
        is_half, was_cast = param.dtype in HALF_TYPES, is_known(param, values)
        if is_half and not was_cast and not allow_half:
            raise AmpValueError(
                f"models[{index}]: parameter {name!r} is {param.dtype} already: expected float32; "
                f"{_explain_half(model, values)}"
            )
        if is_half and was_cast and param.dtype is not policy.cast_model_type:
            raise AmpValueError(
                f"models[{index}]: parameter {name!r} was cast to {param.dtype} by an earlier initialize: "
                f"call ampatch.uninitialize() first, or give all models that share it one opt level"
            )


def _explain_half(model: Module, values: ValuesById) -> str:
    """Says how a half parameter of a model has come about, and what to do."""
    if any(is_known(param, values) for param in model.parameters()):
        return (
            "it came into the model after an earlier initialize, which has cast the others: call "
            "ampatch.uninitialize(), which makes all of them float32, then initialize again"
        )
    saving = [hook for part in model.modules() for hook in part._state_dict_hooks.values()]
    if any(isinstance(hook, hooks.SaveFloat32) for hook in saving):
        return (
            "it belongs to a copy of an initialized model, whose weights are half: copy before initialize, "
            "or call .float() on the copy, and copy.load_state_dict(model.state_dict()) for the exact values"
        )
    return (
        "remove .half() or .bfloat16() from the model, load it as float32 (dtype=torch.float32 of "
        "from_pretrained, precision='32-true' of Lightning): the opt level casts it "
        "(allow_half_params=True takes it as it is)"
    )


def _turns_casts_off(hook: object) -> bool:
    return isinstance(hook, hooks.EnterForward) and hook.off


def _validate_scripted(index: int, model: Module, policy: Policy) -> None:
    scripted = [name for name, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    patches_and_casts = policy.patch_torch_functions and policy.cast_model_type is not None
    casts_ends = policy.cast_model_outputs is not None or patches_and_casts
    # One that is scripted as a whole needs no hooks where neither weights, inputs nor outputs are cast.
    if scripted and (policy.casts_model or (not scripted[0] and casts_ends)):
        raise AmpValueError(
            f"models[{index}]: module {scripted[0]!r} is scripted, and cannot have hooks: expected a "
            f"model of Python modules; script it after ampatch.uninitialize(), or use opt_level='O1' or 'O4' "
            f"without cast_model_type and cast_model_outputs"
        )


def is_known(tensor: Tensor, values: ValuesById) -> bool:
    """Whether a tensor was cast here; `values` may have those of a module that it is new in."""
    found = values.get(id(tensor))
    return found is not None and tensor in found
