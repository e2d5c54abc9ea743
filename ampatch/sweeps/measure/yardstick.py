"""The yardstick: `torch.autocast` wherever the model computes, in a script that runs in float32 to us."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module

import ampatch as amp
from ampatch.tools.tensors import tensors_in

HALF = (torch.float16, torch.bfloat16)
LOOKS = 20  # forwards whose operations are looked at


class Autocast(amp.Observer):
    """Casts as a script would if it had been rewritten for torch.amp.

    `torch.autocast` is on from the first forward of an initialized model, or of any module in it, until the
    block of `scale_loss` begins, so that the loss function is in it, and the backward is not; without
    gradients it is on during a forward alone. The loss scale is the session's. Within code that was compiled
    with `fullgraph=True` it cannot be turned on, and Dynamo says so. `has_cast` says whether an operation in
    the first forwards gave a half tensor; None before there was one.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.has_cast: bool | None = None
        self._dtype = dtype
        self._block: torch.autocast | None = None
        self._entry: Module | None = None  # the outermost module whose forward is on
        self._ends: dict[Module, object] = {}  # hooks at the end of modules that have been that
        self._has_graph = False  # a forward with gradients was in the block
        self._looks = LOOKS
        self._hooks = ExitStack()

    def on_objects(self, models: tuple[Module, ...], optimizers: tuple[object, ...]) -> None:
        """Watches the forwards of the models, and of the modules in them, which a script may call alone."""
        for model in models:
            if isinstance(model, torch.jit.ScriptModule):
                raise amp.AmpValueError(
                    "torch.autocast cannot be put around a scripted model, which takes no hooks"
                )
            for module in model.modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    hook = ModelHook(self._begin) if module is model else PartHook(self._begin)
                    self._hooks.callback(register_first(module, hook))

    def _begin(self, module: Module, *values: object) -> None:
        if self._entry is not None and self._entry is not module:
            return
        self._entry = module
        if module not in self._ends:
            # Without gradients a forward is on alone; only an outermost one has to say when it ends.
            end = module.register_forward_hook(ModelHook(self._end), always_call=True)
            self._ends[module] = end
            self._hooks.callback(end.remove)
        if self._block is None:
            device = next((param.device.type for param in module.parameters()), "cpu")
            self._block = torch.autocast(device, dtype=self._dtype)
            self._block.__enter__()
        self._has_graph |= torch.is_grad_enabled()

    def _end(self, module: Module, args: tuple, output: object) -> None:
        if self._entry is not module:
            return
        self._entry = None
        if torch.is_grad_enabled():
            if self._looks and not self.has_cast:
                self._looks -= 1
                self.has_cast = any(map(has_half, tensors_in(output)))
            return
        if self._has_graph:
            torch.clear_autocast_cache()  # a cast that is cached without gradients would give none
        else:
            self._exit()

    def on_loss(self, loss: Tensor, loss_id: int) -> None:
        self._exit()

    def on_step_begin(self, optimizer: torch.optim.Optimizer) -> None:
        self._exit()

    def on_uninitialize(self) -> None:
        self.close()

    def close(self) -> None:
        """Ends autocasting, and takes the hooks off the models."""
        self._exit()
        self._hooks.close()
        self._ends.clear()

    def _exit(self) -> None:
        block, self._block, self._has_graph, self._entry = self._block, None, False, None
        if block is not None:
            block.__exit__(None, None, None)


@dataclass(frozen=True, slots=True, eq=False)
class ModelHook:
    """Tells of a forward; not traced by Dynamo, which could not turn autocast on for what follows.

    A copy of a model has a hook that tells nobody.
    """

    callback: Callable[..., None] | None

    @torch.compiler.disable
    def __call__(self, module: Module, *values: object) -> None:
        if self.callback is not None:
            self.callback(module, *values)

    def __reduce__(self) -> tuple:
        return type(self), (None,)


@dataclass(frozen=True, slots=True, eq=False)
class PartHook(ModelHook):
    """Tells of the forward of a part of a model; within compiled code, where autocast is on, of nothing."""

    def __call__(self, module: Module, *values: object) -> None:
        if not torch.compiler.is_compiling() and self.callback is not None:
            self.callback(module, *values)


def register_first(module: Module, hook: ModelHook) -> Callable[[], None]:
    """Registers a forward pre-hook before all others; returns what removes it.

    Not by `prepend`: Dynamo looks hooks up by their place, and before torch 2.9 does not see that they moved.
    """
    handle = module.register_forward_pre_hook(hook)
    hooks = module._forward_pre_hooks
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)
    return handle.remove


def has_half(output: Tensor) -> bool:
    """Says whether an operation that led to a tensor gave a half one, or may have: it was compiled."""
    pending, visited = [output.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        kinds = [getattr(metadata, "dtype", None) for metadata in getattr(node, "_input_metadata", ())]
        if any(kind in HALF for kind in kinds) or "Compiled" in node.name():
            return True
        pending += [following for following, _ in node.next_functions]
    return False
