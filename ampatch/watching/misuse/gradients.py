"""Gradients that are used as they must not be: scaled, unscaled twice, or by an optimizer nobody knows."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType
from weakref import ref

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampatch.levels.patcher import Patcher, SessionPatch
from ampatch.levels.stack import Line, find_line
from ampatch.session.members import Members, ScaledBackwards
from ampatch.steps.block import PlainBackward, ScaledLoss
from ampatch.steps.optimizer import AmpOptimizer
from ampatch.steps.scaler import LossScaler
from ampatch.watching.misuse.half_weights import HalfWatch
from ampatch.watching.observers import Warner

RIGHT = "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
INSIDE = (
    "backward() in a block of scale_loss began at a loss that is not scaled, and its gradients were divided "
    f"by the loss scale: call backward() on what scale_loss yields, {RIGHT}"
)
OUTSIDE = (
    "backward() outside of scale_loss made the gradients of a step at a dynamic loss scale: small ones may "
    f"be lost, and an overflow is not skipped: write {RIGHT}"
)
LATE = (
    "backward() began at a scaled loss after its block of scale_loss had ended, and nothing of it counts "
    f"for the growth of the scale: move backward() into the block, {RIGHT}"
)

Lines = dict[int, Line]  # of optimizers, by id


class ScaleWatch:
    """Notes what plain backwards gave to which optimizers, where the loss scale is no static 1.

    Optimizers are known by id, so that none is kept alive. What is found is told at the step that would use
    it: a warning that is made an error then stops the step, with nothing half done.
    """

    def __init__(
        self, warner: Warner, members: Members, list_scalers: Callable[[], list[LossScaler]]
    ) -> None:
        self._warner, self._members, self._list_scalers = warner, members, list_scalers
        self.forget()

    def forget(self) -> None:
        """Drops what was seen."""
        self._blocks: dict[int, Lines] = {}  # open blocks, by id: what gave unscaled gradients in it to whom
        self._had_block: set[int] = set()  # optimizers, since their last step
        self._inside: Lines = {}  # what gave them unscaled gradients in a block
        self._outside: Lines = {}  # the same, where no block was open

    # Blocks

    def begin_block(self, block: ScaledLoss) -> None:
        """Notes that a block has begun whose gradients are scaled."""
        self._blocks[id(block)] = {}
        for optimizer in block.optimizers:
            self._had_block.add(id(optimizer))

    def end_block(self, block: ScaledLoss) -> None:
        """Notes that a block ends, before its gradients are unscaled."""
        unscaled = self._blocks.pop(id(block), None)
        if unscaled and not block.went_backward:
            self._inside.update(unscaled)

    # Backward

    def look_before(self, backward: PlainBackward) -> None:
        """Notes what shows whose gradients a backward makes that is not scaled."""
        if not backward.is_whole:
            return
        line = find_line()
        for optimizer in () if backward.blocks else self._list_dynamic():
            backward.before.append((self._outside, id(optimizer), line, _snapshot(optimizer)))
        for block in backward.blocks:
            for optimizer in block.optimizers:
                backward.before.append((self._blocks[id(block)], id(optimizer), line, _snapshot(optimizer)))

    def look_after(self, backward: PlainBackward) -> None:
        for lines, key, line, grads in backward.before:
            if grads.list_changed():
                lines[key] = line

    def warn_of_late(self) -> None:
        self._warner.warn("late", LATE)

    def _list_dynamic(self) -> list[AmpOptimizer]:
        """The optimizers with a dynamic scale; what has a `backward`, as FP16_Optimizer, scales by itself."""
        amps = [amp for amp in self._members.optimizers() if amp.call.scalers[0].is_dynamic]
        return [amp for amp in amps if not hasattr(amp.find_outer(), "backward")]

    # A step

    def had_block(self, amp: AmpOptimizer) -> bool:
        return id(amp) in self._had_block

    def check_step(self, optimizer: AmpOptimizer) -> None:
        """Warns of gradients that a step must not use as they are; called before anything of it is done."""
        key = id(optimizer)
        had_block = key in self._had_block
        if had_block:
            self._had_block.discard(key)
        inside, outside = self._inside.pop(key, None), self._outside.pop(key, None)
        if not (inside or outside) or all(param.grad is None for param in optimizer.masters.stepped_params()):
            return
        if inside:
            self._warner.warn("inside", INSIDE, inside)
        elif not (had_block or _is_called_by_grad_scaler() or self._is_right(optimizer)):
            self._warner.warn("outside", OUTSIDE, outside)

    def _is_right(self, amp: AmpOptimizer) -> bool:
        """Whether a script may scale by hand, or steps zeros; one host sync, before a warning."""
        asked = [scaler.was_asked() for scaler in self._list_scalers()]  # all of them: it resets them
        return any(asked) or not any(
            param.grad.detach().any() for param in amp.masters.stepped_params() if param.grad is not None
        )


def _is_called_by_grad_scaler() -> bool:
    """Whether the step that runs is one of an enabled GradScaler, whatever is around the optimizer."""
    code = inspect.unwrap(torch.amp.GradScaler.step).__code__  # `diagnose` puts a watch around it
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None and frame.f_locals["self"].is_enabled()


class GradSnapshot:
    """Gradients as they were, to see which are made or written."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._grads = [(param, grad := param.grad, -1 if grad is None else grad._version) for param in params]

    def list_changed(self) -> list[Tensor]:
        """The parameters that have got other gradients, or another value in one."""
        return [
            param
            for param, grad, version in self._grads
            if param.grad is not grad or (grad is not None and grad._version != version)
        ]


