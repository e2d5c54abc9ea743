"""What features of torch need to work on half models and on patched functions."""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from threading import get_ident
from types import ModuleType, SimpleNamespace
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint
from torch import Tensor, overrides
from torch.nn import Module, Parameter

from ampatch.casts.cast import CASTS, Call, Function
from ampatch.casts.cast_tree import cast_to, cast_tree
from ampatch.casts.thread import OpenForward
from ampatch.casts.wrapper import METHODS, peel
from ampatch.errors import AmpValueError
from ampatch.levels.patcher import Patcher, SessionPatch, get_raw
from ampatch.levels.precision import ELIGIBLE, HALF_TYPES
from ampatch.levels.private import (
    BACKWARDS,
    ENTER_AUTOCAST,
    FIND_BUILTIN,
    FUNCTIONS_IN_SCRIPTS,
    OPS,
    POP_MODE,
    REENTRANT,
    REFERENCES,
    SCRIPT_MODULE,
    count_function_modes,
    forward_ad_level,
    function_mode,
    has_function_modes,
    is_transformed,
)
from ampatch.levels.stack import is_running, logger
from ampatch.patching.bound_names import BoundNames

# What `checkpoint` calls: in torch 2.14, and before.
_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")


class BeforeGraph:
    """A forward pre-hook that does nothing in a graph, and is asked to `refresh` before one runs."""

    def refresh(self, args: tuple, kwargs: dict) -> None:
        """Brings up to date what the graph reads, given what the model is."""
        raise NotImplementedError


class TorchFeatures(SessionPatch):
    """Has checkpointing, transforms, overrides and compiled models work at every level but O0."""

    def patch(self, patcher: Patcher) -> None:
        keep_tables(patcher)
        patch_checkpoint(patcher)
        widen_in_transforms(patcher)
        name_originals(patcher)
        refresh_compiled(patcher)
        refuse_hooks_of_ours(patcher)


def name_originals(patcher: Patcher) -> None:
    """Has functions that are written in Python introduce themselves by the originals.

    They look themselves up in their module, find the wrapper there and pass it on; but classes look
    what is passed up in tables of theirs, which hold the originals.
    """
    for module in (torch.functional, torch.nn.functional, torch._tensor):
        call = _with_original(module.handle_torch_function)  # type: ignore[attr-defined]
        patcher.replace(module, "handle_torch_function", call)


def _with_original(call: Function) -> Function:
    """Has what is called with a function be called with what that was before any patch."""

    @functools.wraps(call)
    def call_with_original(function: Function, *args: object, **kwargs: object) -> object:
        return call(peel(function), *args, **kwargs)

    return call_with_original


def keep_tables(patcher: Patcher) -> None:
    """Has `torch.overrides` know a function by what stands in its place as well as by itself.

    It makes tables of torch's functions when it is first asked, and keeps them: so before any patch.
    """
    overrides.is_tensor_method_or_property(Tensor.add)
    REFERENCES.find(dict)()
    for name in ("resolve_name", "is_tensor_method_or_property"):
        patcher.replace(overrides, name, _with_original(getattr(overrides, name)))
    table, keys = overrides.get_testing_overrides(), overrides.get_overridable_functions()
    places = [place for place in keys if isinstance(place, (type, ModuleType))]

    @functools.wraps(overrides.get_testing_overrides)
    def get_testing_overrides() -> dict:
        functions = [value for place in places for value in vars(place).values() if callable(value)]
        wrappers = [(each, peel(each)) for each in functions if peel(each) is not each]
        return table | {wrapper: table[original] for wrapper, original in wrappers if original in table}

    patcher.replace(overrides, "get_testing_overrides", get_testing_overrides)


