"""Half weights that are averaged, saved or made late, and numbers that no step trains and half rounds."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from types import SimpleNamespace
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ampatch.casts.cast import CASTS
from ampatch.casts.cast_tree import cast_tree
from ampatch.levels.patcher import Patcher, SessionPatch
from ampatch.levels.policy import Policy
from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.stack import Line
from ampatch.levels.undo import weakly
from ampatch.models.cast_tensor import Shared
from ampatch.models.rounding import Effect, find_error
from ampatch.session.members import Members
from ampatch.session.request import Opening
from ampatch.steps.masters import Weight, is_wrapper
from ampatch.steps.optimizer import AmpOptimizer
from ampatch.watching.observers import Warner


class HalfWatch(SessionPatch):
    """Watches half weights that are averaged or saved."""

    def __init__(self, warner: Warner, members: Members) -> None:
        super().__init__()
        self._warner = warner
        self._members = members
        self.forget()

    def forget(self) -> None:
        self._models: list[tuple[weakref.ref[Module], bool]] = []  # and if their half weights have masters
        self._savers: set[type] = set()  # whose save_pretrained is patched

    def patch(self, patcher: Patcher) -> None:
        """Has averages in float32 made of masters; `AveragedModel` has no hooks."""
        update = AveragedModel.update_parameters

        @functools.wraps(update)
        def update_parameters(averaged: AveragedModel, model: Module) -> None:
            update(averaged, self._find_precise(averaged, model))

        patcher.replace(AveragedModel, "update_parameters", update_parameters)

    # Saving

    def _name_saved_types(self, models: Sequence[Module]) -> None:
        """Has `save_pretrained` of transformers name the type that it saves, which is that of no half weight.

        `from_pretrained` would cast what it reads to the type in the config.
        """
        for kind in {type(part) for model in models for part in model.modules()}:
            owner = next((base for base in kind.__mro__ if "save_pretrained" in vars(base)), None)
            if owner is not None and owner not in self._savers and self._patcher is not None:
                self._savers.add(owner)
                self._patcher.replace(owner, "save_pretrained", _saving_float32(owner.save_pretrained))

    # Averages

    def _find_precise(self, averaged: AveragedModel, model: Module) -> Module | SimpleNamespace:
        """What to average: the model with its masters, if it is one of ours with half weights."""
        half = self.find_half(wants_masters=False)
        if not any(id(param) in half for param in model.parameters()):
            return model
        if any(param.dtype in HALF_TYPES for param in averaged.module.parameters()):
            self._warner.warn(
                "average",
                "an AveragedModel of half parameters is updated in half precision, where most of each update "
                "is rounded away: make it AveragedModel(model).float(), which then averages float32 values",
            )
        optimizers = self._members.optimizers()
        masters = {id(pair.half): pair.read() for optimizer in optimizers for pair in optimizer.masters}

        def widen(tensor: Tensor, average: Tensor) -> Tensor:
            if tensor.dtype not in HALF_TYPES or average.dtype in HALF_TYPES:
                return tensor
            return masters.get(id(tensor), tensor).detach().float()

        return SimpleNamespace(  # all that is read of a model
            parameters=lambda: map(widen, model.parameters(), averaged.module.parameters()),
            buffers=lambda: map(widen, model.buffers(), averaged.module.buffers()),
        )

    # Half weights

    def watch(self, models: Sequence[Module], wants_masters: bool) -> None:
        """Watches the half parameters of models, without keeping them alive."""
        self._name_saved_types(models)
        self._models += [(weakref.ref(model), wants_masters) for model in models]

    def find_half(self, *, wants_masters: bool) -> set[int]:
        """The ids of half parameters of our models: of all, or of those that have masters."""
        models = [ref() for ref, wants in self._models if wants or not wants_masters]
        params = [param for model in models if model is not None for param in model.parameters()]
        return {id(param) for param in params if param.dtype in HALF_TYPES}


def _saving_float32(save: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(save)
    def save_pretrained(model: Module, *args: object, **kwargs: object) -> object:
        parameters = model.parameters
        # transformers names the type of the first one, which here has no elements, and that of a state_dict.
        floating = (item for item in model.named_parameters() if item[1].is_floating_point())
        first = next(floating, None)
        if first is None or first[1].dtype not in HALF_TYPES:
            return save(model, *args, **kwargs)
        part, _, name = first[0].rpartition(".")
        dtype = model.get_submodule(part).state_dict().get(name, first[1]).dtype
        typed = torch.empty(0, dtype=dtype, device=first[1].device)
        with closing(Patcher()) as patcher:
            patcher.replace(
                model, "parameters", lambda recurse=True: itertools.chain([typed], parameters(recurse))
            )
            return save(model, *args, **kwargs)

    return save_pretrained


def check_halved(warner: Warner, halved: dict[int, Line], amp: AmpOptimizer) -> None:
    """Warns before a step of weights without masters that became half after `initialize`.

    `halved` are tensors that did, by id, with the lines.
    """
    changed = [
        param for param in amp.masters.own_params() if id(param) in halved and param.dtype in HALF_TYPES
    ]
    own = [param for param in changed if amp.masters.get(param) is None and param.grad is not None]
    if own:
        warner.warn(
            "halved",
            f"float32 weights became {own[0].dtype} after initialize and have no masters: small updates are "
            f"lost: take this line out, as casts need no half weights, or use opt_level='O2' or 'O5', which "
            f"makes them half and keeps float32 masters",
            halved[id(own[0])],
        )


SIZE = 4096  # elements of one weight that are looked at
UPDATES = 16  # how many are counted, before one host sync
MOST_LOST = 0.7  # where it is more, averages end 5 % or more away from where they should

SOFT = (
    "a copy of the model is averaged in {}, where {:.0%} of what should move stays where it is: keep it in "
    "float32, as target = copy.deepcopy(model).float(), or average the values of target.state_dict() with "
    "those of model.state_dict()"
)


class AverageWatch:
    """Looks at one weight of each copied model, at the steps of the original."""

    def __init__(self, warner: Warner, views: dict) -> None:
        self._warner, self._views = warner, views
        self.forget()

    def forget(self) -> None:
        self._tracks: WeakKeyDictionary[Shared, Track] = WeakKeyDictionary()

    def check_step(self, copies: WeakSet[Shared]) -> None:
        """Counts what was written into copies since the last step; one host sync for each, once."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        for shared in list(copies):
            track = self._tracks.get(shared)
            if track is None:
                track = self._tracks[shared] = Track(*shared.sample)  # type: ignore[misc]
                self._views[id(track.weight.half)] = track.views
            elif not track.look():
                self._judge(track)
                copies.discard(shared)
                del self._tracks[shared]
        if len(self._views) > len(self._tracks):
            self._views.clear()
            self._views.update((id(track.weight.half), track.views) for track in self._tracks.values())

    def _judge(self, track: Track) -> None:
        lost = track.read_lost()
        if lost > MOST_LOST and not self._warner.has_warned("average"):
            self._warner.warn("soft", SOFT.format(track.weight.half.dtype, lost))


