"""Sweeps that are hard to show: hostile names, huge numbers, nothing at all."""

import math
from dataclasses import replace

from ampatch.sweeps.judge.advice import summarize
from ampatch.sweeps.rows import Curve, Distance, Ending, Level, Outcome, Recommendation, Run, Sweep, Verdict
from sweep_samples import CRASHING, ENVIRONMENT, KINDS, SETTINGS, sample_record, sample_sweep

HOSTILE = "O2 <script>alert('x')</script> & \"quoted\" loss_scale=128"
UNBROKEN = "O1 " + "x" * 150
LONG_METRIC = "validation/" + "balanced_accuracy_of_the_exponential_moving_average" * 2
METRICS = (LONG_METRIC, "m" * 120, "a<b>&$x_1$", "d", "e", "f", "g")


def extreme_sweeps() -> dict[str, Sweep]:
    """Returns sweeps by what is hard about them."""
    return {
        "one step": sample_sweep(steps=1),
        "no steps": sample_sweep(steps=0),
        "all failed": sample_sweep((CRASHING,)),
        "no O0": sample_sweep(("O1", "O5")),
        "only O0": sample_sweep(("O0",)),
        "nothing": nothing(),
        "long": sample_sweep(steps=10_000),
        "hostile": hostile_sweep(),
        "huge": huge_sweep(),
    }


def nothing() -> Sweep:
    """Returns a sweep that was interrupted before its first run ended."""
    return Sweep(SETTINGS, ENVIRONMENT, (), (), Recommendation(Outcome.UNKNOWN, None, "nothing was measured"))


def hostile_sweep() -> Sweep:
    """Returns a sweep with 7 variants, names that are markup or do not end, and logs full of both."""
    names = [HOSTILE, UNBROKEN, *(f"O2 keep_batchnorm_fp32=False loss_scale={2.0**n}" for n in range(5))]
    kinds = [KINDS[0], *(replace(KINDS[2], name=name, ms=17.2 + n / 9) for n, name in enumerate(names))]
    records = [hostile_record(sample_record(kind, seed, 60)) for kind in kinds for seed in range(2)]
    environment = replace(
        ENVIRONMENT,
        command="ampatch sweep " + "/very/long/folder" * 20 + "/<train>.py",
        cpu="<img src=x onerror=alert(1)>",
        platform="p" * 200,
    )
    settings = replace(SETTINGS, script="/a" * 90 + "/<b>train</b>.py", rows=("O0", *names))
    sweep = summarize(settings, environment, records)
    return replace(
        sweep,
        records=(*records, failed_record(HOSTILE)),
        rows=tuple(map(hostile_row, sweep.rows)),
        recommendation=Recommendation(Outcome.TAKE, HOSTILE, "</p><b>faster & <i>better"),
    )


def hostile_record(run: Run) -> Run:
    """Returns a run with two losses, and metrics of hostile names."""
    losses = {"0": run.losses["0"], "<1>": run.losses["0"]}
    return replace(run, losses=losses, metrics=dict.fromkeys(METRICS, run.metrics["accuracy"]))


def hostile_row(row: Level) -> Level:
    """Returns a row whose metrics have hostile names."""
    far = Distance(-1.234e-7, 0.9, -31_234_567.0, 1e-9, "percent")
    return replace(row, metrics=dict.fromkeys(METRICS, far), reason="because " + "<y>" * 60)


def failed_record(name: str) -> Run:
    """Returns a run whose log has colours, control characters and lines without an end."""
    lines = ("\x1b[31mred\x1b[0m \x00\x07", "z" * 5000, "</pre><script>alert(2)</script>", "\udcff lone")
    cause = "ValueError: " + "<" * 300
    log = "/l" * 120 + ".log"
    return Run(name, 0, 0, Ending.TIMED_OUT, 1e6, cause, log, (*lines, *lines * 20))


def huge_sweep() -> Sweep:
    """Returns a sweep whose numbers are as large, as small or as missing as they can be."""
    sweep = sample_sweep(("O0", "O1", "O5"), seeds=1, steps=30)
    values = (1e300, -1e300, math.nan, math.inf, 1e-300, 0.0) * 5
    curve = Curve(tuple(range(1, 31)), values)
    huge = {
        "losses": {"0": curve},
        "metrics": {"perplexity": curve},
        "final_loss": math.inf,
    }
    records = tuple(replace(run, **huge) for run in sweep.records)
    return replace(sweep, records=records, rows=tuple(map(huge_row, sweep.rows)))


def huge_row(row: Level) -> Level:
    """Returns a row with numbers of twenty digits."""
    far = Distance(1.23456e250, -1e250, math.inf, 0.0, "percent")
    return replace(
        row,
        step_ms=98765432.1,
        step_ms_low=0.0,
        step_ms_high=math.inf,
        peak_mib=123456789.0,
        memory=1e9,
        loss=far,
        metrics={"perplexity": far},
        loss_scale=2.0**120,
        skipped=123456.78,
        verdict=Verdict.UNKNOWN,
    )
