"""Gradients that underflow: seen in half, and compared with those of the same step in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.nn import functional as F
from torch.optim import Optimizer

import ampatch as amp
from ampatch.doctor.instruments.clock import Clock, Instrument
from ampatch.doctor.instruments.operations import Enough
from ampatch.doctor.instruments.places import Models, device_of, user_line
from ampatch.doctor.instruments.values import drop_alike, floating_in, plain, quiet, random_of, set_random
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.silent.fault import SilentFault

SMALLEST = 2.0**-24  # of float16, a subnormal; half of it rounds to 0
NORMAL = 2.0**-14  # the smallest that float16 holds with all of its digits
LARGEST = 65504.0
LARGEST_SCALE = 24  # as a power of two
SUSPECT = 0.05  # of a gradient is subnormal
LOST = 0.1  # of a gradient is zero or far off, and is not in float32
COARSE = 0.25  # of what float32 has is far off
NOISE = 1e-7  # times the largest gradient of the model: what float32 rounds
SAME_LOSS = 0.05
NEAR = 0.8  # of the worst is as good: an early attempt costs less


def is_sample(attempt: int) -> bool:
    """Says whether the gradients of an attempt are looked at: all at first, and then ever fewer.

    >>> [attempt for attempt in range(40) if is_sample(attempt)]
    [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    """
    while attempt > 3 and attempt % 2 == 0:
        attempt //= 2
    return attempt <= 3


class Ranges(Instrument, amp.Observer):
    """Notes at sampled attempts how much of each gradient float16 holds badly; costs a host sync each."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._is_done, self._is_now = False, False
        self._uses_float16 = False
        self._clean: set[int] = set()  # ids of parameters without gradients before the backward pass
        self.shares: dict[int, float] = {}  # by attempt: of the parameter that is worst off
        clock.undo.enter_context(amp.observe(self))

    def on_initialize(self, policy: amp.Policy) -> None:
        """Learns of the levels that are in use."""
        self._uses_float16 |= policy.half is torch.float16

    def enter_model(self, model: Module, args: tuple) -> None:
        """Learns whether a model runs in float16."""
        parameter = next(model.parameters())
        device = parameter.device.type
        casts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.float16
        self._uses_float16 |= casts or parameter.dtype is torch.float16

    def begin_backward(self, losses: tuple[Tensor, ...]) -> None:
        """Learns which gradients there are already."""
        self._is_now = self._uses_float16 and not self._is_done and is_sample(self.clock.attempt)
        self._clean = clean_in(self.clock.models) if self._is_now else set()

    def end_backward(self) -> None:
        """Looks at the gradients of the first backward pass of an attempt: later ones add to them."""
        if not self._is_now:
            return
        self._is_done = True
        grads = [it.grad for it in self.clock.changed if id(it) in self._clean and it.grad.numel()]
        if grads:
            shares = torch.stack([share_of_bad(plain(it)) for it in grads])
            self.shares[self.clock.attempt] = max(shares.tolist())

    def end_attempt(self, optimizer: Optimizer) -> None:
        """The next attempt is looked at again."""
        self._is_done = False

    def to_json(self) -> list[tuple[int, float]]:
        """Returns the attempts that are worth a comparison with float32, with their shares."""
        return [(attempt, share) for attempt, share in self.shares.items() if share >= SUSPECT]


def share_of_bad(grad: Tensor) -> Tensor:
    """Returns the share of subnormals, or 1 if all are zeros; 0 where the gradient never was in float16."""
    values = grad.float().abs()
    # Under autocast weights are float32, and their gradients have no more digits than float16.
    is_half = (values.half().float() == values).float().mean() > 0.9
    share = ((values < NORMAL) & (values > 0)).float().mean()
    return torch.where(values.any(), share * is_half, torch.ones_like(share))


class Sample(Instrument):
    """Saves the weights and the gradients of one attempt, or repeats it from these weights.

    Weights, buffers and random state are saved when a model is entered for the first time in the attempt,
    and read by the run in float32 at the same place, so that the step is the same.
    """

    def __init__(self, clock: Clock, folder: str, attempt: int, repeats: bool) -> None:
        super().__init__(clock)
        self._folder, self._wanted, self._repeats = Path(folder), attempt, repeats
        self._entered: set[int] = set()
        self._loss, self._scale, self._where = math.nan, 1.0, None
        self._grads: dict[str | None, Tensor] = {}
        self._clean: set[int] = set()  # ids of parameters without gradients before the backward pass
        self._largest: list[Tensor] = []  # gradients of activations
        self._device = torch.device("cpu")  # of the model
        self._random: dict[str, Tensor] = {}  # as it is if nothing else than dropout draws
        self._is_drawn = False
        clock.wrap(F, "dropout", self._drop)

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
        """Saves or reads the weights of a model."""
        if not self._is_now or id(model) in self._entered:
            return
        file = self._folder / f"weights-{len(self._entered)}.pt"
        self._entered.add(id(model))
        self._device = device_of(model)
        with quiet():
            if not self._repeats:
                values = {name: value.detach().clone() for name, value in named(model)}
                torch.save((values, random_of(self._device)), file)
            elif file.exists():
                values, states = torch.load(file, weights_only=True)
                for name, value in named(model):
                    if name in values:
                        value.copy_(values[name])
                set_random(states)
        self._random = random_of(self._device)

    def see_output(self, module: Module, output: object) -> None:
        """Has the largest gradient of an activation noted."""
        for tensor in floating_in(output) if self._is_now and self._repeats and not self._grads else ():
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: self._largest.append(plain(grad).abs().amax()))

    def see_scale(self, scaler: GradScaler | amp.LossScaler) -> None:
        """Notes the scale of ours; that of torch is asked at the attempt."""
        if isinstance(scaler, amp.LossScaler) and self._is_now and not self._grads:
            self._scale = scaler.get_scale()

    def begin_backward(self, losses: tuple[Tensor, ...]) -> None:
        """Notes the loss."""
        self._clean = clean_in(self.clock.models) if self._is_now and not self._grads else set()
        if self._is_now and not self._grads:
            self._loss, self._where = sum(loss.detach().sum().item() for loss in losses), user_line()
            self._look_at_draws()
            self._device = torch.device("cpu")  # a checkpoint draws again in the backward

    def end_backward(self) -> None:
        """Keeps the gradients of the first backward pass of the attempt."""
        for parameter in (it for it in self.clock.changed if id(it) in self._clean):
            self._grads[self.clock.models.name_of(parameter)] = plain(parameter.grad).float().cpu().clone()

    def begin_attempt(self, optimizer: Optimizer, scaler: GradScaler | None) -> None:
        """Notes the scale of torch's scaler."""
        if self._is_now and scaler is not None and scaler.is_enabled():
            self._scale = scaler.get_scale()

    def end_attempt(self, optimizer: Optimizer) -> None:
        """Writes the gradients."""
        if self._is_now and self._grads:
            largest = max((it.item() for it in self._largest), default=0.0)
            kept = {"loss": self._loss / self._scale, "scale": self._scale, "where": self._where}
            kept |= {"grads": self._grads, "largest": largest, "is_drawn": self._is_drawn}
            torch.save(kept, self._folder / ("float32.pt" if self._repeats else "half.pt"))
        if self._repeats and self.clock.attempt >= self._wanted:
            raise Enough


