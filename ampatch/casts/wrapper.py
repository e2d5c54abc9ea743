"""The wrappers that stand in for patched functions: the hot path, one per kind of cast."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from types import MethodDescriptorType, MethodType, WrapperDescriptorType

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import has_torch_function

from ampatch.casts.cast import (
    CASTS,
    Call,
    CastCache,
    Casts,
    Function,
    cast_eligible,
    eligible_dtypes,
    is_grad_enabled,
)
from ampatch.casts.cast_tree import SIMPLE, TensorCast, cast_listed, cast_tree, have_one_dtype
from ampatch.casts.custom import (
    CUSTOM_CASTS,
    is_half,
    leave_elementwise,
    where_refused,
    write_in_place,
    write_out,
)
from ampatch.casts.kernels import use_kernel
from ampatch.errors import BannedFunctionError
from ampatch.levels.precision import ELIGIBLE, HALF_TYPES
from ampatch.levels.private import count_modes, tracing_state
from ampatch.table import Cast

is_compiling = torch.compiler.is_dynamo_compiling

METHODS = (MethodDescriptorType, WrapperDescriptorType)  # of Tensor, written in C

GetCast = Callable[[torch.dtype], TensorCast]


def wrap(
    original: Function,
    kind: Cast,
    half: torch.dtype,
    *,
    place: tuple[str | None, str],
    trace: Callable[[str], None] | None = None,
    counter: CastCounter | None = None,
    is_users: bool = False,
) -> Function:
    """Returns `original` with its floating arguments cast as `kind` says.

    A plain function, not a wrapt wrapper: that one compares equal to what it wraps, so that Dynamo
    takes it for the original and drops its casts. Two kinds of calls go through uncast: with `out=`, whose
    type is the one that is wanted, and of an FP32 function with `dtype=`, which says what the function itself
    casts to. But what an FP32 function writes into `out`, and one in place into its tensor, is computed in
    float32, and rounded once into a half one. Tensors are looked for in lists and tuples, which is what
    torch's own functions take, and in any container if the function is a user's (`is_users`). `trace` is told
    of each cast, and `counter` counts them. `place` is the (module, qualified name) of the patched attribute,
    by which the wrapper pickles.
    """
    name = ".".join(filter(None, place))
    uncast = _keep_uncast(original, place)

    def watch(cast: TensorCast, dtype: torch.dtype) -> TensorCast:
        cast = counter.watch(cast, CASTS.get_cache(dtype)) if counter else cast
        return _traced(cast, name, trace) if trace else cast

    def get_cast(dtype: torch.dtype) -> TensorCast:
        cast = cast_eligible(dtype).any
        return watch(_without_grad(cast) if is_users else cast, dtype)

    dtype = half if kind is Cast.LOWER else torch.float32
    # What a user's own function is given is his affair, whoever overrides functions of torch for it.
    is_torchs = not is_users or type(original) in METHODS
    if kind not in (Cast.LOWER, Cast.FP32):
        wrapper = _guard(original, uncast, _CALLS[kind](original, name, get_cast), is_torchs)
        if kind in (Cast.PROMOTE, Cast.MATCH_SELF):
            wrapper = _look_first(original, wrapper)
    elif is_users:
        wrapper = _guard(original, uncast, _call_users(original, get_cast(dtype)), is_torchs)
    else:
        casts = Casts(*[watch(cast, dtype) for cast in cast_eligible(dtype)])
        wrapper = _wrap_listed(original, uncast, dtype, casts)
        if counter is None and trace is None:  # these would not see what a kernel casts itself
            wrapper = use_kernel(wrapper, original, place[1].rpartition(".")[2], casts.any)
        if place[1] == "einsum":
            wrapper = leave_elementwise(wrapper, original)
    functools.update_wrapper(wrapper, original)
    wrapper.__module__, wrapper.__qualname__ = place
    return wrapper


def call_uncast(name: str, *args: object, **kwargs: object) -> object:
    """Calls a function of torch with casts off; what a compiled graph holds for such a call."""
    with CASTS.thread.disabled():
        return operator.attrgetter(name)(torch)(*args, **kwargs)


def _keep_uncast(original: Function, place: tuple[str | None, str]) -> Function:
    """Returns what a wrapper calls where casts are off: `original`, which stays uncast in a graph.

    A graph calls functions by name, and finds the patched ones. That is right where casts are on: what the
    graph has cast is not cast again. Where they are off, the graph must say so.
    """
    package, _, name = ".".join(filter(None, place)).partition(".")
    if package != "torch":
        return original
    return functools.partial(_call_original, original, name)


def _call_original(original: Function, name: str, *args: object, **kwargs: object) -> object:
    if is_compiling():
        is_statement = name == "Tensor.__setitem__"  # as Dynamo traces it
        return original(*args, **kwargs) if is_statement else call_uncast(name, *args, **kwargs)
    if has_torch_function(args) or (kwargs and has_torch_function(kwargs.values())):
        return CASTS.hand_over(original, lambda args, kwargs: original(*args, **kwargs), args, kwargs)
    return original(*args, **kwargs)


def peel(function: Callable) -> Callable:
    """Returns a function without the wrappers that ampatch has put around it; others stay.

    >>> import ampatch as amp
    >>> peel(amp.half_function(len)) is len
    True
    """
    if isinstance(function, MethodType):
        return MethodType(peel(function.__func__), function.__self__)
    return inspect.unwrap(function, stop=lambda one: not _is_ours(one))


def _is_ours(function: Callable) -> bool:
    return getattr(function, "__globals__", {}).get("__name__", "").startswith("ampatch.")


def _traced(cast: TensorCast, name: str, trace: Callable[[str], None]) -> TensorCast:
    def traced(tensor: Tensor) -> Tensor:
        result = cast(tensor)
        if result is not tensor:
            trace(f"{tensor.dtype} -> {result.dtype} ({name})")
        return result

    return traced


def _without_grad(cast: TensorCast) -> TensorCast:
    """Detaches casts of weights where gradients are off: they have a graph, and a user may get them back."""

    def cast_without_grad(tensor: Tensor) -> Tensor:
        result = cast(tensor)
        is_shared = result is not tensor and result.requires_grad and not torch.is_grad_enabled()
        return result.detach() if is_shared else result

    return cast_without_grad


def _guard(original: Function, uncast: Function, call: Call, is_torchs: bool) -> Function:
    """Returns a wrapper that does what `call` does, but while casts are off and with `out=`."""
    thread = CASTS.thread

    def wrapper(*args, **kwargs):
        if thread.off and thread.is_off():
            return uncast(*args, **kwargs)
        if kwargs and kwargs.get("out") is not None:
            return original(*args, **kwargs)
        if not is_torchs or is_compiling():
            return call(args, kwargs)
        if has_torch_function(args) or (kwargs and has_torch_function(kwargs.values())):
            return CASTS.hand_over(original, call, args, kwargs)
        return call(args, kwargs)

    return wrapper


def _look_first(original: Function, guarded: Function) -> Function:
    """Calls a function at once where its arguments have one type: on or off, there is nothing to cast."""

    def wrapper(*args, **kwargs):
        if kwargs or not have_one_dtype(args) or (not is_compiling() and has_torch_function(args)):
            return guarded(*args, **kwargs)
        return original(*args)

    return wrapper


def _call_users(original: Function, cast: TensorCast) -> Call:
    def call(args: tuple, kwargs: dict) -> object:
        kwargs = {key: cast_tree(arg, cast) for key, arg in kwargs.items()}
        return original(*[cast_tree(arg, cast) for arg in args], **kwargs)

    return call


def _wrap_listed(original: Function, uncast: Function, dtype: torch.dtype, casts: Casts) -> Function:
    """Wraps a function of torch's that has LOWER or FP32 in the tables: nearly every call that is cast."""
    thread, sources, is_wide = CASTS.thread, ELIGIBLE - {dtype}, dtype is torch.float32
    cast, cast_tensor, cast_parameter = casts
    if is_wide:
        cast_parameter = cast  # most weights are float32: their type is looked at first

    def cast_item(tensor: Tensor) -> Tensor:
        return cast_parameter(tensor) if type(tensor) is Parameter else cast(tensor)

    def call(args: tuple, kwargs: dict) -> object:
        if kwargs.get("out") is not None:  # of a function that runs in float32
            return write_out(original, cast, *args, **kwargs)
        kwargs = {key: cast_listed(arg, cast) for key, arg in kwargs.items()}
        return original(*[cast_listed(arg, cast) for arg in args], **kwargs)

    def wrapper(*args, **kwargs):
        if thread.off and thread.is_off():
            return uncast(*args, **kwargs)
        is_out = kwargs and kwargs.get("out") is not None
        if kwargs and ((is_out and not is_wide) or (is_wide and kwargs.get("dtype") is not None)):
            return original(*args, **kwargs)
        if is_compiling():
            return call(args, kwargs)
        if has_torch_function(args) or (kwargs and has_torch_function(kwargs.values())):
            return CASTS.hand_over(original, call, args, kwargs)
        is_usual = is_grad_enabled() or thread.forwards
        if is_out or not is_usual or tracing_state() is not None or count_modes():
            return call(args, kwargs)
        if kwargs:
            kwargs = {key: cast_listed(arg, cast) for key, arg in kwargs.items()}
        cast_args = []
        for arg in args:
            kind = type(arg)
            if kind is Tensor:
                cast_args.append(cast_tensor(arg) if arg.dtype in sources else arg)
            elif kind is Parameter:
                cast_args.append(cast_parameter(arg))
            else:
                cast_args.append(arg if kind in SIMPLE else cast_listed(arg, cast_item))
        return original(*cast_args, **kwargs)

    return wrapper


