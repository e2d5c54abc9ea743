"""The parameters and buffers of a model that were cast to a half type: float32 values, and the way back."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ampatch.models.rounding import Effect, find_effect
from ampatch.steps.grads.plain import cast_grads
from ampatch.steps.masters.weight import Weight, is_wrapper


def own_tensors(module: Module) -> list[tuple[str, Tensor]]:
    """A module's own parameters and buffers, without those of its children."""
    return [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ]


class Shown:
    """Whether a `state_dict` has shown float32 values of a call's models: then forwards look for edits."""

    def __init__(self) -> None:
        self.any = False


class Float32Values:
    """Knows the weights of a module, by the identity of the half tensor.

    The hooks of the module keep it alive, and with it the tensors: these live as long as the module.
    A copied model has none yet, but what was `written` into those of the first goes into its half tensors.
    """

    def __init__(self, notice: Shown | None = None, written: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        self.notice = notice or Shown()
        self._weights: dict[int, Weight] = {}
        for half, precise in written:
            half.detach().copy_(precise)

    def __reduce__(self) -> tuple:
        pairs = ((weight.half, weight.find_written()) for weight in self)
        written = [(half, precise.detach()) for half, precise in pairs if precise is not None]
        return Float32Values, (self.notice, written)

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._weights

    def __iter__(self) -> Iterator[Weight]:
        return iter(list(self._weights.values()))

    def find(self, tensor: Tensor) -> Weight | None:
        """Returns what is known of a half tensor."""
        return self._weights.get(id(tensor))

    def get(self, tensor: Tensor) -> Weight:
        """Returns what is known of a half tensor, from now on if nothing was."""
        found = self._weights.get(id(tensor))
        if found is None:
            found = self._weights[id(tensor)] = Weight(tensor)
        return found

    def rename(self, tensor: Tensor, successor: Tensor) -> None:
        """Hands the float32 values of a tensor to the one that took its place."""
        weight = self._weights.pop(id(tensor), None)
        precise = None if weight is None else weight.find_precise()
        if precise is not None and is_wrapper(precise) is not is_wrapper(successor):
            precise = None  # it was sharded since, which nobody can follow
        self._weights[id(successor)] = Weight(successor, precise)

    def forget(self, tensor: Tensor) -> None:
        """Drops what is known of a tensor."""
        self._weights.pop(id(tensor), None)

    def export(self, tensor: Tensor, saved: Tensor) -> Tensor:
        """Returns what a state_dict shows for a half tensor, of which it holds `saved`."""
        weight = self.get(tensor)
        shown = weight.export(saved)
        self.notice.any |= weight.is_shown
        return shown


class CastTensor:
    """Casts a module's tensor in place, and gives it its float32 values and gradient back."""

    def __init__(self, module: Module, name: str, tensor: Tensor, values: Float32Values) -> None:
        self._module = weakref.ref(module)  # another one may hold the tensor as well, and outlive it
        self.name = name
        self.tensor = tensor
        self._values = values
        self._given_grad: Tensor | None = None  # in float32, from before the cast
        self._cast_grad: Tensor | None = None

    def cast(self, dtype: torch.dtype) -> None:
        """Casts the tensor, and a gradient that it has already."""
        tensor = self.tensor
        self._values.get(tensor).remember(tensor.data)
        self._given_grad, tensor.grad = tensor.grad, None
        _set_values(tensor, tensor.data.to(dtype))
        if self._given_grad is not None:
            self._cast_grad = tensor.grad = self._given_grad.to(dtype)

    def find(self) -> Tensor:
        """Returns the module's tensor as it is now: `Module.to` replaces buffers by others."""
        module = self._module()
        found = {} if module is None else dict(own_tensors(module))
        current = found.get(self.name, self.tensor)
        if current is not self.tensor:
            self._values.rename(self.tensor, current)
            self.tensor = current
        return current

    def restore(self) -> None:
        """Casts the tensor back: float32 values where they hold, and the gradient that counts."""
        current = self.find()
        values = self._values.get(current).read().detach()
        grad, current.grad = self._find_grad(current, values), None
        _set_values(current, values)
        current.grad = grad
        self._values.forget(current)

    def _find_grad(self, current: Tensor, values: Tensor) -> Tensor | None:
        grad, weight = current.grad, self._values.get(current)
        is_fresh = weight.has_fresh_grad()
        if is_fresh and grad is self._cast_grad and grad._version == 0:
            return self._given_grad  # nobody touched it
        if weight.master is not None and weight.master.grad is not None:
            return weight.master.grad
        return cast_grads([grad], [values])[0] if is_fresh or weight.was_grad_remade() else None

    def find_effect(self, dtype: torch.dtype) -> Effect | None:
        """What rounding does to the values, if no step trains them."""
        module = self._module()
        return None if module is None else find_effect(self.name, dict(own_tensors(module)), dtype)

    def describe(self) -> str:
        """Names the tensor and the class of its module."""
        return f"{self.name!r} of {type(self._module()).__name__}"


class CastModule:
    """The tensors of one module that were cast, and the way back; the module's hooks keep it alive."""

    def __init__(self, module: Module, dtype: torch.dtype | None) -> None:
        self._module = weakref.ref(module)
        self._dtype = dtype
        self._came_half = [tensor for tensor in _list_tensors(module) if tensor.dtype is dtype]
        self.casts: list[CastTensor] = []  # those of tied tensors are in all modules that have them

    def find(self, module: Module) -> None:
        """Finds the module's tensors as they are now; does nothing for another one with the same hooks."""
        if module is self._module():
            for cast in self.casts:
                cast.find()

    def cast_newcomers(self) -> None:
        """Casts to float32 the half tensors that the module, or a part of it, has got since.

        Parametrizations, pruning and weight norm make parameters and buffers from a half weight.
        """
        came_half = set(map(id, self._came_half))
        module = self._module()
        for tensor in [] if module is None else _list_tensors(module):
            if tensor.dtype is self._dtype and id(tensor) not in came_half:
                grad, tensor.grad = tensor.grad, None
                _set_values(tensor, tensor.detach().float())
                tensor.grad = None if grad is None else grad.float()


def _list_tensors(module: Module) -> list[Tensor]:
    return [tensor for part in module.modules() for _, tensor in own_tensors(part)]


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
