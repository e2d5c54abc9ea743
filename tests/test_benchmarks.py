"""The benchmarks: that they compare equal work, count what they say and write what they measured."""

import itertools
import json
import multiprocessing
import re
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import ampatch as amp
from benchmarks import __main__ as command
from benchmarks import (
    goals,
    opening,
    report,
    series,
    syncs,
    update,
)
from benchmarks.comparison import Comparison
from benchmarks.contender import ACCUMULATE, CONTENDERS, TRAIN
from benchmarks.options import Options
from benchmarks.quote import quote
from benchmarks.series import PartClock, Series, run_rounds
from benchmarks.setting import Setting
from benchmarks.workload import Workload
from helpers import without_chatter

ROOT = Path(__file__).parents[1]
BF16 = Setting("cpu", torch.bfloat16, 1)
FP16 = Setting("cpu", torch.float16, 1)
BATCH, FEATURES, HIDDEN, CLASSES = 32, 16, 24, 10


def make_net():
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )


TINY = Workload("tiny", make_net, (BATCH, FEATURES))
each_contender = pytest.mark.parametrize(
    ("setting", "name"),
    [
        pytest.param(it, name, id=f"{it.half_name}-{name}")
        for it in (BF16, FP16)
        for name in CONTENDERS[it.half]
    ],
)


# ---- Rounds ----


@pytest.mark.parametrize(
    ("rounds", "seconds", "clock", "median", "calls"),
    [
        # A timing lasts one second by this clock: two calls, or the ten that would last five seconds.
        (3, 5, None, 100.0, 2 + 3 * 10),
        # That of a part stands still, but the step lasts: two calls take a second, and two are enough.
        (1, 1, PartClock("cpu"), 0.0, 2 + 2),
    ],
    ids=["step", "part"],
)
def test_a_time_is_that_of_one_call_in_milliseconds(monkeypatch, rounds, seconds, clock, median, calls):
    monkeypatch.setattr(series.timeit, "default_timer", partial(next, itertools.count(1.0)))
    made = []
    opened = {"it": partial(yield_step, lambda: made.append(1))}
    given = {} if clock is None else {"clock": clock}
    times = run_rounds(opened, threads=1, device="cpu", rounds=rounds, seconds=seconds, **given)
    assert times["it"].values == (median,) * rounds
    assert len(made) == (1 + rounds) * series.WARMUP_STEPS + calls


@pytest.fixture
def in_forks(monkeypatch):
    """Has contenders run in forks of this process, which has torch already."""
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)


@contextmanager
def yield_step(step):
    yield step


# ---- Contenders ----


def train(name, setting, mode, steps):
    """Returns how far each parameter moved, and the losses before and after."""
    trainer = CONTENDERS[setting.half][name](TINY, mode, setting)
    start = [param.detach().float().clone() for param in trainer.model.parameters()]
    with trainer.open():
        step = trainer.choose_step()
        before = trainer.compute_loss().item()
        for _ in range(steps):
            step()
        after = trainer.compute_loss().item()
        params = [param.detach().float() for param in trainer.model.parameters()]
    moved = torch.cat([(new - old).flatten() for new, old in zip(params, start, strict=True)])
    return moved, before, after


@pytest.mark.exhaustive(keep=6)
@pytest.mark.parametrize("mode", [TRAIN, ACCUMULATE], ids=lambda mode: mode.name)
@each_contender
def test_a_contender_does_the_work_of_float32_and_leaves_torch_as_it_was(setting, name, mode, check_torch):
    expected, _, loss = train("float32", setting, mode, 20)
    moved, before, after = train(name, setting, mode, 20)
    check_torch()
    assert after < before
    if name == "O3":  # AdamW's second moments are below float16's smallest number: steps are too large
        return
    # AdamW moves each weight by about the learning rate, whichever the size of its gradient: a gradient
    # that rounds to the other side of 0 turns one weight around, and a step left out moves them all less.
    assert after == pytest.approx(loss, abs=0.01)
    assert torch.cosine_similarity(moved, expected, 0) > 0.97
    assert moved.norm().item() == pytest.approx(expected.norm().item(), rel=0.03)


# ---- Syncs ----


@pytest.mark.parametrize(
    ("read", "count"),
    [
        (lambda tensor: tensor.item(), 1),
        (lambda tensor: bool(tensor), 1),
        (lambda tensor: float(tensor), 1),
        (lambda tensor: int(tensor), 1),
        (lambda tensor: tensor.cpu(), 1),
        (lambda tensor: torch.allclose(tensor, tensor), 1),
        (lambda tensor: tensor.tolist(), 1),
        (lambda tensor: torch.equal(tensor, tensor), 1),
        (lambda tensor: tensor.nonzero(), 1),
        (lambda tensor: (tensor + 1).sum(), 0),
    ],
    ids=["item", "bool", "float", "int", "cpu", "allclose", "tolist", "equal", "nonzero", "none"],
)
def test_a_read_of_a_value_counts_once(read, count):
    assert syncs.count_reads(partial(read, torch.ones(1))) == count


# ---- Goals ----


def compare_steps(setting=BF16, subject="LSTM", **times):
    series_of = {name: Series(values) for name, values in times.items()}
    return Comparison("steps", subject, "train", "ms", setting, series_of)


