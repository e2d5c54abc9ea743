"""Notes in a run, at each attempt at a step, the largest magnitudes of each layer and its gradients' norm.

Everything stays on the device, and is fetched after some attempts by one host sync.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ampatch.doctor.growth.curves import QUANTITIES
from ampatch.doctor.instruments.clock import MOST_MICRO_STEPS, Clock, Instrument
from ampatch.doctor.instruments.values import plain, quiet, tensors_in
from ampatch.tools.tensors import read_numbers

FETCHED = 50  # attempts that are fetched together
MOST_KEPT = 400  # attempts that are kept, where nobody says how many

Layer = tuple[str, str]  # model, module
Number = tuple[Layer, str, Tensor]  # with the quantity


class Growth(Instrument):
    """Notes every attempt; keeps each `every`th, and those in which a layer overflows for the first time.

    `every` is 0: as many as give curves of 200 to 400 points.
    """

    def __init__(self, clock: Clock, every: int = 0) -> None:
        super().__init__(clock)
        self.every, self._stride = every, max(every, 1)
        self.dtypes: dict[Layer, str] = {}
        self.overflows: defaultdict[Layer, Counter[str]] = defaultdict(Counter)  # by quantity
        self.kept: list[tuple[int, bool, dict[Layer, dict[str, float]]]] = []
        self._numbers: list[Number] = []  # of the present attempt
        self._backward: list[Number] = []  # of its last backward pass
        self._waiting: list[tuple[int, list[Number]]] = []
        self._last: Tensor | None = None  # the output that was noted last
        self._layers: dict[int, tuple[Layer, Module]] = {}  # those that have parameters of their own

    def enter_model(self, model: Module, args: tuple) -> None:
        """Learns which layers there are."""
        if torch.compiler.is_compiling():
            return
        name, root = self.clock.models.place.model, self.clock.models.roots[-1]
        for path, layer in root.named_modules():
            if id(layer) not in self._layers and next(layer.parameters(recurse=False), None) is not None:
                self._layers[id(layer)] = ((name, path), layer)

    def see_output(self, module: Module, output: object) -> None:
        """Notes an output of training, but for one that an inner module gave already."""
        place = self.clock.models.place
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or place is None:
            return
        if self.clock.micro_step >= MOST_MICRO_STEPS:
            return
        with quiet():
            for tensor in noted(tensors_in(output)):
                if tensor is not self._last:
                    self._last = tensor
                    layer = place.model, place.module
                    self.dtypes[layer] = str(tensor.dtype).removeprefix("torch.")
                    self._numbers.append((layer, "output", largest(tensor)))

    def end_backward(self) -> None:
        """Notes the gradients of the first backward passes as they are: multiplied by the loss scale."""
        if self.clock.micro_step >= MOST_MICRO_STEPS:
            return
        self._backward = []
        for name, layer in self._layers.values():
            for tensor in noted(p.grad for p in layer.parameters(recurse=False) if p.grad is not None):
                values = plain(tensor)
                norm = torch.linalg.vector_norm(values, dtype=torch.float32)
                self._backward += [(name, "gradient", largest(values)), (name, "gradient_norm", norm)]

    def end_attempt(self, optimizer: Optimizer) -> None:
        """Notes the weights after the step; fetches what waits where it is much."""
        weights = [
            (name, "weight", largest(weight))
            for name, layer in self._layers.values()
            for weight in noted(layer.parameters(recurse=False))
        ]
        self._waiting.append((self.clock.attempt, [*self._numbers, *self._backward, *weights]))
        self._numbers, self._backward, self._last = [], [], None
        if len(self._waiting) == FETCHED:
            self.fetch()

    # ---- What is kept ----

    def fetch(self) -> None:
        """Brings what waits here, by one host sync."""
        tensors = [tensor for _, numbers in self._waiting for *_, tensor in numbers]
        with quiet():
            values = iter(read_numbers(tensors))
        for attempt, numbers in self._waiting:
            self._keep(attempt, numbers, values)
        self._waiting.clear()

    def _keep(self, attempt: int, numbers: list[Number], values: Iterator[float]) -> None:
        found: dict[Layer, dict[str, float]] = {}
        for layer, quantity, _ in numbers:
            row = found.setdefault(layer, {})
            row[quantity] = combine(row.get(quantity), next(values), quantity)
        is_first = False
        for layer, row in found.items():
            counts = self.overflows[layer]
            for quantity in ("output", "gradient"):
                if not math.isfinite(row.get(quantity, 0.0)):
                    counts[quantity] += 1
                    is_first |= counts[quantity] == 1
        if is_first or attempt % self._stride == 0:
            self.kept.append((attempt, is_first, found))
        if self.every == 0 and len(self.kept) > MOST_KEPT:
            self._stride *= 2
            self.kept = [it for it in self.kept if it[1] or it[0] % self._stride == 0]

    def to_json(self) -> dict[str, object]:
        """Returns the curves of layers, over the attempts that were kept; None for what did not run."""
        self.fetch()
        layers = dict.fromkeys([*self.dtypes, *self.overflows])
        attempts = [attempt for attempt, *_ in self.kept]
        return {"attempts": attempts, "layers": list(map(self._describe, layers))}

    def _describe(self, layer: Layer) -> dict[str, object]:
        model, module = layer
        rows = [found.get(layer, {}) for *_, found in self.kept]
        return {
            "model": model,
            "module": module,
            "dtype": self.dtypes.get(layer),
            "overflows": self.overflows[layer]["output"],
            "gradient_overflows": self.overflows[layer]["gradient"],
            **{name: [row.get(name) for row in rows] for name in QUANTITIES},
        }


def noted(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields those tensors that have numbers which may overflow."""
    return (it for it in tensors if it.is_floating_point() and it.numel() and not it.is_meta)


def largest(tensor: Tensor) -> Tensor:
    """Returns the largest magnitude of a tensor, NaN if it holds one; no host sync."""
    values = plain(tensor)
    return values.abs().amax() if values.numel() else values.new_zeros(())


def combine(one: float | None, other: float, quantity: str) -> float:
    """Returns the larger of two magnitudes, or the norm of both; NaN stays."""
    if one is None or one != one or other != other:
        return other if one is None or one == one else one
    return math.hypot(one, other) if quantity == "gradient_norm" else max(one, other)
