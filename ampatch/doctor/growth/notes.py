"""Notes in a run, at each attempt at a step, the largest magnitudes of each layer and its gradients' norm.

Everything stays on the device, and is fetched after some attempts by one host sync.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer

from ampatch.doctor.growth.curves import GRADIENT, NORM, OUTPUT, QUANTITIES, WEIGHT
from ampatch.doctor.instruments.clock import Listener, listen
from ampatch.doctor.instruments.places import Models
from ampatch.doctor.instruments.values import plain, quiet, tensors_in
from ampatch.tools.tensors import read_numbers

FETCHED = 50  # attempts that are fetched together
MOST_KEPT = 400  # attempts that are kept, where nobody says how many

Number = tuple[str, str, int, Tensor]  # model, module, quantity


@dataclass
class Growth(Listener):
    """Notes every attempt; keeps each `every`th, and those in which a layer overflows for the first time.

    `every` is 0: as many as give curves of 200 to 400 points.
    """

    every: int = 0
    dtypes: dict[tuple[str, str], str] = field(default_factory=dict)
    overflows: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    kept: list[tuple[int, bool, dict[tuple[str, str], list[float | None]]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._models, self._stride, self._attempt = Models(), max(self.every, 1), 0
        self._numbers: list[Number] = []  # of the present attempt
        self._backward: list[Number] = []  # of its last backward pass
        self._waiting: list[tuple[int, list[Number]]] = []
        self._last: Tensor | None = None  # the output that was noted last
        self._layers: dict[int, tuple[str, str, Module]] = {}  # those that have parameters of their own

    def listen(self, undo: ExitStack) -> None:
        """Listens until undone, then fetches what waits."""
        undo.callback(self._fetch)
        undo.callback(register_module_forward_hook(self._look_at_output).remove)
        listen(self, undo)

    def enter_module(self, module: Module, args: tuple) -> None:
        """Learns which layers there are."""
        if torch.compiler.is_compiling() or not self._models.enter(module):
            return
        name, root = self._models.place.model, self._models.roots[-1]
        for path, layer in root.named_modules():
            if id(layer) not in self._layers and next(layer.parameters(recurse=False), None) is not None:
                self._layers[id(layer)] = (name, path, layer)

    def leave_module(self, module: Module) -> None:
        """Follows the modules."""
        if not torch.compiler.is_compiling():
            self._models.leave()

    def _look_at_output(self, module: Module, args: tuple, output: object) -> None:
        """A hook: notes an output of training, but for one that an inner module gave already."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        place = self._models.place
        with quiet():
            for tensor in noted(tensors_in(output)) if place is not None else ():
                if tensor is self._last:
                    continue
                self._last = tensor
                self.dtypes[place.model, place.module] = str(tensor.dtype).removeprefix("torch.")
                self._numbers.append((place.model, place.module, OUTPUT, largest(tensor)))

    def end_backward(self) -> None:
        """Notes the gradients as they are, which is multiplied by the loss scale."""
        self._models.forget_calls()
        self._backward = []
        with quiet():
            for name, path, layer in self._layers.values():
                for tensor in noted(p.grad for p in layer.parameters(recurse=False) if p.grad is not None):
                    values = plain(tensor)
                    norm = torch.linalg.vector_norm(values, dtype=torch.float32)
                    self._backward += [(name, path, GRADIENT, largest(values)), (name, path, NORM, norm)]

    def end_attempt(self, optimizer: Optimizer) -> None:
        """Notes the weights after the step; fetches what waits where it is much."""
        with quiet():
            weights = [
                (name, path, WEIGHT, largest(weight))
                for name, path, layer in self._layers.values()
                for weight in noted(layer.parameters(recurse=False))
            ]
        self._waiting.append((self._attempt, [*self._numbers, *self._backward, *weights]))
        self._numbers, self._backward, self._last = [], [], None
        self._attempt += 1
        if len(self._waiting) == FETCHED:
            self._fetch()

    # ---- What is kept ----

    def _fetch(self) -> None:
        """Brings what waits here, by one host sync."""
        tensors = [number[3] for _, numbers in self._waiting for number in numbers]
        with quiet():
            values = iter(read_numbers(tensors))
        for attempt, numbers in self._waiting:
            self._keep(attempt, numbers, values)
        self._waiting.clear()

    def _keep(self, attempt: int, numbers: list[Number], values: Iterator[float]) -> None:
        found: dict[tuple[str, str], list[float | None]] = {}
        for model, module, quantity, _ in numbers:
            row = found.setdefault((model, module), [None] * len(QUANTITIES))
            row[quantity] = combine(row[quantity], next(values), quantity)
        is_first = False
        for layer, row in found.items():
            counts = self.overflows.setdefault(layer, [0, 0])
            for quantity in (OUTPUT, GRADIENT):
                if row[quantity] is not None and not math.isfinite(row[quantity]):
                    counts[quantity] += 1
                    is_first |= counts[quantity] == 1
        if is_first or attempt % self._stride == 0:
            self.kept.append((attempt, is_first, found))
        if self.every == 0 and len(self.kept) > MOST_KEPT:
            self._stride *= 2
            self.kept = [it for it in self.kept if it[1] or it[0] % self._stride == 0]

    def to_json(self) -> dict[str, object]:
        """Returns what was noted: a row of numbers for each layer and attempt, None for what did not run."""
        layers = list(dict.fromkeys([*self.dtypes, *self.overflows]))
        none = [None] * len(QUANTITIES)
        return {
            "layers": layers,
            "dtypes": [self.dtypes.get(layer) for layer in layers],
            "overflows": [self.overflows.get(layer, [0, 0]) for layer in layers],
            "attempts": [attempt for attempt, _, _ in self.kept],
            "rows": [[found.get(layer, none) for layer in layers] for _, _, found in self.kept],
        }


def noted(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields those tensors that have numbers which may overflow."""
    return (it for it in tensors if it.is_floating_point() and it.numel() and not it.is_meta)


def largest(tensor: Tensor) -> Tensor:
    """Returns the largest magnitude of a tensor, NaN if it holds one; no host sync."""
    values = plain(tensor)
    return values.abs().amax() if values.numel() else values.new_zeros(())


def combine(one: float | None, other: float, quantity: int) -> float:
    """Returns the larger of two magnitudes, or the norm of both; NaN stays."""
    if one is None or one != one or other != other:
        return other if one is None or one == one else one
    return math.hypot(one, other) if quantity == NORM else max(one, other)
