"""Numbers of many runs made into one, and how far they are from those of O0, by what chance does to them."""

from __future__ import annotations

import math
import re
import statistics
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ampatch.sweeps.rows import TOLERANCE, Distance, Run

# Parts of O0's value. Where seeds agree to the last digits by luck, the tiniest difference would be very many
# spreads; where nothing is known about chance, half a percent is a guess, and a tenth is beyond it.
LEAST_SPREAD = 0.001
GUESSED_SPREAD = 0.005
CLEAR = 0.1
# A single move may be small by chance: Student's t of one degree of freedom has at 12.7 deviations what a
# normal deviate has at 2.
OF_ONE_MOVE = 6.35
# A loss that fell to less than this part of its first value has arrived at zero. bfloat16 rounds by 2**-9: a
# mean squared error stops at 4e-6 of its first value there, which two of the least spreads are above.
ARRIVED = 0.005
SMALLEST = 1e-37  # what is smaller is 0 in float32
LAST_VALUES = 5  # of a metric, which show how much it moves while it is trained
MOST_SAMPLES = 10_000  # of an accuracy that is told from other numbers


# ---- One number of many ----


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


def median_of(runs: Iterable[Run], field: str) -> float | None:
    """Returns the median over the runs that have the number."""
    values = [value for run in runs if (value := getattr(run, field)) is not None]
    return statistics.median(values) if values else None


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the low quartile, the median and the high one.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0]), quartiles([7.0])
    ((2.0, 3.0, 4.0), (7.0, 7.0, 7.0))
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, statistics.median(values), high


def pooled_times(runs: Iterable[Run]) -> dict[str, float | int | None]:
    """Returns the times of several runs as one: the median of their medians, and quartiles around it.

    Steps of one run are alike, and runs may differ by more than their steps do. So a quartile is that of the
    typical run (the median of the runs' own) or that of the runs' medians, whichever is farther out.
    """
    timed = [run for run in runs if run.step_ms is not None]
    if not timed:
        return {"step_ms": None, "step_ms_low": None, "step_ms_high": None, "timed": 0}
    low, middle, high = quartiles([run.step_ms for run in timed])
    return {
        "step_ms": middle,
        "step_ms_low": min(low, statistics.median(run.step_ms_low for run in timed)),
        "step_ms_high": max(high, statistics.median(run.step_ms_high for run in timed)),
        "timed": sum(run.timed for run in timed),
    }


def divide(value: float | None, unit: float | None) -> float | None:
    """Divides, where there are two numbers that can be divided.

    >>> divide(3.0, 2.0), divide(3.0, None), divide(3.0, 0.0)
    (1.5, None, None)
    """
    return None if value is None or not unit else value / unit


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# ---- One quantity of a level ----


@dataclass(frozen=True, slots=True)
class Quantity:
    """One quantity of a level's runs: its mean for each seed, its first value, and what chance does to it.

    With one seed `noise` is what the steps of a run show of chance, and `moves` what runs do: how far
    autocast went from O0, and repeats of O0 from each other. Each is None where nothing is known.
    """

    values: tuple[float, ...]
    first: float | None = None
    noise: float | None = None
    moves: float | None = None

    @property
    def value(self) -> float | None:
        return mean(self.values)

    def spread(self) -> tuple[float | None, str]:
        """Returns the unit for distances, and what it is, as in `Distance`.

        With two seeds or more their sample standard deviation, else the larger of `noise` and `moves`, else
        0.5 % of the value; never less than 0.1 % of it. Seeds that all came to the same value say as little
        about chance as one. The value counts as 0.5 % of the first one at least, and as 1 if both are 0.
        """
        if self.value is None or not math.isfinite(self.value):
            return None, "percent"
        size = self.size
        if len(set(self.values)) > 1:
            return max(deviation(self.values), LEAST_SPREAD * size), "seeds"
        known = [(self.noise, "steps"), (self.moves, "runs")]
        spreads = [(spread, unit) for spread, unit in known if spread is not None]
        if not spreads:
            return GUESSED_SPREAD * size, "percent"
        return max([*spreads, (LEAST_SPREAD * size, spreads[0][1])])

    @property
    def size(self) -> float:
        """Returns how large the value is, for parts of it."""
        size = max(abs(self.value), ARRIVED * abs(self.first or 0))
        return size if size > SMALLEST else 1.0


def distance(own: Quantity, baseline: Quantity, *, lower_is_better: bool) -> Distance:
    """Returns how far a quantity is from the baseline in the spreads of the latter; positive is better.

    Without spreads if one of the two has no finite value.
    """
    spread, unit = baseline.spread()
    value, origin = own.value, baseline.value
    if spread is None or value is None or not math.isfinite(value):
        return Distance(value, origin, None, spread, unit)
    spreads = (origin - value if lower_is_better else value - origin) / spread
    doubt = 0.0 if unit == "seeds" else doubt_of(baseline, value, unit) / spread
    return Distance(value, origin, spreads, spread, unit, doubt)


