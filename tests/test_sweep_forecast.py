"""The time that is left of a sweep is right within a factor of two."""

import pytest

from ampatch.sweeps.forecast import Forecast
from ampatch.sweeps.records.record import Ending, Measured, RunRecord

STEPS = 200
STARTUP = 4.0  # seconds, until the first step
DOWNLOAD = 100.0  # seconds more, in the first run


class Clock:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def forecasts(runs, limit=None, download=0.0):
    """Lets runs of (row, seconds, outcome) happen; yields what is forecast meanwhile, and what came."""
    clock = Clock()
    forecast = Forecast(limit, clock)
    total = sum(seconds for _, seconds, _ in runs) + download
    for number, (row, seconds, outcome) in enumerate(runs):
        startup, download = STARTUP + download, 0.0
        seconds += startup - STARTUP
        ahead, began = [row for row, *_ in runs[number + 1 :]], clock.now
        forecast.start(row)
        for part in range(1, 100):
            clock.now = began + seconds * part / 100
            if outcome is Ending.FINISHED:
                made = STEPS * (clock.now - began - startup) / (seconds - startup)
                forecast.note_steps(max(0, int(made)))
            yield number + part / 100, forecast.left(ahead), total - clock.now
        clock.now = began + seconds
        measured = Measured(steps=STEPS if outcome is Ending.FINISHED else 0)
        forecast.finish(RunRecord(row, 0, 0, outcome, seconds, measured=measured))
        yield number + 1, forecast.left(ahead), total - clock.now


def finished(**rows):
    return [(row, seconds, Ending.FINISHED) for row, seconds in rows.items()]


ROUND = finished(O0=60.0, O1=50.0, O2=45.0, O3=40.0, O4=50.0, O5=45.0, autocast=55.0)
ON_A_CPU = finished(O0=60.0, O1=600.0, O2=550.0, O3=500.0, O4=40.0, O5=40.0)
FAILS = [("O0", 60.0, Ending.FINISHED), ("O1", 5.0, Ending.CRASHED), *finished(O2=50.0, O4=60.0, O5=70.0)]
NOISY = [(row, took * (0.7, 1.3)[at % 2], how) for at, (row, took, how) in enumerate(ROUND * 3)]

# The runs, what else is true of them, and from which run on the time left has to be right.
SWEEPS = {
    "one round": (ROUND, {}, 1),
    "limited steps": (ROUND, {"limit": STEPS}, 0.25),
    "a first run that downloads": ([*ROUND, *ROUND[::-1]], {"download": DOWNLOAD}, 2),
    "a slow first level": (finished(O0=100.0, O1=55.0, O4=50.0, O5=60.0), {}, 1),
    "a level that fails at once": ([*FAILS, *FAILS[::-1], *FAILS], {}, 1),
    "a first level that fails at once": ([("O0", 5.0, Ending.CRASHED), *ROUND[1:]], {}, 2),
    "repeats of levels that differ by ten": ([*ON_A_CPU, *ON_A_CPU[::-1], *ON_A_CPU], {}, 6),
    "noise": (NOISY, {}, 1),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_the_time_left_is_right_within_a_factor_of_two(name):
    runs, facts, known = SWEEPS[name]
    told = [(left, real) for at, left, real in forecasts(runs, **facts) if at >= known and real > 5]
    assert len(told) > 40
    wrong = [(left, real) for left, real in told if left is None or not real / 2 <= left <= real * 2]
    assert not wrong


def test_nothing_is_said_before_anything_is_known():
    seen = list(forecasts(ROUND))
    assert all((left is None) == (at < 1) for at, left, _ in seen)
    assert seen[-1][1] == 0


def test_a_run_that_takes_longer_than_its_row_takes_nothing_from_the_others():
    clock = Clock()
    forecast = Forecast(clock=clock)
    forecast.finish(RunRecord("O0", 0, 0, Ending.FINISHED, 60.0, measured=Measured(steps=STEPS)))
    forecast.start("O0")
    clock.now = 500.0
    assert forecast.left(["O1"]) == 60.0