class Track:
    """What became of one weight of a copy: of the entries that differ from the original, how many stayed.

    An average moves each of them, and a hard copy leaves none.
    """

    def __init__(self, weight: Weight, find: ref[Weight]) -> None:
        self.weight, self._find = weight, find
        self.views: deque[Tensor] = deque(maxlen=8)  # what `.data` gave since the last look
        self._numbers: list[tuple[Tensor, Tensor]] = []
        self._take_sample()

    def _take_sample(self) -> None:
        half = self.weight.half
        self._version, self._pointer = half._version, half.data_ptr()
        self._values = _sample(half).clone()
        self.views.clear()

    def look(self) -> bool:
        """Counts an update, if there was one since; says whether to look again."""
        half, original = self.weight.half, self._find()
        # One that has float32 values behind it is averaged there.
        is_half = half.dtype in HALF_TYPES and self.weight.precise is None
        if original is None or not is_half or original.half.device != half.device:
            self._numbers.clear()
            return False
        is_written = (half._version, half.data_ptr()) != (self._version, self._pointer)
        if is_written or any(view._version for view in self.views):
            before, others = self._values, _sample(original.half)
            differs = before != others
            self._numbers.append((differs.sum(), (differs & (_sample(half) == before)).sum()))
            self._take_sample()
        self.views.clear()
        return len(self._numbers) < UPDATES

    def read_lost(self) -> float:
        """The share of the entries that should have moved, and did not."""
        if not self._numbers:
            return 0.0
        differ, stayed = torch.stack([torch.stack(pair) for pair in self._numbers]).sum(0).tolist()
        return stayed / differ if differ else 0.0


def _sample(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:SIZE]


