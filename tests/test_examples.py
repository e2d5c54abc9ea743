"""Each example runs as a user would run it, and what it prints is true."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ampatch.doctor.campaign import Campaign
from ampatch.doctor.run import ScriptRun
from faults import fork_child
from helpers import snapshot
from legacy import print_in_forks
from ranks import FSDP2

EXAMPLES = Path(__file__).parents[1] / "examples"

# The last 500 digits are by other writers than the rest. The mean image of each class, with no
# training at all (sklearn's NearestCentroid), gets 87.0 % of them right, logistic regression 91.6 %.
LEARNED = 0.89


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run_forked(name, folder, *arguments):
    """Runs an example in a fork of this process, or in two that are ranks, and returns what it prints."""
    path = str(EXAMPLES / f"{name}.py")
    count = 2 if name == "distributed" else None
    return print_in_forks(
        lambda: runpy.run_path(path, run_name="__main__") and 0, [path, *arguments], folder, count
    )


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example in this process, which is quicker, and returns what it prints."""

    def run_here(name, level):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--opt-level", level])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run_here


def numbers(pattern, printed):
    """Returns the numbers in the groups of a pattern that must be there."""
    found = re.search(pattern, printed)
    assert found, f"{pattern!r} is not in:\n{printed}"
    return [float(group) for group in found.groups()]


def check_digits(printed):
    # The net sees digits of all writers; 95 % is far above what pixels alone give.
    assert numbers(r"([\d.]+)% of 500 test digits are right", printed)[0] > 95


def check_accumulation(printed):
    clipped, steps = numbers(r"gradients were clipped in (\d+) of (\d+) steps", printed)
    assert 0 < clipped < steps, "clipping must matter, and not in every step"
    before, after = numbers(r"largest norm: ([\d.]+) before, ([\d.]+) after", printed)
    # A norm of 0.5 made of half gradients (O3) is off by their rounding, 2**-11 of each.
    assert before > 1 > 0.501 > after
    assert numbers(r"([\d.]+)% of 500 test digits are right", printed)[0] > 100 * LEARNED


def check_gan(printed):
    untrained, trained, real = (
        numbers(rf"distance to the nearest digit, {kind}: ([\d.]+)", printed)[0]
        for kind in ("untrained", "trained", "real digits")
    )
    # Of the way from noise to new real digits the generator makes at least half.
    assert trained - real < (untrained - real) / 2


def check_resume(printed):
    assert "losses bit-equal: True" in printed
    assert "weights bit-equal: True" in printed
    assert "loss scalers equal: True" in printed
    first, last = numbers(r"loss: ([\d.]+) at first, ([\d.]+) after", printed)
    assert last < first / 10, "a run that learns nothing would resume too easily"


def check_gradient_penalty(printed):
    line = r"input gradient ([\d.]+) \(root mean square\), accuracy ([\d.]+)%"
    without, accuracy_without = numbers(rf"penalty 0\.0: {line}", printed)
    penalized, accuracy = numbers(rf"penalty 0\.2: {line}", printed)
    # Measured: 4.3 and 1.8 at every level. Without its second derivative the penalty would do nothing.
    assert penalized < 0.6 * without
    assert min(accuracy, accuracy_without) > 100 * LEARNED


def check_linear_attention(printed):
    assert "loss: nan at first, nan at last" in printed  # as the doctor explains


def check_bilinear_pooling(printed):
    assert "loss: nan at first, nan at last" in printed


def check_siamese(printed):
    skipped, steps = numbers(r"(\d+) of (\d+) steps were skipped", printed)
    assert skipped > steps / 4


def check_distributed(printed):
    assert printed.count("Selected optimization level") == 1, "rank 0 alone prints"
    assert "after epochs 0 to 7" in printed
    assert numbers(r"([\d.]+)% of 500 test digits are right", printed)[0] > 100 * LEARNED


