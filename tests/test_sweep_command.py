"""`ampatch sweep` reads its arguments, refuses bad ones in time, and writes what came of the runs."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from threading import Barrier

import pytest
import torch

import ampatch as amp
from ampatch.__main__ import main
from ampatch.apex.script import Script
from ampatch.sweeps import campaign
from ampatch.sweeps.environment import Load, collect, command_as_typed, find_commit, with_device
from ampatch.sweeps.records.record import Curve, Ending, Measured, RunRecord, Spread
from ampatch.sweeps.records.sweep_file import from_json

TRAIN = "import ampatch as amp\namp.initialize(model, optimizer)"
MEASURED = Measured(
    initialized=True,
    steps=20,
    step_ms=Spread(2.0, 1.9, 2.1, 15),
    losses={"0": Curve((1, 20), (2.0, 0.5))},
    first_loss=2.0,
    final_loss=0.5,
    loss_noise=0.01,
    peak_mib=100.0,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a script in it; temporary files go there as well."""
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


class Runs:
    """Stands for the processes: `ways` says how the runs of a row end, one after the other or all alike."""

    def __init__(self):
        self.ways = {}
        self.times = {}  # of a row, run after run
        self.made = []
        self.seen = []

    def __call__(self, run, timeout, on_steps, stop):
        """Makes a record without a process, and looks at what is in the folder by then."""
        self.made.append(run)
        self.seen.append(sorted(path.name for path in Path(run.directory).parent.glob("sweep.*")))
        on_steps(5)
        way = self.ways.get(run.row, Ending.FINISHED)
        outcome = way.pop(0) if isinstance(way, list) else way
        if isinstance(outcome, signal.Signals):
            stop(outcome, None)
            outcome = Ending.INTERRUPTED
        cause = "" if outcome is Ending.FINISHED else "why"
        run.file("log").parent.mkdir(parents=True, exist_ok=True)
        run.file("log").write_text(f"{run.row} of {len(self.made)}")
        measured = Measured(initialized=True) if outcome is Ending.NO_STEPS else MEASURED
        if times := self.times.get(run.row):
            measured = replace(measured, step_ms=times.pop(0) if times[1:] else times[0])
        return RunRecord(
            run.row, run.seed, run.repeat, outcome, 1.0, cause, (), str(run.file("log")), measured
        )


@pytest.fixture
def runs(monkeypatch):
    stand_in = Runs()
    monkeypatch.setattr(campaign, "execute", stand_in)
    return stand_in


def sweep(*arguments):
    """Runs `ampatch sweep` in this process and returns its exit status."""
    try:
        return main(["sweep", *arguments])
    except SystemExit as exit_:
        return exit_.code


def sweep_into(out, levels="O0,O1"):
    return sweep("train.py", "--levels", levels, "--out", out)


def written(folder, name="out"):
    return from_json((folder / name / "sweep.json").read_text())


SAVED = {"sweep.json", "sweep.csv", "sweep.html"}


def files_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# ---- What is asked for ----


def test_without_options_every_level_runs_once_and_the_yardstick_last(folder, runs):
    assert sweep("train.py", "--out", "out") == 0
    float8 = [] if amp.OPT_LEVELS["O6"].find_lack() else ["O6"]
    assert [run.row for run in runs.made] == ["O0", "O1", "O2", "O3", "O4", "O5", *float8, "autocast"]
    settings = written(folder).settings
    assert (settings.seeds, settings.repeat, settings.steps, settings.warmup) == (1, 1, None, 5)
    assert (settings.timeout, settings.tolerance, settings.arguments) == (None, 2.0, ())


def test_every_option_reaches_the_plan(folder, runs):
    options = "--levels O0,O4 --seeds 2 --repeat 3 --budget 0.01 --steps 90 --warmup 9 --timeout 60"
    options += " --tolerance 1.5 --out out"
    assert sweep(*options.split(), "train.py", "--variant", "O2 loss_scale=8", "--", "--lr", "1") == 0
    settings = written(folder).settings
    assert settings.rows == ("O0", "O4", "O2 loss_scale=8")
    assert (settings.seeds, settings.repeat, settings.steps, settings.warmup) == (2, 3, 90, 9)
    assert settings.budget == 0.01
    assert (settings.timeout, settings.tolerance) == (60.0, 1.5)
    assert (settings.script, settings.arguments) == ("train.py", ("--lr", "1"))
    assert len(runs.made) == 18


