"""What `loss_scale` may be, and what each faulty value is told."""

import copy
import math
import pickle
from fractions import Fraction

import numpy
import pytest
import torch

import ampatch as amp
from ampatch.levels.loss_scale import DynamicLossScale, StaticLossScale, parse_loss_scale

INF = float("inf")


@pytest.mark.parametrize(
    "value", [128, 128.0, "128", "128.0", " 128 ", "1.28e2", Fraction(128), numpy.float32(128)]
)
def test_a_number_and_a_number_in_a_string_are_a_static_scale(value):
    assert parse_loss_scale(value) == StaticLossScale(128.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"init_scale": 0.0}, "init_scale=0.0 must be a finite number above 0"),
        ({"init_scale": -2.0}, "init_scale=-2.0 must be a finite number above 0"),
        ({"init_scale": math.nan}, "init_scale=nan must be a finite number above 0"),
        ({"init_scale": INF, "max_scale": None}, "init_scale=inf must be a finite number above 0"),
        ({"growth_factor": 1.0}, "growth_factor=1.0 must be above 1"),
        ({"growth_factor": math.nan}, "growth_factor=nan must be above 1"),
        ({"growth_factor": INF}, "growth_factor=inf must be"),
        ({"backoff_factor": 0.0}, "backoff_factor=0.0 must lie between 0 and 1"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0 must lie between 0 and 1"),
        ({"backoff_factor": math.nan}, "backoff_factor=nan must lie between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval=0 must be"),
        ({"growth_interval": 2.5}, "growth_interval=2.5 must be"),
        ({"hysteresis": 0}, "hysteresis=0 must be"),
        ({"hysteresis": 1.5}, "hysteresis=1.5 must be"),
        ({"min_scale": 0.0}, "min_scale=0.0 must be above 0"),
        ({"min_scale": math.nan}, "min_scale=nan must be above 0"),
        ({"max_scale": 0.0}, "max_scale=0.0"),
        ({"max_scale": math.nan}, "max_scale=nan"),
        ({"min_scale": 8.0, "max_scale": 4.0, "init_scale": 4.0}, "min_scale=8.0 lies above max_scale=4.0"),
        ({"init_scale": 2.0**25}, "init_scale=33554432.0 lies outside .*max_scale=16777216.0"),
        ({"init_scale": 1.0, "min_scale": 2.0}, "init_scale=1.0 lies outside min_scale=2.0"),
    ],
    ids=str,
)
def test_a_description_that_cannot_work_is_refused(fields, message):
    with pytest.raises(amp.AmpValueError, match="DynamicLossScale: .*" + message):
        DynamicLossScale(**fields)


def test_every_fault_of_a_description_is_told_at_once():
    with pytest.raises(amp.AmpValueError, match=r"growth_factor=0.5.*backoff_factor=2.*hysteresis=-1"):
        DynamicLossScale(growth_factor=0.5, backoff_factor=2, hysteresis=-1)


def test_descriptions_are_values():
    one, other = DynamicLossScale(4.0), DynamicLossScale(4.0)
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    with pytest.raises(AttributeError):
        one.init_scale = 8.0


FINITE, NUMBER = "expected a finite number above 0", "expected a number above 0"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *[(value, f"loss scale {value!r}: {FINITE}") for value in (0, -1.0, math.nan, INF)],
        *[(value, f"loss scale .*: {NUMBER}") for value in ("128", None, True, [1.0])],
        (1e-60, "1e-60"),  # 0 and inf in float32
        (1e60, r"1e\+60"),
        (2.0**128, "3.4028"),
        (2.0**-127, "5.8774"),
    ],
)
def test_a_scale_set_by_hand_must_be_a_number_above_0_that_float32_can_hold(value, message):
    amp.initialize(torch.nn.Linear(1, 1), opt_level="O1", verbosity=0)
    error = amp.AmpTypeError if NUMBER in message else amp.AmpValueError
    with pytest.raises(error, match=message):
        amp.set_loss_scale(value)
    assert amp.get_loss_scale() == 2.0**16