def _call_promote(original: Function, name: str, get_cast: GetCast) -> Call:
    widen = get_cast(torch.float32)

    def call(args: tuple, kwargs: dict) -> object:
        if len(eligible_dtypes((args, kwargs))) < 2:
            return original(*args, **kwargs)
        # Any two of float32, float16 and bfloat16 have float32 as their widest type.
        args, kwargs = cast_tree((args, kwargs), widen)  # type: ignore[misc,assignment]
        return original(*args, **kwargs)

    return call


def _find_self(args: tuple, kwargs: dict) -> object:
    return args[0] if args else kwargs.get("input")


def _call_match_self(original: Function, name: str, get_cast: GetCast) -> Call:
    casts = {dtype: get_cast(dtype) for dtype in ELIGIBLE}

    def call(args: tuple, kwargs: dict) -> object:
        target = _find_self(args, kwargs)
        if isinstance(target, Tensor) and target.dtype in ELIGIBLE:
            args, kwargs = cast_tree((args, kwargs), casts[target.dtype])  # type: ignore[misc,assignment]
        return original(*args, **kwargs)

    return call


def _call_in_place(original: Function, name: str, get_cast: GetCast) -> Call:
    functional, widen = name.rpartition(".")[2].rstrip("_"), get_cast(torch.float32)

    def call(args: tuple, kwargs: dict) -> object:
        target = _find_self(args, kwargs)
        if not is_half(target) or kwargs.get("dtype") is not None:
            return original(*args, **kwargs)
        if not CASTS.bans_in_place:
            return write_in_place(original, widen, *args, **kwargs)
        if name.endswith("__ipow__"):
            return torch.pow(*args, **kwargs)  # an operator may return a new tensor
        raise BannedFunctionError(
            f"{name} was called on a {target.dtype} tensor: it runs in float32, and the result "  # type: ignore[attr-defined]
            f"cannot be written into a half tensor; use {functional}, which returns a new one"
        )

    return call


