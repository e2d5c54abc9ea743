"""The loss scaler: scale, unscale, found_inf and update, all on the device, and agreed on by ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ampatch.errors import AmpError
from ampatch.levels.loss_scale import DynamicLossScale, LossScale, parse_loss_scale, validate_scale
from ampatch.levels.private import check_and_unscale_, group_by_kind, update_scale_
from ampatch.levels.ranks import has_ranks

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
        self._groups: Sequence[dist.ProcessGroup] = ()  # of gradients that were unscaled by hand
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
        self._update_identity()

    def _update_identity(self) -> None:
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
        groups: Collection[dist.ProcessGroup] = (),
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
        self._update_identity()
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


class BackwardOutcome:
    """What one backward pass did: whether it overflowed, the scale before and after, and the loss.

    Lives on the device as four numbers. `read` costs one host sync, once;
    `poll` costs none, and knows the answer once the device has delivered it.
    """

    def __init__(
        self, loss_id: int, numbers: Tensor, capture: object = None, *, knows_loss: bool = True
    ) -> None:
        self.loss_id = loss_id
        self.numbers = numbers  # found_inf, the scale before and after, the loss
        self.capture = capture  # the capture of a CUDA graph that it is part of
        self._knows_loss = knows_loss
        self._host: Tensor | None = None
        self._delivered: torch.cuda.Event | None = None
        self._values: tuple[bool, float, float] | None = None
        self._loss = 0.0
        self.is_noted = False  # whether it is in the history of its loss

    def copy(self) -> BackwardOutcome:
        """Returns what the numbers are now: the replay of a CUDA graph writes others into their memory."""
        return BackwardOutcome(self.loss_id, self.numbers.clone(), knows_loss=self._knows_loss)

    @property
    def found_inf(self) -> Tensor:
        """1 after an overflow, else 0, on the device."""
        return self.numbers[0]

    @property
    def is_loss_finite(self) -> bool | None:
        """Whether the loss itself was neither inf nor NaN, None if unchecked; may wait for the device."""
        self.read()
        return math.isfinite(self._loss) if self._knows_loss else None

    def is_known(self) -> bool:
        """Whether the host knows the numbers; of those on a GPU this asks for them, and does not wait."""
        return self._values is not None or (self.numbers.is_cuda and self.poll() is not None)

    def is_clean(self) -> bool:
        """Whether the host knows that there was no overflow, and no bad loss; never waits."""
        values = self._values
        if values is None:
            return self.is_known() and self.is_clean()
        return not values[0] and (not self._knows_loss or math.isfinite(self._loss))

    def forgive(self) -> None:
        """Counts as clean from now on: somebody else looks after the overflow."""
        self.found_inf.zero_()
        self._set(self.numbers.tolist())

    def read(self) -> tuple[bool, float, float]:
        """Returns (overflowed, scale before, after), waiting for the device if needed."""
        if self._values is None:
            self.read_all([self])
        return self._values

    def _set(self, numbers: list[float]) -> None:
        found_inf, before, after, self._loss = numbers
        self._values = (found_inf > 0, before, after)

    @staticmethod
    def read_all(outcomes: Iterable[BackwardOutcome]) -> bool:
        """Says whether any pass overflowed; one host sync for all of them together."""
        outcomes, unread = list(outcomes), []
        for outcome in outcomes:
            if outcome._values is None:
                unread.append(outcome)
        if unread:
            _fetch(unread)
        overflow = False
        for outcome in outcomes:  # no generator: this runs at each step
            overflow |= outcome._values[0]
        return overflow

    @staticmethod
    def combine(outcomes: Iterable[BackwardOutcome]) -> Tensor:
        """Returns 1 if any pass overflowed, else 0, on the device of the first."""
        # Fused kernels compare found_inf to 1, so that a sum of two overflows would go unnoticed.
        first, *others = [outcome.found_inf for outcome in outcomes]
        return functools.reduce(torch.maximum, [found_inf.to(first.device) for found_inf in others], first)

    def poll(self) -> tuple[bool, float, float] | None:
        """Returns what `read` does if it has reached the host, else None; never waits."""
        if self._values is not None or not self.numbers.is_cuda:
            return self.read()
        if self._delivered is None:
            # A default device of the script's must not decide, nor the device that is the current one.
            self._host = torch.empty(4, device="cpu", pin_memory=True)
            self._host.copy_(self.numbers, non_blocking=True)
            self._delivered = torch.cuda.Event()
            self._delivered.record(torch.cuda.current_stream(self.numbers.device))
        if not self._delivered.query():
            return None
        self._set(self._host.tolist())
        return self._values


def _fetch(unread: Sequence[BackwardOutcome]) -> None:
    """Brings numbers to the host; one host sync for all of them together."""
    device, numbers = unread[0].numbers.device, []
    for outcome in unread:
        if outcome.capture is not None:
            raise AmpError(
                "whether a gradient overflowed cannot be read while a CUDA graph is captured: step with an "
                "optimizer that skips on the device (fused=True) and has stepped before, capture only "
                "forward and backward and step outside of the graph, or use a static loss scale"
            )
        numbers.append(outcome.numbers.to(device))
    for outcome, row in zip(unread, torch.stack(numbers).tolist(), strict=True):
        outcome._set(row)


@dataclass(slots=True, eq=False)
class Agreement:
    """Knows the process groups whose ranks must agree on found_inf, because they share parameters.

    Those are the groups of every dimension of every mesh that parameters are on, sharded or replicated:
    what is on one rank alone may overflow there alone. Not the gradients' meshes: a rank may lack some.
    Parameters without a mesh need no agreement where DistributedDataParallel has averaged their gradients.
    `group` is one that the script has named.
    """

    group: dist.ProcessGroup | None = None
    _meshes: list[object] = field(default_factory=list)
    _groups: list[dist.ProcessGroup] = field(default_factory=list)

    def list_groups(self, params: Iterable[Tensor]) -> list[dist.ProcessGroup]:
        """Returns the groups for these parameters, each of several ranks, in one order on all of them."""
        if not has_ranks():
            return []
        meshes = list_meshes(params)
        if meshes != self._meshes or not self._groups:
            self._meshes, self._groups = meshes, _select_groups(meshes, self.group)
        return self._groups


def list_meshes(tensors: Iterable[Tensor]) -> list[dist.DeviceMesh]:
    """Returns the device meshes that tensors are on, each once; a plain tensor is on none."""
    others = [tensor for tensor in tensors if type(tensor) is not Parameter]  # to ask those takes longest
    meshes = [getattr(tensor, "device_mesh", None) for tensor in others]
    return list({id(mesh): mesh for mesh in meshes if mesh is not None}.values())


def _select_groups(
    meshes: Iterable[dist.DeviceMesh], named: dist.ProcessGroup | None
) -> list[dist.ProcessGroup]:
    own = [mesh for mesh in meshes if mesh.get_coordinate() is not None]  # those that this rank is in
    groups = [mesh.get_group(dim) for mesh in own for dim in range(mesh.ndim)]
    groups += [] if named is None else [named]
    by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for group in groups:  # dimension by dimension on every rank, or a found_inf does not reach all of a mesh
        by_ranks.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    return [group for ranks, group in by_ranks.items() if len(ranks) > 1]


@torch.no_grad()
def agree_(found_inf: Tensor, groups: Iterable[dist.ProcessGroup]) -> None:
    """Sets `found_inf` (0-dim, float32) to 1 if it is 1 on any rank; one collective a group, no host sync."""
    for group in groups:
        is_elsewhere = found_inf.is_cpu and dist.get_backend(group) == "nccl"  # of parameters on the CPU
        here = found_inf.cuda() if is_elsewhere else found_inf
        dist.all_reduce(here, dist.ReduceOp.MAX, group=group)
        if is_elsewhere:
            found_inf.copy_(here)


def find_values(grad: Tensor) -> Tensor:
    """Returns what holds the values of a gradient on this rank; who writes there writes the gradient."""
    if type(grad) is Tensor or not hasattr(grad, "to_local"):
        return grad._values() if grad.is_sparse else grad
    with torch.no_grad():
        local = grad.to_local()  # of a DTensor
    return local.wait() if hasattr(local, "wait") else local  # for a collective that still runs
