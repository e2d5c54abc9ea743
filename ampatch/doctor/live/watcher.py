"""The hooks of a watch: they record each step, and have one that breaks replayed and explained."""

from __future__ import annotations

import atexit
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import Optimizer

import ampatch as amp
from ampatch.doctor.campaign import MOST_TRACED, findings_in, modules_to_keep
from ampatch.doctor.finding import Finding, Report, merge
from ampatch.doctor.instruments.clock import Clock, Instrument
from ampatch.doctor.instruments.places import parameters_of
from ampatch.doctor.instruments.tape import Op, Origin
from ampatch.doctor.instruments.values import are_finite, examine, is_finite, random_of
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.live.record import (
    Backward,
    CallRecorder,
    Copies,
    Forward,
    Mode,
    ModelState,
    Record,
    capture,
)
from ampatch.doctor.live.replay import replay
from ampatch.doctor.rules.table import explain
from ampatch.doctor.runs import Seen
from ampatch.doctor.suspects import describe_scale
from ampatch.doctor.words import describe, describe_finding
from ampatch.levels.private import check_and_unscale_
from ampatch.levels.stack import asked
from ampatch.patching.torch_patch import call_before_step

LARGE = 8192  # numbers of a tensor from which its sum, which writes nothing, is faster than the fused check

Object = TypeVar("Object")


@dataclass
class Patient(amp.Observer):
    """What is watched. `findings` and `report()` say what broke so far, as `ampatch doctor` does."""

    attempts: list[Attempt] = field(default_factory=list)  # those alike in a row are one object
    origins: list[Origin] = field(default_factory=list)
    oversized: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    replays: int = 0
    is_replaying: bool = False

    def __post_init__(self) -> None:
        self._good = 0.0  # the largest scale that a step was made with
        self._is_over = False  # weights are bad
        self._is_searching = False  # for a scale that does not overflow
        self._logged: set[object] = set()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What broke, in the order of appearance, with reasons and remedies."""
        return self._found()

    def _found(self, may_collapse: bool = True) -> tuple[Finding, ...]:
        seen = Seen(tuple(self.attempts), False, False, tuple(self.origins))
        return self._explained(findings_in(seen, seen.origins, may_collapse))

    def _explained(self, findings: Sequence[Finding]) -> tuple[Finding, ...]:
        keep = modules_to_keep(findings, self.oversized)
        return tuple(explain(replace(finding, keep=keep)) for finding in findings)

    @property
    def harmless(self) -> tuple[Finding, ...]:
        """What broke in a step that was replayed, and reached nothing."""
        return self._explained(
            merge(self.attempts, [origin for origin in self.origins if not origin.has_reached])
        )

    def report(self) -> Report:
        """Returns what was found as `ampatch doctor` reports it; `runs` counts the replays."""
        scale, unknown = describe_scale(self.attempts), tuple(dict.fromkeys(self.unknown))
        return Report(self.findings, self.harmless, scale, self.replays, unknown)

    def __str__(self) -> str:
        return "\n".join(describe(self.report()))

    @property
    def latest(self) -> int:
        return len(self.attempts) - 1

    # ---- What the watcher tells ----

    def add(self, attempt: Attempt) -> bool:
        """Notes an attempt; says whether it should be replayed: of a scale's search only the first is."""
        last = self.attempts[-1] if self.attempts else attempt
        is_alike = (last.scale, last.is_dynamic) == (attempt.scale, attempt.is_dynamic)
        self.attempts.append(last if last.is_finite and attempt.is_finite and is_alike else attempt)
        if attempt.is_finite:
            self._good, self._is_searching = max(self._good, attempt.scale or 0.0), False
            return False
        is_probe = attempt.is_dynamic and attempt.loss and (attempt.scale or 0.0) > self._good
        goes_on, self._is_searching = is_probe and self._is_searching, is_probe
        return not (goes_on or self.is_done)

    @property
    def is_done(self) -> bool:
        """Whether nothing is replayed any more: weights are bad, or enough steps were."""
        return self._is_over or self.replays >= MOST_TRACED

    def _blame_weights(self, index: int, step: int) -> None:
        """Notes that a step left bad weights: all that follows comes of it."""
        self._is_over, known = True, self.attempts[index]
        # One that was finite may be an object that stands for others, too.
        self.attempts[index] = replace(known, weights=False, step=step if known.is_finite else known.step)

    def _note(
        self, index: int, origins: Sequence[Origin], survives: bool | None = None, grown: float = 1.0
    ) -> None:
        for origin in origins:
            origin.call.facts["grown"] = grown
            origin.attempt, origin.float32_survives = index, survives
        self.origins += origins

    def examine(
        self,
        record: Record,
        optimizer: Optimizer,
        models: Sequence[Module],
        optimizers: Sequence[Optimizer],
    ) -> None:
        """Replays the latest attempt, and logs what is found."""
        last, grown = self.attempts[-1], record.grown
        replayed = call_before_step(replay, record, optimizer, models, optimizers, last.scale or 1.0)
        self.replays += 1
        self.oversized += replayed.oversized
        self.unknown += [f"step {last.step}: {line}" for line in replayed.unknown]
        of_weights = [
            origin for origin in replayed.origins if origin.phase == "optimizer" and not origin.call.op
        ]
        self._is_over |= bool(of_weights)
        if of_weights and not self.latest:  # no step has made them
            for origin in of_weights:
                origin.phase = "input"
        elif of_weights:
            replayed.origins = [origin for origin in replayed.origins if origin not in of_weights]
            if self.attempts[-2].is_finite:
                note_eps(of_weights, optimizer)
                self._note(self.latest - 1, of_weights, replayed.survives, grown)
            self._blame_weights(self.latest - 1, last.step - 1)
        self._note(self.latest, replayed.origins, replayed.survives, grown)
        self._tell(is_end=not last.is_dynamic)  # a static scale searches for nothing

    def finish(self, models: Sequence[Module]) -> None:
        """Says at the end whether the last step left bad weights, which costs a host sync."""
        named = [pair for model in models for pair in model.named_parameters()]
        if self.attempts and self.attempts[-1].is_finite:
            self._look_at_weights(
                next(((name, tensor) for name, tensor in named if not is_finite(tensor)), None)
            )
        self._tell(is_end=True)

    def _look_at_weights(self, bad: tuple[str, Tensor] | None) -> None:
        if bad is None:
            return
        call = Op("", "optimizer", None, None)
        origin = Origin(call, "optimizer", examine(bad[1]), 0, parameter=bad[0], has_reached=True)
        last = self.attempts[-1]
        self._blame_weights(self.latest, last.step + sum(attempt is last for attempt in self.attempts) - 1)
        self._note(self.latest, [origin])
        self.unknown.append("the last step left bad weights: which operation of the optimizer made them")

    def _tell(self, is_end: bool = False) -> None:
        """Logs findings that are new; of a scale that no step was made with more may be too large."""
        for finding in self._found(is_end or self._good > 0):
            if finding.identity not in self._logged:
                self._logged.add(finding.identity)
                asked.warning("%s", "\n".join(describe_finding(finding)))