def test_a_module_can_be_run(folder, runs, monkeypatch):
    monkeypatch.syspath_prepend("")
    assert sweep("-m", "train", "--levels", " O0, autocast , O1") == 0
    assert [run.row for run in runs.made] == ["O0", "O1", "autocast"]
    assert runs.made[0].script == Script("train", is_module=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "no script: expected a Python script, or -m and a module, or --compare and two sweeps"),
        ("absent.py", "'absent.py' does not exist: expected a Python script"),
        ("-", "the standard input can be read once"),
        ("-m absent", "no module named 'absent'"),
        ("-m train train.py", "-m train and 'train.py': expected one of them"),
        ("train.py --epochs 3", "unrecognized arguments: --epochs 3; the script's own arguments go after --"),
        ("train.py --levels O0,o1", "unknown opt_level 'o1' (did you mean 'O1'?): expected one of O0"),
        ("train.py --variant O2:scale=1", "variant 'O2 scale=1': O2 has no option 'scale': expected"),
        ("train.py --seeds 0 --steps 1", "sweep: --seeds 0: expected 1 or more; --steps 1: expected 2"),
        ("train.py --seeds 1.5", "argument --seeds: invalid int value: '1.5'"),
        ("--level O0 train.py", "argument --level (did you mean --levels?); the script's own arguments go"),
        (
            "train.py --out train.py/out",
            "--out 'train.py/out': expected a folder, or a place for a new one (N",
        ),
        ("train.py --slower 0.1", "--slower without --compare: expected the two sweeps"),
    ],
)
def test_bad_input_is_one_line_and_no_process_is_started(folder, runs, arguments, message, capsys):
    assert sweep(*(word.replace(":", " ") for word in arguments.split())) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert (said.err.count("\n"), said.out, runs.made) == (1, "", [])
    assert [path.name for path in folder.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (["rich", "matplotlib"], "ampatch sweep: rich is not installed: pip install 'ampatch[tools]'"),
        (["jinja2"], "ampatch sweep: jinja2 is not installed: pip install jinja2"),
    ],
    ids=" ".join,
)
def test_packages_are_asked_for_before_the_first_run(missing, said, folder, runs, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else "found")
    assert sweep("train.py", "--out", "out") == 2
    assert capsys.readouterr().err == f"{said}\n"
    assert (runs.made, (folder / "out").exists()) == ([], False)


# ---- What is run and written ----


def test_without_a_page_nothing_but_logs_is_kept_unless_a_folder_is_named(folder, runs, capsys):
    assert sweep("train.py", "--levels", "O0", "--no-page") == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("logs: ")]
    logs = Path(line.removeprefix("logs: "))
    assert logs.parent == folder
    assert list(logs.iterdir()) == [runs.made[0].file("log")]
    assert str(logs) == runs.made[0].directory
    assert sweep("train.py", "--levels", "O0", "--no-page", "--out", "out") == 0
    assert "wrote out/sweep.json, sweep.csv\nlogs: out/logs\n" in capsys.readouterr().err
    assert files_in(folder / "out") == SAVED - {"sweep.html"} | {"logs/O0-seed0-repeat0.log"}


def test_a_page_is_written_by_default_and_the_folder_of_something_else_is_left_alone(folder, runs, capsys):
    for _ in range(2):  # the second replaces the first
        assert sweep("train.py", "--levels", "O0") == 0
        assert capsys.readouterr().err.endswith("the page: open ampatch-sweep/sweep.html\n")
    whole = files_in(folder / "ampatch-sweep")
    assert whole == SAVED | {"logs/O0-seed0-repeat0.log"}
    (folder / "ampatch-sweep/sweep.json").write_text('{"format": "mine"}')
    (folder / "ampatch-sweep-2").touch()
    assert sweep("train.py", "--levels", "O0") == 0
    assert capsys.readouterr().err.endswith("the page: open ampatch-sweep-3/sweep.html\n")
    assert sweep("train.py", "--out", "ampatch-sweep") == 2
    assert "expected a folder without a sweep.json of something else" in capsys.readouterr().err
    assert (folder / "ampatch-sweep/sweep.json").read_text() == '{"format": "mine"}'
    assert (folder / "ampatch-sweep-2").read_text() == ""