def _call_banned(original: Function, name: str, get_cast: GetCast) -> Call:
    widen = get_cast(torch.float32)

    def call(args: tuple, kwargs: dict) -> object:
        halves = eligible_dtypes((args, kwargs)) & set(HALF_TYPES)
        if halves and not CASTS.allow_banned:
            raise BannedFunctionError(
                f"{name} was called on a {halves.pop()} tensor, where its logarithm is not safe: use "
                f"binary_cross_entropy_with_logits on the logits, or have it cast to float32 with "
                f"amp.initialize(..., allow_banned=True)"
            )
        args, kwargs = cast_tree((args, kwargs), widen)  # type: ignore[misc,assignment]
        return original(*args, **kwargs)

    return call


def _call_custom(original: Function, name: str, get_cast: GetCast) -> Call:
    custom = CUSTOM_CASTS.get(name.rpartition(".")[2], where_refused)
    widen = get_cast(torch.float32)

    def call(args: tuple, kwargs: dict) -> object:
        return custom(original, widen, *args, **kwargs)

    return call


_CALLS = {
    Cast.PROMOTE: _call_promote,
    Cast.MATCH_SELF: _call_match_self,
    Cast.FP32_INPLACE: _call_in_place,
    Cast.BANNED: _call_banned,
    Cast.CUSTOM: _call_custom,
}


class CastCounter:
    """Counts the casts that functions use: those that were made for them, and those that were there."""

    def __init__(self) -> None:
        self.made = 0
        self.reused = 0

    def watch(self, cast: TensorCast, cache: CastCache) -> TensorCast:
        """Returns a cast that is counted, except under Dynamo, where a count would be a constant.

        A closure, as the casts are: it runs at every one of them. `cache` is that of the weights.
        """

        def counted(tensor: Tensor) -> Tensor:
            if torch.compiler.is_dynamo_compiling():
                return cast(tensor)
            made_before = cache.made
            result = cast(tensor)
            if result is tensor:
                return result
            if isinstance(tensor, Parameter) and cache.made == made_before:
                self.reused += 1
            else:
                self.made += 1
            return result

        return counted
