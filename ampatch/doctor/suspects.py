"""Which attempts at a step of an optimizer are looked at, and what a dynamic loss scale explains."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampatch.doctor.instruments.tape import Origin
from ampatch.doctor.instruments.watch import Attempt

FALL = 0.02  # of the loss, from the first to the last quarter of a run, that is learning
LESS = 0.05  # of the loss, by which it ends above that of float32, and
PART_LESS = 0.2  # of how much it falls there
MANY_TIMES = 3  # the loss of float32
FEWEST = 16  # steps in which a loss falls
FIRST = 16  # attempts whose operations are looked at for silent faults
LATE = 2  # suspects that are looked at in any case
MOST_OVERFLOWS = 2  # at a scale that was good before


def leave_out_mended(
    attempts: Sequence[Attempt], origins: Sequence[Origin], may_collapse: bool = True
) -> list[Origin]:
    """Leaves out of origins what a dynamic scale mends by itself.

    Where a scale collapses, and nothing else broke, what a smaller one would mend counts as well; that of its
    search only where there is nothing else.
    """
    others = [origin for origin in origins if not origin.is_of_scale]
    if others or not (may_collapse and is_collapse(attempts)):
        return others
    untried = find_untried(attempts)
    return [origin for origin in origins if origin.attempt not in untried] or list(origins)


def find_hidden(origins: Sequence[Origin]) -> tuple[int, ...]:
    """Returns the attempts where nothing but the scale was found too large: more may break behind it."""
    reached = [origin for origin in origins if origin.has_reached]
    explained = {origin.attempt for origin in reached if not origin.is_of_scale}
    return tuple(sorted({origin.attempt for origin in reached} - explained))


def find_untried(attempts: Sequence[Attempt]) -> tuple[int, ...]:
    """Returns the attempts that broke at a larger scale than any that a step was made with before."""
    good = 0.0
    untried = []
    for index, attempt in enumerate(attempts):
        if attempt.is_finite:
            good = max(good, attempt.scale or 0.0)
        elif attempt.is_dynamic and (attempt.scale or 0) > good:
            untried.append(index)
    return tuple(untried)


def find_suspects(attempts: Sequence[Attempt]) -> tuple[int, ...]:
    """Returns the attempts at which something broke, those of a dynamic scale's search last.

    A scale that is too large at first, or has just grown to where it never was, overflows and falls. What
    breaks in such a search may not be the scale's: its first attempt counts like others. The first attempt
    that leaves bad weights is the last: all that follows comes of it.
    """
    untried = find_untried(attempts)
    suspects, search, rest = [], [], []
    for index, attempt in enumerate(attempts):
        if attempt.is_finite:
            suspects, rest, search = suspects + search[:1] + [index] * attempt.left_out, rest + search[1:], []
            continue
        is_probe = index in untried and attempt.loss and attempt.weights
        (search if is_probe else suspects).append(index)
        if not attempt.weights:
            break
    # A search that never ended found nothing: no scale is small enough.
    suspects, rest = suspects + search[:1] + search[1:][-1:], rest + search[1:-1]
    return (*sorted(suspects), *rest)


def pick_suspects(attempts: Sequence[Attempt], suspects: Sequence[int], most: int) -> tuple[int, ...]:
    """Returns some suspects: the first, and those from which on most steps break, or else the last.

    A loss scale that grows may be too large many times before a fault comes that stays.
    """
    onset = find_onset(attempts)
    late = [index for index in suspects if onset <= index < len(attempts)][:LATE] or sorted(suspects)[-LATE:]
    first = [index for index in suspects if index not in late]
    return tuple(sorted(late + first[: most - len(late)]))


def find_onset(attempts: Sequence[Attempt]) -> int:
    """Returns the attempt from which on more break than not, by as many as from no other."""
    onset, balance, most = len(attempts), 0, LATE
    for index in reversed(range(len(attempts))):
        balance += -1 if attempts[index].is_finite else 1
        onset, most = (index, balance) if balance >= most else (onset, most)
    return onset


def plan_window(attempts: Sequence[Attempt], sample: int | None) -> tuple[int, ...]:
    """Returns attempts up to which a traced run goes on for silent faults: not beyond weights that broke."""
    first = attempts[:FIRST]
    last = next((index for index, attempt in enumerate(first) if not attempt.weights), len(first) - 1)
    return tuple(index for index in (last, sample) if index is not None and index >= 0)


def plan_looks(attempts: Sequence[Attempt]) -> tuple[int, ...]:
    """Returns later attempts to look at for silent faults: ever fewer, and the last; none of lost weights."""
    end = next((index for index, attempt in enumerate(attempts) if not attempt.weights), len(attempts))
    return tuple(index for index in range(FIRST, end) if is_sample(index) or index == len(attempts) - 1)


def is_sample(attempt: int) -> bool:
    """Says whether an attempt is looked at closely: all at first, and then ever fewer.

    >>> [attempt for attempt in range(40) if is_sample(attempt)]
    [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    """
    while attempt > 3 and attempt % 2 == 0:
        attempt //= 2
    return attempt <= 3


def is_collapse(attempts: Sequence[Attempt]) -> bool:
    """Says whether a scale that may move overflowed more often than its search explains.

    That is more than twice at a scale that a step had been made with, and that had not grown since it
    overflowed last, and in the last quarter of the run as well, or at every step up to the end.
    """
    good, again, last, lowest = 0.0, 0, -1, math.inf
    for index, attempt in enumerate(attempts):
        scale = attempt.scale or 0.0
        lowest = min(lowest, scale)
        if not attempt.is_finite:
            last = index
            if not attempt.is_dynamic:
                return True
            again += lowest == scale <= good and not attempt.is_again  # a scale that has grown is a search
            lowest = math.inf
        elif attempt.is_dynamic:
            good = attempt.scale or 0.0
    is_late = last >= len(attempts) - max(len(attempts) // 4, 1)
    return (again > MOST_OVERFLOWS and is_late) or (good == 0 and last >= 0)


def fall_of(attempts: Sequence[Attempt]) -> float:
    """Returns by how much the loss falls, from the mean of the first quarter of a run, as a part of it."""
    first, last = ends_of(attempts)
    return (first - last) / abs(first) if first else 0.0


def ends_of(attempts: Sequence[Attempt]) -> tuple[float, float]:
    """Returns the mean loss of the first and of the last quarter of a run."""
    losses = [attempt.value for attempt in attempts if attempt.loss or not attempt.is_dynamic]
    part = max(len(attempts) // 4, 1)
    return sum(losses[:part]) / part, sum(losses[-part:]) / part


def learns_less(attempts: Sequence[Attempt], best: Sequence[Attempt]) -> bool:
    """Says whether a loss ends clearly above that of another run, for how much it falls there.

    Clearly is a fifth of that fall, or three times the other loss where that is not next to nothing.
    """
    (_, end), (begin, least) = ends_of(attempts), ends_of(best)
    gap, fall = end - least, begin - least
    is_far = gap > PART_LESS * fall and gap > LESS * abs(begin)
    return fall > FALL * abs(begin) and (is_far or (gap > FALL * abs(begin) and end > MANY_TIMES * least > 0))


def has_scaler(attempts: Sequence[Attempt]) -> bool:
    return any(attempt.is_dynamic for attempt in attempts)


def is_flat(attempts: Sequence[Attempt]) -> bool:
    return len(attempts) >= FEWEST and fall_of(attempts) < FALL


def describe_scale(attempts: Sequence[Attempt]) -> dict[str, object]:
    """Returns the history of the scale: [step, scale] where it changed, and the steps that were skipped."""
    history: list[tuple[int, float]] = []
    for index, attempt in enumerate(attempts):
        if attempt.scale is not None and (not history or history[-1][1] != attempt.scale):
            history.append((index, attempt.scale))
    skipped = [
        index
        for index, attempt in enumerate(attempts)
        if attempt.is_dynamic and not (attempt.loss and attempt.gradients)
    ]
    search = bool(skipped) and skipped == list(range(len(skipped))) and len(skipped) < len(attempts)
    return {"history": history, "skipped": skipped, "search": search, "steps": len(attempts)}
