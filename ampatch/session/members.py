"""The modules and optimizers that calls of `initialize` took, and the backward passes that reach them."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import get_ident
from types import GetSetDescriptorType
from typing import TypeGuard
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Module

from ampatch.levels.patcher import Patcher, SessionPatch, get_raw
from ampatch.levels.private import RUN_BACKWARD, graph_task
from ampatch.levels.undo import refer
from ampatch.models.cast_tensor import Float32Values, own_tensors
from ampatch.models.hooks import list_tensors
from ampatch.steps.block import LateLoss, PlainBackward, ScaledLoss
from ampatch.steps.events import Changes, Surroundings
from ampatch.steps.foreign_step import find_hooked
from ampatch.steps.masters import Weight
from ampatch.steps.optimizer import AmpOptimizer, InitializeCall, Phase
from ampatch.steps.scaler import Scale

Place = tuple[weakref.ref[Module], Callable[[], Float32Values | None]]


class Members:
    """The modules and optimizers of all calls, by weak references.

    An `AmpOptimizer` lives on the hooks of its optimizer's step, float32 values on those of a module's
    `state_dict`. There are no weak references to tensors, which `torch.utils.swap_tensors` refuses.
    """

    def __init__(self) -> None:
        self._modules: list[Place] = []
        self._optimizers: dict[int, weakref.ref[AmpOptimizer]] = {}
        self.float8 = weakref.WeakKeyDictionary[Module, str]()  # of linear layers, why they are not
        self._passive: list[Callable[[], object]] = []  # what calls with enabled=False were given

    def copy(self) -> Members:
        """Returns another one of the same members, without those that are gone."""
        copied = Members()
        copied._modules = [place for place in self._modules if place[0]() is not None]
        copied._optimizers = {key: find for key, find in self._optimizers.items() if find() is not None}
        copied.float8 = self.float8.copy()
        copied._passive = [reference for reference in self._passive if reference() is not None]
        return copied

    def restore(self, others: Members) -> None:
        vars(self).update(vars(others))

    # Modules

    def add_modules(
        self, modules: Iterable[Module], values: dict[int, Float32Values], float8: Mapping[Module, str]
    ) -> None:
        """Adds the parts of models; `values` are those that they own, by the id of the module."""
        self.float8.update(float8)
        self._modules += [(weakref.ref(module), refer(values.get(id(module)))) for module in modules]

    def _live_modules(self) -> Iterator[tuple[Module, Float32Values | None]]:
        for reference, own in self._modules:
            module = reference()
            if module is not None:
                yield module, own()

    def list_tensors(self) -> set[int]:
        """The ids of all tensors of the modules, good for as long as nobody drops one."""
        return {id(tensor) for module, _ in self._live_modules() for _, tensor in own_tensors(module)}

    def map_values(self) -> dict[int, Float32Values]:
        """The float32 values that know the modules' tensors, by the id of the tensor."""
        by_id: dict[int, Float32Values] = {}
        for module, values in self._live_modules():
            for _, tensor in list_tensors(module) if values is not None else ():
                if tensor in values:
                    by_id[id(tensor)] = values
                else:
                    by_id.setdefault(id(tensor), values)
        return by_id

    # Optimizers

    def add_optimizer(self, amp: AmpOptimizer, call: InitializeCall) -> None:
        """Adds an optimizer, under the wrapper that was given and the optimizers inside."""
        amp.call = call
        names = [amp.find_outer(), *amp.masters.optimizers]
        self._optimizers |= dict.fromkeys(map(id, names), weakref.ref(amp))
        self._passive = [
            reference for reference in self._passive if all(reference() is not one for one in names)
        ]

    def find(self, optimizer: object) -> AmpOptimizer | None:
        """Returns what is kept for an optimizer, or for the one that a trainer has wrapped."""
        find = self._optimizers.get(id(optimizer))
        amp = None if find is None else find()
        if amp is not None and optimizer is amp.optimizer:  # as nearly always
            return amp
        amp = self._find(optimizer)
        return amp or next(filter(None, map(self._find, _look_through(optimizer)[1:])), None)

    def _find(self, optimizer: object) -> AmpOptimizer | None:
        find = self._optimizers.get(id(optimizer))
        amp = None if find is None else find()
        if amp is None:
            return None
        is_one = optimizer is amp.optimizer or optimizer is amp.find_outer()  # ids are used again
        return amp if is_one or any(optimizer is one for one in amp.masters.optimizers) else None

    def optimizers(self, *, thread: int | None = None) -> list[AmpOptimizer]:
        """What is kept for the optimizers; or for those that a thread uses.

        One that no thread has used yet is any thread's, unless others train: then it may be theirs.
        """
        amps: dict[AmpOptimizer, None] = {}
        others_train = False
        for find in self._optimizers.values():  # torch 2.11 compiles no generator here
            amp = find()
            if amp is not None:
                amps[amp] = None
        if thread is None:
            return list(amps)
        for amp in amps:
            others_train |= amp.thread not in (None, thread)
        own = (thread,) if others_train else (None, thread)
        return [amp for amp in amps if amp.thread in own]

    def count(self) -> int:
        return len(self._optimizers)

    def weights(self) -> Iterator[Weight]:
        """The half weights, with masters or without."""
        for amp in self.optimizers():
            yield from amp.masters
        for _, values in self._live_modules():
            yield from values or ()

    # Calls with enabled=False

    def add_passive(self, optimizers: Iterable[object]) -> None:
        self._passive += map(refer, optimizers)

    def is_any_passive(self, optimizers: Sequence[object]) -> bool:
        """Whether one of these passes through."""
        names = [one for optimizer in optimizers for one in _look_through(optimizer)]
        return any(reference() is one for one in names for reference in self._passive)


