"""Two sweeps side by side: what got slower, less accurate, larger, or is gone."""

import math
from dataclasses import replace

import pytest

from ampatch import AmpValueError
from ampatch.sweeps.columns import column_of
from ampatch.sweeps.records.record import Ending
from ampatch.sweeps.records.sweep import Settings
from ampatch.sweeps.verdicts.compare import compare
from ampatch.sweeps.verdicts.summary import summarize
from sweep_samples import CRASHING, ENVIRONMENT, run, sample_sweep

SETTINGS = Settings("train.py", ("--epochs", "3"), ("O0", "O1"))
SAMPLE = sample_sweep(("O0", "O1", "O3", "autocast", CRASHING), steps=100)
CRASHED = run(outcome=Ending.CRASHED)


def sweep(*runs, environment=ENVIRONMENT, **settings):
    return summarize(replace(SETTINGS, **settings), environment, [run("O0"), *runs])


def faults(before, after, **limits):
    """What got worse in O1, of which these are the runs."""
    rows = compare(sweep(*before), sweep(*after), **limits).rows
    (change,) = [row for row in rows if row.name == "O1"]
    return [(it.fault, it.sentence) for it in change.regressions]


def test_a_sweep_is_no_worse_than_itself_but_for_what_fails():
    comparison = compare(SAMPLE, SAMPLE, slower=0, tolerance=0, more_memory=0)
    assert comparison.regressions == [f"{CRASHING} failed: 3 of 3 runs crashed, as before"]
    assert comparison.notes == ()
    assert [row.ratio(column_of("step_ms")) for row in comparison.rows] == [1, 1, 1, 1, None]


ACCURATE = [run(seed=seed, accuracy=value) for seed, value in enumerate([0.90, 0.91, 0.92])]
LESS_ACCURATE = [run(seed=seed, accuracy=0.88) for seed in range(3)]
CRASHED_IN_PART = [run(), run(seed=1, outcome=Ending.CRASHED)]
GONE = "O1 is missing: it finished before and was not run now"

