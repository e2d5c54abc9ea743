"""Half networks and float32 master params by hand, as scripts did it before `amp`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn import Module, Parameter, Sequential
from torch.nn.modules.batchnorm import _BatchNorm

from ampatch.steps.masters import is_wrapper

clip_grad_norm = torch.nn.utils.clip_grad_norm_


# ---- Networks in half ----


class tofp16(Module):
    """Casts its input to float16, integers too."""

    def forward(self, input: Tensor) -> Tensor:
        return input.half()


def BN_convert_float(module: Module) -> Module:
    """Casts every BatchNorm with weights to float32, in place, and returns the module.

    Its kernels take half input with float32 weights and statistics, and return half.
    """
    for layer in module.modules():
        if _keeps_float32(layer):
            layer.float()
    return module


def _keeps_float32(module: Module) -> bool:
    return isinstance(module, _BatchNorm) and module.affine


def network_to_half(network: Module) -> Sequential:
    """Casts a network to float16, all but its BatchNorm, and puts a cast of its input before it.

    The network is the second part of what is returned: names in its `state_dict` begin with "1.".
    """
    return Sequential(tofp16(), BN_convert_float(network.half()))


@torch.no_grad()
def convert_module(module: Module, dtype: torch.dtype) -> None:
    """Casts a module's own floating parameters, gradients and buffers, not those of its parts."""
    params = list(module.parameters(recurse=False))
    grads = [param.grad for param in params if param.grad is not None]
    casts = [*params, *grads, *module.buffers(recurse=False)]
    for tensor in casts:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def convert_network(network: Module, dtype: torch.dtype) -> Module:
    """Casts a network in place, all but BatchNorm with weights, and returns it."""
    for module in network.modules():
        if _keeps_float32(module):
            continue
        convert_module(module, dtype)
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()
    return network


class FP16Model(Module):
    """Runs a network in float16, all but its BatchNorm; casts inputs that have a `half()`."""

    def __init__(self, network: Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.half)

    def forward(self, *inputs: object) -> object:
        return self.network(*(item.half() if hasattr(item, "half") else item for item in inputs))


# ---- Masters ----


@torch.no_grad()
def prep_param_lists(model: Module, flat_master: bool = False) -> tuple[list[Parameter], list[Parameter]]:
    """Returns the parameters of a model that are trained, and float32 masters of them, in lists.

    With `flat_master` there is one master that holds the values of all, one after the other.
    """
    model_params = [param for param in model.parameters() if param.requires_grad]
    if not flat_master:
        return model_params, [
            Parameter(param.detach().to(torch.float32, copy=True)) for param in model_params
        ]
    master = Parameter(_flatten(model_params))
    master.grad = torch.zeros_like(master)
    return model_params, [master]


def _flatten(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().float().reshape(-1) for tensor in tensors])


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copies the gradients of a model to its masters, in float32; no host sync.

    A master whose parameter has no gradient gets none; in a flat master it counts as zero.
    """
    if flat_master:
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in model_params]
        (master,) = master_params
        master.grad = torch.empty_like(master) if master.grad is None else master.grad
        master.grad.copy_(_flatten(grads))
        return
    dense = []
    for model, master in zip(model_params, master_params, strict=True):
        if model.grad is None or model.grad.is_sparse or is_wrapper(model.grad):
            master.grad = None if model.grad is None else model.grad.to(master.dtype, copy=True)
            continue
        if master.grad is None or master.grad.is_sparse:
            master.grad = torch.empty_like(master)
        dense.append((master.grad, model.grad))
    if dense:
        torch._foreach_copy_([to for to, _ in dense], [grad for _, grad in dense])


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Rounds masters into the parameters of the model; no host sync."""
    masters = list(master_params)
    if flat_master:
        parts = masters[0].split([param.numel() for param in model_params])
        masters = [part.view(param.shape) for part, param in zip(parts, model_params, strict=True)]
    if masters:
        torch._foreach_copy_(list(model_params), masters)


def to_python_float(t: Tensor | Sequence[float]) -> float:
    """Returns the number that a tensor of one element holds; one host sync."""
    return t.item() if hasattr(t, "item") else t[0]


# ---- The names that apex gave to lists of masters ----

Pick = Callable[[Tensor, Tensor | None], Tensor | None]  # of what is stepped and, for a master, its half


def lists_of(description: str, pick: Pick) -> tuple[property, property]:
    """Makes properties of `MasterLists`: some of the parameters by param group, and in one list."""
    by_group = property(lambda self: self._pick(pick, by_group=True), doc=f"{description}, by param group.")
    in_one = property(lambda self: [*chain(*self._pick(pick, by_group=False))], doc=f"{description}.")
    return by_group, in_one


class MasterLists:
    """Half parameters, their masters, and the others; lists of the three go parallel. A base class."""

    def _pairs(self) -> Iterable[tuple[Tensor, Tensor]]:
        raise NotImplementedError

    def _stepped(self) -> list[list[Tensor]]:
        raise NotImplementedError

    def _pick(self, pick: Pick, by_group: bool) -> list[list[Tensor]]:
        groups, halves = self._stepped(), {id(master): half for half, master in self._pairs()}
        picked = ([pick(param, halves.get(id(param))) for param in group] for group in groups)
        return [[param for param in group if param is not None] for group in picked]

    fp16_groups, all_fp16_params = lists_of(
        "The half parameters of the model that have masters", lambda param, half: half
    )
    fp32_from_fp16_groups, all_fp32_from_fp16_params = lists_of(
        "Their masters, in the same order", lambda param, half: None if half is None else param
    )
    fp32_from_fp32_groups, all_fp32_from_fp32_params = lists_of(
        "The parameters that are trained as they are",
        lambda param, half: param if half is None and param.requires_grad else None,
    )
