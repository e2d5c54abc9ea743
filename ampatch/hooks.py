"""The hooks that ampatch puts on modules: small objects that pickle, copy and print."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from ampatch.cast import CastState, PendingGraph, cast_batch
from ampatch.precision import HALF_TYPES
from ampatch.thread import Frame
from ampatch.values import Float32Values


@dataclass(frozen=True, slots=True)
class CastInputs:
    """Casts a module's floating inputs, in any container; a forward pre-hook with kwargs."""

    dtype: torch.dtype

    def __call__(self, module: Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        args = tuple([cast_batch(arg, self.dtype) for arg in args])
        return args, {name: cast_batch(arg, self.dtype) for name, arg in kwargs.items()}


class _Shared:
    """A hook that works for its session: a deep copy shares it, a pickled one is inert."""

    def __deepcopy__(self, memo: dict) -> _Shared:
        return self


class EnterForward(_Shared):
    """Tells the session that a module's forward begins; a forward pre-hook.

    `off` says that nothing is cast inside, `dtype` what the module's weights have there.
    """

    def __init__(self, state: CastState | None, *, off: bool, dtype: torch.dtype | None) -> None:
        self.state, self.off, self.dtype = state, off, dtype

    def __call__(self, module: Module, args: tuple) -> None:
        if self.state is None or torch.compiler.is_dynamo_compiling():
            return
        self.state.enter_forward(Frame(id(module), self.off, self.dtype))
        if not self.off and self.state.half is not None:
            parameter = next(module.parameters(), None)
            if parameter is not None:
                self.state.device_types.add(parameter.device.type)

    def __reduce__(self) -> tuple:
        return _inert_enter, (self.off, self.dtype)


def _inert_enter(off: bool, dtype: torch.dtype | None) -> EnterForward:
    return EnterForward(None, off=off, dtype=dtype)


class ExitForward(_Shared):
    """Tells the session that a module's forward ended; a forward hook that always runs."""

    def __init__(self, state: CastState | None = None) -> None:
        self.state = state

    def __call__(self, module: Module, args: tuple, output: object) -> None:
        state = self.state
        if state is None or torch.compiler.is_dynamo_compiling():
            return
        state.exit_forward(id(module))
        if state.half is not None and not state.thread.frames:
            _watch_graph(output, state)

    def __reduce__(self) -> tuple:
        return ExitForward, ()


def _watch_graph(output: object, state: CastState) -> None:
    """Has the session notice whether the graph of an output still waits for its backward."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    if nodes:
        graph = PendingGraph()
        state.watch(graph)
        for node in nodes:
            node.register_prehook(graph)


class CastOutputs(_Shared):
    """Casts a module's floating outputs, in any container; a forward hook.

    Inside the forward of another module that ampatch knows, to what that one computes in; else to
    `alone` (None leaves them). A compiled model does not look around, and casts to `compiled`.
    """

    def __init__(
        self, state: CastState | None, *, alone: torch.dtype | None, compiled: torch.dtype | None
    ) -> None:
        self.state, self.alone, self.compiled = state, alone, compiled

    def __call__(self, module: Module, args: tuple, output: object) -> object:
        dtype = self._choose()
        return output if dtype is None else cast_batch(output, dtype)

    def _choose(self) -> torch.dtype | None:
        if torch.compiler.is_dynamo_compiling():
            return self.compiled
        frames = () if self.state is None else self.state.thread.frames
        return (frames[-1].dtype if frames else None) or self.alone

    def __reduce__(self) -> tuple:
        return _inert_outputs, (self.alone, self.compiled)


def _inert_outputs(alone: torch.dtype | None, compiled: torch.dtype | None) -> CastOutputs:
    return CastOutputs(None, alone=alone, compiled=compiled)


class SaveFloat32(_Shared):
    """Puts a module's own float32 values into its state_dict; a state_dict post-hook.

    Registered on every module with cast tensors, so that a part, or a wrapper such as
    DistributedDataParallel, saves float32 too. A deep copy of the model saves its own weights.
    """

    def __init__(self, values: Float32Values | None = None) -> None:
        self.values = values or Float32Values()

    def __call__(self, module: Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
        for name, tensor in own_tensors(module):
            saved = state_dict.get(prefix + name)
            if tensor.dtype in HALF_TYPES and isinstance(saved, Tensor):
                state_dict[prefix + name] = self.values.export(tensor, saved)

    def __reduce__(self) -> tuple:
        return SaveFloat32, ()


class LoadFloat32(_Shared):
    """Feeds loaded values to the masters before the model rounds them; a load pre-hook."""

    def __init__(self, values: Float32Values | None = None) -> None:
        self.values = values or Float32Values()

    def __call__(self, module: Module, state_dict: dict, prefix: str, *rest: object) -> None:
        for name, tensor in own_tensors(module):
            loaded = state_dict.get(prefix + name)
            if isinstance(loaded, Tensor) and loaded.shape == tensor.shape:
                self.values.take(tensor, loaded)

    def __reduce__(self) -> tuple:
        return LoadFloat32, ()


def own_tensors(module: Module) -> list[tuple[str, Tensor]]:
    """A module's own parameters and buffers, without those of its children."""
    return [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ]
