"""What a sweep measures inside a run, compared with what is counted by hand."""

import contextlib
import math
import statistics
import subprocess
import sys
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import ampatch as amp
from ampatch.sweeps.measure.meter import (
    EnoughSteps,
    HostClock,
    StepTimes,
    TrainingMeter,
    peak_memory,
    reset_peak,
)
from ampatch.sweeps.rows import Curve, Ending
from helpers import sync_debug_mode

each_level = pytest.mark.parametrize("level", list(amp.OPT_LEVELS))


def make(level="O1", optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = optimizer(model.parameters(), **{"lr": 0.1} | options)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return model, optimizer


def backward(loss, optimizer):
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


def step(model, optimizer):
    loss = F.cross_entropy(model(torch.ones(6, 4)), torch.zeros(6, dtype=torch.long))
    optimizer.zero_grad()
    backward(loss, optimizer)
    optimizer.step()
    return loss.item()


def train(steps, level="O0", **options):
    """Makes so many steps; returns the model, its optimizer and the losses."""
    model, optimizer = make(level, **options)
    return model, optimizer, [step(model, optimizer) for _ in range(steps)]


@pytest.fixture
def recorder():
    recorder = TrainingMeter()
    with amp.observe(recorder):
        yield recorder
    amp.uninitialize()


# Losses and scales


def train_loss_of(losses, level="O1", **options):
    """Makes a step for each of these losses."""
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    for factor in losses:
        loss = model(torch.ones(1)).float().mean() * factor
        backward(loss, optimizer)
        optimizer.step()
        loss.detach().zero_()
        optimizer.zero_grad()


def test_losses_are_kept_as_they_were_in_the_block_and_averaged_at_both_ends(recorder):
    losses = [1000.0] * 5 + [1.0, 2.0, 4.0, 8.0, 16.0] * 2
    train_loss_of(losses)
    measured = recorder.measured()
    assert measured["losses"]["0"] == Curve(tuple(range(1, 16)), tuple(losses))
    assert measured["first_loss"] == statistics.fmean(losses[:10])
    assert measured["final_loss"] == statistics.fmean(losses[5:])
    assert measured["loss_noise"] == pytest.approx(statistics.stdev(losses[5:]) / math.sqrt(10))


def test_skipped_steps_are_known_by_their_number_and_lower_the_scale(recorder):
    train_loss_of([0.5, math.inf, 0.5, 0.5, -math.inf], loss_scale="dynamic")
    measured = recorder.measured()
    assert (measured["steps"], math.isnan(measured["final_loss"])) == (5, True)
    assert measured["skipped"] == (2, 5)
    assert measured["loss_scale"] == 2.0**14


def test_a_static_scale_is_the_one_that_the_script_set_last(recorder):
    model, optimizer = make("O0")
    for scale in (1.0, 64.0):
        amp.set_loss_scale(scale)
        step(model, optimizer)
        step(model, optimizer)
    assert recorder.measured()["loss_scale"] == 64


def test_two_sessions_one_after_the_other_are_one_run(recorder):
    train_loss_of([0.5, math.inf], loss_scale="dynamic")
    amp.uninitialize()
    measured = recorder.measured()
    assert (measured["steps"], measured["skipped"], measured["loss_scale"]) == (2, (2,), 2.0**15)
    train_loss_of([4.0])
    assert recorder.measured()["losses"]["0"].values == (0.5, math.inf, 4.0)


# Steps


def boundaries(optimizers):
    """Brute force: a step of the run begins where an optimizer is seen that the present one has seen."""
    steps, seen = 0, set()
    for name in optimizers:
        if not seen or name in seen:
            steps, seen = steps + 1, set()
        seen.add(name)
        yield steps


class Told(HostClock):
    """A clock that is told the time, in seconds."""

    def __init__(self):
        self.time = 0.0
        self.now = lambda: self.time


def times_of(ends):
    """Times of steps that end at these seconds, each with the name of its optimizer."""
    optimizers = defaultdict(object)
    clock = Told()
    times = StepTimes(clock)
    for clock.time, name in ends:
        times.end_step(optimizers[name])
    return times


def times_of_one(seconds):
    return times_of((now, "model") for now in seconds)


@given(st.lists(st.sampled_from("abc"), max_size=300))
def test_a_step_of_the_run_ends_where_an_optimizer_comes_again(names):
    optimizers, times, counted = defaultdict(object), StepTimes(Told()), []
    for name in names:
        times.end_step(optimizers[name])
        counted.append(times.steps)
    assert counted == list(boundaries(names))


@pytest.mark.parametrize(("steps", "median"), [(0, None), (1, None), (2, 1000), (3, 1000)])
def test_times_of_a_short_run(steps, median):
    assert times_of_one(range(steps)).fields().get("step_ms") == median


def test_two_optimizers_in_turn_have_the_time_of_both():
    turns = [(2.0 * now + late, name) for now in range(20) for late, name in ((0, "first"), (0.1, "second"))]
    assert times_of(turns).fields()["step_ms"] == pytest.approx(2000)


def test_the_time_between_two_sessions_is_no_step():
    clock, optimizer = Told(), object()
    times = StepTimes(clock)
    for clock.time in (0, 1, 2, 3, 4, 100, 101):
        if clock.time == 100:
            times.forget_optimizers()
        times.end_step(optimizer)
    assert times.steps == 7
    assert times.fields()["step_ms_high"] == 1000


def test_optimizers_that_step_unlike_often_are_timed_by_rounds():
    marks = [(15.0 * turn + now, "critic") for turn in range(30) for now in range(1, 6)]
    times = times_of(sorted([*marks, *((15.0 * turn, "generator") for turn in range(1, 31))]))
    assert times.steps == 150
    assert times.fields()["step_ms"] == pytest.approx(1000 * 15 / 5)


def test_an_optimizer_that_steps_seldom_does_not_make_rounds():
    marks = [(float(now), "model") for now in range(1, 91)]
    times = times_of(sorted([*marks, *((now + 0.0, "temperature") for now in (30, 60, 90))]))
    assert times.fields()["timed"] == 84


def test_a_script_that_goes_on_after_the_limit_is_not_measured_any_more():
    told = []
    limited = TrainingMeter(limit=2, tell_limit=lambda: told.append(limited.measured()))
    with amp.observe(limited):
        model, optimizer = make("O4")
        for _ in range(5):
            with contextlib.suppress(EnoughSteps):
                step(model, optimizer)
            amp.report(accuracy=1.0)
        amp.uninitialize()
    (measured,) = told
    assert measured["steps"] == limited.measured()["steps"] == 2
    assert measured["losses"] == limited.measured()["losses"]
    assert len(measured["losses"]["0"].values) == 2
    assert limited.measured()["metrics"]["accuracy"].steps == (1,)


@pytest.mark.parametrize(
    ("limits", "steps"), [((0.0, 0.0), 6), ((0.0, math.inf), 10), ((math.inf, 0.0), 10), (None, 10)]
)
def test_a_run_that_takes_too_long_by_the_clock_and_by_the_processors_is_cut_short(limits, steps):
    limited = TrainingMeter(limits=limits)
    with amp.observe(limited), contextlib.suppress(EnoughSteps):
        train(10, "O4")
    measured = limited.measured()
    assert (measured["steps"], measured["outcome"]) == (steps, Ending.CUT if steps < 10 else Ending.FINISHED)
    assert measured["timed"] == (3 if steps < 10 else 4)


# Metrics


def test_metrics_are_curves_of_numbers_over_the_steps(recorder):
    model, optimizer = make("O0")
    for epoch in range(3):
        for _ in range(5):
            step(model, optimizer)
        amp.report(accuracy=torch.tensor([epoch / 8], requires_grad=True), note="an epoch", all=torch.ones(2))
    amp.report(step=7, f1=0.5)
    metrics = recorder.measured()["metrics"]
    assert metrics == {"accuracy": Curve((5, 10, 15), (0.0, 0.125, 0.25)), "f1": Curve((7,), (0.5,))}


class NoNumber:
    def __float__(self):
        raise KeyError


@pytest.mark.parametrize(
    ("step_given", "value", "steps"),
    [(math.nan, 1.0, (1,)), (2**70, 1.0, (1,)), (-1, 1.0, (1,)), (3, 10**400, None), (3, NoNumber(), None)],
    ids=["nan", "large", "negative", "too large a value", "no number"],
)
def test_whatever_is_reported_never_ends_a_script(recorder, step_given, value, steps):
    train(1)
    amp.report(step=step_given, accuracy=value)
    metrics = recorder.measured()["metrics"]
    assert metrics == ({"accuracy": Curve(steps, (1.0,))} if steps else {})


# Curves that stay short


def test_a_metric_that_is_reported_often_ends_with_its_last_value(recorder):
    make("O0")
    for number in range(3001):
        amp.report(step=number, accuracy=number)
    measured = recorder.measured()
    assert measured["metrics"]["accuracy"].values[-1] == 3000
    accuracy = measured["metrics"]["accuracy"]
    assert (len(accuracy.steps), accuracy.steps[-1]) == (751, 3000)
    assert accuracy.values[:2] == (1.5, 5.5)  # means of four neighbours


# What is measured stays as it is


def trained(level, observer):
    with amp.observe(observer):
        model, _, losses = train(10, level, momentum=0.9)
        amp.uninitialize()
    return losses, [param.detach().clone() for param in model.parameters()]


@pytest.mark.usefixtures("emulated")
@each_level
def test_a_run_that_is_measured_is_the_same_run(level):
    losses, params = trained(level, amp.Observer())
    measured_losses, measured_params = trained(level, TrainingMeter())
    assert losses == measured_losses
    assert all(map(torch.equal, params, measured_params))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_model_is_measured(recorder):
    model = torch.jit.script(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
    for _ in range(3):
        step(model, optimizer)
    assert recorder.measured()["steps"] == 3


# Memory


def run_fresh(script):
    return float(subprocess.check_output([sys.executable, "-c", script]))


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="writes to /proc")
def test_peak_memory_sees_memory_that_was_given_back_and_can_be_forgotten():
    script = (
        "import torch; from ampatch.sweeps.measure.meter import peak_memory, reset_peak;"
        "before = peak_memory()[1]; torch.ones(2**28); high = peak_memory()[1]; reset_peak();"
        "print(min(high - before, high - peak_memory()[1]))"
    )
    assert run_fresh(script) > 800


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_not_that_of_the_parent(tmp_path):
    child = "from ampatch.sweeps.measure.meter import peak_memory; print(peak_memory()[1])"
    start = f"subprocess.run([sys.executable, '-c', {child!r}])"
    parent = f"import subprocess, sys; big = b'x' * 2**30; {start}"
    peak = subprocess.check_output([sys.executable, "-c", parent], text=True)
    assert float(peak) < 900


@pytest.mark.cuda
def test_peak_memory_on_a_gpu_is_that_of_the_device():
    reset_peak()
    torch.ones(2**18, device="cuda")
    kind, peak = peak_memory()
    assert kind == "device"
    assert peak >= 1


def train_on_gpu(steps, fused):
    model = nn.Linear(512, 512).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for _ in range(steps):
        loss = model(torch.ones(64, 512, device="cuda")).float().pow(2).mean()
        optimizer.zero_grad()
        backward(loss, optimizer)
        optimizer.step()
        yield


@pytest.mark.cuda
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
def test_on_a_gpu_times_are_those_of_the_device(recorder, fused):
    for _ in train_on_gpu(150, fused):
        pass
    measured = recorder.measured()
    assert measured["timed"] == 144
    assert len(measured["losses"]["0"].values) == 150
    assert measured["memory"] == "device"


@pytest.mark.cuda
def test_on_a_gpu_a_step_that_is_measured_waits_for_nothing(recorder):
    with contextlib.ExitStack() as stack:
        for number, _ in enumerate(train_on_gpu(40, fused=True)):  # fewer than are read together
            if number == 10:
                stack.enter_context(sync_debug_mode("error"))
    assert recorder.measured()["steps"] == 40
