"""What `torch.distributed` has to know of masters: their names in a checkpoint, and that ranks share them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import torch
import wrapt
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ampatch.errors import AmpError
from ampatch.levels.patcher import Patcher, SessionPatch
from ampatch.levels.private import CHECKPOINTS, explain_missing
from ampatch.levels.stack import logger
from ampatch.session.members import Members
from ampatch.steps.foreign_step import WholeStep

if TYPE_CHECKING:
    from torch.distributed.algorithms.join import Join


# Modules that are patched once somebody imports them (it may take a second): the place of each that changes.
JOIN = "torch.distributed.algorithms.join"
STATE_DICT = "torch.distributed.checkpoint.state_dict"
LOCAL_SGD = "torch.distributed.optim.post_localSGD_optimizer"
IMPORTED_LATER = {
    JOIN: f"{JOIN}.Join",
    STATE_DICT: STATE_DICT,
    LOCAL_SGD: f"{LOCAL_SGD}.PostLocalSGDOptimizer",
}

Rest, Result = ParamSpec("Rest"), TypeVar("Result")
StateDictFunction = Callable[Concatenate[Module, Sequence[object], Rest], Result]


class DistributedPatch(SessionPatch):
    """Has checkpoints and local SGD of `torch.distributed` work with masters, and refuses uneven inputs."""

    def __init__(self, members: Members) -> None:
        super().__init__()
        self._members = members
        patches = (self._patch_join, self._patch_checkpoints, self._patch_local_sgd)
        self._modules = dict(zip(IMPORTED_LATER, patches, strict=True))
        self._are_waiting = False

    def patch(self, patcher: Patcher) -> None:
        """Patches what is imported now, and the rest once it is."""
        for name in self._modules:
            if name in sys.modules:
                self._modules[name](patcher)
            elif not self._are_waiting:
                wrapt.register_post_import_hook(self._patch_module, name)
        self._are_waiting = True

    def _patch_module(self, module: ModuleType) -> None:
        if self._patcher is not None:
            self._modules[module.__name__](self._patcher)

    def _patch_join(self, patcher: Patcher) -> None:
        cls = sys.modules[JOIN].Join
        patcher.replace(cls, "__init__", refuse_uneven(cls.__init__, self._members))

    def _patch_checkpoints(self, patcher: Patcher) -> None:
        for line in explain_missing(CHECKPOINTS):
            logger.warning("torch %s has %s", torch.__version__, line)
        for name in CHECKPOINTS:
            if not name.is_missing():
                patcher.replace(*name.find_place(), with_names(name.find(), self._members))

    def _patch_local_sgd(self, patcher: Patcher) -> None:
        cls = sys.modules[LOCAL_SGD].PostLocalSGDOptimizer
        original = cls.__init__

        @functools.wraps(original)
        def init(wrapper: object, optim: Optimizer, averager: object) -> None:
            original(wrapper, optim, averager)
            amp = self._members.find(optim)
            if amp is not None:  # as if the wrapper had been given to `initialize`
                WholeStep(wrapper, amp).open(amp.undo)

        patcher.replace(cls, "__init__", init)


def with_names(
    original: StateDictFunction[Rest, Result], members: Members
) -> StateDictFunction[Rest, Result]:
    """Returns a function of torch's that looks the parameters of optimizers up among those of a model.

    While it runs, the model names the masters in the place of its half parameters.
    """

    @functools.wraps(original)
    def call(model: Module, optimizers: Sequence[object], *args: Rest.args, **kwargs: Rest.kwargs) -> Result:
        amps = filter(None, map(members.find, optimizers))
        masters = {pair.half: pair.master for amp in amps for pair in amp.masters}
        own = vars(model)  # past `__setattr__`, by which compiled models set attributes of what they wrap
        if not masters or "named_parameters" in own:  # the one function calls the other
            return original(model, optimizers, *args, **kwargs)
        names = kwargs.get("info", args[-1] if args else None).fqn_param_mapping  # type: ignore[union-attr]
        names.update({master: names[half] for half, master in masters.items() if half in names})
        named_parameters = model.named_parameters

        def name_masters(*how: object, **options: object) -> Iterator[tuple[str, Tensor]]:
            for name, param in named_parameters(*how, **options):  # type: ignore[arg-type]
                yield name, masters.get(param, param)

        own["named_parameters"] = name_masters
        try:
            return original(model, optimizers, *args, **kwargs)
        finally:
            del own["named_parameters"]

    return call


def refuse_uneven(original: Callable[..., None], members: Members) -> Callable[..., None]:
    """Returns an `__init__` of Join that refuses what would differ over ranks after uneven inputs.

    Ranks without inputs make no steps: torch gives them the weights of the others in the end, and knows
    nothing of masters and loss scales.
    """

    @functools.wraps(original)
    def init(
        join: Join, joinables: Sequence[object], enable: bool = True, *args: object, **kwargs: object
    ) -> None:
        parts = [one.module for one in joinables if isinstance(one, DistributedDataParallel)]
        params = {param for part in parts for param in part.parameters()}
        for amp in members.optimizers() if enable else ():
            is_joined = amp.optimizer in joinables or not params.isdisjoint(amp.masters.model_params())
            is_dynamic = any(scaler.is_dynamic for scaler in amp.call.scalers)
            if is_joined and (is_dynamic or any(amp.masters)):
                raise AmpError(
                    f"Join was given inputs that may be uneven, and {type(amp.optimizer).__name__} has "
                    f"{'a dynamic loss scale' if is_dynamic else 'float32 masters'}, which would "
                    f"not be updated on ranks without inputs: give every rank the same number of batches and "
                    f"leave out join, or use O4, or O1 with a number for loss_scale"
                )
        original(join, joinables, enable, *args, **kwargs)

    return init
