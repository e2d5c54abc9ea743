"""Functions that no single cast fits: what runs in their place, by name. Their rows say what and why."""

from __future__ import annotations

import functools
import sys
from types import FrameType

import torch
from torch import Tensor
from torch.nn import Parameter

from ampatch.casts.cast import CASTS, Function, is_recorded
from ampatch.casts.cast_tree import TensorCast, cast_tree
from ampatch.levels.precision import ELIGIBLE, HALF_TYPES

_PACKAGES = ("torch", "ampatch")
_WRAPPERS = ("ampatch.casts.wrapper", "ampatch.patching.torch_features")
_TO_NUMPY = "torch.utils.tensorboard"  # which hands what it is given to numpy


def write_in_place(
    original: Function, widen: TensorCast, input: Tensor, *args: object, **kwargs: object
) -> object:
    """Computes in float32, and rounds the result once into the half tensor that it is for."""
    # Of a view, because the cast of a parameter is kept.
    wide = widen(input.view_as(input) if isinstance(input, Parameter) else input)
    return NotImplemented if original(wide, *args, **kwargs) is NotImplemented else input.copy_(wide)


def write_out(original: Function, widen: TensorCast, *args: object, out: Tensor, **kwargs: object) -> object:
    """Computes in float32, and rounds the result once into a half `out`."""
    args, kwargs = cast_tree((args, kwargs), widen)  # type: ignore[misc,assignment]
    if not is_half(out):
        return original(*args, out=out, **kwargs)
    wide = torch.empty_like(out, dtype=torch.float32, requires_grad=out.requires_grad)  # torch refuses that
    original(*args, out=wide, **kwargs)
    return (out if out.shape == wide.shape else out.resize_(wide.shape)).copy_(wide)


def where_refused(original: Function, widen: TensorCast, *args: object, **kwargs: object) -> object:
    """Runs as it is given, and in float32 where torch refuses that: it has no half kernel.

    What is compiled or recorded cannot be tried, and runs in float32: the call that fails would stay there.
    """
    arguments = args, kwargs

    def cast(tensor: Tensor) -> Tensor:
        is_half = tensor.dtype is torch.complex32 and tensor.device.type in CASTS.device_types
        return tensor.to(torch.complex64) if is_half else widen(tensor)

    if torch.compiler.is_compiling() or is_recorded():
        args, kwargs = cast_tree(arguments, cast)  # type: ignore[misc]
        return original(*args, **kwargs)
    try:
        return original(*args, **kwargs)
    except RuntimeError as error:  # NotImplementedError is one, too
        wide = cast_tree(arguments, cast)
        if wide is arguments or isinstance(error, (torch.OutOfMemoryError, torch.linalg.LinAlgError)):
            raise
    args, kwargs = wide  # type: ignore[misc]
    return original(*args, **kwargs)


def on_cpu(original: Function, widen: TensorCast, *args: object, **kwargs: object) -> object:
    """Runs in float32 on a CPU, which has no half kernel; elsewhere as it is given."""

    def cast(tensor: Tensor) -> Tensor:
        return widen(tensor) if tensor.device.type == "cpu" else tensor

    args, kwargs = cast_tree((args, kwargs), cast)  # type: ignore[misc]
    return original(*args, **kwargs)


def complex_on_cpu(original: Function, widen: TensorCast, *args: object, **kwargs: object) -> object:
    """Runs in float32 on a CPU, and elsewhere where torch refuses the type."""
    return where_refused(functools.partial(on_cpu, original, widen), widen, *args, **kwargs)


def rrelu(original: Function, widen: TensorCast, input: Tensor, *args: object, **kwargs: object) -> object:
    """Runs in float32 where a CPU refuses half; in place, too."""
    result = where_refused(original, widen, input, *args, **kwargs)
    is_in_place = kwargs.get("inplace", args[3] if len(args) > 3 else False)
    return input.copy_(result) if is_in_place and result is not input else result


