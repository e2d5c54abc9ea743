"""One session: builds what `initialize` asks for, and owns the undo of every change."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ampatch.casts.cast import CASTS
from ampatch.errors import AmpValueError, NotInitializedError
from ampatch.levels.policy import Policy
from ampatch.models.cast_tensor import list_parts
from ampatch.models.kept import select_kept
from ampatch.models.model import ModelCaster, select_python, validate_models
from ampatch.patching.captures import Captures, Repeats
from ampatch.patching.compiling import skip_own_frames
from ampatch.patching.data_watch import DataWatch
from ampatch.patching.scripting import ScriptModels
from ampatch.patching.torch_features import TorchFeatures
from ampatch.patching.torch_patch import TorchPatch
from ampatch.session.announce import Announcer, say, warn_of_torch
from ampatch.session.joins import Joins
from ampatch.session.members import Members
from ampatch.session.misuse.misuse import Misuse
from ampatch.session.refresh import RefreshWeights
from ampatch.session.request import (
    Call,
    Request,
    device_types,
    make_scalers,
    steps_part_of,
    validate_optimizers,
)
from ampatch.steps.captured import capture_step
from ampatch.steps.masters import MasterParams, fit_states
from ampatch.steps.optimizer import AmpOptimizer
from ampatch.steps.scaler import LossScaler
from ampatch.steps.step import StepListener
from ampatch.steps.unsynced_grads import NoteNoSync

if TYPE_CHECKING:
    from ampatch.session.inspection import Observer


class Session(StepListener):
    """Owns every change that ampatch makes to torch, models and optimizers.

    There is one, open from the first `initialize` to `uninitialize`. Registrations, observers and
    overrides outlive it: they are wishes, not changes.
    """

    def __init__(self) -> None:
        self.casts = CASTS
        self.torch_patch = TorchPatch()
        self._data_watch = DataWatch()
        self._script_models = ScriptModels()
        self._features = TorchFeatures()
        self._captures = Captures()
        self.misuse = Misuse(self._list_optimizers, self.scalers)
        self._unframed: set[str] = set()  # modules of ours that Dynamo knows not to compile
        self._said_torch = False
        self.observers: tuple[Observer, ...] = ()
        self.overrides: dict[str, object] = {}
        self._reset()

    def _reset(self) -> None:
        self.casts.thread.reset()
        self.misuse.forget()
        self._undo = ExitStack()
        self._patching = ExitStack()  # of torch's functions: undone before the rest, or alone
        self._members = Members()
        self._calls: list[Call] = []
        self._announcer = Announcer()
        self._joins = Joins(self._make_masters, self._data_watch)
        self.is_disabled = False

    # Opening

    def disable(self, optimizers: Sequence[object]) -> None:
        """Notes a call with enabled=False: its optimizers pass through."""
        self.is_disabled = True
        self._members.add_passive(optimizers)

    def open(self, request: Request) -> None:
        """Sets up one call; all or nothing: if anything raises, what was done is undone first."""
        self._warn_of_torch()
        self._forget_dropped()
        members, policy = self._members, request.policy
        values = members.map_values()
        validate_models(request.models, policy, values, request.allow_half_params)
        kept = select_kept(request.models, request.keep_fp32)
        validate_optimizers(request, members.list_tensors(), members.optimizers())
        self.torch_patch.validate(policy)
        skip_own_frames(self._unframed)
        call = Call(request.verbosity, make_scalers(request, len(self.scalers())))
        # Tensors made in inference mode would never get gradients.
        with torch.inference_mode(mode=False), ExitStack() as undo, ExitStack() as patching:
            self._open_patches(policy, undo)
            undo.callback(call.close)
            call.undo.callback(setattr, self, "_members", members.copy())
            amps = [self._joins.make(given, self) for given in request.optimizers]
            parts = list_parts(request.models)
            call.members = [weakref.ref(one) for one in (*parts, *amps)]
            changes_state = policy.is_pure_half or (policy.master_weights and request.allow_half_params)
            states = [weakref.ref(amp.optimizer) for amp in amps] if changes_state else []
            call.undo.callback(fit_states, states)
            caster = ModelCaster(request.models, policy, kept, values, call.undo)
            caster.open()
            members.add_modules(parts, caster.by_module)
            self._open_optimizers(request, caster, amps, call)
            self._hook_forwards(request, caster, amps, call.undo)
            self.misuse.open(request, amps, undo)
            if policy.patch_torch_functions:
                self._patch_torch(request, patching)
            self._calls.append(call)
            undo.callback(self._calls.remove, call)
            if request.verbosity >= 1:
                self._announcer.announce(policy, device_types(request))
            for observer in self.observers:
                observer.on_initialize(policy)
                observer.on_objects(request.models, request.optimizers)
            self._undo.push(undo.pop_all())
            self._patching.push(patching.pop_all())
        # Nothing raises from here on: what follows cannot be undone exactly.
        for amp in amps:
            self._joins.drop_scaled("initialize", amp.model_params())
        if policy.is_pure_half:
            caster.forget_originals()
        fit_states(states)

    def _warn_of_torch(self) -> None:
        if not self._said_torch:
            self._said_torch = True
            warn_of_torch()

    def _forget_dropped(self) -> None:
        """Forgets what scripts have dropped since the last call: ids of theirs may be used again."""
        self.casts.thread.forget_ended()  # the frame of a step that raised holds what its caller had
        self.casts.clear_cache()
        for call in self._calls:
            call.forget_dropped()
        self._members = self._members.copy()
        pairs = self._members.pairs()
        self._data_watch.keep_watching({id(param) for pair in pairs for param in (pair.half, pair.master)})

    def _open_patches(self, policy: Policy, undo: ExitStack) -> None:
        """Patches what a session patches once, but for the functions that cast."""
        if policy.master_weights or policy.patch_torch_functions:
            self._data_watch.open(undo)
        if policy.half is not None:
            self._features.open(undo)
        self._script_models.open(undo)
        self._captures.open(undo)

    def _open_optimizers(
        self, request: Request, caster: ModelCaster, amps: list[AmpOptimizer], call: Call
    ) -> None:
        for given, amp in zip(request.optimizers, amps, strict=True):
            amp.casts = caster.list_casts(amp.params())
            self._joins.open(given, amp, request.policy.master_weights, call.undo)
            self._members.add_optimizer(amp, [given, *amp.masters.optimizers], call)

    def _patch_torch(self, request: Request, undo: ExitStack) -> None:
        trace = say if request.verbosity >= 2 else None
        if any(observer.counts_casts for observer in self.observers):
            self.torch_patch.count_casts()
        self.torch_patch.open(request.policy, request.models, device_types(request), trace, undo)

    def _hook_forwards(
        self, request: Request, caster: ModelCaster, amps: list[AmpOptimizer], undo: ExitStack
    ) -> None:
        for model in select_python(request.models):
            if torch.distributed.is_available():
                listeners = [amp.local for amp in amps if steps_part_of(amp, model)]
                undo.callback(model.register_forward_pre_hook(NoteNoSync(listeners)).remove)
            if request.policy.has_half_weights:
                refresh = RefreshWeights(caster.list_values(model.modules()), [amp.masters for amp in amps])
                undo.callback(model.register_forward_pre_hook(refresh).remove)

    def _list_optimizers(self, *, only_dynamic: bool = False) -> list[AmpOptimizer]:
        return self._members.optimizers(only_dynamic=only_dynamic)

    def _make_masters(self, masters: MasterParams, params: Sequence[Tensor]) -> None:
        self._members.make_masters(masters, params, self._data_watch.watched)

    # Running

    def note_scale(self, scaler: LossScaler) -> None:
        """Notes that a block begins."""
        self._joins.note_scale(scaler)

    def tell_backward(self, loss_id: int) -> None:
        """Tells observers that a block of `scale_loss` has ended."""
        for observer in self.observers:
            observer.on_backward(loss_id)

    def capture(self) -> Repeats | None:
        """Returns what collects what the replay of a CUDA graph must repeat, while one is captured."""
        return self._captures.current()

    def begin_step(self, optimizer: AmpOptimizer) -> None:
        self.misuse.scales.check_step(optimizer)
        for observer in self.observers:
            observer.on_step_begin(optimizer.optimizer)

    def enter_step(self, frame: FrameType) -> None:
        self.casts.thread.begin_step(frame)

    def pause_step(self) -> FrameType:
        return self.casts.thread.end_step()

    def exit_step(self, optimizer: AmpOptimizer) -> None:
        self.casts.thread.end_step()
        capture = self.capture()
        if capture is not None:
            capture_step(optimizer, capture)
            return
        call = self.find(optimizer.optimizer)[1]
        if call.verbosity >= 1:
            config = call.scalers[0].config
            self._announcer.announce_step(optimizer, config.floor if call.scalers[0].is_dynamic else 0.0)
        for observer in self.observers:
            observer.on_step(optimizer.optimizer)

    def find(self, optimizer: object, index: int = 0) -> tuple[AmpOptimizer, Call]:
        """Returns what is kept for an optimizer; raises for one that `initialize` did not return."""
        self.require_open()
        found = self._members.find(optimizer)
        if found is None:
            kind = type(optimizer).__name__
            raise AmpValueError(
                f"optimizers[{index}] ({kind}) is not one that initialize() returned: "
                f"pass it to initialize first"
            )
        return found

    def settle(self, optimizer: object) -> None:
        """Unscales gradients that wait to be averaged over ranks: somebody is about to use them."""
        found = self._members.find(optimizer)
        if found is not None:
            found[0].settle_for_reader()

    def is_passive(self, optimizers: Sequence[object]) -> bool:
        """Whether these optimizers were given to a call with enabled=False, or no call is enabled."""
        if not self.is_disabled:
            return False
        return not self._calls or self._members.is_any_passive(optimizers)

    def require_open(self) -> None:
        """Raises NotInitializedError before `initialize`."""
        if not self._calls and not self.is_disabled:
            raise NotInitializedError(
                "ampatch is not initialized: call amp.initialize(model, optimizer) first"
            )

    def scalers(self, *, of_last_call: bool = False) -> list[LossScaler]:
        """The loss scalers of all enabled calls, numbered on from call to call; or of the latest alone."""
        calls = self._calls[-1:] if of_last_call else self._calls
        return [scaler for call in calls for scaler in call.scalers]

    # Closing

    def unpatch(self) -> None:
        """Undoes the casts of torch's functions alone; the next call that wants some patches again."""
        with ExitStack() as stack:
            stack.callback(self.torch_patch.retry)
            stack.push(self._patching.pop_all())

    def close(self) -> None:
        """Undoes everything, last-in first-out."""
        with ExitStack() as stack:
            stack.callback(self._reset)
            patches = self.torch_patch, self._features, self._script_models, self._captures, self._data_watch
            for patch in (*patches, *self.misuse.patches):
                stack.callback(patch.retry)
            stack.push(self._undo)
            stack.push(self._patching)
            for observer in self.observers:
                stack.callback(observer.on_uninitialize)


# The one session of this process: torch's namespace is one, so what changes it is one as well.
SESSION = Session()
