"""What scripts written for apex expect of `amp.scale_loss`, row by row of docs/apex-behaviour.md."""

import pytest
import torch
from torch import nn

from ampatch.apex import amp
from apex_rows import (
    EVERY_LEVEL,
    INF,
    MASTERED,
    X,
    backward,
    changed,
    initialized,
    loss_of,
    make,
    scaler_state,
    shows,
    step,
    unchanged,
)

CLEAN = {"loss_scale": 65536.0, "unskipped": 0}


def grads_of(optimizer):
    return [param.grad.clone() for param in amp.master_params(optimizer)]


def scales(count):
    return [scaler_state(loss_id)["loss_scale"] for loss_id in range(count)]


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


# ---- What happens when the block ends ----


@shows("scale-exit", "patterns-leave-early")
@pytest.mark.parametrize("way", ["end", "break", "return"])
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_gradients_are_unscaled_at_exit(level, way):
    def run():
        for _ in range(2):
            with amp.scale_loss(loss_of(net), optimizer) as scaled_loss:
                scaled_loss.backward()
                inside.extend(param.grad.clone() for param in net.parameters())
                if way == "break":
                    break
                if way == "return":
                    return
            break

    net, optimizer = initialized(level, loss_scale=64.0)
    inside = []
    run()
    for found, grad in zip(grads_of(optimizer), inside, strict=True):
        assert torch.equal(found, (grad.float() / 64.0).to(found.dtype))
    assert max(grad.abs().max() for grad in inside) > 0


@shows("scale-delay-unscale", "patterns-delay-unscale", "scale-delay-check")
@pytest.mark.parametrize("delay", ["delay_unscale", "delay_overflow_check"])
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_a_delayed_block_leaves_the_scale_alone_and_a_later_exit_settles_it(level, delay):
    net, optimizer = initialized(level, loss_scale="dynamic")
    with unchanged(net):
        backward(net, optimizer, INF, **{delay: True})
        assert scaler_state() == CLEAN
        step(net, optimizer, 0.0)
    assert scales(1) == [32768.0]


@shows("scale-before-initialize")
def test_before_initialize_the_error_says_what_is_missing():
    net, optimizer = make()
    with pytest.raises(RuntimeError, match=r"initialize\(model, optimizer\)"):
        backward(net, optimizer)


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


@shows("scale-defect-cache-exception")
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_an_exception_leaves_no_stale_cast(level):
    _, optimizer = initialized(level)
    linear, x = nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    with pytest.raises(KeyError), amp.scale_loss(linear(x).sum(), optimizer):
        raise KeyError
    linear.weight.data.zero_()
    assert torch.equal(linear(x).float(), torch.zeros(1, 4))


@shows("scale-misuse")
def test_a_loss_that_goes_backward_unscaled_is_warned_of_and_trains_as_before():
    net, optimizer = initialized("O1", loss_scale=4.0)
    loss = loss_of(net)
    (expected,) = torch.autograd.grad(loss, net.last.bias, retain_graph=True)
    with amp.scale_loss(loss, optimizer):
        loss.backward()
    assert torch.equal(net.last.bias.grad, expected / 4)
    with pytest.warns(UserWarning, match="began at a loss that is not scaled"):
        optimizer.step()


# ---- Several losses, and what scripts do inside the block ----


@shows("patterns-several-losses", "initialize-num-losses")
def test_losses_with_scalers_of_their_own_lead_to_one_step():
    net, optimizer = initialized("O1", num_losses=3)
    with unchanged(net):
        backward(net, optimizer, loss_id=0)
        with amp.scale_loss(loss_of(net) * INF, optimizer, 1) as scaled_loss:  # by position
            scaled_loss.backward()
        assert scales(3) == [65536.0, 32768.0, 65536.0]
        step(net, optimizer, INF, loss_id=2)  # two overflows skip one step
    optimizer.zero_grad()
    for loss_id in range(3):
        backward(net, optimizer, loss_id=loss_id)
    with changed(net):
        optimizer.step()
    assert scales(3) == [65536.0, 32768.0, 32768.0]


@shows("patterns-autograd-grad")
@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_gradients_of_input_leaves_stay_scaled(level):
    net, optimizer = initialized(level, loss_scale=64.0)
    delta, plain = X.clone().requires_grad_(), X.clone().requires_grad_()
    net.eval()
    loss_of(net, plain).backward()
    net.zero_grad()
    backward(net, optimizer, x=delta)
    # A power of two, but for float16 gradients that lose digits without it.
    torch.testing.assert_close(delta.grad, 64 * plain.grad, rtol=1e-2, atol=1e-4)


@shows("patterns-autograd-grad")
def test_the_scaled_loss_divided_by_the_loss_is_the_scale_in_the_graph():
    net, optimizer = initialized("O1", loss_scale=32.0)
    loss = loss_of(net)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scale = scaled_loss / loss
        assert scale.item() == 32.0
        assert scale.requires_grad
        (loss * scale).backward()
    assert net.first.weight.grad is not None


@shows("patterns-edited-grads", "patterns-leave-early")
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_gradients_zeroed_on_nan_and_continue_leave_a_clean_iteration(level):
    net, optimizer = initialized(level, loss_scale="dynamic")
    with unchanged(net):
        for _ in range(2):
            with amp.scale_loss(loss_of(net) * float("nan"), optimizer) as scaled_loss:
                scaled_loss.backward()
                if any(torch.isnan(param.grad).any() for param in net.parameters()):
                    for param in net.parameters():
                        param.grad.zero_()
                    continue
            raise AssertionError("the gradients were NaN")
        optimizer.step()
    assert scaler_state() == {**CLEAN, "unskipped": 2}


@shows("patterns-backward-outside")
@pytest.mark.parametrize("level", MASTERED)
def test_a_backward_outside_the_block_that_no_step_will_see_is_warned_of(level, caplog):
    net, optimizer = initialized(level, loss_scale=128.0)
    backward(net, optimizer)
    loss_of(net).backward()
    optimizer.step()
    assert "call backward() inside scale_loss" in caplog.text