def _look_through(optimizer: object) -> list[object]:
    """Lists an optimizer and the one inside it; a scheduler has one too, and no groups of parameters."""
    inner = find_hooked(optimizer) if hasattr(optimizer, "param_groups") else None
    return [optimizer] if inner is None else [optimizer, inner]


MANY = 8  # blocks that have ended, of which a backward may still begin at what came of their losses
MARK = "ampatch.scale"  # by which the graph of a scaled loss knows its scale


class AssignedGrad(property):
    """`Tensor.grad` with another way to assign it.

    torch looks up `Tensor.grad.__get__` and its like to tell modes and subclasses of tensors what is asked
    for: these stay torch's own, which it knows by identity.
    """

    def __init__(
        self, original: GetSetDescriptorType, assign: Callable[[Tensor, Tensor | None], None]
    ) -> None:
        super().__init__(original.__get__, assign, functools.partial(assign, grad=None), original.__doc__)
        for name in ("__get__", "__set__", "__delete__"):
            vars(self)[name] = getattr(original, name)


class MasterBackwards(SessionPatch):
    """Has half weights and their masters hold one gradient, whoever makes or assigns it.

    Optimizers with masters are told when a backward begins and has ended; no hook of torch's does.

    `torch.autograd.backward` calls torch's engine by a name that is patched: whoever patches
    `torch.autograd.backward`, as the doctor does, sees afterwards what scripts will see.
    """

    def __init__(self, members: Members, weights: WeakValueDictionary[int, Weight], changes: Changes) -> None:
        super().__init__()
        self._members, self._weights, self._changes = members, weights, changes

    def patch(self, patcher: Patcher) -> None:
        """Replaces what makes gradients, and how they are assigned.

        Of any other tensor `.grad` is read in 0.11 us (0.07 without) and assigned in 0.45 us (0.19).
        """
        is_missing = RUN_BACKWARD.is_missing()
        place = (torch.autograd, "backward") if is_missing else RUN_BACKWARD.find_place()
        patcher.replace(*place, self._watch(getattr(*place)))
        original = get_raw(Tensor, "grad")
        weights, changes = self._weights.data, self._changes  # where nothing written in Python looks them up

        def assign(tensor: Tensor, grad: Tensor | None) -> None:
            find = weights.get(id(tensor))
            weight = None if find is None else find()
            if weight is None or not weight.has_side(tensor):
                original.__set__(tensor, grad)
            else:
                weight.assign_grad(tensor, grad)
                if grad is not None:
                    changes.count += 1

        patcher.replace(Tensor, "grad", AssignedGrad(original, assign))

    def _watch(self, run: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(run)
        def backward(*args: object, **kwargs: object) -> object:
            is_traced = torch.compiler.is_dynamo_compiling()
            if is_traced or not kwargs.get("accumulate_grad", True):  # of torch.autograd.grad
                return run(*args, **kwargs)
            if graph_task() != -1:  # inside of another one, at whose end masters get what both have made
                try:
                    return run(*args, **kwargs)
                finally:
                    self._changes.count += 1
            amps = self._members.optimizers(thread=get_ident())
            for amp in amps:
                if amp.masters.pairs:
                    amp.begin_backward()
            self._changes.count += 1
            try:
                return run(*args, **kwargs)
            finally:
                self._changes.count += 1  # again: another thread may have looked meanwhile
                for amp in amps:
                    if amp.masters.pairs:
                        amp.end_backward()

        return backward


class ScaledBackwards(SessionPatch):
    """Knows what the gradients of a backward are scaled by, where a loss scale is no static 1.

    What a backward begins at shows it: the scaled loss of a block itself, as a rule, or something that was
    computed from it. No hook tells of it, so `torch.autograd.backward` is patched. Gradients that a block
    makes for optimizers that it does not name are unscaled as those of the others, and one that begins at a
    scaled loss after its block has ended is a block of its own.
    """

    def __init__(self, members: Members, around: Surroundings) -> None:
        super().__init__()
        self._members, self._around = members, around
        self.forget()

    def forget(self) -> None:
        self.blocks: dict[int, ScaledLoss] = {}  # that are open, by id; the innermost is the last
        self._ended = deque[int](maxlen=MANY)  # the numbers of those that have ended, in their graphs

    def patch(self, patcher: Patcher) -> None:
        patcher.replace(torch.autograd, "backward", self._watch(torch.autograd.backward))

    def begin_block(self, block: ScaledLoss) -> None:
        """Notes that a block has begun whose loss is scaled."""
        block.thread = get_ident()
        self.blocks[id(block)] = block
        if block.scaled.grad_fn is not None:
            block.scaled.grad_fn.metadata[MARK] = block.scale

    def end_block(self, block: ScaledLoss) -> None:
        if self.blocks.pop(id(block), None) is not None and block.scaled.grad_fn is not None:
            self._ended.append(block.scaled.grad_fn._sequence_nr())

    def list_open(self) -> list[ScaledLoss]:
        return [block for block in list(self.blocks.values()) if block.thread == get_ident()]

    def _watch(self, run: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(run)
        def backward(tensors: object, grad_tensors: object = None, *args: object, **kwargs: object) -> None:
            blocks = list(self.blocks.values())  # at once: other threads may open some
            if blocks and tensors is blocks[-1].scaled:
                blocks[-1].went_backward = True
                self._adopt_others(blocks[-1])
                return run(tensors, grad_tensors, *args, **kwargs)
            if graph_task() != -1:  # inside of another one
                return run(tensors, grad_tensors, *args, **kwargs)
            roots = [tensors] if isinstance(tensors, Tensor) else tensors
            if scaled := self._find_scaled(roots):
                for block in scaled:
                    block.went_backward = True
                self._adopt_others(scaled[-1])
                return run(tensors, grad_tensors, *args, **kwargs)
            if (scale := self._find_late(roots)) is not None:
                for callback in self._around.events.late_backward_begins:
                    callback(None)
                with LateLoss(scale, self._around, self._members.optimizers(thread=get_ident())):
                    return run(tensors, grad_tensors, *args, **kwargs)
            plain = PlainBackward(grad_tensors is None and _are_tensors(roots), self.list_open())
            for block in plain.blocks:
                block.release()
            amps = [] if plain.blocks else self._members.optimizers(thread=get_ident())
            for amp in amps:
                amp.begin_plain_backward()
            for callback in self._around.events.plain_backward_begins:
                callback(plain)
            try:
                return run(tensors, grad_tensors, *args, **kwargs)
            finally:
                for amp in amps:
                    if amp.phase is Phase.READ:  # and has no masters
                        amp.end_backward()
                for callback in self._around.events.plain_backward_ended:
                    callback(plain)

        return backward

    def _adopt_others(self, block: ScaledLoss) -> None:
        """Has a block unscale what its loss is about to make for optimizers that it does not name."""
        if self._members.count() > len(block.optimizers) and block.scale.capture is None:
            block.adopt(self._members.optimizers(thread=get_ident()))

    def _find_late(self, roots: object) -> Scale | None:
        """The scale of a block that has ended, if a backward begins at what came of the loss that it yielded.

        The tensor may be gone by then, but not what the graph knows of it; other threads number theirs alike.
        """
        for node in walk(roots, min(self._ended)) if self._ended and _are_tensors(roots) else ():
            if node._sequence_nr() in self._ended and (scale := node.metadata.get(MARK)) is not None:
                return scale if scale.capture is None else None
        return None

    def _find_scaled(self, roots: object) -> list[ScaledLoss]:
        """The open blocks whose scaled losses a backward begins at, or at what came of them."""
        blocks = self.list_open() if _are_tensors(roots) else []
        return [block for block in blocks if leads_to(roots, block.scaled)]


def _are_tensors(roots: object) -> TypeGuard[Sequence[Tensor]]:
    return isinstance(roots, (list, tuple)) and all(isinstance(root, Tensor) for root in roots)


def leads_to(roots: Sequence[Tensor], scaled: Tensor) -> bool:
    """Whether any of these tensors was computed from the scaled loss."""
    target = scaled.grad_fn
    return target is None or any(node is target for node in walk(roots, target._sequence_nr()))


def walk(roots: Sequence[Tensor], first: int) -> Iterator[Node]:
    """Yields the nodes of a graph, but for those before the `first` number: they are numbered in order."""
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    visited = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        inner = {one for one, _ in node.next_functions if one is not None and one._sequence_nr() >= first}
        waiting += inner - visited
        visited |= inner
