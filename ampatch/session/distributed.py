"""What `torch.distributed` has to know of masters: their names in a checkpoint, and that ranks share them."""

from __future__ import annotations

import functools
import logging
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

from ampatch.levels.private import CHECKPOINTS, explain_missing
from ampatch.patching.patcher import Patcher, SessionPatch
from ampatch.session.members import Members
from ampatch.steps.foreign_step import WholeStep
from ampatch.steps.scaler import LossScaler

if TYPE_CHECKING:
    from torch.distributed.algorithms.join import JoinHook

logger = logging.getLogger("ampatch")

# Modules that take a second to import, and are patched once somebody does: the place of each that changes.
STATE_DICT = "torch.distributed.checkpoint.state_dict"
LOCAL_SGD = "torch.distributed.optim.post_localSGD_optimizer"
IMPORTED_LATER = {STATE_DICT: STATE_DICT, LOCAL_SGD: f"{LOCAL_SGD}.PostLocalSGDOptimizer"}

Rest, Result = ParamSpec("Rest"), TypeVar("Result")
StateDictFunction = Callable[Concatenate[Module, Sequence[object], Rest], Result]


class DistributedPatch(SessionPatch):
    """Has checkpoints, local SGD and uneven inputs of `torch.distributed` work with masters."""

    def __init__(self, members: Members) -> None:
        super().__init__()
        self._members = members
        patches = {STATE_DICT: self._patch_checkpoints, LOCAL_SGD: self._patch_local_sgd}
        self._modules = {name: patches[name] for name in IMPORTED_LATER}
        self._are_waiting = False

    def patch(self, patcher: Patcher) -> None:
        """Patches what is imported now, and the rest once it is."""
        if not torch.distributed.is_available():
            return
        replacement = join_with_masters(DistributedDataParallel.join_hook, self._members)
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
                patcher.replace(*name.find_place(), with_names(name.find(), self._members))

    def _patch_local_sgd(self, patcher: Patcher) -> None:
        cls = sys.modules[LOCAL_SGD].PostLocalSGDOptimizer
        original = cls.__init__

        @functools.wraps(original)
        def init(wrapper: object, optim: Optimizer, averager: object) -> None:
            original(wrapper, optim, averager)
            found = self._members.find(optim)
            if found is not None:  # as if the wrapper had been given to `initialize`
                WholeStep(wrapper, found[0]).open(found[0].undo)

        patcher.replace(cls, "__init__", init)


def with_names(
    original: StateDictFunction[Rest, Result], members: Members
) -> StateDictFunction[Rest, Result]:
    """Returns a function of torch's that looks the parameters of optimizers up among those of a model.

    While it runs, the model names the masters in the place of its half parameters.
    """

    @functools.wraps(original)
    def call(model: Module, optimizers: Sequence[object], *args: Rest.args, **kwargs: Rest.kwargs) -> Result:
        found = [amp for amp, _ in filter(None, map(members.find, optimizers))]
        masters = {pair.half: pair.master for amp in found for pair in amp.masters}
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

    def __init__(self, ddp: DistributedDataParallel, hook: JoinHook, members: Members) -> None:
        self._ddp = ddp
        self._members = members
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
        self._broadcast(functools.partial(torch.distributed.broadcast, src=source, group=group))

    @torch.no_grad()
    def _broadcast(self, broadcast: Callable[[Tensor], object]) -> None:
        """Gives masters and loss scales the values of one rank; two host syncs a dynamic scale."""
        params = set(self._ddp.module.parameters())
        device = next(iter(params)).device
        scalers: dict[LossScaler, None] = {}
        for amp in self._members.optimizers():
            if params.isdisjoint(amp.model_params()):
                continue
            scalers |= dict.fromkeys(self._members.find(amp.optimizer)[1].scalers)  # type: ignore[index]
            for pair in amp.masters:
                broadcast(pair.master.detach())
                pair.mark_synced()
        for scaler in [one for one in scalers if one.is_dynamic]:
            state = scaler.state_dict()
            values = torch.tensor(list(state.values()), dtype=torch.float64, device=device)
            broadcast(values)
            scaler.load_state_dict(dict(zip(state, values.tolist(), strict=True)))


def join_with_masters(original: Callable[..., JoinHook], members: Members) -> Callable[..., object]:
    """Returns what makes the hook of a DistributedDataParallel for uneven inputs."""

    @functools.wraps(original)
    def join_hook(ddp: DistributedDataParallel, **kwargs: object) -> JoinWithMasters:
        return JoinWithMasters(ddp, original(ddp, **kwargs), members)

    return join_hook