def doubt_of(baseline: Quantity, value: float, unit: str) -> float:
    """Returns the difference up to which one seed cannot tell that a value is worse.

    That is one sample, where the values are parts of so many, and what drawing these again would change in as
    many spreads as are allowed (the deviation of a binomial). Where nothing else is known it is a tenth of
    O0's value, and where one move is known, as many spreads as a single one can tell.
    """
    guesses = {"percent": CLEAR * baseline.size, "runs": OF_ONE_MOVE * TOLERANCE * baseline.spread()[0]}
    guess = guesses.get(unit, 0.0)
    part, count = baseline.value, count_samples(baseline.value, value)
    if not count:
        return guess
    return max(guess, TOLERANCE * math.sqrt(part * (1 - part) / count), 1.01 / count)


def count_samples(*values: float) -> int:
    """Returns of how many samples values may be parts, as an accuracy is; 0 if they are none.

    >>> count_samples(69 / 500, 68 / 500), count_samples(0.9, 0.85), count_samples(0.7312345678)
    (500, 20, 0)
    """
    if not all(0 < value < 1 for value in values):
        return 0
    parts = [Fraction(value).limit_denominator(MOST_SAMPLES) for value in values]
    if any(abs(float(part) - value) > rounding(value) for part, value in zip(parts, values, strict=True)):
        return 0
    count = math.lcm(*(part.denominator for part in parts))
    return count if count <= MOST_SAMPLES else 0


def rounding(value: float) -> float:
    """Returns how far a number may be from what it was before it was rounded, to float32 if that fits."""
    is_single = struct.unpack("f", struct.pack("f", value))[0] == value
    return (2**-24 if is_single else 2**-52) * value


# ---- The loss and the metrics of a level ----


def distances(
    own: Sequence[Run], baseline: Sequence[Run], yardstick: Sequence[Run] = ()
) -> tuple[Distance, dict[str, Distance]]:
    """Returns the distances of the final loss and of each metric about accuracy, from runs that finished.

    `yardstick` are the runs of autocast. O0 has no distance from itself.
    """
    names = [None, *compared_metrics([*baseline, *own])]
    by_name = {}
    for name in names:
        origin = with_moves(quantity_of(baseline, name), baseline, yardstick, name)
        lower = name is None or is_lower_better(name)
        by_name[name] = distance(quantity_of(own, name), origin, lower_is_better=lower)
    if own is baseline:
        by_name = {name: replace(distance, spreads=None, doubt=0.0) for name, distance in by_name.items()}
    return by_name.pop(None), by_name


def compared_metrics(runs: Iterable[Run]) -> list[str]:
    """Returns the names of the metrics about accuracy, in the order in which they were first reported."""
    return [
        name
        for name in dict.fromkeys(name for run in runs for name in run.metrics)
        if is_about_accuracy(name)
    ]


def quantity_of(runs: Sequence[Run], metric: str | None = None) -> Quantity:
    """Returns the final losses of runs, or the last values of a metric."""
    if metric is None:
        values = by_seed(runs, lambda run: run.final_loss)
        first = mean(by_seed(runs, lambda run: run.first_loss))
        return Quantity(values, finite(first), finite(mean(by_seed(runs, lambda run: run.loss_noise))))
    curves = [curve.values for run in runs if (curve := run.metrics.get(metric)) and curve.values]
    first = mean([values[0] for values in curves])
    noises = [deviation(values[-LAST_VALUES:]) for values in curves if len(values) >= LAST_VALUES]
    return Quantity(by_seed(runs, lambda run: run.last(metric)), finite(first), finite(mean(noises)))


def with_moves(
    sample: Quantity, baseline: Sequence[Run], yardstick: Sequence[Run], metric: str | None
) -> Quantity:
    """Adds how far autocast went from O0, and the repeats of O0 from each other.

    Those that came to the same to the last bit say that nothing was drawn, and nothing about chance.
    """
    if sample.value is None or not math.isfinite(sample.value):
        return sample
    other = finite(quantity_of(yardstick, metric).value)
    moves = [] if other is None else [abs(other - sample.value)]
    for seed in {run.seed for run in baseline}:
        own = [run.final_loss if metric is None else run.last(metric) for run in baseline if run.seed == seed]
        repeats = [value for value in own if finite(value) is not None]
        if len(repeats) > 1:
            moves.append(deviation(repeats))
    return replace(sample, moves=max(moves, default=0.0) or None)


