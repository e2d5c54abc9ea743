"""The parameters and buffers of a model that were cast to a half type: float32 values, and the way back."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ampatch.levels.private import set_grad
from ampatch.models.rounding import Effect, find_effect
from ampatch.steps.gradients import cast_grads
from ampatch.steps.masters import Weight, is_wrapper

LEAST_SAMPLE = 16  # elements, to tell of a copied model whether it is averaged


def own_tensors(module: Module) -> list[tuple[str, Tensor]]:
    return [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ]


class Shared:
    """What the weights of a call's models share; those of a copied model have their own.

    `known` finds a weight by the id of its half tensor, wherever in the session that has come to be since;
    `touched` holds the ids of tensors that may have been written without a trace, None if nobody watches.
    """

    def __init__(
        self,
        known: MutableMapping[int, Weight] | None = None,
        touched: set[int] | None = None,
        copies: WeakSet[Shared] | None = None,
    ) -> None:
        self.known = WeakValueDictionary[int, Weight]() if known is None else known
        self.touched = touched
        self.copies = WeakSet[Shared]() if copies is None else copies  # of models, which say so here
        self.sample: tuple[Weight, weakref.ref[Weight]] | None = None  # a copied weight, and the original
        self.any_shown = False  # whether a `state_dict` has shown some: then forwards look for edits

    def __deepcopy__(self, memo: dict) -> Shared:
        return Shared(copies=self.copies)

    def __reduce__(self) -> tuple:
        return Shared, ()


class Float32Values:
    """Knows the weights of a module, by the identity of the half tensor.

    The hooks of the module keep it alive, and with it the tensors: these live as long as the module.
    A copied model has none yet, but what was `written` into those of the first goes into its half tensors.
    """

    def __init__(self, shared: Shared | None = None, written: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        self.shared = shared or Shared()
        self._weights: dict[int, Weight] = {}
        for half, precise in written:
            half.detach().copy_(precise)

    def __deepcopy__(self, memo: dict) -> Float32Values:
        new, args = self.__reduce__()
        copied = memo[id(self)] = new(*copy.deepcopy(args, memo))
        if copied.shared.sample is None:
            large = (one for one in self if one.half.numel() >= LEAST_SAMPLE and not one.is_wrapper)
            for weight in itertools.islice(large, 1):
                copied.shared.sample = copied.get(copy.deepcopy(weight.half, memo)), weakref.ref(weight)
                copied.shared.copies.add(copied.shared)
        return copied

    def __reduce__(self) -> tuple:
        pairs = ((weight.half, weight.find_written()) for weight in self)
        written = [(half, precise.detach()) for half, precise in pairs if precise is not None]
        return Float32Values, (self.shared, written)

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._weights

    def __iter__(self) -> Iterator[Weight]:
        return iter(list(self._weights.values()))

    def find(self, tensor: Tensor) -> Weight | None:
        """Returns what is known of a half tensor, here or where it was before."""
        weight = self._weights.get(id(tensor)) or self.shared.known.get(id(tensor))
        return weight if weight is not None and weight.half is tensor else None

    def get(self, tensor: Tensor) -> Weight:
        """Returns what is known of a half tensor, from now on if nothing was."""
        return self.find(tensor) or self._add(Weight(tensor, touched=self.shared.touched))

    def _add(self, weight: Weight) -> Weight:
        self._weights[id(weight.half)] = self.shared.known[id(weight.half)] = weight
        return weight

    def rename(self, tensor: Tensor, successor: Tensor) -> None:
        """Hands the float32 values of a tensor to the one that took its place, unless that has its own."""
        weight = self._weights.pop(id(tensor), None)
        if self.find(successor) is not None:
            return
        precise = None if weight is None else weight.find_precise()
        if precise is not None and is_wrapper(precise) is not is_wrapper(successor):
            precise = None  # it was sharded since, which nobody can follow
        self._add(Weight(successor, precise, self.shared.touched))

    def forget(self, tensor: Tensor) -> None:
        for known in (self._weights, self.shared.known):
            known.pop(id(tensor), None)

    def export(self, tensor: Tensor, saved: Tensor) -> Tensor:
        """Returns what a state_dict shows for a half tensor, of which it holds `saved`."""
        weight = self.get(tensor)
        shown = weight.export(saved)
        self.shared.any_shown |= weight.shown is not None
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
        tensor, precise = self.tensor, self.tensor.data
        self._given_grad, tensor.grad = tensor.grad, None
        _set_values(tensor, precise.to(dtype))
        self._values.get(tensor).remember(precise)
        if self._given_grad is not None:
            self._cast_grad = tensor.grad = self._given_grad.to(dtype)

    def find(self) -> Tensor:
        """Returns the module's tensor as it is now: `Module.to` replaces buffers by others."""
        module = self._module()
        tensors = {} if module is None else dict(own_tensors(module))
        current = tensors.get(self.name, self.tensor)
        if current is not self.tensor:
            self._values.rename(self.tensor, current)
            self.tensor = current
        return current

    def restore(self) -> None:
        """Casts the tensor back: float32 values where they hold, and the gradient that counts."""
        current = self.find()
        values = self._values.get(current).read().detach()
        grad = self._find_grad(current, values)
        set_grad(current, None)
        _set_values(current, values)
        set_grad(current, grad)
        self._values.forget(current)

    def _find_grad(self, current: Tensor, values: Tensor) -> Tensor | None:
        grad, weight = current.grad, self._values.get(current)
        if grad is not None and grad is self._cast_grad and grad._version == 0:
            return self._given_grad  # nobody touched it
        if weight.master is not None:
            return weight.master.grad
        return None if grad is None else cast_grads([grad], [values])[0]

    def share_grad(self) -> None:
        """Lets a weight that has a master by now hold the gradient from before the cast, unrounded."""
        weight = self._values.get(self.tensor)
        if weight.master is not None and self._given_grad is not None:
            weight.hold_grad(self._given_grad)

    def find_effect(self, dtype: torch.dtype) -> Effect | None:
        """What rounding does to the values, if no step trains them."""
        module = self._module()
        return None if module is None else find_effect(self.name, dict(own_tensors(module)), dtype)

    def describe(self) -> str:
        return f"{self.name!r} of {type(self._module()).__name__}"


class CastModule:
    """The tensors of one module that were cast, and the way back; the module's hooks keep it alive."""

    def __init__(self, module: Module, dtype: torch.dtype | None, values: Float32Values) -> None:
        self._module = weakref.ref(module)
        self._values = values
        self._dtype = dtype
        tensors = (tensor for part in module.modules() for _, tensor in own_tensors(part))
        self._came_half = [tensor for tensor in tensors if tensor.dtype is dtype]
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
        for part in () if module is None else module.modules():
            for name, tensor in own_tensors(part):
                if tensor.dtype is self._dtype and id(tensor) not in came_half:
                    CastTensor(part, name, tensor, self._values).restore()


def list_parts(models: Iterable[Module]) -> list[Module]:
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
