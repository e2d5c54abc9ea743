"""`ampatch sweep` reads its arguments, refuses bad ones in time, and writes what came of the runs."""

import os
import shutil
import signal
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch

import ampatch as amp
from ampatch.__main__ import main
from ampatch.apex.script import Script
from ampatch.sweeps import campaign
from ampatch.sweeps.campaign import collect, command_as_typed, with_device
from ampatch.sweeps.measure.load import Load
from ampatch.sweeps.results import from_json
from ampatch.sweeps.rows import Curve, Ending, Run
from sweep_samples import times

TRAIN = "import ampatch as amp\namp.initialize(model, optimizer)"


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
        self.made = []
        self.seen = []

    def __call__(self, run, timeout, stop):
        """Makes a record without a process, and looks at what is in the folder by then."""
        self.made.append(run)
        self.seen.append(sorted(path.name for path in Path(run.directory).parent.glob("sweep.*")))
        way = self.ways.get(run.row, Ending.FINISHED)
        outcome = way.pop(0) if isinstance(way, list) else way
        if isinstance(outcome, signal.Signals):
            stop(outcome, None)
            outcome = Ending.INTERRUPTED
        run.file("log").parent.mkdir(parents=True, exist_ok=True)
        run.file("log").write_text(f"{run.row} of {len(self.made)}")
        facts = {"outcome": outcome, "seconds": 1.0, "log": str(run.file("log")), "initialized": True}
        facts["cause"] = "" if outcome is Ending.FINISHED else "why"
        if outcome is Ending.NO_STEPS:
            return Run(**run.identity(), **facts)
        values = {"losses": {"0": Curve((1, 20), (2.0, 0.5))}, "first_loss": 2.0, "final_loss": 0.5}
        values |= {"processor_ms": 3.0, "began": 10**9, "ended": 5 * 10**9}
        return Run(**run.identity(), **facts, **values, steps=20, peak_mib=100.0, **times(2.0))


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


SAVED = {"sweep.json", "sweep.html"}


def files_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# ---- What is asked for ----


def test_without_options_every_level_runs_once_and_the_yardstick_last(folder, runs):
    assert sweep("train.py", "--out", "out") == 0
    assert [run.row for run in runs.made] == ["O0", "O1", "O2", "O3", "O4", "O5", "autocast"]
    settings = written(folder).settings
    assert (settings.seeds, settings.repeat, settings.steps) == (1, 1, None)
    assert (settings.timeout, settings.arguments) == (None, ())


def test_every_option_reaches_the_plan(folder, runs):
    options = "--levels O0,O4 --seeds 2 --repeat 3 --steps 90 --timeout 60 --out out"
    assert sweep(*options.split(), "train.py", "--variant", "O2 loss_scale=8", "--", "--lr", "1") == 0
    settings = written(folder).settings
    assert settings.rows == ("O0", "O4", "O2 loss_scale=8")
    assert (settings.seeds, settings.repeat, settings.steps) == (2, 3, 90)
    assert settings.timeout == 60
    assert (settings.script, settings.arguments) == ("train.py", ("--lr", "1"))
    assert len(runs.made) == 18
    assert [len(run.earlier) for run in runs.made] == list(range(18))  # of O0 itself, too


def test_a_module_can_be_run(folder, runs, monkeypatch):
    monkeypatch.syspath_prepend("")
    assert sweep("-m", "train", "--levels", " O0, autocast , O1") == 0
    assert [run.row for run in runs.made] == ["O0", "O1", "autocast"]
    assert runs.made[0].script == Script("train", is_module=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "no script: expected a Python script, or -m and a module"),
        ("absent.py", "'absent.py' does not exist: expected a Python script"),
        ("-", "a sweep reads its script several times, and the standard input only once"),
        ("-m absent", "no module named 'absent'"),
        ("-m train train.py", "-m train and 'train.py': expected one of them"),
        ("train.py --epochs 3", "unrecognized arguments: --epochs 3; the script's own arguments go after --"),
        ("train.py --levels O0,o1", "unknown opt_level 'o1' (did you mean 'O1'?): expected one of O0"),
        ("train.py --variant O2:scale=1", "variant 'O2 scale=1': O2 has no option 'scale': expected"),
        ("train.py --seeds 0 --steps 1", "sweep: seeds 0: expected 1 or more; steps 1: expected 2"),
        ("train.py --seeds 1.5", "argument --seeds: invalid int value: '1.5'"),
        ("--level O0 train.py", "argument --level (did you mean --levels?); the script's own arguments go"),
        (
            "train.py --out train.py/out",
            "--out 'train.py/out': expected a folder, or a place for a new one (N",
        ),
    ],
)
def test_bad_input_is_one_line_and_no_process_is_started(folder, runs, arguments, message, capsys):
    assert sweep(*(word.replace(":", " ") for word in arguments.split())) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert (said.err.count("\n"), said.out, runs.made) == (1, "", [])
    assert [path.name for path in folder.iterdir()] == ["train.py"]


