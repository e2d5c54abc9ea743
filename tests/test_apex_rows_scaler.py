"""What scripts written for apex expect of scales and checkpoints, row by row of docs/apex-behaviour.md."""

import io
import logging

import pytest
import torch
from torch import nn

import ampatch
from ampatch.apex import amp
from apex_rows import (
    EVERY_LEVEL,
    INF,
    MASTERED,
    PATCHED,
    Net,
    backward,
    copy_of,
    initialized,
    is_same,
    make,
    scaler_state,
    set_scale,
    shows,
    step,
    unchanged,
)


def iterate(net, optimizer, factor=1.0):
    optimizer.zero_grad()
    step(net, optimizer, factor)


def load(loss_scale, unskipped):
    amp.load_state_dict({"loss_scaler0": {"loss_scale": loss_scale, "unskipped": unskipped}})


def shown():
    """The scale, and the count of clean iterations."""
    return tuple(scaler_state().values())


def count(optimizer, factor=0.0):
    """One iteration of nothing but a loss: it counts, and is quick."""
    with amp.scale_loss(torch.tensor(1.0), optimizer):
        param = next(amp.master_params(optimizer))
        param.grad = torch.full_like(param, factor)
    optimizer.zero_grad()


# ---- The schedule ----


@shows("scaler-schedule")
def test_the_scale_doubles_after_2000_clean_iterations_up_to_2_to_the_24_and_halves_on_overflow():
    _, optimizer = initialized()
    assert shown() == (65536.0, 0)
    load(2.0**23, 0)
    for _ in range(1999):
        count(optimizer)
    assert shown() == (2.0**23, 1999)
    count(optimizer)
    assert shown() == (2.0**24, 0)
    load(2.0**24, 1999)
    count(optimizer)
    assert shown()[0] == 2.0**24
    load(256.0, 1999)
    count(optimizer, INF)
    assert shown() == (128.0, 0)
    count(optimizer)
    assert shown() == (128.0, 1)


@shows("scaler-defect-zero", "never-scale-zero")
def test_the_scale_never_falls_to_0():
    net, optimizer = initialized()
    for _ in range(300):
        count(optimizer, INF)
    scale, _ = shown()
    assert scale > 0
    assert 1 / scale < INF
    iterate(net, optimizer)
    assert all(torch.isfinite(weight).all() for weight in copy_of(net))
    load(scale, 1999)
    count(optimizer)
    assert shown()[0] == 2 * scale


@shows("scaler-defect-sum")
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_finite_gradients_whose_sum_overflows_are_no_overflow(level):
    net, optimizer = initialized(level, loss_scale="dynamic")
    with amp.scale_loss(torch.tensor(1.0), optimizer):
        for param in net.parameters():
            largest = 60000.0 if param.dtype is torch.float16 else 3e38
            param.grad = torch.full_like(param, largest)
            assert torch.isfinite(param.grad).all()
        assert torch.isinf(net.first.weight.grad.sum())
    assert shown() == (65536.0, 1)


# ---- Checkpoints of the scalers ----


@shows("scaler-state-dict")
def test_state_dict_has_the_keys_and_values_of_apex():
    _, optimizer = initialized(num_losses=2)
    for _ in range(12):
        count(optimizer)
    assert amp.state_dict() == {
        "loss_scaler0": {"loss_scale": 65536.0, "unskipped": 12},
        "loss_scaler1": {"loss_scale": 65536.0, "unskipped": 0},
    }
    kinds = {name: type(value) for name, value in scaler_state().items()}
    assert kinds == {"loss_scale": float, "unskipped": int}


@shows("scaler-state-dict")
def test_a_checkpoint_that_apex_wrote_loads():
    initialized()
    old = io.BytesIO()
    # As apex saved it; a script that had assigned `_loss_scale` an int saved that int.
    torch.save({"amp": {"loss_scaler0": {"loss_scale": 1048576, "unskipped": 731}}}, old)
    old.seek(0)
    amp.load_state_dict(torch.load(old)["amp"])
    assert shown() == (1048576.0, 731)


@shows("scaler-load")
def test_loading_is_by_key_whatever_the_order():
    initialized(num_losses=2)
    one, two = {"loss_scale": 2.0, "unskipped": 1}, {"loss_scale": 4.0, "unskipped": 2}
    amp.load_state_dict({"loss_scaler1": two, "loss_scaler0": one})
    assert amp.state_dict() == {"loss_scaler0": one, "loss_scaler1": two}


