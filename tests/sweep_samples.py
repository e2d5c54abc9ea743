"""Runs made by hand, as they come out of real scripts: for the tests of what sums them up and shows them."""

import math
from dataclasses import dataclass, replace

from ampatch.sweeps.judge.advice import summarize
from ampatch.sweeps.rows import Curve, Ending, Environment, Run, Settings, Sweep

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
)

ENVIRONMENT = Environment(
    created="2026-11-21T17:05:32+01:00",
    command=(
        "ampatch sweep examples/train.py --seeds 3 --variant"
        f" '{VARIANT}' --variant '{CRASHING}' --out sweeps/cifar -- --epochs 12 --data data/cifar-10"
    ),
    ampatch="0.1.0",
    torch="2.13.0+cu130",
    python="3.11.7",
    platform="Linux-6.1.0-x86_64-with-glibc2.36",
    cpu="AMD EPYC 9354 32-Core Processor",
    cores=64,
    threads=32,
    device="NVIDIA H200",
)


def run(row="O1", loss=0.5, *, ms=10.0, mib=100.0, noise=None, first=2.0, **fields) -> Run:
    """Returns a run of 100 steps; `fields` that `Run` does not have are metrics, a number or several.

    `ms` is the time of a step, or its median with both quartiles.
    """
    known = {name: fields.pop(name) for name in list(fields) if name in Run.__dataclass_fields__}
    values = {name: value if isinstance(value, tuple) else (value,) for name, value in fields.items()}
    metrics = {name: Curve(tuple(range(len(it))), it) for name, it in values.items()}
    given = {"steps": 100, "seconds": 1.0, "peak_mib": mib, "metrics": metrics, **times(ms)}
    given |= {"first_loss": first, "final_loss": loss, "loss_noise": noise, "initialized": True}
    return Run(row, **given | known)


def times(ms) -> dict:
    """Returns the fields of a time of a step: its median, and quartiles that are given or lie 5 % away."""
    if ms is None:
        return {}
    median, low, high = ms if isinstance(ms, tuple) else (ms, 0.95 * ms, 1.05 * ms)
    return {"step_ms": median, "step_ms_low": low, "step_ms_high": high, "timed": 100}


# ---- A whole sweep ----


@dataclass(frozen=True)
class Kind:
    """How the runs of a row go: its speed, memory, losses and what else tells it from the others."""

    name: str
    ms: float
    peak: float
    loss: float
    accuracy: float
    scale: str = "none"  # "none", "fixed" or "dynamic"


KINDS = (
    Kind("O0", 41.8, 5210, 0.214, 0.9312),
    Kind("O1", 21.4, 3140, 0.2151, 0.9308, scale="dynamic"),
    Kind("O2", 17.2, 2790, 0.2163, 0.9301, scale="dynamic"),
    Kind("O3", 15.9, 2600, math.nan, 0.1000),
    Kind("O4", 21.9, 3150, 0.2146, 0.9310),
    Kind("O5", 16.1, 2795, 0.2155, 0.9305),
    Kind("autocast", 22.8, 3180, 0.2149, 0.9311, scale="dynamic"),
    Kind(VARIANT, 16.9, 2785, 0.2312, 0.9224, scale="fixed"),
    Kind(CRASHING, 0, 0, 0, 0),
)


def sample_sweep(
    names: tuple[str, ...] = SETTINGS.rows, *, seeds: int = 3, steps: int = 390, metrics: bool = True
) -> Sweep:
    """Returns a sweep over these rows: O0 to O5, autocast, a worse variant, O3 diverges, and one crashes."""
    kinds = [kind for kind in KINDS if kind.name in names]
    records = [sample_record(kind, seed, steps, metrics) for seed in range(seeds) for kind in kinds]
    settings = replace(SETTINGS, rows=tuple(kind.name for kind in kinds), seeds=seeds)
    return summarize(settings, ENVIRONMENT, records)


def sample_record(kind: Kind, seed: int, steps: int, metrics: bool = True) -> Run:
    """Returns a run of a row; its loss and metrics differ a little from those of other seeds."""
    log = f"logs/{'-'.join(kind.name.replace('=', '-').split())}-seed{seed}-repeat0.log"
    which = {
        "row": kind.name,
        "seed": seed,
        "log": log,
        "memory": "device",
        "device": "cuda:0",
        "threads": 32,
    }
    if kind.name == CRASHING:
        how = {
            "outcome": Ending.CRASHED,
            "seconds": 4.2 + seed / 10,
            "cause": TRACEBACK[-1],
            "lines": TRACEBACK,
        }
        return Run(**which, **how, initialized=True)
    return Run(**which, seconds=3 + steps * kind.ms / 1000, **sample_fields(kind, seed - 1, steps, metrics))


def sample_fields(kind: Kind, luck: int, steps: int, metrics: bool) -> dict:
    """Returns what was measured in a run that finished; times lean to the slow side, as times do."""
    loss, scales = kind.loss + 0.003 * luck, scale_curve(kind, steps)
    pairs = zip(scales.values, scales.values[1:], scales.steps[1:], strict=False)
    timed = times((kind.ms, kind.ms * 0.985, kind.ms * 1.04)) | {"timed": steps - 1}
    return {
        "initialized": True,
        "steps": steps,
        "skipped": tuple(step - 1 for old, new, step in pairs if new < old),
        **(timed if steps > 1 else {}),
        "peak_mib": kind.peak,
        "losses": {"0": loss_curve(loss, steps)},
        "first_loss": 2.3 if steps else None,
        "final_loss": loss if steps else None,
        "loss_noise": 0.004,
        "loss_scale": scales.values[-1] if steps else None,
        "metrics": metric_curves(kind.accuracy + 0.0014 * luck, steps) if metrics else {},
    }


def loss_curve(final: float, steps: int) -> Curve:
    """Returns a loss that falls from ln(10) with a little noise, or to NaN at step 61."""
    end, values = final if math.isfinite(final) else 0.2, []
    for step in range(steps):
        falling = math.exp(-9 * step / steps)
        values.append(end + (2.3026 - end) * falling + 0.01 * math.sin(step) * (1 - falling))
    return Curve(tuple(range(1, steps + 1)), tuple(values[:60] + [it + final - end for it in values[60:]]))


def scale_curve(kind: Kind, steps: int) -> Curve:
    """Returns the loss scale where it changed: three halvings at the start, and now and then one more."""
    if kind.scale != "dynamic":
        return Curve((1,), (128.0 if kind.scale == "fixed" else 1.0,)) if steps else Curve()
    scales = {1: HALF_SCALE} if steps else {}
    for step in range(2, steps + 1):
        last = scales[max(scales)]
        if step <= 4 or step % 150 == 0:
            scales[step] = last / 2
        elif step % 100 == 0:
            scales[step] = last * 2
    return Curve(tuple(scales), tuple(scales.values()))


def metric_curves(final: float, steps: int) -> dict[str, Curve]:
    """Returns the accuracy after each of 13 parts of the training, and one number said at the end."""
    marks = sorted({max(1, steps * part // 13) for part in range(1, 14)}) if steps else [0]
    curve = [0.1 + (final - 0.1) * (1 - math.exp(-6 * mark / max(steps, 1))) for mark in marks[:-1]]
    return {
        "accuracy": Curve(tuple(marks), (*curve, final)),
        "top5_accuracy": Curve((marks[-1],), (final * 1.07,)),
    }
