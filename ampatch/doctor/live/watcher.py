"""The hooks of a watch: they record each step, and have one that breaks replayed."""

from __future__ import annotations

import atexit
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import FrameType

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import ampatch as amp
from ampatch.doctor.instruments.clock import wrap
from ampatch.doctor.instruments.places import frames, parameters_of
from ampatch.doctor.instruments.values import is_finite, node_of, random_of, tensors_in
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.live.outcome import Check, Flag, Step, alive, outcomes_of
from ampatch.doctor.live.patient import Patient
from ampatch.doctor.live.record import Backward, Forward, Mode, Record, Recorder, capture, hold_gradients
from ampatch.doctor.live.state import State, take
from ampatch.levels.private import RUN_BACKWARD
from ampatch.levels.stack import wrap_closure

SCALE_EVERY = 100  # attempts, between two looks at the scale of a GradScaler on a GPU, which wait for it


class Hook:
    """A hook of a model; copies and pickles of the model have one that does nothing."""

    def __init__(self, call: Callable[..., object] | None = None) -> None:
        self._call = call

    def __call__(self, *args: object) -> None:
        if self._call is not None and not torch.compiler.is_compiling():
            self._call(*args)

    def __reduce__(self) -> tuple:
        return Hook, ()


class Watcher:
    """Watches models and optimizers; keeps none of them alive."""

    def __init__(self, models: Sequence[Module], optimizers: Sequence[Optimizer], patient: Patient) -> None:
        self._models = [weakref.ref(model, self._forget) for model in models]
        self._optimizers = {id(one): weakref.ref(one) for one in optimizers}
        self._patient = patient
        self._recorder, self._check = Recorder(), Check()
        self._record = Record()
        self._spare: dict[int, State] = {}  # of a step that was judged late
        self._is_over = False  # whether the next forward begins another step
        self._is_busy = False  # in a backward or a replay
        self._running: list[Module] = []
        self._forward: Forward | None = None
        self._steps: Counter[int] = Counter()
        self._frame: FrameType | None = None  # of the optimizer's step that runs
        self._may_skip = False  # whether a scaler of ours may have it skipped
        self._scaling: GradScaler | None = None
        self._waiting: list[Step] = []
        self._scale: float | None = None

    def open(self, undo: ExitStack) -> None:
        """Puts the hooks where they belong; `undo` takes them away."""
        atexit.register(undo.close)  # a script may end without taking its watch away
        undo.callback(atexit.unregister, undo.close)
        undo.callback(self._finish)
        for find in self._models:
            model = find()
            before = model.register_forward_pre_hook(Hook(self._enter), prepend=True, with_kwargs=True)
            undo.callback(before.remove)
            after = model.register_forward_hook(Hook(self._leave), always_call=True)
            undo.callback(after.remove)
        undo.callback(register_optimizer_step_pre_hook(self._begin_step).remove)
        undo.callback(register_optimizer_step_post_hook(self._end_step).remove)
        wrap(torch.Tensor, "backward", self._around_backward, undo)
        if not RUN_BACKWARD.is_missing():
            wrap(*RUN_BACKWARD.find_place(), self._around_engine, undo)
        wrap(GradScaler, "step", self._around_scaler, undo)

    def _forget(self, _: object) -> None:
        """A model is gone: what its steps took may go too."""
        self._record, self._spare, self._waiting = Record(), {}, []

    def _finish(self) -> None:
        self._recorder.stop()
        self._resolve(all_of_them=True)
        self._patient.finish(alive(self._models))

    # ---- Forwards ----

    def _enter(self, model: Module, args: tuple, kwargs: dict) -> None:
        self._recorder.stop()
        if self._is_busy or self._patient.is_replaying or not torch.is_grad_enabled():
            return
        self._running.append(model)
        if len(self._running) > 1:
            return
        if self._is_over:
            waits = self._waiting and any(step.record is self._record for step in self._waiting)
            self._record, self._is_over = Record(self._spare if waits else self._record.state), False
        record = self._record
        if id(model) not in record.state:
            record.state[id(model)] = record.spare.pop(id(model), None) or State(model)
            record.state[id(model)].save()
        state = record.state[id(model)]
        taken = record.slots.refer(args), record.slots.refer(kwargs) if kwargs else {}
        self._forward = Forward(
            weakref.ref(model),
            *taken,
            capture(3),
            Mode.now(state.device.type),
            random=random_of(state.device),
            surroundings=take(state.files),
        )

    def _leave(self, model: Module, args: tuple, output: object) -> None:
        if self._is_busy or not (self._running and self._running[-1] is model):
            return
        self._running.pop()
        if self._running or self._forward is None:
            return
        forward, self._forward = self._forward, None
        forward.outputs = self._record.slots.add(output)
        for slot, tensor in zip(forward.outputs, tensors_in(output), strict=True):
            if (node := node_of(tensor)) is not None:
                forward.nodes.append((slot, node._sequence_nr(), tensor.output_nr))
        self._record.events.append(forward)
        if not self._recorder.start(self._record, forward.mode.device):
            self._record.slots.is_whole = False

    # ---- Backward passes ----

    def _around_backward(self, original: Callable[..., object], loss: Tensor, *args, **kwargs) -> object:
        self._recorder.stop()
        if self._is_busy or not self._record.events:
            return original(loss, *args, **kwargs)
        record = self._record
        slot = record.slots.find(loss)
        record.slots.is_whole &= slot is not None
        given = record.slots.refer(args), record.slots.refer(kwargs)
        record.losses.append(loss.detach().clone() if loss.dim() else loss.data)  # data has no version
        if loss.is_cpu and not is_finite(loss):  # gradients may be finite, and the step be made
            self._keep_weights(record)
        if not record.slots.is_whole:
            hold_gradients(record, [loss])
        record.events.append(Backward(slot, *given, capture(3), record.losses[-1]))
        self._is_busy = True
        try:
            return original(loss, *args, **kwargs)
        finally:
            self._is_busy = False

    def _around_engine(self, original: Callable[..., object], roots: Sequence, *args, **kwargs) -> object:
        """Stands in for what runs each backward pass; of one that nobody saw begin the loss is not known."""
        is_noted = (
            self._is_busy or self._recorder.runs
        )  # torch.autograd.grad in a loss is one of its operations
        if not is_noted and hold_gradients(self._record, [it for it in roots if isinstance(it, Tensor)]):
            self._record.slots.is_whole = False
        return original(roots, *args, **kwargs)

    # ---- Steps ----

    def _around_scaler(self, original, scaler: GradScaler, optimizer: Optimizer, *args, **kwargs) -> object:
        self._recorder.stop()
        if self._is_busy or not self._knows(optimizer) or not scaler.is_enabled():
            return original(scaler, optimizer, *args, **kwargs)
        number = self._steps[id(optimizer)]
        self._scaling = scaler
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            self._scaling = None
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        skipped = self._steps[id(optimizer)] == number
        self._steps[id(optimizer)] = number + 1
        found = list(scaler._found_inf_per_device(optimizer).values()) if is_fused else []
        flag = Flag(torch.stack([each.to(found[0].device) for each in found]).amax()) if found else None
        flag = flag or self._check.of(self._record.losses)
        self._scale = self._read_scale(scaler, skipped)
        self._settle(Step(weakref.ref(optimizer), number, self._record, flag, (), skipped, self._scale, True))
        return result

    def _read_scale(self, scaler: GradScaler, skipped: bool) -> float | None:
        is_free = scaler._scale is None or not scaler._scale.is_cuda
        if is_free or skipped or self._scale is None or self._patient.latest % SCALE_EVERY == 0:
            return scaler.get_scale()
        return self._scale

    def _begin_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple | None:
        self._recorder.stop()
        if self._is_busy or not self._knows(optimizer):
            return None
        if self._frame is not None and any(frame is self._frame for frame in frames()):
            return None  # inside of a step of ours: a class that calls `super().step()` runs the hooks twice
        self._frame = sys._getframe(1)
        if self._waiting:
            self._resolve()
        changed = wrap_closure(args, kwargs, functools.partial(self._look_after, optimizer))
        if changed is None:
            self._look(optimizer)
        return changed

    def _look_after(self, optimizer: Optimizer, closure: Callable[[], object]) -> object:
        result = closure()
        self._recorder.stop()
        self._look(optimizer)
        return result

    def _look(self, optimizer: Optimizer) -> None:
        """Looks at a step that is about to be made, unless a scaler does, which is asked after it."""
        scaler = self._patient.scaler
        self._may_skip = scaler is not None and scaler.is_dynamic and outcomes_of(optimizer) is not None
        if self._scaling is None and not self._may_skip:
            self._check_gradients(optimizer)

    def _check_gradients(self, optimizer: Optimizer) -> None:
        gradients = [grad for param in parameters_of(optimizer) if (grad := param.grad) is not None]
        flag = self._check.of(gradients + self._record.losses)
        scaler, number = self._patient.scaler, self._steps[id(optimizer)]
        scale = None if scaler is None or scaler.is_dynamic else scaler.number
        if flag is None or not (flag.is_late or flag.read()):
            self._is_over = True
            self._patient.add(Attempt(number, scale))
        else:
            self._settle(Step(weakref.ref(optimizer), number, self._record, flag, scale=scale))

    def _end_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if self._is_busy or not self._knows(optimizer) or self._frame is not sys._getframe(1):
            return
        self._frame = None
        if self._scaling is None and self._may_skip:
            number = self._steps[id(optimizer)]
            if outcomes := outcomes_of(optimizer):
                self._settle(Step(weakref.ref(optimizer), number, self._record, None, outcomes))
            else:  # no block of `scale_loss` was for it
                self._check_gradients(optimizer)
        self._is_over |= self._scaling is None
        self._steps[id(optimizer)] += 1

    def _settle(self, step: Step) -> None:
        """Judges a step, now or when the device has told of it; until then its weights are kept."""
        self._is_over = True
        if step.is_known():
            self._judge(step)
        else:
            self._waiting.append(step)
            self._keep_weights(step.record)

    def _keep_weights(self, record: Record) -> None:
        if not record.weights.tensors:
            record.weights.take([weight for model in alive(self._models) for weight in model.parameters()])

    def _resolve(self, *, all_of_them: bool = False) -> None:
        """Judges the steps before this one; the device has gone on to this one's forward by now."""
        due = [step for step in self._waiting if all_of_them or step.record is not self._record]
        self._waiting = [step for step in self._waiting if step not in due]
        for step in due:
            self._spare = step.record.state
            self._judge(step)

    def _judge(self, step: Step) -> None:
        attempt = step.judge()
        if not self._patient.add(attempt):
            return
        watching = [it for it in amp.observers() if isinstance(it, Patient)]  # of the same model, maybe
        self._is_busy = True
        for patient in watching:
            patient.is_replaying = True
        try:
            models, optimizers = alive(self._models), alive(self._optimizers.values())
            self._patient.examine(step, models, optimizers)
        finally:
            self._is_busy = False
            for patient in watching:
                patient.is_replaying = False

    def _knows(self, optimizer: Optimizer) -> bool:
        find = self._optimizers.get(id(optimizer))
        return find is not None and find() is optimizer