def test_a_sweep_that_is_there_is_overwritten_and_that_is_said(folder, runs, capsys):
    notice = "'out' holds a sweep already: it is replaced when a run has finished"
    assert sweep_into("out") == 0
    said = capsys.readouterr()
    assert "wrote out/sweep.json, sweep.csv, sweep.html\nlogs: out/logs\n" in said.err
    assert ("O1" in said.out, notice in said.err) == (True, False)
    assert files_in(folder / "out") == SAVED | {f"logs/{row}-seed0-repeat0.log" for row in ("O0", "O1")}
    assert [record.row for record in written(folder).records] == ["O0", "O1"]
    assert sweep_into("out", "O0") == 0
    assert notice in capsys.readouterr().err
    (record,) = written(folder).records
    assert record.row == "O0"
    assert files_in(folder / "out") == SAVED | {"logs/O0-seed0-repeat0.log"}
    assert Path(record.log).read_text() == "O0 of 3"


@pytest.mark.parametrize(
    ("outcome", "status"),
    [(Ending.NO_STEPS, 2), (signal.SIGINT, 130)],
    ids=["never-steps", "interrupted"],
)
def test_a_sweep_that_is_there_stays_as_it_was_if_the_first_run_of_a_new_one_comes_to_nothing(
    folder, runs, capsys, outcome, status
):
    assert sweep_into("out") == 0
    before = {path: path.read_text() for path in (folder / "out").rglob("*") if path.is_file()}
    runs.ways = {"O0": outcome}
    assert sweep_into("out", "O0") == status
    assert {path: path.read_text() for path in before} == before
    assert "logs.new" in capsys.readouterr().err


def test_a_sweep_that_is_there_is_replaced_by_one_that_failed_at_every_level(folder, runs):
    assert sweep_into("out") == 0
    runs.ways = {"O0": Ending.CRASHED, "O1": Ending.CRASHED}
    assert sweep_into("out") == 1
    assert {record.outcome for record in written(folder).records} == {Ending.CRASHED}
    assert files_in(folder / "out") == SAVED | {f"logs/{row}-seed0-repeat0.log" for row in ("O0", "O1")}
    assert all(Path(record.log).exists() for record in written(folder).records)


def test_a_folder_that_a_script_clears_is_written_to_all_the_same(folder, runs, monkeypatch):
    class Clears(Runs):
        def __call__(self, run, *given):
            record = super().__call__(run, *given)
            shutil.rmtree(folder / "out")
            return record

    monkeypatch.setattr(campaign, "execute", Clears())
    assert sweep_into("out") == 0
    assert files_in(folder / "out") >= SAVED


@pytest.mark.skipif(sys.platform == "win32", reason="needs locks of folders")
def test_two_sweeps_at_a_time_do_not_share_a_folder(folder, runs, monkeypatch, capsys):
    class Begins(Runs):
        def __call__(self, run, *given):
            monkeypatch.setattr(campaign, "execute", runs)
            assert sweep("train.py", "--levels", "O1") == 0
            assert sweep_into("ampatch-sweep", "O4") == 2
            return super().__call__(run, *given)

    monkeypatch.setattr(campaign, "execute", Begins())
    assert sweep("train.py", "--levels", "O0") == 0
    rows = [written(folder, name).records[0].row for name in ("ampatch-sweep", "ampatch-sweep-2")]
    assert rows == ["O0", "O1"]
    said = "ampatch sweep: --out 'ampatch-sweep': another sweep writes there: expected a folder of its own"
    assert said in capsys.readouterr().err
    assert said.partition("': ")[2] in (Path(__file__).parents[1] / "docs" / "errors.md").read_text()
    assert sweep_into("ampatch-sweep", "O4") == 0


class Failing:
    """A stream that nobody reads, or whose disk is full."""

    encoding = "utf-8"

    def __init__(self, error):
        self.error = error
        self.descriptor = os.open(os.devnull, os.O_WRONLY)

    def write(self, text):
        raise self.error

    def flush(self):
        raise self.error

    def isatty(self):
        return False

    def fileno(self):
        return self.descriptor


@pytest.mark.parametrize(
    ("stream", "error", "status"),
    [
        ("stdout", BrokenPipeError(32, "Broken pipe"), 141),
        ("stdout", OSError(28, "No space left on device"), 2),
        ("stderr", BrokenPipeError(32, "Broken pipe"), 0),
    ],
    ids=["pipe", "disk", "log"],
)
def test_what_cannot_be_printed_loses_no_file(folder, runs, capsys, monkeypatch, stream, error, status):
    monkeypatch.setattr(sys, stream, Failing(error))
    assert sweep_into("out") == status
    assert files_in(folder / "out") >= SAVED
    said = capsys.readouterr()
    assert ("the table could not be printed: No space left" in said.err) == (status == 2)
    assert ("O1" in said.out) == (stream == "stderr")


