"""Takes one attempt at a step, in half and in float32: what gradients arrive at parameters.

The first run saves weights, buffers and random state where a model is entered for the first time in the
attempt, and the second reads them at the same place: so both can be compared number by number.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F
from torch.optim import Optimizer

from ampatch.doctor.instruments.clock import Clock, Instrument
from ampatch.doctor.instruments.places import device_of, user_line
from ampatch.doctor.instruments.tape import Enough
from ampatch.doctor.instruments.values import drop_alike, floating_in, plain, quiet, random_of, set_random

SAMPLES = 2**16  # numbers of a tensor, at most
FILES = ("first.pt", "second.pt")

Key = tuple[str, str]  # model and parameter


class Sample(Instrument):
    """Takes an attempt into a folder; the second run there repeats that of the first."""

    def __init__(self, clock: Clock, folder: str, attempt: int, ends: bool) -> None:
        super().__init__(clock)
        self._folder, self._wanted, self._ends = Path(folder), attempt, ends
        self._repeats = (self._folder / FILES[0]).exists()
        self._entered: set[int] = set()
        self._loss: float | None = None  # of the first backward pass
        self._scale, self._where = 1.0, None
        self.tensors: dict[Key, Tensor] = {}
        self._clean: set[int] = set()  # ids of parameters without gradients before the backward pass
        self._largest: list[Tensor] = []  # of gradients
        self._device = torch.device("cpu")  # of the model
        self._random: dict[str, Tensor] = {}  # as it is if nothing else than dropout draws
        self._is_drawn = False
        clock.wrap(F, "dropout", self._drop)
        clock.undo.callback(self._save)

    def _drop(self, dropout: Callable[..., Tensor], *args, **kwargs) -> Tensor:
        if not self._is_now:
            return dropout(*args, **kwargs)
        self._look_at_draws()
        result = drop_alike(dropout, *args, **kwargs)
        self._random = random_of(self._device)
        return result

    def _look_at_draws(self) -> None:
        """Notes whether others have drawn: on a GPU what they get depends on the type."""
        now = random_of(self._device)
        gpus = self._random.keys() & now.keys() - {"cpu"}
        self._is_drawn |= not all(torch.equal(self._random[gpu], now[gpu]) for gpu in gpus)

    @property
    def _is_now(self) -> bool:
        return self.clock.attempt == self._wanted

    def enter_model(self, model: Module, args: tuple) -> None:
        """Saves or reads the weights of a model, of half ones the masters."""
        if not self._is_now or id(model) in self._entered:
            return
        file = self._folder / f"weights-{len(self._entered)}.pt"
        self._entered.add(id(model))
        self._device = device_of(model)
        with quiet():
            held = dict([*model.named_parameters(), *model.named_buffers()])
            if not self._repeats:
                masters = {name: it for name, it in model.state_dict().items() if name in held}
                torch.save((held | masters, random_of(self._device)), file)
            elif file.exists():
                values, states = torch.load(file, weights_only=True)
                for name in held.keys() & values.keys():
                    held[name].copy_(values[name])
                set_random(states)
        self._random = random_of(self._device)

    def see_output(self, module: Module, output: object) -> None:
        """Looks at the gradient of an output when it comes."""
        if self._is_now and self.clock.models.is_inside and torch.is_grad_enabled():
            for tensor in floating_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._look_at_gradient)

    def _look_at_gradient(self, gradient: Tensor) -> None:
        with quiet():
            if gradient.numel():
                self._largest.append(plain(gradient).abs().amax())

    def begin_backward(self, losses: tuple[Tensor, ...]) -> None:
        """Notes the loss, and its scale."""
        held = self.clock.models.parameters() if self._is_now else ()  # a host sync for each
        self._clean = {id(it) for it in held if it.grad is None or not plain(it.grad).any()}
        if self._is_now and self._loss is None:
            self._loss = sum(loss.detach().sum().item() for loss in losses)
            self._scale, self._where = self.clock.get_scale(), user_line()
            self._look_at_draws()
            self._device = torch.device("cpu")  # a checkpoint draws again in the backward

    def end_backward(self) -> None:
        """Takes the gradients of parameters, the last layer's first."""
        changed = self._clean.intersection(map(id, self.clock.changed))
        for model, name, parameter in reversed(list(self.clock.models.named_parameters())):
            if id(parameter) in changed:
                self.tensors.setdefault((model, name), thin(parameter.grad))
                self._look_at_gradient(parameter.grad)

    def end_attempt(self, optimizer: Optimizer) -> None:
        if self._ends and self.clock.attempt >= self._wanted:
            raise Enough

    def _save(self) -> None:
        if self.tensors:
            kept = {"attempt": self._wanted, "loss": (self._loss or 0.0) / self._scale, "scale": self._scale}
            kept |= {"where": self._where, "tensors": self.tensors, "is_drawn": self._is_drawn}
            kept |= {"largest": max((it.item() for it in self._largest), default=0.0)}
            torch.save(kept, self._folder / FILES[self._repeats])


def thin(tensor: Tensor) -> Tensor:
    """Returns a tensor's numbers on the processor, of a large one some at equal distances."""
    values = plain(tensor).flatten()
    return values[:: -(-values.numel() // SAMPLES) | 1].cpu().clone()  # an odd stride meets all columns


def read_samples(folder: str) -> list[dict]:
    """Returns what the runs have written, which are two where the step came again."""
    files = [Path(folder, name) for name in FILES]
    return [torch.load(file, weights_only=True) for file in files if file.exists()]