def matrix_power(original: Function, widen: TensorCast, *args: object, **kwargs: object) -> object:
    """Multiplies in half, by the row of matmul; inverts in the type of the input, before it multiplies."""
    n = args[1] if len(args) > 1 else kwargs.get("n")
    input = args[0] if args else kwargs.get("input", kwargs.get("A"))
    has_more = len(args) + len(kwargs) > 2
    if has_more or not isinstance(n, int) or n in (0, 1) or not _is_cast(input):
        return original(*args, **kwargs)
    power = torch.linalg.inv(input) if n < 0 else input
    if abs(n) == 3:  # which torch multiplies in this order
        return torch.matmul(torch.matmul(power, power), power)
    bits, result = bin(abs(n))[:1:-1], None
    for place, bit in enumerate(bits):
        power = torch.matmul(power, power) if place else power
        if bit == "1":
            result = power if result is None else torch.matmul(result, power)
    return result


def is_half(value: object) -> bool:
    return _is_cast(value) and value.dtype in HALF_TYPES  # type: ignore[attr-defined]


def _is_cast(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in ELIGIBLE and value.device.type in CASTS.device_types


def sum_to_size(
    original: Function, widen: TensorCast, input: Tensor, *args: object, **kwargs: object
) -> object:
    """Runs in float32, unless self has that size: then it comes back as it is."""
    size = args or tuple(kwargs.values())
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    is_same = bool(shape) and tuple(shape) == input.shape  # type: ignore[arg-type]
    return original(input if is_same else widen(input), *args, **kwargs)


def local_response_norm(
    original: Function, widen: TensorCast, input: Tensor, *args: object, **kwargs: object
) -> object:
    """Runs in float32 if there is anything to normalize."""
    is_empty = isinstance(input, Tensor) and not input.numel()  # torch.fx gives what stands for a tensor
    return original(input if is_empty else widen(input), *args, **kwargs)


def cpu(original: Function, widen: TensorCast, input: Tensor, *args: object, **kwargs: object) -> object:
    """Copies half tensors in float32; torch's own calls get what they gave.

    Torch moves tensors to bring them back, as `save_on_cpu` does, or to store them. Dynamo compiles only
    a program's own calls.
    """
    if is_half(input) and (torch.compiler.is_dynamo_compiling() or not _is_internal(_find_caller())):
        # Never the cached cast of a parameter: who asked for a copy may write into it.
        input = widen(input.view_as(input) if isinstance(input, Parameter) else input)
    return original(input, *args, **kwargs)


def _find_caller() -> FrameType | None:
    """What called the wrapper that runs `cpu`, itself or by what hands an overridden function over."""
    frame: FrameType | None = sys._getframe(2)
    while frame and frame.f_globals.get("__name__") in _WRAPPERS:
        frame = frame.f_back
    return frame


def _is_internal(caller: FrameType | None) -> bool:
    """Whether a call is one of torch's own code, or of ours; C++ threads have calls without a caller."""
    module = caller.f_globals.get("__name__", "") if caller else ""
    return module.partition(".")[0] in _PACKAGES and not module.startswith(_TO_NUMPY)


def without_casts(original: Function, widen: TensorCast, *args: object, **kwargs: object) -> object:
    """Runs as it is written: it keeps its own account of types."""
    with CASTS.thread.disabled():
        return original(*args, **kwargs)


def leave_elementwise(wrapper: Function, original: Function) -> Function:
    """Casts an einsum that sums products, and no other: half would gain nothing there.

    It would lose positions: in an outer product with frequencies 1857 * 0.56 is off by 0.27 in float16.
    """

    def einsum(*args, **kwargs):
        return (original if _sums_nothing(args) else wrapper)(*args, **kwargs)

    return einsum


def _sums_nothing(args: tuple) -> bool:
    """Whether an einsum by its equation sums over no index that two operands share."""
    if not args or not isinstance(args[0], str):
        return False
    inputs, arrow, output = args[0].replace("...", ".").partition("->")
    indices: set[str] = set()
    shared: set[str] = set()
    for term in map(set, inputs.split(",")):
        shared |= indices & term
        indices |= term
    return shared <= {" ", *(output if arrow else ".")}  # without an arrow only an ellipsis is kept


# The code of a row is found by the name of its function; every other one is `where_refused`.
CUSTOM_CASTS: dict[str, Function] = {
    **dict.fromkeys(("avg_pool3d", "i1", "i1e", "matrix_exp"), on_cpu),
    "rrelu": rrelu,
    "matrix_power": matrix_power,
    "complex": complex_on_cpu,
    "sum_to_size": sum_to_size,
    "local_response_norm": local_response_norm,
    "cpu": cpu,
    "_linear_cross_entropy_batch_chunked_accumulator": without_casts,
}
