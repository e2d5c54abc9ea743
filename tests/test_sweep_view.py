"""What a sweep looks like in a terminal, in a log and in a pipe."""

import math
from dataclasses import replace
from io import BytesIO, StringIO, TextIOWrapper

import pytest
from rich.console import Console

from ampatch.sweeps.campaign import SweepProgress
from ampatch.sweeps.records.record import Curve, Ending, Measured, RunRecord, Spread
from ampatch.sweeps.records.sweep import Settings
from ampatch.sweeps.terminal.stream import Stream
from ampatch.sweeps.terminal.terminal_table import heading_of
from ampatch.sweeps.terminal.view import progress_bar, show, show_comparison
from ampatch.sweeps.verdicts.compare import compare
from ampatch.sweeps.verdicts.summary import summarize
from ampatch.sweeps.web.page import write_page
from sweep_samples import ENVIRONMENT, VARIANT, sample_sweep

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
WHOLE = sample_sweep(steps=60)

# The widest that there is in each column.
MEASURED = Measured(
    steps=200,
    skipped=(1, 2),
    step_ms=Spread(1234.567, 1200.0, 1300.0, 194),
    peak_mib=12345.6,
    first_loss=1.0,
    final_loss=0.00012345,
    loss_noise=0.0000123,
    loss_scales={"0": Curve((1,), (2.0**24,))},
    metrics={"accuracy": Curve((200,), (0.9812,))},
)


def record(row, **changes):
    return RunRecord(row, 0, 0, Ending.FINISHED, 1.0, measured=replace(MEASURED, **changes))


def failed(row, outcome=Ending.CRASHED, cause="ValueError: bad [bold] value", **changes):
    return RunRecord(row, 0, 0, outcome, 60.0, cause, log="/logs/O1.log", **changes)


def sweep(*records, script="train.py", **changes):
    rows = tuple(dict.fromkeys(it.row for it in records))
    return summarize(Settings(script, (), rows, **changes), ENVIRONMENT, records)


def printed(whole, width=80):
    console = Console(file=StringIO(), width=width)
    show(console, whole)
    return console.file.getvalue()


def compared(before, after, width=80, **limits):
    console = Console(file=StringIO(), width=width)
    show_comparison(console, compare(before, after, **limits))
    return console.file.getvalue()


def cells(output, level):
    """The cells of a level's row in the printed table."""
    rows = [line.split() for line in output.splitlines() if line.split()[:1] == [level]]
    assert rows, output
    return rows[0]


def sentence_of(output):
    """The output as one line, as it was before it was broken."""
    return " ".join(output.split())


# ---- The table ----


@pytest.mark.parametrize("width", [80, 200])
def test_the_widest_table_of_all_rows_fits_into_80_columns(width):
    names = (*LEVELS, "autocast", VARIANT, "autocast dtype=float16")
    whole = sweep(*[record(name) for name in names], record("O1", final_loss=math.nan))
    for lines in (printed(whole, width).splitlines(), printed(WHOLE, width).splitlines()):
        assert [line for line in lines if len(line) > 80 and "(log: " not in line] == []
        assert len([line for line in lines if line.startswith(names)]) >= 7


def test_a_variant_has_a_short_name_that_is_explained_below_the_table():
    output = printed(WHOLE)
    assert cells(output, "V1")[-1] == "worse"
    assert f"\nV1: {VARIANT}\n" in output
    assert output.count(VARIANT) == 1


def test_a_variant_is_called_the_same_in_the_terminal_and_on_the_page():
    whole = sweep(record("O0"), *[record(f"{level} loss_scale=1") for level in ("O2", "autocast")])
    legend = [line.split(": ") for line in printed(whole).splitlines() if line.startswith("V")][-2:]
    page = write_page(whole).replace("<wbr>", "")
    assert [key for key, _ in legend] == ["V1", "V2"]
    for key, name in legend:
        assert f'<span class="tag">{key}</span> <span class="name">{name}</span>' in page


