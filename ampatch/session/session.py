"""One session: builds what `initialize` asks for, and owns the undo of every change."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

import torch
from torch.nn import Module
from torch.optim import Optimizer

from ampatch.casts.cast import CASTS
from ampatch.errors import AmpValueError, NotInitializedError
from ampatch.levels.loss_scale import DynamicLossScale, StaticLossScale
from ampatch.levels.policy import Policy
from ampatch.levels.private import EAGER, NEWEST, OLDEST, explain_missing, is_tested
from ampatch.levels.ranks import find_rank, say
from ampatch.levels.stack import logger
from ampatch.models.cast_tensor import Shared, list_parts
from ampatch.models.float8 import describe
from ampatch.models.float32_parts import select_named
from ampatch.models.model import ModelCaster, ValuesById, validate_models
from ampatch.patching.compiling import skip_own_frames
from ampatch.patching.data_watch import DataWatch
from ampatch.patching.torch_features import Captures, ScriptModels, TorchFeatures
from ampatch.patching.torch_patch import TorchPatch
from ampatch.session.attachments import Attachments
from ampatch.session.distributed import DistributedPatch
from ampatch.session.members import MasterBackwards, Members, ScaledBackwards
from ampatch.session.request import (
    Opening,
    Request,
    SessionListener,
    device_types,
    make_scalers,
    validate_optimizers,
)
from ampatch.steps.block import ScaledLoss
from ampatch.steps.events import Callbacks, Changes, Surroundings
from ampatch.steps.masters import fit_states
from ampatch.steps.optimizer import AmpOptimizer, InitializeCall
from ampatch.steps.scaler import BackwardOutcome, LossScaler


class Session(Surroundings):
    """Owns every change that ampatch makes to torch, models and optimizers.

    There is one, open from the first `initialize` to `uninitialize`. Registrations, overrides and whoever
    hears its events outlive it: they are wishes, not changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.casts = CASTS
        self.torch_patch = TorchPatch()
        self.data_watch = DataWatch()
        self.members = Members()
        self._script_models = ScriptModels()
        self._features = TorchFeatures()
        self._captures = Captures()
        self._distributed = DistributedPatch(self.members)
        self.changes = Changes()
        self._master_backwards = MasterBackwards(self.members, self.data_watch.watched, self.changes)
        self.scaled_backwards = ScaledBackwards(self.members, self)
        # A block asks these two, each time: nothing stands between.
        self.capture, self.end_block = self._captures.current, self.casts.end_iteration
        self.end_scaled_block = self.scaled_backwards.end_block
        thread = self.casts.thread
        self.begin_step, self.end_step = thread.begin_step, thread.end_step
        self.call_closure = thread.call_closure
        self._unframed: set[str] = set()  # modules of ours that Dynamo knows not to compile
        self._said_torch = False
        self._log_filter = LogFilter()
        self.overrides: dict[str, object] = {}
        self.events.add(Announcer(self.first_loss))
        self._reset()

    def _reset(self) -> None:
        self.casts.thread.reset()
        self._undo = ExitStack()
        self._patching = ExitStack()  # of torch's functions: undone before the rest, or alone
        self.members.restore(Members())
        self.shared = Shared(self.data_watch.watched, self.data_watch.touched)
        self.calls: list[InitializeCall] = []  # of `initialize`, that are enabled
        self._attachments = Attachments(self.members, self.data_watch, self.shared)
        self.is_disabled = False
        self._publish(self.events.session_closed, None)

    @staticmethod
    def _publish(callbacks: Callbacks, event: object) -> None:
        for callback in callbacks:
            callback(event)

    # Opening

    def disable(self, optimizers: Sequence[object]) -> None:
        """Notes a call with enabled=False: its optimizers pass through."""
        self.is_disabled = True
        self.members.add_passive(optimizers)

    def open(self, request: Request) -> None:
        """Sets up one call; all or nothing: if anything raises, what was done is undone first."""
        self._forget_dropped()
        keep_freed_memory()
        policy = request.policy
        # Tensors made in inference mode would never get gradients, and a scale could not be written.
        with torch.inference_mode(mode=False), ExitStack() as undo, ExitStack() as patching:
            self._open_log(request, undo)
            values = self.members.map_values()
            kept = self._validate(request, values)
            opening = self._begin_call(request, undo)
            call, amps = opening.call, opening.amps
            self._publish(self.events.call_opens, opening)  # to who sees batches, before they are cast
            caster = ModelCaster(request.models, policy, kept, values, self.shared, call.undo)
            caster.open(request.float8_layers, self.members.float8)
            self.members.add_modules(list_parts(request.models), caster.by_module, caster.float8)
            self._attachments.open(request, caster, amps, call)
            opening.rounded, opening.buffered = caster.rounded, caster.name_buffered()
            if policy.patch_torch_functions:
                self._patch_torch(request, patching)
            self.calls.append(call)
            undo.callback(self.calls.remove, call)
            self._publish(self.events.call_is_set_up, opening)
            self._undo.push(undo.pop_all())
            self._patching.push(patching.pop_all())
        # Nothing raises from here on: what follows cannot be undone exactly.
        for amp in amps:
            self._attachments.drop_scaled("initialize", amp.masters.model_params())
        self.data_watch.halved.clear()  # by this call
        if policy.is_pure_half:
            caster.forget_originals()
        fit_states(find_changed_states(opening))
        self._publish(self.events.call_opened, opening)

    def _validate(self, request: Request, values: ValuesById) -> list[Module]:
        """Raises for what a call cannot do, beside those before it; returns the modules of `keep_fp32`."""
        members = self.members
        validate_models(request.models, request.policy, values, request.allow_half_params)
        kept = select_named(request.models, request.keep_fp32, "keep_fp32")
        validate_optimizers(request, members.list_tensors(), members.optimizers())
        self.torch_patch.validate(request.policy)
        return kept

    def _begin_call(self, request: Request, undo: ExitStack) -> Opening:
        """Patches what a session patches once, and makes what is kept for the call and its optimizers."""
        skip_own_frames(self._unframed)
        scalers = make_scalers(request, len(self.scalers()))
        call = InitializeCall(request.policy, request.verbosity, scalers)
        self._open_patches(request, undo)
        undo.callback(call.close)
        call.undo.callback(self.members.restore, self.members.copy())
        opening = Opening(request, call, self._attachments.make(request, self), undo)
        call.members = [weakref.ref(one) for one in (*list_parts(request.models), *opening.amps)]
        call.undo.callback(fit_states, find_changed_states(opening))
        return opening

    def _open_log(self, request: Request, undo: ExitStack) -> None:
        """Filters the log, from now on: it is silent while all calls are."""
        log = self._log_filter
        log.open(not request.verbosity and (log.is_silent or not self.calls), undo)
        if not (log.is_silent or self._said_torch):
            self._said_torch = True
            warn_of_torch()

    def _forget_dropped(self) -> None:
        """Forgets what scripts have dropped since the last call: ids of theirs may be used again."""
        self.casts.thread.forget_ended()  # the frame of a step that raised holds what its caller had
        self.casts.clear_cache()
        for call in self.calls:
            call.forget_dropped()
        self.members.restore(self.members.copy())
        weights = self.members.weights()
        self.data_watch.keep_watching({id(one) for weight in weights for one in (weight.half, weight.master)})

    def _open_patches(self, request: Request, undo: ExitStack) -> None:
        """Patches what a session patches once, but for the functions that cast."""
        policy = request.policy
        if policy.half is not None:
            self._features.open(undo)  # first: torch makes tables of what it has
        if policy.has_half_weights or policy.patch_torch_functions:
            self.data_watch.open(undo)
        if policy.master_weights:
            self._master_backwards.open(undo)
        if policy.loss_scale != StaticLossScale(1.0):
            self.scaled_backwards.open(undo)
        if policy.master_weights or policy.loss_scale != StaticLossScale(1.0):
            self._distributed.open(undo)
        self._script_models.open(undo)
        self._captures.open(undo)

    def _patch_torch(self, request: Request, undo: ExitStack) -> None:
        trace = say if request.verbosity >= 2 else None
        self.torch_patch.open(request.policy, request.models, device_types(request), trace, undo)

    # Running

    def begin_scaled_block(self, block: ScaledLoss) -> None:
        self._attachments.was_scaled = True
        if not self.scaled_backwards.is_open:  # a scale of 1 was set to another one
            with ExitStack() as undo:
                self.scaled_backwards.open(undo)
                self._undo.push(undo.pop_all())
        self.scaled_backwards.begin_block(block)

    # Finding

    def find(self, optimizer: object, index: int = 0) -> AmpOptimizer:
        """Returns what is kept for an optimizer; raises for one that `initialize` did not return."""
        if not self.calls:
            self.require_open()
        amp = self.members.find(optimizer)
        if amp is None:
            kind = type(optimizer).__name__
            raise AmpValueError(
                f"optimizers[{index}] ({kind}) is not one that initialize() returned: "
                f"pass it to initialize first"
            )
        if optimizer is not amp.optimizer and amp.call.policy.half is not None:
            self._publish(self.events.wrapper_is_used, optimizer)
        return amp

    def settle(self, optimizer: object) -> None:
        """Has masters in the groups, showing edits of the model, and their gradients: somebody reads them."""
        amp = self.members.find(optimizer)
        if amp is not None:
            amp.masters.show_edits()
            amp.read_grads()

    def is_passive(self, optimizers: Sequence[object]) -> bool:
        """Whether these optimizers were given to a call with enabled=False, or no call is enabled."""
        if not self.is_disabled:
            return False
        return not self.calls or self.members.is_any_passive(optimizers)

    def require_open(self) -> None:
        if not self.calls and not self.is_disabled:
            raise NotInitializedError(
                "ampatch is not initialized: call amp.initialize(model, optimizer) first"
            )

    def scalers(self, *, of_last_call: bool = False) -> list[LossScaler]:
        """The loss scalers of all enabled calls, numbered on from call to call; or of the latest alone."""
        calls = self.calls[-1:] if of_last_call else self.calls
        return [scaler for call in calls for scaler in call.scalers]

    def first_loss(self, loss_id: int) -> int:
        """The number that `state_dict` has for the first loss of the call that a loss belongs to."""
        return max(first for call in self.calls if (first := call.scalers[0].loss_id) <= loss_id)

    # Closing

    def enter(self, context: AbstractContextManager[object]) -> None:
        """Opens what ends with the session, before it."""
        self._undo.enter_context(context)

    def unpatch(self) -> None:
        """Undoes the casts of torch's functions alone; the next call that wants some patches again."""
        with ExitStack() as stack:
            stack.callback(self.torch_patch.retry)
            stack.push(self._patching.pop_all())

    def close(self) -> None:
        """Undoes everything, last-in first-out; interrupted before it has begun, it undoes nothing.

        A block of `scale_loss` that is open ends first; inside of its backward this raises AmpError.
        """
        for amp in self.members.optimizers():
            if amp.block is not None:
                amp.block.end_early(by_step=False)
        stack = ExitStack()
        stack.callback(self._reset)
        backwards = self._master_backwards, self.scaled_backwards
        ours = *backwards, self.data_watch, self._distributed, self._script_models, self._captures
        for patch in (self.torch_patch, self._features, *ours):
            stack.callback(patch.retry)
        stack.push(self._undo)
        stack.push(self._patching)
        for callback in reversed(self.events.session_closes):
            stack.callback(callback, None)
        stack.close()