@pytest.mark.parametrize(("o4", "is_met"), [(0.99, True), (1.0, True), (1.01, False)])
def test_a_goal_is_met_up_to_its_limit(o4, is_met):
    (verdict,) = goals.judge([compare_steps(autocast=(1.0, 2.0, 1.0), O4=(o4, 2 * o4, 5.0))])
    assert verdict.is_met is is_met
    assert verdict.describe()["median"] == o4


# ---- The command ----

QUICK = ["--rounds", "2", "--seconds", "1e-4"]
MLP = ["--workload", "deep thin MLP"]
SMALLEST = [*QUICK, *MLP, "--mode", "train", "--only", "steps,memory,syncs"]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "result.json"


@pytest.fixture
def measure(out, capsys):
    """Runs the command in this process; returns its exit status, what it shows, and the result it writes."""

    def measure_here(*arguments):
        status = command.main([*arguments, "--out", str(out)])
        return status, capsys.readouterr(), json.loads(out.read_text())

    return measure_here


def split_progress(errors):
    """Returns the lines that say how far a run is, and what else it said."""
    lines = without_chatter(errors).splitlines()
    progress = [line for line in lines if re.fullmatch(r"\w+ \.\.\.|\w+: .* is measured", line)]
    return progress, [line for line in lines if line not in progress]


def check_result(result, groups):
    assert list(result) == ["schema", "machine", "settings", "rows", "goals"]
    assert result["schema"] == 1
    assert result["machine"]["torch"] == torch.__version__
    assert {row["group"] for row in result["rows"]} == set(groups)
    for row in result["rows"]:
        assert row["failure"] is None
        assert len(row["rounds"]) == (1 if row["group"] in ("memory", "syncs") else 2)
        assert row["p25"] <= row["median"] <= row["p75"]
        is_difference = row["variant"] in ("added", *update.OPTIMIZERS)
        rounds = 1 if is_difference else len(row["rounds"])
        assert all(len(ratio["rounds"]) == rounds for ratio in row["ratios"].values())
    assert result["goals"]
    assert all(goal["met"] in (True, False) for goal in result["goals"])


@pytest.mark.process
def test_the_command_prints_tables_and_writes_json(measure, in_forks):
    status, shown, result = measure(*SMALLEST)
    progress, other = split_progress(shown.err)
    assert (status, other) == (0, [])
    assert progress[:2] == ["steps ...", "steps: deep thin MLP, train is measured"]
    for title in ("steps: cpu, bfloat16, 1 thread", "memory: cpu, bfloat16; MiB", "syncs:", "goals"):
        assert title in shown.out
    check_result(result, ["steps", "faults", "memory", "syncs"])
    steps = [row for row in result["rows"] if row["group"] == "steps"]
    assert [row["contender"] for row in steps] == list(CONTENDERS[torch.bfloat16])
    assert {row["subject"] for row in result["rows"]} == {"deep thin MLP"}
    syncs_of = [row for row in result["rows"] if row["group"] == "syncs"]
    assert {row["median"] for row in syncs_of if row["contender"] == "float32"} == {0.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "resnet"], r"invalid choice: 'resnet' \(choose from '?deep thin MLP"),
        (["--workload", "BERT-sized encoder"], "encoder': too large for a CPU, add --device cuda"),
        (["--contender", "O4", "--half", "float16"], "in float16, which has 'float32', 'autocast'"),
        (["--rounds", "0"], "'0': expected a whole number, 1 or more"),
        (["--seconds", "nan"], "'nan': expected seconds, more than 0"),
        (["--only", "steps,mirco"], "unknown group 'mirco': expected one or more of 'steps', 'micro'"),
        (["--threads", "99999"], r"--threads 99999: more than the \d+ that this process may use"),
        (["--only", "micro", "--contender", "O1"], "--contender: micro has no choice of them"),
        (["--only", "memory,syncs", "--mode", "eval"], "--mode: memory and syncs has no choice of them"),
        (["--out", "no/such/folder/it.json"], "it.json': cannot be written: No such file or directory"),
        (["--out", "."], "--out '.': cannot be written: Is a directory"),
    ],
)
def test_bad_input_ends_with_status_2_and_a_sentence_and_makes_no_file(arguments, message, out, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["--out", str(out), *arguments])
    assert re.search(message, capsys.readouterr().err)
    assert not out.exists()


def test_readme_quotes_the_result_that_is_kept():
    result = json.loads((ROOT / "benchmarks/results/cpu-bfloat16.json").read_text())
    assert quote(result) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").glob("*.json")), ids=lambda it: it.stem)
def test_the_command_that_made_a_result_stands_beside_it(path):
    table = (ROOT / "benchmarks/results/README.md").read_text()
    (row,) = [line for line in table.splitlines() if line.startswith(f"| `{path.name}` |")]
    assert f"--out benchmarks/results/{path.name}" in row
    assert json.loads(path.read_text())["schema"] == report.SCHEMA


@pytest.mark.exhaustive(keep=0)
def test_every_level_that_runs_here_is_opened_and_undone(monkeypatch):
    monkeypatch.setattr(opening, "LAYERS", 2)
    parts = list(opening.measure(Options(rounds=1, seconds=0.0), BF16))
    levels = [level for level, policy in amp.OPT_LEVELS.items() if not policy.find_lack()]
    assert [(part.variant, list(part.series)) for part in parts] == [
        ("initialize", levels),
        ("uninitialize", levels),
    ]
