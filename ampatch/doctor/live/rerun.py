"""Does the events of a record again, one by one, as they were or in float32."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.operations import CASTS, REPEATED, name_of, nodes_of
from ampatch.doctor.instruments.places import OURS, SCALERS, masters_of, unwrap
from ampatch.doctor.instruments.values import is_finite, off_casts, quiet, set_random, tensors_in
from ampatch.doctor.live.record import Backward, Forward, Operation, Record, Slot, call_at, map_tensors
from ampatch.doctor.live.state import Surroundings, restored


class Impossible(Exception):
    """A step cannot be done again."""


class Rerun:
    """Does the events of a record again, with `models` by the ids of those that ran, and tells a clock."""

    def __init__(self, record: Record, models: Mapping[int, Module]) -> None:
        self._record, self._models, self.clock = record, models, Clock(ExitStack())
        self.values: dict[int, Tensor] = {}
        self.parameters = [p for model in models.values() for p in model.parameters() if p.requires_grad]
        self.casts = True
        self._surroundings: Surroundings = []  # of the latest forward

    def run(self) -> None:
        """Does all events; raises Impossible where one took what is not known."""
        for event in self._record.events:
            if isinstance(event, Backward):
                self.backward(event)
            else:
                self.operate(event)
        if not self._record.of(Backward):
            self.backward(Backward(None, (), {}, (), torch.zeros(())))  # by torch.autograd.backward

    def resolve(self, value: object) -> object:
        """Returns arguments with the tensors of this run."""
        return map_tensors(value, self._resolve)

    def _resolve(self, value: Tensor | Slot) -> Tensor:
        if isinstance(value, Tensor):
            return value
        if value.index not in self.values:
            raise Impossible("it took what was made before it")
        return self.values[value.index]

    def keep(self, slots: Sequence[int], result: object) -> None:
        """Takes what an event gave."""
        self.values.update(zip(slots, tensors_in(result), strict=False))

    def operate(self, event: Operation) -> None:
        """Calls a model, or makes an operation, again."""
        function = event.function
        if isinstance(event, Forward):
            model = function()
            if model is None:
                raise Impossible("its model is gone")
            function, self._surroundings = self._models[id(model)], event.surroundings
            set_random(event.random)
        args, kwargs = self.resolve(event.args), self.resolve(event.kwargs)
        with event.mode.entered(self.casts), restored(self._surroundings):
            run = functools.partial(function, *args, **kwargs)
            self.keep(event.outputs, call_at(event.frames, run))

    def backward(self, event: Backward) -> None:
        """Goes backward again, from the line that did."""
        call_at(event.frames, functools.partial(self._tell_backward, event))

    def _tell_backward(self, event: Backward) -> None:
        returned = [slot for one in self._record.of(Forward) for slot in one.outputs]
        whole = self._record.slots.is_whole and event.loss is not None
        with self.clock.backward(tuple(self.values[it] for it in ([event.loss] if whole else returned))):
            self._go_backward(event)

    def _go_backward(self, event: Backward) -> None:
        """Gradients are added up as in the step."""
        roots, given = self.find_roots(event)
        kept = {name: event.kwargs[name] for name in ("retain_graph", "create_graph") if name in event.kwargs}
        with restored(self._surroundings):
            if any(node.name() == REPEATED for node in nodes_of(roots)):
                self._go_through(roots, given, kept)
                return
            gradients = torch.autograd.grad(roots, self.parameters, given, allow_unused=True, **kept)
        with quiet():
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                if gradient is not None:
                    earlier = parameter.grad
                    parameter.grad = gradient.detach() if earlier is None else earlier + gradient

    def _go_through(self, roots: list[Tensor], given: list[Tensor | None], kept: dict[str, object]) -> None:
        """Goes backward to all leaves, as reentrant checkpoints must; only parameters keep gradients."""
        is_waited_for = any(parameter._post_accumulate_grad_hooks for parameter in self.parameters)
        models = [event.function() for event in self._record.of(Forward)]
        if is_waited_for or any(isinstance(model, DistributedDataParallel) for model in models):
            raise Impossible("a backward through use_reentrant=True would call what waits for its gradients")
        own = set(map(id, self.parameters))
        with ExitStack() as undo:
            for leaf in [node.variable for node in nodes_of(roots) if hasattr(node, "variable")]:
                if id(leaf) not in own:
                    undo.callback(setattr, leaf, "grad", leaf.grad)
                    leaf.grad = None
            torch.autograd.backward(roots, given, **kept)

    def find_roots(self, event: Backward) -> tuple[list[Tensor], list[Tensor | None]]:
        """Returns what a backward began at: the loss, or what the models returned where it is not known."""
        if self._record.slots.is_whole:
            args, kwargs = self.resolve(event.args), self.resolve(event.kwargs)
            return [self.values[event.loss]], [args[0] if args else kwargs.get("gradient")]
        found = [pair for one in self._record.of(Forward) for pair in one.gradients.items()]
        if not found:
            raise Impossible("how the loss came of the model is not known")
        return [self.values[slot] for slot, _ in found], [gradient for _, gradient in found]


class InFloat32(Rerun):
    """Does a step again on float32 copies of the models, with no casts and no loss scale."""

    def __init__(self, record: Record, models: Sequence[Module], optimizers: Sequence[Optimizer]) -> None:
        if not record.slots.is_whole:
            raise Impossible("how the loss came of the model is not known")
        masters = {id(half): master for one in optimizers for half, master in masters_of(one)}
        self._twins: dict[int, Tensor] = {}  # parameters of the copies, by the ids of those they stand for
        copies = {id(model): copy_in_float32(unwrap(model), masters, self._twins) for model in models}
        super().__init__(record, copies)
        self.casts = False

    def run(self) -> None:
        """Does all events, with casts off."""
        with off_casts():
            super().run()

    def is_finite(self) -> bool:
        """Says whether all losses and gradients of the run are finite."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        losses = [self.values[one.loss] for one in self._record.of(Backward)]
        with off_casts():
            return all(map(is_finite, [*gradients, *losses]))

    def _resolve(self, value: Tensor | Slot) -> Tensor:
        if isinstance(value, Slot):
            return super()._resolve(value)
        if id(value) in self._twins:
            return self._twins[id(value)]
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value

    def operate(self, event: Operation) -> None:
        """Makes an operation again, but for our casts and the loss scale."""
        if is_of_precision(event):
            self.keep(event.outputs, self.resolve(event.args[0]))
            return
        super().operate(event)


def is_of_precision(event: Operation) -> bool:
    """Says whether an operation is a cast of ours, or a scaler's product."""
    name = name_of(event.function)
    is_ours = bool(event.frames) and event.frames[0][0].co_filename.startswith(OURS[0])
    is_scaler = any(code.co_filename.endswith(SCALERS) for code, _ in event.frames)
    return (is_ours and name in CASTS) or (is_scaler and name in ("mul", "mul_"))


def copy_in_float32(model: Module, masters: Mapping[int, Tensor], twins: dict[int, Tensor]) -> Module:
    """Returns a copy of a model with float32 weights, those of the masters where there are any."""
    memo: dict[int, object] = {}
    for module in model.modules():
        for value in vars(module).values():
            for tensor in tensors_in(value):
                if tensor.grad_fn is not None:  # what a forward left on the module
                    memo[id(tensor)] = tensor.detach()
    copied = copy.deepcopy(model, memo).float()
    for own, twin in zip(model.parameters(), copied.parameters(), strict=True):
        twins[id(own)] = twin
        if id(own) in masters:
            with torch.no_grad():
                twin.copy_(masters[id(own)])
        twin.grad = None
    return copied