def note_eps(origins: Sequence[Origin], optimizer: Optimizer) -> None:
    """Notes an eps of the optimizer that is 0 in the type of the weights that it made."""
    for group in optimizer.param_groups:
        eps, dtype = group.get("eps"), group["params"][0].dtype
        if eps and torch.tensor(eps, dtype=dtype) == 0:
            for origin in origins:
                origin.call.facts = {"constant": (eps, "0", str(dtype)[6:])}


# ---- The hooks ----


class Hook:
    """A hook of a model; copies and pickles of the model have one that does nothing."""

    def __init__(self, call: Callable[..., object] | None = None) -> None:
        self._call = call

    def __call__(self, *args: object) -> None:
        if self._call is not None and not torch.compiler.is_compiling():
            self._call(*args)

    def __reduce__(self) -> tuple:
        return Hook, ()


class Watcher(Instrument):
    """Watches models and optimizers; keeps none of them alive."""

    def __init__(
        self, clock: Clock, models: Sequence[Module], optimizers: Sequence[Optimizer], patient: Patient
    ) -> None:
        super().__init__(clock)
        self._models = [weakref.ref(model, self._forget) for model in models]
        self._optimizers = {id(one): weakref.ref(one) for one in optimizers}
        self._patient = patient
        self._recorder, self._check = CallRecorder(), Check()
        self._states: dict[int, ModelState] = {}  # by the id of the model
        self._record = Record()
        self._broken: Record | None = None  # of the step that runs
        self._is_over = False  # whether the next forward begins another step
        self._running: list[Module] = []
        self._forward: Forward | None = None
        self._steps: Counter[int] = Counter()
        self._scaling: GradScaler | None = None  # that makes the present step

    def open(self) -> None:
        """Puts the hooks where they belong, until the clock is undone."""
        undo = self.clock.undo
        atexit.register(undo.close)  # a script may end without taking its watch away
        undo.callback(atexit.unregister, undo.close)
        undo.callback(self._finish)
        for find in self._models:
            model = find()
            before = model.register_forward_pre_hook(Hook(self._enter), prepend=True, with_kwargs=True)
            undo.callback(before.remove)
            after = model.register_forward_hook(Hook(self._leave), always_call=True)
            undo.callback(after.remove)
        self.clock.follow_steps((Tensor, "backward"))

    def _forget(self, _: object) -> None:
        """A model is gone: what its steps took may go too."""
        self._record = Record()

    def _finish(self) -> None:
        self._recorder.stop()
        self._patient.finish(alive(self._models))

    # ---- Forwards ----

    def _enter(self, model: Module, args: tuple, kwargs: dict) -> None:
        self._recorder.stop()
        is_off = self.clock.in_backward or self._patient.is_replaying
        if is_off or not torch.is_grad_enabled():
            return
        self._running.append(model)
        if len(self._running) > 1:
            return
        if self._is_over:
            self._record, self._is_over = Record(), False
        record = self._record
        state = self._states.get(id(model))
        if state is None:
            state = self._states[id(model)] = ModelState(model)
        if id(model) not in record.state:
            record.state[id(model)] = state.save()
        taken = record.slots.refer(args), record.slots.refer(kwargs) if kwargs else {}
        mode, random = Mode.now(state.device.type), random_of(state.device)
        self._forward = Forward(
            weakref.ref(model), *taken, capture(3), mode, random=random, variables=state.variables()
        )

    def _leave(self, model: Module, args: tuple, output: object) -> None:
        if not (self._running and self._running[-1] is model):
            return
        self._running.pop()
        if self._running or self._forward is None:
            return
        forward, self._forward = self._forward, None
        forward.outputs = self._record.slots.add(output)
        self._record.events.append(forward)
        if not self._recorder.start(self._record, forward.mode.device):
            self._record.slots.is_whole = False

    # ---- Backward passes ----

    def begin_backward(self, losses: tuple[Tensor, ...]) -> None:
        """Notes the pass, and the losses."""
        self._recorder.stop()
        record = self._record
        if self._patient.is_replaying or not record.events:
            return
        roots = [record.slots.find(loss) for loss in losses]
        record.slots.is_whole &= None not in roots
        options = record.slots.refer(self.clock.backward_options)
        # data has no version
        record.losses += [loss.detach().clone() if loss.dim() else loss.data for loss in losses]
        record.events.append(Backward(roots, options, capture(1)))

    # ---- Steps ----

    def begin_attempt(self, optimizer: Optimizer, scaler: GradScaler | None) -> None:
        """Looks at a step that is about to be made; one with a closure makes its gradients itself."""
        self._recorder.stop()
        if self._knows(optimizer):
            self._scaling = scaler if scaler is not None and scaler.is_enabled() else None
            self._broken = None
            if not self.clock.has_closure:
                self._look(optimizer)

    def end_closure(self, optimizer: Optimizer) -> None:
        """Looks at what a closure made; of several calls the first that breaks counts."""
        self._recorder.stop()
        if self._knows(optimizer):
            self._look(optimizer)
            self._is_over = True

    def _look(self, optimizer: Optimizer) -> None:
        """Asks for numbers that are not finite; keeps the weights that they came of."""
        record = self._record
        gradients = [] if self._may_skip(optimizer) else gradients_of(optimizer)
        if self._broken is not None or not self._check.is_bad(gradients + record.losses):
            return
        self._broken = record
        if record.weights is None and not self._patient.is_done:  # nor has another optimizer changed them
            weights = [parameter for model in alive(self._models) for parameter in model.parameters()]
            masters = [
                parameter for one in alive(self._optimizers.values()) for parameter in parameters_of(one)
            ]
            record.weights = Copies([*dict.fromkeys([*weights, *masters])])
            record.grown = self._times_grown()

    def _times_grown(self) -> float:
        return max((state.times_grown() for state in self._states.values()), default=1.0)

    def _may_skip(self, optimizer: Optimizer) -> bool:
        """Says whether a loss scaler looks at the gradients, which has them checked once."""
        scaler = self.clock.scaler
        is_ours = scaler is not None and scaler.is_dynamic and outcomes_of(optimizer) is not None
        return self._scaling is not None or is_ours

    def end_attempt(self, optimizer: Optimizer) -> None:
        """Says what came of the step, and has it replayed where it broke."""
        if not self._knows(optimizer):
            return
        record = self._broken or self._record
        attempt = self._judge(optimizer, record)
        self._steps[id(optimizer)] += 1
        self._is_over, self._broken = True, None
        if not self._patient.add(attempt):
            return
        patients = [
            observer for observer in amp.observers() if isinstance(observer, Patient)
        ]  # of the same model, maybe
        for patient in patients:
            patient.is_replaying = True
        try:
            record.grown = record.grown or self._times_grown()
            self._patient.examine(record, optimizer, alive(self._models), alive(self._optimizers.values()))
        finally:
            for patient in patients:
                patient.is_replaying = False

    def _judge(self, optimizer: Optimizer, record: Record) -> Attempt:
        scaler, loss = self.clock.scaler, True
        scale = None if scaler is None or scaler.is_dynamic else scaler.number
        outcomes = () if self._scaling is not None else outcomes_of(optimizer) or ()
        is_dynamic, is_bad = True, self._broken is not None
        if self._scaling is not None:
            scale, skipped = self._scaling.get_scale(), not self.clock.is_made
            if getattr(optimizer, "_step_supports_amp_scaling", False):  # which skips on the device
                skipped |= any(map(bool, self._scaling._found_inf_per_device(optimizer).values()))
        elif outcomes:
            skipped = any(overflowed for overflowed, *_ in (outcome.read() for outcome in outcomes))
            scale = outcomes[0].read()[1]
            loss = all(outcome.is_loss_finite is not False for outcome in outcomes)
        else:
            # Where no block of `scale_loss` was for it, nobody has looked at the gradients.
            skipped = not is_bad and self._may_skip(optimizer) and self._check.is_bad(gradients_of(optimizer))
            is_dynamic = False
        if is_bad or skipped:
            loss = loss and all(map(is_finite, record.losses))
        gradients = not (skipped or (is_bad and loss))
        return Attempt(self._steps[id(optimizer)], scale, is_dynamic, loss, gradients)

    def _knows(self, optimizer: Optimizer) -> bool:
        find = self._optimizers.get(id(optimizer))
        return find is not None and find() is optimizer and not self._patient.is_replaying


