"""Half weights that train wrongly without an error, and calls of `initialize` that do: warned of once."""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from ampatch.casts.cast import CASTS
from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.stack import Line, find_line
from ampatch.patching.patcher import Patcher, SessionPatch

if TYPE_CHECKING:
    from ampatch.session.members import Members
    from ampatch.session.request import Request
    from ampatch.steps.optimizer import AmpOptimizer

logger = logging.getLogger("ampatch")


class Warner:
    """Says each kind of thing once: in the log, and as a warning that points at a line."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def forget(self) -> None:
        """Lets everything be said again."""
        self._said.clear()

    def warn(self, kind: str, text: str, line: Line | None = None) -> None:
        """Warns of a kind of misuse; `line` is the one to change, by default the one that runs."""
        if kind in self._said:
            return
        self._said.add(kind)
        file, number = line or find_line()
        logger.warning("%s:%d: %s", file, number, text)
        warnings.warn_explicit(text, UserWarning, file, number)


class HalfWatch(SessionPatch):
    """Watches half weights that are averaged, saved, or stepped by an optimizer that nobody gave to us."""

    def __init__(self, warner: Warner, members: Members) -> None:
        super().__init__()
        self._warner = warner
        self._members = members
        self.forget()

    def forget(self) -> None:
        """Drops what was seen."""
        self._models: list[tuple[weakref.ref[Module], bool]] = []  # and if their half weights have masters
        self._seen: set[int] = set()  # optimizers, by id
        self._savers: set[type] = set()  # whose save_pretrained is patched

    def open(self, undo: ExitStack) -> None:
        """Patches, unless it is done; `undo` receives the way back."""
        if self._patcher is None:
            super().open(undo)
            undo.callback(register_optimizer_step_pre_hook(self._check_optimizer).remove)

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
        half = self._find_half(wants_masters=False)
        if not any(id(param) in half for param in model.parameters()):
            return model
        if any(param.dtype in HALF_TYPES for param in averaged.module.parameters()):
            self._warner.warn(
                "average",
                "an AveragedModel of half parameters is updated in half precision, where most of each update "
                "is rounded away: make it AveragedModel(model).float(), which then averages float32 values",
            )
        optimizers = self._members.optimizers()
        for optimizer in optimizers:
            optimizer.masters.take_edits()
        masters = {id(pair.half): pair.master for optimizer in optimizers for pair in optimizer.masters}

        def widen(tensor: Tensor, average: Tensor) -> Tensor:
            if tensor.dtype not in HALF_TYPES or average.dtype in HALF_TYPES:
                return tensor
            return masters.get(id(tensor), tensor).detach().float()

        return SimpleNamespace(  # all that is read of a model
            parameters=lambda: map(widen, model.parameters(), averaged.module.parameters()),
            buffers=lambda: map(widen, model.buffers(), averaged.module.buffers()),
        )

    # Steps of optimizers that nobody knows

    def watch(self, models: Sequence[Module], wants_masters: bool) -> None:
        """Watches the half parameters of models, without keeping them alive."""
        self._name_saved_types(models)
        self._models += [(weakref.ref(model), wants_masters) for model in models]

    def _find_half(self, *, wants_masters: bool) -> set[int]:
        """The ids of half parameters of our models: of all, or of those that have masters."""
        models = [ref() for ref, wants in self._models if wants or not wants_masters]
        params = [param for model in models if model is not None for param in model.parameters()]
        return {id(param) for param in params if param.dtype in HALF_TYPES}

    def _check_optimizer(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        """Looks once at what an optimizer steps; a hook before the step of every optimizer there is."""
        if torch.compiler.is_dynamo_compiling() or id(optimizer) in self._seen:
            return
        self._seen.add(id(optimizer))
        found = self._members.find(optimizer)
        if found is not None:  # its own hook comes later
            found[0].masters.install_again()
        half = self._find_half(wants_masters=True)
        if any(id(param) in half for group in optimizer.param_groups for param in group["params"]):
            self._warner.warn(
                "stranger",
                f"{type(optimizer).__name__} steps half parameters of an initialized model, and initialize "
                f"never saw it: it has no masters, so small updates are lost, and gradients stay scaled: "
                f"make the optimizer first, then call amp.initialize(model, optimizer)",
            )


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


def check_ranks(warner: Warner, amp: AmpOptimizer) -> None:
    """Warns of ranks that may not skip a step together, before one; no collective, and no host sync."""
    if not amp.local.are_alone or not amp.pending or amp.agreement.list_groups(amp.params()):
        return
    if hasattr(amp.find_given(), "averager"):  # PostLocalSGDOptimizer, whose ranks are to step alone
        return
    if torch.distributed.get_world_size() > 1:
        warner.warn(
            "ranks",
            f"{type(amp.optimizer).__name__}: nothing makes the ranks skip a step together, as the model is "
            f"in no DistributedDataParallel and its parameters are on no device mesh: if ranks average "
            f"gradients by hand, or hold stages of a model, pass initialize(process_group=...), the group of "
            f"these ranks; if each trains a model of its own, ignore this",
        )


# Where the wrapper that a trainer puts around an optimizer says the trainer's own precision, and its remedy.
_TRAINERS = {
    "accelerator_state.mixed_precision": "Accelerator(mixed_precision='no'), or TrainingArguments without "
    "fp16 and bf16",
    "_strategy.precision_plugin.precision": "Trainer(precision='32-true')",
    "_strategy.precision.precision": "Fabric(precision='32-true')",
}


def check_trainer(warner: Warner, wrapper: object) -> None:
    """Warns of a trainer that casts and scales as well, by the wrapper of its optimizer."""
    for path, remedy in _TRAINERS.items():
        try:
            precision = attrgetter(path)(wrapper)
        except AttributeError:
            continue
        if precision not in ("no", "32-true", "64-true"):
            warner.warn(
                "trainer",
                f"two mixed precisions meet: the trainer of this {type(wrapper).__name__} has its own, "
                f"{precision!r}, beside that of ampatch: each casts what the other one has cast, and "
                f"gradients may be scaled twice: write {remedy}, or pass initialize(enabled=False)",
            )


def check_request(warner: Warner, request: Request, amps: Sequence[AmpOptimizer]) -> None:
    """Warns of a call of `initialize` that works, and trains wrongly."""
    policy = request.policy
    if CASTS.half is not None and not policy.patch_torch_functions and hasattr(sys, "ps1"):  # of a prompt
        warner.warn(
            "levels",
            f"{policy.opt_level} patches no functions, but outside of its models those that an earlier "
            f"initialize patched go on casting to {CASTS.half}: call ampatch.uninitialize() first, unless "
            f"both train side by side",
        )
    params = [param for model in request.models for param in model.parameters() if param.is_floating_point()]
    if policy.half is not None and params and all(param.dtype is torch.float64 for param in params):
        warner.warn(
            "float64",
            f"the model is float64, which {policy.opt_level} does not cast: call model.float() before "
            f"initialize",
        )
    optimizers = [amp.optimizer for amp in amps if policy.is_pure_half and policy.half is torch.float16]
    for optimizer, group in [(one, group) for one in optimizers for group in one.param_groups]:
        if _loses_eps(optimizer, group):
            warner.warn(
                "eps",
                f"eps={group['eps']} of {type(optimizer).__name__} is 0 in float16, the type of its "
                f"steps, and small gradients make it divide by 0: pass eps=1e-4, or use opt_level='O2'",
            )


def _loses_eps(optimizer: Optimizer, group: dict) -> bool:
    """Whether the eps of a group is 0 in float16; fused kernels add it in float32, others may do so."""
    eps = group.get("eps")
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    if not is_torchs or group.get("fused") or not isinstance(eps, float) or eps == 0:
        return False
    has_half = any(param.dtype is torch.float16 for param in group["params"])
    return has_half and abs(eps) <= 2.0**-25  # which is rounded to 0
