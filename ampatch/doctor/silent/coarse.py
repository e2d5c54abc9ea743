"""What half is too coarse for: small updates, and whole numbers that it makes one of."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.dispatch import Operation, Site
from ampatch.doctor.instruments.operations import CASTS
from ampatch.doctor.instruments.places import is_called_by_ampatch, user_line
from ampatch.doctor.instruments.values import is_finite, is_inexact, plain
from ampatch.doctor.silent.notes import STUCK, Notes
from ampatch.doctor.silent.rules import VIEWS, SilentRule
from ampatch.levels.precision import HALF_TYPES

UPDATES = ("add_", "sub_", "lerp_")
SUMMING = ("index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
WRONG = 0.1  # of a sum
SATURATING = ("sigmoid", "tanh")
MOST_COLUMNS = 256
FEWEST = 16  # numbers of a tensor
MANY = 0.5  # of the weights stay as they were: a fault where the loss does not fall
REPEATED = 3  # attempts
FEWER = 0.5  # of whole numbers
WAVES = ("sin", "cos", "sin_", "cos_")
FOLLOWED = (*VIEWS, *CASTS, "mul", "div", "true_divide", "add", "sub", "outer", "einsum", "matmul")


class Updates(SilentRule):
    """Small updates that half rounds away again and again: of an average of weights, or of weights."""

    def __init__(self, clock: Clock, notes: Notes, window: Collection[int]) -> None:
        super().__init__(clock, notes, window)
        self._seen: defaultdict[Site, set[int]] = defaultdict(set)  # attempts
        self._before: list[tuple[Tensor, Tensor]] = []

    def look(self, operation: Operation, kept: object, given: list[Tensor]) -> None:
        """Counts the numbers of an average that stay as they were."""
        if operation.name not in UPDATES or given[0].dtype not in HALF_TYPES or given[0].numel() < FEWEST:
            return
        into, by = given[0].detach(), operation.args[1] if len(operation.args) > 1 else None
        if not isinstance(by, Tensor):
            return
        weight = operation.kwargs.get("alpha", operation.kwargs.get("weight", (*operation.args, 1)[2]))
        gap = plain(by).float() - (into.float() if operation.name == "lerp_" else 0.0)
        least = torch.finfo(into.dtype).eps * into.float().abs() if weight != 1 else 0.0  # it has arrived
        stays = (into.float() + gap * weight).to(into.dtype) == into
        self._count(operation.site, stays, gap.abs() > least, into.dtype)

    def begin_attempt(self, optimizer: Optimizer, scaler: object) -> None:
        """Keeps the half weights that a step is to change."""
        groups = (it["params"] for it in optimizer.param_groups if it.get("lr", 1.0) != 0)
        half = [it for group in groups for it in group if it.dtype in HALF_TYPES and it.grad is not None]
        is_due = self.clock.attempt in self._window and all(is_finite(it.grad) for it in half)
        self._before = [(it, plain(it).clone()) for it in half if it.numel() >= FEWEST and is_due]

    def end_attempt(self, optimizer: Optimizer) -> None:
        """Counts the numbers that it left as they were."""
        if self._before:
            stays = torch.cat([(plain(it) == before).flatten() for it, before in self._before])
            is_due = torch.cat([plain(it.grad).flatten() != 0 for it, _ in self._before])
            self._count(("optimizer", user_line(), "step", None), stays, is_due, self._before[0][0].dtype)
        self._before = []

    def _count(self, site: Site, stays: Tensor, is_due: Tensor, dtype: torch.dtype) -> None:
        share = (stays & is_due).sum().item() / max(is_due.sum().item(), 1)
        if share > (MANY if site[2] == "step" else STUCK):
            self._seen[site].add(self.clock.attempt)
            if len(self._seen[site]) == REPEATED:
                first = min(self._seen[site])
                self._notes.add("lost_updates", site, first, share=share, dtype=str(dtype)[6:])


class Counts(SilentRule):
    """Whole numbers, as positions, times and names of items, of which half makes fewer."""

    def look(self, operation: Operation, kept: object, given: list[Tensor]) -> None:
        """Counts them before and after a cast, in each column of a table."""
        is_half = given[0].dtype in HALF_TYPES and operation.name in CASTS
        if not is_half or given[0].numel() < FEWEST or not isinstance(operation.args[0], Tensor):
            return
        limit = limit_of(given[0].dtype)
        taken, cast = plain(operation.args[0]).double(), plain(given[0])
        is_table = taken.dim() > 1 and taken.shape[-1] <= MOST_COLUMNS
        columns = taken.flatten(0, -2) if is_table else taken.reshape(-1, 1)
        is_whole = (columns.abs().amax(0) > limit) & (columns == columns.round()).all(0)
        for index in is_whole.nonzero().flatten().tolist():
            before = len(columns[:, index].unique())
            after = len(cast.reshape(columns.shape)[:, index].unique())
            if after < FEWER * before:
                numbers = {"before": before, "after": after, "limit": limit}
                numbers["given"] = is_called_by_ampatch()
                self._note(operation, given[0].dtype, **numbers)
                return

    def _note(self, operation: Operation, dtype: torch.dtype, **numbers: object) -> None:
        self._notes.add("collapsed", operation.site, dtype=str(dtype)[6:], **numbers)


class Sums(SilentRule):
    """Sums that half stops: where many numbers are added to one, and whole numbers that are counted."""

    def __init__(self, clock: Clock, notes: Notes, window: Collection[int]) -> None:
        super().__init__(clock, notes, window)
        self._missed: Counter[Site] = Counter()

    def before(self, operation: Operation) -> list[object] | None:
        """Returns what is added, in float32, as it is before the operation."""
        into = next(iter(operation.floating), None)
        if operation.name not in (*SUMMING, "add_") or into is None or into.dtype not in HALF_TYPES:
            return None
        return [
            it.detach().to(torch.float32, copy=True) if isinstance(it, Tensor) and is_inexact(it) else it
            for it in operation.args
        ]

    def look(self, operation: Operation, kept: list[object] | None, given: list[Tensor]) -> None:
        """Compares a sum with that of float32."""
        if kept is None or len(kept) < 2 or given[0].dtype not in HALF_TYPES:
            return
        dtype = given[0].dtype
        have, numbers = plain(given[0]).float(), {"dtype": str(dtype)[6:], "limit": limit_of(dtype)}
        if operation.name == "add_":
            into = kept[0]
            by = torch.as_tensor(kept[1], dtype=torch.float32, device=into.device)
            if (into.abs() < numbers["limit"]).all() or not is_whole(into, by):
                return
            missed = (by != 0) & ((have - into - by).abs() >= by.abs() / 2)
            self._missed[operation.site] += bool(missed.any())
            if self._missed[operation.site] == REPEATED:
                self._notes.add("lost_counts", operation.site, **numbers)
            return
        wanted = operation.func(*kept, **operation.kwargs)
        wrong = torch.isfinite(wanted) & ((have - wanted).abs() > WRONG * wanted.abs())
        if wrong.any():
            worst = int((have - wanted).abs().where(wrong, 0).argmax())
            numbers |= {"have": have.flatten()[worst].item(), "wanted": wanted.flatten()[worst].item()}
            self._notes.add("lost_sums", operation.site, **numbers)


class Saturated(SilentRule):
    """Probabilities that half rounds to 1, where their derivative is 0; a fault where that stops learning."""

    def look(self, operation: Operation, kept: object, given: list[Tensor]) -> None:
        """Counts those that are not 1 in float32."""
        tensor = given[0]
        if operation.name not in SATURATING or tensor.dtype not in HALF_TYPES or not tensor.requires_grad:
            return
        wanted = operation.func(operation.floating[0].float())
        share = ((plain(tensor).abs() == 1) & (wanted.abs() < 1)).float().mean().item()
        if share >= MANY:
            more = {"dtype": str(tensor.dtype)[6:], "autocast": operation.autocast, "float32_survives": True}
            self._notes.add("saturated", operation.site, more=more, share=share)


def limit_of(dtype: torch.dtype) -> int:
    """Returns up to where a type holds all whole numbers."""
    return int(2 / torch.finfo(dtype).eps)


def is_whole(*tensors: Tensor) -> bool:
    """Says whether some tensors hold whole numbers alone."""
    return all(bool((it == it.round()).all()) for it in tensors)


class Angles(SilentRule):
    """Angles that half rounds by more than 1, where they are taken or in what they are computed of."""

    def forget(self) -> None:
        self._rounded = WeakTensorKeyDictionary()  # the operation that took it through half, and that type

    def look(self, operation: Operation, kept: object, given: list[Tensor]) -> None:
        """Follows what was in half to a sine."""
        half = next((it.dtype for it in (*operation.floating, *given) if it.dtype in HALF_TYPES), None)
        fact = next((self._rounded[it] for it in operation.floating if it in self._rounded), None)
        is_cast = operation.name in CASTS or given[0].dtype is torch.float32
        if fact is None and half is not None and (operation.name in WAVES or is_cast):
            fact = operation.site, half
        if fact is not None and operation.name in WAVES:
            self._look_at_angles(plain(operation.floating[0]), *fact)
        elif fact is not None and operation.name in FOLLOWED:
            self._rounded.update((tensor, fact) for tensor in given)

    def _look_at_angles(self, angles: Tensor, site: Site, dtype: torch.dtype) -> None:
        largest = angles.abs().max().item() if angles.numel() else 0.0
        error = largest * torch.finfo(dtype).eps / 2
        if 1 < error < math.inf:
            self._notes.add("coarse_angles", site, largest=largest, error=error, dtype=str(dtype)[6:])
