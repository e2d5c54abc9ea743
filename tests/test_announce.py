"""What is printed and logged, at each verbosity."""

import logging
import re

import numpy as np
import pytest
import torch
from torch import nn

import ampatch as amp
from ampatch.apex import amp as apex
from ampatch.apex.fp16_utils import FP16_Optimizer
from ampatch.apex.legacy.compat import legacy
from ampatch.session.session import SESSION
from apex_rows import shows
from helpers import scaled_backward
from nets import EVERY_LEVEL, X


def make():
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("opt_level", EVERY_LEVEL)
def test_verbosity_0_prints_logs_and_writes_nothing_but_errors(
    opt_level, capsys, caplog, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AMPATCH_POST_MORTEM", raising=False)
    monkeypatch.setattr(SESSION, "_said_torch", False)
    monkeypatch.setattr("ampatch.session.session.is_tested", lambda: False)
    caplog.set_level(logging.DEBUG, "ampatch")
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, loss_scale="dynamic")
    with amp.on_alarm(lambda alarm: 1 / 0):
        for _ in range(10):
            scaled_backward(model(X).sum() * float("inf"), optimizer)
            optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert capsys.readouterr() == ("", "")
    assert {record.levelname for record in caplog.records if record.name == "ampatch"} == {"ERROR"}
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("ends", [False, True], ids=["beside", "after"])
def test_verbosity_0_silences_its_own_session_alone(ends, caplog):
    for verbosity in (0, 1):
        amp.initialize(nn.Linear(3, 2), opt_level="O2", verbosity=verbosity)
        assert ("O2 computes in float16" in caplog.text) == (verbosity == 1)
        if ends:
            amp.uninitialize()
    logging.getLogger("ampatch").warning("heard")
    assert "heard" in caplog.text


def make_fp16_optimizer_overflow():
    model, _ = make()
    fp16 = FP16_Optimizer(torch.optim.SGD(model.half().parameters(), lr=0.1), dynamic_loss_scale=True)
    fp16.backward(model(X.half()).float().sum() * float("inf"))
    fp16.inspect_master_grad_data()
    fp16.step()


def mend_a_name():
    with legacy():
        np.float


def step_with_a_watch():
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0, diagnose=True)
    for batch in (X, X / 0):
        scaled_backward(model(batch).sum(), optimizer)
        optimizer.step()
    amp.uninitialize()


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (make_fp16_optimizer_overflow, ["inspect_master_grad_data: ", "Gradient overflow. "]),
        (mend_a_name, ["--legacy fixes numpy.float in "]),
        (step_with_a_watch, ["Step 1"]),
    ],
)
def test_verbosity_0_of_initialize_leaves_what_else_was_asked_for(act, said, caplog):
    amp.initialize(nn.Linear(3, 2), opt_level="O4", verbosity=0)
    act()
    for line, begin in zip(caplog.messages, said, strict=True):
        assert line.startswith(begin)


@pytest.mark.parametrize("verbosities", [(0, 1), (1, 0)], ids=str)
def test_alarms_of_a_silent_call_are_not_logged_beside_another(verbosities, caplog):
    for verbosity in verbosities:
        model, optimizer = make()
        amp.initialize(model, optimizer, opt_level="O4", verbosity=verbosity)
        scaled_backward(model(X).sum() * float("inf"), optimizer)
        optimizer.step()
        amp.history(verbosities.index(verbosity))  # waits for it
        heard = "the loss is inf or NaN" in caplog.text
        caplog.clear()
        assert heard == (verbosity == 1)


@pytest.mark.parametrize("door", [amp, amp.apex.amp], ids=["ampatch", "apex"])
@pytest.mark.parametrize("losses", [(1, 1), (2, 1), (1, 2), (2, 1, 2)], ids=str)
def test_a_loss_has_its_number_within_its_call_however_often_initialize_was_called(losses, door, capsys):
    for _ in range(2):  # undone, and again
        made, alarms, names = [make() for _ in losses], [], set()
        for level, count, (model, optimizer) in zip(("O2", "O1", "O5"), losses, made, strict=False):
            door.initialize(model, optimizer, opt_level=level, num_losses=count, loss_scale="dynamic")
        for call, (model, optimizer) in enumerate(made):
            call = call if door is amp else len(losses) - 1  # in apex scalers are those of the last call
            first = sum(losses[:call])
            for loss_id in range(losses[call]):
                capsys.readouterr()
                with amp.on_alarm(alarms.append):
                    with door.scale_loss(model(X).sum() * float("inf"), optimizer, loss_id=loss_id) as scaled:
                        scaled.backward()
                    optimizer.step()
                assert f"loss scaler {loss_id} reducing" in capsys.readouterr().out
                later = f" of a later call (amp.history({first + loss_id}))" if first else ""
                names.add(f"loss {loss_id}{later}, step 0")
        assert {alarm.message.partition(":")[0] for alarm in alarms} == names
        amp.uninitialize()