def hand_over_originals(patcher: Patcher, names: BoundNames) -> None:
    """Has what overrides functions of torch be handed the originals.

    Torch keeps its functions in C and hands over those; but methods it looks up on Tensor, where the wrappers
    are.
    """

    def hand_over(original: Function, call: Call, args: tuple, kwargs: dict) -> object:
        others = [value for value in _list_values(args, kwargs) if _overrides(value)]
        if not others and not has_function_modes():
            return call(args, kwargs)  # only the mode of `set_default_device` is there
        modes = [function_mode(index) for index in range(count_function_modes())]
        names.look_for_tables(set(map(type, others + modes)), original)
        are_tensors = all(isinstance(other, Tensor) for other in others)
        with _Originals() if type(original) in METHODS and not POP_MODE.is_missing() else nullcontext():
            # What others call in turn is cast, as under torch.autocast.
            return call(args, kwargs) if are_tensors else original(*args, **kwargs)

    patcher.replace(CASTS, "hand_over", hand_over)


def _list_values(args: tuple, kwargs: dict) -> list:
    values = [*args, *kwargs.values()]
    return [item for value in values for item in (value if isinstance(value, (list, tuple)) else (value,))]


def _overrides(value: object) -> bool:
    return type(value) not in (Tensor, Parameter) and hasattr(type(value), "__torch_function__")


