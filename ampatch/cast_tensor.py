"""One parameter or buffer of a model that was cast to a half type, and the way back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module

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
        tensor.data = tensor.data.to(dtype)
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
        grad, current.grad = self._find_grad(current), None
        current.data = self._values.read(current)
        current.grad = grad
        self._values.forget(current)

    def _find_grad(self, current: Tensor) -> Tensor | None:
        grad, pair = current.grad, self._values.find_pair(current)
        is_fresh = grad is not None and (pair is None or pair.has_fresh_grad())
        if is_fresh and grad is self._cast_grad and grad._version == 0:
            return self._given_grad  # nobody touched it
        if pair is not None and pair.master.grad is not None:
            return pair.master.grad
        return grad.float() if is_fresh else None
