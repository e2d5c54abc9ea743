"""A run is a process of its own: it is watched, ends in any case, and leaves a record and a log."""

import builtins
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ampatch import AmpValueError
from ampatch.apex.script import Script
from ampatch.sweeps.files import to_plain
from ampatch.sweeps.plan import PlannedRun
from ampatch.sweeps.processes import runner
from ampatch.sweeps.processes.runner import execute
from ampatch.sweeps.rows import Ending
from ampatch.tools import process as processes
from ampatch.tools.folder import HELD, temporary_folder
from ampatch.tools.log_file import last_lines, line_of
from ampatch.tools.stop import SIGNALS, Stop, noting_signals
from helpers import wait_until

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


def is_alive(pid):
    """Says whether a process runs; one that has ended and waits to be asked does not."""
    status = Path(f"/proc/{pid}/stat")
    if status.exists():
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return sys.platform != "linux"


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
    record = carry_out(child("measured()", {"initialized": True}))
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


# ---- Parents that are killed ----

# Two processes, and two more in a session of their own, as torch.distributed.run starts ranks.
STARTS = """
import os, subprocess, sys, time
def main(arguments):
    held, *ranks = arguments
    for rank in ranks:
        subprocess.Popen([sys.executable, sys.argv[0], held, "starts", held], start_new_session=True)
    os.fork()
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs locks of files")
def test_what_a_parent_started_ends_when_it_is_killed_and_its_folder_goes_later(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "starts.py").write_text(STARTS)
    log, parent = tmp_path / "log", os.fork()
    if parent == 0:
        with temporary_folder("run") as folder:
            held = str(folder / HELD)
            command = [sys.executable, processes.START, held, "starts", held, "a rank"]
            with processes.child_process(command, log):
                time.sleep(600)
    wait_until(lambda: log.exists() and log.read_text().count("\n") == 4)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_until(lambda: not any(is_alive(int(pid)) for pid in log.read_text().split()))
    assert len(list(tmp_path.glob("ampatch-run-*"))) == 1
    with temporary_folder("doctor") as folder:
        assert list(tmp_path.glob("ampatch-*")) == [folder]


def test_a_folder_in_use_stays_and_so_does_one_that_is_not_ours(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    other = tmp_path / "ampatch-run-of-yours"
    other.mkdir()
    with temporary_folder("run") as first, temporary_folder("run") as second:
        assert set(tmp_path.iterdir()) == {first, second, other}
    assert list(tmp_path.iterdir()) == [other]


def test_a_child_looks_for_modules_neither_where_the_shell_is_nor_where_we_are(tmp_path, monkeypatch):
    (tmp_path / "statistics.py").write_text("raise RuntimeError")
    (tmp_path / "path").mkdir()
    shows = "import json, numbers, statistics, sys\ndef main(arguments): print(json.dumps(sys.path))"
    (tmp_path / "path" / "shows.py").write_text(shows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    command = [sys.executable, processes.START, "", "shows"]
    path = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert path[0] == path[1] == str(tmp_path / "path")
    assert not {"", str(tmp_path), str(Path(processes.START).parent)} & set(path)


# ---- Signals ----


def test_a_signal_is_noted_and_a_second_one_interrupts():
    with noting_signals() as stop:
        assert (bool(stop), stop.status, stop.name) == (False, 0, "")
        signal.raise_signal(signal.SIGTERM)
        assert (bool(stop), stop.status, stop.name) == (True, 143, "SIGTERM")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with noting_signals() as stop:
        signal.raise_signal(signal.SIGINT)
    assert (stop.status, stop.name) == (130, "Ctrl-C")


def test_signals_are_taken_while_the_block_runs_and_those_that_are_ignored_stay_so():
    before = [signal.getsignal(number) for number in SIGNALS]
    ignored = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with noting_signals() as stop:
            signal.raise_signal(signal.SIGTERM)
            assert not stop
            assert signal.getsignal(signal.SIGINT) is stop
    finally:
        signal.signal(signal.SIGTERM, ignored)
    assert [signal.getsignal(number) for number in SIGNALS] == before


# ---- Logs ----


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"", ()),
        (b"one\ntwo\n\n \n", ("one", "two")),
        (b"one\r\ntwo\r\n", ("one", "two")),
        (b"10 %\r50 %\r100 %\ndone", ("100 %", "done")),
        (b"10 %\r50 %\r", ("50 %",)),
        (b"\x1b[1;31mbad\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", ("bad link",)),
        (b"caf\xe9 \xe2\x9c\x93", ("caf\ufffd \u2713",)),
    ],
    ids=["empty", "blank-end", "windows", "progress", "progress-end", "colours", "bytes"],
)
def test_the_last_lines_are_those_that_a_terminal_shows(tmp_path, text, lines):
    path = tmp_path / "log"
    path.write_bytes(text)
    assert last_lines(path) == lines


def test_a_long_log_is_read_from_its_end(tmp_path):
    path = tmp_path / "log"
    path.write_text("x" * 10**6 + "\nlast")
    *_, before, last = last_lines(path)
    assert (len(before), last) == (500, "last")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("bad weights"), "ValueError: bad weights"),
        (ValueError("bad weights\nin layer 3"), "ValueError: bad weights"),
        (ValueError(), "ValueError"),
        (AmpValueError("no"), "ampatch.errors.AmpValueError: no"),
        (SyntaxError("bad", ("x.py", 3, 1, "def", 3, 2)), "SyntaxError: bad"),
        (RuntimeError("\n\n-- Process 1 terminated:\nValueError: inner\n"), "ValueError: inner"),
    ],
    ids=["line", "lines", "bare", "ours", "syntax", "of-a-process"],
)
def test_an_exception_is_told_in_the_line_that_names_it(error, line):
    assert line_of(error) == line


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 brought exception groups")
def test_a_group_of_exceptions_is_told_in_one_line():
    error = builtins.ExceptionGroup("two", [ValueError(), KeyError()])
    assert line_of(error) == "ExceptionGroup: two (2 sub-exceptions)"
