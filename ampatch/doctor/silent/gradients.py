"""Gradients that underflow: seen in half, and compared with those of the same step in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F
from torch.optim import Optimizer

import ampatch as amp
from ampatch.doctor.finding import Finding
from ampatch.doctor.fixes import LARGEST_SCALE
from ampatch.doctor.instruments.clock import Clock, Instrument
from ampatch.doctor.instruments.places import device_of, user_line
from ampatch.doctor.instruments.tape import Enough
from ampatch.doctor.instruments.values import drop_alike, floating_in, plain, quiet, random_of, set_random
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.suspects import is_sample

SMALLEST = 2.0**-24  # of float16, a subnormal; half of it rounds to 0
NORMAL = 2.0**-14  # the smallest that float16 holds with all of its digits
LARGEST = 65504.0
SUSPECT = 0.05  # of a gradient is subnormal
LOST = 0.1  # of a gradient is zero or far off, and is not in float32
COARSE = 0.25  # of what float32 has is far off
NOISE = 1e-7  # times the largest gradient of the model: what float32 rounds
SAME_LOSS = 0.05
NEAR = 0.8  # of the worst is as good: an early attempt costs less


class Ranges(Instrument, amp.Observer):
    """Notes at sampled attempts how much of each gradient float16 holds badly; costs a host sync each."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._uses_float16 = False
        self.shares: dict[int, float] = {}  # by attempt: of the parameter that is worst off
        clock.undo.enter_context(amp.observe(self))

    def on_initialize(self, policy: amp.Policy) -> None:
        self._uses_float16 |= policy.half is torch.float16

    def enter_model(self, model: Module, args: tuple) -> None:
        """Learns whether a model runs in float16."""
        parameter = next(model.parameters())
        device = parameter.device.type
        casts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.float16
        self._uses_float16 |= casts or parameter.dtype is torch.float16

    def end_backward(self) -> None:
        """Looks at the gradients of the first backward pass of an attempt: later ones add to them."""
        attempt = self.clock.attempt
        grads = [parameter.grad for parameter in self.clock.changed if parameter.grad.numel()]
        if self._uses_float16 and is_sample(attempt) and attempt not in self.shares and grads:
            self.shares[attempt] = torch.stack([share_of_bad(plain(grad)) for grad in grads]).max().item()


def share_of_bad(grad: Tensor) -> Tensor:
    """Returns the share of subnormals, or 1 if all are zeros; 0 where the gradient never was in float16."""
    values = grad.float().abs()
    # Under autocast weights are float32, and their gradients have no more digits than float16.
    is_half = (values.half().float() == values).float().mean() > 0.9
    share = ((values < NORMAL) & (values > 0)).float().mean()
    return torch.where(values.any(), share * is_half, torch.ones_like(share))


# ---- The comparison ----


def pick_sample(shares: Mapping[int, float], attempts: Sequence[Attempt]) -> int | None:
    """Returns the attempt whose gradients are to be compared with float32, the first of the worst."""
    shares = {
        attempt: share
        for attempt, share in shares.items()
        if share >= SUSPECT and attempt < len(attempts) and attempts[attempt].is_finite
    }
    most = max(shares.values(), default=0.0)
    return next((attempt for attempt, share in shares.items() if share >= NEAR * most), None)


def compare_gradients(folder: str, attempt: int) -> tuple[list[Finding], str]:
    """Returns the parameters whose gradients underflow, and what is not known."""
    samples = read_samples(folder)
    if len(samples) < len(FILES):
        return [], "whether gradients underflow: the step did not come again"
    half, full = samples
    if not abs(half["loss"] - full["loss"]) <= SAME_LOSS * abs(full["loss"]) + SMALLEST:
        return [], "whether gradients underflow: in float32 the step has another loss"
    if half["is_drawn"] or full["is_drawn"]:
        drawn = "random numbers on a GPU depend on the type, and others than F.dropout draw some"
        return [], f"whether gradients underflow: {drawn}"
    ours, theirs = (
        {key: tensor.float() for key, tensor in one["tensors"].items() if tensor.numel()} for one in samples
    )
    most = max((grad.abs().max().item() for grad in theirs.values()), default=0.0)
    faults = []
    for key, grad in theirs.items():
        if key in ours and grad.shape == ours[key].shape:
            numbers = measure(ours[key], grad, half["scale"], most)
            if numbers["share"] >= LOST:
                numbers |= {"init_scale": best_scale(full["largest"])}
                model, name = key
                site = (attempt, "backward", model, name.rpartition(".")[0], "backward", half["where"], name)
                faults.append(Finding("underflow", *site, facts=numbers))
    return faults, ""


def measure(half: Tensor, full: Tensor, scale: float, most: float) -> dict[str, object]:
    """Compares a gradient, which is scaled, with that of float32, which is not."""
    counts, small = full.abs() > NOISE * most, half.abs() < NORMAL
    lost = counts & (half == 0)
    coarse = counts & small & ~lost & ((half / scale - full).abs() > COARSE * full.abs())
    shares = {
        "share": lost | coarse,
        "lost": lost,
        "zeros": half == 0,
        "subnormals": small & (half != 0),
        "zeros_in_float32": full == 0,
    }
    numbers: dict[str, object] = {name: mask.float().mean().item() for name, mask in shares.items()}
    below = {f"2**{power}": share_below(full, power) for power in range(0, LARGEST_SCALE + 1, 4)}
    return numbers | {"scale": scale, "underflow_at_scale": below}


def share_below(grad: Tensor, power: int) -> float:
    """Returns the share of a float32 gradient that float16 makes zeros of at a scale of 2**power."""
    exponents = torch.frexp(grad[grad != 0].abs())[1]  # |g| < 2**exponent
    return (exponents + power <= -25).float().sum().item() / grad.numel()


def best_scale(largest: float) -> float:
    """Returns the largest power of two at which nothing overflows: none that is smaller loses less."""
    return 2.0 ** min(LARGEST_SCALE, math.floor(math.log2(LARGEST / largest))) if largest else 1.0


# ---- One attempt, taken in half and in float32 ----


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
                masters = {name: value for name, value in model.state_dict().items() if name in held}
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
        self._clean = {
            id(parameter) for parameter in held if parameter.grad is None or not plain(parameter.grad).any()
        }
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
            kept |= {"largest": max((largest.item() for largest in self._largest), default=0.0)}
            torch.save(kept, self._folder / FILES[self._repeats])


def thin(tensor: Tensor) -> Tensor:
    """Returns a tensor's numbers on the processor, of a large one some at equal distances."""
    values = plain(tensor).flatten()
    return values[:: -(-values.numel() // SAMPLES) | 1].cpu().clone()  # an odd stride meets all columns


def read_samples(folder: str) -> list[dict]:
    """Returns what the runs have written, which are two where the step came again."""
    files = [Path(folder, name) for name in FILES]
    return [torch.load(file, weights_only=True) for file in files if file.exists()]
