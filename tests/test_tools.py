"""What the sweep and the doctor are built with: seeds, processes and their folders, signals, logs."""

import builtins
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch

from ampatch import AmpValueError
from ampatch.sweeps.log_file import last_lines, line_of
from ampatch.tools import process as processes
from ampatch.tools.folder import HELD, is_locked, temporary_folder
from ampatch.tools.process import SIGNALS, noting_signals
from ampatch.tools.seeds import SHIFT, set_seeds, shifted_seeds
from helpers import is_alive, wait_until

# ---- Seeds ----


def draw():
    return random.random(), numpy.random.rand(), torch.rand(()).item()


@pytest.mark.parametrize(
    "seed",
    [
        lambda seed: random.seed(int(seed)),  # which takes no other
        lambda seed: random.seed(a=int(seed), version=2),
        lambda seed: numpy.random.seed(seed),
        lambda seed: torch.manual_seed(seed),
        lambda seed: torch.manual_seed(seed=seed),
        lambda seed: torch.random.manual_seed(seed),
    ],
    ids=["random", "random, by name", "numpy", "torch", "torch, by name", "torch.random"],
)
@pytest.mark.parametrize("kind", [int, numpy.int64])
def test_the_seeds_that_a_script_sets_are_shifted(seed, kind):
    set_seeds(0)
    seed(3 + 2 * SHIFT)
    expected = draw()
    set_seeds(0)
    with shifted_seeds(2):
        seed(kind(3))
    assert draw() == expected


@pytest.mark.parametrize("seed", [2**32 - 1, 0])
def test_a_shifted_seed_is_one_that_numpy_takes(seed):
    with shifted_seeds(5):
        numpy.random.seed(seed)


def test_generators_of_the_script_keep_their_seeds():
    with shifted_seeds(1):
        mine = torch.rand((), generator=torch.Generator().manual_seed(3))
        theirs = numpy.random.default_rng(3).random()
    assert mine == torch.rand((), generator=torch.Generator().manual_seed(3))
    assert theirs == numpy.random.default_rng(3).random()


def test_seeding_functions_are_themselves_again():
    before = torch.manual_seed, random.seed, numpy.random.seed, torch.cuda.manual_seed_all
    with shifted_seeds(0):
        assert torch.manual_seed is before[0]
    with shifted_seeds(1):
        assert torch.manual_seed is not before[0]
        assert torch.manual_seed.__name__ == "manual_seed"
    assert (torch.manual_seed, random.seed, numpy.random.seed, torch.cuda.manual_seed_all) == before


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
    (left,) = tmp_path.glob("ampatch-run-*")
    wait_until(lambda: not is_locked(left / HELD))  # by what kills a group, which ends a moment after it
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
