"""The tape of a run: a record of each operation, which holds no tensor, and which one a tensor comes of."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.places import Place
from ampatch.doctor.instruments.values import HALF, Damage, key_of


@dataclass(slots=True, eq=False)
class Op:
    """One operation: what it is called, where it stands, and what the tensors were that it took and gave.

    `taken` and `given` are their types, `parents` the records, by number, of what made those that it takes.
    """

    op: str
    phase: str
    place: Place | None
    where: str | None
    dtype: str = ""  # of the first that it gives
    taken: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    parents: tuple[int, ...] = ()
    is_ours: bool = False  # whether ampatch calls it
    number: int = -1  # on the tape
    autocast: str | None = None  # the device for which torch.autocast was on
    origins: set[int] = field(default_factory=set)  # of bad numbers in what it took or gave
    hidden: set[int] = field(default_factory=set)  # of bad data, of which it makes finite numbers
    infinite: Damage | None = None  # of what it took, and what may be a mask
    is_data: bool = False  # whether that came with the batch
    facts: dict[str, object] = field(default_factory=dict)  # see `evidence`
    handed: dict[str, object] = field(default_factory=dict)  # facts of what it gives

    @property
    def is_half(self) -> bool:
        return any(it in HALF for it in self.given)

    @property
    def site(self) -> tuple[object, ...]:
        return self.phase, self.where, self.op, self.place


class Tape:
    """The records of the present attempt, and of what was made before the first step, which lasts.

    A tensor comes of the latest record of the memory that it lies in, which views share.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.records: list[Op] = []
        self._made: dict[Hashable, int] = {}
        self._early: tuple[int, dict[Hashable, int]] = 0, {}
        self._attempt = 0

    def add(self, record: Op, taken: Collection[Tensor] = (), given: Collection[Tensor] = ()) -> None:
        """Adds a record of what takes and gives some tensors; `put` then has these come of it."""
        record.dtype = next((str(it.dtype)[6:] for it in given), "")
        record.taken, record.given = (tuple(str(it.dtype)[6:] for it in each) for each in (taken, given))
        record.parents = self.makers_of([*taken, *given])
        record.origins = {origin for it in record.parents for origin in self.records[it].origins}
        record.number = len(self.records)
        self.records.append(record)

    def put(self, record: Op, given: Collection[Tensor]) -> None:
        """Has tensors come of a record."""
        self._made.update((key_of(it), record.number) for it in given)

    def keep(self) -> None:
        self._early = len(self.records), self._made.copy()

    def _begin(self) -> None:
        if self._attempt != self.clock.attempt:
            self._attempt, (count, made) = self.clock.attempt, self._early
            del self.records[count:]
            self._made = made.copy()

    def makers_of(self, tensors: Collection[Tensor]) -> tuple[int, ...]:
        """Returns the records, by number, of what made some tensors, each once."""
        self._begin()
        found = (self._made.get(key_of(it)) for it in tensors) if self._made else ()
        return tuple(dict.fromkeys(it for it in found if it is not None))

    def before(self, numbers: Collection[int], through: Collection[str] | None = None) -> Iterator[Op]:
        """Yields records, and those before them, each once; only `through` operations of these names."""
        waiting, seen = list(numbers), set(numbers)
        while waiting:
            record = self.records[waiting.pop()]
            yield record
            if through is None or record.op in through:
                waiting += (new := [it for it in record.parents if it not in seen])
                seen.update(new)

    # ---- Origins of bad numbers ----

    def origins_of(self, *tensors: Tensor) -> set[int]:
        """Returns the origins of what is bad in tensors."""
        return {origin for it in self.makers_of(tensors) for origin in self.records[it].origins}

    def mark(self, tensor: Tensor, origins: set[int]) -> None:
        """Notes origins of what is in a tensor, and in all that shares its memory."""
        self.add(record := Op("", "", None, None), [tensor])
        record.origins |= origins
        for it in record.parents:
            record.handed |= self.records[it].handed
        self.put(record, [tensor])
