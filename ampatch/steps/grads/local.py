"""Gradients that stay on their rank until a later backward averages them, and the forwards that say so."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from ampatch.errors import AmpError
from ampatch.levels.private import withholds_grads
from ampatch.levels.ranks import has_ranks, select_sharded
from ampatch.steps.masters.weight import Weight
from ampatch.steps.ranks import list_meshes
from ampatch.steps.scaler import Scale


@dataclass(slots=True, eq=False)
class LocalGrads:
    """Knows which gradients of one optimizer stay on their rank.

    The next backward that is synchronized averages what has accumulated by then: DistributedDataParallel
    in `.grad`, FSDP2 where nobody sees it. So these gradients have to stay there as they are, scaled.
    """

    coming: set[int] = field(default_factory=set)  # models whose next backward makes such, by id
    sharded: list[weakref.ref[Module]] = field(default_factory=list)  # the parts that FSDP2 has sharded
    are_alone: bool = False  # whether no DistributedDataParallel was seen that averages them

    def are_coming(self) -> bool:
        """Whether the backward that has just run left its gradients on the rank."""
        if not self.sharded:
            return bool(self.coming)
        parts = [part for find in self.sharded if (part := find()) is not None]
        return bool(self.coming) or any(map(withholds_grads, parts))


@torch.no_grad()
def scale_again(own: Iterable[Tensor], pairs: Iterable[Weight], scale: Scale) -> None:
    """Goes on as if nobody had read the gradients that wait: they are not averaged yet."""
    for param in own:
        param.grad = None if param.grad is None else scale.scale(param.grad)
    for pair in pairs:
        grad, half = pair.master.grad, pair.half
        pair.master.grad = half.grad = None
        if grad is not None:  # in half again, as DistributedDataParallel wants to add to it
            half.grad = scale.scale(grad).to(half.dtype)


class WatchForward:
    """Tells whether a forward is averaged over ranks, or under `no_sync`; a forward pre-hook of a model.

    Raises AmpError for parameters on a mesh, or parts that FSDP2 has sharded, that are not among the `known`
    ones, by id. A deep copy or a pickled model has no optimizers to tell.
    """

    def __init__(self, listeners: Sequence[LocalGrads] = (), known: Set[int] = frozenset()) -> None:
        self._listeners = listeners
        self._known = known
        self._kind: type | None = None  # of the module when it was looked at: fully_shard changes it
        self._ddp: int | None = None  # the wrapper that was looked at, by id

    def __reduce__(self) -> tuple:
        return WatchForward, ()

    def __call__(self, module: Module, args: tuple) -> None:
        if torch.compiler.is_dynamo_compiling() or not has_ranks():
            return
        if not self._listeners or not torch.is_grad_enabled():
            return
        if self._kind is not type(module):
            self._validate_params(module)
            self._kind = type(module)
            self._holds_ddp = any(isinstance(part, DistributedDataParallel) for part in module.modules())
        ddp = DistributedDataParallel._active_ddp_module  # whose forward this call is inside of
        if ddp is not None and self._ddp != id(ddp):
            _validate_order(ddp)
            self._ddp = id(ddp)
        for grads in self._listeners:
            grads.are_alone = ddp is None and not self._holds_ddp
            if ddp is not None:
                note = grads.coming.discard if ddp.require_backward_grad_sync else grads.coming.add
                note(id(module))

    def _validate_params(self, module: Module) -> None:
        parts = select_sharded(module.modules())
        if parts and self._known.issuperset(map(id, parts)):
            return  # they hold other parameters while their forward runs
        new = {name: param for name, param in module.named_parameters() if id(param) not in self._known}
        moved = [name for name, param in new.items() if parts or list_meshes([param])]
        if moved:
            raise AmpError(
                f"{type(module).__name__}: {len(moved)} parameters were replaced after initialize "
                f"({moved[0]!r} for one), and the optimizer would step the old ones: call fully_shard or "
                f"parallelize_module on the model first, then make the optimizer, then call initialize"
            )


def _validate_order(ddp: DistributedDataParallel) -> None:
    """Raises AmpError for a wrapper of weights that were cast since: it averages none of their gradients."""
    if getattr(ddp, "logger", None) is None:  # a subclass that averages by itself
        return
    made_of = ddp._get_ddp_logging_data().get("dtypes", "Half, BFloat16")  # in C++'s words
    for dtype, name in ((torch.float16, "Half"), (torch.bfloat16, "BFloat16")):
        if name not in made_of and any(param.dtype is dtype for param in ddp.parameters()):
            raise AmpError(
                f"DistributedDataParallel was made before initialize cast the weights to {dtype}, and would "
                f"average none of their gradients: call initialize first, then wrap the model; where a "
                f"trainer wraps it, take opt_level='O1' or 'O4'"
            )


def validate_sharded(parts: Sequence[Module]) -> None:
    """Raises AmpError for a part that FSDP2 cannot gather, because its weights have several types by now."""
    sharded = set(map(id, parts))

    def list_own(module: Module) -> list[Tensor]:
        inner = [child for child in module.children() if id(child) not in sharded]
        return [*module.parameters(recurse=False), *(param for child in inner for param in list_own(child))]

    for part in parts:
        trained = [param for param in list_own(part) if param.requires_grad and list_meshes([param])]
        dtypes = sorted({str(param.dtype) for param in trained})
        if len(dtypes) > 1:
            raise AmpError(
                f"{type(part).__name__}: fully_shard holds {' and '.join(dtypes)} weights in one part, which "
                f"FSDP2 refuses: call fully_shard on the modules that stay float32 (BatchNorm, keep_fp32) by "
                f"themselves before the rest, pass keep_batchnorm_fp32=False, or take opt_level='O1' or 'O4'"
            )
