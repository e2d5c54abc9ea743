"""Half weights that train wrongly without an error: averaged, saved, or made after `initialize`."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.swa_utils import AveragedModel

from ampatch.levels.precision import HALF_TYPES
from ampatch.patching.patcher import Patcher, SessionPatch
from ampatch.watching.misuse.warner import Warner

if TYPE_CHECKING:
    from ampatch.levels.stack import Line
    from ampatch.session.members import Members
    from ampatch.steps.optimizer import AmpOptimizer


class HalfWatch(SessionPatch):
    """Watches half weights that are averaged or saved."""

    def __init__(self, warner: Warner, members: Members) -> None:
        super().__init__()
        self._warner = warner
        self._members = members
        self.forget()

    def forget(self) -> None:
        """Drops what was seen."""
        self._models: list[tuple[weakref.ref[Module], bool]] = []  # and if their half weights have masters
        self._savers: set[type] = set()  # whose save_pretrained is patched

    def patch(self, patcher: Patcher) -> None:
        """Has averages in float32 made of masters; `AveragedModel` has no hooks."""
        update = AveragedModel.update_parameters

        @functools.wraps(update)
        def update_parameters(averaged: AveragedModel, model: Module) -> None:
            update(averaged, self._find_precise(averaged, model))

        patcher.replace(AveragedModel, "update_parameters", update_parameters)

    # Saving

    def _name_saved_types(self, models: Sequence[Module]) -> None:
        """Has `save_pretrained` of transformers name the type that it saves, which is that of no half weight.

        `from_pretrained` would cast what it reads to the type in the config.
        """
        for kind in {type(part) for model in models for part in model.modules()}:
            owner = next((base for base in kind.__mro__ if "save_pretrained" in vars(base)), None)
            if owner is not None and owner not in self._savers and self._patcher is not None:
                self._savers.add(owner)
                self._patcher.replace(owner, "save_pretrained", _saving_float32(owner.save_pretrained))

    # Averages

    def _find_precise(self, averaged: AveragedModel, model: Module) -> Module | SimpleNamespace:
        """What to average: the model with its masters, if it is one of ours with half weights."""
        half = self.find_half(wants_masters=False)
        if not any(id(param) in half for param in model.parameters()):
            return model
        if any(param.dtype in HALF_TYPES for param in averaged.module.parameters()):
            self._warner.warn(
                "average",
                "an AveragedModel of half parameters is updated in half precision, where most of each update "
                "is rounded away: make it AveragedModel(model).float(), which then averages float32 values",
            )
        optimizers = self._members.optimizers()
        masters = {id(pair.half): pair.read() for optimizer in optimizers for pair in optimizer.masters}

        def widen(tensor: Tensor, average: Tensor) -> Tensor:
            if tensor.dtype not in HALF_TYPES or average.dtype in HALF_TYPES:
                return tensor
            return masters.get(id(tensor), tensor).detach().float()

        return SimpleNamespace(  # all that is read of a model
            parameters=lambda: map(widen, model.parameters(), averaged.module.parameters()),
            buffers=lambda: map(widen, model.buffers(), averaged.module.buffers()),
        )

    # Half weights

    def watch(self, models: Sequence[Module], wants_masters: bool) -> None:
        """Watches the half parameters of models, without keeping them alive."""
        self._name_saved_types(models)
        self._models += [(weakref.ref(model), wants_masters) for model in models]

    def find_half(self, *, wants_masters: bool) -> set[int]:
        """The ids of half parameters of our models: of all, or of those that have masters."""
        models = [ref() for ref, wants in self._models if wants or not wants_masters]
        params = [param for model in models if model is not None for param in model.parameters()]
        return {id(param) for param in params if param.dtype in HALF_TYPES}


def _saving_float32(save: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(save)
    def save_pretrained(model: Module, *args: object, **kwargs: object) -> object:
        parameters = model.parameters
        # transformers names the type of the first one, which here has no elements, and that of a state_dict.
        first = next(((name, it) for name, it in model.named_parameters() if it.is_floating_point()), None)
        if first is None or first[1].dtype not in HALF_TYPES:
            return save(model, *args, **kwargs)
        part, _, name = first[0].rpartition(".")
        dtype = model.get_submodule(part).state_dict().get(name, first[1]).dtype
        typed = torch.empty(0, dtype=dtype, device=first[1].device)
        with ExitStack() as undo:
            undo.callback((patcher := Patcher()).close)
            patcher.replace(
                model, "parameters", lambda recurse=True: itertools.chain([typed], parameters(recurse))
            )
            return save(model, *args, **kwargs)

    return save_pretrained


def check_halved(warner: Warner, halved: dict[int, Line], amp: AmpOptimizer) -> None:
    """Warns before a step of weights without masters that became half after `initialize`.

    `halved` are tensors that did, by id, with the lines.
    """
    changed = [
        param for param in amp.masters.own_params() if id(param) in halved and param.dtype in HALF_TYPES
    ]
    own = [param for param in changed if amp.masters.get(param) is None and param.grad is not None]
    if own:
        warner.warn(
            "halved",
            f"float32 weights became {own[0].dtype} after initialize and have no masters: small updates are "
            f"lost: take this line out, as casts need no half weights, or use opt_level='O2' or 'O5', which "
            f"makes them half and keeps float32 masters",
            halved[id(own[0])],
        )
