"""`ampatch sweep` trains a script at several levels, in processes of their own, and shows what came of it."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from ampatch.sweeps.results import from_json
from ampatch.sweeps.rows import Ending
from fresh import run_sweep
from helpers import wait_until

pytestmark = pytest.mark.process

TRAIN = """
import sys, time, torch
import ampatch as amp
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for step in range(12):
    loss = model(torch.ones(2, 4)).float().pow(2).mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""


@pytest.fixture
def sweep(processes, tmp_path):
    return partial(run_sweep, processes, tmp_path)


def records_in(folder):
    """Returns the records of a sweep by row."""
    return {record.row: record for record in from_json((folder / "sweep.json").read_text()).records}


# The script does something else in each run.
MANY_WAYS = (
    """
import pathlib
ran = pathlib.Path(__file__ + ".ran")
run = ran.stat().st_size if ran.exists() else 0
ran.open("a").write("x")
print("said aloud")
print("and on")
"""
    + TRAIN
    + """
amp.report(accuracy=0.5 + run / 4, note="run")
if run == 1: amp.uninitialize(); amp.report(accuracy=0.25)
if run == 2: raise ValueError("bad weights\\nin layer 3")
"""
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def many_ways(processes, folder):
    """Sweeps a script that ends in another way at each level."""
    (folder / "train.py").write_text(MANY_WAYS)
    return run_sweep(processes, folder, "train.py", "--levels", "O0,O1,O2,autocast", "--out", "out")


@pytest.fixture(scope="module")
def records(folder, many_ways):
    return records_in(folder / "out")


@pytest.mark.parametrize("row", ["O0", "O1", "autocast"])
def test_a_level_that_finished_is_measured(records, row):
    record = records[row]
    assert record.outcome is Ending.FINISHED, record
    assert record.steps == 12
    assert 0 < record.step_ms < record.seconds * 1000
    assert 50 < record.peak_mib < 5000
    assert 0 <= record.final_loss < 10


def test_what_a_script_reports_is_kept_also_after_uninitialize(records):
    accuracies = {row: records[row].last("accuracy") for row in ("O0", "O1", "autocast")}
    assert accuracies == {"O0": 0.5, "O1": 0.25, "autocast": 1.25}
    assert records["O1"].loss_scale >= 1024


def test_a_level_that_crashes_keeps_its_measurements_and_the_sweep_goes_on(many_ways, records):
    record = records["O2"]
    assert (record.outcome, record.cause) == (Ending.CRASHED, "ValueError: bad weights")
    assert '    if run == 2: raise ValueError("bad weights\\nin layer 3")' in record.lines
    assert record.lines[-2:] == ("ValueError: bad weights", "in layer 3")
    assert record.steps == 12
    assert many_ways.status == 1


def test_the_output_of_a_script_is_in_its_log_and_nowhere_else(folder, many_ways, records):
    assert "said aloud" not in many_ways.stdout + many_ways.stderr
    logs = [Path(folder, record.log) for record in records.values()]
    assert all(log.read_text().startswith("said aloud\nand on\n") for log in logs)
    assert sorted(logs) == sorted((folder / "out" / "logs").iterdir())


def test_a_script_that_an_option_would_have_run_is_told_the_option(tmp_path, sweep):
    (tmp_path / "train.py").write_text("import time\ntime.clock()")
    done = sweep("train.py", "--levels", "O0")
    assert (done.status, "; time.clock, since Python 3.8" in done.stderr) == (2, True), done.stderr
    assert "`ampatch sweep --legacy` fixes it (log: " in done.stderr


def test_a_script_runs_as_python_runs_it_and_is_told_the_seed(tmp_path, sweep):
    (tmp_path / "neighbour.py").write_text("VALUE = 7")
    checks = """
from neighbour import VALUE
assert __name__ == "__main__"
assert sys.argv[0] == "train.py" and __file__.endswith("/train.py"), sys.argv
assert sys.path[0] == __file__.rpartition("/")[0], sys.path
assert sys.modules["__main__"].VALUE == 7
print(*sys.argv[1:], torch.initial_seed(), amp._amp_state.opt_properties.opt_level)
"""
    text = TRAIN.replace("import ampatch as amp", "from apex import amp")
    (tmp_path / "train.py").write_text("import torch; torch.manual_seed(5)\n" + text + checks)
    given = ["--epochs", "3", "--", "--seed={seed}", "-x"]
    done = sweep("train.py", "--levels", "O5", "--seeds", "2", "--out", "out", "--", *given)
    assert done.status == 0, done.stdout + done.stderr
    logs = [log.read_text().splitlines()[-1] for log in sorted((tmp_path / "out" / "logs").iterdir())]
    assert logs == ["--epochs 3 -- --seed=0 -x 5 O5", "--epochs 3 -- --seed=1 -x 5 O5"]


@pytest.mark.process(keep=1)
def test_a_module_runs_as_python_runs_it(tmp_path, sweep):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text(TRAIN + "assert __spec__.name == 'project.train'")
    done = sweep("-m", "project.train", "--levels", "O0", "--steps", "8", "--out", "out")
    assert done.status == 0, done.stdout + done.stderr
    assert records_in(tmp_path / "out")["O0"].steps == 8


# At O0 another program runs beside the script, on the one processor that both may use.
BESIDE_ANOTHER = """
import os, subprocess, sys
core = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {core})
if sys.argv[1] == "O0":
    busy = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\\nwhile True: pass"
    subprocess.Popen([sys.executable, "-S", "-c", busy], stdout=subprocess.PIPE).stdout.readline()
def work():
    import time
    start = time.thread_time()
    while time.thread_time() - start < 0.02: pass
"""
# Its losses fall slowly, so that those of both levels are the same.
BESIDE_ANOTHER += TRAIN.replace("range(12)", "range(30)").replace("lr=0.1", "lr=0.003")
BESIDE_ANOTHER = BESIDE_ANOTHER.replace("    optimizer.zero", "    work()\n    optimizer.zero")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux pins processes")
def test_times_beside_another_program_on_the_same_processor_lead_to_no_recommendation(tmp_path, sweep):
    (tmp_path / "train.py").write_text(BESIDE_ANOTHER)
    done = sweep("train.py", "--levels", "O0,O4", "--out", "out", "--", "{level}")
    said = " ".join(done.stdout.split())
    assert "Nothing is recommended." in said, said + done.stderr
    assert "other programs had the processor" in said
    assert records_in(tmp_path / "out")["O0"].lost[0] > 0.25
    assert "Only the training loss was compared." in said


def test_ctrl_c_ends_the_children_and_keeps_what_they_measured(tmp_path):
    wait = "\nimport os; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    (tmp_path / "train.py").write_text(TRAIN + wait)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "ampatch", "sweep", "train.py", "--out", "out"]
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in shown
    assert said.endswith("ampatch sweep: interrupted (Ctrl-C)\n")
    record = records_in(tmp_path / "out")["O0"]
    assert (record.outcome, record.steps) == (Ending.INTERRUPTED, 12)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes as Linux shows them")
@pytest.mark.parametrize(
    "command", [["sweep", "--levels", "O4", "--out", "out"], ["doctor"]], ids=lambda it: it[0]
)
def test_a_script_ends_when_the_command_is_killed(tmp_path, command):
    wait = "\nimport os; os.fork(); open('pids', 'a').write(f'{os.getpid()}\\n'); time.sleep(600)"
    (tmp_path / "train.py").write_text(TRAIN + wait)
    command = [sys.executable, "-m", "ampatch", *command, "train.py"]
    pids = tmp_path / "pids"
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}) as process:
        wait_until(lambda: pids.exists() and pids.read_text().count("\n") == 2)
        process.kill()
    states = [Path("/proc", pid, "stat") for pid in pids.read_text().split()]
    wait_until(
        lambda: all(not it.exists() or it.read_text().rpartition(")")[2].split()[0] == "Z" for it in states)
    )


SHADOWS = ("statistics", "torch", "runpy", "signal")


def test_modules_beside_the_shell_are_not_those_of_the_script(tmp_path, processes):
    (tmp_path / "train.py").write_text(TRAIN)
    shell = tmp_path / "shell"
    shell.mkdir()
    for name in SHADOWS:
        (shell / f"{name}.py").write_text("raise RuntimeError('not this one')")
    arguments = ["sweep", "../train.py", "--levels", "O4", "--out", "out"]
    done = processes.run(f"del sys.path[0]; sys.exit(ampatch.__main__.main({arguments!r}))", shell)
    assert done.status == 0, done.stderr + (shell / "out/logs/O4-seed0-repeat0.log").read_text()
