"""Which modules of a half model run in float32: those that `keep_fp32` names, and others because of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from ampatch import lists
from ampatch.errors import AmpTypeError, AmpValueError
from ampatch.levels.precision import HALF_TYPES
from ampatch.models.cast_tensor import list_parts, own_tensors

Keep = str | type[Module] | Module

# They use the weights of their children without calling them, or write what those return into a tensor that
# has the type of their input. LinearCrossEntropyLoss came with torch 2.13.
_SINGLE = ("MultiheadAttention", "AdaptiveLogSoftmaxWithLoss", "LinearCrossEntropyLoss")
SINGLE_TYPES = tuple(getattr(torch.nn, name) for name in _SINGLE if hasattr(torch.nn, name))

_TRANSFORMER_LAYERS = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)


def normalize_keep(value: object, argument: str = "keep_fp32") -> tuple[Keep, ...]:
    """Reads `keep_fp32` or the like: one pattern, class or module, or a sequence of them."""
    if value is None:
        return ()
    single = isinstance(value, (str, type, Module)) or not isinstance(value, Iterable)
    entries = (value,) if single else tuple(value)  # type: ignore[arg-type]
    for entry in entries:
        is_class = isinstance(entry, type) and issubclass(entry, Module)
        if not (isinstance(entry, (str, Module)) or is_class):
            raise AmpTypeError(
                f"{argument} holds {entry!r}: expected names of modules (shell patterns), "
                f"classes of modules or modules"
            )
    return entries


def select_named(models: Sequence[Module], entries: Sequence[Keep], argument: str) -> list[Module]:
    """Returns the modules that an entry of an argument names; raises for an entry that names none."""
    named = [
        (name, module) for model in models for name, module in model.named_modules(remove_duplicate=False)
    ]
    selected: dict[int, Module] = {}
    for entry in entries:
        matches = _find(entry, named)
        if not matches:
            names = [name for name, _ in named if name]
            close = get_close_matches(entry, names) if isinstance(entry, str) else []
            known = ", ".join(map(repr, close or names[:8])) or "none"
            raise AmpValueError(
                f"{argument}: {entry!r} matches no module: expected the name, class or instance of one; "
                f"{'similar names' if close else 'the first modules'} are {known}"
            )
        selected.update((id(module), module) for module in matches)
    return list(selected.values())


def _find(entry: Keep, named: Sequence[tuple[str, Module]]) -> list[Module]:
    if isinstance(entry, type):
        return [module for _, module in named if isinstance(module, entry)]
    if isinstance(entry, Module):
        return [module for _, module in named if module is entry]
    # The model itself has the empty name, which "*" matches and "" must not. A name comes before a pattern:
    # that of a part of a ModuleDict may hold brackets and stars.
    exact = [module for name, module in named if entry == name != ""]
    return exact or [module for name, module in named if entry and fnmatchcase(name, entry)]


def find_half(module: Module) -> torch.dtype | None:
    """Returns the half type that a module computes in by itself; None where it holds no half tensor."""
    tensors = [tensor for user in _own_parts(module) for _, tensor in own_tensors(user)]
    return next((tensor.dtype for tensor in tensors if tensor.dtype in HALF_TYPES), None)


def add_owners(models: Iterable[Module], kept: Sequence[Module]) -> list[Module]:
    """Adds the modules that compute with a kept part of theirs as if it were their own."""
    inside = inner_ids(kept)
    return _add(models, kept, lambda part: any(id(own) in inside for own in _own_parts(part)))


def add_sharers(models: Iterable[Module], kept: Sequence[Module]) -> list[Module]:
    """Adds the modules that share a parameter with a kept one: tied weights have one dtype."""
    tensors = {id(param) for module in kept for param in module.parameters()}
    return _add(models, kept, lambda part: any(id(tensor) in tensors for _, tensor in own_tensors(part)))


def _add(models: Iterable[Module], kept: Sequence[Module], is_one: Callable[[Module], bool]) -> list[Module]:
    inside = inner_ids(kept)
    return [*kept, *(part for part in list_parts(models) if id(part) not in inside and is_one(part))]


def select_outermost(modules: Sequence[Module]) -> list[Module]:
    """Drops the modules that lie inside another one: the outer one's hooks serve them."""
    inside = {id(inner) for module in modules for inner in module.modules() if inner is not module}
    return [module for module in modules if id(module) not in inside]


def inner_ids(modules: Iterable[Module]) -> set[int]:
    return {id(inner) for module in modules for inner in module.modules()}


def select_without_kernel(models: Iterable[Module]) -> list[Module]:
    """Returns the modules that a CPU cannot run in half, of the models that are on one.

    A model without parameters may be called on any device, and counts as one on a CPU.
    """
    rows = lists.MODULES_ON_CPU.select(torch.__version__).rows
    classes = tuple(getattr(torch.nn, row.name) for row in rows)
    return [
        module
        for model in models
        if "cpu" in ({param.device.type for param in model.parameters()} or {"cpu"})
        for module in model.modules()
        if isinstance(module, classes)
    ]


def select_buffered(models: Iterable[Module]) -> list[Module]:
    """Returns the modules that compute with float32 buffers, and have no parameters.

    Rotary frequencies, tables of positions, frozen or moving averages: positions above 256 are rounded in
    bfloat16, and an average that moves by less than 1/256 of itself stays where it is. BatchNorm has a rule
    of its own; what has no forward is read by others, in their type.
    """
    return [
        module
        for module in list_parts(models)
        if type(module).forward is not Module.forward
        and not any(True for _ in module.parameters())
        and any(map(_has_float32_buffer, module.modules()))
    ]


def _has_float32_buffer(module: Module) -> bool:
    buffers = () if isinstance(module, _BatchNorm) else module.buffers(recurse=False)
    return any(buffer.dtype is torch.float32 for buffer in buffers)


def select_masked(models: Iterable[Module]) -> list[Module]:
    """Returns the attention that refuses a float32 mask among half weights, which older torch added in place.

    Inside a Transformer layer it takes one, and a hook would cost the layer its fast path.
    """
    parts = list_parts(models)
    layers = [part for part in parts if isinstance(part, _TRANSFORMER_LAYERS)]
    inside = {id(child) for layer in layers for child in layer.children()}
    attentions = [part for part in parts if isinstance(part, torch.nn.MultiheadAttention)]
    return [part for part in attentions if id(part) not in inside]


def _own_parts(module: Module) -> list[Module]:
    """A module, and those inside it whose tensors it computes with itself."""
    if isinstance(module, SINGLE_TYPES):
        return list(module.modules())
    return [module, *module.parametrizations.modules()] if is_parametrized(module) else [module]
