"""Has layers that look at dtypes, layers in transforms, and blocks of `autocast(enabled=False)` work."""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from ampatch.casts.cast import CASTS
from ampatch.casts.cast_tree import cast_to, cast_tree
from ampatch.levels.precision import ELIGIBLE, HALF_TYPES
from ampatch.levels.private import ENTER_AUTOCAST, forward_ad_level, is_transformed
from ampatch.levels.stack import is_running
from ampatch.patching.patcher import Patcher


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