CHECKS = {
    "accumulation": check_accumulation,
    "bilinear_pooling": check_bilinear_pooling,
    "digits": check_digits,
    "distributed": check_distributed,
    "gan": check_gan,
    "gradient_penalty": check_gradient_penalty,
    "linear_attention": check_linear_attention,
    "resume": check_resume,
    "siamese": check_siamese,
}


# Products of float16 take tens of times as long on a CPU.
OPTIONS = {"digits": ("--width", "64")}


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(CHECKS)


@pytest.mark.process
@pytest.mark.parametrize("name", [name for name in CHECKS if name != "gan"])  # which runs at O2 below
def test_an_example_does_what_it_says_at_its_default_level(name, tmp_path):
    CHECKS[name](run_forked(name, tmp_path, *OPTIONS.get(name, ())))


KILLED = """
import os, runpy, signal, sys
import ampatch as amp

class Kill(amp.Observer):
    steps = 0
    def on_step(self, optimizer):
        self.steps += 1
        if self.steps == 50 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

sys.argv = sys.argv[1:]
with amp.observe(Kill()):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@FSDP2
@pytest.mark.process
def test_a_rank_that_is_killed_starts_again_from_the_last_checkpoint_and_ends_with_the_same_weights(
    tmp_path, monkeypatch
):
    options = ("--wrapper", "fsdp", "--opt-level", "O2", "--epochs", "4", "--checkpoints")
    run_forked("distributed", tmp_path, *options, tmp_path / "whole")
    (tmp_path / "killed.py").write_text(KILLED)
    # Or the ranks of torch 2.13 may look for each other where they were before.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    command = [sys.executable, *TORCHRUN, "--max-restarts", "1", "killed.py", EXAMPLES / "distributed.py"]
    done = subprocess.run(
        [*command, *options, "killed"], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert "after epochs 2 to 3" in done.stdout, done.stderr  # of 20 steps each
    states = []
    for name in ("whole", "killed"):
        dcp_to_torch_save(tmp_path / name / "3", tmp_path / f"{name}.pt")
        states.append(torch.load(tmp_path / f"{name}.pt"))
    assert states[0]["model"]["2.weight"].dtype is torch.float32
    assert snapshot(states[0]) == snapshot(states[1])


# Of each example that breaks: the phase, operation and module of its first finding, what to keep, and by how
# much the loss falls once it is fixed.
EXAMINED = {
    "bilinear_pooling": ("forward", "matmul", "pooling", ("pooling",), 0.7),
    "linear_attention": ("forward", "matmul", "attention", ("attention",), 0.25),
    "siamese": ("backward", "sqrt", "", (), 0.25),
}


@pytest.mark.process
@pytest.mark.parametrize("name", EXAMINED)
def test_an_example_that_breaks_trains_once_it_is_fixed(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--fixed"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    first, last = numbers(r"loss: ([\d.]+) at first, ([\d.]+) at last", capsys.readouterr().out)
    assert last < first * EXAMINED[name][-1]


@pytest.mark.process
@pytest.mark.parametrize("name", EXAMINED)
def test_the_doctor_finds_what_breaks_in_an_example(name):
    phase, op, module, keep, _ = EXAMINED[name]
    report = Campaign(ScriptRun(str(EXAMPLES / f"{name}.py")), launch=fork_child).report()
    first = report.findings[0]
    assert (first.phase, first.op, first.module, first.keep) == (phase, op, module, keep)
    assert first.float32_survives is bool(keep)
    assert report.runs == 3


def test_accumulation_clips_half_gradients_as_well(run):
    check_accumulation(run("accumulation", "O3"))


@pytest.mark.process
def test_the_three_losses_of_the_gan_have_scales_of_their_own(run):
    printed = run("gan", "O2")
    check_gan(printed)
    scales = numbers(r"loss scales: \[([\d.]+), ([\d.]+), ([\d.]+)\]", printed)
    overflows = re.findall(r"Gradient overflow.*loss scaler (\d)", printed)
    assert scales == [2.0**16 / 2 ** overflows.count(str(loss_id)) for loss_id in range(3)]
    assert len(set(scales)) > 1
