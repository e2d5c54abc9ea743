"""The loss scaler: scale, unscale, found_inf and update, all on the device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor

from ampatch.levels.loss_scale import DynamicLossScale, LossScale, parse_loss_scale, validate_scale
from ampatch.levels.private import check_and_unscale_, group_by_kind, update_scale_
from ampatch.steps.outcome import BackwardOutcome
from ampatch.steps.ranks import Agreement, agree_, find_values

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NEVER = 2**31 - 1  # a growth interval that no tracker reaches


class Scale:
    """The value of a loss scale at one time: what a block began with, it unscales by."""

    def __init__(
        self, scaler: LossScaler, value: Tensor | float, capture: list[Callable[[], None]] | None = None
    ) -> None:
        self.scaler = scaler
        self._value = value  # a tensor that is never changed in place: graphs keep it
        self.is_identity = type(value) is float and value == 1.0  # a static 1: scaling changes nothing
        self.capture = capture  # the capture of a CUDA graph that made it, and that alone may use it again
        self._inverse: Tensor | None = None

    def copy(self) -> Scale:
        """Returns the value that it has now: the replay of a CUDA graph writes another into its memory."""
        value = self._value
        return Scale(self.scaler, value.clone() if isinstance(value, Tensor) else value)

    def scale(self, tensor: Tensor) -> Tensor:
        """Returns a loss or a gradient times the scale, of its shape and dtype; no host sync."""
        if self.is_identity:
            return tensor
        value = self._value
        return tensor * (value.to(tensor.device) if isinstance(value, Tensor) else value)

    def scale_clean(self, grad: Tensor, outcomes: Sequence[BackwardOutcome]) -> Tensor:
        """Scales an unscaled gradient; to zeros where one of its outcomes is an overflow; no host sync.

        That one is known and skips the step. Were it found again, it would count against this scale, too.
        """
        scaled = self.scale(grad)
        if not outcomes:
            return scaled
        found_inf = BackwardOutcome.combine(outcomes).to(grad.device)
        return torch.where(found_inf > 0, torch.zeros_like(scaled), scaled)

    def unscale_(self, grads: Iterable[Tensor], found_inf: Tensor) -> None:
        """Divides gradients by the scale, and sets `found_inf` to 1 where one is inf or NaN.

        Takes floating and complex gradients, on any devices, sparse ones as well; no host sync. Of DTensors
        it sees what is on this rank: torch would take mesh and placements of all from the first.
        """
        tensors = [
            grad if type(grad) is Tensor and grad.layout is torch.strided else find_values(grad)
            for grad in grads
        ]
        kinds = group_by_kind([tensors]) if tensors else {}
        for (device, dtype), ((group,), _) in kinds.items():
            values = [torch.view_as_real(values) for values in group] if dtype.is_complex else group
            self._unscale_group_(values, found_inf, device)

    def _unscale_group_(self, group: list[Tensor], found_inf: Tensor, device: torch.device) -> None:
        inverse = self._inverse
        if inverse is None:
            inverse = self._inverse = self._invert(found_inf.device)
        if device == found_inf.device:
            check_and_unscale_(group, found_inf, inverse)
            return
        found_there = torch.zeros((), dtype=torch.float32, device=device)
        check_and_unscale_(group, found_there, inverse.to(device))
        found_inf.copy_(torch.maximum(found_inf, found_there.to(found_inf.device)))

    def _invert(self, device: torch.device) -> Tensor:
        value = self._value
        if not isinstance(value, Tensor):  # filled in, since a CUDA graph takes no copy from the host
            value = torch.full((), value, dtype=torch.float32, device=device)
        # Through float64, as GradScaler does, so that both round alike; past the patched method.
        return torch._C.TensorBase.reciprocal(value.to(device).double()).float()


class LossScaler:
    """Scales a loss and unscales gradients, by a constant or by a scale that follows overflows.

    `config` is what `initialize` takes as `loss_scale`; another one may be assigned later, and holds
    from then on. `device` is where the scale lives; it follows the losses. Scale and trackers are written
    in place, always in the same memory, so that the replay of a CUDA graph goes on from where they are.
    """

    def __init__(self, loss_id: int, config: LossScale | float | str, device: torch.device) -> None:
        self.loss_id = loss_id
        self._number = 1.0
        self.config = config = parse_loss_scale(config)
        self._device = device
        self._scale = torch.zeros((), dtype=torch.float32, device=device)
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self._hysteresis_tracker = torch.full_like(self._growth_tracker, getattr(config, "hysteresis", 1))
        self._carried: Tensor | None = None  # found_inf of exits that left the scale alone
        self._waiting: WeakSet[BackwardOutcome] = WeakSet()  # what these returned, while somebody keeps it
        self._last: BackwardOutcome | None = None
        self._was_asked = False
        self._groups: Sequence[ProcessGroup] = ()  # of gradients that were unscaled by hand
        self.set_scale(config.init_scale if isinstance(config, DynamicLossScale) else config.value)

    def __getstate__(self) -> dict[str, object]:
        # What the blocks of this session left is nothing to keep, and cannot be pickled.
        return {**vars(self), "_waiting": None, "_last": None, "_current": None, "_groups": ()}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _waiting=WeakSet())

    @property
    def config(self) -> LossScale:
        """How the scale follows overflows, or that it does not."""
        return self._config

    @config.setter
    def config(self, config: LossScale) -> None:
        self._config = config
        self.is_dynamic = isinstance(config, DynamicLossScale)  # whether the scale follows overflows
        self._bounds = (config.floor, config.ceiling) if isinstance(config, DynamicLossScale) else (0, 0)
        self._note_identity()

    def _note_identity(self) -> None:
        # Whether scaling changes nothing, now and later: a static scale of 1.
        self.is_identity = self._number == 1.0 and not self.is_dynamic

    @property
    def number(self) -> float:
        """The scale that it has if it is static, or was last set to; no host sync."""
        return self._number

    def begin(self, device: torch.device, capture: list[Callable[[], None]] | None = None) -> Scale:
        """Returns the present scale, for a loss on `device`; the same object until it is updated.

        Not the same in the `capture` of a CUDA graph and outside of it: what is computed there has values
        only while the graph is replayed.
        """
        if self.is_dynamic and self._device != device:
            self._device, self._current = device, None
            self._scale = self._scale.to(device)
            self._growth_tracker = self._growth_tracker.to(device)
            self._hysteresis_tracker = self._hysteresis_tracker.to(device)
            self._carried = None if self._carried is None else self._carried.to(device)
        if self._current is None or self._current.capture is not capture:
            self._current = Scale(self, self._scale.clone() if self.is_dynamic else self._number, capture)
        return self._current

    def scale(self, loss: Tensor) -> Tensor:
        """Returns `loss.float()` times the scale, of the loss's shape; no host sync."""
        self._was_asked = True
        return self.begin(loss.device).scale(loss.float())

    def unscale_(self, grads: Iterable[Tensor], found_inf: Tensor) -> None:
        """Divides gradients by the present scale; see `Scale.unscale_`."""
        grads = list(grads)
        self._groups = Agreement().list_groups(grads) or self._groups  # a rank may lack gradients
        self.begin(self._device).unscale_(grads, found_inf)

    def new_found_inf(self) -> Tensor:
        """A zero, to be set to 1 by `unscale_` where a gradient is not finite."""
        return torch.zeros((), dtype=torch.float32, device=self._device)

    def finish(
        self,
        found_inf: Tensor,
        loss: Tensor | None = None,
        *,
        update: bool = True,
        counts: bool = True,
        capture: object = None,
        groups: Collection[ProcessGroup] = (),
    ) -> BackwardOutcome:
        """Ends a backward pass: updates the scale by `found_inf` and returns what happened.

        Without `update` the scale stays, and the overflow counts at the next pass that updates. A pass that
        does not count may back the scale off, but does not let it grow. `loss` is a number on any device,
        None where the gradients are those of several. The ranks of `groups` agree on found_inf.
        """
        found_inf = found_inf.to(self._device)
        if groups:
            agree_(found_inf, groups)
        before = self._scale.clone() if self._current is None else self._current._value
        if self._carried is None:
            self._carried = found_inf
        else:
            self._carry(found_inf)
        if update:
            self._update(counts)
        number = found_inf if loss is None else loss.to(self._device, torch.float32)
        numbers = torch.stack((found_inf, before, self._scale, number))
        self._last = outcome = BackwardOutcome(self.loss_id, numbers, capture, knows_loss=loss is not None)
        if not update:
            self._waiting.add(outcome)
        return outcome

    def repeat(self, outcome: BackwardOutcome, *, update: bool) -> BackwardOutcome:
        """Notes what `finish` did in a CUDA graph that was replayed, and returns it."""
        self._last = outcome = outcome.copy()
        self._current = None
        if not update:
            self._carry(outcome.found_inf)
            self._waiting.add(outcome)
        return outcome

    def did_overflow(self) -> bool:
        """Whether the last backward pass overflowed; one host sync. A static scale does not look."""
        return self._last is not None and self._last.read()[0]

    def _carry(self, found_inf: Tensor) -> None:
        carried = self._carried
        self._carried = found_inf if carried is None else torch.maximum(found_inf, carried)

    def update(self, found_inf: Tensor | None = None) -> bool:
        """Updates the scale by hand, for a loop that skips steps by itself; says whether to skip.

        Counts `found_inf` (a number above 0 after an overflow) and the blocks with
        `delay_overflow_check` since the last update; these no longer skip a step. A static scale stays
        as it is, and there is nothing to skip. Costs one host sync. Where `unscale_` has seen DTensors, the
        ranks of their meshes agree, and all of them must call this.
        """
        if not self.is_dynamic:
            return False
        found_inf = self.new_found_inf() if found_inf is None else found_inf.to(self._device).float().max()
        agree_(found_inf, self._groups)
        self._carry(found_inf)
        is_overflow = bool(self._carried > 0)
        for outcome in self._waiting:
            outcome.forgive()
        self._update()
        return is_overflow

    def _update(self, counts: bool = True) -> None:
        """Updates the scale by what was carried."""
        found_inf, self._carried = self._carried, None
        self._waiting.clear()
        config = self._config
        assert isinstance(config, DynamicLossScale), "a static scale is never updated"
        before = None if config.hysteresis == 1 else self._scale.clone()
        if not counts:
            self._growth_tracker.sub_(1)  # and what follows adds it again
        update_scale_(
            self._scale,
            self._growth_tracker,
            found_inf,
            config.growth_factor,
            config.backoff_factor,
            config.growth_interval if counts else NEVER,
        )
        if before is not None:
            self._forgive(before, found_inf, config.hysteresis)
        self._scale.clamp_(*self._bounds)
        self._current = None

    def _forgive(self, before: Tensor, found_inf: Tensor, hysteresis: int) -> None:
        """Takes a back-off back while fewer than `hysteresis` overflows came in a row."""
        overflow = found_inf > 0
        left = torch.where(overflow, self._hysteresis_tracker - 1, hysteresis)
        self._hysteresis_tracker.copy_(left.clamp_(min=0))
        self._scale.copy_(torch.where(overflow & (self._hysteresis_tracker > 0), before, self._scale))

    def get_scale(self) -> float:
        """The scale as a number; one host sync if it is dynamic."""
        self._was_asked = True
        return self._scale.item() if self.is_dynamic else self._number

    def set_scale(self, value: float) -> None:
        """Sets the scale; raises AmpValueError or AmpTypeError for anything but a number above 0."""
        validate_scale("loss scale", value)
        self._number = float(value)
        self._note_identity()
        self._scale.fill_(self._number)
        self._current: Scale | None = None if self.is_dynamic else Scale(self, self._number)

    def was_asked(self) -> bool:
        """Whether a script has asked for the scale since somebody asked this: it may scale by hand."""
        was_asked, self._was_asked = self._was_asked, False
        return was_asked

    def state_dict(self) -> dict[str, float | int]:
        """The scale and the number of clean iterations since it last changed; one host sync."""
        return {"loss_scale": self.get_scale(), "unskipped": int(self._growth_tracker.item())}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Takes over a state; a static scale stays what `initialize` was told."""
        if not self.is_dynamic:
            return
        self.set_scale(float(state["loss_scale"]))
        # apex counted on at static scales; torch grows a scale at exactly the interval, and past it never.
        self._growth_tracker.fill_(min(int(state["unskipped"]), self.config.growth_interval - 1))
        self._hysteresis_tracker.fill_(self.config.hysteresis)
