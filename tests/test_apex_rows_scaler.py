"""What scripts written for apex expect of losses and their scales, and never got, row by row."""

import io

import pytest
import torch
from torch import nn

import ampatch
from ampatch.apex import amp
from apex_rows import (
    EVERY_LEVEL,
    INF,
    MASTERED,
    backward,
    initialized,
    is_same,
    scaler_state,
    set_scale,
    shows,
    step,
)

# ---- What it yields ----


@shows("scale-yields")
@pytest.mark.parametrize("shape", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", ["O0", "O1", "O5"])
def test_it_yields_the_loss_in_float32_times_the_scale_in_any_shape(level, dtype, shape):
    _, optimizer = initialized(level, loss_scale=128.0)
    loss = torch.full(shape, 1.5, dtype=dtype, requires_grad=True)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss.dtype is torch.float32
        assert torch.equal(scaled_loss, torch.full(shape, 192.0))
        scaled_loss.sum().backward()
    assert torch.equal(loss.grad, torch.full(shape, 128.0, dtype=dtype))


@shows("scale-yields")
@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_a_static_scale_of_1_yields_the_loss_in_float32(level):
    _, optimizer = initialized(level, loss_scale=1.0)
    loss = torch.tensor(0.1)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    with amp.scale_loss(loss.half(), optimizer) as scaled_loss:
        assert torch.equal(scaled_loss, loss.half().float())


# ---- What was wrong ----


@shows("scale-defect-lost-grads")
@pytest.mark.parametrize("level", MASTERED)
def test_float32_parameters_keep_their_gradients_at_a_static_scale_of_1(level):
    net, optimizer = initialized(level, loss_scale=1.0)
    net.eval()  # equal batches then give equal gradients
    backward(net, optimizer)
    once = net.norm.weight.grad.clone()
    assert once.abs().max() > 0
    backward(net, optimizer)
    assert net.norm.weight.dtype is torch.float32
    assert torch.equal(net.norm.weight.grad, 2 * once)


def iterate(net, optimizer, factor=1.0):
    optimizer.zero_grad()
    step(net, optimizer, factor)


def load(loss_scale, unskipped):
    amp.load_state_dict({"loss_scaler0": {"loss_scale": loss_scale, "unskipped": unskipped}})


def shown():
    """The scale, and the count of clean iterations."""
    return tuple(scaler_state().values())


# ---- Checkpoints of the scalers ----


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


@shows("never-which-layer")
def test_the_gradients_of_a_skipped_step_show_which_layer_overflowed():
    net, optimizer = initialized("O4", loss_scale="dynamic")
    net.last.register_full_backward_pre_hook(lambda module, grads: tuple(grad * INF for grad in grads))
    step(net, optimizer)
    assert ampatch.step_was_skipped(optimizer)
    bad = [name for name, param in net.named_parameters() if not torch.isfinite(param.grad).all()]
    assert bad[-2:] == ["last.weight", "last.bias"]


def bytes_kept(level):
    """Counts the bytes that a forward keeps for its backward, but for those of parameters."""
    net = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(64, 64), nn.Tanh())])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        net(torch.ones(64, 64))
    for param in net.parameters():
        storages.pop(param.untyped_storage().data_ptr(), None)
    ampatch.uninitialize()
    return sum(storage.nbytes() for storage in storages.values())


@shows("never-why-o2")
@pytest.mark.parametrize("level", MASTERED)
def test_a_half_model_keeps_half_the_bytes_for_its_backward(level):
    full, half = bytes_kept("O0"), bytes_kept(level)
    # All but the float32 input, which is cast, and the float32 output.
    assert half < 0.6 * full
    assert half < bytes_kept("O4")
