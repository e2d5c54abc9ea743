"""From records to rows, distances, verdicts and one recommendation."""

import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampatch.sweeps.judge.advice import ELSEWHERE, summarize
from ampatch.sweeps.judge.statistics import (
    Quantity,
    deviation,
    distance,
    is_about_accuracy,
    is_lower_better,
    mean,
    most_important,
    pooled_times,
)
from ampatch.sweeps.judge.verdict import OWN_FILES
from ampatch.sweeps.rows import Curve, Distance, Ending, Outcome, Settings, Verdict
from sweep_samples import ENVIRONMENT, run, times

NAN, INF = math.nan, math.inf
OTHER_START = f"it began with other weights than O0: {OWN_FILES}, or seed what draws the weights"
CRASHED, TIMED_OUT, INTERRUPTED = Ending.CRASHED, Ending.TIMED_OUT, Ending.INTERRUPTED
DONE = Ending.FINISHED
BASELINE, SAME, WORSE, UNSURE = Verdict.BASELINE, Verdict.SAME, Verdict.WORSE, Verdict.UNSURE
DIVERGED, FAILED, UNKNOWN = Verdict.DIVERGED, Verdict.FAILED, Verdict.UNKNOWN
SLOW_ROW = Verdict.SLOW


def summary(*records, rows=None, **changes):
    rows = tuple(dict.fromkeys(record.row for record in records)) if rows is None else rows
    seeds = max((record.seed for record in records), default=0) + 1
    return summarize(Settings("train.py", (), rows, **{"seeds": seeds} | changes), ENVIRONMENT, records)


def row(name, *records, **changes):
    """The row of a name in the summary of these runs."""
    return next(it for it in summary(*records, **changes).rows if it.name == name)


def seeds(name, losses, **fields):
    """A run for each of these losses; of fields that are lists, each run has its own."""
    for seed, loss in enumerate(losses):
        own = {key: value[seed] if isinstance(value, list) else value for key, value in fields.items()}
        yield run(name, loss, seed=seed, **own)


# ---- Names of metrics ----


@pytest.mark.parametrize(
    ("says", "expected", "names"),
    [
        (
            *(is_lower_better, True),
            """
            loss val_loss valLoss val/loss test.MSE top5-err Perplexity WER mAE_error nll RMSELoss FID
            negative_log_likelihood bits_per_char_bpc eval_time_ms logloss mlogloss valloss testloss topKerr
            valerror nrmse bits_per_dim val_bits_per_char rmsd huber chamfer wasserstein emd hd95 epe mpjpe
            misclassification false_positive_rate false_negative_rate val/neg_elbo crossentropy valperplexity
            """,
        ),
        (
            *(is_lower_better, False),
            """
            accuracy top1 mAP f1 bleu auc IoU lossless_ratio terror psnr winner neg_mean_squared_error
            neg_log_loss neg_brier_score 精度 lossless floss_free_score glossary hd_accuracy
            true_negative_rate negative_predictive_value recall_negative true_positive_rate
            """,
        ),
        (
            *(is_about_accuracy, False),
            """
            step global_step epoch Epoch iteration lr learning_rate lr/group0 samples seconds epoch_time
            samples_per_second loss_scale grad_norm train/step gpu_memory_mib tokens_seen
            """,
        ),
        (
            *(is_about_accuracy, True),
            "accuracy val_loss train_loss_epoch loss_step batch_accuracy f1 grad_error 精度",
        ),
    ],
    ids=["less is better", "more is better", "counters and times", "what mentions a counter"],
)
def test_the_name_of_a_metric_says_which_way_is_better_and_if_it_is_about_accuracy(says, expected, names):
    assert [name for name in names.split() if says(name) is not expected] == []


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["f1", "top1", "accuracy"], "accuracy"),
        (["test_accuracy", "accuracy"], "accuracy"),
        (["train_acc", "f1", "valAcc"], "valAcc"),
        (["bleu", "val_f1"], "val_f1"),
        (["bleu", "f1"], "bleu"),
        ([], None),
    ],
)
def test_the_most_important_metric_is_an_accuracy_on_held_out_data(names, expected):
    assert most_important(names) == expected


# ---- Distances ----

numbers = st.floats(-1e6, 1e6)


