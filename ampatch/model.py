"""One model under a policy: weights cast, chosen modules kept float32, hooks in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from ampatch.cast import CastState
from ampatch.cast_tensor import CastTensor, cast_newcomers, list_parts, own_tensors
from ampatch.errors import AmpTypeError, AmpValueError
from ampatch.hooks import (
    CastEntry,
    CastInputs,
    CastOutputs,
    EnterAsGiven,
    EnterForward,
    ExitForward,
    LoadFloat32,
    SaveFloat32,
)
from ampatch.kept import (
    add_owners,
    add_sharers,
    find_half,
    inner_ids,
    select_outermost,
    select_without_kernel,
)
from ampatch.policy import Policy
from ampatch.precision import HALF_TYPES
from ampatch.values import Float32Values

Keep = str | type[Module] | Module


def validate_models(
    models: Sequence[object], policy: Policy, values: Float32Values, allow_half: bool
) -> None:
    """Raises for anything that is no Module, or not float32; several faults are told one at a time."""
    for index, model in enumerate(models):
        if not isinstance(model, Module):
            raise AmpTypeError(
                f"models[{index}] is a {type(model).__name__}: expected a torch.nn.Module or a list of them"
            )
        if isinstance(model, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
            raise AmpValueError(
                f"models[{index}] is wrapped in {type(model).__name__} already: call initialize on the "
                f"bare model, then wrap what it returns"
            )
        _validate_dtypes(index, model, policy, values, allow_half)
        _validate_scripted(index, model, policy)


def _validate_dtypes(
    index: int, model: Module, policy: Policy, values: Float32Values, allow_half: bool
) -> None:
    for name, param in model.named_parameters():
        if policy.casts_model and is_lazy(param):
            raise AmpValueError(
                f"models[{index}]: parameter {name!r} is not initialized yet: run one forward first, so "
                f"that {policy.opt_level} has a weight to cast"
            )
        if param.dtype in HALF_TYPES and param not in values:
            if allow_half:
                continue
            raise AmpValueError(
                f"models[{index}]: parameter {name!r} is {param.dtype} already: expected float32; remove "
                f".half() or .bfloat16() from the model, the opt level casts it (a copy of an initialized "
                f"model must be made before initialize; allow_half_params=True takes it as it is)"
            )
        if param.dtype in HALF_TYPES and not policy.casts_model:
            raise AmpValueError(
                f"models[{index}]: parameter {name!r} was cast to {param.dtype} by an earlier initialize: "
                f"use that opt level for both, or uninitialize first"
            )


def _validate_scripted(index: int, model: Module, policy: Policy) -> None:
    scripted = [name for name, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    # One that is scripted as a whole needs no hooks where neither weights nor outputs are cast.
    if scripted and (policy.casts_model or (not scripted[0] and policy.cast_model_outputs is not None)):
        raise AmpValueError(
            f"models[{index}]: module {scripted[0]!r} is scripted, and takes no hooks: expected a "
            f"model of Python modules; script it after uninitialize, or use opt_level='O1' or 'O4' without "
            f"cast_model_outputs"
        )


def select_python(models: Sequence[Module]) -> list[Module]:
    """Leaves out models that are scripted as a whole, which take no hooks."""
    return [model for model in models if not isinstance(model, torch.jit.ScriptModule)]


def normalize_keep(keep_fp32: object) -> tuple[Keep, ...]:
    """Reads `keep_fp32`: one pattern, class or module, or a sequence of them."""
    if keep_fp32 is None:
        return ()
    single = isinstance(keep_fp32, str | type | Module) or not isinstance(keep_fp32, Iterable)
    entries = (keep_fp32,) if single else tuple(keep_fp32)  # type: ignore[arg-type]
    for entry in entries:
        is_class = isinstance(entry, type) and issubclass(entry, Module)
        if not (isinstance(entry, str | Module) or is_class):
            raise AmpTypeError(
                f"keep_fp32 holds {entry!r}: expected names of modules (shell patterns), "
                f"classes of modules or modules"
            )
    return entries


def select_kept(models: Sequence[Module], keep_fp32: Sequence[Keep]) -> list[Module]:
    """Returns the modules that an entry of `keep_fp32` names; raises for an entry that names none."""
    named = [
        (name, module) for model in models for name, module in model.named_modules(remove_duplicate=False)
    ]
    kept: dict[int, Module] = {}
    for entry in keep_fp32:
        found = [module for name, module in named if _matches(entry, name, module)]
        if not found:
            known = ", ".join(repr(name) for name, _ in named[:8] if name)
            raise AmpValueError(
                f"keep_fp32: {entry!r} matches no module: expected the name, class or instance of one; "
                f"the modules begin with {known or 'none'}"
            )
        kept.update((id(module), module) for module in found)
    return list(kept.values())


def _matches(entry: Keep, name: str, module: Module) -> bool:
    if isinstance(entry, str):
        # The model itself has the empty name, which "*" matches and "" must not.
        return bool(entry) and fnmatchcase(name, entry)
    return isinstance(module, entry) if isinstance(entry, type) else module is entry


class ModelCaster:
    """Casts the models of one call, and puts them back."""

    def __init__(
        self,
        models: Sequence[Module],
        policy: Policy,
        kept: Sequence[Module],
        state: CastState,
        values: Float32Values,
    ) -> None:
        self._models = models
        self._policy = policy
        self._state = state
        self._values = values
        asked = add_owners(models, kept)
        self._asked = inner_ids(asked)
        self._returns_float32 = bool(asked) and policy.casts_model  # amid half modules, which cast it
        lacking = select_without_kernel(models) if policy.casts_model else []
        self._without_kernel = {id(module) for module in lacking} - self._asked
        self._kept = select_outermost(add_sharers(models, list(dict.fromkeys([*asked, *lacking]))))
        self._cast: list[CastTensor] = []
        self._stack = ExitStack()

    def open(self) -> None:
        """Casts the weights and registers the hooks; `close` undoes what was done so far."""
        if self._policy.cast_model_type is not None:
            self._cast_weights(self._policy.cast_model_type)
            self._hook_state_dicts()
        for module in self._kept:
            hook = self._replace_kernel if id(module) in self._without_kernel else self._keep
            hook(module)
        if self._returns_float32:
            self._hook_entries()
        for model in select_python(self._models):
            self._hook_forward(model)

    def close(self) -> None:
        """Removes the hooks, and gives the weights their float32 values back."""
        self._stack.close()

    def forget_originals(self) -> None:
        """Frees the float32 values that no master stands for; they cannot be restored afterwards."""
        for cast in self._cast:
            if self._values.find_pair(cast.tensor) is None:
                self._values.release(cast.tensor)

    # Weights

    def _cast_weights(self, dtype: torch.dtype) -> None:
        float32 = self._float32_tensors()
        self._stack.callback(self._flatten_recurrent)  # runs last, on restored weights
        self._stack.callback(cast_newcomers(self._models, dtype))
        for module in list_parts(self._models):
            for name, tensor in own_tensors(module):
                if tensor.dtype is torch.float32 and id(tensor) not in float32:
                    cast = CastTensor(module, name, tensor, self._values)
                    self._stack.callback(cast.restore)
                    self._cast.append(cast)
                    cast.cast(dtype)
        self._flatten_recurrent()

    def _float32_tensors(self) -> set[int]:
        """The tensors that stay float32, by identity."""
        keeping = [inner for module in self._kept for inner in module.modules()]
        if self._policy.keep_batchnorm_fp32:
            keeping += [module for module in list_parts(self._models) if isinstance(module, _BatchNorm)]
        return {id(tensor) for module in keeping for _, tensor in own_tensors(module)}

    def _flatten_recurrent(self) -> None:
        # On CUDA the weights of a recurrent net share one block of memory, which a cast breaks up.
        for module in list_parts(self._models):
            if isinstance(module, torch.nn.RNNBase):
                module.flatten_parameters()

    # Hooks

    def _hook_state_dicts(self) -> None:
        known = {id(cast.tensor) for cast in self._cast}
        by_module: dict[int, list[CastTensor]] = defaultdict(list)
        for cast in self._cast:
            by_module[id(cast.module)].append(cast)
        for module in list_parts(self._models):
            tensors = [tensor for _, tensor in own_tensors(module)]
            if any(id(tensor) in known or self._came_half(tensor) for tensor in tensors):
                own = by_module[id(module)]
                save, load = SaveFloat32(self._values, own), LoadFloat32(self._values, own)
                self._stack.callback(module.register_state_dict_post_hook(save).remove)
                self._stack.callback(module.register_load_state_dict_pre_hook(load).remove)

    def _came_half(self, tensor: Tensor) -> bool:
        return tensor.dtype in HALF_TYPES and tensor not in self._values

    def _keep(self, kept: Module) -> None:
        """Lets a module run in float32 amid a half model, or amid patched functions.

        Its parts are hooked one by one, for a container that is never called itself. It returns float32,
        unless all that asked for it was a weight that is tied to a kept one.
        """
        is_asked = not self._asked.isdisjoint(inner_ids([kept]))
        for module in kept.modules():
            self._hook_inputs(module, torch.float32)
            self._hook_scope(module, EnterForward(self._state, True, torch.float32))
            if not is_asked:
                self._hook_outputs(module, None, keeps_losses=True)

    def _replace_kernel(self, module: Module) -> None:
        """Lets a module that a CPU has no half kernel for take and return half there, as on a GPU."""
        # In this order, so that the forward is on record when its input is not cast yet, and its output is.
        self._hook_outputs(module, None, keeps_losses=True)
        self._hook_scope(module, EnterAsGiven(self._state, True, torch.float32))
        self._hook_inputs(module, torch.float32)

    def _hook_entries(self) -> None:
        """Has the half modules take what kept ones return."""
        served = inner_ids(self._kept) | {id(model) for model in self._models}
        for module in list_parts(self._models):
            half = find_half(module)
            if half is not None and id(module) not in served:
                handle = module.register_forward_pre_hook(CastEntry(half), with_kwargs=True)
                self._stack.callback(handle.remove)

    def _hook_forward(self, model: Module) -> None:
        policy = self._policy
        if model not in self._kept:
            if policy.input_dtype is not None:
                self._hook_inputs(model, policy.input_dtype)
            enter = EnterForward(self._state, not policy.patch_torch_functions, policy.input_dtype)
            self._hook_scope(model, enter)
        self._hook_outputs(model, policy.output_dtype, inside=not self._returns_float32)

    def _hook_scope(self, module: Module, enter: EnterForward) -> None:
        self._stack.callback(module.register_forward_pre_hook(enter).remove)
        leave = ExitForward(self._state)
        # Always: a forward that raised must not stay on record, and its tensors alive with it.
        self._stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    def _hook_inputs(self, module: Module, dtype: torch.dtype) -> None:
        handle = module.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True)
        self._stack.callback(handle.remove)

    def _hook_outputs(self, module: Module, alone: torch.dtype | None, **how: bool) -> None:
        if alone is not None or self._policy.casts_model:
            hook = CastOutputs(self._state, alone, **how)
            self._stack.callback(module.register_forward_hook(hook).remove)