def test_a_variant_that_is_recommended_has_its_whole_name_once():
    name = "O2 keep_fp32=" + ",".join(f"layer{index}" for index in range(7))
    fast = record(name, step_ms=Spread(600.0, 590, 610, 195))
    said = sentence_of(printed(sweep(record("O0"), fast)))
    assert f"Recommended: {name} (V1). V1 runs at 2.06x the speed of O0" in said
    assert said.count(name) == 2  # once in the legend


def test_a_narrow_terminal_breaks_no_number():
    whole = sweep(record("O0"), record("O1"))
    assert cells(printed(whole, 40), "O1") == cells(printed(whole), "O1")
    assert cells(compared(whole, whole, width=40), "O1") == cells(compared(whole, whole), "O1")


def test_a_long_metric_is_headed_by_lines_of_eight_characters_or_whole_words():
    assert max(map(len, heading_of("x" * 100).split("\n"))) <= 8
    assert heading_of("validation_perplexity") == "validation_\nperplexity"


def test_the_distance_is_that_of_what_did_worst():
    runs = [record("O0", final_loss=0.5, loss_noise=0.1), record("O1", final_loss=0.1, loss_noise=None)]
    worse = replace(runs[1].measured, metrics={"accuracy": Curve((1,), (0.9812 * 0.97,))})
    output = printed(sweep(runs[0], replace(runs[1], measured=worse)))
    assert cells(output, "O1")[7] == "-6.0"
    assert cells(output, "O1")[-1] == "worse"


def test_a_row_that_was_not_run_says_so():
    found = summarize(Settings("train.py", (), ("O0", "O1")), ENVIRONMENT, [record("O0")])
    assert cells(printed(found), "O1")[-2:] == ["not", "run"]


def test_the_title_names_script_seeds_and_device():
    assert printed(WHOLE).startswith("examples/train.py: 3 seeds, torch 2.13.0+cu130, NVIDIA H200")
    twice = replace(WHOLE, settings=replace(WHOLE.settings, repeat=2))
    assert printed(twice).startswith("examples/train.py: 3 seeds x 2, torch")
    on_cpu = replace(WHOLE, environment=replace(ENVIRONMENT, device="cpu", cpu="Ryzen"))
    assert "torch 2.13.0+cu130, Ryzen" in printed(on_cpu)


# ---- Around the table ----


def test_the_caption_says_how_the_columns_were_measured():
    said = sentence_of(printed(WHOLE))
    assert "ms a step: median without the first 5 steps, +- half the range between the quartiles" in said
    assert "peak MiB: device memory." in said
    assert "final loss: mean of the last 10." in said
    assert "in spreads (the standard deviation of O0 over the seeds); below -2 is worse" in said
    said = sentence_of(printed(sweep(record("O0"), record("O1"), tolerance=3.5)))
    assert "(the standard error of O0's last 10 losses or 0.5 % of O0's value); below -3.5 is worse" in said


@pytest.mark.parametrize(
    ("warmup", "steps", "expected"),
    [
        (5, [15, 200], "without the first 5 steps,"),
        (1, [15], "without the first step,"),
        (0, [15], "of all steps,"),
        (100, [15, 60], "without the first half of so short a run,"),
        (5, [200, 4], "without the first 5 steps, or the first half of a run too short for that,"),
    ],
)
def test_the_caption_says_what_was_left_out_of_the_times(warmup, steps, expected):
    runs = [record(f"O{number}", steps=count) for number, count in enumerate(steps)]
    said = sentence_of(printed(sweep(*runs, warmup=warmup)))
    assert f"ms a step: median {expected} +- half the range" in said


def test_the_recommendation_is_the_end():
    assert sentence_of(printed(WHOLE)).endswith(f"Recommended: O5. {WHOLE.recommendation.reason}")
    nothing = printed(sweep(record("O1")))
    assert "Nothing is recommended. Without O0 there is nothing to compare with" in sentence_of(nothing)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (failed("O1"), "O1 seed 0 crashed: ValueError: bad [bold] value (log: /logs/O1.log)"),
        (failed("O1", Ending.TIMED_OUT), "O1 seed 0 timed out after 60 s: ValueError: bad [bold] value (log"),
        (failed("O1", measured=MEASURED), "O1 seed 0 crashed (step 200): ValueError: "),
        (failed("O1", Ending.INTERRUPTED, cause=""), "O1 seed 0 interrupted (log: /logs/O1.log)"),
    ],
    ids=["crashed", "timed out", "late", "interrupted"],
)
def test_a_run_that_failed_has_one_line_with_its_cause_and_its_log(one, expected):
    lines = printed(sweep(record("O0"), one)).splitlines()
    (line,) = [line for line in lines if line.startswith("O1 ") and f" {one.outcome}" in line]
    assert line.startswith(expected)


