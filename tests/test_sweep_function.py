"""`ampatch.sweep` of a function: the same records as the command line, all runs in this process."""

import logging
import random
import sys
from contextlib import suppress
from itertools import product

import pytest
import torch
from torch.nn import functional as F

import ampatch as amp
from ampatch.sweeps.results import from_json
from ampatch.sweeps.rows import Ending


def train(opt_level, seed):
    """Trains on points that are told apart by their largest coordinate."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    points = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    labels = points[:, :3].argmax(1)
    for _ in range(12):
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    return {"accuracy": (model(points).argmax(1) == labels).float().mean()}


def sweep(function=train, levels=("O0", "O4", "autocast"), **options):
    return amp.sweep(function, levels, **options)


def losses(result, row, seed=0):
    (record,) = [it for it in result.records if (it.row, it.seed, it.repeat) == (row, seed, 0)]
    return record.losses["0"].values


@pytest.fixture(scope="module")
def here():
    return sweep(seeds=2)


def test_every_level_is_trained_with_every_seed(here):
    found = sorted((it.row, it.seed, it.outcome) for it in here.records)
    assert found == [(row, seed, Ending.FINISHED) for row in ("O0", "O4", "autocast") for seed in (0, 1)]
    assert [row.name for row in here.rows] == ["O0", "O4", "autocast"]
    assert 0.3 < here.rows[0].metrics["accuracy"].value <= 1  # which the function returns


class KeepLosses(amp.Observer):
    def __init__(self):
        self.losses = []

    def on_loss(self, loss, loss_id):
        self.losses.append(loss.item())


@pytest.mark.parametrize("level", ["O0", "O4"])
def test_a_level_of_the_sweep_is_the_level_by_hand(here, level):
    torch.manual_seed(1)
    observer = KeepLosses()
    with amp.observe(observer):
        train(level, 1)
        amp.uninitialize()
    assert losses(here, level, seed=1) == tuple(observer.losses)


def test_a_run_leaves_nothing_for_the_next(here):
    again = sweep(levels=("autocast", "O0"), seeds=2)
    for row, seed in product(("O0", "autocast"), (0, 1)):
        assert losses(again, row, seed) == losses(here, row, seed)
    assert not torch.is_autocast_enabled("cpu")


def test_the_sweep_can_be_read(here):
    lines = str(here).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["O0", "O4", "autocast"]
    assert here.recommendation.reason in lines
    assert len(repr(here)) < 20_000


def test_variants_steps_and_repeats_are_those_of_the_command_line():
    result = sweep(levels=["O0"], variants=["O2 dtype=bfloat16 loss_scale=8"], steps=8, repeat=2)
    assert [row.name for row in result.rows] == ["O0", "O2 dtype=bfloat16 loss_scale=8"]
    assert {it.steps for it in result.records} == {8}
    assert result.rows[1].loss_scale == 8
    assert len(result.records) == 4


def test_files_are_written_where_they_are_wanted(tmp_path):
    result = sweep(levels=["O0"], out=tmp_path / "made")
    assert {path.name for path in (tmp_path / "made").iterdir()} >= {"sweep.json", "sweep.html"}
    read = from_json((tmp_path / "made" / "sweep.json").read_text())
    assert read.settings.script == f"{__name__}.train"
    assert read.records == result.records


def test_the_process_draws_afterwards_what_it_would_have_drawn():
    random.seed(5)
    states = torch.get_rng_state(), random.getstate()
    sweep(levels=["O0"])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def fails(opt_level, seed):
    train("O0", seed)
    if seed:
        raise ValueError("bad weights")


def test_a_function_that_raises_is_a_failed_run_and_the_sweep_goes_on():
    result = sweep(fails, levels=["O0", "O4"], seeds=2)
    failed = [it for it in result.records if it.failed]
    ended = (1, Ending.CRASHED, "ValueError: bad weights", "ValueError: bad weights")
    assert {(it.seed, it.outcome, it.cause, it.lines[-1]) for it in failed} == {ended}
    assert len(result.records) == 4


def is_refused(opt_level, seed):
    amp.initialize(torch.nn.Linear(1, 1), opt_level=opt_level, keep_fp32=["head"], verbosity=0)


def test_a_level_that_initialize_refuses_is_a_failed_run_of_a_script_that_called_it():
    (record,) = sweep(is_refused, levels=["O2"]).records
    assert (record.outcome, record.initialized) == (Ending.CRASHED, True)
    assert "'head'" in record.cause


def never_initializes(opt_level, seed):
    raise ValueError("no data")


def test_errors_name_the_function_and_no_log_that_is_not_there():
    with pytest.raises(amp.AmpValueError) as caught:
        sweep(never_initializes)
    rest = "failed before it called initialize, as it would at every level: ValueError: no data"
    assert str(caught.value) == f"'{__name__}.never_initializes' {rest}"


@pytest.mark.parametrize("levels", [["O0"], ["O9"]], ids=["good", "bad"])
def test_a_sweep_in_this_process_leaves_no_folder(tmp_path, monkeypatch, levels):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with suppress(amp.AmpValueError):
        sweep(levels=levels)
    assert list(tmp_path.iterdir()) == []


def test_progress_is_logged_and_nothing_is_printed(caplog, capsys):
    with caplog.at_level(logging.INFO, "ampatch"):
        sweep(levels=["O0"])
    assert any(it.startswith("sweep: O0: finished after ") for it in caplog.messages)
    assert capsys.readouterr() == ("", "")


# What cannot work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"function": lambda level, seed: None}, "never called initialize"),
        ({"function": 3}, "expected a function of"),
        ({"levels": ["O9"]}, "unknown opt_level 'O9'"),
        ({"levels": []}, "no levels"),
        ({"seeds": 0}, "seeds 0: expected 1 or more"),
    ],
    ids=["no initialize", "no function", "level", "no levels", "seeds"],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(amp.AmpValueError, match=message):
        sweep(**options)


def test_a_function_of_a_notebook_will_do_and_its_result_is_shown(monkeypatch):
    of_a_cell = {"__name__": "__main__", "train": train}
    exec("def train_here(opt_level, seed): return train(opt_level, seed)", of_a_cell)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    result = amp.sweep(of_a_cell["train_here"], ["O0"])
    assert result.rows[0].step_ms is not None
    shown = result._repr_html_()
    assert shown.startswith("<pre>O0")
    assert shown.endswith("</pre>")


def test_a_process_with_a_session_of_its_own_keeps_it():
    model = torch.nn.Linear(2, 2)
    amp.initialize(model, opt_level="O5", verbosity=0)
    with pytest.raises(amp.AmpError, match=r"call ampatch\.uninitialize\(\) first"):
        sweep()
    assert model.weight.dtype is torch.bfloat16
    amp.uninitialize()
