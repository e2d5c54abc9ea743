"""What is printed and logged, at each verbosity."""

import logging

import pytest
import torch
from torch import nn

import ampatch as amp
from ampatch.session.session import SESSION
from apex_rows import shows
from helpers import scaled_backward
from nets import EVERY_LEVEL, X


def make():
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_verbosity_0_is_silent(capsys):
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale="dynamic")
    scaled_backward(model(X).sum() * float("inf"), optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("opt_level", EVERY_LEVEL)
@pytest.mark.parametrize("verbosity", [1, 2])
def test_the_banner_names_the_level_and_its_options(capsys, opt_level, verbosity):
    amp.initialize(nn.Linear(3, 2), opt_level=opt_level, verbosity=verbosity)
    printed = capsys.readouterr().out
    assert f"Selected optimization level {opt_level}" in printed
    for option in ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights"):
        assert option in printed
    assert "overrides" not in printed


@shows("initialize-verbosity")
def test_the_banner_shows_an_option_before_and_after_an_override(capsys):
    amp.initialize(nn.Linear(3, 2), opt_level="O2", loss_scale=128.0, keep_batchnorm_fp32=False)
    lines = capsys.readouterr().out.splitlines()
    line = next(line for line in lines if "keep_batchnorm_fp32" in line)
    assert "False" in line
    assert "overrides True" in line
    assert "128" in next(line for line in lines if "loss_scale" in line)


def test_verbosity_1_says_no_casts(capsys):
    model = amp.initialize(nn.Linear(3, 2), opt_level="O4", verbosity=1)
    capsys.readouterr()
    model(X)
    assert capsys.readouterr().out == ""


def test_verbosity_2_says_every_cast(capsys):
    model = amp.initialize(nn.Linear(3, 2), opt_level="O4", verbosity=2)
    capsys.readouterr()
    torch.exp(model(X))
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


def skip(optimizer, loss, times):
    for _ in range(times):
        optimizer.zero_grad()
        scaled_backward(loss(), optimizer)
        optimizer.step()


@pytest.mark.parametrize("how", ["plain", "fused"])
def test_five_skipped_steps_in_a_row_are_explained_once_by_the_loss(caplog, how):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=how == "fused")
    amp.initialize(model, optimizer, opt_level="O1", verbosity=1)
    skip(optimizer, lambda: model(X).sum() * float("nan"), 4)
    assert "in a row" not in caplog.text
    skip(optimizer, lambda: model(X).sum() * float("nan"), 5)
    assert caplog.text.count("5 steps in a row were skipped") == 1
    assert "the loss itself is inf or NaN" in caplog.text
    caplog.clear()
    skip(optimizer, lambda: model(X).sum() * 1e-6, 1)
    skip(optimizer, lambda: model.weight[0, 0] * 3e38, 5)
    assert "the loss is finite" in caplog.text


def test_skipped_steps_with_lost_weights_say_that_no_scale_helps(caplog):
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=1)
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    skip(optimizer, lambda: model(X).float().square().sum(), 5)
    assert "weights are inf or NaN" in caplog.text


def test_skipped_steps_that_are_not_in_a_row_need_no_word(caplog):
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O1", verbosity=1)
    for _ in range(3):
        skip(optimizer, lambda: model(X).sum() * float("inf"), 4)
        skip(optimizer, lambda: model(X).sum() * 1e-6, 1)
    assert "in a row" not in caplog.text


def test_skipped_steps_of_several_losses_do_not_say_that_a_loss_is_finite(caplog):
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O1", verbosity=1)
    for _ in range(5):
        optimizer.zero_grad()
        for factor, delays in [(float("nan"), True), (1e-6, False)]:
            scaled_backward(model(X).sum() * factor, optimizer, delay_unscale=delays)
        optimizer.step()
    assert "5 steps in a row were skipped: gradients overflow" in caplog.text


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
    monkeypatch.setattr(SESSION, "_tell_opened", lambda request: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        amp.initialize(nn.Linear(3, 2), opt_level="O4")
    logging.getLogger("ampatch").warning("ended")
    assert caplog.messages[-1] == "rank 1: ended"