def clean_in(models: Models) -> set[int]:
    """Returns the ids of parameters that have no gradient as yet, or one of zeros; a host sync for each."""
    return {id(it) for it in models.parameters() if it.grad is None or not plain(it.grad).any()}


def named(module: Module) -> list[tuple[str, Tensor]]:
    """Returns the parameters and buffers of a module, by name."""
    return [*module.named_parameters(), *module.named_buffers()]


# ---- The comparison ----


def pick_sample(seen: Sequence[Mapping], attempts: Sequence[Attempt]) -> int | None:
    """Returns the attempt whose gradients are to be compared with float32, the first of the worst."""
    shares = {
        attempt: share
        for attempt, share in (seen[0]["ranges"] if seen else ())
        if attempt < len(attempts) and attempts[attempt].is_finite
    }
    most = max(shares.values(), default=0.0)
    return next((attempt for attempt, share in shares.items() if share >= NEAR * most), None)


def compare_gradients(folder: Path, attempt: int) -> tuple[list[dict[str, object]], str]:
    """Returns the parameters whose gradients underflow, as a run leaves faults, and what is not known."""
    files = [folder / "half.pt", folder / "float32.pt"]
    if not all(file.exists() for file in files):
        return [], "whether gradients underflow: the step did not come again"
    half, full = (torch.load(file, weights_only=True) for file in files)
    if not abs(half["loss"] - full["loss"]) <= SAME_LOSS * abs(full["loss"]) + SMALLEST:
        return [], "whether gradients underflow: in float32 the step has another loss"
    if half["is_drawn"] or full["is_drawn"]:
        drawn = "random numbers on a GPU depend on the type, and others than F.dropout draw some"
        return [], f"whether gradients underflow: {drawn}"
    grads: Mapping[str, Tensor] = full["grads"]
    most = max((grad.abs().max().item() for grad in grads.values() if grad.numel()), default=0.0)
    scale = best_scale(grads, most, max(most, full["largest"]))
    found = []
    for name, grad in grads.items():
        if name in half["grads"] and grad.shape == half["grads"][name].shape and grad.numel():
            numbers = measure(half["grads"][name], grad, half["scale"], most)
            if numbers["share"] >= LOST:
                numbers |= {"init_scale": scale}
                layer, where = name.rpartition(".")[0], half["where"]
                fault = (attempt, "backward", None, layer, name, "backward", where, numbers, (attempt,))
                found.append(asdict(SilentFault("underflow", *fault)))
    return found, ""


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


def best_scale(grads: Mapping[str, Tensor], most: float, largest: float) -> float:
    """Returns the largest power of two at which nothing overflows: none that is smaller loses less."""
    return 2.0 ** min(LARGEST_SCALE, math.floor(math.log2(LARGEST / largest))) if largest else 1.0
