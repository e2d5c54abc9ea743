"""What a block of scale_loss holds: gradients of gradients, several models, and an end before its end."""

import copy

import pytest
import torch
from torch.nn import Parameter

import ampatch as amp
from ampatch.steps.optimizer import AmpOptimizer
from ampatch.steps.scaler import LossScaler, Scale
from apex_rows import shows
from helpers import Scalar, scaled_backward, snapshot
from stepping import (
    BATCHES,
    FUSED_ADAM,
    INF,
    LEVELS,
    MOMENTUM,
    SCALE,
    Beside,
    param_bits,
    run_block,
)


class Critic(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.second = torch.nn.Linear(8, 1)

    def forward(self, batch):
        return self.second(torch.tanh(self.first(batch)))


def penalty_of_inputs(model, batch, scale):
    batch = batch.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(batch).float().sum(), batch, create_graph=True)
    return (grad.norm(2, dim=1) - 1).square().mean()


def penalty_of_params(model, batch, scale):
    loss = model(batch).float().square().mean()
    grads = torch.autograd.grad(loss * scale, list(model.parameters()), create_graph=True)
    return sum((grad.float() / scale).square().sum() for grad in grads)


@LEVELS
@pytest.mark.parametrize("compute_penalty", [penalty_of_inputs, penalty_of_params])
def test_a_gradient_penalty_has_the_gradients_of_float32(level, compute_penalty):
    batch = torch.randn(6, 4)
    model = Critic()
    oracle = copy.deepcopy(model)
    (oracle(batch).square().mean() + compute_penalty(oracle, batch, 1.0)).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=amp.DynamicLossScale(SCALE), verbosity=0)
    loss = model(batch).float().square().mean()
    penalty = compute_penalty(model, batch, amp.get_loss_scale())
    scaled_backward(loss + penalty, optimizer)
    # 8 bits of bfloat16 and 11 of float16, through four products forward and four backward.
    tolerance = {"O0": 1e-6, "O1": 2e-2, "O2": 2e-2, "O4": 1e-1, "O5": 1e-1}[level]
    for param, expected in zip(amp.master_params(optimizer), oracle.parameters(), strict=True):
        assert param.grad.dtype is torch.float32
        assert (param.grad - expected.grad).norm() <= tolerance * expected.grad.norm() + tolerance * 1e-2
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


@LEVELS
def test_autograd_grad_inside_the_block_without_a_parameter_gradient_counts_as_clean(level):
    run = Beside(level)
    delta = torch.zeros(3, requires_grad=True)
    with amp.scale_loss(run.model(BATCHES[0] + delta).float().sum(), run.optimizer) as scaled_loss:
        (grad,) = torch.autograd.grad(scaled_loss, delta)
    assert grad.isfinite().all()
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": SCALE, "unskipped": 1}}
    before = param_bits(run.optimizer)
    run.optimizer.step()
    assert not amp.step_was_skipped(run.optimizer)
    assert param_bits(run.optimizer) == before


@shows("patterns-autograd-grad")
@LEVELS
def test_inside_the_graph_the_scale_is_that_of_the_block_and_gradients_of_inputs_keep_it(level):
    run = Beside(level)
    batch = BATCHES[0].clone().requires_grad_()
    with torch.no_grad():
        run.model.weight.fill_(2.0)
    loss = run.model(batch).float().sum()
    with amp.scale_loss(loss, run.optimizer) as scaled_loss:
        assert (scaled_loss / loss).item() == SCALE
        scaled_loss.backward()
    assert batch.grad.tolist() == [2.0 * SCALE] * 3


@LEVELS
@pytest.mark.parametrize("factor", [1.0, INF], ids=["growth", "overflow"])
def test_blocks_of_two_optimizers_can_be_nested(level, factor):
    model = torch.nn.ModuleList([Scalar(), Scalar()])
    optimizers = [MOMENTUM([one.weight]) for one in model]
    oracle = Parameter(model[0].weight.detach().clone())
    scale = amp.DynamicLossScale(SCALE, growth_interval=1)
    amp.initialize(model, optimizers, opt_level=level, loss_scale=scale, verbosity=0)
    # The inner block changes the scale that the outer one began with.
    with amp.scale_loss(model[0](BATCHES[0]).float().sum(), optimizers[0]) as scaled_loss:
        run_block(model[1], optimizers[1], BATCHES[1], factor)
        scaled_loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    oracle.grad = BATCHES[0].clone()
    MOMENTUM([oracle]).step()
    assert param_bits(optimizers[0]) == [snapshot(oracle)]
    assert [amp.step_was_skipped(optimizer) for optimizer in optimizers] == [False, factor == INF]


