"""What a sweep looks like in a terminal, in a log and in a pipe."""

import math
from dataclasses import replace
from io import BytesIO, TextIOWrapper

import pytest

from ampatch.sweeps.campaign import SweepProgress
from ampatch.sweeps.judge.advice import summarize
from ampatch.sweeps.rows import Curve, Ending, Run, Settings
from ampatch.sweeps.show.page import write_page
from ampatch.sweeps.show.terminal import heading_of, show, write
from sweep_samples import ENVIRONMENT, VARIANT, sample_sweep, times

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
WHOLE = sample_sweep(steps=60)

# The widest that there is in each column.
MEASURED = Run(
    "O0",
    seconds=1.0,
    steps=200,
    skipped=(1, 2),
    **times((1234.567, 1200.0, 1300.0)),
    peak_mib=12345.6,
    first_loss=1.0,
    final_loss=0.00012345,
    loss_noise=0.0000123,
    loss_scale=2.0**24,
    metrics={"accuracy": Curve((200,), (0.9812,))},
)


def record(row, **changes):
    return replace(MEASURED, row=row, **changes)


def failed(row, outcome=Ending.CRASHED, cause="ValueError: bad [bold] value", **changes):
    return Run(row, outcome=outcome, seconds=60.0, cause=cause, log="/logs/O1.log", **changes)


def sweep(*records, script="train.py", **changes):
    rows = tuple(dict.fromkeys(it.row for it in records))
    return summarize(Settings(script, (), rows, **changes), ENVIRONMENT, records)


def cells(output, level):
    """The cells of a level's row in the printed table."""
    rows = [line.split() for line in output.splitlines() if line.split()[:1] == [level]]
    assert rows, output
    return rows[0]


def sentence_of(output):
    """The output as one line, as it was before it was broken."""
    return " ".join(output.split())


def test_the_widest_table_of_all_rows_fits_into_80_columns():
    names = (*LEVELS, "autocast", VARIANT, "autocast dtype=float16")
    whole = sweep(*[record(name) for name in names], record("O1", final_loss=math.nan))
    for lines in (write(whole).splitlines(), write(WHOLE).splitlines()):
        assert [line for line in lines if len(line) > 80 and "(log: " not in line] == []
        assert len([line for line in lines if line.startswith(names)]) >= 7


def test_a_table_is_its_rows():
    found = write(sweep(record("O0"), record("O1", final_loss=math.nan), failed("O4")))
    assert found.startswith("train.py: 1 seed, torch 2.13.0+cu130, NVIDIA H200\n")
    assert cells(found, "O0") == [
        "O0",
        "1235",
        "50",
        "1.00x",
        "12346",
        "0.0001234",
        "0.9812",
        "-",
        "2",
        "2^24",
        "baseline",
    ]
    assert cells(found, "O1")[-1] == "diverged"
    assert cells(found, "O4") == ["O4", *"-" * 9, "failed"]


def test_a_variant_has_a_short_name_that_is_explained_below_the_table():
    output = write(WHOLE)
    assert cells(output, "V1")[-1] == "worse"
    assert f"\nV1: {VARIANT}\n" in output
    assert output.count(VARIANT) == 1


def test_a_variant_is_called_the_same_in_the_terminal_and_on_the_page():
    whole = sweep(record("O0"), *[record(f"{level} loss_scale=1") for level in ("O2", "autocast")])
    legend = [line.split(": ") for line in write(whole).splitlines() if line.startswith("V")][-2:]
    page = write_page(whole).replace("<wbr>", "")
    assert [key for key, _ in legend] == ["V1", "V2"]
    for key, name in legend:
        assert f'<span class="tag">{key}</span> <span class="name">{name}</span>' in page


def test_a_variant_that_is_recommended_has_its_whole_name_once():
    name = "O2 keep_fp32=" + ",".join(f"layer{index}" for index in range(7))
    fast = record(name, **times((600.0, 590.0, 610.0)))
    said = sentence_of(write(sweep(record("O0"), fast)))
    assert f"Recommended: {name} (V1). V1 runs at 2.06x the speed of O0" in said
    assert said.count(name) == 2  # once in the legend


def test_a_long_metric_is_headed_by_lines_of_eight_characters_or_whole_words():
    assert max(map(len, heading_of("x" * 100).split("\n"))) <= 8
    assert heading_of("validation_perplexity") == "validation_\nperplexity"


