"""Averages gradients over ranks at the end of each backward, whichever parameters it has reached.

PyTorch's own reducer, with or without a communication hook, wants one backward for each forward, and to
know beforehand which parameters it will reach. Scripts written for apex run two losses of one forward
through backward one after the other, call a discriminator twice, freeze it in between, or leave parts of
a model out: there it raises, or lets the ranks drift apart (torch 2.13).
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter

from ampatch.levels.private import graph_task, is_expanded


@dataclass(frozen=True, slots=True)
class Averaging:
    """How the gradients of all ranks become one; the words are those of apex."""

    group: dist.ProcessGroup | None = None
    always_fp32: bool = False
    average: bool = True
    predivide_factor: float = 1.0

    @property
    def weight(self) -> float:
        """What a new gradient is multiplied by, so that the average over ranks is what was asked for.

        To multiply each gradient as it comes, rather than the result, keeps a sum right where earlier
        gradients are there already: these have been summed before.
        """
        return 1.0 if self.average else dist.get_world_size(self.group) / self.predivide_factor

    @torch.no_grad()
    def apply(self, params: Iterable[Tensor], used: set[int]) -> None:
        """Averages the gradients of all ranks, in one message for each dtype and device.

        A missing gradient counts as zeros; a parameter whose id no rank has in `used` keeps what it has.
        Costs one host sync if this rank left a parameter out.
        """
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        for param in params:
            kinds[param.dtype, param.device].append(param)
        for same in kinds.values():
            self._apply(same, [id(param) in used for param in same])

    def _apply(self, params: Sequence[Tensor], used: Sequence[bool]) -> None:
        flags = params[0].new_ones(len(params)) if all(used) else params[0].new_tensor(used)
        flat = torch.cat([*(_flatten_grad(param) for param in params), flags])
        flat = flat.float() if self.always_fp32 and flat.dtype != torch.float64 else flat
        if self.predivide_factor != 1.0:
            flat.div_(self.predivide_factor)
        dist.all_reduce(flat, group=self.group)
        flat.div_(dist.get_world_size(self.group) / self.predivide_factor)
        *averages, flags = flat.split([*(param.numel() for param in params), len(params)])
        used = used if all(used) else flags.ne(0).tolist()
        rows = zip(params, averages, used, strict=True)
        _write_grads([(param, average.view(param.shape)) for param, average, is_used in rows if is_used])


def _flatten_grad(param: Tensor) -> Tensor:
    grad = param.grad
    if grad is None:
        return param.new_zeros(param.numel())
    grad = grad.detach()
    return (grad.to_dense() if grad.is_sparse else grad).reshape(-1)


def _write_grads(averages: list[tuple[Tensor, Tensor]]) -> None:
    """Writes in place where that is possible: others may hold the gradient."""
    dense = [(param.grad.detach(), average) for param, average in averages if _is_writable(param.grad)]
    if dense:
        torch._foreach_copy_([grad for grad, _ in dense], [average for _, average in dense])
    for param, average in averages:
        if param.grad is not None and param.grad.is_sparse:
            param.grad = average.to(param.dtype).to_sparse(param.grad.sparse_dim())
        elif not _is_writable(param.grad):
            param.grad = torch.empty_like(param).copy_(average)


def _is_writable(grad: Tensor | None) -> bool:
    """Whether a gradient has a place in memory for each of its elements; one that was expanded has not."""
    return grad is not None and not grad.is_sparse and not is_expanded(grad)


class GradReducer:
    """Averages the gradients of some parameters at the end of each backward that reaches one of them.

    `is_on` is asked in backward. Gradients of a backward where it says no stay as they are, and are
    averaged with those of the next one.
    """

    def __init__(self, averaging: Averaging, is_on: Callable[[], bool]) -> None:
        self._averaging, self._is_on = averaging, is_on
        self._params: dict[int, Tensor] = {}
        # Torch keeps these, and their hooks, no longer than a graph.
        self._accumulators: dict[int, torch.autograd.graph.Node] = {}
        self._used: set[int] = set()  # ids of parameters whose gradients are not averaged yet
        self._is_open = False  # a backward that has begun, and is to end with an average
        self._has_grads = False  # whether it has reached a parameter

    def watch(self, params: Iterable[Parameter]) -> None:
        """Follows the parameters that a module has now; called before each backward."""
        if not _is_in_backward():
            self._is_open = self._has_grads = False  # the last backward may have raised
        known = self._params
        followed = {id(param): param for param in params if param.requires_grad or id(param) in known}
        for key in followed.keys() - known.keys():
            self._hook(followed[key])
        self._params = followed

    def _hook(self, param: Tensor) -> None:
        handle = param.register_post_accumulate_grad_hook(functools.partial(_note, weakref.ref(self)))
        weakref.finalize(self, handle.remove).atexit = False
        weight = self._averaging.weight
        if weight != 1.0:
            # Not a hook of the parameter: autograd.grad would run that too.
            node = torch.autograd.graph.get_gradient_edge(param).node
            node.register_prehook(functools.partial(_multiply, weight))
            self._accumulators[id(param)] = node

    def watch_output(self, output: object) -> None:
        """Has the next backward of an output end with an average.

        Without it the first gradient does. That may be inside a backward inside of backward, which is
        what a reentrant checkpoint runs, and each of them would send all gradients.
        """
        for tensor in _find_tensors(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(functools.partial(_begin, self))

    def begin(self) -> None:
        """Has the backward that runs now end with an average."""
        if not self._is_open and self._is_on():
            self._is_open = True
            Variable._execution_engine.queue_callback(self._end)

    def note(self, param: Tensor) -> None:
        """Notes that backward has added to a gradient."""
        if self._params.get(id(param)) is not param:
            return
        self._used.add(id(param))
        self.begin()
        self._has_grads |= self._is_on()

    def _end(self) -> None:
        has_grads, self._is_open, self._has_grads = self._has_grads, False, False
        if has_grads:
            used, self._used = self._used, set()
            self._averaging.apply([each for each in self._params.values() if each.requires_grad], used)


def _is_in_backward() -> bool:
    return graph_task() != -1


def _find_tensors(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if hasattr(output, "__dataclass_fields__") and not isinstance(output, dict):
        output = getattr(output, "__dict__", {})
    items = output.values() if isinstance(output, dict) else output
    if not isinstance(output, (dict, list, tuple)):
        return []
    return [tensor for item in items for tensor in _find_tensors(item)]


# ---- Hooks ----


def _note(reducer: weakref.ref[GradReducer], param: Tensor) -> None:
    """Tells a reducer of a gradient; a parameter may outlive it: a module can be wrapped again."""
    alive = reducer()
    if alive is not None:
        alive.note(param)


def _begin(reducer: GradReducer, grads: tuple) -> None:
    """Tells a reducer, which a graph keeps as long as there may be a backward, that this one has begun."""
    reducer.begin()


def _multiply(weight: float, grads: tuple) -> tuple:
    return tuple(grad if grad is None else grad * weight for grad in grads)