@shows("scaler-load")
@pytest.mark.parametrize(
    "bad",
    [
        {"scaler": {"loss_scale": 2.0, "unskipped": 1}},
        {"loss_scaler1": {"loss_scale": 0.0, "unskipped": 1}},
    ],
    ids=["key", "zero"],
)
def test_a_bad_checkpoint_raises_and_nothing_of_it_is_loaded(bad):
    initialized(num_losses=2)
    before = amp.state_dict()
    with pytest.raises(RuntimeError, match=r"scaler"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 1}, **bad})
    assert amp.state_dict() == before


@shows("scaler-load")
@pytest.mark.parametrize("saved", [1, 3])
def test_another_number_of_scalers_warns_and_loads_what_both_have(saved, caplog):
    initialized(num_losses=2)
    state = {f"loss_scaler{index}": {"loss_scale": 8.0, "unskipped": 5} for index in range(saved)}
    with caplog.at_level(logging.WARNING, "ampatch"):
        amp.load_state_dict(state)
    assert f"{saved} loss scalers" in caplog.text
    assert "has 2" in caplog.text
    assert shown() == (8.0, 5)


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


@shows("scaler-model-state", "scaler-defect-rounded")
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_the_models_state_dict_is_float32_and_has_every_bit(level):
    net = Net()
    expected = [value.clone() for value in net.state_dict().values()]
    initialized(level, net=net)
    if level == "O3":  # where nothing keeps what was rounded
        expected = [value.half().float() if value.is_floating_point() else value for value in expected]
    assert is_same([*net.state_dict().values()], expected)


class WithExtraState(Net):
    """A model that saves what is no tensor."""

    def __init__(self):
        super().__init__()
        self.epoch = 3

    def get_extra_state(self):
        return {"epoch": self.epoch, "name": "net"}

    def set_extra_state(self, state):
        self.epoch = state["epoch"]


@shows("scaler-extra-state")
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_extra_state_that_is_no_tensor_passes(level):
    net, _ = initialized(level, net=WithExtraState())
    state = net.state_dict()
    assert state["_extra_state"] == {"epoch": 3, "name": "net"}
    net.epoch = 0
    net.load_state_dict(state)
    assert net.epoch == 3


# ---- Before initialize, and by hand ----


@shows("patterns-state-dict")
def test_load_state_dict_takes_no_strict():
    initialized()
    with pytest.raises(TypeError, match="strict"):
        amp.load_state_dict(amp.state_dict(), strict=False)


@shows("patterns-state-dict")
def test_master_params_works_without_initialize():
    _, optimizer = make()
    expected = [param for group in optimizer.param_groups for param in group["params"]]
    assert [id(param) for param in amp.master_params(optimizer)] == [*map(id, expected)]
    assert len(expected) == 6


@shows("never-sparse")
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_sparse_gradients_are_unscaled_and_checked(level):
    def run(ids, factor):
        optimizer.zero_grad()
        with amp.scale_loss(net(torch.tensor(ids)).sum() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        assert next(amp.master_params(optimizer)).grad.is_sparse
        optimizer.step()

    net = nn.Embedding(5, 3, sparse=True)
    _, optimizer = initialized(level, net=net, lr=1.0, loss_scale="dynamic")
    set_scale(64.0)
    before = copy_of(net)[0]
    run([1, 1, 3], 1.0)
    moved = before - copy_of(net)[0]
    # Steps of 1 and 2 on weights near 1: rounded to the half type where the weights are half.
    torch.testing.assert_close(moved[:, 0], torch.tensor([0.0, 2, 0, 1, 0]), atol=0.03, rtol=0)
    with unchanged(net):
        run([1], INF)
    assert shown()[0] == 32.0


@shows("never-set-to-none", "optimizers-zero-grad")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("level", [*MASTERED, *PATCHED])
def test_zero_grad_takes_set_to_none_and_clears_model_and_masters(level, set_to_none):
    net, optimizer = initialized(level, loss_scale=4.0)
    backward(net, optimizer)
    optimizer.zero_grad(set_to_none=set_to_none)
    for param in (*net.parameters(), *amp.master_params(optimizer)):
        assert param.grad is None or not (set_to_none or param.grad.any())
    if not set_to_none:
        assert net.first.weight.grad is not None
