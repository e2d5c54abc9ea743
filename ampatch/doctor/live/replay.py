"""Does a recorded step again under the instruments, as it was and in float32, and says what broke."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.dispatch import Operations
from ampatch.doctor.instruments.places import OURS, SCALERS, masters_of, unwrap, user_line
from ampatch.doctor.instruments.precision import Oversized
from ampatch.doctor.instruments.tape import CASTS, REPEATED, Op, Origin, Tape, name_of, nodes_of
from ampatch.doctor.instruments.trace import Trace
from ampatch.doctor.instruments.values import (
    examine,
    is_finite,
    off_casts,
    quiet,
    set_random,
    tensors_in,
)
from ampatch.doctor.live.record import (
    Backward,
    Forward,
    Record,
    RecordedCall,
    Slot,
    Variables,
    call_at,
    map_tensors,
    put_back,
)
from ampatch.doctor.suspects import find_hidden
from ampatch.levels.ranks import has_ranks


class Impossible(Exception):
    """A step cannot be done again."""


@dataclass
class Replayed:
    """What came of a replay: where bad numbers came from, and what float32 makes of the same step."""

    origins: list[Origin] = field(default_factory=list)
    survives: bool | None = None
    unknown: list[str] = field(default_factory=list)
    oversized: Sequence[str] = ()  # layers with numbers that float16 cannot hold


def replay(
    record: Record,
    optimizer: Optimizer,
    models: Sequence[Module],
    optimizers: Sequence[Optimizer],
    scale: float,
) -> Replayed:
    """Does the step of an optimizer again, at the scale of its loss, with all that is watched."""
    replayed = Replayed()
    try:
        refuse(record, models)
        with as_it_was(record, models):
            run = Rerun(record, {id(model): unwrap(model) for model in models})
            run.clock.get_scale, trace = lambda: scale, Trace(Tape(run.clock), None)
            try:
                run_again(run, trace)
            finally:
                replayed.origins = found_by(trace, record, optimizer)
        with as_it_was(record, models):
            again = InFloat32(record, models, optimizers)
            trace = Trace(Tape(again.clock), None) if find_hidden(replayed.origins) else None
            oversized = Oversized(again.clock)
            run_again(again, trace)
            replayed.survives, replayed.oversized = again.is_finite(), tuple(oversized.names)
            behind = found_by(trace, record, optimizer) if trace is not None else []
            replayed.origins = [origin for origin in behind if origin.has_reached] + replayed.origins
    except Exception as error:  # of the script's own code, or of torch: training goes on
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        what = "whether float32 survives is not known" if replayed.origins else "it could not be replayed"
        replayed.unknown.append(f"{what}: {reason}")
    if not replayed.unknown and not any(origin.has_reached for origin in replayed.origins):
        why = "another rank may have broken it" if has_ranks() else "it drew from elsewhere than torch"
        replayed.unknown.append(f"it did not break again when it was replayed: {why}")
    return replayed


def refuse(record: Record, models: Sequence[Module]) -> None:
    """Raises Impossible for what a replay would get wrong, or other ranks would have to join."""
    if not record.of(Forward):
        raise Impossible("no forward of a watched model came before it: watch what is called as model(...)")
    if any(tensor._version != version for tensor, version in record.slots.given):
        raise Impossible("what the step took was written to before its end")
    modules = [each for model in models for each in model.modules()]
    are_sharded = any("FullyShardedDataParallel" in type(each).__name__ for each in modules)
    if are_sharded or any(hasattr(p, "to_local") for model in models for p in model.parameters()):
        raise Impossible("weights are distributed over ranks, and a replay would need all of them")
    if any(isinstance(each, torch.nn.SyncBatchNorm) and each.training for each in modules):
        raise Impossible("SyncBatchNorm computes over all ranks, and a replay is of one")


@contextmanager
def as_it_was(record: Record, models: Sequence[Module]) -> Iterator[None]:
    """Has models and generators be what they were before a step; afterwards all is as it is now."""
    devices = {p.device for model in models for p in model.parameters() if p.device.type == "cuda"}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        for buffers, attributes in record.state.values():
            stack.enter_context(buffers.restored())
            found = [(vars(owner), values) for find, values in attributes if (owner := find()) is not None]
            stack.enter_context(put_back(found))
        for parameter in [parameter for model in models for parameter in model.parameters()]:
            stack.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        if record.weights is not None:
            stack.enter_context(record.weights.restored())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        yield


def run_again(run: Rerun, trace: Trace | None) -> None:
    """Does a step again, which a trace follows."""
    with run.clock.undo:
        run.clock.follow_modules()
        if trace is not None:
            Operations(trace.tape, [trace]).follow()
        run.run()


def found_by(trace: Trace, record: Record, optimizer: Optimizer) -> list[Origin]:
    """Returns the origins that a trace found; where the loss was not seen being made, its bad value."""
    with quiet():
        trace.end_attempt(optimizer)
    origins = trace.found()
    if not record.slots.is_whole and not any(origin.has_reached for origin in origins):
        for value, event in zip(record.losses, record.of(Backward), strict=False):
            if not is_finite(value):
                call = Op("", "loss", None, call_at(event.frames, user_line), str(value.dtype)[6:])
                return [*origins, Origin(call, "loss", examine(value), 0, has_reached=True)]
    return origins


class Rerun:
    """Does the events of a record again, with `models` by the ids of those that ran, and tells a clock."""

    casts = True

    def __init__(self, record: Record, models: Mapping[int, Module]) -> None:
        self._record, self._models, self.clock = record, models, Clock(ExitStack())
        self.values: dict[int, Tensor] = {}  # by slot
        self._variables: Variables = []  # of the latest forward
        self.parameters = [p for model in models.values() for p in model.parameters() if p.requires_grad]

    def run(self) -> None:
        """Does all events; raises Impossible where one took what is not known."""
        for event in self._record.events:
            if isinstance(event, Backward):
                call_at(event.frames, functools.partial(self.go_backward, event))
            else:
                self.make(event)
        if not self._record.of(Backward):
            self.go_backward(Backward([None], {}, ()))  # by torch.autograd.grad

    def resolve(self, value: object) -> object:
        return map_tensors(value, self._resolve)

    def _resolve(self, value: Tensor | Slot) -> Tensor:
        if isinstance(value, Tensor):
            return value
        if value.index not in self.values:
            raise Impossible("it took what was made before it")
        return self.values[value.index]

    def make(self, event: RecordedCall) -> None:
        """Calls a model, or a function, again."""
        function = event.function
        if isinstance(event, Forward):
            model = function()
            if model is None:
                raise Impossible("its model is gone")
            function, self._variables = self._models[id(model)], event.variables
            set_random(event.random)
        args, kwargs = self.resolve(event.args), self.resolve(event.kwargs)
        with event.mode.entered(self.casts), put_back(self._variables):
            self.keep(event, call_at(event.frames, functools.partial(function, *args, **kwargs)))

    def keep(self, event: RecordedCall, result: object) -> None:
        self.values.update(zip(event.outputs, tensors_in(result), strict=False))

    def go_backward(self, event: Backward) -> None:
        """Goes backward again; from a loss that nobody saw being made it cannot."""
        is_known = self._record.slots.is_whole and None not in event.roots
        returned = [slot for one in self._record.of(Forward) for slot in one.outputs]
        roots = [self.values[slot] for slot in (event.roots if is_known else returned)]
        with self.clock.backward(tuple(roots)), put_back(self._variables):
            if is_known:
                self._add_gradients(roots, self.resolve(event.options))

    def _add_gradients(self, roots: list[Tensor], options: dict[str, object]) -> None:
        """Gradients are added up as in the step."""
        kept = {name: options[name] for name in ("retain_graph", "create_graph") if name in options}
        grads = options.get("gradient", options.get("grad_tensors"))
        grads = grads if grads is None or isinstance(grads, (tuple, list)) else [grads]
        if any(node.name() == REPEATED for node in nodes_of(roots)):
            self._go_through(roots, grads, kept)
            return
        gradients = torch.autograd.grad(roots, self.parameters, grads, allow_unused=True, **kept)
        with quiet():
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                if gradient is not None:
                    earlier = parameter.grad
                    parameter.grad = gradient.detach() if earlier is None else earlier + gradient

    def _go_through(self, roots: list[Tensor], given: Sequence | None, kept: dict[str, object]) -> None:
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


class InFloat32(Rerun):
    """Does a step again on float32 copies of the models, with no casts and no loss scale."""

    casts = False

    def __init__(self, record: Record, models: Sequence[Module], optimizers: Sequence[Optimizer]) -> None:
        if not (record.slots.is_whole and record.of(Backward)):
            raise Impossible("how the loss came of the model is not known")
        masters = {id(half): master for one in optimizers for half, master in masters_of(one)}
        self._twins: dict[int, Tensor] = {}  # parameters of the copies, by the ids of those they stand for
        copies = {id(model): copy_in_float32(unwrap(model), masters, self._twins) for model in models}
        super().__init__(record, copies)

    def run(self) -> None:
        with off_casts():
            super().run()

    def is_finite(self) -> bool:
        """Says whether all losses and gradients of the run are finite."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        losses = [self.values[slot] for one in self._record.of(Backward) for slot in one.roots]
        with off_casts():
            return all(map(is_finite, [*gradients, *losses]))

    def _resolve(self, value: Tensor | Slot) -> Tensor:
        if isinstance(value, Slot):
            return super()._resolve(value)
        if id(value) in self._twins:
            return self._twins[id(value)]
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value

    def make(self, event: RecordedCall) -> None:
        """Makes a call again, but for our casts and the product with the loss scale."""
        name = name_of(event.function)
        is_ours = bool(event.frames) and event.frames[0][0].co_filename.startswith(OURS[0])
        is_scaler = any(code.co_filename.endswith(SCALERS) for code, _ in event.frames)
        if (is_ours and name in CASTS) or (is_scaler and name in ("mul", "mul_")):
            self.keep(event, self.resolve(event.args[0]))
        else:
            super().make(event)


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
