"""What is written to `--out` is read back as it was, and is JSON as other programs expect it."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampatch import AmpValueError
from ampatch.sweeps.results import from_json, to_json
from ampatch.sweeps.rows import Curve, Run
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


# `repr` tells NaN from other numbers, 0.0 from -0.0, tuples from lists, and names every class.
@settings(max_examples=40)
@given(st.builds(Run, row=st.text()))
def test_any_run_survives_json(run):
    (found,) = from_json(to_json(replace(SAMPLE, records=(run,)))).records
    assert repr(found) == repr(run)


def test_the_file_is_ascii_and_says_its_format_and_version_in_its_first_lines():
    lines = to_json(SAMPLE).splitlines()
    assert lines[:3] == ["{", '"format": "ampatch sweep",', '"version": 3,']
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
        (json.dumps(parts() | {"version": 1}), "version 1, and this ampatch reads version 3: make the sweep"),
        (json.dumps(parts() | {"records": 3}), "a part of it is missing or damaged"),
        (
            json.dumps({name: it for name, it in parts().items() if name != "records"}),
            "a part of it .*'records'",
        ),
    ],
    ids=["empty", "cut", "csv", "deep", "list", "number", "other", "older", "damaged", "missing"],
)
def test_what_is_no_sweep_is_refused(text, message):
    assert re.match(rf"a/sweep\.json: {message}", message_about(text))