@given(st.lists(numbers, min_size=2, max_size=6))
def test_the_deviation_is_that_of_the_statistics_module(values):
    assert deviation(values) == pytest.approx(statistics.stdev(values), rel=1e-9, abs=1e-6)
    assert mean(values) == pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("sample", "spread", "unit"),
    [
        (Quantity((0.50, 0.52, 0.54), noise=9.0), 0.02, "seeds"),
        (Quantity((0.5,), noise=0.05), 0.05, "steps"),
        (Quantity((0.5, 0.5), noise=0.1), 0.1, "steps"),
        (Quantity((0.5, 0.5, 0.5)), 0.0025, "percent"),
        (Quantity((-100.0, -100.001)), 0.1, "seeds"),
        (Quantity((100.0,), noise=1e-9), 0.1, "steps"),
        (Quantity((0.0, 0.0)), 0.005, "percent"),
        (Quantity((0.0,), noise=0.0), 0.001, "steps"),
        (Quantity((1e-12,), first=2.0, noise=1e-13), 1e-5, "steps"),
    ],
)
def test_the_unit_is_what_chance_does_and_at_least_a_thousandth_of_the_value(sample, spread, unit):
    assert sample.spread() == (pytest.approx(spread, rel=1e-4), unit)
    mean = sample.value
    found = distance(Quantity((mean - 3 * spread,)), sample, lower_is_better=True)
    assert found.spreads == pytest.approx(3, rel=1e-3)
    assert distance(Quantity((mean - 3 * spread,)), sample, lower_is_better=False).spreads == -found.spreads


any_float = st.floats() | st.sampled_from([0.0, NAN, INF, -INF, 1e308, 5e-324])
samples = st.builds(
    Quantity,
    st.lists(any_float, max_size=4).map(tuple),
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
    st.none() | st.floats(0, allow_infinity=False),
)


@given(samples, samples, st.booleans())
def test_a_distance_is_there_exactly_if_both_values_are_finite(own, origin, lower):
    found = distance(own, origin, lower_is_better=lower)
    both = [own.value, origin.value]
    assert (found.spreads is not None) == all(it is not None and math.isfinite(it) for it in both)
    assert found.spread is None or found.spread > 0


def test_repeats_of_a_seed_count_as_one():
    origin = [run("O0", 0.4, seed=0), run("O0", 0.6, seed=0, repeat=1), run("O0", 0.7, seed=1)]
    own = [run("O1", 0.9, seed=0), run("O1", 0.5, seed=1), run("O1", 0.7, seed=1, repeat=1)]
    found = row("O1", *origin, *own).loss
    assert (found.baseline, found.value) == pytest.approx((0.6, 0.75))
    assert found.spread == pytest.approx(statistics.stdev([0.5, 0.7]))
    assert found.spreads == pytest.approx(-0.15 / found.spread)


def test_the_distance_of_a_metrics_last_value_is_positive_where_it_is_better():
    runs = [*seeds("O0", [0.5, 0.5], accuracy=[0.8, 0.9], wer=[0.2, (0.7, 0.1)], epoch=3)]
    found = row("O1", *runs, *seeds("O1", [0.5, 0.5], accuracy=0.9, wer=0.2)).metrics
    deviation = statistics.stdev([0.8, 0.9])
    assert set(found) == {"accuracy", "wer"}
    assert found["accuracy"].spreads == pytest.approx(0.05 / deviation)
    assert found["wer"].spreads == pytest.approx(-0.05 / deviation)


def test_a_metric_that_some_rows_lack_has_no_distance():
    found = summary(run("O0", f1=0.5), run("O1", bleu=0.3)).rows
    assert found[1].metrics["f1"] == Distance(None, 0.5, None, 0.0025, "percent")
    assert found[1].metrics["bleu"] == Distance(0.3, None, None, None, "percent")


# ---- Rows ----


def test_a_row_has_the_medians_of_its_runs_that_finished():
    scales = [1.0, 2.0, None]
    runs = [
        run(seed=seed, ms=ms, mib=mib, skipped=(1,) * seed, loss_scale=scales[seed])
        for seed, (ms, mib) in enumerate([(10.0, 300.0), (30.0, 100.0), (20.0, 200.0)])
    ]
    found = row("O1", *runs, run("O1", ms=99.0, seed=3, outcome=CRASHED))
    assert (found.step_ms, found.peak_mib) == (20, 200)
    assert (found.skipped, found.runs, found.failed, found.outcome) == (1.0, 4, 1, DONE)
    assert found.loss_scale == 1.0  # one that was in use


def test_ratios_are_to_o0():
    rows = summary(
        run("O0", ms=40.0, mib=400.0), run("O1", ms=20.0, mib=300.0), run("O3", NAN, ms=10.0, mib=200.0)
    ).rows
    assert [it.speed for it in rows] == [1, 2, 4]
    assert [it.memory for it in rows] == [1, 0.75, 0.5]


def test_rows_come_in_the_order_of_the_settings_with_those_that_were_not_run():
    found = summary(run("O1"), run("O0"), run("extra"), rows=("O0", "O3", "O1")).rows
    assert [it.name for it in found] == ["O0", "O3", "O1", "extra"]
    assert (found[1].runs, found[1].step_ms, found[1].verdict) == (0, None, UNKNOWN)


spreads = st.builds(
    lambda low, up, more: run(ms=(low + up, low, low + up + more)),
    *[st.floats(0.01, 100)] * 3,
)


