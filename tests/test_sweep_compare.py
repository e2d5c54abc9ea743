"""Two sweeps side by side: what got slower, less accurate, larger, or is gone."""

import math
from dataclasses import replace

import pytest

from ampatch import AmpValueError
from ampatch.sweeps.records.record import Curve, Ending, Measured, Record, Spread
from ampatch.sweeps.records.sweep import Settings
from ampatch.sweeps.verdicts.compare import compare
from ampatch.sweeps.verdicts.summary import summarize
from sweep_samples import ENVIRONMENT, sample_sweep

SETTINGS = Settings("train.py", ("--epochs", "3"), ("O0", "O1"))
SAMPLE = sample_sweep(("O0", "O1", "O3", "autocast", "O5 cast_model_outputs=float16"), steps=60)


def run(row="O1", loss=0.5, *, seed=0, outcome=Ending.FINISHED, ms=10.0, mib=100.0, noise=None, **metrics):
    measured = Measured(
        steps=100,
        step_ms=None if ms is None else Spread(ms, 0.99 * ms, 1.01 * ms, 100),
        peak_mib=mib,
        first_loss=2.0,
        final_loss=loss,
        loss_noise=noise,
        metrics={name: Curve((1,), (value,)) for name, value in metrics.items()},
    )
    return Record(row, seed, 0, outcome, 1.0, measured=measured)


def sweep(*runs, environment=ENVIRONMENT, **settings):
    return summarize(replace(SETTINGS, **settings), environment, [run("O0"), *runs])


def change(before, after, **limits):
    """The change of O1, of which these are the runs."""
    comparison = compare(sweep(*before), sweep(*after), **limits)
    return next(row for row in comparison.rows if row.name == "O1")


def faults(before, after, **limits):
    """What got worse in O1."""
    return [(it.fault, it.sentence) for it in change(before, after, **limits).regressions]


def test_a_sweep_is_no_worse_than_itself_but_for_what_fails():
    whole = summarize(SAMPLE.settings, SAMPLE.environment, SAMPLE.records)
    comparison = compare(whole, whole, slower=0, tolerance=0, more_memory=0)
    assert comparison.regressions == ["O5 cast_model_outputs=float16 failed: 3 of 3 runs crashed, as before"]
    assert comparison.notes == ()
    assert [row.speed for row in comparison.rows] == [1, 1, 1, 1, None]


# ---- Speed and memory ----


def test_a_row_that_is_slower_than_allowed_says_by_how_much():
    sentence = "O1 is 12.5 % slower: 11.25 ms a step against 10.00 before (5 % allowed)"
    assert faults([run(ms=10.0)], [run(ms=11.25)]) == [("slower", sentence)]


@pytest.mark.parametrize(
    ("ms", "slower", "expected"), [(10.4, 0.05, 0), (10.6, 0.05, 1), (10.6, 0.1, 0), (9, 0, 0)]
)
def test_the_threshold_alone_decides_what_is_slower(ms, slower, expected):
    assert len(faults([run(ms=10.0)], [run(ms=ms)], slower=slower)) == expected


def test_quartiles_that_overlap_are_mentioned():
    ((_, sentence),) = faults([run(ms=10.0)], [run(ms=10.15)], slower=0.01)
    assert sentence.endswith("(1 % allowed, though the quartiles overlap)")


def test_memory_is_looked_at_if_there_is_a_limit():
    old, new = [run(mib=100.0)], [run(mib=130.0)]
    assert faults(old, new) == []
    assert faults(old, new, more_memory=0.3) == []
    sentence = "O1 needs 30 % more memory: 130 against 100 MiB before (20 % allowed)"
    assert faults(old, new, more_memory=0.2) == [("more memory", sentence)]


# ---- Accuracy ----


def test_a_row_that_is_less_accurate_than_allowed_says_where():
    old = [run(seed=seed, accuracy=value) for seed, value in enumerate([0.90, 0.91, 0.92])]
    new = [run(seed=seed, accuracy=0.88) for seed in range(3)]
    sentence = "O1 is less accurate: accuracy 0.88, 3.0 spreads below 0.91 before (2 allowed)"
    assert faults(old, new) == [("less accurate", sentence)]
    assert faults(old, new, tolerance=3.1) == []


def test_a_loss_that_rose_is_less_accurate_and_one_that_fell_is_not():
    ((fault, sentence),) = faults([run(noise=0.01)], [run(loss=0.55)])
    assert fault == "less accurate"
    assert "loss 0.55, 5.0 spreads above 0.5 before" in sentence
    assert faults([run(noise=0.01)], [run(loss=0.1)]) == []


def test_the_tolerance_is_that_of_the_sweep_before_unless_it_is_given():
    old, new = sweep(run(noise=0.01), tolerance=9.0), sweep(run(loss=0.55), tolerance=1.0)
    assert compare(old, new).limits.tolerance == 9.0
    assert compare(old, new).regressions == []
    assert len(compare(old, new, tolerance=1.0).regressions) == 1


def test_a_row_that_diverges_now_is_less_accurate():
    assert faults([run()], [run(loss=math.nan)]) == [("less accurate", "O1 diverged: loss is NaN")]
    assert faults([run(loss=math.nan)], [run(loss=math.nan)]) == []


