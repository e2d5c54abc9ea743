"""What `torch.distributed` has to know of masters: their names in a checkpoint, and that ranks share them."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import wrapt
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ampatch.levels.private import CHECKPOINTS, explain_missing
from ampatch.patching.patcher import Patcher, SessionPatch

if TYPE_CHECKING:
    from torch.distributed.algorithms.join import JoinHook

logger = logging.getLogger("ampatch")

# Modules that take a second to import, and are patched once somebody does: the place of each that changes.
STATE_DICT = "torch.distributed.checkpoint.state_dict"
LOCAL_SGD = "torch.distributed.optim.post_localSGD_optimizer"
IMPORTED_LATER = {STATE_DICT: STATE_DICT, LOCAL_SGD: f"{LOCAL_SGD}.PostLocalSGDOptimizer"}

# Of an optimizer: its masters, by the half parameter that each stands for.
FindMasters = Callable[[object], Mapping[Tensor, Parameter]]
Rest, Result = ParamSpec("Rest"), TypeVar("Result")
StateDictFunction = Callable[Concatenate[Module, Sequence[object], Rest], Result]
Broadcast = Callable[[Tensor], object]  # in place, from the rank whose values count


class Ranks(Protocol):
    """What a session does for `torch.distributed`."""

    def map_masters(self, optimizer: object) -> Mapping[Tensor, Parameter]:
        """Returns the masters of an optimizer, by the half parameter that each stands for."""

    def join_wrapper(self, wrapper: object, optimizer: Optimizer) -> None:
        """Takes what somebody has put around an optimizer, whose steps it makes from now on."""

    def broadcast_(self, model: Module, broadcast: Broadcast) -> None:
        """Gives masters and loss scales of a model the values of one rank."""


class DistributedPatch(SessionPatch):
    """Has checkpoints, local SGD and uneven inputs of `torch.distributed` work with masters."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks
        patches = {STATE_DICT: self._patch_checkpoints, LOCAL_SGD: self._patch_local_sgd}
        self._modules = {name: patches[name] for name in IMPORTED_LATER}
        self._are_waiting = False

    def patch(self, patcher: Patcher) -> None:
        """Patches what is imported now, and the rest once it is."""
        if not torch.distributed.is_available():
            return
        replacement = join_with_masters(DistributedDataParallel.join_hook, self._ranks)
        patcher.replace(DistributedDataParallel, "join_hook", replacement)
        for name in self._modules:
            if name in sys.modules:
                self._modules[name](patcher)
            elif not self._are_waiting:
                wrapt.register_post_import_hook(self._take_module, name)
        self._are_waiting = True

    def _take_module(self, module: ModuleType) -> None:
        if self._patcher is not None:
            self._modules[module.__name__](self._patcher)

    def _patch_checkpoints(self, patcher: Patcher) -> None:
        for line in explain_missing(CHECKPOINTS):
            logger.warning("torch %s has %s", torch.__version__, line)
        for name in CHECKPOINTS:
            if not name.is_missing():
                patcher.replace(*name.find_place(), with_names(name.find(), self._ranks.map_masters))

    def _patch_local_sgd(self, patcher: Patcher) -> None:
        cls = sys.modules[LOCAL_SGD].PostLocalSGDOptimizer
        original = cls.__init__

        @functools.wraps(original)
        def init(wrapper: object, optim: Optimizer, averager: object) -> None:
            original(wrapper, optim, averager)
            self._ranks.join_wrapper(wrapper, optim)

        patcher.replace(cls, "__init__", init)


def with_names(
    original: StateDictFunction[Rest, Result], find_masters: FindMasters
) -> StateDictFunction[Rest, Result]:
    """Returns a function of torch's that looks the parameters of optimizers up among those of a model.

    While it runs, the model names the masters in the place of its half parameters.
    """

    @functools.wraps(original)
    def call(model: Module, optimizers: Sequence[object], *args: Rest.args, **kwargs: Rest.kwargs) -> Result:
        masters = {half: master for one in optimizers for half, master in find_masters(one).items()}
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


class JoinWithMasters:
    """Does what DistributedDataParallel does while ranks have run out of inputs, and then a little more.

    In the end it gives every rank the weights of one that had the most inputs; so are masters and loss
    scales, which the others have not updated since. The state of optimizers stays as it is on each rank, as
    without ampatch.
    """

    def __init__(self, ddp: DistributedDataParallel, hook: JoinHook, ranks: Ranks) -> None:
        self._ddp = ddp
        self._ranks = ranks
        self._hook = hook
        self.main_hook = hook.main_hook

    def post_hook(self, is_last_joiner: bool) -> None:
        """Runs on all ranks, once none of them has an input left."""
        self._hook.post_hook(is_last_joiner)
        group = self._ddp.join_process_group
        rank = torch.distributed.get_rank(group) if is_last_joiner else -1
        last = torch.tensor(rank, device=self._ddp.join_device)
        torch.distributed.all_reduce(last, torch.distributed.ReduceOp.MAX, group)
        source = torch.distributed.get_global_rank(group, int(last))
        self._ranks.broadcast_(
            self._ddp.module, functools.partial(torch.distributed.broadcast, src=source, group=group)
        )


def join_with_masters(original: Callable[..., JoinHook], ranks: Ranks) -> Callable[..., object]:
    """Returns what makes the hook of a DistributedDataParallel for uneven inputs."""

    @functools.wraps(original)
    def join_hook(ddp: DistributedDataParallel, **kwargs: object) -> JoinWithMasters:
        return JoinWithMasters(ddp, original(ddp, **kwargs), ranks)

    return join_hook