def by_seed(runs: Iterable[Run], read: Callable[[Run], float | None]) -> tuple[float, ...]:
    """Returns the mean over the repeats of each seed that has values, in the order of the seeds."""
    values: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        if (value := read(run)) is not None:
            values[run.seed].append(value)
    return tuple(mean(values[seed]) for seed in sorted(values))


# ---- What the names of metrics say: which way is better, and which tell nothing about accuracy ----


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER_IS_BETTER = word_set("""
    mae mape smape msle rmsle mase rmsd medae mre wer cer ter der eer fid kid lpips bpc bpd bpb bits ce bce
    xent kl kld jsd mmd divergence ece brier crps fpr fnr fdr frr false miss misses misclassified
    misclassification mistakes regret cost distance dist distortion discrepancy residual huber chamfer
    wasserstein emd hausdorff epe mpjpe ade fde mcd time ms sec secs second seconds minutes hours latency
    elapsed
""")
# Written together with what they are of: logloss, valerror, nrmse, crossentropy.
LOWER_ENDINGS = ("loss", "losses", "err", "error", "errors", "mse", "nll", "ppl", "perplexity", "entropy")
NO_ENDINGS = word_set("terror floss gloss")
# scikit-learn's neg_mean_squared_error is an error turned round, and a negative log likelihood is a
# likelihood turned round; a true negative rate is neither.
NEGATIONS = word_set("neg negative")
TURNED_ROUND = word_set("log likelihood elbo score reward accuracy acc")

# Numbers that say where a run was, how fast, or how it was set: levels may differ in them and be as accurate.
NO_ACCURACY = word_set("""
    step steps epoch epochs iteration iterations iter iters batch batches sample samples token tokens image
    images seed lr learning momentum scale scaler norm time ms sec secs second seconds minute minutes hour
    hours latency elapsed throughput speed fps memory mem mib mb gib gb bytes
""")
FILLERS = word_set("""
    global local train training val valid validation test eval total num number count current last per a of in
    and seen rate group loss grad gradient gradients gpu cuda cpu peak max mean avg average
""")
HELD_OUT = word_set("test val valid validation eval dev")
ACCURACY = word_set("accuracy acc")


def split_words(name: str) -> list[str]:
    """Splits a name at case, digits and whatever is no letter.

    >>> split_words("val/MSELoss_top5"), split_words("testAccuracy")
    (['val', 'mse', 'loss', 'top', '5'], ['test', 'accuracy'])
    """
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def is_lower_better(name: str) -> bool:
    """Says whether less of a metric is better, by the words of its name; where none is known, more is.

    >>> [is_lower_better(name) for name in ("valLoss", "top5_err", "neg_log_likelihood", "hd95")]
    [True, True, True, True]
    >>> [is_lower_better(name) for name in ("accuracy", "lossless", "neg_mean_squared_error")]
    [False, False, False]
    """
    parts = split_words(name)
    # hd95 is the usual Hausdorff distance; hd alone says too little.
    return any(map(means_less, parts)) != is_turned_round(parts) or "hd95" in name.lower()


def means_less(word: str) -> bool:
    """Says whether less is better of what a word means."""
    return word in LOWER_IS_BETTER or (word.endswith(LOWER_ENDINGS) and word not in NO_ENDINGS)


def is_turned_round(parts: Sequence[str]) -> bool:
    """Says whether a name is that of something negated, so that its other direction is better."""
    starts = [index for index, word in enumerate(parts) if word in NEGATIONS]
    return any(word in TURNED_ROUND or means_less(word) for start in starts for word in parts[start + 1 :])


def is_about_accuracy(name: str) -> bool:
    """Says whether a metric can tell how well a run went: not if it counts steps, seconds or the like.

    >>> [is_about_accuracy(name) for name in ("accuracy", "loss_epoch", "top1", "inception_score")]
    [True, True, True, True]
    >>> [is_about_accuracy(name) for name in ("epoch", "lr/group0", "samples_per_second", "loss_scale")]
    [False, False, False, False]
    """
    parts = {word for word in split_words(name) if not word.isdigit()}
    if "loss" in parts and not parts & {"scale", "scaler"}:
        return True
    return not parts & NO_ACCURACY or not parts <= NO_ACCURACY | FILLERS


def most_important(names: Iterable[str]) -> str | None:
    """Returns the metric to show where there is room for one: an accuracy, if there, on held-out data.

    >>> most_important(["f1", "train_accuracy", "test_accuracy"]), most_important(["f1", "bleu"])
    ('test_accuracy', 'f1')
    """

    def rank(name: str) -> tuple[bool, bool, bool]:
        parts = set(split_words(name))
        return name.lower() != "accuracy", not parts & ACCURACY, not parts & HELD_OUT

    return min(names, key=rank, default=None)