REMEDY = (
    "Name the module that holds it in keep_fp32, or move it into one without parameters whose forward "
    "computes with it: at O2 and O5 these stay float32"
)


def check_rounded(warner: Warner, rounded: Mapping[Effect, Sequence[str]], policy: Policy) -> None:
    """Warns of buffers and frozen parameters, as they are named, that half changes for the worse."""
    for effect, names in rounded.items():
        warner.warn(
            f"rounded {effect.name}",
            f"{policy.opt_level} rounds {_join(names)} to {policy.half}, which {effect.value}. {REMEDY}",
        )


def watch_buffers(warner: Warner, opening: Opening) -> None:
    """Has the first forwards of a call's models looked at; whatever is put there goes with the call."""
    policy, undo = opening.request.policy, opening.call.undo
    for model in opening.request.models:
        watches: list[_FirstForward] = [OutputWatch(warner, policy, opening.buffered)]
        watches.append(WriteWatch(warner, policy, _list_untrained(model)))
        for watch in watches:
            if watch.is_needed:
                watch.handle = model.register_forward_hook(watch, prepend=True)
                undo.callback(watch.handle.remove)
        undo.callback(weakly(_restore_forward, model))


def _join(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names))


class _FirstForward:
    """A forward hook that is taken away once it has seen enough; that of a copied model does nothing."""

    handle: RemovableHandle | None = None
    is_needed = False

    def __reduce__(self) -> tuple:
        return _FirstForward, ()

    def __call__(self, module: Module, args: tuple, output: object) -> None:
        if not self.is_needed or torch.compiler.is_dynamo_compiling():
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        self.look(module, output)
        if not self.is_needed and self.handle is not None:
            self.handle.remove()

    def look(self, module: Module, output: object) -> None:
        """Looks at a forward that is about to end."""


class OutputWatch(_FirstForward):
    """Warns of modules without parameters whose results are rounded for half modules, by too much.

    Each is looked at once, which costs a host sync. What the model returns is not rounded.
    """

    def __init__(self, warner: Warner, policy: Policy, parts: Mapping[int, str]) -> None:
        self._warner, self._policy = warner, policy
        self._parts = parts  # the names of those that were not called yet, by id
        self.is_needed = bool(parts)

    def look(self, module: Module, output: object) -> None:
        forwards = CASTS.thread.forwards
        rounded = forwards[-1].rounded if forwards and forwards[-1].owner == id(module) else []
        fresh = [one for one in rounded if one.owner in self._parts]
        if not fresh:
            return
        returned: list[Tensor] = []
        cast_tree(output, lambda tensor: returned.append(tensor) or tensor)  # type: ignore[func-returns-value]
        errors: dict[str, float] = {}
        for one in fresh:
            if all(one.half is not tensor for tensor in returned):
                name = self._parts[one.owner]
                errors[name] = max(errors.get(name, 0.0), find_error(one.precise, one.half))
        self._parts = {owner: name for owner, name in self._parts.items() if name not in errors}
        self.is_needed = bool(self._parts)
        self._warn({name: error for name, error in errors.items() if error})

    def _warn(self, errors: Mapping[str, float]) -> None:
        parts = ", ".join(f"{name!r} returns (by up to {error:.3g})" for name, error in errors.items())
        if errors:
            self._warner.warn(
                f"output {parts}",
                f"{self._policy.opt_level} rounds what {parts} to {self._policy.half}, as the modules around "
                f"it are half: pass initialize(keep_fp32={list(errors)}), which leaves its result in float32",
            )


class WriteWatch(_FirstForward):
    """Warns of half tensors to which the forward adds, as a counter or a slow average does.

    What the first forward in training has written is looked at in the next one, operation by operation.
    """

    def __init__(self, warner: Warner, policy: Policy, tensors: Mapping[str, Tensor]) -> None:
        self._warner, self._policy = warner, policy
        self._before = {name: _mark(tensor) for name, tensor in tensors.items()}
        self.is_needed = bool(tensors)

    def look(self, module: Module, output: object) -> None:
        if not module.training:
            return
        before, self._before, self.is_needed = self._before, {}, False
        now = _list_untrained(module)
        written = [name for name in now if name in before and before[name] != _mark(now[name])]
        if written and "forward" not in vars(module):
            module.forward = _LookedAt(module, written, self._warn)

    def _warn(self, module: Module, names: Sequence[str]) -> None:
        half = self._policy.half
        whole = round(1 / torch.finfo(half).eps) * 2
        self._warner.warn(
            "added",
            f"the forward of {type(module).__name__} adds to {_join(list(map(repr, names)))}, which "
            f"{self._policy.opt_level} has made {half}, where small steps are lost ({whole} + 1 is {whole}). "
            f"{REMEDY}",
        )


