"""Gradients between backward and step: in float32, beside earlier ones, or waiting for other ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from ampatch.errors import AmpError
from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.private import TAKES_ANY_GRAD, has_function_modes, is_expanded, set_grad, withholds_grads
from ampatch.levels.ranks import has_ranks, select_sharded
from ampatch.steps.events import Changes
from ampatch.steps.masters import Weight
from ampatch.steps.scaler import Scale, list_meshes


@torch.no_grad()
def cast_grads(grads: Sequence[Tensor], likes: Sequence[Tensor]) -> list[Tensor]:
    """Returns half gradients in float32, as new tensors with the strides of others.

    Fused optimizers on a CPU walk through memory whatever the strides are (torch 2.13).
    """
    are_plain = set(map(type, grads)) == {Tensor} and True not in [grad.is_sparse for grad in grads]
    if not are_plain or grads[0].device != likes[0].device:
        return [_cast_grad(grad, like) for grad, like in zip(grads, likes, strict=True)]
    # Who watches operations, as the doctor does, would take what was left in free memory for numbers.
    make = torch.zeros_like if has_function_modes() else torch.empty_like
    casts = list(map(make, likes))
    torch._foreach_copy_(casts, grads)
    return casts


def _cast_grad(grad: Tensor, like: Tensor) -> Tensor:
    if type(grad) is Tensor and not grad.is_sparse and grad.device == like.device:
        return torch.empty_like(like).copy_(grad)
    return grad.float()  # sparse, of a kind that wraps others, or on a device where its master is not


@torch.no_grad()
def add_grads(earlier: Tensor, new: Tensor) -> Tensor:
    """Adds gradients as autograd does: in place, except where a sparse one is among them."""
    if earlier.is_sparse:
        return earlier + new if new.is_sparse else new + earlier
    return earlier.add_(new)


@torch.no_grad()
def add_grads_(earlier: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Adds dense gradients to earlier ones, all at once; one after the other where two are one tensor."""
    if len({grad.data_ptr() for grad in earlier}) == len(earlier):
        torch._foreach_add_(earlier, new)
        return
    for one, other in zip(earlier, new, strict=True):
        one.add_(other)


def own_memory(grad: Tensor) -> Tensor:
    """Copies a gradient that is a view of a bucket, which the next backward would overwrite."""
    if type(grad) is not Tensor or grad.layout is not torch.strided:
        return grad
    shared = grad._is_view() or grad.untyped_storage().nbytes() != grad.nbytes
    return grad.clone() if shared else grad


def find_grads(params: Iterable[Tensor]) -> list[Tensor]:
    """Returns the gradients that there are, such that each can be written in place."""
    grads = []
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if grad.layout is torch.strided and not grad.is_contiguous() and is_expanded(grad):
            grad = param.grad = grad.clone()
        grads.append(grad)
    return grads