@given(st.lists(spreads, min_size=1, max_size=6))
def test_the_spread_of_several_runs_holds_their_median_and_its_quartiles_are_in_order(runs):
    middle, low, high, count = (pooled_times(runs)[name] for name in times(1.0))
    assert middle == statistics.median(it.step_ms for it in runs)
    assert low <= middle <= high
    assert low <= statistics.median(it.step_ms_low for it in runs)
    assert count == 100 * len(runs)
    assert min(it.step_ms_low for it in runs) <= low
    assert high <= max(it.step_ms_high for it in runs)


# ---- Verdicts ----


ORIGIN = tuple(seeds("O0", [0.50, 0.52, 0.54], accuracy=[0.90, 0.91, 0.92]))
O0, O1, O0_CRASHED = run("O0"), run("O1"), run("O0", seed=1, outcome=CRASHED)
HALF_RUN = run("O1", 9.0, seed=1, outcome=INTERRUPTED)
LATE = {"losses": {"0": Curve((1, 2, 3, 4), (1.0, INF, 0.5, NAN))}}


def ended(*outcomes):
    return [O0, *(run(seed=seed, outcome=outcome) for seed, outcome in enumerate(outcomes))]


# What is said of O1, of which these are the runs.
VERDICTS = {
    "within the tolerance": ([*ORIGIN, *seeds("O1", [0.555] * 3, accuracy=0.892)], SAME, ""),
    "better": ([*ORIGIN, *seeds("O1", [0.1] * 3, accuracy=0.99)], SAME, ""),
    "beyond the tolerance": (
        [*ORIGIN, *seeds("O1", [0.52] * 3, accuracy=0.869)],
        *(WORSE, "accuracy 0.869, 4.1 spreads below O0"),
    ),
    "the worst two are named": (
        [run("O0", 0.5, noise=0.01, f1=50.0, bleu=50.0), run("O1", 0.6, f1=40.0, bleu=30.0)],
        *(WORSE, "bleu 30, 40 % below O0; f1 40, 20 % below O0"),
    ),
    "nan": ([O0, run("O1", NAN)], DIVERGED, "loss is NaN"),
    "inf": ([O0, run("O1", INF)], DIVERGED, "loss is inf"),
    "-inf": ([O0, run("O1", -INF)], DIVERGED, "loss is -inf"),
    "since when and in how many runs": (
        [O0, run("O1", seed=1), run("O1", NAN, seed=0, **LATE), run("O1", NAN, seed=2, **LATE)],
        *(DIVERGED, "loss is NaN from step 4 on (2 of 3 runs)"),
    ),
    "metric": ([run("O0", f1=0.5), run(f1=(0.4, NAN, NAN))], DIVERGED, "f1 is NaN from step 1 on"),
    "metric also at O0": ([run("O0", f1=NAN), run(f1=NAN)], SAME, ""),
    "no metric of accuracy": ([run("O0", grad_norm=1.0), run(grad_norm=INF)], SAME, ""),
    "loss rose": ([O0, run("O1", 2.3)], DIVERGED, "loss rose from 2 to 2.3"),
    "loss rose a little": ([O0, run("O1", 2.1)], WORSE, "loss 2.1, 320 % above O0"),
    "loss rose by chance": (
        [run("O0", noise=0.5), run("O1", 1.9, first=1.0)],
        *(WORSE, "loss 1.9, 2.8 spreads above O0"),
    ),
    "loss rose at O0 too": ([run("O0", 3.0), run("O1", 3.0)], SAME, ""),
    "last steps skipped": (
        [O0, run(skipped=tuple(range(81, 101)))],
        *(DIVERGED, "all of the last 20 steps were skipped"),
    ),
    "nearly all skipped": ([O0, run(skipped=tuple(range(82, 101)))], SAME, ""),
    "short and all skipped": (
        [O0, run(skipped=(1, 2, 3), steps=3)],
        *(DIVERGED, "all of the last 3 steps were skipped"),
    ),
    "a loss that arrived at zero": ([run("O0", 1e-17, noise=1e-18), run(loss=1.9e-5)], SAME, ""),
    "a loss that did not": (
        [run("O0", 1e-17, noise=1e-18), run(loss=2.1e-5)],
        *(WORSE, "loss 2.1e-5, 2.1 spreads above O0"),
    ),
    "O0 diverged": ([run("O0", NAN), O1], UNKNOWN, "the loss of O0 is not finite either"),
    "crashed": (ended(CRASHED), FAILED, "crashed"),
    "all crashed": (ended(CRASHED, CRASHED, CRASHED), FAILED, "3 of 3 runs crashed"),
    "one crashed": (ended(DONE, CRASHED, DONE), FAILED, "1 of 3 runs crashed"),
    "two ways": (ended(TIMED_OUT, CRASHED, TIMED_OUT), FAILED, "2 of 3 runs timed out, 1 crashed"),
    "crashed, interrupted": (ended(DONE, CRASHED, INTERRUPTED), FAILED, "1 of 2 runs crashed"),
    "interrupted in part": ([O0, O1, HALF_RUN], SAME, ""),
    "interrupted": ([O0, HALF_RUN], UNKNOWN, "interrupted"),
    "not run": ([O0], UNKNOWN, "not run"),
    "other weights": ([run("O0", start=(0.5, 1.0)), run("O1", NAN, start=(0.5, 1.02))], UNKNOWN, OTHER_START),
    "weights that are not finite": ([run("O0", start=(0.5,)), run("O1", start=(NAN,))], UNKNOWN, OTHER_START),
    "rounded weights": ([run("O0", start=(0.5, 1.0)), run("O1", start=(0.5, 1.0039))], SAME, ""),
    "fewer steps": (
        [O0, run("O1", seed=1), run("O0", seed=1), run("O1", steps=89)],
        *(UNKNOWN, "it ended after 89 steps, and O0 after 100: --steps 89 compares as many of both"),
    ),
    "more steps": (
        [O0, run("O1", steps=120, skipped=(1, 2, 3))],
        *(UNKNOWN, "it ended after 120 steps, and O0 after 100: --steps 100 compares as many of both"),
    ),
    "about as many steps": ([O0, run("O1", steps=91)], SAME, ""),
    "as many that were not skipped": ([O0, run("O1", steps=120, skipped=tuple(range(20)))], SAME, ""),
    "as many with those that were skipped": ([O0, run("O1", skipped=tuple(range(20)))], SAME, ""),
    "another seed": ([run("O0", start=(0.5,)), run("O1", seed=1, start=(0.7,))], SAME, ""),
    "no O0": ([O1], UNKNOWN, "there is no O0 to compare with"),
    "O0 crashed": ([O0_CRASHED, O1], UNKNOWN, "there is no O0 to compare with"),
    "O0 crashed in part": ([O0_CRASHED, O0, run("O1", 0.9)], WORSE, "loss 0.9, 80 % above O0"),
    "no loss": ([run("O0", None, f1=50.0), run("O1", None, f1=40.0)], WORSE, "f1 40, 20 % below O0"),
    "nothing in common": (
        [run("O0", None, f1=0.5), run("O1", None, bleu=0.5)],
        *(UNKNOWN, "nothing to compare: no loss and no metric"),
    ),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_what_is_said_of_a_row(name):
    runs, verdict, reason = VERDICTS[name]
    found = row("O1", *runs, rows=("O0", "O1"))
    assert (found.verdict, found.reason) == (verdict, reason)


def test_o0_is_the_baseline_unless_it_diverged():
    assert row("O0", *ORIGIN).verdict is BASELINE
    assert row("O0", run("O0", NAN)).verdict is DIVERGED


# ---- One seed ----

CHANCE = "which one seed cannot tell from chance: --seeds 3"
NOISE = {"accuracy": tuple(0.5 + 0.02 * (step % 2) for step in range(6))}
ONE_SEED = {
    "one image of 500": (
        [run("O0", accuracy=69 / 500), run(accuracy=68 / 500)],
        *(UNSURE, f"accuracy 0.136, 1.45 % below O0, {CHANCE}"),
    ),
    "as float32": (
        [run("O0", accuracy=0.138000), run(accuracy=0.1360000)],
        *(UNSURE, f"accuracy 0.136, 1.45 % below O0, {CHANCE}"),
    ),
    "ten images of 1000": (
        [run("O0", accuracy=0.9), run(accuracy=0.875)],
        UNSURE,
        f"accuracy 0.875, 2.78 % below O0, {CHANCE}",
    ),
    "a collapse": ([run("O0", accuracy=0.9), run(accuracy=0.1)], WORSE, "accuracy 0.1, 88.9 % below O0"),
    "autocast moves as much": ([run("O0", noise=0.01), run(loss=0.558), run("autocast", 0.54)], SAME, ""),
    "autocast moves less, which one run may": (
        [run("O0", noise=0.001), run(loss=0.558), run("autocast", 0.51)],
        *(UNSURE, f"loss 0.558, 5.8 spreads above O0, {CHANCE}"),
    ),
    "autocast moves far less": (
        [run("O0", noise=0.001), run(loss=0.658), run("autocast", 0.51)],
        *(WORSE, "loss 0.658, 15.8 spreads above O0"),
    ),
    "a repeat to the last bit": (
        [run("O0", perplexity=20.0), run("O0", repeat=1, perplexity=20.0), run(perplexity=21.0)],
        *(UNSURE, f"perplexity 21, 5 % above O0, {CHANCE}"),
    ),
    "autocast that went on from another run": (
        [run("O0", wer=20.0), run("autocast", wer=9.0, read="a.pt", writer="O0 seed 0"), run(wer=25.0)],
        *(WORSE, "wer 25, 25 % above O0"),
    ),
    "autocast that cast nothing": (
        [run("O0", perplexity=20.0), run("autocast", perplexity=20.5, uncast=True), run(perplexity=21.0)],
        *(UNSURE, f"perplexity 21, 5 % above O0, {CHANCE}"),
    ),
    "repeats move as much": ([run("O0"), run("O0", 0.54, repeat=1), run(loss=0.558)], SAME, ""),
    "nothing else is known": (
        [run("O0", perplexity=20.0), run(perplexity=21.0)],
        UNSURE,
        f"perplexity 21, 5 % above O0, {CHANCE}",
    ),
    "its last values": ([run("O0", **NOISE), run(accuracy=0.5)], SAME, ""),
    "two seeds can tell": (
        [*seeds("O0", [0.5, 0.5001]), *seeds("O1", [0.51, 0.51])],
        *(WORSE, "loss 0.51, 19.9 spreads above O0"),
    ),
}


@pytest.mark.parametrize("name", ONE_SEED)
def test_one_seed_says_worse_only_beyond_the_grain_and_what_the_runs_show(name):
    runs, verdict, reason = ONE_SEED[name]
    found = row("O1", *runs)
    assert (found.verdict, found.reason) == (verdict, reason)


def test_a_level_that_went_on_from_another_run_is_not_compared():
    said = f"it read 'last.pt', which the run O0 seed 0 wrote: {OWN_FILES}"
    for leaked in (LEAKED, replace(LEAKED, outcome=Ending.NO_STEPS, steps=0)):
        found = row("O4", run("O0"), leaked)
        assert (found.verdict, found.reason) == (UNKNOWN, said)


def test_levels_that_went_on_from_before_the_sweep_are_compared_if_it_was_from_the_same():
    old = run("O0", resumed="last.pt")
    assert "went on from 'last.pt'" in row("O4", old, run("O4", resumed="last.pt")).note
    assert row("O4", old, run("O4", resumed="last.pt")).verdict is SAME
    other = row("O4", old, run("O4", resumed="O4.pt"))
    assert (other.verdict, "it went on from 'O4.pt', and O0 from 'last.pt'" in other.reason) == (
        UNKNOWN,
        True,
    )


# ---- The recommendation ----


def waits(own, waited, throttled=None, busy=None, **fields):
    """A run that lost these parts of its time."""
    return replace(own, busy=busy, waited=waited, throttled=throttled, **fields)


def cut(name, ms=400.0, **fields):
    """A run that was cut short since it was slow."""
    return run(name, 9.0, ms=ms, steps=7, outcome=Ending.CUT, skipped=tuple(range(1, 8)), **fields)


def exact(ms):
    return ms, ms - 0.001, ms + 0.001


def slowly(ms):
    """Runs of which O0 is the fastest; O3 was not run, and is not named as slow."""
    wide = (1.6 * ms, 1.01 * ms, 4 * ms)  # its quartiles are far apart, and overlap with O0's
    levels = [run("O1", ms=20 * ms), run("O2", ms=9 * ms), run("O4", ms=wide)]
    return [run("O0", ms=ms), *levels, run("O3", ms=None, outcome=INTERRUPTED)]


# Times as of an MLP of 1024 on a processor with AMX, where it gained 2.38 times.
README = [
    run("O0", 0.0019, ms=18.0, noise=0.0004, accuracy=0.98),
    *(cut(name) for name in ("O1", "O2", "O3")),
    run("O4", 0.002, ms=7.8, accuracy=0.976),
    run("O5", 0.002, ms=7.4, accuracy=0.982),
    run("autocast", 0.002, ms=8.2, accuracy=0.978),
]
SCORED = [
    *seeds("O0", [0.5, 0.52], f1=[0.1, 0.2], accuracy=[0.90, 0.92]),
    *seeds("O1", [0.5, 0.52], ms=5.0, mib=60.0, f1=[0.1, 0.2], accuracy=[0.905, 0.925]),
]
SAME_SEEDS = list(seeds("O1", [0.5, 0.5], ms=5.0, f1=0.5))
LEAKED = run("O4", ms=5.0, read="last.pt", writer="O0 seed 0")
WITHOUT = "Without O0 there is nothing to compare with"
HAD = "other programs had the processor"
ALONE = "Run it on a machine that does nothing else"
CHANGED_NOTHING = "The seeds changed nothing: does the script set its own?"
BY_CHANCE = "With one seed, differences of accuracy by chance cannot be told apart: "
NO_METRIC = "The line amp.report(accuracy=...) in the script"
GAINS = "O0 is the fastest here: nothing gains"
FLOAT16 = "float16 is slow on a CPU: O1, O2"
NO_BFLOAT16 = "this CPU has no instructions for bfloat16"
SMALL = "a step of 2.00 ms has only small products, and casts cost more than those gain"
OLD_CPU, NEW_CPU = {"device": "cpu", "half": ""}, {"device": "cpu", "half": "avx512_bf16"}

# Runs, the row that is recommended, what is said (after "not": what is not), and where it was.
ADVICE = {
    "the fastest that is the same": (
        [run("O0", ms=40.0), run("O1", ms=20.0), run("O2 loss_scale=128", ms=10.0), run("O3", 9.0, ms=5.0)],
        *(
            "O2 loss_scale=128",
            "runs at 4.00x the speed of O0 (10.0 against 40.0 ms a step)",
        ),
        "and is as accurate: loss 0.5 against 0.5. ",
    ),
    "the metric that matters, and memory": (
        *(SCORED, "O1", "(5.00 against 10.0 ms a step), with 40 % less memory, and is as accurate: accuracy"),
        "accuracy 0.915 against 0.91 (+0.4 spreads).",
    ),
    "hardly faster": ([run("O0", ms=exact(10.0)), run(ms=exact(9.81))], "O0"),
    "faster by 2 %": ([run("O0", ms=exact(10.0)), run(ms=exact(9.79))], "O1"),
    "slower": ([run("O0", ms=exact(10.0)), run(ms=exact(20.0))], "O0"),
    "none is as accurate": (
        [O0, run("O1", 9.0), run("O2", outcome=CRASHED)],
        *("O0", "No other level has the accuracy of O0: O1 diverged, O2 failed."),
    ),
    "autocast is faster, and no choice": (
        [O0, run(ms=5.0), run("autocast", ms=4.0), run("autocast dtype=float16", ms=4.5)],
        *("O1", "torch.autocast runs at 1.25x the speed of O1."),
    ),
    "autocast is hardly faster": ([O0, run(ms=5.0), run("autocast", ms=4.95)], "O1", "not", "autocast"),
    "autocast is worse": (
        [run("O0", noise=0.1), run(ms=5.0), run("autocast", 0.9, ms=4.0)],
        *("O1", "of O1, but is worse (loss 0.9, 4.0 spreads above O0)."),
    ),
    "autocast is the fastest of the slow": (
        [O0, run("O4", ms=12.5), run("autocast", ms=11.0)],
        *("O0", "or more: the fastest but for autocast, O4, runs at 0.80x the"),
    ),
    "quartiles overlap, faster": ([O0, run(ms=9.2)], None, "their quartiles overlap"),
    "quartiles overlap, slower": ([O0, run(ms=10.5)], None, "their quartiles overlap"),
    "quartiles apart, faster": ([O0, run(ms=8.0)], "O1", "not", "quartiles"),
    "quartiles apart, slower": ([O0, run(ms=12.0)], "O0", "not", "quartiles"),
    "one of two is told apart": (
        [O0, run("O4", ms=8.0), run("O5", ms=(7.0, 5.0, 12.0))],
        *("O4", "Times do not tell it apart from O5."),
    ),
    "busy": (
        [waits(O0, None, busy=0.5), waits(run("O5", ms=2.0), None, busy=0.5)],
        *(None, f"and other programs took 50 % of the processors' time. {ALONE}."),
    ),
    "busy, slower": ([waits(O0, None, busy=0.5), waits(run("O5", ms=20.0), None, busy=0.5)], None),
    "hardly busy": ([waits(O0, None, busy=0.1), waits(run("O5", ms=2.0), None, busy=0.1)], "O5"),
    "busy, and worse": (
        [waits(run("O0", noise=0.1), None, busy=0.5), waits(run("O5", 0.9, ms=2.0), None, busy=0.5)],
        "O0",  # accuracy decides all the same
    ),
    "O0 waited": (
        [waits(run("O0", ms=22.4), 0.5), waits(run("O5"), 0.0)],
        *(None, f"at O0 {HAD} 50 % of the time that a run wanted it, and here 0 %. {ALONE}"),
    ),
    "the level waited": (
        [waits(run("O0", ms=22.4), 0.01), waits(run("O5"), 0.4)],
        *(None, f"{HAD} 40 % of the time that a run wanted it, and at O0 1 %. {ALONE}"),
    ),
    "a limit": (
        [waits(run("O0", ms=22.4), 0.0, 0.1), waits(run("O5"), 0.0, 0.3)],
        *(None, "the limit of the container stopped a run 30 % of the time, and at O0 10 %"),
    ),
    "both waited": (
        [waits(run("O0", ms=22.4), 0.5), waits(run("O5"), 0.52)],
        *(None, f"9.50 to 10.5 against 21.3 to 23.5 ms a step), and {HAD} 50 % of the time"),
    ),
    "a core next to it": (
        [waits(run("O0", ms=22.4), 0, 0, 0.1), waits(run("O5"), 0, 0, 0.6)],
        *(None, "other programs took 60 % of the processors' time, and at O0 10 %. Run"),
    ),
    "others where the run wants nothing": (
        [waits(O0, 0.01, busy=0.9), waits(run("O5", ms=2.0), 0.01, busy=0.9)],
        "O5",
    ),
    "devices": (
        [run("O0", device="H100"), run("O5", ms=2.0, device="H200")],
        *(None, "O0: it ran on H200, and O0 on H100. Run it"),
    ),
    "slow: no bfloat16": (
        *(slowly(10.0), "O0", f"{GAINS} ({FLOAT16}; {NO_BFLOAT16}). {ELSEWHERE} No level with the "),
        OLD_CPU,
    ),
    "slow: who knows": (slowly(10.0), "O0", f"{GAINS} ({FLOAT16}).", {"device": "cpu", "half": None}),
    "slow: small": (slowly(2.0), "O0", f"{GAINS} ({FLOAT16}; {SMALL}).", NEW_CPU),
    "slow: small on a GPU": (slowly(2.0), "O0", f"{GAINS} ({SMALL})."),
    "slow on a GPU": (slowly(20.0), "O0", f"{GAINS}. No level with the "),
    "O6 on a CPU": ([O0, run("O6", ms=20.0)], "O0", f"{GAINS} (O6 only emulates float8 on a CPU).", NEW_CPU),
    # No seeds, metrics or runs would change that: nothing else is said.
    "all cut short": (
        [O0, *(cut(name) for name in ("O1", "O2", "O4", "autocast"))],
        *("O0", f"{GAINS} ({FLOAT16}; {NO_BFLOAT16}). {ELSEWHERE}", "not", "seeds", OLD_CPU),
    ),
    "faster beside one cut short": ([O0, cut("O1"), run("O5", ms=4.0)], "O5"),
    "worse beside one cut short": (
        [O0, cut("O1"), run("O5", 9.0)],
        *("O0", "has the accuracy of O0 and comes near its speed: O1 slow, O5 diverged."),
    ),
    "cut short for a few long steps": ([O0, cut("O1", ms=9.0)], None),
    "the README's, on a CPU of today": (
        *(README, "O5", "O5 runs at 2.43x the speed of O0 (7.40 against 18.0 ms a step)", NEW_CPU),
    ),
    "unsure and faster": (
        [run("O0", accuracy=69 / 500), run("O5", ms=5.0, accuracy=68 / 500)],
        *(None, "O5 runs at 2.00x the speed of O0: accuracy 0.136, 1.45 % below O0, which one"),
    ),
    "unsure and slower": (
        [run("O0", accuracy=69 / 500), run("O5", ms=20.0, accuracy=68 / 500)],
        *("O0", "and those of which one seed cannot tell are slower: O5 unsure."),
    ),
    "it read what O0 wrote": ([O0, LEAKED], None, "it read 'last.pt', which the run O0 seed 0 wrote"),
    "it read what O0 wrote, and is slow": ([O0, replace(LEAKED, step_ms=40.0, step_ms_low=39.0)], None),
    "O0 read what another wrote": (
        [replace(LEAKED, row="O0"), run("O4", ms=5.0)],
        *(None, "O0 cannot be compared with: it read 'last.pt'"),
    ),
    "no metric": ([O0, run("O5")], None, NO_METRIC),
    "a metric": ([O0, run("O5"), run("O0", seed=1, f1=0.5)], None, "not", "Only the training"),
    "seeds that changed nothing": ([*seeds("O0", [0.5, 0.5], f1=0.5), *SAME_SEEDS], "O1", CHANGED_NOTHING),
    "seeds": ([*seeds("O0", [0.5, 0.5], f1=[0.5, 0.6]), *SAME_SEEDS], "O1", "not", CHANGED_NOTHING),
    "one seed": ([O0, run(ms=5.0)], "O1", f"{BY_CHANCE}--seeds 3."),
    "one seed that finished": (
        *([O0, run("O0", 0.6, seed=1, outcome=CRASHED), *SAME_SEEDS], "O1", f"{BY_CHANCE}let all seeds"),
    ),
    "no O0": ([O1], None, f"{WITHOUT}: add it to --levels."),
    "O0 was interrupted": (
        [run("O0", outcome=INTERRUPTED), O1],
        None,
        "O0 cannot be compared with: interrupted.",
    ),
    "O0 failed": ([run("O0", outcome=CRASHED), O1], None, f"{WITHOUT}, and it failed: crashed."),
    "O0 diverged": ([run("O0", NAN), O1], None, "O0 itself diverged (loss is NaN): training in float32 has"),
    "O0 alone": ([O0, run("autocast")], None, "There is no level but O0 to choose from."),
    "no times": ([run("O0", ms=None), run(ms=None)], None, "No times were measured: a step is timed from"),
    "nothing to compare": (
        [run("O0", None), run("O1", None)],
        *(None, "No level can be compared with O0. O1 runs at 1.00x the speed of O0: nothing to compare: no"),
    ),
    "O0 failed in part": (
        [O0, O0_CRASHED, run(ms=20.0)],
        None,
        "O0 cannot be relied on (1 of 2 runs",
    ),
    "O0 failed in part, faster": ([O0, O0_CRASHED, run(ms=5.0)], "O1"),
    "ended early": (
        *([O0, run(ms=5.0), run("O0", seed=1, outcome=INTERRUPTED)], "O1", "Only 2 of 4 runs were made."),
    ),
}


@pytest.mark.parametrize("name", ADVICE)
def test_what_is_recommended_and_what_is_said(name):
    runs, expected, *said = ADVICE[name]
    place = said.pop() if said and isinstance(said[-1], dict) else {}
    at = said.index("not") if "not" in said else len(said)
    rows = tuple(dict.fromkeys(it.row for it in runs))
    asked = Settings("train.py", (), rows, seeds=max(it.seed for it in runs) + 1)
    found = summarize(asked, replace(ENVIRONMENT, **place), runs).recommendation
    outcome = {None: Outcome.UNKNOWN, "O0": Outcome.STAY}.get(expected, Outcome.TAKE)
    assert (found.row, found.outcome) == (expected, outcome), found.reason
    assert [words for words in said[:at] if words not in found.reason] == [], found.reason
    assert [words for words in said[at + 1 :] if words in found.reason] == [], found.reason


def test_without_any_run_nothing_is_recommended():
    assert summary(rows=("O0", "O1")).recommendation.reason.startswith(
        f"{WITHOUT}, and it was not run. Only 0"
    )
    assert summary(rows=()).recommendation.reason == f"{WITHOUT}: add it to --levels."


def test_rounds_under_the_same_conditions_are_compared_though_others_were_disturbed():
    calm, loaded = (lambda it: waits(it, 0.01, busy=0.9)), lambda it: waits(it, 0.5)
    origin = [loaded(run("O0", ms=40.0)), calm(run("O0", ms=20.0, seed=1)), calm(run("O0", ms=20.2, seed=2))]
    runs = [calm(run("O4", ms=10.0)), calm(run("O4", ms=10.0, seed=1)), loaded(run("O4", ms=90.0, seed=2))]
    found = summary(*origin, *runs, loaded(run("O5", ms=1.0)), loaded(run("autocast", ms=1.0)))
    assert [it.speed for it in found.rows] == [1.0, pytest.approx(2.01), None, None]
    assert found.recommendation.row == "O4"
    said = "The speed of O5 is not known, as it ran under other conditions than O0: other"
    assert said in found.recommendation.reason
    assert "torch.autocast" not in found.recommendation.reason


def test_levels_that_were_cut_short_are_compared_in_speed_only():
    found = summary(O0, cut("O1"), cut("autocast")).rows
    assert [(it.verdict, it.speed, it.loss.value, it.failed) for it in found[1:]] == [
        (SLOW_ROW, 0.025, None, 0)
    ] * 2
    # What autocast came to after few steps says nothing of chance.
    assert row("O5", run("O0", noise=0.001), run("O5", 0.558), cut("autocast")).verdict is WORSE
    assert row("O1", O0, cut("O1", ms=9.0)).verdict is UNKNOWN  # its time went into a few long steps


# ---- What holds for every sweep ----

records = st.lists(
    st.builds(
        lambda name, seed, repeat, outcome, loss, first, ms, value, noise: run(
            name, loss, seed=seed, repeat=repeat, outcome=outcome, first=first, ms=ms, noise=noise, f1=value
        ),
        st.sampled_from(["O0", "O1", "O3", "autocast", "O2 loss_scale=128"]),
        *[st.integers(0, 2)] * 2,
        st.sampled_from([DONE, DONE, DONE, *Ending]),
        st.none() | any_float,
        st.none() | any_float,
        st.none() | st.floats(0, 1e6),
        any_float,
        st.none() | st.floats(0),
    ),
    max_size=12,
    unique_by=lambda it: (it.row, it.seed, it.repeat),
)


@settings(max_examples=100)
@given(records)
def test_any_records_make_a_sweep(made):
    found = summary(*made, rows=("O0", "O1"))
    best = next((it for it in found.rows if it.name == found.recommendation.row), None)
    assert found.recommendation.reason.endswith((".", "?"))
    if best is not None:
        assert best.verdict in (SAME, BASELINE)
        faster = [it for it in found.rows if it.verdict is SAME and it.speed and it.speed > best.speed]
        assert best.name == "O0" or all(it.name.startswith("autocast") for it in faster)


@settings(max_examples=50)
@given(records, st.randoms(use_true_random=False))
def test_the_order_of_the_records_changes_nothing(made, chance):
    shuffled = chance.sample(made, len(made))
    rows = ("O0", "O1", "O3", "autocast", "O2 loss_scale=128")
    one, other = summary(*made, rows=rows, seeds=3), summary(*shuffled, rows=rows, seeds=3)
    assert repr(one.rows) == repr(other.rows)
    assert one.recommendation == other.recommendation