def test_a_run_that_fails_is_a_row_and_one_that_timed_out_is_not_run_again(folder, runs):
    runs.ways = {"O1": Ending.TIMED_OUT, "O4": [Ending.CRASHED, Ending.NO_STEPS, Ending.FINISHED]}
    assert sweep("train.py", "--levels", "O0,O1,O4", "--seeds", "3", "--out", "out") == 1
    assert [run.row for run in runs.made] == ["O0", "O1", "O4", "O4", "O0", "O0", "O4"]
    assert runs.seen == [[], *[["sweep.json"]] * 6]  # which is written after each run
    records = written(folder).records
    outcomes = [record.outcome for record in records if record.row == "O4"]
    assert outcomes == [Ending.CRASHED, Ending.NO_STEPS, Ending.FINISHED]
    (record,) = [record for record in records if record.row == "O1"]
    assert record.cause == "why; 2 more of its runs are left out"


@pytest.mark.parametrize(
    ("number", "status", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_an_interrupted_sweep_writes_and_shows_what_there_is(folder, runs, capsys, number, status, name):
    runs.ways = {"O1": number}
    assert sweep_into("out", "O0,O1,O4") == status
    assert [record.outcome for record in written(folder).records] == [Ending.FINISHED, Ending.INTERRUPTED]
    assert files_in(folder / "out") >= SAVED
    said = capsys.readouterr()
    assert said.err.endswith(f"ampatch sweep: interrupted ({name})\n")
    assert "O1" in said.out


@pytest.mark.parametrize(
    ("outcome", "initialized", "message"),
    [
        (Ending.CRASHED, False, "failed before it called initialize, as it would at every level: why (log: "),
        (Ending.NO_STEPS, False, "never called initialize (or did so with enabled=False"),
        (Ending.NO_STEPS, True, "called initialize, but no optimizer"),
        (Ending.CRASHED, True, None),
    ],
    ids=["crashed", "never-called", "no-steps", "crashed-later"],
)
def test_a_script_of_which_no_level_can_matter_ends_the_sweep_at_its_first_run(
    folder, capsys, monkeypatch, outcome, initialized, message
):
    record = RunRecord("O0", 0, 0, outcome, 1.0, "why", (), "O0.log", Measured(initialized=initialized))
    monkeypatch.setattr(campaign, "execute", lambda *given: record)
    assert sweep("train.py", "--levels", "O0,O1") == (2 if message else 1)
    said = capsys.readouterr()
    assert message is None or f"'train.py' {message}" in said.err
    assert (said.out == "") == (message is not None)


def test_a_disk_that_is_full_for_a_while_does_not_end_the_sweep(folder, runs, monkeypatch):
    replace = Path.replace

    def fail_once(path, target):
        if len(runs.made) == 1:
            raise OSError(28, "No space left on device")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail_once)
    assert sweep_into("out") == 0
    assert len(written(folder).records) == 2


def test_files_that_cannot_be_written_in_the_end_are_named_and_the_table_is_shown(
    folder, runs, capsys, monkeypatch
):
    def fail(path, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    assert sweep_into("out", "O0") == 2
    said = capsys.readouterr()
    assert "'out/sweep.json' cannot be written: No space left on device" in said.err
    assert "O0" in said.out
    assert [path.name for path in (folder / "out").iterdir()] == ["logs"]


def test_the_bar_is_told_of_every_run_and_its_steps(folder, runs, monkeypatch):
    told = []

    @contextmanager
    def progress_bar(console, count, limit):
        told.append((count, limit))
        yield lambda now: told.append(
            (now.name, now.steps, now.record and now.record.outcome, now.done, now.total, now.left)
        )

    monkeypatch.setattr("ampatch.sweeps.terminal.view.progress_bar", progress_bar)
    runs.ways = {"O1": Ending.TIMED_OUT}
    assert sweep("train.py", "--levels", "O0,O1", "--seeds", "2", "--steps", "20") == 1
    assert told == [
        (4, 20),
        ("O0 seed 0", 0, None, 0, 4, None),
        ("O0 seed 0", 5, None, 0, 4, None),
        ("O0 seed 0", 0, "finished", 1, 4, 3.0),
        ("O1 seed 0", 0, None, 1, 4, pytest.approx(3.0, abs=0.9)),
        ("O1 seed 0", 5, None, 1, 4, pytest.approx(3.0, abs=0.9)),
        ("O1 seed 0", 0, "timed out", 3, 4, pytest.approx(1.0, abs=0.1)),  # its other run is left out
        ("O0 seed 1", 0, None, 3, 4, pytest.approx(1.0, abs=0.9)),
        ("O0 seed 1", 5, None, 3, 4, pytest.approx(1.0, abs=0.9)),
        ("O0 seed 1", 0, "finished", 4, 4, 0),
    ]


# ---- Side by side ----


class Together(Runs):
    """Runs that end when as many are on as may be at a time."""

    def __init__(self, many):
        super().__init__()
        self.barrier = Barrier(many, timeout=60)
        self.cpus = []

    def __call__(self, run, *given):
        self.barrier.wait()
        self.cpus.append(tuple(os.sched_getaffinity(0)))
        return super().__call__(run, *given)


@pytest.mark.parametrize(
    ("visible", "option", "seen"),
    [(None, "0,2", ["0", "2"]), ("7, GPU-5,3", "2,1", ["3", "GPU-5"]), (None, "--jobs 2", ["0", "1"])],
)
def test_runs_go_side_by_side_one_on_each_gpu(folder, capsys, monkeypatch, visible, option, seen):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    runs = Together(2)
    monkeypatch.setattr(campaign, "execute", runs)
    runs.times = {"O4": [APART]}
    option = option if option.startswith("--") else f"--devices {option}"
    assert sweep("train.py", *option.split(), "--levels", "O0,O4", "--seeds", "2", "--out", "out") == 0
    assert sorted(run.visible for run in runs.made) == sorted(seen * 2)
    found = written(folder)
    assert [record.row for record in found.records] == ["O0", "O4", "O4", "O0"]
    assert "Times were taken of 2 runs side by side" in found.recommendation.reason
    said = capsys.readouterr()
    assert "train.py: 2 seeds, 2 runs side by side, torch" in said.out
    assert [word for word in ("(1 of 4", "(2 of 4", "(3 of 4", "(4 of 4") if word not in said.err] == []


@pytest.mark.skipif(
    len(getattr(os, "sched_getaffinity", lambda task: [])(0)) < 2, reason="needs two processors"
)
def test_without_gpus_runs_share_the_processors_out(folder, runs, monkeypatch):
    runs = Together(2)
    monkeypatch.setattr(campaign, "execute", runs)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    before = os.sched_getaffinity(0)
    assert sweep("train.py", "--jobs", "2", "--levels", "O0,O4,O5,O1") == 0
    first, second = sorted(set(runs.cpus))
    assert set(first).isdisjoint(second)
    assert os.sched_getaffinity(0) == before  # of this thread


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--devices 0,3",
            "--devices '0,3': expected numbers of the 3 GPUs that there are, from 0",
        ),
        ("--devices 0,0", "--devices '0,0': expected numbers"),
        ("--devices cuda", "--devices 'cuda': expected numbers"),
        ("--jobs 4", "--jobs 4: expected 1 to 3, the GPUs that there are"),
        ("--jobs 0", "--jobs 0: expected 1 to 3"),
        ("--jobs 2 --devices 0", "--devices, --jobs: expected one of them"),
        ("--nproc-per-node 2 --devices 0", "--devices, --nproc-per-node: expected one of them"),
    ],
)
def test_devices_that_there_are_not_are_refused(folder, runs, capsys, monkeypatch, options, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert sweep("train.py", *options.split()) == 2
    assert message in capsys.readouterr().err
    assert runs.made == []


def test_where_there_is_no_gpu_none_is_chosen(folder, runs, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert sweep("train.py", "--devices", "0,1") == 2
    assert "--devices '0,1': torch finds no GPU; --jobs N" in capsys.readouterr().err


# ---- Repeats within a budget ----

NEAR, APART = Spread(1.8, 1.7, 1.95, 15), Spread(1.7, 1.6, 1.75, 15)  # to the 1.9 to 2.1 ms of O0


@pytest.fixture
def seconds(runs, monkeypatch):
    """Every run takes a second."""
    monkeypatch.setattr(campaign.time, "monotonic", lambda: float(len(runs.made)))


def test_with_a_budget_levels_are_repeated_in_turn_until_times_are_told_apart(folder, runs, seconds, capsys):
    runs.times = {"O4": [NEAR, APART]}
    assert sweep("train.py", "--levels", "O0,O4", "--budget", "1", "--out", "out") == 0
    assert [(run.row, run.repeat) for run in runs.made] == [("O0", 0), ("O4", 0), ("O4", 1), ("O0", 1)]
    assert written(folder).settings.repeat == 2
    assert written(folder).recommendation.row == "O4"
    reason = written(folder).recommendation.reason
    assert "It was run 2 times, which was enough, within the budget of 1 min." in reason
    assert "(4 of 4" in capsys.readouterr().err


@pytest.mark.parametrize(("budget", "rounds"), [("0.01", 1), ("0.09", 2), ("0.1", 3)])
def test_no_round_is_begun_that_does_not_fit_into_the_budget(folder, runs, seconds, budget, rounds):
    runs.times = {"O4": [NEAR]}
    assert sweep("train.py", "--levels", "O0,O4", "--budget", budget, "--out", "out") == 0
    assert len(runs.made) == 2 * rounds
    reason = written(folder).recommendation.reason
    assert reason.startswith("Too noisy to tell")
    assert "with a larger --budget. It was run" in reason
    assert f"{rounds} time{'s'[: rounds - 1]}, and the budget of {budget} min leaves too little" in reason
    assert "runs were made" not in reason


def test_a_level_that_timed_out_is_not_repeated_and_one_that_is_clear_at_once_neither(folder, runs, seconds):
    runs.times, runs.ways = {"O4": [NEAR, APART]}, {"O1": Ending.TIMED_OUT}
    assert sweep("train.py", "--levels", "O0,O1,O4", "--budget", "1", "--out", "out") == 1
    assert [run.row for run in runs.made] == ["O0", "O1", "O4", "O4", "O0"]
    runs.times, runs.ways, runs.made = {"O4": [APART]}, {}, []
    assert sweep("train.py", "--levels", "O0,O4", "--budget", "1", "--out", "out") == 0
    assert len(runs.made) == 2


def test_a_budget_ends_at_the_most_runs_that_a_sweep_may_have(folder, runs, seconds, monkeypatch):
    monkeypatch.setattr("ampatch.sweeps.plan.MOST_RUNS", 5)
    runs.times = {"O4": [NEAR]}
    assert sweep("train.py", "--levels", "O0,O4", "--budget", "1", "--out", "out") == 0
    assert len(runs.made) == 4


# ---- Where it runs ----


def git(folder, *arguments):
    name = ["-c", "user.name=A", "-c", "user.email=a@b"]
    return subprocess.check_output(["git", "-C", str(folder), *name, *arguments], text=True).strip()


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (
            ["/usr/bin/python3", "/bin/ampatch", "sweep", "train.py", "--variant", "O2 loss_scale=8"],
            "ampatch sweep train.py --variant 'O2 loss_scale=8'",
        ),
        (["python", "-m", "ampatch", "sweep", "x.py"], "python -m ampatch sweep x.py"),
        (["/opt/bin/python", "program.py", "--my", "arg"], "python program.py --my arg"),
        (["python", "-c", "import a\nb"], "python -c ..."),
        ([], "python"),
    ],
    ids=["ampatch", "module", "program", "text", "embedded"],
)
def test_the_command_is_what_was_typed(monkeypatch, words, command):
    monkeypatch.setattr(sys, "orig_argv", words)
    assert command_as_typed() == command