class EarlierGrads:
    """Gradients from before a block, set aside so that the new ones are seen apart from them."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def set_aside(self, params: Iterable[Tensor]) -> None:
        with torch._C.DisableTorchFunction():  # a mode would be told of each
            for param in params:
                grad = param.grad
                if grad is not None:
                    self.pairs.append((param, own_memory(grad)))
                    param.grad = None

    @torch.no_grad()
    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.pairs = [(param, change(earlier)) for param, earlier in self.pairs]

    def give_back(self, *, beside: bool = False) -> None:
        """Puts them back, with the new ones added; `beside` new ones that are at the half side of masters."""
        pairs, self.pairs = self.pairs, []
        sums, new = [], []
        for param, earlier in pairs:
            grad = param.grad
            if grad is not None:
                if type(earlier) is type(grad) is Tensor and earlier.layout is grad.layout is torch.strided:
                    sums.append(earlier)
                    new.append(grad)
                else:
                    earlier = add_grads(earlier, grad)
            if beside:
                set_grad(param, earlier)
            else:
                param.grad = earlier
        if sums:
            add_grads_(sums, new)


# How many elements are cast at a time. What was cast is freed before the next ones are; on a CPU they stay in
# its cache, and below what malloc gives back to the system and then has to ask for again.
MOST_ON_CPU, MOST_ON_GPU = 2**19, 2**24


class MasterGrads:
    """Has each half weight of one optimizer and its master hold one gradient, as a float32 weight does.

    A backward leaves half gradients; `share` casts them, and gives both sides the same tensor. Whoever reads
    or writes it from then on, on either side, reads or writes the gradient; who assigns one on either side
    while a session is open assigns it on both (`Weight.assign_grad`).
    """

    def __init__(self, pairs: list[Weight], changes: Changes | None = None) -> None:
        self.pairs = pairs
        self._changes = changes if TAKES_ANY_GRAD else None
        self._settled: object = None  # how many weights and changes there were when all sides agreed

    def share(self, *, keeps_graphs: bool = False, adds: bool = False) -> None:
        """Has both sides hold the gradient that counts; no host sync.

        With `keeps_graphs` half gradients that have a graph (`create_graph=True`) stay as they are; with
        `adds`, what the master holds counts beside a half gradient: a backward has reached both, or what was
        there before was put there.
        """
        settled = None if self._changes is None else (len(self.pairs), self._changes.count)
        changed, is_settled = [], True
        with torch._C.DisableTorchFunction():  # a mode, as of a default device, would see each attribute
            for pair in self.pairs:
                if pair.half.grad is not pair.master.grad and (TAKES_ANY_GRAD or not pair.holds_grad()):
                    changed.append(pair)
        if changed:  # modes see the casts, as the doctor's, which follows bad numbers
            is_settled = _settle(changed, keeps_graphs, adds)
        self._settled = settled if is_settled else None

    def share_changed(self, *, keeps_graphs: bool = False, adds: bool = False) -> None:
        """Does so unless nothing was seen since both sides agreed: the next step looks again."""
        changes = self._changes
        if changes is None or self._settled != (len(self.pairs), changes.count):
            self.share(keeps_graphs=keeps_graphs, adds=adds)

    def clear(self) -> None:
        for pair in self.pairs:
            set_grad(pair.half, None)
            set_grad(pair.master, None)

    def leave(self, *_: object) -> None:
        """Leaves the gradients to the half sides alone, where nobody sees one cleared; a hook of a step."""
        for pair in self.pairs:
            pair.master.grad = None


@torch.no_grad()
def _settle(changed: Sequence[Weight], keeps_graphs: bool, adds: bool) -> bool:
    """Returns whether no half gradient was left as it is."""
    new, are_all = [], True
    for pair in changed:
        grad = pair.half.grad
        if grad is None or grad.dtype not in HALF_TYPES:
            pair.hold_grad(pair.find_grad())
        elif pair.master.grad is not None and not adds:  # which a reducer has copied into its bucket
            pair.hold_grad(pair.master.grad)
        elif keeps_graphs and grad.requires_grad:
            are_all = False
        else:
            new.append(pair)
    for part in _split(new):
        halves, masters = [], []
        for pair in part:
            halves.append(pair.half.grad)
            masters.append(pair.master)
        for pair, cast in zip(part, cast_grads(halves, masters), strict=True):
            if pair.master.grad is not None:
                cast = add_grads(pair.master.grad, cast)
            if TAKES_ANY_GRAD and pair.half.grad_dtype is None:  # `Weight.hold_grad`, written out
                set_grad(pair.half, cast)
                set_grad(pair.master, cast)
            else:
                pair.hold_grad(cast)
    return are_all


def _split(pairs: Sequence[Weight]) -> list[Sequence[Weight]]:
    parts, size, start = [], 0, 0
    most = MOST_ON_CPU if pairs and pairs[0].half.is_cpu else MOST_ON_GPU
    for index, pair in enumerate(pairs):
        size += pair.half.numel()
        if size > most:
            parts.append(pairs[start : index + 1])
            size, start = 0, index + 1
    return parts if start == len(pairs) else [*parts, pairs[start:]]


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
                update = grads.coming.discard if ddp.require_backward_grad_sync else grads.coming.add
                update(id(module))

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
