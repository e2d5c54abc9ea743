"""Trains one model in several processes: `DistributedDataParallel` and `Reducer` as apex had them."""

from __future__ import annotations

import atexit
import functools
import gc
import inspect
import time
import warnings
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Module, Parameter

import ampatch as amp
from ampatch.apex.apex_C import flatten, unflatten
from ampatch.levels.private import graph_task, is_expanded
from ampatch.levels.ranks import has_ranks

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
    own_values = [buffer.clone() for buffer in module.buffers()]
    init(module)
    with torch.no_grad():
        for buffer, values in zip(module.buffers(), own_values, strict=True):
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
            self.grads = _find_tensors(module_or_grads_list)
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


# ---- Collectives on many tensors ----

Collective = Callable[..., object]


def split_by_type(tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """Groups tensors by what `Tensor.type()` says: dtype and type of device."""
    groups: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.type(), []).append(tensor)
    return groups


@torch.no_grad()
def apply_flat_dist_call(bucket: Sequence[Tensor], call: Collective, extra_args: tuple | None = None) -> None:
    """Runs a collective on tensors of one type at once; `dist.all_reduce` averages over ranks."""
    coalesced = flatten(bucket)
    call(coalesced, *(extra_args or ()))
    if call is dist.all_reduce:
        coalesced /= dist.get_world_size()
    for tensor, synced in zip(bucket, unflatten(coalesced, bucket), strict=True):
        tensor.detach().copy_(synced)


def flat_dist_call(tensors: Iterable[Tensor], call: Collective, extra_args: tuple | None = None) -> None:
    """Runs a collective on tensors of any types, one call a type; `dist.all_reduce` averages over ranks."""
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)


def require_process_group(name: str) -> None:
    if not has_ranks():
        raise amp.AmpValueError(
            f"{name}: there is no process group: call torch.distributed.init_process_group first, in one of "
            f"the processes that torchrun or apex.parallel.multiproc starts"
        )


def wait_for_gloo_at_exit() -> None:
    """Has Python's end wait until gloo's threads have released their last results.

    One that waits for the interpreter's lock while the interpreter ends aborts the process, and
    torchrun calls that a failure ("terminate called without an active exception", torch 2.13).
    """
    if not dist.is_initialized() or dist.get_backend() != "nccl":
        atexit.unregister(_wait_for_gloo)  # once is enough
        atexit.register(_wait_for_gloo)


def _wait_for_gloo() -> None:
    gc.collect()  # which lets go of what a group of processes holds
    time.sleep(0.1)


def broadcast_params(module: Module, name: str) -> None:
    """Gives every rank the parameters of rank 0, and what a half model has in float32."""
    _require_same_params(module, name)
    flat_dist_call(list(module.parameters()), dist.broadcast, (0,))
    # A half model's state_dict has the float32 values that its optimizer steps: equal halves may come
    # from different ones. Not by methods that the model may override, to save and load what it likes.
    halves = dict(module.named_parameters())
    saved = Module.state_dict(module)
    precise = {key: saved[key].clone() for key in halves if _is_more_precise(saved.get(key), halves[key])}
    if precise:
        flat_dist_call(precise.values(), dist.broadcast, (0,))
        Module.load_state_dict(module, precise, strict=False)


def _is_more_precise(saved: object, param: Tensor) -> bool:
    return isinstance(saved, Tensor) and saved.dtype.itemsize > param.dtype.itemsize


def _require_same_params(module: Module, name: str) -> None:
    """Raises where ranks have other parameters than rank 0: a collective would hang or mix them up."""
    params = list(module.parameters())
    if not params:
        return
    kinds = [(tuple(param.shape), str(param.dtype)) for param in params]
    own = [len(params), sum(param.numel() for param in params), zlib.crc32(repr(kinds).encode())]
    print_of_rank = torch.tensor(own, device=params[0].device)
    prints = [torch.empty_like(print_of_rank) for _ in range(dist.get_world_size())]
    dist.all_gather(prints, print_of_rank)
    for rank, (count, elements, checksum) in enumerate(torch.stack(prints).tolist()):
        if [count, elements, checksum] != prints[0].tolist():
            raise amp.AmpValueError(
                f"{name}: rank {rank} has {count} parameters with {elements} elements, rank 0 has "
                f"{prints[0][0]} with {prints[0][1]}: expected the same names, shapes and dtypes in the same "
                f"order on every rank"
            )


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
        if graph_task() == -1:  # outside of backward
            self._is_open = self._has_grads = False  # the last backward may have raised
        known = self._params
        followed = {id(param): param for param in params if param.requires_grad or id(param) in known}
        for key in followed.keys() - known.keys():
            self._hook(followed[key])
        self._params = followed

    def _hook(self, param: Tensor) -> None:
        handle = param.register_post_accumulate_grad_hook(functools.partial(_add_grad, weakref.ref(self)))
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
                tensor.grad_fn.register_prehook(lambda grads: self.begin())

    def begin(self) -> None:
        """Has the backward that runs now end with an average."""
        if not self._is_open and self._is_on():
            self._is_open = True
            Variable._execution_engine.queue_callback(self._end)

    def add(self, param: Tensor) -> None:
        """Adds a parameter whose gradient backward has changed."""
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


def _add_grad(reducer: weakref.ref[GradReducer], param: Tensor) -> None:
    """Tells a reducer of a gradient; a parameter may outlive it: a module can be wrapped again."""
    alive = reducer()
    if alive is not None:
        alive.add(param)


def _multiply(weight: float, grads: tuple) -> tuple:
    return tuple(grad if grad is None else grad * weight for grad in grads)
