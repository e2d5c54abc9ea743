"""One session: builds what `initialize` asks for, and owns the undo of every change."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import FrameType

import torch
from torch import Tensor

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
from ampatch.compiling import skip_own_frames
from ampatch.copies import CopyWithMasters
from ampatch.data_watch import DataWatch
from ampatch.errors import AmpValueError, NotInitializedError
from ampatch.features import TorchFeatures
from ampatch.local_grads import NoteNoSync
from ampatch.masters import MasterParams
from ampatch.model import ModelCaster, select_kept, select_python, validate_models
from ampatch.observe import Observer
from ampatch.optimizer import AmpOptimizer
from ampatch.optimizer_state import lower_state, raise_state
from ampatch.patcher import Patcher
from ampatch.precision import HALF_TYPES
from ampatch.refresh import RefreshWeights
from ampatch.scaler import LossScaler
from ampatch.scripting import ScriptModels
from ampatch.step_listener import StepListener
from ampatch.torch_patch import TorchPatch
from ampatch.values import Float32Values
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
        self._values = Float32Values()
        self._calls: list[Call] = []
        self._by_optimizer: dict[int, tuple[object, AmpOptimizer, Call]] = {}
        self._announcer = Announcer()
        self._passive: list[object] = []  # what calls with enabled=False were given
        self.is_disabled = False

    @property
    def is_open(self) -> bool:
        """Whether there is an enabled call of `initialize` to undo."""
        return bool(self._calls)

    # Opening

    def disable(self, optimizers: Sequence[object]) -> None:
        """Notes a call with enabled=False: its optimizers pass through."""
        self.is_disabled = True
        self._passive.extend(optimizers)

    def open(self, request: Request) -> None:
        """Sets up one call; all or nothing: if anything raises, what was done is undone first."""
        validate_models(request.models, request.policy, self._values, request.allow_half_params)
        kept = select_kept(request.models, request.keep_fp32)
        validate_optimizers(request, self._calls)
        self.torch_patch.validate(request.policy)
        skip_own_frames(self._unframed)
        call = Call(request, make_scalers(request, len(self.scalers())))
        # Tensors made in inference mode would never get gradients.
        with torch.inference_mode(mode=False), ExitStack() as undo:
            undo.callback(self._fit_states, call)
            if request.policy.master_weights or request.policy.patch_torch_functions:
                self._data_watch.open(undo)
            if request.policy.half is not None:
                self._features.open(undo)
            self._script_models.open(undo)
            caster = ModelCaster(request.models, request.policy, kept, self.casts, self._values)
            undo.callback(caster.close)
            caster.open()
            for optimizer in request.optimizers:
                self._open_optimizer(optimizer, call, undo)
            self._note_no_sync(call, undo)
            if request.policy.has_half_weights:
                refresh = RefreshWeights(self._values, [amp.masters for amp in call.optimizers])
                for model in request.models:
                    undo.callback(model.register_forward_pre_hook(refresh).remove)
            if request.policy.patch_torch_functions:
                trace = say if request.verbosity >= 2 else None
                if any(observer.counts_casts for observer in self.observers):
                    self.torch_patch.count_casts()
                self.torch_patch.open(request.policy, request.models, device_types(request), trace, undo)
            self._calls.append(call)
            undo.callback(self._calls.remove, call)
            self._passive = [item for item in self._passive if id(item) not in self._by_optimizer]
            if request.verbosity >= 1:
                self._announcer.announce(request.policy, device_types(request))
            for observer in self.observers:
                observer.on_initialize(request.policy)
                observer.on_objects(request.models, request.optimizers)
            self._undo.push(undo.pop_all())
        # Nothing raises from here on: what follows cannot be undone exactly.
        if request.policy.is_pure_half:
            self._lower(caster, call)
        else:
            self._fit_states(call)

    def _note_no_sync(self, call: Call, undo: ExitStack) -> None:
        if not torch.distributed.is_available():
            return
        for model in select_python(call.request.models):
            listeners = [amp.local for amp in call.optimizers if amp.steps_part_of(model)]
            undo.callback(model.register_forward_pre_hook(NoteNoSync(listeners)).remove)

    def _open_optimizer(self, given: object, call: Call, undo: ExitStack) -> None:
        optimizer = unwrap_optimizer(given)
        optimizers = find_inner_optimizers(optimizer)
        amp = AmpOptimizer(optimizer, MasterParams(optimizers, self._data_watch.touched), self)
        if call.request.policy.master_weights:
            self._open_masters(amp, undo)
        for one in optimizers:
            order_hooks(one)
            undo.callback(one.register_step_pre_hook(amp.before_step).remove)
            undo.callback(one.register_step_post_hook(amp.after_step).remove)
        undo.callback(amp.close)
        if needs_whole_step(given, optimizer):
            WholeStep(given, amp).open(undo)
        call.optimizers.append(amp)
        for key in {id(given), *map(id, optimizers)}:
            self._by_optimizer[key] = (given, amp, call)
            undo.callback(self._by_optimizer.pop, key, None)

    def _lower(self, caster: ModelCaster, call: Call) -> None:
        """Gives up float32 values where no master keeps them: weights and optimizer state at O3."""
        caster.forget_originals()
        for amp in call.optimizers:
            lower_state(amp.optimizer)

    def _fit_states(self, call: Call) -> None:
        """Gives optimizer state the type of the parameters, where these change it and no master keeps it."""
        has_own_halves = call.request.policy.master_weights and call.request.allow_half_params
        if call.request.policy.is_pure_half or has_own_halves:
            for amp in call.optimizers:
                raise_state(amp.optimizer)
                lower_state(amp.optimizer)

    def _open_masters(self, amp: AmpOptimizer, undo: ExitStack) -> None:
        optimizer, masters = amp.optimizer, amp.masters
        undo.callback(masters.remove)
        self._make_masters(masters, amp.params())
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

    def _make_masters(self, masters: MasterParams, params: Iterable[Tensor]) -> None:
        for param in list(params):
            if param.dtype not in HALF_TYPES or masters.owns(param):
                continue
            pair = self._values.find_pair(param)
            if pair is None:
                pair = masters.add(param, self._values.read(param))
                self._values.set_pair(pair)
                self._data_watch.watched.update((id(pair.half), id(pair.master)))
            else:
                masters.share(pair)
        masters.install()

    def _add_param_group(self, amp: AmpOptimizer, original: Callable, group: dict) -> None:
        original(group)
        params = amp.optimizer.param_groups[-1]["params"]
        if any(amp.masters.get(param) is not None for param in params):
            del amp.optimizer.param_groups[-1]
            raise ValueError("some parameters appear in more than one parameter group")
        self._make_masters(amp.masters, params)

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
        if self.find(optimizer.optimizer)[1].request.verbosity >= 1:
            self._announcer.announce_overflows(optimizer.last_outcomes)
        for observer in self.observers:
            observer.on_step(optimizer.optimizer)

    def find(self, optimizer: object, index: int = 0) -> tuple[AmpOptimizer, Call]:
        """Returns what is kept for an optimizer; raises for one that `initialize` did not return."""
        self.require_open()
        found = self._by_optimizer.get(id(optimizer))
        if found is None:
            kind = type(optimizer).__name__
            raise AmpValueError(
                f"optimizers[{index}] ({kind}) is not one that initialize() returned: "
                f"pass it to initialize first"
            )
        return found[1], found[2]

    def settle(self, optimizer: object) -> None:
        """Unscales gradients that wait to be averaged over ranks: somebody is about to use them."""
        found = self._by_optimizer.get(id(optimizer))
        if found is not None:
            found[1].settle_for_reader()

    def is_passive(self, optimizers: Sequence[object]) -> bool:
        """Whether these optimizers were given to a call with enabled=False, or no call is enabled."""
        if not self.is_disabled:
            return False
        return not self._calls or any(item is given for item in optimizers for given in self._passive)

    def require_open(self) -> None:
        """Raises NotInitializedError before `initialize`."""
        if not self._calls and not self.is_disabled:
            raise NotInitializedError(
                "ampatch is not initialized: call amp.initialize(model, optimizer) first"
            )

    def last_call(self) -> Call:
        """The latest enabled call."""
        return self._calls[-1]

    def scalers(self) -> list[LossScaler]:
        """All loss scalers, numbered on from call to call."""
        return [scaler for call in self._calls for scaler in call.scalers]

    # Closing

    def close(self) -> None:
        """Undoes everything, last-in first-out."""
        with ExitStack() as stack:
            stack.callback(self._reset)
            for patch in (self.torch_patch, self._features, self._script_models, self._data_watch):
                stack.callback(patch.retry)
            stack.push(self._undo)
            for observer in self.observers:
                stack.callback(observer.on_uninitialize)


# The one session of this process: torch's namespace is one, so what changes it is one as well.
SESSION = Session()
