"""The page of the doctor is one file that says everything, needs nothing, and can be read at any width."""

import re
from dataclasses import replace
from functools import cache

import pytest

from ampatch.doctor.finding import Report
from ampatch.doctor.fixes import Paste, Rank, Tried, Words
from ampatch.doctor.growth.curves import describe_growth
from ampatch.doctor.page.charts import charts_of
from ampatch.doctor.page.page import write_page
from ampatch.doctor.text.source import Change
from chromium import look_at, needs_chromium
from doctor_samples import HOSTILE, attempts_of, extreme_reports, notes_of, sample_finding
from test_sweep_page import Page, check_whole

REPORTS = extreme_reports()


@cache
def page(name):
    return Page(write_page(REPORTS[name], "folder/train.py"))


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_is_whole_loads_nothing_and_runs_nothing(name):
    check_whole(page(name), HOSTILE)
    assert len(page(name).html.encode()) < 250_000


def test_what_broke_comes_first_then_where_it_grew_and_what_departs():
    text = page("sample").text
    said = (
        "Doctor's report on train.py",
        "Step 53, forward: linear in model.head",
        "divide before the sum",
        "Growth began at step 2",
        "Compared with O0, model.blocks.0 departs first: its gradient of the output is off by 0.97; 93%",
        "Findings, in the order of appearance",
        "at [8, 3]; sample 8 of the batch; 135 in all",
        "the same run in float32 stays finite to its end",
        "whether float32 survives is not known",
        "Silent faults",
        "Step 2, backward: clipped while scaled in model.head",
        "Over time",
        "Layers",
        "host syncs, 2 a step",
        "Not known: it may differ",
    )
    places = [text.index(words) for words in said]
    assert places == sorted(places)


def test_what_was_tried_stands_behind_its_advice_and_text_to_paste_keeps_its_lines():
    advice = Paste("that", (Change("net.py", 1, 1, ("y = x.float().exp()",)),))
    tried = (Tried(Rank.TRAINS, "the script trains"), Tried())
    finding = sample_finding(remedies=(advice, Words("b")), tried=tried)
    flat = replace(finding, facts={"flat": True}, count=7777)
    html = write_page(Report((finding, flat)), "train.py")
    assert f'<li>{advice} <span class="muted">(tried: the script trains)</span></li>\n<li>b <span' in html
    assert "pre-wrap" in html
    assert "7777" not in html


def test_the_first_that_departs_stands_out():
    html = page("sample").html
    best = [line for line in re.findall(r"<tr\b.*?</tr>", html, re.DOTALL) if " best" in line]
    assert len(best) == 1
    assert "departs first" in best[0]
    assert html.count("<small>departs first</small>") == 1
    assert "not finite" in html


def test_charts_are_of_the_layers_nearest_to_overflow_in_their_order():
    titles = re.findall(r"<title>Headroom to overflow of ([^<]*)", page("sample").html)
    assert titles == ["model.stem", "model.blocks.0", "model.blocks.1", "model.blocks.2", "model.head"]
    assert len(re.findall("<title>Headroom", page("long").html)) == 6


def test_a_layer_without_weights_has_no_chart_of_their_gradients():
    growth = describe_growth(notes_of({"linear": (1.0, 3.0, 0.5), "relu": (1.0, 3.0, 0.5)}), attempts_of())
    linear, relu = growth["layers"]
    linear["gradient_norm"][0], relu["gradient_norm"] = 2.0, [None] * len(growth["attempts"])
    titles = [it.row for it in dict(charts_of(Report(growth=growth), growth["layers"]))["Norm of gradients"]]
    assert titles == ["model.linear"]


def test_a_run_without_a_fault_says_so():
    assert "Nothing broke" in page("sound").text
    assert "<svg" not in page("sound").html


def test_names_cannot_leave_their_place():
    assert HOSTILE not in page("hostile").html
    assert HOSTILE in page("hostile").text


@needs_chromium
@pytest.mark.process
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_fits_and_can_be_read_at_every_width(scheme, tmp_path):
    pages = {name: page(name).html for name in REPORTS}
    look_at(pages, [320, 390, 1280], tmp_path, dark=scheme == "dark")
