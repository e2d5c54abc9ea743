"""Runs of a sweep are compared if they are independent: no run goes on from what another one wrote."""

import ctypes
import json
import os
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import ampatch as amp
import ampatch.__main__
from ampatch.sweeps.measure.reads import ReadWatch
from ampatch.sweeps.measure.yardstick import Autocast
from ampatch.sweeps.rows import Training
from fresh import run_sweep
from helpers import wait_until

# Learns too slowly for the weights to tell that it went on.
TRAIN = """
import os, sys, torch
import ampatch as amp
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
file = sys.argv[1]
if os.path.exists(file):
    model.load_state_dict(torch.load(file))
for step in range(12):
    loss = model(torch.ones(2, 4)).float().pow(2).mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
torch.save(model.state_dict(), file)
amp.report(accuracy=0.5)
"""


@pytest.fixture
def sweep(processes, tmp_path):
    """Sweeps the script in a process and a folder of its own; returns its rows, by name, and how it ended."""

    def run(*arguments, text=TRAIN):
        (tmp_path / "train.py").write_text(text)
        done = run_sweep(processes, tmp_path, "train.py", "--out", "made", *arguments)
        file = tmp_path / "made/sweep.json"
        rows = json.loads(file.read_text())["rows"] if file.exists() else []
        return {row["name"]: row for row in rows}, done

    return run


def verdicts(rows):
    return {name: row["verdict"] for name, row in rows.items()}


@pytest.mark.process
def test_a_run_that_reads_what_an_earlier_run_wrote_is_not_compared_and_its_row_names_the_file(sweep):
    # The yardstick has the level of O4, whose file it finds.
    rows, done = sweep("--levels", "O0,O4,autocast", "--", "{level}.pt")
    assert verdicts(rows) == {"O0": "baseline", "O4": "same", "autocast": "-"}
    said = " ".join(done.stdout.split())
    assert (
        "it read 'O4.pt', which the run O4 seed 0 wrote: give each run files of its own, with {run}" in said
    )


@pytest.mark.process
@pytest.mark.parametrize("word", ["{run}", "{row}-{repeat}"])
def test_each_run_can_have_a_file_of_its_own(sweep, tmp_path, word):
    rows, _ = sweep("--levels", "O0,O4,autocast", "--repeat", "2", "--", f"{word}.pt")
    assert set(verdicts(rows).values()) == {"baseline", "same"}
    assert len(list(tmp_path.glob("*.pt"))) == 6


@pytest.mark.process
def test_an_isolated_run_finds_the_folder_as_it_was_before_the_sweep(sweep, tmp_path):
    rows, _ = sweep("--levels", "O0,O4", "--repeat", "2", "--isolate", "--", "last.pt")
    assert verdicts(rows) == {"O0": "baseline", "O4": "same"}
    assert not (tmp_path / "last.pt").exists()


@pytest.mark.process
def test_a_checkpoint_from_before_the_sweep_that_a_run_writes_too_is_named(sweep, tmp_path):
    torch.save(nn.Linear(4, 1).state_dict(), tmp_path / "last.pt")
    _, done = sweep("--levels", "O0", "--", "last.pt")
    assert "O0 went on from 'last.pt', which was there before the sweep" in " ".join(done.stdout.split())


# What is made once for all runs, before the first step, holds nothing trained.
CACHES = TRAIN.replace(
    "file = sys.argv[1]",
    "file = 'absent'\nif not os.path.exists('data'): open('data', 'w').write('1')\nopen('data').read()",
).replace("torch.save", "print")


@pytest.mark.process
def test_data_that_the_first_run_downloads_are_no_obstacle(sweep):
    assert verdicts(sweep("--levels", "O0,O4", text=CACHES)[0]) == {"O0": "baseline", "O4": "same"}


# ---- What is watched ----


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A file that the run A wrote, and a watch of a run that comes later."""
    monkeypatch.chdir(tmp_path)
    began = time.time_ns()
    time.sleep(0.02)
    (tmp_path / "last.bin").write_bytes(b"123")
    time.sleep(0.02)
    return ReadWatch([Training("A", began, time.time_ns())])


def open_of(path, flags=os.O_RDONLY):
    return "open", (path, None, flags)


@pytest.mark.parametrize(
    ("flags", "is_read"),
    [
        (os.O_RDONLY, True),
        (os.O_RDWR, True),
        (os.O_WRONLY | os.O_APPEND, False),
        (os.O_RDWR | os.O_TRUNC, False),
    ],
    ids=["r", "r+", "a", "w+"],
)
def test_a_file_is_read_where_it_is_opened_for_that(watched, flags, is_read):
    watched(*open_of("last.bin", flags))
    found = watched.close(None)
    assert (found["read"], found["writer"]) == (("last.bin", "A") if is_read else ("", ""))


def test_whatever_is_opened_ends_no_script(watched):
    for path in (3, None, "absent", "nul\0", b"\xff", "."):
        watched(*open_of(path))
    assert watched.close(None)["read"] == ""


def test_what_the_system_shows_as_files_was_written_by_nobody(tmp_path):
    everything = ReadWatch([Training("A", 0, 2**63)], [tmp_path])
    for path in ("/proc/self/status", "/dev/null"):
        everything(*open_of(path))
    assert everything.close(None)["read"] == ""


def test_what_a_run_wrote_itself_and_code_are_its_own(watched, tmp_path):
    time.sleep(0.02)
    (tmp_path / "own").write_text("x")
    (tmp_path / "last.py").write_text("x")
    os.utime("last.py", ns=((tmp_path / "last.bin").stat().st_mtime_ns,) * 2)
    for name in ("own", "last.py"):
        watched(*open_of(name))
    assert watched.close(None)["read"] == ""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file system that keeps times of access")
def test_a_file_that_is_opened_without_python_is_seen_in_its_folder(watched):
    library = ctypes.CDLL(None)
    number = library.open(b"last.bin", os.O_RDONLY)
    assert library.read(number, ctypes.create_string_buffer(3), 3) == 3
    library.close(number)
    assert watched.close(None)["read"] == "last.bin"


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file system that keeps times of access")
def test_a_log_or_a_table_that_somebody_reads_beside_a_run_is_no_obstacle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    began = time.time_ns()
    for name in ("O0.log", "events.out.tfevents.1", "config.py", "scores.csv"):
        (tmp_path / name).write_text("x")
        os.utime(name, ns=(began, began + 1))
    later = ReadWatch([Training("A", began, time.time_ns())])
    subprocess.run(["cat", *os.listdir()], check=True, stdout=subprocess.DEVNULL)
    assert later.close(None)["read"] == ""


# ---- The yardstick is on wherever the model computes ----


class Parts(nn.Module):
    """A model that scripts call by its part, as Lightning's `self.net(x)`."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 4)
        self.table = nn.Embedding(4, 4)


