"""What is written to `--out` is read back as it was, and JSON and CSV are what other programs expect."""

import csv
import io
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampatch import AmpValueError
from ampatch.sweeps.files import from_json, from_plain, to_csv, to_json
from ampatch.sweeps.rows import Curve, Distance, Level, Run, Sweep
from sweep_samples import sample_sweep

NAN, INF = float("nan"), float("inf")
SAMPLE = sample_sweep(("O0", "O1", "autocast", "O5 cast_model_outputs=float16"), seeds=2, steps=20)


def parts(sweep=SAMPLE):
    """The sweep as other programs read it."""
    return json.loads(to_json(sweep), parse_constant=pytest.fail)


def message_about(text):
    with pytest.raises(AmpValueError) as caught:
        from_json(text, "a/sweep.json")
    return str(caught.value)


distances = st.dictionaries(st.text(), st.from_type(Distance), max_size=3)
levels = st.builds(Level, metrics=distances)


# `repr` tells NaN from other numbers, 0.0 from -0.0, tuples from lists, and names every class.
@settings(max_examples=40)
@given(st.builds(Sweep, rows=st.lists(levels, max_size=2).map(tuple)))
def test_any_sweep_survives_json(sweep):
    assert repr(from_json(to_json(sweep))) == repr(sweep)


def test_the_file_is_ascii_and_says_its_format_and_version_in_its_first_lines():
    lines = to_json(SAMPLE).splitlines()
    assert lines[:3] == ["{", '"format": "ampatch sweep",', '"version": 2,']
    assert to_json(SAMPLE).isascii()


def test_numbers_that_are_not_finite_are_written_by_name():
    run = Run("O0", losses={"0": Curve((1, 2, 3), (NAN, INF, -INF))})
    (found,) = parts(replace(SAMPLE, records=(run,)))["records"]
    assert found["losses"]["0"]["values"] == ["NaN", "Infinity", "-Infinity"]


def test_fields_that_are_not_known_yet_are_passed_over():
    assert from_json(json.dumps(parts() | {"note": "mine"})) == SAMPLE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, r"not JSON .*: expected a sweep\.json") for text in ("", "{", "O0,1\n", "[" * 100_000)),
        *((text, "JSON, but not of the format 'ampatch sweep'") for text in ("[]", "3", '{"format": "x"}')),
        (json.dumps(parts() | {"version": 1}), "version 1, and this ampatch reads version 2: make the sweep"),
        (json.dumps(parts() | {"rows": 3}), "a part of it is missing or damaged"),
        (
            json.dumps({name: it for name, it in parts().items() if name != "records"}),
            "a part of it .*'records'",
        ),
    ],
    ids=["empty", "cut", "csv", "deep", "list", "number", "other", "older", "damaged", "missing"],
)
def test_what_is_no_sweep_is_refused(text, message):
    assert re.match(rf"a/sweep\.json: {message}", message_about(text))


@pytest.mark.parametrize(
    "fields",
    [
        {"steps": 1.5},
        {"steps": True},
        {"initialized": 1},
        {"peak_mib": False},
        {"skipped": None},
        {"read": 3},
    ],
    ids=str,
)
def test_a_field_of_a_wrong_type_is_refused(fields):
    with pytest.raises(TypeError):
        from_plain(Run, {"row": "O0", **fields})


# ---- sweep.csv ----

CAUSE = 'File "x", line 1: =1+1; café'


@pytest.mark.parametrize(
    ("run", "cells"),
    [
        (Run("O0", cause=CAUSE), {"cause": CAUSE, "step_ms": "", "kept_mib": "", "skipped": "0"}),
        (Run("O0", step_ms=0.0, skipped=(3, 4)), {"step_ms": "0.0", "skipped": "2"}),
        (
            Run("O0", final_loss=NAN, metrics={'a,"b"\nc': Curve((1, 2), (0.5, -INF))}),
            {"final_loss": "nan", 'metric:a,"b"\nc': "-inf"},
        ),
    ],
    ids=["nothing is empty", "zero is not nothing", "words that float reads"],
)
def test_a_cell_holds_what_was_measured(run, cells):
    (line,) = csv.DictReader(io.StringIO(to_csv(replace(SAMPLE, records=(run,))), newline=""))
    assert {name: line[name] for name in cells} == cells
