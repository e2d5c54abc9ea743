"""The goals that results are held against. A run never fails for one: times depend on the machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.comparison import Comparison
from benchmarks.series import Series


@dataclass(frozen=True, slots=True)
class Goal:
    """At most so much for one contender, divided by another; or for itself."""

    what: str
    group: str
    subject: str
    variant: str
    contender: str
    base: str | None
    limit: float
    half: str
    device: str | None = "cpu"  # None: on each

    def select(self, comparison: Comparison) -> Series | None:
        """Returns what the limit is for; None where the comparison does not have it."""
        found = (comparison.group, comparison.subject, comparison.variant, comparison.setting.half_name)
        if found != (self.group, self.subject, self.variant, self.half):
            return None
        if self.device not in (None, comparison.setting.device):
            return None
        wanted = {self.contender, self.base or self.contender}
        if not wanted <= set(comparison.series):
            return None
        if self.base is None:
            return comparison.series[self.contender]
        return comparison.divide(self.contender, self.base)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came out for one goal on one setting."""

    goal: Goal
    comparison: Comparison
    series: Series

    @property
    def is_met(self) -> bool:
        """Whether the median is within the limit."""
        return self.series.median <= self.goal.limit

    def describe(self) -> dict[str, object]:
        """The verdict as a result holds it."""
        return {
            "what": self.goal.what,
            "limit": self.goal.limit,
            "met": self.is_met,
            **self.comparison.setting.describe(),
            **self.series.describe(),
        }


def judge(comparisons: Iterable[Comparison]) -> list[Verdict]:
    """Returns a verdict for each goal and each comparison that has what it is about."""
    kept = list(comparisons)
    return [
        Verdict(goal, comparison, series)
        for goal in GOALS
        for comparison in kept
        if (series := goal.select(comparison)) is not None
    ]


DEEP, WIDE, CONV, TRANSFORMER, LSTM = "deep thin MLP", "wide MLP", "conv net", "transformer", "LSTM"
SMALL = (CONV, WIDE, LSTM, TRANSFORMER, DEEP)
LARGE = ("BERT-sized encoder", "ResNet-50-sized net")

TRAIN_LIMITS = {CONV: 0.95, WIDE: 0.95, LSTM: 1.0, TRANSFORMER: 1.0, DEEP: 1.03}
ACCUMULATE_LIMITS = {CONV: 0.9, WIDE: 0.9, LSTM: 0.95, TRANSFORMER: 0.95, DEEP: 0.95}
# In eval autocast on a CPU takes the fused path of nn.TransformerEncoderLayer, in C++; O4 refuses it, because
# it ignores patched functions.
EVAL_LIMITS = {CONV: 0.92, WIDE: 0.92, LSTM: 0.92, TRANSFORMER: 1.0, DEEP: 0.92}
HALF_MODEL_LIMITS = {CONV: 1.02, WIDE: 1.02, LSTM: 1.02, TRANSFORMER: 1.05, DEEP: 1.08}
FLOAT16_LIMITS = {CONV: 0.98, WIDE: 0.98, LSTM: 0.98, DEEP: 1.05}
COMPILED_LIMITS = dict.fromkeys((CONV, WIDE, TRANSFORMER, DEEP), 1.0)  # torch compiles no LSTM
LIMITS = {
    "train": TRAIN_LIMITS,
    "accumulate 4": ACCUMULATE_LIMITS,
    "eval": EVAL_LIMITS,
    "train compiled": COMPILED_LIMITS,
}


def _step(workload: str, mode: str, ratio: str, limit: float, half: str, device: str = "cpu") -> Goal:
    contender, _, base = ratio.partition(" / ")
    what = f"{ratio} step: {workload}, {mode}"
    return Goal(what, "steps", workload, mode, contender, base, limit, half, device)


def _steps() -> Iterator[Goal]:
    bf16, fp16 = "bfloat16", "float16"
    for mode, limits in LIMITS.items():
        yield from (_step(it, mode, "O4 / autocast", limit, bf16) for it, limit in limits.items())
    yield from (_step(it, "train", "O5 / limit", limit, bf16) for it, limit in HALF_MODEL_LIMITS.items())
    yield from (_step(it, "train", "O1 / autocast", limit, fp16) for it, limit in FLOAT16_LIMITS.items())
    for workload in LARGE:
        yield _step(workload, "train", "O1 / autocast", 1.0, fp16, "cuda")
        yield _step(workload, "train", "O2 / autocast", 0.9, fp16, "cuda")


def _faults() -> Iterator[Goal]:
    for workload in SMALL:
        what = f"O4 / autocast page faults: {workload}"
        yield Goal(what, "faults", workload, "train", "O4", "autocast", 1.0, "bfloat16")


def _micro() -> Iterator[Goal]:
    for half, level in (("bfloat16", "O4"), ("float16", "O1")):
        for subject, limit in (("F.linear, float32 input", 1.3), ("F.linear, half input", 1.0)):
            what = f"cost that {level} adds / cost that autocast adds: {subject}"
            yield Goal(what, "micro", subject, "added", level, "autocast", limit, half)
        for op in ("F.relu", "torch.add"):
            what = f"{level} / unpatched: {op}, which is in no table"
            yield Goal(what, "micro", op, "whole", level, "unpatched", 1.02, half)
    for optimizer in ("AdamW, fused", "AdamW, foreach", "AdamW, plain", "SGD, foreach"):
        for level, limit in (("O1", 1.0), ("O2", 1.25)):
            subject = "update of 1,000 parameters"
            what = f"{level} / GradScaler: {subject}, {optimizer}"
            yield Goal(what, "micro", subject, optimizer, level, "GradScaler", limit, "float16")


def _memory() -> Iterator[Goal]:
    for workload in (*SMALL, *LARGE):
        what = f"O5 / autocast memory: {workload}"
        yield Goal(what, "memory", workload, "peak", "O5", "autocast", 1.0, "bfloat16", None)


def _syncs() -> Iterator[Goal]:
    for half, levels in (("bfloat16", ("O4", "O5")), ("float16", ("O1", "O2"))):
        for level in levels:
            for optimizer, limit in (("fused optimizer", 0), ("optimizer not fused", 1)):
                for workload in (*SMALL, *LARGE):
                    what = f"host syncs a step from {level}, {optimizer}: {workload}"
                    yield Goal(what, "syncs", workload, optimizer, level, None, limit, half, None)


def _measuring() -> Iterator[Goal]:
    for half, levels in (("bfloat16", ("O4", "O5")), ("float16", ("O1", "O2"))):
        for level in levels:
            for workload in (*SMALL, *LARGE):
                what = f"measured by a sweep / alone: {workload}, {level}"
                yield Goal(what, "measuring", workload, level, "measured", "alone", 1.01, half, None)
                what = f"diagnose=True / alone: {workload}, {level}"
                yield Goal(what, "measuring", workload, level, "diagnosed", "alone", 1.03, half, None)


GOALS = (*_steps(), *_faults(), *_micro(), *_memory(), *_syncs(), *_measuring())