def _snapshot(optimizer: AmpOptimizer) -> GradSnapshot:
    """Sees the gradients of the first and the last parameter; all would take too long."""
    groups = [group["params"] for group in optimizer.optimizer.param_groups if group["params"]]
    return GradSnapshot([groups[0][0], groups[-1][-1]] if groups else [])


BESIDE = (
    "a GradScaler steps an optimizer whose gradients scale_loss scales and unscales: use one of the two; "
    "without the GradScaler, call optimizer.step()"
)


class GradScalerWatch(SessionPatch):
    """Watches where a GradScaler looks at gradients: it is known there, even where it skips the step."""

    def __init__(self, warner: Warner, members: Members, scale_watch: ScaleWatch) -> None:
        super().__init__()
        self._warner = warner
        self._members = members
        self._scale_watch = scale_watch

    def patch(self, patcher: Patcher) -> None:
        """Replaces what a GradScaler unscales by, or looks by for a fused optimizer; it has no hooks."""
        for name in ("unscale_", "_check_inf_per_device"):
            if hasattr(GradScaler, name):
                patcher.replace(GradScaler, name, self._watch(getattr(GradScaler, name)))

    def _watch(self, run: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(run)
        def watched(scaler: GradScaler, optimizer: object, *args: object, **kwargs: object) -> object:
            if scaler.is_enabled():
                self._check(optimizer)
            return run(scaler, optimizer, *args, **kwargs)

        return watched

    def _check(self, optimizer: object) -> None:
        amp = self._members.find(optimizer)
        if amp is None:
            return
        if self._scale_watch.had_block(amp):
            self._warner.warn("GradScaler", BESIDE)


# Nobody means a limit below this, once the scale is taken off: it was given as if gradients were unscaled.
LEAST_LIMIT = 0.05

CLIPPED = (
    "gradients are clipped at {:g} inside a block of scale_loss, where they are still multiplied by the loss "
    "scale ({:g}): clip them after the block"
)


# Of functions that clip, which variable has the limit.
LIMITS = {"clip_grad_value_": "clip_value", "_clip_grads_with_norm_": "max_norm"}


class ClipWatch(SessionPatch):
    """Watches what gradients are clipped by; private names of torch only where they exist."""

    def __init__(self, warner: Warner, backwards: ScaledBackwards) -> None:
        super().__init__()
        self._warner, self._backwards = warner, backwards
        self.forget()

    def forget(self) -> None:
        self._has_judged = False

    def patch(self, patcher: Patcher) -> None:
        """Replaces what all functions that clip call, wherever a script has them from."""
        group = getattr(clip_grad, "_group_tensors_by_device_and_dtype", None)
        if group is not None:
            patcher.replace(clip_grad, group.__name__, self._watch(group))

    def _watch(self, group: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(group)
        def group_tensors(lists: list[list[Tensor]], *args: object, **kwargs: object) -> object:
            caller = sys._getframe(1) if self._backwards.blocks else None
            limit = LIMITS.get(caller.f_code.co_name) if caller is not None else None
            if limit is not None:
                self._check(lists[0], caller.f_locals[limit])
            return group(lists, *args, **kwargs)

        return group_tensors

    def _check(self, grads: list[Tensor], limit: float) -> None:
        """Warns of a limit that is not scaled, as the gradients are in a block; one host sync a session."""
        is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if self._has_judged or is_capturing:
            return
        clipped = set(map(id, grads))
        known = [block for block in self._backwards.list_open() if clipped & _ids_of_grads(block.optimizers)]
        if not known:
            return
        self._has_judged = True
        scale = known[0].scale.scaler.get_scale()
        if limit / scale < LEAST_LIMIT:
            self._warner.warn("clipping", CLIPPED.format(float(limit), scale))


def _ids_of_grads(optimizers: Iterable[AmpOptimizer]) -> set[int]:
    return {id(param.grad) for optimizer in optimizers for param in optimizer.masters.stepped_params()}


HALF = (
    "{} steps half parameters of an initialized model, and initialize never saw it: it has no masters, so "
    "small updates are lost: make the optimizer first, then call "
    "amp.initialize(model, optimizer)"
)
SCALED = (
    "{} steps gradients that are multiplied by the loss scale, and initialize never saw it: pass "
    "it to amp.initialize(models, optimizers), and name it in scale_loss(loss, optimizers)"
)


@dataclass(slots=True, eq=False)
class UnknownOptimizer:
    """An optimizer that initialize never saw, and the gradients that blocks have left it, scaled."""

    find: ref[Optimizer]
    before: GradSnapshot | None = None  # a block that is open
    scaled: list[tuple[Tensor, ref[Tensor]]] = field(default_factory=list)

    def begin_block(self, known: set[int]) -> None:
        """Notes what is there, but for parameters that are `known` to the session, by id."""
        params = [param for group in self.find().param_groups for param in group["params"]]  # type: ignore[union-attr]
        self.before = GradSnapshot(param for param in params if id(param) not in known)

    def end_block(self) -> None:
        """Notes what the block has changed; keeps none of it alive."""
        changed, self.before = self.before.list_changed() if self.before else [], None
        self.scaled += [(param, ref(param.grad)) for param in changed if param.grad is not None]

    def steps_scaled(self) -> bool:
        """Whether any such gradient is still there, and is not zero; one host sync where one is there."""
        scaled, self.scaled = self.scaled, []
        left = [
            param.grad.detach()
            for param, find in scaled
            if (grad := param.grad) is not None and grad is find()
        ]
        return any(bool((grad.coalesce().values() if grad.is_sparse else grad).any()) for grad in left)


class UnknownOptimizers:
    """Looks at what unknown optimizers step; a hook before the step of every optimizer there is."""

    def __init__(self, warner: Warner, members: Members, half: HalfWatch) -> None:
        self._warner, self._members, self._half = warner, members, half
        self._forget()

    def _forget(self) -> None:
        self._is_open = False
        self._checked: set[int] = set()  # optimizers that were looked at, by id, since the last call
        self.unknown: dict[int, UnknownOptimizer] = {}  # by the id of the optimizer

    def open(self, undo: ExitStack) -> None:
        """Puts the hook there, unless it is; `undo` receives the way back."""
        self._checked.clear()
        if not self._is_open:
            self._is_open = True
            undo.callback(self._forget)
            undo.callback(register_optimizer_step_pre_hook(self._check).remove)

    def _list(self) -> Iterator[UnknownOptimizer]:
        self.unknown = {key: one for key, one in self.unknown.items() if one.find() is not None}
        yield from self.unknown.values()

    def begin_block(self, block: ScaledLoss) -> None:
        """Notes the gradients of unknown optimizers before a block that scales."""
        amps = self._members.optimizers() if block.scale.capture is None else ()
        known = {id(param) for amp in amps for param in (*amp.params(), *amp.masters.model_params())}
        for one in self._list() if amps else ():
            one.begin_block(known)

    def end_block(self) -> None:
        for one in self._list():
            one.end_block()

    def _check(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        key = id(optimizer)
        if torch.compiler.is_dynamo_compiling() or (key in self._checked and key not in self.unknown):
            return
        amp = None if key in self._checked else self._members.find(optimizer)
        if amp is not None:  # its own hook comes later
            amp.masters.install_again()
        elif key not in self._checked and self._steps_half(optimizer):
            self._warner.warn("stranger", HALF.format(type(optimizer).__name__))
        else:
            self._check_scaled(optimizer)
        self._checked.add(key)

    def _check_scaled(self, optimizer: Optimizer) -> None:
        one = self.unknown.get(id(optimizer))
        if one is None or one.find() is not optimizer:  # ids are used again
            self.unknown[id(optimizer)] = UnknownOptimizer(ref(optimizer))
        elif not self._warner.has_warned("stranger") and one.steps_scaled():
            self._warner.warn("stranger", SCALED.format(type(optimizer).__name__))

    def _steps_half(self, optimizer: Optimizer) -> bool:
        half = self._half.find_half(wants_masters=True)
        return any(id(param) in half for group in optimizer.param_groups for param in group["params"])