def test_what_a_log_says_cannot_steer_the_terminal():
    output = printed(sweep(record("O0"), failed("O1", cause="\x1b[31mred\x07\rgone")))
    assert "\\x1b[31mred\\x07\\rgone" in output
    assert "\x1b" not in output


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_any_text_can_be_written_in_any_encoding(encoding):
    file = TextIOWrapper(BytesIO(), encoding=encoding)
    text = "\u5931\u6557 \udcff \u00e9"
    whole = sweep(record("O0"), failed(f"O1 {text}", cause=text), script=f"{text}.py")
    console = Console(file=Stream(file), width=80)
    show(console, whole)
    show_comparison(console, compare(whole, whole))
    file.flush()
    written = file.buffer.getvalue().decode(encoding)
    assert ("\u5931\u6557" if encoding == "utf-8" else "\\u5931\\u6557") in written


# ---- Comparisons ----


def test_a_comparison_shows_both_sides_and_what_got_worse():
    old = sweep(record("O0"), record("O1"))
    slow = record("O1", step_ms=Spread(2469.134, 2400, 2500, 195), peak_mib=6172.8)
    output = compared(old, sweep(record("O0"), slow))
    expected = "O1 1235 2469 0.50x 0.50x 0.9812 0.9812 0.0 slower"
    assert cells(output, "O1") == expected.split()
    assert cells(output, "O0")[-1] == "-"
    said = sentence_of(output)
    assert said.endswith("O1 is 100 % slower: 2469 ms a step against 1235 before (5 % allowed)")


def test_a_comparison_says_which_sweeps_these_are_and_what_was_not_compared():
    before, after = sweep(record("O0"), failed("O1")), sweep(record("O0"), record("O1"))
    output = compared(before, after, names=("a", "results/b"))
    said = sentence_of(output)
    assert f"before: a, {ENVIRONMENT.created}, commit 659de88f1a+, ampatch sweep" in said
    assert f"after: results/b, {ENVIRONMENT.created}, commit" in said
    assert "Not compared (failed before): O1 No level got worse" in said
    assert cells(output, "O1")[-2:] == ["not", "compared"]


# ---- The progress bar ----


def progress(*, terminal):
    """What a bar shows of two runs out of three."""
    console = Console(file=StringIO(), width=100, force_terminal=terminal, color_system=None)
    with progress_bar(console, 4, 200) as bar:
        bar(SweepProgress("O0 seed 1", 0, record("O0"), 1, 4, None))
        bar(SweepProgress("O1 seed 2", 60, None, 1, 4, 150.0))
        bar._progress.refresh()
        timed_out = replace(record("O1"), outcome=Ending.TIMED_OUT)
        bar(SweepProgress("O1 seed 2", 0, timed_out, 2, 4, 150.0))
    return console.file.getvalue()


def test_a_bar_shows_the_run_its_steps_and_the_time_left():
    shown = progress(terminal=True)
    assert "O1 seed 2" in shown
    assert "1 of 4 runs step 60 of 200 0:00:00 about 2 min left" in shown
    assert shown.rstrip().endswith("\x1b[2K")  # it leaves nothing behind


def test_where_nobody_watches_there_is_a_line_for_each_run():
    lines = progress(terminal=False).splitlines()
    assert [line.partition(" after ")[0] for line in lines] == ["O0 seed 1: finished", "O1 seed 2: timed out"]
    assert [line.partition(" (")[2] for line in lines] == ["1 of 4)", "2 of 4, about 2 min left)"]
