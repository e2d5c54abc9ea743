"""The loss scaler: scale, unscale, found_inf and update, all on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from ampatch.loss_scale import DynamicLossScale, LossScale, StaticLossScale, validate_scale


class Outcome:
    """What one backward pass did: whether it overflowed, and the scale that followed.

    Lives on the device as the pair (found_inf, scale). `read` costs one host sync, once;
    `poll` costs none, and knows the answer when the device has delivered it.
    """

    def __init__(self, loss_id: int, found_inf: Tensor, scale: Tensor) -> None:
        self.loss_id = loss_id
        self.found_inf = found_inf
        self._pair = torch.stack((found_inf, scale))
        self._host: Tensor | None = None
        self._delivered: torch.cuda.Event | None = None
        self._values: tuple[bool, float] | None = None
        self.was_announced = False

    def read(self) -> tuple[bool, float]:
        """Returns (overflowed, scale), waiting for the device where need be."""
        if self._values is None:
            self._set(self._pair.tolist())
        return self._values

    def _set(self, pair: list[float]) -> None:
        self._values = (pair[0] > 0, pair[1])

    @staticmethod
    def read_all(outcomes: Iterable[Outcome]) -> bool:
        """Says whether any pass overflowed; one host sync for all of them together."""
        outcomes = list(outcomes)
        unread = [outcome for outcome in outcomes if outcome._values is None]
        if unread:
            pairs = torch.stack([outcome._pair.to(unread[0]._pair.device) for outcome in unread])
            for outcome, pair in zip(unread, pairs.tolist(), strict=True):
                outcome._set(pair)
        return any(outcome.read()[0] for outcome in outcomes)

    def poll(self) -> tuple[bool, float] | None:
        """Returns (overflowed, scale) if they have reached the host, else None; never waits."""
        if self._values is not None or not self._pair.is_cuda:
            return self.read()
        if self._delivered is None:
            self._send()
        if not self._delivered.query():
            return None
        self._set(self._host.tolist())
        return self._values

    def _send(self) -> None:
        self._host = torch.empty(2, pin_memory=True)
        self._host.copy_(self._pair, non_blocking=True)
        self._delivered = torch.cuda.Event()
        self._delivered.record()


class LossScaler:
    """Scales a loss and unscales gradients, by a constant or by a scale that follows overflows."""

    def __init__(self, loss_id: int, config: LossScale, device: torch.device) -> None:
        self.loss_id = loss_id
        self.config = config
        start = config.init_scale if self.is_dynamic else config.value
        self._scale = torch.tensor(float(start), dtype=torch.float32, device=device)
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self._hysteresis_tracker = torch.full_like(self._growth_tracker, self._hysteresis)
        self._carried: Tensor | None = None  # found_inf of exits that left the scale alone
        self._static_value = None if self.is_dynamic else float(start)
        self._inverse: Tensor | None = None

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale follows overflows."""
        return isinstance(self.config, DynamicLossScale)

    @property
    def is_identity(self) -> bool:
        """Whether scaling changes nothing: a static scale of 1."""
        return self._static_value == 1.0

    @property
    def _hysteresis(self) -> int:
        return self.config.hysteresis if isinstance(self.config, DynamicLossScale) else 1

    def scale(self, loss: Tensor) -> Tensor:
        """Returns `loss.float()` times the scale, of the loss's shape; no host sync."""
        if self._static_value is not None:
            return loss.float() if self.is_identity else loss.float() * self._static_value
        self.move_to(loss.device)
        return loss.float() * self._scale

    def move_to(self, device: torch.device) -> None:
        """Moves the state to the device that losses live on."""
        if self._scale.device == device:
            return
        self._scale = self._scale.to(device)
        self._growth_tracker = self._growth_tracker.to(device)
        self._hysteresis_tracker = self._hysteresis_tracker.to(device)
        self._carried = None if self._carried is None else self._carried.to(device)
        self._inverse = None

    def new_found_inf(self) -> Tensor:
        """A zero, to be set to 1 by `unscale_` where a gradient is not finite."""
        return torch.zeros((), dtype=torch.float32, device=self._scale.device)

    def unscale_(self, grads: Iterable[Tensor], found_inf: Tensor) -> None:
        """Divides gradients by the scale, and sets `found_inf` to 1 where one is inf or NaN.

        Takes gradients of any floating dtype, on any devices, sparse ones as well; no host sync.
        """
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for grad in grads:
            values = grad._values() if grad.is_sparse else grad
            by_kind[values.device, values.dtype].append(values)
        for (device, _), group in by_kind.items():
            self._unscale_group_(group, found_inf, device)

    def _unscale_group_(self, group: list[Tensor], found_inf: Tensor, device: torch.device) -> None:
        inverse = self._get_inverse()
        if device == found_inf.device:
            torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf, inverse)
            return
        found_there = torch.zeros((), dtype=torch.float32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(group, found_there, inverse.to(device))
        found_inf.copy_(torch.maximum(found_inf, found_there.to(found_inf.device)))

    def _get_inverse(self) -> Tensor:
        if self._inverse is None:
            # Through float64, as GradScaler does, so that both round alike.
            self._inverse = self._scale.double().reciprocal().float()
        return self._inverse

    def finish(self, found_inf: Tensor, *, update: bool) -> Outcome:
        """Ends a backward pass: updates the scale by `found_inf` and returns what happened.

        Without `update` the scale stays, and the overflow counts at the next pass that updates.
        """
        carried = self._carried
        combined = found_inf if carried is None else torch.maximum(found_inf, carried)
        if update:
            self._carried = None
            self._update_(combined)
        else:
            self._carried = combined
        return Outcome(self.loss_id, found_inf, self._scale)

    def _update_(self, found_inf: Tensor) -> None:
        config = self.config
        assert isinstance(config, DynamicLossScale), "a static scale is never updated"
        before = self._scale.clone() if config.hysteresis > 1 else None
        torch._amp_update_scale_(
            self._scale,
            self._growth_tracker,
            found_inf,
            config.growth_factor,
            config.backoff_factor,
            config.growth_interval,
        )
        if before is not None:
            self._forgive_(before, found_inf)
        self._scale.clamp_(config.floor, config.ceiling)
        self._inverse = None

    def _forgive_(self, before: Tensor, found_inf: Tensor) -> None:
        """Takes a back-off back while fewer than `hysteresis` overflows came in a row."""
        overflow = found_inf > 0
        left = torch.where(overflow, self._hysteresis_tracker - 1, self._hysteresis)
        self._hysteresis_tracker.copy_(left.clamp_(min=0))
        forgiven = overflow & (self._hysteresis_tracker > 0)
        self._scale.copy_(torch.where(forgiven, before, self._scale))

    def get_scale(self) -> float:
        """The scale as a number; one host sync if it is dynamic."""
        return self._scale.item() if self._static_value is None else self._static_value

    def set_scale(self, value: float) -> None:
        """Sets the scale; raises AmpValueError or AmpTypeError for what is no number above 0."""
        validate_scale("loss scale", value)
        self._scale.fill_(float(value))
        self._inverse = None
        if isinstance(self.config, StaticLossScale):
            self._static_value = float(value)

    def state_dict(self) -> dict[str, float | int]:
        """The scale and the number of clean iterations since it last changed; one host sync."""
        return {"loss_scale": self.get_scale(), "unskipped": int(self._growth_tracker.item())}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Takes over a state; a static scale stays what `initialize` was told."""
        if not self.is_dynamic:
            return
        self.set_scale(float(state["loss_scale"]))
        self._growth_tracker.fill_(int(state["unskipped"]))