def test_the_commit_is_that_of_the_scripts_repository_and_says_if_files_have_changed(tmp_path):
    assert find_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert find_commit(tmp_path) is None
    (tmp_path / "train.py").write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "Train")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "out").touch()
    assert find_commit(tmp_path) == commit
    (tmp_path / "train.py").write_text("x")
    assert find_commit(tmp_path) == f"{commit}+"


def test_a_folder_whose_name_is_no_text_has_no_commit_where_git_complains_of_it(tmp_path):
    assert find_commit(tmp_path / os.fsdecode(b"caf\xe9")) is None


@pytest.mark.parametrize(
    ("idle", "expected"), [(0, 1.0), (20, 0.8), (40, 0.0), (None, None)], ids=["full", "busy", "free", "none"]
)
@pytest.mark.parametrize("pinned", [True, False])
def test_the_load_is_what_others_take_of_our_processors_where_little_is_left(
    tmp_path, monkeypatch, idle, expected, pinned
):
    monkeypatch.setattr(os, "times", lambda: (0.0,) * 5)
    # Where a container numbers its processors itself, none has the name of one of ours.
    own = next(iter(os.sched_getaffinity(0))) if pinned else 999
    monkeypatch.setattr(os, "sched_getaffinity", lambda task: {own}, raising=False)
    stat = tmp_path / "stat"
    lines = f"cpu  {{}} 0 0 {{}} 0 0 0 0 0 0\ncpu{own if pinned else 0} {{}} 0 0 {{}} 0 0 0 0 0 0\nintr 5 6\n"
    stat.write_text(lines.format(0, 0, 0, 0))
    load = Load(stat)
    if idle is not None:  # the other processors have nothing to do, or are not there
        stat.write_text(lines.format(100 - idle, idle + 500 * pinned, 100 - idle, idle))
    assert (load.taken() or [None])[-1] == (None if expected is None else pytest.approx(expected))
    monkeypatch.setattr(os, "times", lambda: (0.0, 0.0, 0.5, 0.0, 0.0))  # half a second of children of ours
    if idle == 0:
        assert load.taken()[1] == pytest.approx(1 - 0.5 * os.sysconf("SC_CLK_TCK") / 100)