class Interruption(BaseException):
    """As KeyboardInterrupt is, no Exception."""


PLACES = [(Scale, "scale"), (LossScaler, "new_found_inf"), (AmpOptimizer, "unscale")]  # begin, end, end


@LEVELS
@pytest.mark.parametrize("error", [ValueError, Interruption])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[1])
def test_a_block_whose_begin_or_end_raises_leaves_the_gradients_as_they_were(
    level, place, error, monkeypatch
):
    def fail(*_):
        raise error

    run = Beside(level, loss_scale=SCALE)
    run.run_block(BATCHES[0])
    with monkeypatch.context() as patch:
        patch.setattr(*place, fail)
        with pytest.raises(error):
            run.run_block(BATCHES[1])
    assert snapshot(run.grad) == snapshot(BATCHES[0])
    run.run_block(BATCHES[2])
    run.step(BATCHES[0] + BATCHES[2])


@LEVELS
def test_an_optimizer_that_is_refused_inside_its_other_block_holds_up_none_that_is_named_with_it(level):
    model = torch.nn.ModuleList([Scalar(), Scalar()])
    first, second = [MOMENTUM([one.weight]) for one in model]
    amp.initialize(model, [first, second], opt_level=level, loss_scale=SCALE, verbosity=0)
    losses = [one(BATCHES[0]).float().sum() for one in model]
    with amp.scale_loss(losses[1], second) as scaled_loss:
        with pytest.raises(amp.AmpError, match="is inside another block"):
            amp.scale_loss(sum(losses), [first, second]).__enter__()
        scaled_loss.backward()
    scaled_backward(losses[0], first)
    for optimizer in (first, second):
        (param,) = amp.master_params(optimizer)
        assert snapshot(param.grad) == snapshot(BATCHES[0])


EVERY_KIND = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
OPTIMIZERS = pytest.mark.parametrize("variant", [MOMENTUM, FUSED_ADAM], ids=str)


def uninitialize_in_block(run, batch, factor=1.0, **options):
    loss = run.model(batch).float().sum() * factor
    with amp.scale_loss(loss, run.optimizer, **options) as scaled_loss:
        scaled_loss.backward()
        amp.uninitialize()


def train_plainly(run, batches):
    """Goes on in plain torch, and compares with the float32 optimizer."""
    for batch in batches:
        run.optimizer.zero_grad()
        run.model(batch).sum().backward()
        run.optimizer.step()
        run.oracle.grad = batch.clone()
        run.by_hand.step()
        assert snapshot(run.model.weight) == snapshot(run.oracle)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@OPTIMIZERS
@pytest.mark.parametrize("where", ["in the block", "in a delayed block", "after it", "after it, read"])
def test_after_uninitialize_no_step_uses_what_would_have_been_skipped(level, variant, where, caplog):
    run = Beside(level, variant, verbosity=1)
    run.run_block(BATCHES[0])
    run.step(BATCHES[0])
    run.optimizer.zero_grad()
    if "in " in where:
        uninitialize_in_block(run, BATCHES[1], INF, delay_unscale="delayed" in where)
    else:
        run.run_block(BATCHES[1], INF)
        if "read" in where:
            list(amp.master_params(run.optimizer))
        amp.uninitialize()
    assert "had overflowed, and were dropped" in caplog.text
    run.optimizer.step()
    assert snapshot(run.model.weight) == snapshot(run.oracle)
    train_plainly(run, BATCHES)


@EVERY_KIND
def test_a_block_that_was_made_before_uninitialize_is_refused_after_it(level):
    run = Beside(level)
    block = amp.scale_loss(run.model(BATCHES[0]).float().sum(), run.optimizer)
    amp.uninitialize()
    with pytest.raises(amp.NotInitializedError, match=r"block of SGD was created: call amp\.init"), block:
        pass
    train_plainly(run, BATCHES)


@EVERY_KIND
def test_what_a_script_keeps_of_an_optimizer_brings_no_masters_back(level):
    run = Beside(level)
    zero_grad = run.optimizer.zero_grad
    amp.uninitialize()
    zero_grad()
    train_plainly(run, BATCHES)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_uninitialize_inside_of_a_scaled_backward_is_refused_and_undoes_nothing(level):
    run = Beside(level)
    run.model.weight.register_hook(lambda grad: amp.uninitialize())
    with pytest.raises(amp.AmpError, match=r"uninitialize\(\) was called inside of backward.*: call it"):
        run.run_block()
    run.model.weight._backward_hooks.clear()
    run.run_block()
    run.step(BATCHES[0])
