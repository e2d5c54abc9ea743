"""What scripts written for apex expect of `amp.scale_loss`, row by row of docs/apex-behaviour.md."""

import pytest
import torch

from ampatch.apex import amp
from apex_rows import (
    EVERY_LEVEL,
    MASTERED,
    backward,
    initialized,
    loss_of,
    shows,
)

CLEAN = {"loss_scale": 65536.0, "unskipped": 0}


# ---- What it yields ----


@pytest.mark.exhaustive(keep=12)
@shows("scale-yields")
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", EVERY_LEVEL)
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


# ---- Several losses, and what scripts do inside the block ----


@shows("patterns-backward-outside")
@pytest.mark.parametrize("level", MASTERED)
def test_a_backward_outside_the_block_that_no_step_will_see_is_warned_of(level, caplog):
    net, optimizer = initialized(level, loss_scale=128.0)
    backward(net, optimizer)
    loss_of(net).backward()
    optimizer.step()
    assert "call backward() inside scale_loss" in caplog.text
