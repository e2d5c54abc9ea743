"""Averages gradients over ranks while backward still runs, whichever parameters it reaches.

PyTorch's own reducer wants one backward for each forward, and to know beforehand which parameters it
will reach. Scripts written for apex run two losses of one forward through backward one after the other,
call a discriminator twice, freeze it in between, or leave parts of a model out: there it raises, or lets
the ranks drift apart (torch 2.13).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter

from ampatch.apex.parallel.buckets import Averaging, make_buckets
from ampatch.levels.private import graph_task


class Pass:
    """One backward: the buckets that are sent as it fills them, in the same order on every rank."""

    def __init__(
        self, params: Iterable[Tensor], group: dist.ProcessGroup | None, averaging: Averaging
    ) -> None:
        self._group, self._averaging = group, averaging
        self._buckets = make_buckets(params, averaging)
        self._by_param = {id(param): bucket for bucket in self._buckets for param in bucket.params}
        self._sent = 0
        self.has_grads = False

    def note(self, param: Tensor, used: set[int]) -> None:
        """Notes that backward has added to a gradient, and sends the buckets that are complete."""
        bucket = self._by_param.get(id(param))
        if bucket is None:
            return
        self.has_grads = True
        bucket.note(param)
        while (
            not self._averaging.is_delayed
            and self._sent < len(self._buckets)
            and self._buckets[self._sent].is_complete
        ):
            self._send_next(used)

    def _send_next(self, used: set[int]) -> None:
        self._buckets[self._sent].send(self._group, self._averaging, used)
        self._sent += 1

    def finish(self, used: set[int]) -> None:
        """Sends the rest, and writes every average into its gradient."""
        while self._sent < len(self._buckets):
            self._send_next(used)
        for bucket in self._buckets:
            if bucket.is_stale:
                bucket.send(self._group, self._averaging, used)
        for bucket in self._buckets:
            bucket.receive(self._averaging, dist.get_world_size(self._group))

    def abandon(self) -> None:
        """Ends a pass whose backward raised."""
        for bucket in self._buckets:
            bucket.wait()


def average_grads(params: Iterable[Tensor]) -> None:
    """Averages the gradients that there are over all ranks, outside of backward."""
    params = [param for param in params if param.requires_grad]
    Pass(params, None, Averaging()).finish({id(param) for param in params if param.grad is not None})


class GradReducer:
    """Averages the gradients of some parameters at the end of each backward that reaches one of them.

    `is_on` is asked in backward. Gradients of a backward where it says no stay as they are, and are
    averaged with those of the next one.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, averaging: Averaging, is_on: Callable[[], bool]
    ) -> None:
        self._group, self._averaging, self._is_on = group, averaging, is_on
        self._params: dict[int, Tensor] = {}
        # Torch keeps these, and their hooks, no longer than a graph.
        self._accumulators: dict[int, torch.autograd.graph.Node] = {}
        self._used: set[int] = set()  # ids of parameters whose gradients are not averaged yet
        self._open: Pass | None = None

    def watch(self, params: Iterable[Parameter]) -> None:
        """Follows the parameters that a module has now; called before each backward."""
        if self._open is not None and not _is_in_backward():
            self._open.abandon()
            self._open = None
        known = self._params
        followed = {id(param): param for param in params if param.requires_grad or id(param) in known}
        for key in followed.keys() - known.keys():
            self._hook(followed[key])
        self._params = followed

    def _hook(self, param: Tensor) -> None:
        handle = param.register_post_accumulate_grad_hook(_NoteGrad(weakref.ref(self)))
        weakref.finalize(self, handle.remove).atexit = False
        weight = self._averaging.weight(dist.get_world_size(self._group))
        if weight != 1.0:
            # Not a hook of the parameter: autograd.grad would run that too.
            node = torch.autograd.graph.get_gradient_edge(param).node
            node.register_prehook(_Multiply(weight))
            self._accumulators[id(param)] = node

    def watch_output(self, output: object) -> None:
        """Has the next backward of an output begin a pass.

        Without it the first gradient does. That may be inside a backward inside of backward, which is
        what a reentrant checkpoint runs, and each of them would be a pass of its own.
        """
        for tensor in _find_tensors(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(_BeginPass(self))

    def begin(self) -> None:
        """Begins a pass, unless one is open; called inside of backward."""
        if self._open is None and self._is_on():
            self._open = self._make_pass()
            Variable._execution_engine.queue_callback(self._end)

    def _make_pass(self) -> Pass:
        params = [param for param in self._params.values() if param.requires_grad]
        return Pass(params, self._group, self._averaging)

    def note(self, param: Tensor) -> None:
        """Notes that backward has added to a gradient."""
        if self._params.get(id(param)) is not param:
            return
        self._used.add(id(param))
        self.begin()
        if self._open is not None and self._is_on():
            self._open.note(param, self._used)

    def _end(self) -> None:
        opened, self._open = self._open, None
        if opened is not None and opened.has_grads:
            used, self._used = self._used, set()
            opened.finish(used)


def _is_in_backward() -> bool:
    return graph_task() != -1


def _find_tensors(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    elif hasattr(output, "__dataclass_fields__"):
        output = list(vars(output).values()) if hasattr(output, "__dict__") else []
    if isinstance(output, (list, tuple)):
        return [tensor for item in output for tensor in _find_tensors(item)]
    return []


@dataclass(frozen=True, slots=True)
class _NoteGrad:
    """A hook of a parameter, which may outlive the reducer: a module can be wrapped anew."""

    reducer: weakref.ref[GradReducer]

    def __call__(self, param: Tensor) -> None:
        reducer = self.reducer()
        if reducer is not None:
            reducer.note(param)


@dataclass(frozen=True, slots=True)
class _BeginPass:
    """A hook of a graph, which keeps the reducer as long as there may be a backward."""

    reducer: GradReducer

    def __call__(self, grads: tuple) -> None:
        self.reducer.begin()


@dataclass(frozen=True, slots=True)
class _Multiply:
    """A hook of the node that adds to a gradient."""

    weight: float

    def __call__(self, grads: tuple) -> tuple:
        return tuple(grad if grad is None else grad * self.weight for grad in grads)