def test_a_metric_that_is_no_number_any_more_is_less_accurate_also_if_it_is_none_at_o0():
    old, new = (
        summarize(SETTINGS, ENVIRONMENT, [run("O0", f1=value), run(f1=value)]) for value in (0.5, math.nan)
    )
    assert "O1 is less accurate: f1 is NaN, and was 0.5 before" in compare(old, new).regressions


# ---- Rows that are gone, new or failed ----


def test_a_row_that_is_gone_is_missing():
    sentence = "O1 is missing: it finished before and was not run now"
    comparison = compare(sweep(run()), sweep(rows=("O0",)))
    assert comparison.regressions == [sentence]
    assert comparison.rows[1].after is None
    assert faults([run()], []) == [("missing", sentence)]
    assert faults([run()], [run(outcome=Ending.INTERRUPTED)]) == [("missing", sentence)]


def test_a_row_that_fails_now_is_told_how():
    crashed = [run(outcome=Ending.CRASHED)]
    assert faults([run()], crashed) == [("failed", "O1 failed: crashed")]
    assert faults([run(), run(seed=1)], [run(), *crashed]) == [("failed", "O1 failed: 1 of 2 runs crashed")]


def test_a_row_that_fails_now_is_worse_also_if_it_failed_before_or_is_new():
    crashed = [run(outcome=Ending.CRASHED)]
    assert faults(crashed, crashed) == [("failed", "O1 failed: crashed, as before")]
    (fault,) = compare(sweep(rows=("O0",)), sweep(*crashed)).regressions
    assert fault == "O1 failed: crashed"


def test_a_row_that_failed_before_and_is_gone_is_missing():
    crashed = [run(outcome=Ending.CRASHED)]
    sentence = "O1 is missing: it failed before and was not run now"
    assert faults(crashed, []) == [("missing", sentence)]
    assert faults([], []) == []


def test_a_row_that_fails_in_part_is_worse_and_its_other_runs_are_compared():
    part, all_of_it = [run(), run(seed=1, outcome=Ending.CRASHED)], [run(outcome=Ending.CRASHED)]
    assert [fault for fault, _ in faults(part, all_of_it)] == ["failed"]
    assert [fault for fault, _ in faults(part, [run(ms=20.0), part[1]])] == ["failed", "slower"]


def test_where_nothing_could_be_compared_all_is_not_well():
    def alone(outcome):
        return summarize(replace(SETTINGS, rows=("O0",)), ENVIRONMENT, [run("O0", outcome=outcome)])

    comparison = compare(alone(Ending.CRASHED), alone(Ending.FINISHED))
    assert comparison.regressions == ["Nothing could be compared: no level finished in both sweeps"]
    assert comparison.gaps == ["Not compared (failed before): O0"]


def test_it_is_said_once_why_rows_or_their_accuracy_were_not_compared():
    old = sweep(run("O1", math.nan), run("O2"), run("O3", outcome=Ending.CRASHED), run("O4"))
    new = sweep(run("O1"), run("O2", outcome=Ending.CRASHED), run("O3"), run("O5"))
    assert compare(old, new).gaps == [
        "Not compared (failed before): O3",
        "Not compared (new): O5",
        "Accuracy not compared (diverged before): O1",
    ]


def test_both_sweeps_are_named():
    other = replace(ENVIRONMENT, commit=None, created="2026-11-22", command="ampatch sweep b.py")
    names = ("results/a", "results/b")
    first, second = compare(sweep(run()), sweep(run(), environment=other), names=names).sides
    assert first == f"results/a, {ENVIRONMENT.created}, commit 659de88f1a+, {ENVIRONMENT.command}"
    assert second == "results/b, 2026-11-22, ampatch sweep b.py"
    assert compare(sweep(run()), sweep(run())).sides[0].startswith(ENVIRONMENT.created)


def test_what_is_not_measured_any_more_is_missing():
    assert faults([run(f1=0.5)], [run(loss=None, ms=None)]) == [
        ("missing", f"O1 is missing {what}, which was measured before")
        for what in ("the time of a step", "the loss", "f1")
    ]


# ---- Besides ----


def test_what_else_differs_is_noted():
    other = replace(ENVIRONMENT, torch="2.14.0", commit=None)
    comparison = compare(sweep(run()), sweep(run(), environment=other, arguments=("--epochs", "a b")))
    assert comparison.notes == (
        "arguments: --epochs 3 before, --epochs 'a b' after",
        "torch: 2.13.0+cu130 before, 2.14.0 after",
        f"commit: {ENVIRONMENT.commit} before, none after",
    )


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"slower": -0.1}, "slower -0.1: expected a part such as 0.05 for 5 %, not less than 0"),
        ({"slower": math.nan}, "slower nan: expected"),
        ({"tolerance": math.inf}, "tolerance inf: expected a number of spreads such as 2"),
        ({"more_memory": -1}, "more_memory -1: expected a part"),
    ],
    ids=["slower", "nan", "tolerance", "more_memory"],
)
def test_limits_are_positive_numbers(limits, message):
    with pytest.raises(AmpValueError) as caught:
        compare(SAMPLE, SAMPLE, **limits)
    assert message in str(caught.value)