@pytest.mark.parametrize("opt_level", EVERY_LEVEL)
@pytest.mark.parametrize("verbosity", [1, 2])
def test_the_banner_is_a_line_that_names_the_level(capsys, opt_level, verbosity):
    amp.initialize(nn.Linear(3, 2), opt_level=opt_level, verbosity=verbosity)
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(f"Selected optimization level {opt_level}: ")
    assert line.endswith("; amp.explain(model) says more")
    assert ("dynamic loss scale" in line) == (opt_level in ("O1", "O2"))
    assert "not" not in line


def test_the_banner_says_what_overrides_the_level(capsys):
    amp.initialize(nn.Linear(3, 2), opt_level="O2", loss_scale=128.0, keep_batchnorm_fp32=False)
    (line,) = capsys.readouterr().out.splitlines()
    assert "keep_batchnorm_fp32=False (default: True), loss_scale=128.0 (default: dynamic)" in line


@shows("initialize-verbosity")
@pytest.mark.parametrize("opt_level", EVERY_LEVEL)
def test_through_apex_the_banner_lists_the_options_and_what_they_override(capsys, opt_level):
    apex.initialize(nn.Linear(3, 2), opt_level=opt_level)
    printed = capsys.readouterr().out
    assert f"Selected optimization level {opt_level}" in printed
    for option in ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights"):
        assert f"\n  {option} " in printed
    assert "overrides" not in printed
    amp.uninitialize()
    apex.initialize(nn.Linear(3, 2), opt_level=opt_level, loss_scale=64.0, verbosity=1)
    assert re.search(r"\n  loss_scale +: 64.0  \(overrides ", capsys.readouterr().out)
    amp.uninitialize()
    apex.initialize(nn.Linear(3, 2), opt_level=opt_level, verbosity=0)
    apex.initialize(nn.Linear(3, 2), enabled=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("device", "level"), [("cpu", "O4"), ("meta", "O1")])
def test_a_call_that_names_no_level_takes_one_that_suits_the_device(capsys, device, level):
    """A meta device stands for what is no CPU; apex's default is O1 wherever the model is."""
    amp.initialize(nn.Linear(3, 2, device=device))
    assert f"level {level}:" in capsys.readouterr().out
    amp.uninitialize()
    for given in ({}, {"opt_level": None}):
        apex.initialize(nn.Linear(3, 2, device=device), **given)
        assert "level O1:" in capsys.readouterr().out
        amp.uninitialize()
    with torch.device(device):
        amp.initialize(nn.ReLU())  # nothing that would be on a device
        assert f"level {level}:" in capsys.readouterr().out


def test_a_later_call_that_names_no_level_takes_that_of_the_call_before(capsys):
    amp.initialize(nn.Linear(3, 2), opt_level="O2")
    amp.initialize(nn.Linear(3, 2))
    assert [line[28:30] for line in capsys.readouterr().out.splitlines()] == ["O2", "O2"]


def test_verbosity_1_says_no_casts(capsys):
    model = amp.initialize(nn.Linear(3, 2), opt_level="O4", verbosity=1)
    capsys.readouterr()
    model(X)
    assert capsys.readouterr().out == ""


def test_verbosity_2_says_every_cast(capsys):
    model = amp.initialize(nn.Linear(3, 2), opt_level="O4", verbosity=2)
    capsys.readouterr()
    torch.exp(input=torch.exp(model(X)))
    lines = capsys.readouterr().out.splitlines()
    assert sum("linear" in line and "float32" in line and "bfloat16" in line for line in lines) == 3
    assert sum("exp" in line for line in lines) == 1


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
def test_float16_on_a_cpu_says_once_that_bfloat16_is_the_fast_type(caplog, opt_level):
    with caplog.at_level(logging.INFO, logger="ampatch"):
        amp.initialize(nn.Linear(3, 2), opt_level=opt_level)
        amp.initialize(nn.Linear(3, 2), opt_level=opt_level)
    lines = [record.getMessage() for record in caplog.records if "slow on a CPU" in record.getMessage()]
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert "O4" in lines[0]
    assert "O5" in lines[0]


@pytest.mark.parametrize(
    "kwargs", [{"opt_level": "O4"}, {"opt_level": "O0"}, {"opt_level": "O1", "dtype": torch.bfloat16}]
)
def test_other_types_on_a_cpu_warn_of_nothing(caplog, kwargs):
    amp.initialize(nn.Linear(3, 2), **kwargs)
    assert caplog.text == ""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_before_there_is_a_process_group_rank_0_alone_prints_and_logs_name_the_rank(
    rank, monkeypatch, capsys, caplog
):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    amp.initialize(nn.Linear(3, 2), opt_level="O2")
    assert ("Selected optimization level" in capsys.readouterr().out) == (rank == "0")
    assert caplog.messages[0].startswith(f"rank {rank}: O2 computes in float16")


def test_the_log_names_the_rank_though_a_second_call_raised(monkeypatch, caplog):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    amp.initialize(nn.Linear(3, 2), opt_level="O4")
    monkeypatch.setattr(SESSION.events, "call_is_set_up", (lambda opening: 1 / 0,))
    with pytest.raises(ZeroDivisionError):
        amp.initialize(nn.Linear(3, 2), opt_level="O4")
    logging.getLogger("ampatch").warning("ended")
    assert caplog.messages[-1] == "rank 1: ended"
