"""What one call costs: a listed op, an op in no table, and entering a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampatch import testing
from benchmarks import opening, update
from benchmarks.comparison import Comparison
from benchmarks.options import Options
from benchmarks.series import Open, Series, Step
from benchmarks.setting import Setting

CALLS = range(1000)  # in one step: what surrounds them is less than a hundredth of one
MICROSECONDS = 1e3  # in a millisecond
WIDTH = 8

# By half type: the level that patches, and the one that casts the model.
PATCHED = {torch.bfloat16: "O4", torch.float16: "O1"}
CAST = {torch.bfloat16: "O5", torch.float16: "O2"}


class Linears(nn.Module):
    """One small product, many times over with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        """Calls it as scripts do, by its name in torch."""
        weight, bias = self.weight, self.bias
        for _ in CALLS:
            outputs = F.linear(inputs, weight, bias)
        return outputs


class Empty(nn.Module):
    """A model that does nothing."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns what it is given."""
        return inputs


def call_relu(inputs: Tensor) -> None:
    """Calls an op that has one argument."""
    for _ in CALLS:
        F.relu(inputs)


def call_add(inputs: Tensor) -> None:
    """Calls an op that has two."""
    for _ in CALLS:
        torch.add(inputs, inputs)


LINEAR, HALF_LINEAR = "F.linear, float32 input", "F.linear, half input"
UNLISTED = {"F.relu": call_relu, "torch.add": call_add}


def measure(options: Options) -> Iterator[Comparison]:
    """Yields the comparisons of calls for each setting, and of whole models for each number of threads."""
    for setting in options.settings:
        yield from compare_linears(options, setting)
        yield from compare_unlisted(options, setting)
        yield compare_entering(options, setting)
    for threads in options.threads:
        # A dynamic loss scale is float16's. The arithmetic is float32's: nothing here is slow on a CPU.
        setting = Setting(options.device, torch.float16, threads)
        yield from update.measure(options, setting)
        yield from opening.measure(options, setting)


def compare_linears(options: Options, setting: Setting) -> Iterator[Comparison]:
    """Yields the microseconds of one product, whole and less those of half operands by hand.

    The casts of the weights are cached. That of the input is not, and counts as added.
    """
    level = PATCHED[setting.half]
    for subject, dtype in ((LINEAR, torch.float32), (HALF_LINEAR, setting.half)):
        inputs = make_activation(dtype, setting)
        contenders: dict[str, Open] = {
            "by hand": partial(open_by_hand, setting),
            "autocast": partial(open_autocast, Linears, inputs, setting),
            level: partial(open_level, Linears, inputs, level),
        }
        series = _time_calls(options, contenders, setting)
        whole = Comparison("micro", subject, "whole", "us", setting, series, ("by hand", "autocast"))
        yield whole
        yield whole.less("by hand", "added")


def compare_unlisted(options: Options, setting: Setting) -> Iterator[Comparison]:
    """Yields the microseconds of ops that are in no table, with torch patched and not."""
    level = PATCHED[setting.half]
    inputs = torch.randn(WIDTH, WIDTH, device=setting.device)
    for name, call in UNLISTED.items():
        contenders: dict[str, Open] = {
            "unpatched": partial(open_unlisted, call, inputs, None),
            level: partial(open_unlisted, call, inputs, level),
        }
        series = _time_calls(options, contenders, setting)
        yield Comparison("micro", name, "whole", "us", setting, series, ("unpatched",))


def compare_entering(options: Options, setting: Setting) -> Comparison:
    """Compares the microseconds of a model's whole forward that does nothing."""
    levels = (PATCHED[setting.half], CAST[setting.half])
    inputs = torch.randn(WIDTH, WIDTH, device=setting.device)
    contenders: dict[str, Open] = {
        "float32": partial(open_level, Empty, inputs, None),
        "autocast": partial(open_autocast, Empty, inputs, setting),
        **{level: partial(open_level, Empty, inputs, level) for level in levels},
    }
    times = options.time(contenders, setting)
    series = {name: one.scale(MICROSECONDS) for name, one in times.items()}
    return Comparison("micro", "empty model", "forward", "us", setting, series, ("autocast",))


def _time_calls(options: Options, contenders: dict[str, Open], setting: Setting) -> dict[str, Series]:
    times = options.time(contenders, setting)
    return {name: one.scale(MICROSECONDS / len(CALLS)) for name, one in times.items()}


def make_activation(dtype: torch.dtype, setting: Setting) -> Tensor:
    """A small batch that is no leaf: casts of leaves are cached by `torch.autocast`."""
    leaf = torch.randn(WIDTH, WIDTH, device=setting.device).to(dtype).requires_grad_()
    return leaf.clone()


@contextmanager
def open_by_hand(setting: Setting) -> Iterator[Step]:
    """Yields the products of half operands, the weights cast once a step."""
    model, inputs = Linears().to(setting.device), make_activation(setting.half, setting)

    def step() -> None:
        casts = {name: param.to(setting.half) for name, param in model.named_parameters()}
        torch.func.functional_call(model, casts, (inputs,))

    yield step


@contextmanager
def open_autocast(make_model: Callable[[], nn.Module], inputs: Tensor, setting: Setting) -> Iterator[Step]:
    """Yields the forward of a model with `torch.autocast` around it."""
    model = make_model().to(setting.device)

    def step() -> None:
        with torch.autocast(setting.device, setting.half):
            model(inputs)

    yield step


@contextmanager
def open_level(make_model: Callable[[], nn.Module], inputs: Tensor, level: str | None) -> Iterator[Step]:
    """Yields the forward of a model at a level, or of a plain one."""
    model = make_model().to(inputs.device)
    with nullcontext() if level is None else testing.session(level, model):
        yield partial(model, inputs)


@contextmanager
def open_unlisted(call: Callable[[Tensor], None], inputs: Tensor, level: str | None) -> Iterator[Step]:
    """Yields the calls of an op, outside of a model."""
    model = nn.Linear(WIDTH, WIDTH).to(inputs.device)
    with nullcontext() if level is None else testing.session(level, model):
        yield partial(call, inputs)