def _list_untrained(model: Module) -> dict[str, Tensor]:
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    # At O3, or with keep_batchnorm_fp32=False, who asks for half statistics gets them.
    norms = [part for part in model.modules() if isinstance(part, _BatchNorm)]
    statistics = {id(buffer) for norm in norms for buffer in norm.buffers()}
    return {
        name: tensor
        for name, tensor in tensors
        if tensor.dtype in HALF_TYPES and id(tensor) not in statistics and not _is_out_of_reach(tensor)
    }


def _is_out_of_reach(tensor: Tensor) -> bool:
    return tensor.requires_grad or tensor.is_meta or tensor.layout is not torch.strided or is_wrapper(tensor)


def _mark(tensor: Tensor) -> tuple[int, int, float]:
    """What changes when a tensor is written or replaced; the sum where it is written through `.data`."""
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr(), tensor.detach().sum(dtype=torch.float32).item()


class _LookedAt:
    """The forward of a model, looked at once in training; what the model finds as its `forward`."""

    def __init__(self, module: Module, names: Sequence[str], warn: Callable) -> None:
        self._module, self._names, self._warn = module, names, warn

    def __reduce__(self) -> tuple:
        return functools.partial, (type(self._module).forward, self._module)

    def __call__(self, *args: object, **kwargs: object) -> object:
        module = self._module
        forward = functools.partial(type(module).forward, module)
        if torch.compiler.is_dynamo_compiling() or not module.training:
            return forward(*args, **kwargs)
        _restore_forward(module)
        tensors = _list_untrained(module)
        with _Additions({name: tensors[name] for name in self._names if name in tensors}) as additions:
            output = forward(*args, **kwargs)
        names = additions.find(_list_untrained(module))
        if names:
            self._warn(module, names)
        return output


def _restore_forward(module: Module) -> None:
    if isinstance(vars(module).get("forward"), _LookedAt):
        del module.forward


_ARITHMETIC = {
    "add",
    "sub",
    "mul",
    "div",
    "true_divide",
    "lerp",
    "addcmul",
    "addcdiv",
    "index_add",
    "scatter_add",
}
_SAME = {
    "getitem",
    "to",
    "type_as",
    "float",
    "clone",
    "detach",
    "get",
    *_ARITHMETIC,
}  # of the tensor's own numbers
_WRITES = {"copy", "setitem", "set"}


class _Additions(TorchFunctionMode):
    """Sees to which tensors something is added, in place or by writing what was computed of them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._places = {_memory_of(tensor): name for name, tensor in tensors.items()}
        self._sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        self._derived: list[tuple[Tensor, str]] = []  # what was computed of them, and is no larger
        self._written: set[str] = set()

    def find(self, tensors: Mapping[str, Tensor]) -> list[str]:
        now = {name: self._find_source(tensors.get(name)) for name in self._sizes}
        return [name for name, source in now.items() if name in self._written or source == name]

    def __torch_function__(
        self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        name = getattr(function, "__name__", "")
        stem = name.strip("_")
        if stem in _WRITES or (stem in _ARITHMETIC and name.endswith("_")):
            target = self._find_place(args[0])
            if target is not None and (stem in _ARITHMETIC or target in map(self._find_source, args[1:])):
                self._written.add(target)
        result = function(*args, **(kwargs or {}))
        if stem in _SAME or stem.removeprefix("r") in _SAME:
            source = next(
                filter(None, (self._find_source(arg) or self._find_place(arg) for arg in args)), None
            )
            if isinstance(result, Tensor) and source is not None and result.numel() <= self._sizes[source]:
                self._derived.append((result, source))
        return result

    def _find_place(self, arg: object) -> str | None:
        return self._places.get(_memory_of(arg)) if isinstance(arg, Tensor) else None

    def _find_source(self, arg: object) -> str | None:
        return next((name for tensor, name in self._derived if tensor is arg), None)


def _memory_of(tensor: Tensor) -> int:
    return 0 if tensor.is_meta or tensor.layout is not torch.strided else tensor.untyped_storage().data_ptr()
