"""What kernels of CUDA take better than casts one by one: float16 by softmax, and weights of LSTMs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ampatch.casts.cast import CASTS
from ampatch.casts.cast_tree import TensorCast
from ampatch.casts.kept_cast import NEIGHBOURS
from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.private import FLATTEN, count_modes, has_function_modes, is_transformed, tracing_state

is_compiling = torch.compiler.is_dynamo_compiling

SOFTMAX = ("softmax", "log_softmax")
# By function: the gates whose weights are the rows of one matrix, and cuDNN's number of the mode.
MODES = {"rnn_relu": (1, 0), "rnn_tanh": (1, 1), "lstm": (4, 2), "gru": (3, 3)}


def use_kernel(wrapper: Callable, original: Callable, name: str, cast: TensorCast) -> Callable:
    """Returns what stands in for a function of torch: `wrapper`, or what calls it where that is best."""
    if not torch.backends.cuda.is_built():
        return wrapper
    code = getattr(original, "__code__", None)
    is_torchs = code is None or code.co_filename == F.__file__  # and nobody has put his own there
    if name in SOFTMAX and is_torchs:
        return _read_half(wrapper, original)
    if name == "cross_entropy" and is_torchs:
        return _read_half_logits(wrapper)
    return _cast_into_one_block(wrapper, name, cast) if name in MODES else wrapper


def _is_plain() -> bool:
    """Whether casts are on, and a call runs as it stands: not traced, transformed or watched."""
    thread = CASTS.thread
    is_seen = count_modes() or has_function_modes() or is_transformed() or tracing_state() is not None
    return not (is_seen or (thread.off and thread.is_off()))


# ---- Softmax: the kernel reads float16 and writes float32, so that no float32 copy is made of its input ----


def _is_read(tensor: object) -> bool:
    is_float16 = type(tensor) is Tensor and tensor.is_cuda and tensor.dtype is torch.float16
    return is_float16 and CASTS.is_on_device(tensor)  # type: ignore[arg-type]


def _read_half(wrapper: Callable, original: Callable) -> Callable:
    """Returns what stands in for a softmax: it has `original` itself compute one of float16 in float32."""

    def softmax(*args, **kwargs):
        is_usual = not is_compiling() and 0 < len(args) < 3 and not kwargs.keys() - {"dim"}
        if is_usual and _is_read(args[0]) and _is_plain():
            return original(*args, **kwargs, dtype=torch.float32)
        return wrapper(*args, **kwargs)

    return softmax


def _read_half_logits(wrapper: Callable) -> Callable:
    """Returns what stands in for `cross_entropy`: of float16 logits it takes the log_softmax in float32."""

    def cross_entropy(*args, **kwargs):
        is_usual = not is_compiling() and 1 < len(args) < 8 and not kwargs.get("label_smoothing")
        if is_usual and _has_classes(args[1]) and _is_read(args[0]) and _is_plain():
            return _cross_entropy(*args, **kwargs)
        return wrapper(*args, **kwargs)

    return cross_entropy


def _has_classes(target: object) -> bool:
    return isinstance(target, Tensor) and not target.is_floating_point()


def _cross_entropy(
    logits: Tensor, target: Tensor, *args: object, label_smoothing: float = 0.0, **kwargs: object
) -> Tensor:
    scores = F.log_softmax(logits, dim=min(logits.dim() - 1, 1), dtype=torch.float32)
    return F.nll_loss(scores, target, *args, **kwargs)  # type: ignore[arg-type]


# ---- Recurrent networks: cuDNN copies weights into one block of memory in each call, unless they are ----


def flatten_parameters(module: torch.nn.RNNBase) -> None:
    """Does what the module's method of this name does, for bfloat16 too, which that one leaves apart."""
    module.flatten_parameters()
    weights = module._flat_weights
    if len(weights) == len(module._flat_weights_names) and _are_apart(weights):
        _put_in_one_block(module.mode.lower(), weights, module.num_layers, module.bidirectional)


def _cast_into_one_block(wrapper: Callable, name: str, cast: TensorCast) -> Callable:
    """Returns what stands in for a recurrent function of torch: it gives `wrapper` weights that are cast."""

    def recurrent(*args, **kwargs):
        if not is_compiling() and len(args) == 9 and not kwargs and _is_plain():
            is_packed = isinstance(args[1], Tensor) and not args[1].is_floating_point()  # sizes of batches
            before, weight_args, rest = args[: 2 + is_packed], args[2 + is_packed], args[3 + is_packed :]
            weights = [cast(weight) for weight in weight_args]
            if _are_apart(weights) and not any(map(operator.is_, weights, weight_args)):
                _put_in_one_block(name, weights, rest[1], rest[4])
                for weight in weights:
                    setattr(weight, NEIGHBOURS, len(weights) - 1)
            args = (*before, weights, *rest)
        return wrapper(*args, **kwargs)

    return recurrent


def _are_apart(weights: Sequence[Tensor | None]) -> bool:
    """Whether these are half weights, each by itself, that cuDNN would take in one block."""
    first = weights[0]
    if not (isinstance(first, Tensor) and first.is_cuda and first.dtype in HALF_TYPES):
        return False
    if not all(
        isinstance(weight, Tensor) and weight.dtype is first.dtype and weight.is_cuda for weight in weights
    ):
        return False
    if len({weight.untyped_storage()._cdata for weight in weights}) == 1:  # type: ignore[union-attr]
        return False
    if len({weight.data_ptr() for weight in weights}) < len(weights):  # type: ignore[union-attr]
        return False  # tied
    return torch.backends.cudnn.enabled and torch.version.hip is None and not FLATTEN.is_missing()


def _put_in_one_block(name: str, weights: Sequence[Tensor], layers: int, is_bidirectional: bool) -> None:
    """Moves weights, in the order of `torch.nn.RNNBase`; their values, versions and graphs stay."""
    gates, mode = MODES[name]
    count = len(weights) // (layers * (1 + is_bidirectional))  # of a layer; odd with a projection
    projected = weights[1].shape[1] if count % 2 else 0
    rows, columns = weights[0].shape
    with torch.no_grad(), torch.cuda.device_of(weights[0]):
        FLATTEN.find()(
            weights, count, columns, mode, rows // gates, projected, layers, False, is_bidirectional
        )
