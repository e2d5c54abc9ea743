"""How far a loss or a metric is from that of O0, in units of what chance does to it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ampatch.sweeps.records.record import Curve, Measured, RunRecord
from ampatch.sweeps.records.sweep import Distance
from ampatch.sweeps.verdicts.metric_names import is_about_accuracy, is_lower_better

# Parts of O0's value. Where seeds agree to the last digits by luck, the tiniest difference would be very many
# spreads; where nothing is known about chance, half a percent is a guess.
LEAST_SPREAD = 0.001
GUESSED_SPREAD = 0.005
# A loss that fell to less than this part of its first value has arrived at zero.
ARRIVED = 0.001
SMALLEST = 1e-37  # what is smaller is 0 in float32


@dataclass(frozen=True, slots=True)
class SeedValues:
    """One quantity of a row's runs: its mean for each seed, its first value, and what chance does to it.

    `noise` is the standard error within a run, where one is known.
    """

    values: tuple[float, ...]
    first: float | None = None
    noise: float | None = None

    @property
    def value(self) -> float | None:
        """Returns the mean over the seeds, None without any."""
        return mean(self.values)

    def spread(self) -> tuple[float | None, str]:
        """Returns the unit for distances, and what it is: "seeds", "steps" or "percent", as in `Distance`.

        With two seeds or more their sample standard deviation, else `noise`, else 0.5 % of the value; never
        less than 0.1 % of it. Seeds that all came to the same value say as little about chance as one. The
        value counts as 0.1 % of the first one at least, and as 1 if both are 0.
        """
        if self.value is None or not math.isfinite(self.value):
            return None, "percent"
        size = max(abs(self.value), ARRIVED * abs(self.first or 0))
        size = size if size > SMALLEST else 1.0
        if len(set(self.values)) > 1:
            return max(deviation(self.values), LEAST_SPREAD * size), "seeds"
        if self.noise is not None:
            return max(self.noise, LEAST_SPREAD * size), "steps"
        return GUESSED_SPREAD * size, "percent"


def distance(sample: SeedValues, baseline: SeedValues, *, lower_is_better: bool) -> Distance:
    """Returns how far a sample is from the baseline in the spreads of the latter; positive is better.

    Without spreads if one of the two has no finite value.
    """
    spread, unit = baseline.spread()
    value, origin = sample.value, baseline.value
    if spread is None or value is None or not math.isfinite(value):
        return Distance(value, origin, None, spread, unit)
    spreads = (origin - value if lower_is_better else value - origin) / spread
    return Distance(value, origin, spreads, spread, unit)


def distances(
    own: Sequence[RunRecord], baseline: Sequence[RunRecord]
) -> tuple[Distance, dict[str, Distance]]:
    """Returns the distances of the final loss and of each metric about accuracy, from runs that finished.

    O0 has no distance from itself.
    """
    samples = {"": (loss_sample(own), loss_sample(baseline), True)}
    for name in compared_metrics([*baseline, *own]):
        samples[name] = metric_sample(own, name), metric_sample(baseline, name), is_lower_better(name)
    found = {name: distance(own, origin, lower_is_better=low) for name, (own, origin, low) in samples.items()}
    if own is baseline:
        found = {name: replace(it, spreads=None) for name, it in found.items()}
    return found.pop(""), found


def compared_metrics(records: Iterable[RunRecord]) -> list[str]:
    """Returns the names of the metrics about accuracy, in the order in which they were first reported."""
    reported = [name for record in records if record.measured for name in record.measured.metrics]
    return [name for name in dict.fromkeys(reported) if is_about_accuracy(name)]


def loss_sample(records: Sequence[RunRecord]) -> SeedValues:
    """Returns the final losses of runs."""
    return SeedValues(
        values=by_seed(records, lambda it: it.final_loss),
        first=finite(mean(by_seed(records, lambda it: it.first_loss))),
        noise=finite(mean(by_seed(records, lambda it: it.loss_noise))),
    )


def metric_sample(records: Sequence[RunRecord], name: str) -> SeedValues:
    """Returns the last values of a metric, and what it was when it was first reported."""
    first = mean(by_seed(records, lambda it: next(iter(it.metrics.get(name, Curve()).values), None)))
    return SeedValues(by_seed(records, lambda it: it.final(name)), finite(first))


def by_seed(records: Sequence[RunRecord], read: Callable[[Measured], float | None]) -> tuple[float, ...]:
    """Returns the mean over the repeats of each seed that has values, in the order of the seeds."""
    values: dict[int, list[float]] = defaultdict(list)
    for record in records:
        value = read(record.measured) if record.measured else None
        if value is not None:
            values[record.seed].append(value)
    return tuple(mean(values[seed]) for seed in sorted(values))


def mean(values: Sequence[float]) -> float | None:
    """Returns the mean, None of nothing; the order makes no difference, not even in the last bit.

    `statistics.fmean` raises for inf beside -inf and for what adds up to more than a float holds.

    >>> mean([0.25, 0.75]), mean([math.inf, -math.inf]), mean([])
    (0.5, nan, None)
    """
    return sum(sorted(values)) / len(values) if values else None


def deviation(values: Sequence[float]) -> float:
    """Returns the sample standard deviation of two values or more; inf where `statistics.stdev` raises.

    >>> deviation([1.0, 3.0])
    1.4142135623730951
    """
    center = mean(values)
    return math.hypot(*(value - center for value in sorted(values))) / math.sqrt(len(values) - 1)


def finite(value: float | None) -> float | None:
    """Returns the value if it is a finite number, else None."""
    return value if value is not None and math.isfinite(value) else None