def find_changed_states(opening: Opening) -> list[weakref.ref[Optimizer]]:
    """The optimizers whose state is of the type of half parameters, with the call or without it."""
    request, policy = opening.request, opening.request.policy
    is_changed = policy.is_pure_half or (policy.master_weights and request.allow_half_params)
    amps = opening.amps if is_changed else ()
    return [weakref.ref(one) for amp in amps for one in amp.masters.optimizers]


class LogFilter(logging.Filter):
    """Lets errors, and what was asked for, pass at verbosity 0; begins lines with the rank, of several."""

    is_silent = False

    def open(self, is_silent: bool, undo: ExitStack) -> None:
        """Filters the log from now on; `undo` receives the way back."""
        if self.is_silent is not is_silent:
            undo.callback(setattr, self, "is_silent", self.is_silent)
            self.is_silent = is_silent
        if self not in logger.filters:
            logger.addFilter(self)
            undo.callback(logger.removeFilter, self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Says whether a record passes, and changes it."""
        if self.is_silent and record.levelno < logging.ERROR and not hasattr(record, "is_asked"):
            return False
        rank = find_rank()
        if rank is not None:
            record.msg = f"rank {rank}: {record.msg}"
        return True


def warn_of_torch() -> None:
    """Logs what a torch that ampatch was not tested on, or that lacks a private name, may change."""
    if not is_tested():
        logger.warning(
            "torch %s: ampatch was tested on torch %s to %s; what it casts may differ: compare with O0, and "
            "check the functions that matter to you with ampatch.testing",
            torch.__version__,
            OLDEST,
            NEWEST,
        )
    for line in explain_missing(EAGER):
        logger.warning("torch %s has %s", torch.__version__, line)


def format_banner(policy: Policy) -> str:
    """What a call does, in a line, with the options that override the level's defaults."""
    overridden, options = policy.overridden(), policy.options()
    words = [f"Selected optimization level {policy.opt_level}: {policy.summary}"]
    if isinstance(policy.loss_scale, DynamicLossScale) and "loss_scale" not in overridden:
        words.append("dynamic loss scale")
    words += [f"{name}={options[name]} (default: {default})" for name, default in overridden.items()]
    return f"{', '.join(words)}; amp.explain(model) says more"


def format_overflow(loss_id: int, before: float, after: float) -> str:
    """The line for one skipped step."""
    scale = f"reducing loss scale to {after}" if after < before else f"keeping loss scale at {after}"
    return f"Gradient overflow.  Skipping step, loss scaler {loss_id} {scale}"


class Announcer(SessionListener):
    """Announces the calls and the overflows of a session; `first_loss` finds the first of a loss's call."""

    def __init__(self, first_loss: Callable[[int], int]) -> None:
        self._first_loss = first_loss
        self.session_closed(None)

    def session_closed(self, _: None) -> None:
        self._unannounced: list[Sequence[BackwardOutcome]] = []  # of each step what led to it
        self._said_slow = False

    def call_is_set_up(self, opening: Opening) -> None:
        """Says what a call does, and once that float16 is slow on a CPU."""
        policy, verbosity = opening.request.policy, opening.request.verbosity
        if verbosity >= 1:
            say(format_banner(policy))
            if policy.float8_recipe is not None:
                say(describe(opening.request.models))
        is_slow = policy.half is torch.float16 and verbosity and "cpu" in device_types(opening.request)
        if is_slow and not self._said_slow:
            self._said_slow = True
            logger.warning(
                "%s computes in float16, which is slow on a CPU: use O4 or O5 (bfloat16)",
                policy.opt_level,
            )

    def step_ended(self, amp: AmpOptimizer) -> None:
        """Says a line if a step was skipped, this one or an earlier one, once the device has told of it.

        As in apex one line for each step of an optimizer, by the first of its blocks that overflowed. A
        loss has the number that scripts know it by: that within its call.
        """
        if amp.call.verbosity < 1:
            return
        if amp.last_outcomes:
            self._unannounced.append(amp.last_outcomes)
        waiting = []
        for outcomes in self._unannounced:
            if None in [outcome.poll() for outcome in outcomes]:
                waiting.append(outcomes)
                continue
            first = next((outcome.loss_id for outcome in outcomes if outcome.read()[0]), None)
            if first is not None:
                numbers = [outcome.read() for outcome in outcomes if outcome.loss_id == first]
                say(format_overflow(first - self._first_loss(first), numbers[0][1], numbers[-1][2]))
        self._unannounced = waiting


# Bytes, with room for what the allocator adds: above 32 MiB glibc no longer adapts.
LARGEST = (32 << 20) - (16 << 10)


def keep_freed_memory() -> None:
    """Has glibc keep up to 64 MiB of freed memory, so that the next step need not ask the system for it.

    By default it returns large blocks as soon as they are free, and each step waits for page faults,
    thousands of them where gradients are large. Its thresholds follow the largest block freed so far, up to
    32 MiB (mallopt(3), M_MMAP_THRESHOLD). So one such block is made and freed here; it is never touched, and
    takes about 10 us. Thresholds that the user has set, and other allocators, stay as they are.
    """
    torch.empty(LARGEST, dtype=torch.uint8, device="cpu")


# The one session of this process: torch's namespace is one, so what changes it is one as well.
SESSION = Session()
