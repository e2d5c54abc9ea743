"""What follows backward, for many small parameters: unscale, check, step, and copy of the masters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import ampatch as amp
from ampatch import testing
from benchmarks.comparison import Comparison
from benchmarks.options import Options
from benchmarks.series import Open, Step
from benchmarks.setting import Setting

COUNT, SIZE = 1000, 64
SUBJECT = f"update of {COUNT:,} parameters"
LEVELS = ("O1", "O2")

OPTIMIZERS: dict[str, Callable[[Sequence[Tensor]], Optimizer]] = {
    "AdamW, fused": partial(AdamW, lr=1e-4, fused=True),
    "AdamW, foreach": partial(AdamW, lr=1e-4, foreach=True),
    "AdamW, plain": partial(AdamW, lr=1e-4, foreach=False, fused=False),
    "SGD, foreach": partial(SGD, lr=1e-4, momentum=0.9, foreach=True),
}


class Small(nn.Module):
    """Many small parameters."""

    def __init__(self, device: str) -> None:
        super().__init__()
        tensors = torch.randn(COUNT, SIZE, device=device)
        self.params = nn.ParameterList(nn.Parameter(tensor.clone()) for tensor in tensors)


@dataclass(frozen=True, slots=True)
class Grads:
    """Scaled gradients that are handed to parameters as a backward would, but at a cost that is known."""

    source: list[Tensor]
    handed: list[Tensor]

    @classmethod
    def make(cls, params: Sequence[Tensor]) -> Grads:
        """Makes some of the parameters' own types."""
        torch.manual_seed(0)
        source = [torch.randn_like(param, requires_grad=False) for param in params]
        return cls(source, [tensor.clone() for tensor in source])

    def hand_over(self, params: Sequence[Tensor]) -> None:
        """Assigns them, the same values each time: unscaling works in place."""
        torch._foreach_copy_(self.handed, self.source)
        for param, grad in zip(params, self.handed, strict=True):
            param.grad = grad


def measure(options: Options, setting: Setting) -> Iterator[Comparison]:
    """Yields the milliseconds of an update with each optimizer, less those of handing gradients over."""
    for name, make_optimizer in OPTIMIZERS.items():
        contenders: dict[str, Open] = {
            "hand over": partial(open_hand_over, setting, torch.float32),
            "hand over half": partial(open_hand_over, setting, setting.half),
            "GradScaler": partial(open_grad_scaler, make_optimizer, setting),
            **{level: partial(open_level, make_optimizer, setting, level) for level in LEVELS},
        }
        times = options.time(contenders, setting)
        # At O2 the parameters are half, and so are the gradients.
        common = {"O2": "hand over half"}
        series = {
            key: times[key].subtract(times[common.get(key, "hand over")]) for key in ("GradScaler", *LEVELS)
        }
        yield Comparison("micro", SUBJECT, name, "ms", setting, series, ("GradScaler",), are_differences=True)


@contextmanager
def open_hand_over(setting: Setting, dtype: torch.dtype) -> Iterator[Step]:
    """Yields what all of them share: gradients come and go."""
    params = list(Small(setting.device).to(dtype).parameters())
    grads = Grads.make(params)

    def step() -> None:
        grads.hand_over(params)
        for param in params:
            param.grad = None

    yield step


@contextmanager
def open_grad_scaler(make_optimizer: Callable[..., Optimizer], setting: Setting) -> Iterator[Step]:
    """Yields the update with torch's own scaler."""
    params = list(Small(setting.device).parameters())
    optimizer, scaler = make_optimizer(params), torch.amp.GradScaler(setting.device)
    grads, loss = Grads.make(params), torch.ones((), device=setting.device)

    def step() -> None:
        scaler.scale(loss)
        grads.hand_over(params)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    yield step


@contextmanager
def open_level(make_optimizer: Callable[..., Optimizer], setting: Setting, level: str) -> Iterator[Step]:
    """Yields the update at a level."""
    model = Small(setting.device)
    optimizer = make_optimizer(list(model.parameters()))
    with testing.session(level, model, optimizer):
        params = list(model.parameters())
        grads, loss = Grads.make(params), torch.ones((), device=setting.device)

        def step() -> None:
            with amp.scale_loss(loss, optimizer):
                grads.hand_over(params)
            optimizer.step()
            optimizer.zero_grad()

        yield step