# The runs of O1 before and after, what is allowed, and what got worse.
FAULTS = {
    "slower": (
        *([run(ms=10.0)], [run(ms=11.25)], {}),
        [("slower", "O1 is 12.5 % slower: 11.25 ms a step against 10.00 before (5 % allowed)")],
    ),
    "little slower": ([run(ms=10.0)], [run(ms=10.4)], {}, []),
    "slower and allowed": ([run(ms=10.0)], [run(ms=10.6)], {"slower": 0.1}, []),
    "faster": ([run(ms=10.0)], [run(ms=9.0)], {"slower": 0}, []),
    "quartiles overlap": (
        *([run(ms=10.0)], [run(ms=10.6)], {}),
        [
            (
                "slower",
                "O1 is 6 % slower: 10.60 ms a step against 10.00 before "
                "(5 % allowed, though the quartiles overlap)",
            )
        ],
    ),
    "memory without a limit": ([run(mib=100.0)], [run(mib=130.0)], {}, []),
    "memory that is allowed": ([run(mib=100.0)], [run(mib=130.0)], {"more_memory": 0.3}, []),
    "memory": (
        *([run(mib=100.0)], [run(mib=130.0)], {"more_memory": 0.2}),
        [("more memory", "O1 needs 30 % more memory: 130 against 100 MiB before (20 % allowed)")],
    ),
    "metric": (
        *(ACCURATE, LESS_ACCURATE, {}),
        [
            (
                "less accurate",
                "O1 is less accurate: accuracy 0.88, 3.0 spreads below 0.91 before (2 allowed)",
            )
        ],
    ),
    "metric that is allowed": (ACCURATE, LESS_ACCURATE, {"tolerance": 3.1}, []),
    "loss rose": (
        *([run(noise=0.01)], [run(loss=0.55)], {}),
        [("less accurate", "O1 is less accurate: loss 0.55, 5.0 spreads above 0.5 before (2 allowed)")],
    ),
    "loss fell": ([run(noise=0.01)], [run(loss=0.1)], {}, []),
    "diverges": ([run()], [run(loss=math.nan)], {}, [("less accurate", "O1 diverged: loss is NaN")]),
    "diverged before": ([run(loss=math.nan)], [run(loss=math.nan)], {}, []),
    "gone": ([run()], [], {}, [("missing", GONE)]),
    "interrupted": ([run()], [run(outcome=Ending.INTERRUPTED)], {}, [("missing", GONE)]),
    "fails": ([run()], [CRASHED], {}, [("failed", "O1 failed: crashed")]),
    "fails in part": ([run()], CRASHED_IN_PART, {}, [("failed", "O1 failed: 1 of 2 runs crashed")]),
    "fails as before": ([CRASHED], [CRASHED], {}, [("failed", "O1 failed: crashed, as before")]),
    "new and fails": ([], [CRASHED], {}, [("failed", "O1 failed: crashed")]),
    "failed before and is gone": (
        *([CRASHED], [], {}),
        [("missing", "O1 is missing: it failed before and was not run now")],
    ),
    "never run": ([], [], {}, []),
    "not measured any more": (
        *([run(f1=0.5)], [run(loss=None, ms=None)], {}),
        [
            ("missing", f"O1 is missing {what}, which was measured before")
            for what in ("the time of a step", "the loss", "f1")
        ],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_got_worse_in_a_row(name):
    before, after, limits, found = FAULTS[name]
    assert faults(before, after, **limits) == found


def test_a_row_that_fails_in_part_is_worse_and_its_other_runs_are_compared():
    assert [it for it, _ in faults(CRASHED_IN_PART, [CRASHED])] == ["failed"]
    slow = [run(ms=20.0), CRASHED_IN_PART[1]]
    assert [it for it, _ in faults(CRASHED_IN_PART, slow)] == ["failed", "slower"]


def test_a_row_that_was_not_asked_for_now_is_missing():
    comparison = compare(sweep(run()), sweep(rows=("O0",)))
    assert comparison.regressions == [GONE]
    assert comparison.rows[1].after is None


def test_the_tolerance_is_that_of_the_sweep_before_unless_it_is_given():
    old, new = sweep(run(noise=0.01), tolerance=9.0), sweep(run(loss=0.55), tolerance=1.0)
    assert compare(old, new).limits.tolerance == 9.0
    assert compare(old, new).regressions == []
    assert len(compare(old, new, tolerance=1.0).regressions) == 1


def test_a_metric_that_is_no_number_any_more_is_less_accurate_also_if_it_is_none_at_o0():
    old, new = (
        summarize(SETTINGS, ENVIRONMENT, [run("O0", f1=value), run(f1=value)]) for value in (0.5, math.nan)
    )
    assert "O1 is less accurate: f1 is NaN, and was 0.5 before" in compare(old, new).regressions


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


def test_other_settings_and_another_machine_are_noted():
    other = replace(ENVIRONMENT, torch="2.14.0", commit=None)
    comparison = compare(sweep(run()), sweep(run(), environment=other, script="new/train.py", repeat=2))
    assert comparison.notes == (
        "script: train.py before, new/train.py after",
        "repeat: 1 before, 2 after",
        "torch: 2.13.0+cu130 before, 2.14.0 after",
        f"commit: {ENVIRONMENT.commit} before, none after",
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"script": "other.py"}, "script train.py before, other.py after"),
        ({"script": "-m train"}, "script train.py before, -m train after"),
        ({"arguments": ("--epochs", "a b")}, "arguments --epochs 3 before, --epochs 'a b' after"),
        ({"arguments": (), "steps": 9}, "arguments --epochs 3 before, none after; steps none before, 9 af"),
        ({"nproc_per_node": 2}, "nproc_per_node none before, 2 after"),
    ],
    ids=["script", "module", "arguments", "steps", "ranks"],
)
def test_sweeps_of_different_training_are_refused(settings, said):
    with pytest.raises(AmpValueError, match="trained different things, which cannot be compared") as caught:
        compare(sweep(run()), sweep(run(), **settings))
    assert said in str(caught.value)
