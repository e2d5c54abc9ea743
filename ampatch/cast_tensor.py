"""One parameter or buffer of a model that was cast to a half type, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ampatch.grads import cast_grads
from ampatch.masters import is_wrapper
from ampatch.values import Float32Values


def own_tensors(module: Module) -> list[tuple[str, Tensor]]:
    """A module's own parameters and buffers, without those of its children."""
    return [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ]


class CastTensor:
    """Casts a module's tensor in place, and gives it its float32 values and gradient back."""

    def __init__(self, module: Module, name: str, tensor: Tensor, values: Float32Values) -> None:
        self.module = module
        self.name = name
        self.tensor = tensor
        self._values = values
        self._given_grad: Tensor | None = None  # in float32, from before the cast
        self._cast_grad: Tensor | None = None

    def cast(self, dtype: torch.dtype) -> None:
        """Casts the tensor, and a gradient that it has already."""
        tensor = self.tensor
        self._values.remember(tensor, tensor.data)
        self._given_grad, tensor.grad = tensor.grad, None
        _set_values(tensor, tensor.data.to(dtype))
        if self._given_grad is not None:
            self._cast_grad = tensor.grad = self._given_grad.to(dtype)

    def find(self) -> Tensor:
        """Returns the module's tensor as it is now: `Module.to` replaces buffers by others."""
        current = dict(own_tensors(self.module)).get(self.name, self.tensor)
        if current is not self.tensor:
            self._values.rename(self.tensor, current)
            self.tensor = current
        return current

    def restore(self) -> None:
        """Casts the tensor back: float32 values where they hold, and the gradient that counts."""
        current = self.find()
        values = self._values.read(current).detach()
        grad, current.grad = self._find_grad(current, values), None
        _set_values(current, values)
        current.grad = grad
        self._values.forget(current)

    def _find_grad(self, current: Tensor, values: Tensor) -> Tensor | None:
        grad, pair = current.grad, self._values.find_pair(current)
        is_fresh = grad is not None and (pair is None or pair.has_fresh_grad())
        if is_fresh and grad is self._cast_grad and grad._version == 0:
            return self._given_grad  # nobody touched it
        if pair is not None and pair.master.grad is not None:
            return pair.master.grad
        return cast_grads([grad], [values])[0] if is_fresh else None


def cast_newcomers(models: Sequence[Module], dtype: torch.dtype) -> Callable[[], None]:
    """Returns what casts to float32 the half tensors that models have got since.

    Parametrizations, pruning and weight norm make parameters and buffers from a half weight.
    """
    before = {id(tensor): tensor for part in list_parts(models) for _, tensor in own_tensors(part)}

    def cast_up() -> None:
        for module in list_parts(models):
            for _, tensor in own_tensors(module):
                if tensor.dtype is dtype and id(tensor) not in before:
                    grad, tensor.grad = tensor.grad, None
                    _set_values(tensor, tensor.detach().float())
                    tensor.grad = None if grad is None else grad.float()

    return cast_up


def list_parts(models: Iterable[Module]) -> list[Module]:
    """The modules of models, each once."""
    return list({id(part): part for model in models for part in model.modules()}.values())


def _set_values(tensor: Tensor, values: Tensor) -> None:
    """Gives a tensor other values of another type; the object stays the same.

    A tensor that wraps others, such as a DTensor, keeps those where its `.data` is set.
    """
    if not is_wrapper(values):
        tensor.data = values
        return
    is_parameter = isinstance(tensor, Parameter)
    successor = Parameter(values, tensor.requires_grad) if is_parameter else values.detach()
    torch.utils.swap_tensors(tensor, successor)