class Check:
    """Asks whether a number is not finite; on a CPU faster than `are_finite`."""

    def __init__(self) -> None:
        self._found, self._one = torch.zeros((), device="cpu"), torch.ones((), device="cpu")

    def is_bad(self, tensors: list[Tensor]) -> bool:
        """Says whether one of the tensors holds inf or NaN; on a GPU it waits for the answer."""
        if tensors and tensors[0].is_cpu and {*map(type, tensors)} == {Tensor}:
            try:
                return self._is_any_bad(tensors)
            except RuntimeError:  # some are elsewhere, sparse, complex ...
                self._found.zero_()
        return not are_finite(tensors)

    def _is_any_bad(self, tensors: list[Tensor]) -> bool:
        """Says whether a number is not finite; raises RuntimeError for what is not dense and on the host."""
        large = [tensor for tensor in tensors if tensor.numel() > LARGE]
        are_plain = large and all(each.is_cpu and each.layout is torch.strided for each in large)
        if are_plain and torch.stack([each.sum() for each in large]).sum().isfinite():  # no number is bad
            tensors = [tensor for tensor in tensors if tensor.numel() <= LARGE]
        check_and_unscale_(tensors, self._found, self._one)  # by 1: it changes nothing
        is_bad = self._found.item() > 0
        if is_bad:
            self._found.zero_()
        return is_bad


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    return [grad for param in parameters_of(optimizer) if (grad := param.grad) is not None]


def outcomes_of(optimizer: Optimizer) -> tuple[amp.BackwardOutcome, ...] | None:
    """Returns what our scaler found before the last step, None for an optimizer that is not ours."""
    try:
        return amp.backward_outcomes(optimizer)
    except amp.AmpError:
        return None


def alive(references: Iterable[weakref.ref[Object]]) -> list[Object]:
    return [held for find in references if (held := find()) is not None]
