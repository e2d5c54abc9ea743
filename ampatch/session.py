"""One session: builds what `initialize` asks for, and owns the undo of every change."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import FrameType

import torch

from ampatch.announce import Announcer, say
from ampatch.call import (
    Call,
    Request,
    device_types,
    find_inner_optimizers,
    make_scalers,
    order_hooks,
    unwrap_optimizer,
    validate_optimizers,
)
from ampatch.cast import CASTS
from ampatch.cast_tensor import list_parts
from ampatch.compiling import skip_own_frames
from ampatch.copies import CopyWithMasters
from ampatch.data_watch import DataWatch
from ampatch.errors import AmpValueError, NotInitializedError
from ampatch.features import TorchFeatures
from ampatch.local_grads import NoteNoSync
from ampatch.masters import MasterParams
from ampatch.members import Members
from ampatch.model import ModelCaster, select_kept, select_python, validate_models
from ampatch.observe import Observer
from ampatch.optimizer import AmpOptimizer
from ampatch.optimizer_state import lower_state, raise_states
from ampatch.patcher import Patcher
from ampatch.policy import Policy
from ampatch.refresh import RefreshWeights
from ampatch.scaler import LossScaler
from ampatch.scripting import ScriptModels
from ampatch.step_listener import StepListener
from ampatch.torch_patch import TorchPatch
from ampatch.undo import weakly
from ampatch.whole_step import WholeStep, needs_whole_step


class Session(StepListener):
    """Owns every change that ampatch makes to torch, models and optimizers.

    There is one, open from the first `initialize` to `uninitialize`. Registrations, observers and
    overrides outlive it: they are wishes, not changes.
    """

    def __init__(self) -> None:
        self.casts = CASTS
        self.torch_patch = TorchPatch(self.casts)
        self._data_watch = DataWatch(self.casts)
        self._script_models = ScriptModels(self.casts)
        self._features = TorchFeatures(self.casts)
        self._unframed: set[str] = set()  # modules of ours that Dynamo knows not to compile
        self.observers: tuple[Observer, ...] = ()
        self.overrides: dict[str, object] = {}
        self._reset()

    def _reset(self) -> None:
        self.casts.thread.reset()
        self._undo = ExitStack()
        self._patching = ExitStack()  # of torch's functions: undone before the rest, or alone
        self._members = Members()
        self._calls: list[Call] = []
        self._announcer = Announcer()
        self.is_disabled = False

    @property
    def is_open(self) -> bool:
        """Whether there is an enabled call of `initialize` to undo."""
        return bool(self._calls)

    # Opening

    def disable(self, optimizers: Sequence[object]) -> None:
        """Notes a call with enabled=False: its optimizers pass through."""
        self.is_disabled = True
        self._members.add_passive(optimizers)

    def open(self, request: Request) -> None:
        """Sets up one call; all or nothing: if anything raises, what was done is undone first."""
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
            amps = [self._make_optimizer(given) for given in request.optimizers]
            parts = list_parts(request.models)
            call.members = [weakref.ref(one) for one in (*parts, *amps)]
            if policy.is_pure_half:
                call.undo.callback(raise_states, [weakref.ref(amp.optimizer) for amp in amps])
            caster = ModelCaster(request.models, policy, kept, self.casts, values, call.undo)
            caster.open()
            members.add_modules(parts, caster.by_module)
            for given, amp in zip(request.optimizers, amps, strict=True):
                amp.casts = caster.list_casts(amp.params())
                self._open_optimizer(given, amp, call, policy)
            self._hook_forwards(request, caster, amps, call.undo)
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
        if policy.is_pure_half:
            caster.forget_originals()
            for amp in amps:
                lower_state(amp.optimizer)

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
                listeners = [amp.local for amp in amps if amp.steps_part_of(model)]
                undo.callback(model.register_forward_pre_hook(NoteNoSync(listeners)).remove)
            if request.policy.casts_model:
                refresh = RefreshWeights(caster.list_values(model.modules()), [amp.masters for amp in amps])
                undo.callback(model.register_forward_pre_hook(refresh).remove)

    def _make_optimizer(self, given: object) -> AmpOptimizer:
        optimizer = unwrap_optimizer(given)
        masters = MasterParams(find_inner_optimizers(optimizer), self._data_watch.touched)
        return AmpOptimizer(optimizer, masters, self, given)

    def _open_optimizer(self, given: object, amp: AmpOptimizer, call: Call, policy: Policy) -> None:
        call.undo.callback(weakly(amp.undo.close))
        if policy.master_weights:
            self._open_masters(amp, amp.undo)
        for one in amp.masters.optimizers:
            order_hooks(one)
            amp.undo.callback(one.register_step_pre_hook(amp.before_step).remove)
            amp.undo.callback(one.register_step_post_hook(amp.after_step).remove)
        amp.undo.callback(amp.close)
        if needs_whole_step(given, amp.optimizer):
            WholeStep(given, amp).open(amp.undo)
        self._members.add_optimizer(amp, [given, *amp.masters.optimizers], call)

    def _open_masters(self, amp: AmpOptimizer, undo: ExitStack) -> None:
        optimizer, masters = amp.optimizer, amp.masters
        undo.callback(masters.remove)
        self._members.make_masters(masters, amp.params(), self._data_watch.watched)
        instance = Patcher()
        undo.callback(instance.close)
        zero_grad = functools.partial(amp.zero_grad, optimizer.zero_grad)
        instance.replace(optimizer, "zero_grad", functools.update_wrapper(zero_grad, optimizer.zero_grad))
        add_group = functools.partial(self._add_param_group, amp, optimizer.add_param_group)
        instance.replace(
            optimizer,
            "add_param_group",
            functools.update_wrapper(add_group, optimizer.add_param_group),
        )
        instance.replace(optimizer, "__deepcopy__", CopyWithMasters(amp), optional=True)

    def _add_param_group(self, amp: AmpOptimizer, original: Callable, group: dict) -> None:
        original(group)
        params = amp.optimizer.param_groups[-1]["params"]
        if any(amp.masters.get(param) is not None for param in params):
            del amp.optimizer.param_groups[-1]
            raise ValueError("some parameters appear in more than one parameter group")
        self._members.make_masters(amp.masters, params, self._data_watch.watched)

    # Running

    def tell_backward(self, loss_id: int) -> None:
        """Tells observers that a block of `scale_loss` has ended."""
        for observer in self.observers:
            observer.on_backward(loss_id)

    def begin_step(self, optimizer: AmpOptimizer) -> None:
        for observer in self.observers:
            observer.on_step_begin(optimizer.optimizer)

    def enter_step(self, frame: FrameType) -> None:
        self.casts.thread.begin_step(frame)

    def pause_step(self) -> FrameType:
        return self.casts.thread.end_step()

    def exit_step(self, optimizer: AmpOptimizer) -> None:
        self.casts.thread.end_step()
        self.casts.clear_cache()
        if self.find(optimizer.optimizer)[1].verbosity >= 1:
            self._announcer.announce_overflows(optimizer.last_outcomes)
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
            for patch in (self.torch_patch, self._features, self._script_models, self._data_watch):
                stack.callback(patch.retry)
            stack.push(self._undo)
            stack.push(self._patching)
            for observer in self.observers:
                stack.callback(observer.on_uninitialize)


# The one session of this process: torch's namespace is one, so what changes it is one as well.
SESSION = Session()
