"""Sweeps made by hand, as they come out of real scripts: for the tests of what shows and compares them."""

import math
import random
import statistics
from dataclasses import dataclass, replace

from ampatch.sweeps.records.record import Bytes, CastRate, Curve, Ending, Measured, Record, Spread
from ampatch.sweeps.records.sweep import (
    Distance,
    Environment,
    Recommendation,
    Settings,
    Sweep,
    SweepRow,
    Verdict,
)

MIB = 2**20
WEIGHTS = 11_689_512  # of a ResNet-18
VARIANT = "O2 keep_batchnorm_fp32=False loss_scale=128"
CRASHING = "O5 cast_model_outputs=float16"
HALF_SCALE = 65536.0

TRACEBACK = (
    "epoch 1: loss 2.2917",
    "Traceback (most recent call last):",
    '  File "/home/ada/projects/image-classification/experiments/train_with_a_rather_long_name.py", line 214, in <module>',  # noqa: E501
    "    main()",
    '  File "/home/ada/projects/image-classification/experiments/train_with_a_rather_long_name.py", line 131, in main',  # noqa: E501
    "    loss = F.nll_loss(F.log_softmax(outputs, dim=1), labels)",
    "RuntimeError: \"log_softmax_lastdim_kernel_impl\" not implemented for <Half> & 'Half'",
)

SETTINGS = Settings(
    script="examples/train.py",
    arguments=("--epochs", "12", "--data", "data/cifar-10"),
    rows=("O0", "O1", "O2", "O3", "O4", "O5", "autocast", VARIANT, CRASHING),
    seeds=3,
    repeat=1,
    warmup=5,
    tolerance=2.0,
)

ENVIRONMENT = Environment(
    created="2026-11-21T17:05:32+01:00",
    command=(
        "ampatch sweep examples/train.py --seeds 3 --variant"
        f" '{VARIANT}' --variant '{CRASHING}' --out sweeps/cifar -- --epochs 12 --data data/cifar-10"
    ),
    commit="659de88f1a2b3c4d5e6f708192a3b4c5d6e7f809+",
    ampatch="0.1.0",
    torch="2.13.0+cu130",
    python="3.11.7",
    platform="Linux-6.1.0-x86_64-with-glibc2.36",
    cpu="AMD EPYC 9354 32-Core Processor",
    cores=64,
    threads=32,
    device="NVIDIA H200",
)


@dataclass(frozen=True)
class Kind:
    """How the runs of a row go: its speed, memory, losses and what else tells it from the others."""

    name: str
    ms: float
    peak: float
    loss: float
    accuracy: float
    weight_bytes: int = 4  # of a parameter
    masters: bool = False
    cast_bytes: int = 0
    casts: tuple[float, float] | None = None
    scale: str = "none"  # "none", "fixed" or "dynamic"
    end: str = "well"  # "well", "diverges" or "crashes"
    verdict: Verdict = Verdict.SAME
    reason: str = ""


KINDS = (
    Kind("O0", 41.8, 5210, 0.214, 0.9312, verdict=Verdict.BASELINE),
    Kind("O1", 21.4, 3140, 0.2151, 0.9308, cast_bytes=2, casts=(41.5, 62.0), scale="dynamic"),
    Kind("O2", 17.2, 2790, 0.2163, 0.9301, 2, masters=True, scale="dynamic"),
    Kind(
        *("O3", 15.9, 2600, 0.2, 0.1000, 2),
        **{"end": "diverges", "verdict": Verdict.DIVERGED, "reason": "loss is NaN from step 61 on"},
    ),
    Kind("O4", 21.9, 3150, 0.2146, 0.9310, cast_bytes=2, casts=(41.5, 62.0)),
    Kind("O5", 16.1, 2795, 0.2155, 0.9305, 2, masters=True),
    Kind("autocast", 22.8, 3180, 0.2149, 0.9311, cast_bytes=2, scale="dynamic"),
    Kind(
        *(VARIANT, 16.9, 2785, 0.2312, 0.9224, 2),
        **{"masters": True, "scale": "fixed", "verdict": Verdict.WORSE},
        reason="accuracy is 6.3 spreads below O0",
    ),
    Kind(CRASHING, 0, 0, 0, 0, end="crashes", verdict=Verdict.FAILED, reason="3 of 3 runs crashed"),
)


