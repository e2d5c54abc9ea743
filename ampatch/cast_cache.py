"""The casts of weights, each made once an iteration and never stale."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ampatch.thread import ThreadState

# Bound before anything is patched, and quicker than Tensor.to (1.5 against 2.4 µs).
CONVERT: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
    torch.float32: Tensor.float,
}

_tracing_state, _dispatch_mode = torch._C._get_tracing_state, torch._C._get_dispatch_mode
_PROXY = torch._C._TorchDispatchModeKey.PROXY


class CastCache:
    """The casts of parameters to one dtype, each made once an iteration.

    An entry is used only while the parameter is the same object with the same memory, version and
    requires_grad. A write through an earlier `.data` changes none of these, so entries live no longer
    than an iteration: `clear` is called when a block of `scale_loss` ends, after every optimizer's step, and
    when an initialized model's forward begins after an earlier one's graph was used or dropped.
    Without grad mode entries live for one forward of an initialized model.

    With grad, without and in inference mode are three caches: a cast made in one cannot serve another.
    """

    def __init__(self, dtype: torch.dtype, thread: ThreadState) -> None:
        self.dtype = dtype
        self._convert = CONVERT[dtype]
        self._thread = thread
        self._with_grad: dict[int, tuple] = {}
        self._no_grad: dict[int, tuple] = {}
        self._inference: dict[int, tuple] = {}

    def __len__(self) -> int:
        return len(self._with_grad) + len(self._no_grad) + len(self._inference)

    def clear(self) -> None:
        """Forgets every cast."""
        self._with_grad.clear()
        self.clear_no_grad()

    def forget(self, parameter: Tensor) -> None:
        """Forgets the casts of one parameter."""
        for entries in (self._with_grad, self._no_grad, self._inference):
            entries.pop(id(parameter), None)

    def clear_no_grad(self) -> None:
        """Forgets the casts that were made without grad mode."""
        self._no_grad.clear()
        self._inference.clear()

    def cast(self, parameter: Tensor) -> Tensor:
        """Returns the parameter in the cache's dtype, cast now or earlier in this iteration."""
        if torch.compiler.is_dynamo_compiling() or parameter.is_inference():
            return self._convert(parameter)
        # Where operations are recorded (torch.jit.trace, make_fx), an earlier cast would be a constant.
        if _tracing_state() is not None or _dispatch_mode(_PROXY) is not None:
            return self._convert(parameter)
        entries, needs_grad = self._select(parameter)
        if entries is None:
            return self._convert(parameter)
        entry = entries.get(id(parameter))
        if entry is not None:
            owner, version, pointer, cast = entry
            if (
                owner is parameter
                and version == parameter._version
                and pointer == parameter.data_ptr()
                and cast.requires_grad == needs_grad
            ):
                return cast
        return self._store(entries, parameter)

    def _select(self, parameter: Tensor) -> tuple[dict[int, tuple] | None, bool]:
        if torch.is_grad_enabled():
            return self._with_grad, parameter.requires_grad
        if not self._thread.forwards:
            return None, False
        return (self._inference if torch.is_inference_mode_enabled() else self._no_grad), False

    def _store(self, entries: dict[int, tuple], parameter: Tensor) -> Tensor:
        cast = self._convert(parameter)
        # Fake tensors and those of a running torch.func transform are dead once it ends.
        if type(cast) is Tensor and not torch._C._are_functorch_transforms_active():
            entry = (parameter, parameter._version, parameter.data_ptr(), cast)
            entries[id(parameter)] = entry
        return cast
