"""One model under a policy: checked, weights cast, chosen modules kept float32, hooks in place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from ampatch.casts.kernels import flatten_parameters
from ampatch.errors import AmpTypeError, AmpValueError
from ampatch.levels.policy import Policy
from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.private import gather_anew
from ampatch.levels.ranks import select_sharded
from ampatch.levels.undo import weakly
from ampatch.models import hooks
from ampatch.models.cast_tensor import CastModule, CastTensor, Float32Values, Shared, list_parts, own_tensors
from ampatch.models.float8 import convert_to_float8
from ampatch.models.float32_parts import (
    Keep,
    add_owners,
    add_sharers,
    find_half,
    inner_ids,
    select_buffered,
    select_masked,
    select_outermost,
    select_without_kernel,
)
from ampatch.models.hooks import ExplainMismatch, replace_methods, restore_methods
from ampatch.models.rounding import Effect


def select_python(models: Sequence[Module]) -> list[Module]:
    """Leaves out models that are scripted as a whole, which take no hooks."""
    return [model for model in models if not isinstance(model, torch.jit.ScriptModule)]


class ModelCaster:
    """Casts the models of one call; `undo` receives the way back, which keeps no module alive.

    `values` are those of earlier calls, by the id of the tensor. Those that are made here live on the hooks
    of their module.
    """

    def __init__(
        self,
        models: Sequence[Module],
        policy: Policy,
        kept: Sequence[Module],
        values: ValuesById,
        shared: Shared,
        undo: ExitStack,
    ) -> None:
        self._models = models
        self._policy = policy
        self._values, self._shared = dict(values), shared
        self.by_module: dict[int, Float32Values] = {}
        self._parts: list[CastModule] = []
        asked = add_owners(models, kept)
        self._asked = inner_ids(asked)
        self._returns_float32 = bool(asked) and policy.casts_model  # among half modules, which cast it
        lacking = select_without_kernel(models) if policy.casts_model else []
        if policy.casts_model and policy.keep_batchnorm_fp32:
            lacking += select_buffered(models)
        self._as_given = {id(module) for module in lacking} - self._asked
        self._kept = select_outermost(add_sharers(models, list(dict.fromkeys([*asked, *lacking]))))
        self._cast: list[CastTensor] = []
        self._cast_ids: Collection[int] = ()
        self.rounded: dict[Effect, list[str]] = {}  # tensors that no step trains, by what half does to them
        self.float8: dict[Module, str] = {}  # of linear layers why they are not in float8, "" if they are
        self._stack = undo

    def open(self, float8_layers: Sequence[Keep], known: Mapping[Module, str]) -> None:
        """Casts the weights, registers the hooks, and makes layers that gain those of float8, but `known`."""
        if self._policy.has_half_weights:
            self._cast_weights(self._policy.cast_model_type if self._policy.casts_model else None)
        for module in self._kept:
            hook = self._keep_inside if id(module) in self._as_given else self._keep
            hook(module)
        if self._policy.casts_model:
            self._hook_entries()
        for model in select_python(self._models):
            self._hook_forward(model)
        self.float8 = convert_to_float8(
            self._models, self._policy, self._kept, float8_layers, known, self._stack
        )

    def list_casts(self, params: Iterable[Tensor]) -> list[CastTensor]:
        """The casts of some parameters."""
        ids = set(map(id, params))
        return [cast for cast in self._cast if id(cast.tensor) in ids]

    def list_values(self, modules: Iterable[Module]) -> list[Float32Values]:
        """The float32 values behind the tensors of modules."""
        ids = [id(tensor) for module in modules for _, tensor in own_tensors(module)]
        known = [self._values[key] for key in ids if key in self._values]
        return list({id(values): values for values in known}.values())

    def name_buffered(self) -> dict[int, str]:
        """Names the modules without parameters that compute in float32, for each inside them, by its id."""
        names = {part: name for model in self._models for name, part in model.named_modules()}
        buffered = set(select_buffered(self._models)) if self._as_given else set()
        owners = [one for one in self._kept if id(one) in self._as_given and one in buffered]
        return {id(part): names[owner] for owner in owners for part in owner.modules()}

    def forget_originals(self) -> None:
        """Frees the float32 values that no master stands for; they cannot be restored afterwards."""
        for cast in self._cast:
            weight = self._values[id(cast.tensor)].get(cast.tensor)
            if weight.master is None:
                weight.remember(None)

    # Weights

    def _cast_weights(self, dtype: torch.dtype | None) -> None:
        recurrent = [part for part in list_parts(self._models) if isinstance(part, torch.nn.RNNBase)]
        # On CUDA the weights of a recurrent net share one block of memory, which a cast breaks up.
        for module in recurrent:
            self._stack.callback(weakly(type(module).flatten_parameters, module))  # last, on restored weights
        sharded = select_sharded(list_parts(self._models))
        self._stack.callback(weakly(gather_anew, *sharded))
        self._find_tensors(dtype)
        self._hook_state_dicts()  # undone after the casts: the hooks keep alive what undoes these
        self._stack.callback(weakly(CastModule.cast_newcomers, *self._parts))
        self._stack.callback(weakly(CastTensor.restore, *self._cast))
        for cast in self._cast:
            effect = cast.find_effect(dtype)
            if effect is not None:
                self.rounded.setdefault(effect, []).append(cast.describe())
            cast.cast(dtype)
        for module in recurrent:
            flatten_parameters(module)
        for module in sharded:
            gather_anew(module)

    def _find_tensors(self, dtype: torch.dtype | None) -> None:
        """Lists what to cast, if there is a `dtype`; a tensor has the values of the first module it is in."""
        float32 = self._float32_tensors()
        casts: dict[int, CastTensor] = {}
        for module in list_parts(self._models):
            values = self.by_module[id(module)] = Float32Values(self._shared)
            part = CastModule(module, dtype, values)
            for name, tensor in own_tensors(module):
                known = self._values.setdefault(id(tensor), values)
                if dtype is not None and tensor.dtype is torch.float32 and id(tensor) not in float32:
                    cast = casts.setdefault(id(tensor), CastTensor(module, name, tensor, known))
                    part.casts.append(cast)
            self._parts.append(part)
        self._cast = list(casts.values())
        self._cast_ids = casts.keys()

    def _float32_tensors(self) -> set[int]:
        keeping = [inner for module in self._kept for inner in module.modules()]
        if self._policy.keep_batchnorm_fp32:
            keeping += [module for module in list_parts(self._models) if isinstance(module, _BatchNorm)]
        return {id(tensor) for module in keeping for _, tensor in own_tensors(module)}

    # Hooks

    def _hook_state_dicts(self) -> None:
        # Modules that hold nothing half, too: they may come to hold some.
        for module, part in zip(list_parts(self._models), self._parts, strict=True):
            values = [self.by_module[id(module)], *self.list_values([module])]
            save, load = hooks.SaveFloat32(values, part), hooks.LoadFloat32(values, part)
            self._stack.callback(module.register_state_dict_post_hook(save).remove)
            self._stack.callback(module.register_load_state_dict_pre_hook(load).remove)

    def _keep(self, outer: Module) -> None:
        """Lets a module run in float32 inside a half model, or among patched functions.

        Its parts are hooked one by one, for a container that is never called itself. It returns float32,
        unless all that asked for it was a weight that is tied to a kept one.
        """
        is_asked = not self._asked.isdisjoint(inner_ids([outer]))
        for module in outer.modules():
            self._hook_inputs(module, hooks.CastInputs(torch.float32))
            self._hook_scope(module, hooks.EnterForward(True, torch.float32))
            if not is_asked:
                self._hook_outputs(module, None, keeps_losses=True)

    def _keep_inside(self, module: Module) -> None:
        """Lets a module compute in float32, and return the type that it is given."""
        # In this order, so that the forward is on record when its input is not cast yet, and its output is.
        self._hook_outputs(module, None, keeps_losses=True)
        self._hook_scope(module, hooks.EnterAsGiven(True, torch.float32))
        self._hook_inputs(module, hooks.CastInputs(torch.float32))
        for part in module.modules():
            self._stack.callback(weakly(restore_methods, part))
            replace_methods(part)

    def _hook_entries(self) -> None:
        """Has the half modules take what kept ones return, and attention float32 masks."""
        served = inner_ids(self._kept) | {id(model) for model in self._models}
        parts = list_parts(self._models) if self._returns_float32 else select_masked(self._models)
        for module in parts:
            half = find_half(module)
            if half is not None and id(module) not in served:
                self._hook_inputs(module, hooks.CastEntry(half, weight=self._find_cast(module)))

    def _hook_forward(self, model: Module) -> None:
        policy = self._policy
        if model not in self._kept:
            weight = self._find_cast(model)
            if policy.cast_model_type is not None:
                self._hook_inputs(model, hooks.CastInputs(policy.cast_model_type, weight=weight))
            patches = policy.patch_torch_functions
            enter = hooks.EnterForward(not patches, None if patches else policy.cast_model_type, weight)
            self._hook_scope(model, enter)
        self._hook_outputs(model, policy.output_dtype, inside=not self._returns_float32)
        if policy.casts_model:
            explain = ExplainMismatch(policy.cast_model_type)
            self._stack.callback(model.register_forward_hook(explain, always_call=True).remove)

    def _find_cast(self, module: Module) -> Tensor | None:
        """A weight of a module that was cast; `Module.to` casts it again, and keeps the object."""
        return next((param for param in module.parameters() if id(param) in self._cast_ids), None)

    def _hook_scope(self, module: Module, enter: hooks.EnterForward) -> None:
        self._stack.callback(module.register_forward_pre_hook(enter).remove)
        leave = hooks.ExitForward()
        # Always: a forward that raised must not stay on record, and its tensors alive with it.
        self._stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    def _hook_inputs(self, module: Module, hook: hooks.CastInputs) -> None:
        self._stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _hook_outputs(self, module: Module, alone: torch.dtype | None, **how: bool) -> None:
        if alone is not None or self._policy.casts_model:
            hook = hooks.CastOutputs(alone, **how)
            self._stack.callback(module.register_forward_hook(hook).remove)


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
        entries = [one for one in model._forward_pre_hooks.values() if isinstance(one, hooks.EnterForward)]
        if policy.patch_torch_functions and any(entry.off for entry in entries):
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
    owner = values.get(id(tensor))
    return owner is not None and tensor in owner