def sample_sweep(
    names: tuple[str, ...] = SETTINGS.rows,
    *,
    seeds: int = 3,
    steps: int = 390,
    metrics: bool = True,
    settings: Settings = SETTINGS,
    environment: Environment = ENVIRONMENT,
) -> Sweep:
    """Returns a sweep over these rows: O0 to O5, autocast, a worse variant, O3 diverges, and one crashes."""
    kinds = [kind for kind in KINDS if kind.name in names]
    records = tuple(sample_record(kind, seed, steps, metrics) for seed in range(seeds) for kind in kinds)
    fastest = min((kind.ms for kind in kinds if kind.ms), default=None)
    rows = tuple(sample_row(kind, records, fastest) for kind in kinds)
    return Sweep(
        settings=replace(settings, rows=tuple(kind.name for kind in kinds), seeds=seeds),
        environment=environment,
        records=records,
        rows=rows,
        recommendation=recommend(rows),
    )


def recommend(rows: tuple[SweepRow, ...]) -> Recommendation:
    """Returns the fastest of the rows that are the same as O0."""
    same = [row for row in rows if row.verdict is Verdict.SAME and row.step_ms]
    if not same:
        return Recommendation(None, "no level finished with the accuracy of O0")
    best = min(same, key=lambda row: row.step_ms.median)
    reason = (
        f"the fastest level whose accuracy is the same as that of O0: {best.speed:.2f} times as fast,"
        f" with {best.memory:.0%} of its memory"
    )
    return Recommendation(best.name, reason)


# ---- One run ----


def sample_record(kind: Kind, seed: int, steps: int, metrics: bool) -> Record:
    """Returns a run of a row; the same seed gives the same run."""
    slug = "-".join(kind.name.replace("=", "-").split())
    common = {"row": kind.name, "seed": seed, "repeat": 0, "log": f"logs/{slug}-seed{seed}-repeat0.log"}
    if kind.end == "crashes":
        return Record(
            **common,
            outcome=Ending.CRASHED,
            seconds=4.2 + seed / 10,
            cause=TRACEBACK[-1],
            last_lines=TRACEBACK,
            measured=Measured(initialized=True, memory="device", device="cuda:0", threads=32),
        )
    measured = sample_measured(kind, random.Random(f"{kind.name}{seed}"), steps, metrics)
    return Record(**common, outcome=Ending.FINISHED, seconds=3 + steps * kind.ms / 1000, measured=measured)


def sample_measured(kind: Kind, chance: random.Random, steps: int, metrics: bool) -> Measured:
    """Returns what was measured in a run that finished."""
    losses = loss_curve(kind, chance, steps)
    scales = scale_curve(kind, chance, steps)
    ms = kind.ms * chance.uniform(0.99, 1.01)
    last = losses.values[-10:]
    return Measured(
        initialized=True,
        steps=steps,
        skipped=tuple(step for step in skips_of(scales, kind) if step <= steps),
        step_ms=spread(ms, steps),
        forward_ms=spread(ms * 0.31, steps),
        backward_ms=spread(ms * 0.55, steps),
        update_ms=spread(ms * 0.09, steps),
        samples=128.0,
        memory="device",
        peak_mib=kind.peak + chance.uniform(-2, 2),
        bytes=bytes_of(kind),
        casts=kind.casts and CastRate(*kind.casts),
        losses={"0": losses},
        first_loss=statistics.fmean(losses.values[:10]) if losses.values else None,
        final_loss=statistics.fmean(last) if last else None,
        loss_noise=0.004,
        loss_scales={"0": scales},
        metrics=metric_curves(kind, chance, steps) if metrics else {},
        device="cuda:0",
        threads=32,
    )


def spread(ms: float, steps: int = 390) -> Spread:
    """Returns a spread that leans to the slow side, as times do; its count is that after the warm-up."""
    times = max(steps - 1, 1)
    count = times - SETTINGS.warmup if times > SETTINGS.warmup else times - times // 2
    return Spread(median=ms, low=ms * 0.985, high=ms * 1.04, count=count)


def bytes_of(kind: Kind) -> Bytes:
    """Returns the bytes of a model whose optimizer keeps one float32 momentum of each weight."""
    return Bytes(
        parameters=WEIGHTS * kind.weight_bytes,
        masters=WEIGHTS * 4 if kind.masters else 0,
        gradients=WEIGHTS * (kind.weight_bytes + 4 * kind.masters),
        optimizer_state=WEIGHTS * (4 if kind.masters else kind.weight_bytes),
        casts=WEIGHTS * kind.cast_bytes,
    )


def loss_curve(kind: Kind, chance: random.Random, steps: int) -> Curve:
    """Returns a loss that falls from ln(10) and gets noisy; one that diverges ends as NaN."""
    rate, values = 9 / max(steps, 1), []
    for step in range(steps):
        value = kind.loss + (2.3026 - kind.loss) * math.exp(-rate * step)
        value *= 1 + chance.gauss(0, 0.06) * (1 - math.exp(-rate * step))
        if kind.end == "diverges" and step > 40:
            value *= 1.4 ** min(step - 40, 20)
        values.append(math.nan if kind.end == "diverges" and step >= 60 else value)
    return Curve(tuple(range(1, steps + 1)), tuple(values))