def test_where_nobody_counts_there_is_no_load(tmp_path):
    assert Load(tmp_path / "absent").taken() is None


def test_the_environment_is_that_of_this_process_and_the_device_that_of_the_runs(folder):
    found = collect(Script("train.py"))
    assert (found.ampatch, found.torch) == (amp.__version__, torch.__version__)
    assert datetime.fromisoformat(found.created).tzinfo is not None
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    records = [RunRecord("O1", 0, 0, Ending.CRASHED, 1.0)]
    assert with_device(found, records).device == "cpu"
    records += [
        RunRecord("O0", 0, 0, Ending.FINISHED, 1.0, measured=Measured(device=it)) for it in ("cpu", "X")
    ]
    assert with_device(found, records).device == "X"


# ---- Two sweeps ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "a"], "argument --compare: expected 2 arguments"),
        (["--compare", "a", "b", "train.py"], "SCRIPT beside --compare, which runs nothing"),
        (["--compare", "a", "b", "--levels", "O0", "--seeds", "2"], "--levels, --seeds beside --compare"),
        (["--compare", "a", "b", "--", "-x"], "-- beside --compare, which runs nothing"),
        (["--compare", "a", "b"], "'a' cannot be read ([Errno 2]"),
        (["--compare", ".", "b"], "'sweep.json' cannot be read ([Errno 2]"),
        (["--compare", "train.py", "b"], "'train.py': not JSON"),
    ],
)
def test_a_comparison_refuses_what_is_no_part_of_it(folder, arguments, message, capsys):
    assert sweep(*arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.fixture
def two_sweeps(folder, runs):
    """Two sweeps in folders; in the second one, the last level takes twice the time."""
    assert sweep_into("a") == 0
    assert sweep_into("b") == 0
    path = folder / "b" / "sweep.json"
    fields = json.loads(path.read_text())
    for part in (fields["records"][1]["measured"], fields["rows"][1]):
        part["step_ms"] = {"median": 4.0, "low": 3.9, "high": 4.1, "count": 15}
    path.write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("slower -0.1", "a fraction such as 0.05 for 5 %, not less than 0"),
        ("slower nan", "a fraction"),
        ("more-memory -1.0", "a fraction"),
        ("tolerance inf", "a number of spreads such as 2, not less than 0"),
    ],
)
def test_a_comparison_refuses_limits_that_cannot_work(two_sweeps, limit, expected, capsys):
    capsys.readouterr()
    assert sweep("--compare", "a", "b", *f"--{limit}".split()) == 2
    assert f"sweep: --{limit}: expected {expected}" in capsys.readouterr().err


def test_a_level_that_got_slower_is_exit_status_1(two_sweeps, capsys):
    capsys.readouterr()
    assert sweep("--compare", "a", "b/sweep.json") == 1
    assert "O1" in capsys.readouterr().out
    assert sweep("--compare", "a", "b", "--slower", "1.5") == 0
    assert sweep("--compare", "b", "a") == 0
    assert sweep("--compare", "a", "a/sweep.json") == 0