class _Originals(overrides.TorchFunctionMode):
    """Passes what torch looked up on as what it was before the patch, to the next mode or to classes."""

    def __torch_function__(
        self, func: Function, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs, function, count = kwargs or {}, peel(func), count_function_modes()
        if count:
            # What that mode calls may go on to another, or to a class.
            is_last = count == 1 and not types
            with POP_MODE.find()() as mode, nullcontext() if is_last else _Originals():
                result = mode.__torch_function__(function, types, args, kwargs)
            if result is not NotImplemented:
                return result
        for kind in types:  # in torch's order
            first = next(value for value in _list_values(args, kwargs) if type(value) is kind)
            result = first.__torch_function__(function, types, args, kwargs)
            if result is not NotImplemented:
                return result
        return NotImplemented if count or types else function(*args, **kwargs)


def refresh_compiled(patcher: Patcher) -> None:
    """Has a model that `torch.compile` returned run such hooks of its own before its graph.

    Without an optimizer nothing may have imported Dynamo yet, and there are no masters to write into.
    """
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:
        return
    original = eval_frame.OptimizedModule.__call__

    @functools.wraps(original)
    def call(self: Module, *args: object, **kwargs: object) -> object:
        if not torch.compiler.is_dynamo_compiling():
            for hook in self._orig_mod._forward_pre_hooks.values():  # type: ignore[union-attr]
                if isinstance(hook, BeforeGraph):
                    hook.refresh(args, kwargs)
        return original(self, *args, **kwargs)

    patcher.replace(eval_frame.OptimizedModule, "__call__", call)


def refuse_hooks_of_ours(patcher: Patcher) -> None:
    """Has `torch.cuda.make_graphed_callables`, which takes no module with hooks, name the way out."""
    original = torch.cuda.make_graphed_callables

    @functools.wraps(original)
    def make_graphed_callables(callables: object, *args: object, **kwargs: object) -> object:
        for module in callables if isinstance(callables, tuple) else (callables,):
            hooks = list(module._forward_pre_hooks.values()) if isinstance(module, Module) else []
            if any(map(is_ours, hooks)):
                raise AmpValueError(
                    f"torch.cuda.make_graphed_callables takes no module with hooks, and initialize put some "
                    f"on this {type(module).__name__}: give it torch.nn.Sequential(model), which has none"
                )
        return original(callables, *args, **kwargs)

    patcher.replace(torch.cuda, "make_graphed_callables", make_graphed_callables)


def patch_checkpoint(patcher: Patcher) -> None:
    """Has both kinds of checkpointing repeat what was around the checkpoint: models, disabled casts.

    The recomputation runs inside backward, where neither is around it. What is replaced are two names
    that `torch.utils.checkpoint.checkpoint` looks up: it may itself be bound to other names by now,
    and torch.compile knows it by identity.
    """
    module = torch.utils.checkpoint
    name = next((name for name in _GENERATORS if hasattr(module, name)), None)
    if name is not None:
        patcher.replace(module, name, _repeat_generator(getattr(module, name)))
    reentrant = REENTRANT.find()

    def apply(function: Function, *args: object) -> object:
        return reentrant.apply(_repeat(function), *args)

    if reentrant is not None:
        patcher.replace(*REENTRANT.find_place(), SimpleNamespace(apply=apply, __wrapped__=reentrant))


def _repeat_generator(original: Function) -> Function:
    no_context = torch.utils.checkpoint.noop_context_fn

    @functools.wraps(original)
    def generate(function: Function, *args: object, **kwargs: object) -> object:
        by_place = args[1] if len(args) > 1 and callable(args[1]) else no_context
        is_selective = kwargs.get("context_fn", by_place) is not no_context
        if is_selective:
            # It counts operations, casts of weights among them, so that both runs must begin alike: with no
            # casts in the cache.
            CASTS.forget_casts()
        return original(_repeat(function, begins_empty=is_selective), *args, **kwargs)

    return generate


def _repeat(function: Function, *, begins_empty: bool = False) -> Function:
    """Returns `function` with casts on or off, and inside of the forward, as it is now."""
    thread = CASTS.thread
    switch = thread.disabled if thread.off and thread.is_off() else thread.enabled
    dtype = thread.forwards[-1].dtype if thread.forwards else None

    def run(*args: object, **kwargs: object) -> object:
        if begins_empty:
            CASTS.forget_casts()
        with switch():
            if not is_inside:
                return function(*args, **kwargs)
            thread.push(OpenForward(id(run), False, dtype, sys._getframe()))
            try:
                return function(*args, **kwargs)
            finally:
                thread.pop(id(run))

    is_inside = bool(thread.forwards)
    return run


def allow_half_input() -> Callable[..., None]:
    """Returns what stands in for `torch.nn.RNNBase.check_input`, with every check but that of dtypes.

    The module compares the dtypes of input and weights before it calls the recurrent function, which
    is patched and casts both; it makes an exception for `torch.autocast`, but not for us.
    """
    original, thread = torch.nn.RNNBase.check_input, CASTS.thread

    @functools.wraps(original)
    def check_input(self: torch.nn.RNNBase, input: Tensor, batch_sizes: Tensor | None) -> None:
        weight = self._flat_weights[0]
        casts = not (thread.off and thread.is_off())
        if casts and {input.dtype, weight.dtype} <= ELIGIBLE and input.dtype != weight.dtype:
            input = torch.empty_like(input, dtype=weight.dtype, device="meta")
        return original(self, input, batch_sizes)

    return check_input


def allow_fast_path() -> Callable[[], bool]:
    """Returns what stands in for `torch.backends.mha.get_fastpath_enabled`: False where this thread casts.

    In evaluation `nn.MultiheadAttention` and `nn.TransformerEncoder` may make one C++ call for a whole
    layer, in the type of its weights. They make an exception for `torch.autocast`, but not for us.
    """
    original, thread = torch.backends.mha.get_fastpath_enabled, CASTS.thread

    @functools.wraps(original)
    def get_fastpath_enabled() -> bool:
        if thread.off and thread.is_off():
            return original()
        return False

    return get_fastpath_enabled


def widen_in_transforms(patcher: Patcher) -> None:
    """Has functions compute in float32 inside of a transform where half fails; their results stay half."""
    for path, name, fails in _FAIL_IN_TRANSFORMS:
        owner = pkgutil.resolve_name(path)
        patcher.replace(owner, name, _widen(getattr(owner, name), fails))


def _widen(original: Callable[..., object], fails: Callable[[tuple], bool]) -> Callable[..., object]:
    @functools.wraps(original)
    def widened(input: Tensor, *args: object, **kwargs: object) -> object:
        is_plain = torch.compiler.is_dynamo_compiling() or not (is_transformed() or forward_ad_level() >= 0)
        if is_plain or input.dtype not in HALF_TYPES or not fails((input, *args, *kwargs.values())):
            return original(input, *args, **kwargs)
        args, kwargs = cast_tree(((input, *args), kwargs), cast_to(torch.float32))  # type: ignore[misc,assignment]
        return cast_tree(original(*args, **kwargs), cast_to(input.dtype))

    return widened


def _has_float32(values: tuple) -> bool:
    return any(isinstance(value, Tensor) and value.dtype is torch.float32 for value in values)


def _is_on_cpu(values: tuple) -> bool:
    return values[0].device.type == "cpu"


# Elsewhere these take half input (torch 2.13). Normalizations have kernels for it with float32 weights, but
# the formulas for `vmap`, `jvp` and the derivatives of a derivative raise, or return float32. On a CPU the
# `jvp` of `glu` has no half kernel, and oneDNN, whose LSTM alone has a rule for `vmap`, none in float16, and
# in bfloat16 only on processors that compute in it.
_FAIL_IN_TRANSFORMS = (
    ("torch", "batch_norm", _has_float32),
    ("torch", "instance_norm", _has_float32),
    ("torch.nn.functional", "glu", _is_on_cpu),
    ("torch._VF", "lstm", _is_on_cpu),
)


def patch_autocast(patcher: Patcher) -> None:
    """Has `with torch.autocast(device, enabled=False)` mean float32 here as it does under autocast.

    Authors of models write it around what must not be rounded, such as rotary embeddings. Outside of a
    forward it says nothing: there it is how scripts turn torch's own mixed precision off.
    """
    block, thread = torch.amp.autocast_mode.autocast, CASTS.thread
    original_enter, original_exit = block.__enter__, block.__exit__
    in_graph = getattr(ENTER_AUTOCAST.find(), "__code__", None)

    def enter(self: torch.autocast) -> object:
        result = original_enter(self)
        forwards = thread.forwards
        is_off = not self._enabled and self.device in CASTS.device_types
        # Dynamo enters one to trace what is inside, and would take our state for that of the whole graph.
        is_traced = sys._getframe(1).f_code is in_graph
        is_inside = bool(forwards) and is_running(forwards[-1].frame)
        thread.enter_autocast(self, is_off and is_inside and not is_traced)
        return result

    def leave(self: torch.autocast, *error: object) -> object:
        thread.exit_autocast(self)
        return original_exit(self, *error)

    patcher.replace(block, "__enter__", enter)
    patcher.replace(block, "__exit__", leave)


_BACKWARD = "_backward_fn"


def leave_ops_uncast(patcher: Patcher) -> None:
    """Turns casts off inside of every op that is called from Python, made before or later.

    An op promises its types: a body that is cast returns others than its fake declares. Torch looks no
    kernel up that Python could see, so that what is replaced are the calls of ops, under which kernels, fakes
    and rules of `vmap` and dispatch modes run, compiled or not. Backwards run under the autograd engine:
    there the attribute is replaced by which torch finds them.
    """
    ops, backwards = [[name.find() for name in names if not name.is_missing()] for names in (OPS, BACKWARDS)]
    for kind in [each for op in ops for each in (op, *op.__subclasses__())]:
        if "__call__" in vars(kind):
            patcher.replace(kind, "__call__", _uncast(vars(kind)["__call__"]))
    for kind in backwards:
        patcher.put(kind, _BACKWARD, property(_read_backward, _write_backward))


def _uncast(function: Function) -> Function:
    thread = CASTS.thread

    @functools.wraps(function)
    def call(*args, **kwargs):
        thread.disabled_by += 1  # `ThreadState.disable`, written out: torch calls ops around each step
        thread.off += 1
        try:
            return function(*args, **kwargs)
        finally:
            thread.disabled_by -= 1
            thread.off -= 1

    return call


def _read_backward(op: object) -> Function | None:
    function = vars(op)[_BACKWARD]
    return None if function is None else _uncast(function)


def _write_backward(op: object, function: Function | None) -> None:
    vars(op)[_BACKWARD] = function


Repeats = list[Callable[[], None]]


class Captures(SessionPatch):
    """Knows whether a thread captures a CUDA graph, and has each replay repeat what the capture noted.

    A replay computes on the device what was captured. What Python notes beside it, an outcome that the next
    step must look at for example, is put into `current()` during the capture and called after each replay.
    Casts end where a capture begins and ends and after each replay: one from before would be a constant of
    the graph, what a capture casts is computed by replays alone, and a graph may hold an optimizer's step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[int, Repeats] = {}  # by thread
        self._repeats: WeakKeyDictionary[torch.cuda.CUDAGraph, Repeats] = WeakKeyDictionary()

    def current(self) -> Repeats | None:
        """Returns what collects what is to be repeated, None if this thread captures nothing."""
        return self._open.get(get_ident()) if self._open else None  # torch.compile knows no get_ident

    def patch(self, patcher: Patcher) -> None:
        """Replaces the methods by which graphs are captured and replayed."""
        names = ("capture_begin", "capture_end", "replay")
        originals = {name: get_raw(torch.cuda.CUDAGraph, name) for name in names}

        def capture_begin(graph: torch.cuda.CUDAGraph, *args: object, **kwargs: object) -> None:
            CASTS.forget_casts()  # first: it may raise
            originals["capture_begin"](graph, *args, **kwargs)
            self._open[get_ident()] = self._repeats[graph] = []

        def capture_end(graph: torch.cuda.CUDAGraph) -> None:
            self._open.pop(get_ident(), None)
            CASTS.forget_casts()
            originals["capture_end"](graph)

        def replay(graph: torch.cuda.CUDAGraph) -> None:
            originals["replay"](graph)
            CASTS.forget_casts()
            for repeat in self._repeats.get(graph, ()):
                repeat()

        for name, function in zip(names, (capture_begin, capture_end, replay), strict=True):
            patcher.replace(torch.cuda.CUDAGraph, name, functools.wraps(originals[name])(function))

    def forget(self) -> None:
        self._open.clear()
        self._repeats.clear()


UNCAST = (
    "%s: scripted code runs uncast, in the types that its weights and inputs have; "
    "torch.jit.trace and torch.export of an initialized model keep the casts"
)


class ScriptModels(SessionPatch):
    """Has scripted code run the originals, uncast, and leaves our hooks out of it; says so once a session.

    Torch itself scripts functions when they are first needed, those of forward-mode AD among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_warned = False

    def patch(self, patcher: Patcher) -> None:
        """Replaces the functions by which TorchScript gets to know another one, or a module."""
        self._has_warned = False
        FIND_BUILTIN.find(len)("")  # which makes a table of torch's namespace as it is now: before any patch
        for name in FUNCTIONS_IN_SCRIPTS:
            if not name.is_missing():
                patcher.replace(*name.find_place(), _with_original(name.find()))
        if not SCRIPT_MODULE.is_missing():
            patcher.replace(*SCRIPT_MODULE.find_place(), self._script_without_hooks(SCRIPT_MODULE.find()))

    def _script_without_hooks(self, original: Callable[..., object]) -> Callable[..., object]:
        def create_script_module(model: Module, *args: object, is_tracing: bool = False, **kwargs) -> object:
            if not is_tracing:
                self._say(model)
            with closing(Patcher()) as patcher:
                _hide_hooks(patcher, model)
                return original(model, *args, is_tracing=is_tracing, **kwargs)

        return create_script_module

    def _say(self, model: Module) -> None:
        has_half = any(param.dtype in HALF_TYPES for param in model.parameters())
        if not self._has_warned and (has_half or CASTS.half is not None):
            self._has_warned = True
            logger.warning(UNCAST, f"torch.jit.script({type(model).__name__})")


def say_scripted(models: Sequence[Module]) -> None:
    """Says of models with scripted or traced parts that casts of torch's functions do not reach these."""
    parts = [part for model in models for part in model.named_modules()]
    scripted = [name for name, part in parts if isinstance(part, torch.jit.ScriptModule)]
    if scripted:
        logger.warning(UNCAST, f"module {scripted[0]!r} is scripted")


def _hide_hooks(patcher: Patcher, model: Module) -> None:
    """Takes the forward hooks that `initialize` put on a model and its parts away."""
    for part in model.modules():
        for table in ("_forward_hooks", "_forward_pre_hooks"):
            hooks = getattr(part, table).items()
            others = [(key, hook) for key, hook in hooks if not is_ours(hook)]
            if len(others) < len(hooks):
                patcher.replace(part, table, OrderedDict(others))


def is_ours(hook: object) -> bool:
    """Whether a hook is one that `initialize` put on a module."""
    return type(hook).__module__.partition(".")[0] == "ampatch"
