"""Trains one model in several processes: `DistributedDataParallel` and `Reducer` as apex had them."""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from ampatch.apex.parallel.collectives import (
    apply_flat_dist_call,
    broadcast_params,
    flat_dist_call,
    flatten,
    require_process_group,
    split_by_type,
    unflatten,
    wait_for_gloo_at_exit,
)
from ampatch.apex.parallel.grad_reducer import Averaging, GradReducer

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "apply_flat_dist_call",
    "flat_dist_call",
    "flatten",
    "split_by_type",
    "unflatten",
]


def _init_unsynchronized(init: Callable[..., None], module: Module) -> None:
    """Has torch's class wrap a module, whose buffers stay as they are; torch 2.6 sends those of rank 0."""
    if "init_sync" in inspect.signature(init).parameters:
        init(module, init_sync=False)
        return
    kept = [buffer.clone() for buffer in module.buffers()]
    init(module)
    with torch.no_grad():
        for buffer, values in zip(module.buffers(), kept, strict=True):
            buffer.copy_(values)


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """Averages the gradients of a model over all ranks at the end of each backward.

    Parameters come from rank 0 at the start; buffers stay what each rank makes of them. Any number of
    forwards and backwards may follow one another; a parameter that no rank used keeps its gradient, or
    None. All gradients travel in one message, which is what apex did with `delay_allreduce`.

    - `allreduce_always_fp32`: half gradients are added up in float32.
    - `gradient_average=False` sums instead. `gradient_predivide_factor` (at first called
      `gradient_average_split_factor`) divides before gradients are added up, and an average is multiplied
      by it afterwards: float16 gradients of many ranks overflow otherwise.

    What is left of apex's keywords steered when its buckets were sent, and its CUDA streams: a warning
    names them. Raises AmpValueError without a process group, and where ranks have different parameters.
    """

    def __init__(
        self,
        module: Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Sequence[Parameter] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: object = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        require_process_group("DistributedDataParallel")
        _warn_of_keywords(
            message_size=message_size != 10000000,
            allreduce_trigger_params=bool(allreduce_trigger_params),
            retain_allreduce_buffers=retain_allreduce_buffers,
            num_allreduce_streams=num_allreduce_streams != 1,
            allreduce_communicators=allreduce_communicators is not None,
            prof=prof,
        )
        self.message_size = message_size
        self.delay_allreduce = bool(delay_allreduce or shared_param)
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = gradient_average_split_factor or gradient_predivide_factor
        broadcast_params(module, "DistributedDataParallel")
        with _some_param_trainable(module):
            _init_unsynchronized(super().__init__, module)
        self.broadcast_buffers = False
        self.world_size = dist.get_world_size()
        wait_for_gloo_at_exit()

    def _make_reducer(self, *args: object, **kwargs: object) -> None:
        averaging = Averaging(
            self.process_group,
            always_fp32=self.allreduce_always_fp32,
            average=self.gradient_average,
            predivide_factor=self.gradient_predivide_factor,
        )
        self.logger = None
        self.reducer = GradReducer(averaging, functools.partial(_syncs_grads, weakref.ref(self)))
        self.reducer.watch(self.module.parameters())

    # What torch calls to make its own reducer, at construction and for a copy.
    _ddp_init_helper = _make_reducer

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """Calls the module."""
        if torch.compiler.is_dynamo_compiling():
            # It keeps hooks out of its graphs: those that are there already are enough.
            return self.module(*inputs, **kwargs)
        with self._inside_ddp_forward():  # so that ampatch sees whether gradients stay on the rank
            output = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self.reducer.watch(self.module.parameters())
            self.reducer.watch_output(output)
        return output

    def disable_allreduce(self) -> None:
        """Leaves the gradients of the backwards that follow on their ranks."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Averages again, with the next backward also what was left on the ranks by earlier ones."""
        self.require_backward_grad_sync = True


def _syncs_grads(model: weakref.ref[DistributedDataParallel]) -> bool:
    """Whether a model averages gradients now: neither `no_sync` nor `disable_allreduce` is in force."""
    alive = model()
    return alive is None or alive.require_backward_grad_sync


def _warn_of_keywords(**ignored: bool) -> None:
    names = [name for name, is_given in ignored.items() if is_given]
    if names:
        warnings.warn(
            f"apex.parallel.DistributedDataParallel: {', '.join(names)} has no meaning with PyTorch's "
            f"own collectives and is ignored: leave it out",
            stacklevel=3,
        )


@contextmanager
def _some_param_trainable(module: Module) -> Iterator[None]:
    """Lets torch wrap a model whose parameters are all frozen, as apex did."""
    params = list(module.parameters())
    frozen = params[:1] if not any(param.requires_grad for param in params) else []
    for param in frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


class Reducer:
    """Averages gradients over ranks when told to; `reduce` is called between backward and step.

    Takes a module, whose parameters come from rank 0 at the start and whose gradients are averaged, or
    tensors in any nesting of lists and tuples, which are averaged themselves.
    """

    def __init__(self, module_or_grads_list: Module | Sequence[object]) -> None:
        require_process_group("Reducer")
        self.module = module_or_grads_list if isinstance(module_or_grads_list, Module) else None
        self.grads: list[Tensor] = []
        if self.module is None:
            self.grads = _extract_tensors(module_or_grads_list)
        else:
            broadcast_params(self.module, "Reducer")
        wait_for_gloo_at_exit()

    def reduce(self) -> None:
        """Averages; a gradient that is None on some ranks counts as zeros there."""
        if self.module is None:
            flat_dist_call(self.grads, dist.all_reduce)
        else:
            params = [param for param in self.module.parameters() if param.requires_grad]
            Averaging().apply(params, {id(param) for param in params if param.grad is not None})


def _extract_tensors(nested: object) -> list[Tensor]:
    if isinstance(nested, Tensor):
        return [nested]
    return [tensor for item in nested for tensor in _extract_tensors(item)]
