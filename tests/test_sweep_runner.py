"""A run is a process of its own: it is watched, ends in any case, and leaves a record and a log."""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ampatch.apex.script import Script
from ampatch.sweeps import runner
from ampatch.sweeps.plan import PlannedRun
from ampatch.sweeps.results import to_plain
from ampatch.sweeps.rows import Ending
from ampatch.sweeps.runner import execute
from ampatch.tools import process as processes
from ampatch.tools.process import Stop
from helpers import is_alive, wait_until

STEPPED = {"initialized": True, "steps": 12}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    return PlannedRun("O1", 3, 0, Script("train.py"), {}, str(tmp_path))


@pytest.fixture
def child(monkeypatch, run):
    """Makes the child run this code, in a Python that starts quickly; returns the run."""

    def become(code, measured=STEPPED):
        def command_of(inner):
            before = f"""
import os, signal, sys, time
def leave(path, text): open(path, "w").write(text)
def measured(text={json.dumps(to_plain(measured))!r}): leave({str(inner.file("json"))!r}, text)
def raised(text): leave({str(inner.file("raised"))!r}, text)
"""
            return [sys.executable, "-u", "-S", "-E", "-c", before + code]

        monkeypatch.setattr(runner, "command_of", command_of)
        return run

    return become


def carry_out(run, timeout=None, stop=None):
    return execute(run, timeout, Stop() if stop is None else stop)


def interrupted(run, number, stop=None):
    """Carries out a run, with a signal from the user as soon as it has printed something."""
    stop = Stop() if stop is None else stop

    def send():
        wait_until(lambda: run.file("log").exists() and run.file("log").read_text())
        stop(number, None)

    threading.Thread(target=send).start()
    return carry_out(run, stop=stop)


def test_a_run_that_ended_well_is_a_record_of_what_it_measured(child):
    run = child("print('said', os.environ['PYTHONHASHSEED'], sys.stdin.read()); measured()")
    record = carry_out(run)
    assert (record.row, record.seed, record.repeat) == ("O1", 3, 0)
    assert (record.outcome, record.steps) == (Ending.FINISHED, 12)
    assert (record.cause, record.lines) == ("", ())
    assert Path(record.log).read_text() == "said 3 \n"
    assert record.seconds > 0
    assert not record.failed


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("measured(); raise ValueError('bad weights')", "ValueError: bad weights"),
        ("print('usage: train.py'); sys.exit(2)", "exit status 2, usage: train.py"),
        ("sys.exit(1)", "its log is empty"),
        ("print('loading'); os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV, loading"),
        (
            "print('loading\\n\\n'); os.kill(os.getpid(), signal.SIGKILL)",
            "SIGKILL (the system does so when memory runs out), loading",
        ),
        ("print('done'); os._exit(0)", "it ended without Python's exit (as by os._exit), done"),
        ("raised('ValueError: boom'); print('...'); os.abort()", "SIGABRT, ValueError: boom"),
        ("input()", "EOFError: EOF when reading a line (a run has no standard input)"),
    ],
    ids=["exception", "exit-2", "exit-1", "signal", "killed", "_exit", "told-and-signal", "input"],
)
def test_a_run_that_crashed_says_why(child, code, cause):
    record = carry_out(child(code))
    assert (record.outcome, record.cause) == (Ending.CRASHED, cause)
    assert record.steps == (12 if "measured()" in code else 0)


def test_a_run_without_a_step_says_so(child):
    record = carry_out(child("measured()", {"initialized": True, "outcome": "no steps"}))
    assert record.outcome is Ending.NO_STEPS
    assert record.cause == "no optimizer that initialize returned made a step (its log is empty)"


def test_measurements_that_cannot_be_read_are_none(child):
    record = carry_out(child("measured('{')"))
    assert (record.outcome, record.steps) == (Ending.CRASHED, 0)


def test_a_run_leaves_its_log_and_nothing_else(child, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = child("measured(); raised('ValueError')")
    carry_out(run)
    assert list(tmp_path.iterdir()) == [run.file("log")]


def test_a_script_that_clears_the_folder_of_the_logs_is_measured(child, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = replace(child("import shutil; shutil.rmtree('out'); measured()"), directory="out/logs")
    for _ in range(2):
        record = carry_out(run)
        assert (record.outcome, record.steps) == (Ending.FINISHED, 12)


# ---- Runs that do not end ----

# Writes what it measured when it is told to end, as the real child does.
HANGS = """
def end(number, frame):
    measured()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
print("waiting for data")
time.sleep(600)
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid()); time.sleep(600)"


def test_a_run_that_takes_too_long_is_ended(child):
    record = carry_out(child("print(os.getpid()); time.sleep(600)"), timeout=0.5)
    assert record.outcome is Ending.TIMED_OUT
    assert 0.5 <= record.seconds < 300
    assert all(not is_alive(int(pid)) for pid in record.lines)


def test_a_run_that_is_interrupted_keeps_what_it_measured(child):
    record = interrupted(child(HANGS), signal.SIGINT)
    assert (record.outcome, record.steps) == (Ending.INTERRUPTED, 12)
    assert (record.cause, record.lines) == ("Ctrl-C", ("waiting for data",))


def test_a_run_that_does_not_want_to_end_is_killed(child, monkeypatch):
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.2)
    record = interrupted(child(DEAF), signal.SIGTERM)
    assert record.cause == "SIGTERM"
    assert not is_alive(int(record.lines[0]))


def test_a_second_signal_does_not_wait_for_the_child(child, run, monkeypatch):
    stop, send = Stop(), processes.send

    def be_impatient(process, number):
        send(process, number)
        if number == signal.SIGTERM:
            stop(signal.SIGINT, None)

    monkeypatch.setattr(processes, "send", be_impatient)
    monkeypatch.setattr(runner, "GRACE_SECONDS", 600)
    with pytest.raises(KeyboardInterrupt):
        interrupted(child(DEAF), signal.SIGINT, stop)
    assert not is_alive(int(run.file("log").read_text()))


@pytest.mark.skipif(os.name != "posix", reason="needs process groups")
def test_what_a_run_leaves_running_is_ended_with_it(child):
    code = "pid = os.fork()\nif pid == 0: time.sleep(600)\nprint(pid); measured()"
    record = carry_out(child(code))
    assert record.outcome is Ending.FINISHED
    pid = int(Path(record.log).read_text())
    deadline = time.monotonic() + 30
    while is_alive(pid):  # until the kernel has come to it
        assert time.monotonic() < deadline
        time.sleep(0.01)
