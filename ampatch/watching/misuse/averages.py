"""Copies of half models that are averaged in place, by steps that half numbers round away."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor

from ampatch.levels.precision import HALF_TYPES
from ampatch.watching.misuse.warner import Warner

if TYPE_CHECKING:
    from ampatch.models.cast_tensor import Shared
    from ampatch.steps.masters.weight import Weight

SIZE = 4096  # elements of one weight that are looked at
UPDATES = 16  # how many are counted, before one host sync
MOST_LOST = 0.7  # where it is more, averages end 5 % or more away from where they should

SOFT = (
    "a copy of the model is averaged in {}, where {:.0%} of what should move stays where it is: keep it in "
    "float32, as target = copy.deepcopy(model).float(), or average the values of target.state_dict() with "
    "those of model.state_dict()"
)


class AverageWatch:
    """Looks at one weight of each copied model, at the steps of the original."""

    def __init__(self, warner: Warner, views: dict) -> None:
        self._warner, self._views = warner, views
        self.forget()

    def forget(self) -> None:
        """Drops what was seen."""
        self._tracks: WeakKeyDictionary[Shared, Track] = WeakKeyDictionary()

    def check_step(self, copies: WeakSet[Shared]) -> None:
        """Counts what was written into copies since the last step; one host sync for each, once."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        for shared in list(copies):
            track = self._tracks.get(shared)
            if track is None:
                track = self._tracks[shared] = Track(*shared.sample)  # type: ignore[misc]
                self._views[id(track.weight.half)] = track.views
            elif not track.look():
                self._judge(track)
                copies.discard(shared)
                del self._tracks[shared]
        if len(self._views) > len(self._tracks):
            self._views.clear()
            self._views.update((id(track.weight.half), track.views) for track in self._tracks.values())

    def _judge(self, track: Track) -> None:
        lost = track.read_lost()
        if lost > MOST_LOST and not self._warner.has_said("average"):
            self._warner.warn("soft", SOFT.format(track.weight.half.dtype, lost))


class Track:
    """What became of one weight of a copy: of the entries that differ from the original, how many stayed.

    An average moves each of them, and a hard copy leaves none.
    """

    def __init__(self, weight: Weight, find: ref[Weight]) -> None:
        self.weight, self._find = weight, find
        self.views: deque[Tensor] = deque(maxlen=8)  # what `.data` gave since the last look
        self._numbers: list[tuple[Tensor, Tensor]] = []
        self._note()

    def _note(self) -> None:
        half = self.weight.half
        self._version, self._pointer = half._version, half.data_ptr()
        self._values = _sample(half).clone()
        self.views.clear()

    def look(self) -> bool:
        """Counts an update, if there was one since; says whether to look again."""
        half, original = self.weight.half, self._find()
        # One that has float32 values behind it is averaged there.
        is_half = half.dtype in HALF_TYPES and self.weight.precise is None
        if original is None or not is_half or original.half.device != half.device:
            self._numbers.clear()
            return False
        is_written = (half._version, half.data_ptr()) != (self._version, self._pointer)
        if is_written or any(view._version for view in self.views):
            before, others = self._values, _sample(original.half)
            differs = before != others
            self._numbers.append((differs.sum(), (differs & (_sample(half) == before)).sum()))
            self._note()
        self.views.clear()
        return len(self._numbers) < UPDATES

    def read_lost(self) -> float:
        """The share of the entries that should have moved, and did not."""
        if not self._numbers:
            return 0.0
        differ, stayed = torch.stack([torch.stack(pair) for pair in self._numbers]).sum(0).tolist()
        return stayed / differ if differ else 0.0


def _sample(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:SIZE]