# ---- What is run and written ----


def test_each_sweep_has_a_folder_of_its_own_and_none_is_replaced(folder, runs, capsys):
    for name in ("ampatch-sweep", "ampatch-sweep-2"):
        assert sweep("train.py", "--levels", "O0") == 0
        said = capsys.readouterr().err
        wrote = f"wrote {name}/sweep.json, sweep.html"
        assert said.endswith(f"{wrote}\nlogs: {name}/logs\nthe page: open {name}/sweep.html\n")
        assert files_in(folder / name) == SAVED | {"logs/O0-seed0-repeat0.log"}
    assert sweep("train.py", "--out", "ampatch-sweep") == 2
    expected = "--out 'ampatch-sweep': a sweep.json is there already: expected another folder, or --resume"
    assert expected in capsys.readouterr().err
    assert len(runs.made) == 2


def test_a_sweep_that_comes_to_nothing_leaves_no_folder(folder, runs):
    runs.ways = {"O0": Ending.NO_STEPS}
    assert sweep("train.py", "--levels", "O9") == 2
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_resume_makes_the_runs_that_were_not_made(folder, runs, capsys, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "ampatch", "sweep", "train.py"])
    runs.ways = {"O4": signal.SIGINT}
    assert sweep("train.py", "--levels", "O0,O4,O5") == 130
    assert " --resume --out ampatch-sweep" in capsys.readouterr().err
    runs.ways, runs.made = {}, []
    assert sweep("train.py", "--levels", "O0,O4,O5", "--resume") == 0
    assert [run.row for run in runs.made] == ["O4", "O5"]
    assert [it.run for it in runs.made[0].earlier] == ["O0 seed 0"]
    assert [it.row for it in written(folder, "ampatch-sweep").records] == ["O0", "O4", "O5"]


OTHERS = {
    "rows": (["--levels", "O0,O5"], "(rows ('O0', 'O4') then, ('O0', 'O5') now): expected the same script"),
    "seeds": (["--levels", "O0,O4", "--seeds", "2"], "(seeds 1 then, 2 now): expected the same script"),
    "text": (["--levels", "O0,O4"], "the sweep in 'out' was another one (digest "),
    "nothing there": (["--levels", "O0"], "there is no ampatch-sweep with a sweep.json here"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_resume_refuses_another_sweep(folder, runs, capsys, name):
    assert sweep_into("out", "O0,O4") == 0
    kept = (folder / "out/sweep.json").read_text()
    (folder / "train.py").write_text(f"{TRAIN}\n" if name == "text" else TRAIN)
    options, said = OTHERS[name]
    place = [] if name == "nothing there" else ["--out", "out"]
    assert sweep("train.py", *options, "--resume", *place) == 2
    assert said in capsys.readouterr().err
    assert ((folder / "out/sweep.json").read_text(), len(runs.made)) == (kept, 2)


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
    said = "'ampatch-sweep': another sweep writes there: expected a folder of its own"
    assert said in capsys.readouterr().err
    assert said.partition("': ")[2] in (Path(__file__).parents[1] / "docs" / "errors.md").read_text()


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
    assert record.cause == "why"


def test_levels_that_nobody_named_are_cut_short_after_twice_the_time_of_o0(folder, runs):
    runs.ways = {"O1": Ending.CUT}
    given = ("train.py", "--variant", "O2 loss_scale=8", "--seeds", "2")
    assert sweep(*given, "--out", "out") == 0
    assert [run.row for run in runs.made].count("O1") == 1  # and not again with the second seed
    limits = {run.row: run.limits for run in runs.made}
    assert (limits.pop("O0"), limits.pop("O2 loss_scale=8")) == (None, None)
    assert set(limits.values()) == {(8.0, 0.12)}
    assert not written(folder).settings.in_full
    runs.made = []
    assert sweep(*given, "--levels", "O0,O1", "--out", "named") == 0
    assert {run.limits for run in runs.made} == {None}
    assert written(folder, "named").settings.in_full


@pytest.mark.parametrize(
    ("number", "status", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_an_interrupted_sweep_writes_and_shows_what_there_is(folder, runs, capsys, number, status, name):
    runs.ways = {"O1": number}
    assert sweep_into("out", "O0,O1,O4") == status
    assert [record.outcome for record in written(folder).records] == [Ending.FINISHED, Ending.INTERRUPTED]
    assert files_in(folder / "out") >= SAVED
    said = capsys.readouterr()
    assert f"ampatch sweep: interrupted ({name})\nto go on, add to the command: --resume" in said.err
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
    record = Run("O0", outcome=outcome, cause="why", log="O0.log", initialized=initialized, peak_mib=1.0)
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


# ---- Where it runs ----


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
    found = collect()
    assert (found.ampatch, found.torch) == (amp.__version__, torch.__version__)
    assert datetime.fromisoformat(found.created).tzinfo is not None
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert with_device(found, [Run("O1")]).device == "cpu"
    assert with_device(found, [Run("O0"), Run("O1", device="X")]).device == "X"