@pytest.mark.parametrize(("part", "has_cast"), [("net", True), ("table", False)])
def test_autocast_is_on_where_a_part_of_the_model_is_called_and_knows_if_it_cast(part, has_cast):
    yardstick = Autocast(torch.bfloat16)
    with amp.observe(yardstick):
        model = Parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
        output = model.net(torch.ones(2, 8)) if part == "net" else model.table(torch.tensor([1]))
        assert output.dtype is (torch.bfloat16 if has_cast else torch.float32)
        with amp.scale_loss(output.float().sum(), optimizer) as scaled_loss:
            assert not torch.is_autocast_enabled("cpu")
            scaled_loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.net(torch.ones(2, 8))
        assert not torch.is_autocast_enabled("cpu")
        amp.uninitialize()
    assert yardstick.has_cast is has_cast


def looks_up(opt_level, seed):
    """Trains an embedding, of which autocast casts nothing."""
    model = nn.EmbeddingBag(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    for _ in range(6):
        loss = model(torch.arange(8).view(2, 4)).relu().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


def test_a_yardstick_that_cast_nothing_says_so_and_is_not_compared():
    row = amp.sweep(looks_up, ["O0", "autocast"]).rows[1]
    assert (row.verdict, row.reason) == ("-", "torch.autocast cast none of its operations")


# ---- Going on with a sweep ----


# The third run waits until it is ended; with a file `go` none does.
WAITS = TRAIN + (
    "import time\nopen('ran', 'a').write('x')\n"
    "while os.path.getsize('ran') == 3 and not os.path.exists('go'): time.sleep(0.1)\n"
)


@pytest.mark.process
def test_a_sweep_that_is_killed_loses_the_run_that_was_on_and_resume_makes_it(tmp_path):
    (tmp_path / "train.py").write_text(WAITS)
    ran, kept = tmp_path / "ran", tmp_path / "ampatch-sweep/sweep.json"
    words = [sys.executable, "-m", "ampatch", "sweep", "train.py", "--levels", "O0,O4,O5"]
    with subprocess.Popen([*words, "--", "{run}.pt"], cwd=tmp_path) as process:
        try:
            wait_until(lambda: ran.exists() and ran.stat().st_size == 3)
        finally:
            process.kill()
    before = json.loads(kept.read_text())["records"]
    assert sum(it["outcome"] == "finished" for it in before) == 2
    (tmp_path / "go").touch()
    subprocess.run([*words, "--resume", "--", "{run}.pt"], cwd=tmp_path, check=True, timeout=200)
    after = json.loads(kept.read_text())["records"]
    assert (len(after), ran.stat().st_size) == (3, 3 + 1)
    assert after[:2] == before[:2]
    assert len(list((tmp_path / "ampatch-sweep/logs").iterdir())) == 3


# ---- Notebooks, and no sweep at all ----


@pytest.mark.parametrize("name", ["sweep", "run"])
def test_a_notebook_is_told_what_to_do(tmp_path, capsys, name):
    (tmp_path / "train.ipynb").write_text(json.dumps({"cells": [], "metadata": None}))
    assert amp.__main__.main([name, str(tmp_path / "train.ipynb")]) == 2
    assert "is a notebook: expected a Python script" in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.parametrize(("options", "is_said"), [(["--opt-level", "O4"], True), ([], False)])
def test_a_run_whose_level_had_no_initialize_to_use_it_says_so_at_its_end(
    processes, tmp_path, options, is_said
):
    (tmp_path / "train.py").write_text("print('trained')")
    words = ["run", *options, "train.py"]
    done = processes.run(f"sys.exit(ampatch.__main__.main({words!r}))", tmp_path)
    assert (done.status, done.stdout) == (0, "trained\n")
    assert ("'train.py' never called initialize in this process, so --opt-level" in done.stderr) == is_said