def test_what_holds_of_several_rows_is_said_once():
    slow = [record(name, outcome=Ending.CUT, **times((9999.0, 9900.0, 9999.9))) for name in ("O1", "O4")]
    output = write(sweep(record("O0"), *slow))
    assert "\nO1, O4 slow: cut short; levels that --levels names are not\n" in output
    assert "(log" not in output  # it did not fail


def test_a_row_that_was_not_run_says_so():
    found = summarize(Settings("train.py", (), ("O0", "O1")), ENVIRONMENT, [record("O0")])
    assert cells(write(found), "O1")[-2:] == ["not", "run"]


def test_the_title_names_script_seeds_and_device():
    assert write(WHOLE).startswith("examples/train.py: 3 seeds, torch 2.13.0+cu130, NVIDIA H200")
    twice = replace(WHOLE, settings=replace(WHOLE.settings, repeat=2))
    assert write(twice).startswith("examples/train.py: 3 seeds x 2, torch")
    on_cpu = replace(WHOLE, environment=replace(ENVIRONMENT, device="cpu", cpu="Ryzen"))
    assert "torch 2.13.0+cu130, Ryzen" in write(on_cpu)


def test_the_caption_says_how_the_columns_were_measured():
    said = sentence_of(write(WHOLE))
    assert "ms a step: median without the first 5 steps, +- half the range between the quartiles" in said
    assert "peak MiB: device memory." in said
    assert "in spreads (the standard deviation of O0 over the seeds); below -2 is worse" in said
    said = sentence_of(write(sweep(record("O0"), record("O1"))))
    assert "losses and the deviation of its last values; 0.5 % of O0's value); below -2 is worse" in said


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([15, 200], "without the first 5 steps,"),
        ([4, 6], "without the first half of so short a run,"),
        ([200, 4], "without the first 5 steps, or the first half of a run too short for that,"),
    ],
)
def test_the_caption_says_what_was_left_out_of_the_times(steps, expected):
    runs = [record(f"O{number}", steps=count) for number, count in enumerate(steps)]
    assert f"ms a step: median {expected} +- half the range" in sentence_of(write(sweep(*runs)))


def test_the_recommendation_is_the_end():
    assert sentence_of(write(WHOLE)).endswith(f"Recommended: O5. {WHOLE.recommendation.reason}")
    nothing = write(sweep(record("O1")))
    assert "Nothing is recommended. Without O0 there is nothing to compare with" in sentence_of(nothing)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (failed("O1"), "O1 seed 0 crashed: ValueError: bad [bold] value (log: /logs/O1.log)"),
        (failed("O1", Ending.TIMED_OUT), "O1 seed 0 timed out after 60 s: ValueError: bad [bold] value (log"),
        (failed("O1", steps=200), "O1 seed 0 crashed (step 200): ValueError: "),
        (failed("O1", Ending.INTERRUPTED, cause=""), "O1 seed 0 interrupted (log: /logs/O1.log)"),
    ],
    ids=["crashed", "timed out", "late", "interrupted"],
)
def test_a_run_that_failed_has_one_line_with_its_cause_and_its_log(one, expected):
    lines = write(sweep(record("O0"), one)).splitlines()
    (line,) = [line for line in lines if line.startswith("O1 ") and f" {one.outcome}" in line]
    assert line.startswith(expected)


def test_what_a_log_says_cannot_steer_the_terminal():
    output = write(sweep(record("O0"), failed("O1", cause="\x1b[31mred\x07\rgone")))
    assert "\\x1b[31mred\\x07\\rgone" in output
    assert "\x1b" not in output


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_any_text_can_be_written_in_any_encoding(encoding):
    file = TextIOWrapper(BytesIO(), encoding=encoding)
    text = "\u5931\u6557 \udcff \u00e9"
    show(file, write(sweep(record("O0"), failed(f"O1 {text}", cause=text), script=f"{text}.py")))
    written = file.buffer.getvalue().decode(encoding)
    assert ("\u5931\u6557" if encoding == "utf-8" else "\\u5931\\u6557") in written


def test_a_line_says_how_a_run_ended_and_how_long_the_rest_takes():
    said = [
        SweepProgress("O0 seed 1", record("O0"), 1, 4, None),
        SweepProgress("O1 seed 2", record("O1", outcome=Ending.TIMED_OUT), 2, 4, 150.0),
    ]
    assert list(map(str, said)) == [
        "O0 seed 1: finished after 1 s (1 of 4)",
        "O1 seed 2: timed out after 1 s (2 of 4, about 2 min left)",
    ]
