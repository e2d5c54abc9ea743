"""What is written to `--out` is read back as it was, and JSON and CSV are what other programs expect."""

import csv
import io
import json
import re
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampatch import AmpValueError
from ampatch.sweeps.records.record import Bytes, Curve, Measured, Spread
from ampatch.sweeps.records.sweep import Distance, Sweep, SweepRow
from ampatch.sweeps.records.sweep_file import from_json, read_measured, to_json
from ampatch.sweeps.records.table_file import to_csv
from sweep_samples import sample_sweep

NAN, INF = float("nan"), float("inf")
SAMPLE = sample_sweep(("O0", "O1", "autocast", "O5 cast_model_outputs=float16"), seeds=2, steps=20)


def parts(sweep=SAMPLE):
    """The sweep as other programs read it."""
    return json.loads(to_json(sweep), parse_constant=pytest.fail)


def fault(**changes):
    """The message about a file in which top-level fields were changed."""
    return message_about(json.dumps(parts() | changes))


# ---- sweep.json ----


distances = st.dictionaries(st.text(), st.from_type(Distance), max_size=3)


# `repr` tells NaN from other numbers, 0.0 from -0.0, tuples from lists, and names every class.
@settings(max_examples=40)
@given(st.builds(Sweep, rows=st.lists(st.builds(SweepRow, metrics=distances), max_size=3).map(tuple)))
def test_any_sweep_survives_json(sweep):
    text = to_json(sweep)
    assert repr(from_json(text)) == repr(sweep)


@settings(max_examples=40)
@given(st.from_type(Measured), st.booleans())
def test_what_a_child_measured_survives_a_way_through_json(measured, strict):
    # A child may write NaN as Python does, or as the file has it.
    fields = parts_of(measured) if strict else json.loads(json.dumps(asdict(measured)))
    assert repr(read_measured(fields)) == repr(measured)


def parts_of(measured):
    record = replace(SAMPLE.records[0], measured=measured)
    return parts(replace(SAMPLE, records=(record,)))["records"][0]["measured"]


def test_the_file_is_ascii_and_says_its_format_and_version_in_its_first_lines():
    lines = to_json(SAMPLE).splitlines()
    assert lines[:3] == ["{", '"format": "ampatch sweep",', '"version": 1,']
    assert to_json(SAMPLE).isascii()


def test_numbers_that_are_not_finite_are_written_by_name():
    measured = Measured(losses={"0": Curve((1, 2, 3), (NAN, INF, -INF))})
    assert parts_of(measured)["losses"]["0"]["values"] == ["NaN", "Infinity", "-Infinity"]


def test_fields_that_are_not_known_yet_are_passed_over():
    assert from_json(json.dumps(parts() | {"note": "mine"})) == SAMPLE


def message_about(text):
    try:
        from_json(text, "a/sweep.json")
    except AmpValueError as error:
        return str(error)
    return "a/sweep.json: read"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, r"not JSON .*: expected the sweep\.json that")
            for text in ("", "{", "O0,1\n", "[" * 100_000)
        ),
        *(
            (text, "JSON, but not of the format 'ampatch sweep': expected")
            for text in ("[]", "3", "{}", '{"format": "other"}')
        ),
    ],
    ids=["empty", "cut", "csv", "deep", "list", "number", "object", "other"],
)
def test_what_is_no_sweep_is_refused(text, message):
    assert re.match(rf"a/sweep\.json: {message}", message_about(text))


def test_a_file_of_a_newer_version_says_to_upgrade():
    expected = "a/sweep.json: version 2, and this ampatch reads versions up to 1: upgrade ampatch"
    assert fault(version=2, rows="of another kind").startswith(expected)


@pytest.mark.parametrize("version", [None, "1", 0, 1.0, True])
def test_a_version_that_is_none_is_refused(version):
    assert f"version {version!r}, expected a whole number from 1 up" in fault(version=version)


def test_missing_fields_are_all_named():
    whole = parts()
    del whole["records"], whole["settings"]
    expected = r"a/sweep\.json: sweep .*'settings'.* 'records'.*: expected the sweep\.json"
    assert re.match(expected, message_about(json.dumps(whole)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step_ms": None, "skipped": None}, "measured.skipped is None (expected list)"),
        ({"steps": 1.5}, "measured.steps is 1.5 (expected int)"),
        ({"steps": True}, "measured.steps is True (expected int)"),
        ({"initialized": 1}, "measured.initialized is 1 (expected bool)"),
        ({"peak_mib": False}, "measured.peak_mib is False (expected int)"),
        ({"peak_mib": 10**400}, "too large"),
        ({"step_ms": {"median": 1.0}}, "measured.step_ms is {'median': 1.0} ("),
        ({"losses": {"0": {"values": [1.0, "x"]}}}, "measured.losses['0'].values[1] is 'x' (expected int)"),
    ],
    ids=["no list", "fraction", "bool", "int", "bool for float", "huge", "missing", "deep"],
)
def test_a_field_of_a_wrong_type_is_named_with_what_was_found(fields, message):
    with pytest.raises(AmpValueError) as caught:
        read_measured(fields)
    assert message in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100)
@given(st.data(), json_values)
def test_a_value_out_of_place_is_an_error_with_the_name_of_the_file_or_nothing(data, value):
    whole = parts()
    place = whole
    while isinstance(place, dict | list) and place:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or data.draw(st.booleans()):
            break
        place = place[key]
    if place:
        place[key] = value
    assert message_about(json.dumps(whole)).startswith("a/sweep.json: ")


# ---- sweep.csv ----


def table(sweep=SAMPLE):
    """The lines of the CSV, each a dict by heading."""
    return list(csv.DictReader(io.StringIO(to_csv(sweep), newline="")))


CAUSE = 'File "x", line 1: =1+1; café'


def test_a_cell_of_which_nothing_is_known_is_empty():
    crashed = next(line for line in table() if line["outcome"] == "crashed")
    assert (crashed["step_ms"], crashed["masters_bytes"], crashed["metric:accuracy"]) == ("", "", "")
    assert crashed["cause"].startswith("RuntimeError: ")


@pytest.mark.parametrize(
    ("measured", "cells"),
    [
        (
            Measured(step_ms=Spread(0.0, 0.0, 0.0, 3), bytes=Bytes(0, 0, 0, 0, 0), final_loss=0.0),
            {"step_ms": "0.0", "masters_bytes": "0", "final_loss": "0.0"},
        ),
        (
            Measured(final_loss=NAN, metrics={"f1": Curve((1, 2), (0.5, -INF))}),
            {"final_loss": "nan", "metric:f1": "-inf"},
        ),
        (Measured(metrics={'a,"b"\nc': Curve((1,), (0.5,))}), {'metric:a,"b"\nc': "0.5", "cause": CAUSE}),
    ],
    ids=["zero is not nothing", "words that float reads", "text of any kind"],
)
def test_a_cell_holds_what_was_measured(measured, cells):
    record = replace(SAMPLE.records[0], measured=measured, cause=CAUSE)
    (line,) = table(replace(SAMPLE, records=(record,)))
    assert {name: line[name] for name in cells} == cells
