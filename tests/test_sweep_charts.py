"""The curves of a sweep's page: what is drawn of them, and in which colours."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ampatch.sweeps.rows import Curve, Ending, Run
from ampatch.sweeps.show import charts as drawing
from ampatch.sweeps.show.charts import (
    POINTS,
    LevelCurve,
    Points,
    charts_of,
    curves_of,
    draw,
    log_ticks,
    mean_of,
    ticks,
    value_range,
)
from chromium import contrast
from sweep_samples import sample_sweep

CSS = Path(drawing.__file__).with_name("style.css").read_text()
LIGHT, DARK = (dict(re.findall(r"--(\w+): (#\w{6})", part)) for part in CSS.split("@media")[:2])
SCHEMES = pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])


def curve(*values):
    return Curve(tuple(range(1, len(values) + 1)), values)


def sweep_of(losses, **changes):
    """A sweep of levels with one run each, which has these losses."""
    sweep = sample_sweep(tuple(losses), seeds=1, metrics=False)
    records = tuple(replace(it, losses={"0": curve(*losses[it.row])}, **changes) for it in sweep.records)
    return replace(sweep, records=records)


def drawn(sweep):
    """The charts of the only curves of a sweep, by row."""
    ((_, group),) = charts_of(sweep)
    return {chart.row: chart for chart in group}


# ---- Colours ----


@SCHEMES
def test_lines_stand_out_and_text_can_be_read(scheme):
    assert contrast(scheme["o0"], scheme["page"]) >= 3
    for name in ("ink", "muted", "good", "bad", "row"):
        assert min(contrast(scheme[name], scheme[below]) for below in ("page", "surface")) >= 4.5


# ---- Curves made thin ----


def test_a_long_curve_becomes_means_over_parts_that_cover_all_steps():
    points = mean_of([curve(*(float(step) for step in range(1, 10_001)))])
    assert len(points.steps) == POINTS
    assert np.allclose(points.steps, points.values)
    assert (points.steps[0] < 100, points.steps[-1] > 9900) == (True, True)


def test_a_run_that_was_cut_off_counts_as_far_as_it_went():
    values = mean_of([curve(*[1.0] * 1000), curve(*[3.0] * 500)]).values
    assert (set(values[:55]), set(values[-55:])) == ({2.0}, {1.0})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_what_cannot_be_drawn_is_a_gap(bad):
    points = mean_of([curve(3.0, bad, 1.0, bad)])
    assert np.isnan(points.values).tolist() == [False, True, False, True]
    assert points.describe() == "from 3.00 to 1.00, no finite value after step 3"


def test_runs_that_failed_count_only_where_none_finished():
    sweep = sample_sweep(("O1",))
    records = [
        Run("O1", seed, outcome=outcome, losses={"0": curve(value, value)})
        for seed, (outcome, value) in enumerate([(Ending.FINISHED, 1.0), (Ending.CRASHED, 9.0)])
    ]
    for kept, value in [(records, 1.0), (records[1:], 9.0)]:
        (line,) = curves_of(replace(sweep, records=tuple(kept)), lambda it: it.losses["0"])
        assert line.mean.values.tolist() == [value, value]


def test_what_diverged_or_is_one_spike_does_not_squeeze_the_others():
    good, bad = sample_sweep(("O0", "O3")).rows
    steady = LevelCurve(good, mean_of([curve(*np.linspace(1, 2, 1000), 1e9)]))
    diverged = LevelCurve(bad, mean_of([curve(1.0, 1e30)]))
    low, high = value_range([steady, diverged])
    assert (low, 2 < high < 1e8) == (pytest.approx(1, abs=0.01), True)
    assert value_range([diverged]) == (1.0, 1e30)
    assert value_range([LevelCurve(good, Points(np.ones(1), np.array([math.nan])))]) is None


# ---- Charts ----


def test_each_row_has_a_chart_with_o0_behind_it():
    charts = drawn(sweep_of({"O0": (4, 3), "O1": (4, 2), "O3": (4, math.nan)}))
    assert list(charts) == ["O1", "O3"]
    assert [charts["O1"].title, charts["O1"].words] == ["Loss of O1 beside O0", "from 4.00 to 2.00"]
    assert re.findall(r'stroke="var\(--(o0|row|bad)\)', charts["O1"].svg) == ["o0", "row"]
    assert set(re.findall(r"var\(--(o0|row|bad)\)", charts["O3"].svg)) == {"o0", "bad"}
    assert charts["O3"].words.startswith("diverged; from 4.00 to 4.00, no finite value after step 1")
    assert drawn(sweep_of({"O0": (4, 3)}))["O0"].title == "Loss of O0"
    assert drawn(sweep_of({"O1": (4, 3)}))["O1"].title == "Loss of O1"


@pytest.mark.parametrize("values", [(2.0,), (2.0, 2.0), (math.nan, math.nan)], ids=["step", "value", "none"])
def test_there_is_no_chart_of_what_has_one_value(values):
    assert charts_of(sweep_of({"O0": values, "O1": values})) == []


def test_each_loss_and_metric_has_charts():
    names = {name: [chart.row for chart in group] for name, group in charts_of(sample_sweep(("O0", "O1")))}
    assert names == {"Loss": ["O1"], "accuracy": ["O1"]}  # the other metric has one value


# ---- Drawings ----


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0, 1, [0, 0.5, 1]),
        (0.12, 0.31, [0.15, 0.2, 0.25, 0.3]),
        (-3, 40, [0, 20, 40]),
        (1, 390, [100, 200, 300]),
    ],
)
def test_ticks_are_round_numbers_and_few(low, high, found):
    assert ticks(low, high) == found
    assert log_ticks(0.02, 5000.0) == [0.1, 10.0, 1000.0]


def test_a_drawing_has_gaps_for_what_is_missing_and_stays_inside():
    points = Points(np.arange(5.0), np.array([1.0, math.nan, 3.0, 99.0, math.nan]))
    svg = draw([(points, drawing.ROW, 1.5)], points.break_off, (1.0, 3.0), (0, 4))
    (line,) = re.findall(r'<path d="(M[^"]*)" stroke="var\(--row\)"', svg)
    assert line == "M60.0 120.0h0M200.0 12.0h0L270.0 12.0"
    assert "l6 6m0 -6l-6 6" in svg
    assert re.findall(r"#\w{6}\b|font-family|<style| id=", svg) == []


def test_a_wide_range_has_a_logarithmic_axis():
    points = Points(np.arange(3.0), np.array([0.01, 1.0, 100.0]))
    svg = draw([(points, drawing.ROW, 1.5)], points.break_off, (0.01, 100.0), (0, 2))
    assert "M60.0 120.0h0L200.0 66.0L340.0 12.0" in svg
    assert ">100</text>" in svg
