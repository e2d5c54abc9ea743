"""The yardstick: `torch.autocast` around the forwards of a script that runs in float32 to us."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module

import ampatch as amp
from ampatch.sweeps.measure.forwards import register_first


class Autocast(amp.Observer):
    """Casts as a script would if it had been rewritten for torch.amp.

    `torch.autocast` is on from the first forward of an initialized model until the block of `scale_loss`
    begins, so that the loss function is in it, and the backward is not; without gradients it is on during a
    forward alone. The loss scale is the session's. Within code that was compiled with `fullgraph=True` it
    cannot be turned on, and Dynamo says so.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._block: torch.autocast | None = None
        self._has_graph = False  # a forward with gradients was in the block
        self._depth = 0
        self._hooks = ExitStack()

    def on_objects(self, models: tuple[Module, ...], optimizers: tuple[object, ...]) -> None:
        """Watches the forwards of the models."""
        for model in models:
            if isinstance(model, torch.jit.ScriptModule):
                raise amp.AmpValueError(
                    "torch.autocast cannot be put around a scripted model, which takes no hooks"
                )
            before, after = AutocastHook(self._begin_forward), AutocastHook(self._end_forward)
            self._hooks.callback(register_first(model, before).remove)
            self._hooks.callback(model.register_forward_hook(after, always_call=True).remove)

    def _begin_forward(self, model: Module) -> None:
        self._depth += 1
        if self._block is None:
            device = next((param.device.type for param in model.parameters()), "cpu")
            self._block = torch.autocast(device, dtype=self._dtype)
            self._block.__enter__()
        self._has_graph |= torch.is_grad_enabled()

    def _end_forward(self, model: Module) -> None:
        self._depth = max(self._depth - 1, 0)
        if torch.is_grad_enabled() or self._depth:
            return
        if self._has_graph:
            torch.clear_autocast_cache()  # a cast that is cached without gradients would give none
        else:
            self._exit()

    def on_loss(self, loss: Tensor, loss_id: int) -> None:
        """Ends autocasting before the backward."""
        self._exit()

    def on_step_begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Ends autocasting before the weights change."""
        self._exit()

    def on_uninitialize(self) -> None:
        """Takes everything back."""
        self.close()

    def close(self) -> None:
        """Ends autocasting, and takes the hooks off the models."""
        self._exit()
        self._hooks.close()

    def _exit(self) -> None:
        block, self._block, self._has_graph = self._block, None, False
        if block is not None:
            block.__exit__(None, None, None)


@dataclass(frozen=True, slots=True, eq=False)
class AutocastHook:
    """Tells of a forward; not traced by Dynamo, which could not turn autocast on for what follows.

    A copy of a model has a hook that tells nobody.
    """

    tell: Callable[[Module], None] | None

    @torch.compiler.disable
    def __call__(self, module: Module, *values: object) -> None:
        if self.tell is not None:
            self.tell(module)

    def __reduce__(self) -> tuple:
        return AutocastHook, (None,)