def scale_curve(kind: Kind, chance: random.Random, steps: int) -> Curve:
    """Returns the loss scale where it changed: three halvings at the start, and now and then one more."""
    if kind.scale != "dynamic":
        return Curve((1,), (128.0 if kind.scale == "fixed" else 1.0,)) if steps else Curve()
    changes, scale = [(1, HALF_SCALE)], HALF_SCALE
    for step in range(2, steps + 1):
        if step <= 4 or chance.random() < 0.008:
            scale /= 2
            changes.append((step, scale))
        elif step % 100 == 0:
            scale *= 2
            changes.append((step, scale))
    changes = changes[: max(steps, 0)]
    return Curve(tuple(step for step, _ in changes), tuple(scale for _, scale in changes))


def skips_of(scales: Curve, kind: Kind) -> list[int]:
    """Returns the steps that an overflow skipped: those after which the scale was lower."""
    pairs = zip(scales.values, scales.values[1:], strict=False)
    return [step - 1 for step, (old, new) in zip(scales.steps[1:], pairs, strict=True) if new < old]


def metric_curves(kind: Kind, chance: random.Random, steps: int) -> dict[str, Curve]:
    """Returns the accuracy after each of 13 parts of the training, and one number said at the end."""
    marks = sorted({max(1, steps * part // 13) for part in range(1, 14)}) if steps else [0]
    final = kind.accuracy + chance.gauss(0, 0.0012)
    curve = [0.1 + (final - 0.1) * (1 - math.exp(-6 * mark / max(steps, 1))) for mark in marks[:-1]]
    return {
        "accuracy": Curve(tuple(marks), (*curve, final)),
        "top5_accuracy": Curve((marks[-1],), (min(0.9985, final * 1.07),)),
    }


# ---- One row ----


def sample_row(kind: Kind, records: tuple[Record, ...], fastest: float | None) -> SweepRow:
    """Returns what the runs of a row came to."""
    own = [record for record in records if record.row == kind.name]
    measured = [record.measured for record in own if not record.failed and record.measured]
    done = bool(measured) and all(it.steps for it in measured)
    first = KINDS[0]
    return SweepRow(
        name=kind.name,
        runs=len(own),
        failed=sum(record.failed for record in own),
        outcome=Ending.FINISHED if measured else Ending.CRASHED,
        step_ms=spread(kind.ms) if done else None,
        forward_ms=kind.ms * 0.31 if done else None,
        backward_ms=kind.ms * 0.55 if done else None,
        update_ms=kind.ms * 0.09 if done else None,
        steps_per_second=1000 / kind.ms if done else None,
        samples_per_second=128_000 / kind.ms if done else None,
        peak_mib=kind.peak if done else None,
        speed=first.ms / kind.ms if done else None,
        speed_to_fastest=fastest / kind.ms if done and fastest else None,
        memory=kind.peak / first.peak if done else None,
        memory_to_fastest=kind.peak / 2600 if done else None,
        skipped=statistics.fmean(len(it.skipped) for it in measured) if done else None,
        loss_scale=statistics.median(it.loss_scale for it in measured) if done else None,
        loss=loss_distance(kind, done),
        metrics=metric_distances(kind, measured) if done else {},
        verdict=kind.verdict,
        reason=kind.reason,
    )


def loss_distance(kind: Kind, done: bool) -> Distance:
    """Returns the distance of the final loss, where less is better."""
    if not done:
        return Distance(None, KINDS[0].loss, None, 0.003, "seeds")
    if kind.end == "diverges":
        return Distance(math.nan, KINDS[0].loss, None, 0.003, "seeds")
    spreads = None if kind is KINDS[0] else (KINDS[0].loss - kind.loss) / 0.003
    return Distance(kind.loss, KINDS[0].loss, spreads, 0.003, "seeds")


def metric_distances(kind: Kind, measured: list[Measured]) -> dict[str, Distance]:
    """Returns the distance of each metric, where more is better."""
    found = {}
    for name in measured[0].metrics if measured else ():
        part = 1.0 if name == "accuracy" else 1.07
        value, baseline = (min(0.9985, it.accuracy * part) for it in (kind, KINDS[0]))
        spreads = None if kind is KINDS[0] else (value - baseline) / 0.0014
        found[name] = Distance(value, baseline, spreads, 0.0014, "seeds")
    return found
