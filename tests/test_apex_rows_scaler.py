"""What scripts written for apex expect of scales and checkpoints, row by row of docs/apex-behaviour.md."""

import io

import pytest
import torch

import ampatch
from ampatch.apex import amp
from apex_rows import (
    EVERY_LEVEL,
    initialized,
    is_same,
    scaler_state,
    set_scale,
    shows,
    step,
)


def iterate(net, optimizer, factor=1.0):
    optimizer.zero_grad()
    step(net, optimizer, factor)


def load(loss_scale, unskipped):
    amp.load_state_dict({"loss_scaler0": {"loss_scale": loss_scale, "unskipped": unskipped}})


def shown():
    """The scale, and the count of clean iterations."""
    return tuple(scaler_state().values())


# ---- Checkpoints of the scalers ----


@shows("scaler-load")
def test_loading_is_by_key_whatever_the_order():
    initialized(num_losses=2)
    one, two = {"loss_scale": 2.0, "unskipped": 1}, {"loss_scale": 4.0, "unskipped": 2}
    amp.load_state_dict({"loss_scaler1": two, "loss_scaler0": one})
    assert amp.state_dict() == {"loss_scaler0": one, "loss_scaler1": two}


@shows("scaler-load-static", "scaler-static-count")
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_a_static_scale_is_that_of_initialize_and_counts_nothing(level):
    net, optimizer = initialized(level, loss_scale=128.0)
    load(2.0**24, 7)
    assert shown() == (128.0, 0)
    with amp.scale_loss(torch.tensor(2.0), optimizer) as scaled_loss:
        assert scaled_loss == 256.0
    iterate(net, optimizer)
    assert shown() == (128.0, 0)
    assert amp._amp_state.loss_scalers[0]._unskipped == 0


@shows("scaler-static-count")
@pytest.mark.parametrize("count", [2000, 12345])
def test_a_dynamic_scale_grows_after_a_static_one_of_apex_that_counted_on(count):
    net, optimizer = initialized()
    load(128.0, count)
    iterate(net, optimizer)
    assert shown() == (256.0, 0)


# ---- Restoring a run ----


def checkpoint(net, optimizer):
    file = io.BytesIO()
    torch.save(
        {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, file
    )
    file.seek(0)
    return torch.load(file)


def start(level):
    torch.manual_seed(1)
    pair = initialized(level, torch.optim.Adam, lr=0.05, loss_scale="dynamic")
    set_scale(64.0)
    return pair


ORDERS = [
    ("model", "optimizer", "amp"),
    ("amp", "optimizer", "model"),
    ("optimizer", "model", "amp"),
]


@shows("scaler-restore", "scaler-defect-stale-masters", "never-resume")
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("level", [level for level in EVERY_LEVEL if level != "O3"])
def test_a_restored_run_is_bit_equal_to_the_one_that_never_stopped(level, order):
    net, optimizer = start(level)
    for _ in range(3):
        iterate(net, optimizer)
    saved = checkpoint(net, optimizer)
    for _ in range(3):
        iterate(net, optimizer)
    expected, state = [*net.state_dict().values()], amp.state_dict()
    ampatch.uninitialize()
    net, optimizer = start(level)
    iterate(net, optimizer)  # so that there are masters and state to overwrite
    owners = {"model": net, "optimizer": optimizer, "amp": amp}
    for part in order:
        owners[part].load_state_dict(saved[part])
    for _ in range(3):
        iterate(net, optimizer)
    assert is_same([*net.state_dict().values()], expected)
    assert amp.state_dict() == state
