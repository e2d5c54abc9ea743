"""Which linear layers compute in float8 at O6, and how torchao's layer takes their place and leaves it."""

from __future__ import annotations

import html
import importlib
import importlib.util
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version

import torch
from torch.nn import Linear, Module

from ampatch.errors import AmpError, AmpValueError
from ampatch.levels.float8 import EMULATE, INSTALL, emulates, find_recipe
from ampatch.levels.policy import Policy
from ampatch.levels.precision import ELIGIBLE
from ampatch.levels.ranks import is_sharded
from ampatch.levels.stack import logger
from ampatch.levels.undo import weakly
from ampatch.models.cast_tensor import list_parts
from ampatch.models.float32_parts import SINGLE_TYPES, Keep, inner_ids, select_named

IN_FLOAT8 = "float8"
LATE = "it was added after initialize, or is a copy of a layer that is not in float8"
FITTING = "torchao 0.18 with torch 2.11 and later, or torchao 0.13 with torch 2.6 to 2.8"  # as tried


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer: its name, its size, and why it does not compute in float8; "" if it does."""

    name: str
    size: tuple[int, int]  # features in and out
    because: str

    def __str__(self) -> str:
        where = f"not in float8: {self.because}" if self.because else IN_FLOAT8
        return f"{self.name or 'the model'} ({self.size[0]} -> {self.size[1]}): {where}"


@dataclass(frozen=True, slots=True)
class LayersExplained:
    """Which linear layers of a model compute in float8 at O6, and why others do not; `str` writes it out."""

    layers: tuple[Layer, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.layers)) or "no torch.nn.Linear"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


class Float8Choice:
    """Chooses the layers of models that compute in float8, by a recipe and by what a script asks for.

    `kept` are modules that stay as they are. `asked` are entries as in `keep_fp32`, of layers that compute in
    float8 whatever their size and place; None asks for none.
    """

    def __init__(
        self, models: Sequence[Module], recipe: str, kept: Iterable[Module] = (), asked: Sequence[Keep] = ()
    ) -> None:
        self._models = models
        self._recipe = find_recipe(recipe)
        self._kept = inner_ids(kept)
        self._asked = inner_ids(select_named(models, asked, "float8_layers"))
        self._last = set(map(id, _select_last(models)))
        self._uncalled = inner_ids(part for part in list_parts(models) if isinstance(part, SINGLE_TYPES))

    def asks(self, layer: Linear) -> bool:
        return id(layer) in self._asked

    def layers(self) -> Iterator[tuple[Linear, Layer]]:
        """Yields each linear layer of the models, with what becomes of it."""
        visited: set[int] = set()
        for model in self._models:
            for name, part in model.named_modules():
                if isinstance(part, Linear) and id(part) not in visited:
                    visited.add(id(part))
                    yield part, Layer(name, (part.in_features, part.out_features), self._find_reason(part))

    def _find_reason(self, layer: Linear) -> str:
        """Says why a layer stays as it is, "" if it does not."""
        sizes = layer.in_features, layer.out_features
        if id(layer) in self._kept:
            return "keep_fp32 names it, or a module around it"
        if is_float8(layer):
            return ""
        if not _is_plain(layer):
            return "it is not a plain torch.nn.Linear (it has a class or a forward of its own)"
        if id(layer) in self._uncalled:
            return "the module around it uses its weight without calling it"
        if layer.weight.dtype not in ELIGIBLE:
            return f"its weight is {layer.weight.dtype}, which is not cast"
        if any(size % 16 for size in sizes):
            return "its sizes are not multiples of 16, which float8 products need"
        if self.asks(layer):
            return ""
        if not self._recipe.gains(layer.out_features, layer.in_features):
            return f"too small to gain: {self._recipe.sizes} features are needed"
        return "it is the last one, before the loss" if id(layer) in self._last else ""


def _is_plain(layer: Linear) -> bool:
    """Whether a layer computes as `torch.nn.Linear` does; FSDP2 puts a class of its own around that one."""
    cls = type(layer)
    is_linear = cls is Linear or (is_sharded(layer) and Linear in cls.__bases__)
    return is_linear and "forward" not in vars(layer)


def _select_last(models: Sequence[Module]) -> Iterator[Linear]:
    """Yields the layers whose outputs a loss sees: the last of a model, and those tied to an embedding."""
    tied = {id(part.weight) for part in list_parts(models) if isinstance(part, torch.nn.Embedding)}
    for model in models:
        linear = [part for part in model.modules() if isinstance(part, Linear)]
        yield from linear[-1:]
        yield from (layer for layer in linear if id(layer.weight) in tied)


def is_float8(module: Module) -> bool:
    """Whether a module is a layer in float8 of ours; asks the class, so that torchao need not be there."""
    return hasattr(type(module), "ampatch_stands_for")


def explain_layers(model: Module, recipe: str, known: Mapping[Module, str]) -> LayersExplained:
    """Says of each linear layer of a model whether it computes in float8, or would at O6, and why not.

    `known` are the reasons of layers that a session has chosen among.
    """
    layers = list(Float8Choice([model], recipe).layers())
    if any(linear in known or is_float8(linear) for linear, _ in layers):
        late = {linear: LATE for linear, layer in layers if not (layer.because or is_float8(linear))}
        known = late | dict(known)
    return LayersExplained(
        tuple(replace(layer, because=known.get(linear, layer.because)) for linear, layer in layers)
    )


def convert_to_float8(
    models: Sequence[Module],
    policy: Policy,
    kept: Iterable[Module],
    asked: Sequence[Keep],
    known: Mapping[Module, str],
    undo: ExitStack,
) -> dict[Module, str]:
    """Makes the layers that gain torchao's, in place, where a policy says so; `undo` receives the way back.

    Models, parameters and optimizers stay the objects that they are. Returns why each linear layer is not
    one, "" for those that are; `known` is what earlier calls returned. Raises AmpError without torchao, and
    AmpValueError on a device that has no float8 products.
    """
    recipe = policy.float8_recipe
    for copied in [part for part in list_parts(models) if is_float8(part) and part not in known]:
        _import_layer().restore(copied)  # of a layer in float8: for good, as nothing else would
    names = [name for model in models for name, part in model.named_modules() if is_float8(part)]
    if recipe is None and names:
        raise AmpValueError(
            f"module {names[0]!r} computes in float8 since an earlier initialize: call "
            f"ampatch.uninitialize() first, or pass a copy"
        )
    if recipe is None:
        return {}
    choice = Float8Choice(models, recipe, kept, asked)
    layers = list(choice.layers())
    chosen = [linear for linear, layer in layers if not layer.because]
    if layers:  # without one, as where functions alone are tested, the device does not matter
        _validate_devices(models, policy)
        float8 = _import_layer()
        undo.callback(weakly(float8.restore, *(linear for linear in chosen if not is_float8(linear))))
        attributes = float8.make_attributes(recipe, emulates())
        for linear in chosen:
            float8.replace(linear, attributes)
    if not chosen:
        logger.warning(
            "%s: no linear layer computes in float8, so this is O4 (%s); choose layers with float8_layers=",
            policy.opt_level,
            _list_reasons(layer for _, layer in layers) or "the models have no torch.nn.Linear",
        )
    if refused := _list_reasons(layer for linear, layer in layers if layer.because and choice.asks(linear)):
        logger.warning("float8_layers names layers that cannot be in float8: %s", refused)
    return {linear: layer.because for linear, layer in layers}


def _list_reasons(layers: Iterable[Layer]) -> str:
    return "; ".join(map(str, itertools.islice(layers, 3)))


def _import_layer():  # type: ignore[no-untyped-def]  # a module, which needs torchao
    if importlib.util.find_spec("torchao") is None:
        raise AmpError(f"O6 needs torchao, which is not installed: {INSTALL}")
    try:
        return importlib.import_module("ampatch.models.float8_linear")
    except (ImportError, AttributeError, TypeError) as error:
        raise AmpError(
            f"O6 cannot use torchao {version('torchao')} with torch {torch.__version__} ({error}): expected "
            f"{FITTING}"
        ) from error


def _validate_devices(models: Sequence[Module], policy: Policy) -> None:
    devices = {param.device for model in models for param in model.parameters()}
    recipe = find_recipe(policy.float8_recipe)
    lacks = sorted(filter(None, map(recipe.find_lack, devices)))
    if lacks:
        raise AmpValueError(
            f"{policy.opt_level} (float8_recipe={policy.float8_recipe!r}): {lacks[0]}. Put the model on a "
            f"GPU that has them (H100, RTX 40 and later) before initialize, use opt_level='O4', or set "
            f"{EMULATE}=1 to try its accuracy, slowly"
        )


def describe(models: Sequence[Module]) -> str:
    """Says how many linear layers of models compute in float8."""
    linear = [part for part in list_parts(models) if isinstance(part, Linear)]
    count = sum(map(is_float8, linear))
    how = f"emulated ({EMULATE}), which is slow" if emulates() else "fast if torch.compile compiles the model"
    return f"{count} of {len(linear)} linear layers compute in float8; {how}"
