"""What a session puts onto optimizers and models: hooks, masters in param groups, and copies that train."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ampatch.levels.patcher import Patcher
from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.ranks import select_sharded
from ampatch.levels.stack import logger
from ampatch.levels.undo import weakly
from ampatch.models.cast_tensor import Float32Values, Shared
from ampatch.models.model import ModelCaster, select_python
from ampatch.patching.data_watch import DataWatch
from ampatch.patching.torch_features import BeforeGraph
from ampatch.session.members import Members
from ampatch.session.request import Request, unwrap_optimizer
from ampatch.steps.events import Surroundings
from ampatch.steps.foreign_step import WholeStep, needs_whole_step
from ampatch.steps.gradients import WatchForward, validate_sharded
from ampatch.steps.masters import MasterParams, Weight
from ampatch.steps.optimizer import AmpOptimizer, InitializeCall

OnJoin = Callable[[Sequence[Tensor]], None]  # takes parameters that join an optimizer


class Attachments:
    """Puts onto optimizers what a session needs there; `AmpOptimizer.undo` takes it away."""

    def __init__(self, members: Members, data_watch: DataWatch, shared: Shared) -> None:
        self._members = members
        self._shared = shared
        self._data_watch = data_watch
        self.was_scaled = False  # whether a block has made gradients that are scaled
        # The ids of parameters that ever were in an optimizer of the session, which unscales their gradients.
        self._stepped: set[int] = set()

    def make(self, request: Request, around: Surroundings) -> list[AmpOptimizer]:
        """Returns what is kept for the optimizers of a call, or for those in wrappers."""
        amps = []
        for outer in request.optimizers:
            optimizer = unwrap_optimizer(outer)
            masters = MasterParams(_find_inner(optimizer), self._data_watch.touched)
            amps.append(AmpOptimizer(optimizer, masters, around, outer))
        return amps

    def open(
        self, request: Request, caster: ModelCaster, amps: Sequence[AmpOptimizer], call: InitializeCall
    ) -> None:
        """Puts hooks and masters onto the optimizers and models of a call; `call.undo` takes them away."""
        for amp in amps:
            amp.casts = caster.list_casts(amp.params())  # of what is there before its masters are
            amp.agreement.group = request.process_group
            self._open_optimizer(amp, request.policy.master_weights, call.undo)
            for cast in amp.casts:
                cast.share_grad()
            self._members.add_optimizer(amp, call)
        for model in select_python(request.models):
            if torch.distributed.is_available():
                self._watch_ranks(model, amps, call)
            if request.policy.has_half_weights:
                refresh = RefreshWeights(caster.list_values(model.modules()), [amp.masters for amp in amps])
                call.undo.callback(model.register_forward_pre_hook(refresh).remove)

    def _watch_ranks(self, model: Module, amps: Sequence[AmpOptimizer], call: InitializeCall) -> None:
        known = {id(param) for param in model.parameters()}
        listeners = [amp.local for amp in amps if not known.isdisjoint(map(id, amp.masters.model_params()))]
        sharded = select_sharded(model.modules())
        validate_sharded(sharded)
        for local in listeners:
            local.sharded += map(weakref.ref, sharded)
        hook = WatchForward(listeners, known.union(map(id, sharded)))
        call.undo.callback(model.register_forward_pre_hook(hook).remove)

    def _open_optimizer(self, amp: AmpOptimizer, has_masters: bool, undo: ExitStack) -> None:
        undo.callback(weakly(ExitStack.close, amp.undo))
        if has_masters:
            amp.undo.callback(amp.masters.remove)
            self._make_masters(amp.masters, amp.params())
        _attach(amp, has_masters, functools.partial(self._join_group, amp, has_masters))
        amp.undo.callback(amp.close)
        if needs_whole_step(outer := amp.find_outer(), amp.optimizer):
            WholeStep(outer, amp).open(amp.undo)

    def _join_group(self, amp: AmpOptimizer, has_masters: bool, params: Sequence[Tensor]) -> None:
        self.drop_scaled("add_param_group", params)
        if has_masters:
            self._make_masters(amp.masters, params)

    def _make_masters(self, masters: MasterParams, params: Sequence[Tensor]) -> None:
        """Makes the masters of half parameters, or takes those that they have."""
        known = self._members.map_values()
        for param in params:
            if param.dtype not in HALF_TYPES or masters.get(param) is not None:
                continue  # a master is float32; one that is known was in another group before
            own = known.setdefault(id(param), Float32Values(self._shared))
            weight = own.get(param)
            if weight.master is None:
                masters.add(weight)
                self._data_watch.watched.update({id(weight.half): weight, id(weight.master): weight})
            else:
                masters.share(weight)
        masters.install()

    def drop_scaled(self, where: str, params: Sequence[Tensor]) -> None:
        """Drops gradients of parameters that join, but for those that have joined before.

        Blocks of `scale_loss` have scaled them, or not, and nobody knows by how much.
        """
        new = [param for param in params if param.grad is not None and id(param) not in self._stepped]
        self._stepped.update(map(id, params))
        if self.was_scaled and new:
            for param in new:
                param.grad = None
            logger.warning(
                "%s: %d new parameter%s had a gradient, which a block of scale_loss may have scaled: it was "
                "dropped; for a gradient of a new parameter to count, add the parameter before the block",
                where,
                len(new),
                "s" * (len(new) > 1),
            )


def _serve_hooks(masters: MasterParams, optimizer: Optimizer, instance: Patcher, undo: ExitStack) -> None:
    """Lets hooks of a step that are not ours act as in float32, whenever they are registered.

    Those at its end that were there first would see the model as it was before the step, and what they
    write into it would be overwritten. Those at its beginning may come later than ours.
    """
    if optimizer._optimizer_step_post_hooks:
        first = optimizer.register_step_post_hook(masters.end_step)
        optimizer._optimizer_step_post_hooks.move_to_end(first.id, last=False)
        undo.callback(first.remove)
        undo.callback(optimizer.register_step_post_hook(masters.adopt_writes).remove)
    register, last = optimizer.register_step_pre_hook, undo.enter_context(ExitStack())

    @functools.wraps(register)
    def register_step_pre_hook(hook: Callable) -> RemovableHandle:
        handle = register(hook)
        last.close()
        last.callback(register(masters.adopt_writes).remove)
        return handle

    instance.replace(optimizer, "register_step_pre_hook", register_step_pre_hook)


def _attach(amp: AmpOptimizer, has_masters: bool, on_join: OnJoin) -> None:
    """Puts hooks onto an optimizer, and methods that know of masters; `amp.undo` takes them away."""
    optimizer, instance = amp.optimizer, Patcher()
    amp.undo.callback(instance.close)
    add_group = functools.partial(_add_param_group, amp, on_join, optimizer.add_param_group)
    methods = {"add_param_group": add_group}
    if has_masters:
        methods["zero_grad"] = functools.partial(amp.zero_grad, optimizer.zero_grad)
        instance.replace(optimizer, "__reduce_ex__", CopyWithMasters(amp))
    for name, method in methods.items():
        instance.replace(optimizer, name, functools.update_wrapper(method, getattr(optimizer, name)))
    for one in amp.masters.optimizers:
        _order_hooks(one)
        if has_masters:
            _serve_hooks(amp.masters, one, instance, amp.undo)
        amp.undo.callback(one.register_step_pre_hook(amp.before_step).remove)
        amp.undo.callback(one.register_step_post_hook(amp.after_step).remove)
        if hasattr(one, "_optimizer_load_state_dict_post_hooks"):
            amp.undo.callback(one.register_load_state_dict_post_hook(amp.masters.align_state).remove)
            amp.undo.callback(one.register_load_state_dict_pre_hook(amp.masters.install_again).remove)
            amp.undo.callback(one.register_state_dict_pre_hook(amp.masters.install_again).remove)


def _add_param_group(amp: AmpOptimizer, on_join: OnJoin, original: Callable, group: dict) -> None:
    original(group)
    groups = amp.optimizer.param_groups
    params, present = groups[-1]["params"], {id(param) for one in groups[:-1] for param in one["params"]}
    pairs = [pair for param in params if (pair := amp.masters.get(param)) is not None]
    if any(id(pair.master) in present for pair in pairs):  # others were in a group that was taken out
        del groups[-1]
        raise ValueError("some parameters appear in more than one parameter group")
    on_join(params)


def _find_inner(optimizer: Optimizer) -> list[Optimizer]:
    """Returns an optimizer and those inside it, on the same parameters: SAM and Lookahead step these."""
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    shared = [one for one in inner if params & {id(p) for group in one.param_groups for p in group["params"]}]
    return [optimizer, *shared]


def _order_hooks(optimizer: Optimizer) -> None:
    for kind in ("step_pre", "step_post", "state_dict_pre", "load_state_dict_pre", "load_state_dict_post"):
        name = f"_optimizer_{kind}_hooks"
        if type(getattr(optimizer, name, None)) is dict:
            setattr(optimizer, name, OrderedDict(getattr(optimizer, name)))


class CopyWithMasters:
    """Copies an optimizer and its masters; what `copy` and `pickle` find on it as `__reduce_ex__`.

    The copy is no part of the session. It takes the gradients of plain backward passes, steps masters of
    its own and rounds them into the copied half weights: `copy.deepcopy((model, optimizer))` trains, and
    so does a pair that was pickled together.
    """

    def __init__(self, amp: AmpOptimizer) -> None:
        self._amp = amp

    def __call__(self, protocol: int) -> tuple:
        optimizer, masters = self._amp.optimizer, self._amp.masters
        masters.show_edits()
        new, args, *state = type(optimizer).__reduce_ex__(optimizer, protocol)
        # The half parameters are those of a model that is copied together with the optimizer.
        return _make_copy, (new, args), (state[0], [(pair.half, pair.master) for pair in masters])


def _make_copy(new: Callable[..., Optimizer], args: tuple) -> Optimizer:
    """Makes an optimizer that takes masters with its state, which comes later, and once."""
    copied = new(*args)

    def set_state(state: tuple[dict, list[tuple[Parameter, Parameter]]]) -> None:
        del copied.__setstate__
        copied.__setstate__(state[0])
        masters = MasterParams([copied], set())
        for half, master in state[1]:
            masters.add(Weight(half), master)
        amp = AmpOptimizer(copied, masters, Surroundings())
        _attach(amp, True, functools.partial(_join_alone, masters))
        copied.register_step_post_hook(amp.grads.leave)

    copied.__setstate__ = set_state  # type: ignore[method-assign]
    return copied


def _join_alone(masters: MasterParams, params: Sequence[Tensor]) -> None:
    for param in params:
        if param.dtype in HALF_TYPES and masters.get(param) is None:
            masters.add(Weight(param))
    masters.install()


class RefreshWeights(BeforeGraph):
    """Brings float32 values that were written outside of a step into the model; a forward pre-hook.

    Optimizers such as SAM and Lookahead write to parameters by themselves, and so do users who clip
    `master_params`, or average into what `state_dict()` shows. A deep copy or a pickled model has no
    masters, and values of its own.
    """

    def __init__(self, values: Sequence[Float32Values], masters: Sequence[MasterParams] = ()) -> None:
        self._values = values
        self._shared = list({id(own.shared): own.shared for own in values}.values())
        self._masters = [weakref.ref(one) for one in masters]  # a model keeps no optimizer alive

    def __call__(self, module: Module, args: tuple) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self.refresh(args, {})

    def refresh(self, args: tuple, kwargs: dict) -> None:
        """Rounds what was written into the model; no host sync."""
        for shared in self._shared:
            if shared.any_shown:
                self._call(Weight.round_shown)
        for reference in self._masters:
            masters = reference()
            if masters is None:
                self._call(Weight.round_written)
            else:
                masters.copy_edits_to_model()

    def _call(self, method: Callable[[Weight], None]) -> None:
        for values in self._values:
            for weight in values:
                method(weight)

    def __reduce__(self) -> tuple:
        return RefreshWeights, (self._values,)
