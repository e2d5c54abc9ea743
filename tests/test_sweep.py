"""`ampatch sweep` trains a script at several levels and shows one table."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

import ampatch as amp
from ampatch.sweep.memory import peak_memory
from ampatch.sweep.plan import LEVELS, Plan, Run
from ampatch.sweep.record import Measured, Outcome, Record
from ampatch.sweep.recorder import Recorder, mean_of, numbers_in
from ampatch.sweep.steps import StepCounter, StepTimes, read_count
from ampatch.sweep.view import build_table, show

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

MEASURED = Measured(
    initialized=True,
    steps=200,
    skipped_steps=2,
    step_ms=1234.567,
    memory="resident",
    peak_mib=12345.6,
    final_loss=0.00012345,
    loss_scale=2.0**24,
    metrics={"accuracy": 0.9812},
)


@pytest.fixture
def script(tmp_path):
    """Writes a script and returns its path."""

    def write(text, name="train.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def environment(tmp_path):
    """Returns an environment in which temporary files go to the test's folder."""
    return os.environ | {"TMPDIR": str(tmp_path)}


@pytest.fixture
def sweep(environment):
    """Runs `ampatch sweep` as a user does and returns the finished process."""

    return partial(run_sweep, environment)


def run_sweep(environment, *arguments):
    command = [sys.executable, "-m", "ampatch", "sweep", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def cells(output, level):
    """Returns the cells of a level's row in the printed table."""
    rows = [line.split() for line in output.splitlines() if line.split()[:1] == [level]]
    assert rows, output
    return rows[0]


def record(name, **changes):
    return Record(name, Outcome.FINISHED, 1.0, "", "log", replace(MEASURED, **changes))


def failed(name, outcome=Outcome.CRASHED):
    return Record(name, outcome, 60.0, "ValueError: bad [bold] value", "/logs/O1.log", None)


def printed(records):
    console = Console(file=StringIO(), width=80)
    show(console, "train.py", records)
    return console.file.getvalue()


# Whole sweeps, each in processes of its own. The first script does something else in each run.

MANY_WAYS = (
    """
import os, pathlib, signal, sys, time
ran = pathlib.Path(__file__ + ".ran")
run = ran.stat().st_size if ran.exists() else 0
ran.open("a").write("x")
print("said aloud")
print("and on")
"""
    + TRAIN.replace("range(12)", "range(0 if run == 4 else 12)")
    + """
amp.report(accuracy=0.5 + run / 4, note="run")
if run == 1: amp.uninitialize(); amp.report(accuracy=0.25)
if run == 2: raise ValueError("bad weights")
if run == 3: os.kill(os.getpid(), signal.SIGKILL)
if run == 5: print("waiting for data"); time.sleep(60)
"""
)


@pytest.fixture(scope="module")
def many_ways(tmp_path_factory):
    """Sweeps a script that ends in another way at each level."""
    folder = tmp_path_factory.mktemp("sweep")
    path = folder / "train.py"
    path.write_text(MANY_WAYS)
    return run_sweep(os.environ | {"TMPDIR": str(folder)}, path, "--timeout", "10")


def test_a_level_that_finished_is_a_row_of_measurements(many_ways):
    _level, step_ms, peak_mib, loss, *rest = cells(many_ways.stdout, "O0")
    assert 0 < float(step_ms) < 1000
    assert 50 < float(peak_mib) < 5000
    assert 0 <= float(loss) < 10
    assert rest == ["0.5000", "0", "1", "-"]


def test_the_accuracy_is_compared_with_that_of_o0(many_ways):
    row = cells(many_ways.stdout, "O1")
    assert (row[4], row[-1]) == ("0.2500", "-0.2500")


def test_a_script_that_calls_uninitialize_keeps_its_last_loss_scale(many_ways):
    assert float(cells(many_ways.stdout, "O1")[6]) >= 1024


def test_a_level_that_crashes_is_a_row_and_the_sweep_goes_on(many_ways):
    assert cells(many_ways.stdout, "O2")[1:3] == ["crashed", "-"]
    assert "O2 crashed (step 12): ValueError: bad weights (log: " in many_ways.stdout
    assert many_ways.returncode == 1


def test_a_process_that_a_signal_ends_is_named_by_the_signal(many_ways):
    assert cells(many_ways.stdout, "O3")[1] == "crashed"
    assert "O3 crashed: SIGKILL, " in many_ways.stdout


def test_a_level_that_never_steps_says_so(many_ways):
    assert cells(many_ways.stdout, "O4")[1:3] == ["no", "steps"]


def test_a_level_that_hangs_is_ended_and_keeps_its_steps(many_ways):
    assert cells(many_ways.stdout, "O5")[1:3] == ["timed", "out"]
    assert "(step 12): waiting for data (log: " in many_ways.stdout


def test_the_output_of_a_script_is_in_its_log_and_nowhere_else(many_ways):
    assert "said aloud" not in many_ways.stdout + many_ways.stderr
    logs = Path(many_ways.stderr.rpartition("logs: ")[2].strip())
    assert all("said aloud" in (logs / f"{level}.log").read_text() for level in LEVELS)


def test_a_sweep_in_which_all_went_well_exits_0_and_runs_the_script_as_python_does(script, sweep):
    script("VALUE = 7", "neighbour.py")
    checks = """
from neighbour import VALUE
assert __name__ == "__main__"
assert sys.argv == [__file__, "--epochs", "3", "--", "-x"], sys.argv
assert sys.path[0] == __file__.rpartition("/")[0], sys.path
assert sys.modules["__main__"].VALUE == 7
"""
    path = script(TRAIN + checks)
    done = sweep(path, "--levels", "O5", "--", "--epochs", "3", "--", "-x")
    assert done.returncode == 0, done.stdout


def test_a_script_that_never_calls_initialize_ends_the_sweep_at_its_first_level(script, sweep):
    path = script("open(__file__ + '.ran', 'a').write('x')")
    done = sweep(path)
    assert done.returncode == 2
    assert "never called initialize" in done.stderr
    assert done.stdout == ""
    assert Path(f"{path}.ran").read_text() == "x"


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_ending_the_sweep_ends_its_children(script, environment, tmp_path, number, status):
    pid_file = tmp_path / "pid"
    path = script(f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)")
    command = [sys.executable, "-m", "ampatch", "sweep", str(path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        wait_until(lambda: pid_file.exists() and pid_file.read_text())
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode == status
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for 30 seconds"
        time.sleep(0.05)


# What a sweep is made of.


def test_the_table_of_six_levels_fits_into_80_columns():
    output = printed([record(level) for level in LEVELS])
    assert max(map(len, output.splitlines())) <= 80
    assert "…" not in output
    assert cells(output, "O1")[1:] == [
        "1234.57", "12346", "0.000123", "0.9812", "2", "16777216", "+0.0000",
    ]  # fmt: skip


def test_the_caption_says_how_the_loss_was_averaged():
    assert "final loss: mean of the last 10 losses" in " ".join(printed([record("O0")]).split())


@pytest.mark.parametrize("baseline", [[], [failed("O0")]], ids=["absent", "failed"])
def test_without_a_baseline_the_difference_is_a_dash(baseline):
    assert cells(printed([*baseline, record("O1")]), "O1")[-1] == "-"


def test_a_script_that_reports_no_accuracy_has_dashes_there():
    row = cells(printed([record("O0"), record("O1", metrics={})]), "O1")
    assert (row[4], row[-1]) == ("-", "-")


def test_the_line_about_a_failure_is_shown_as_it_was_written():
    assert "O1 timed out after 60 s: ValueError: bad [bold] value (log: /logs/O1.log)\n" in printed(
        [failed("O1", Outcome.TIMED_OUT)]
    )


def test_a_table_can_be_written_to_an_ascii_file():
    console = Console(file=open(os.devnull, "w", encoding="ascii"), width=80)  # noqa: SIM115
    with console.file:
        console.print(build_table("train.py", [record("O0"), failed("O1")]))


@pytest.mark.parametrize("one", [record("O0"), failed("O1")], ids=["finished", "crashed"])
def test_a_record_survives_json(one):
    assert Record.from_json(one.to_json()) == one


def test_a_run_survives_json():
    run = Run("O1", "/s/train.py", ("--epochs", "3"), {"opt_level": "O1"}, "/logs")
    assert Run.from_json(run.to_json()) == run
    assert json.loads(run.to_json())["overrides"] == {"opt_level": "O1"}


def test_a_plan_makes_one_run_a_level(script):
    plan = Plan(script(""), ("-x",), ("O0", "O5"))
    runs = list(plan.runs("/logs"))
    assert [run.overrides["opt_level"] for run in runs] == ["O0", "O5"]
    # What the script passes beside its level would contradict another one.
    others = [value for run in runs for name, value in run.overrides.items() if name != "opt_level"]
    assert others == [None] * 14
    assert runs[1].log == Path("/logs/O5.log")


def test_step_times_leave_out_the_warm_up():
    times = StepTimes()
    for now in [0, 9, 18, 27, 36, 45, *range(46, 60)]:
        times.add("optimizer", now)
    assert times.median_ms() == 1000


def test_step_times_compare_an_optimizer_with_itself_only():
    times = StepTimes()
    for now in range(20):
        times.add("generator", 2 * now)
        times.add("discriminator", 2 * now + 0.1)
    assert times.median_ms() == pytest.approx(2000)


@pytest.mark.parametrize(("steps", "median"), [(0, None), (1, None), (2, 1000), (3, 1000)])
def test_step_times_of_a_short_run(steps, median):
    times = StepTimes()
    for now in range(steps):
        times.add("optimizer", now)
    assert times.median_ms() == median


def test_steps_are_written_a_few_times_a_second_at_the_most(tmp_path):
    counter = StepCounter(tmp_path / "steps")
    seen = set()
    for now in range(1000):
        counter.add(now / 1000)
        seen.add(read_count(tmp_path / "steps"))
    assert counter.steps == 1000
    assert seen == {1, 251, 501, 751}


def test_no_progress_yet_is_no_steps(tmp_path):
    assert read_count(tmp_path / "absent") == 0


@pytest.fixture
def recorder(tmp_path):
    recorder = Recorder(tmp_path / "steps")
    with amp.observe(recorder):
        yield recorder
    amp.uninitialize()


def train(losses):
    """Makes a step at O1 for each factor by which a loss of 1 is multiplied."""
    model = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", verbosity=0)
    for factor in losses:
        loss = model(torch.ones(1)).float().mean() * factor
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        loss.detach().zero_()
        optimizer.zero_grad()


def test_the_final_loss_is_the_mean_of_the_last_ten_as_they_were_in_the_block(recorder):
    train([1000.0] * 5 + [1.0] * 5 + [2.0] * 5)
    assert recorder.measured().final_loss == 1.5


def test_skipped_steps_are_counted_and_lower_the_loss_scale(recorder):
    train([0.5, float("inf"), 0.5, float("inf")])
    measured = recorder.measured()
    assert (measured.steps, measured.skipped_steps) == (4, 2)
    assert measured.loss_scale == 2.0**14


def test_the_final_loss_is_the_mean_over_losses_of_any_shape():
    assert mean_of([torch.tensor(1.0), torch.tensor([2.0, 4.0]).half()]) == 2.0
    assert mean_of([]) is None


def test_metrics_are_kept_if_they_are_numbers():
    metrics = {"accuracy": torch.tensor(0.5), "step": 3, "note": "x", "all": torch.ones(2)}
    assert numbers_in(metrics) == {"accuracy": 0.5, "step": 3.0}


def test_peak_memory_sees_memory_that_was_given_back():
    before = peak_memory()[1]
    torch.ones(100 * 2**18)  # 100 MiB
    kind, after = peak_memory()
    assert kind == "device" or after > before + 50 or before > 1000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_not_that_of_the_parent(tmp_path):
    child = "from ampatch.sweep.memory import peak_memory; print(peak_memory()[1])"
    start = f"subprocess.run([sys.executable, '-c', {child!r}])"
    parent = f"import subprocess, sys; big = b'x' * 2**30; {start}"
    peak = subprocess.check_output([sys.executable, "-c", parent], text=True)
    assert float(peak) < 900


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_peak_memory_on_a_gpu_is_that_of_the_device():
    torch.ones(2**18, device="cuda")
    kind, peak = peak_memory()
    assert kind == "device"
    assert peak >= 1
