"""The wrappers that stand in for patched functions: the hot path, one per kind of cast."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ampatch.cast import CastState, TensorCast, cast_eligible, cast_tree
from ampatch.custom import CUSTOM_CASTS, where_refused
from ampatch.errors import BannedFunctionError
from ampatch.in_graph import keep_uncast
from ampatch.precision import ELIGIBLE, HALF_TYPES
from ampatch.table import Cast

Function = Callable[..., object]
GetCast = Callable[[torch.dtype], TensorCast]


def wrap(
    original: Function,
    kind: Cast,
    state: CastState,
    half: torch.dtype,
    *,
    place: tuple[str | None, str],
    trace: Callable[[str], None] | None = None,
    containers: type | tuple[type, ...] = (list, tuple),
) -> Function:
    """Returns `original` with its floating arguments cast as `kind` says.

    A plain function, not a wrapt wrapper: that one compares equal to what it wraps, so that Dynamo
    takes it for the original and drops its casts. Calls with `out=` go through uncast, because a
    cast result would be written where nobody looks, and so do those of an FP32 function with `dtype=`,
    which says what the function itself casts to. Positional arguments are searched for tensors
    if they are of a type in `containers`: torch's own functions take lists and tuples. `place` is the
    (module, qualified name) of the patched attribute, by which the wrapper pickles.
    """
    name = ".".join(filter(None, place))
    uncast = keep_uncast(original, place)

    def get_cast(dtype: torch.dtype) -> TensorCast:
        cast = cast_eligible(state, dtype)
        return _traced(cast, name, trace) if trace else cast

    if kind in (Cast.LOWER, Cast.FP32):
        cast = get_cast(half if kind is Cast.LOWER else torch.float32)
        # What `dtype` means to a user's function is the user's.
        has_dtype = kind is Cast.FP32 and containers is not object
        wrapper = _wrap_cast(original, uncast, state, cast, containers, has_dtype)
    else:
        wrapper = _FACTORIES[kind](original, uncast, state, name, get_cast)
    functools.update_wrapper(wrapper, original)
    wrapper.__module__, wrapper.__qualname__ = place
    return wrapper


def _traced(cast: TensorCast, name: str, trace: Callable[[str], None]) -> TensorCast:
    def traced(tensor: Tensor) -> Tensor:
        result = cast(tensor)
        if result is not tensor:
            trace(f"{tensor.dtype} -> {result.dtype} ({name})")
        return result

    return traced


def _wrap_cast(
    original: Function,
    uncast: Function,
    state: CastState,
    cast: TensorCast,
    containers: type | tuple[type, ...],
    has_dtype: bool,
) -> Function:
    thread = state.thread

    def wrapper(*args, **kwargs):
        if thread.off and thread.is_off():
            return uncast(*args, **kwargs)
        if kwargs:
            if kwargs.get("out") is not None or (has_dtype and kwargs.get("dtype") is not None):
                return original(*args, **kwargs)
            kwargs = {
                key: cast(arg) if isinstance(arg, Tensor) else cast_tree(arg, cast)
                for key, arg in kwargs.items()
            }
        return original(
            *[
                cast(arg)
                if isinstance(arg, Tensor)
                else cast_tree(arg, cast)
                if isinstance(arg, containers)
                else arg
                for arg in args
            ],
            **kwargs,
        )

    return wrapper


def _eligible_tensors(state: CastState, values: object) -> list[Tensor]:
    """The tensors in a tree that a cast may touch."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.dtype in ELIGIBLE and tensor.device.type in state.device_types:
            found.append(tensor)
        return tensor

    cast_tree(values, note)
    return found


def _wrap_promote(
    original: Function, uncast: Function, state: CastState, name: str, get_cast: GetCast
) -> Function:
    thread = state.thread
    widen = get_cast(torch.float32)

    def wrapper(*args, **kwargs):
        if thread.off and thread.is_off():
            return uncast(*args, **kwargs)
        if kwargs.get("out") is not None:
            return original(*args, **kwargs)
        dtypes = {tensor.dtype for tensor in _eligible_tensors(state, (args, kwargs))}
        if len(dtypes) < 2:
            return original(*args, **kwargs)
        # Any two of float32, float16 and bfloat16 have float32 as their widest type.
        args, kwargs = cast_tree((args, kwargs), widen)  # type: ignore[misc]
        return original(*args, **kwargs)

    return wrapper


def _wrap_match_self(
    original: Function, uncast: Function, state: CastState, name: str, get_cast: GetCast
) -> Function:
    thread = state.thread
    casts = {dtype: get_cast(dtype) for dtype in ELIGIBLE}

    def wrapper(*args, **kwargs):
        target = args[0] if args else kwargs.get("input")
        if thread.off and thread.is_off():
            return uncast(*args, **kwargs)
        if isinstance(target, Tensor) and target.dtype in ELIGIBLE:
            args, kwargs = cast_tree((args, kwargs), casts[target.dtype])  # type: ignore[misc]
        return original(*args, **kwargs)

    return wrapper


def _wrap_in_place(
    original: Function, uncast: Function, state: CastState, name: str, get_cast: GetCast
) -> Function:
    thread = state.thread
    functional = name.rpartition(".")[2].rstrip("_")

    def wrapper(*args, **kwargs):
        target = args[0] if args else kwargs.get("input")
        if thread.off and thread.is_off():
            return uncast(*args, **kwargs)
        if not isinstance(target, Tensor) or target.dtype not in HALF_TYPES:
            return original(*args, **kwargs)
        if target.device.type in state.device_types:
            raise BannedFunctionError(
                f"{name} was called on a {target.dtype} tensor: it runs in float32, and the result "
                f"cannot be written into a half tensor; use {functional}, which returns a new one"
            )
        return original(*args, **kwargs)

    return wrapper


def _wrap_banned(
    original: Function, uncast: Function, state: CastState, name: str, get_cast: GetCast
) -> Function:
    thread = state.thread
    widen = get_cast(torch.float32)
    in_float32 = _wrap_cast(original, uncast, state, widen, (list, tuple), has_dtype=False)

    def wrapper(*args, **kwargs):
        if thread.off and thread.is_off():
            return uncast(*args, **kwargs)
        dtypes = {tensor.dtype for tensor in _eligible_tensors(state, (args, kwargs))}
        halves = dtypes & set(HALF_TYPES)
        if halves and not state.allow_banned:
            raise BannedFunctionError(
                f"{name} was called on a {halves.pop()} tensor, where its logarithm is not safe: use "
                f"binary_cross_entropy_with_logits on the logits, or have it cast to float32 with "
                f"amp.initialize(..., allow_banned=True)"
            )
        return in_float32(*args, **kwargs)

    return wrapper


def _wrap_custom(
    original: Function, uncast: Function, state: CastState, name: str, get_cast: GetCast
) -> Function:
    thread = state.thread
    custom = CUSTOM_CASTS.get(name.rpartition(".")[2], where_refused)
    widen = get_cast(torch.float32)

    def wrapper(*args, **kwargs):
        if thread.off and thread.is_off():
            return uncast(*args, **kwargs)
        if kwargs.get("out") is not None:
            return original(*args, **kwargs)
        return custom(original, widen, *args, **kwargs)

    return wrapper


_FACTORIES = {
    Cast.PROMOTE: _wrap_promote,
    Cast.MATCH_SELF: _wrap_match_self,
    Cast.FP32_INPLACE: _wrap_in_place,
    Cast.BANNED: _wrap_banned,
    Cast.CUSTOM: _wrap_custom,
}
