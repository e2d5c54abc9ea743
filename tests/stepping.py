"""What tests of blocks and steps share: a product, a float32 optimizer by hand, and their bits."""

import pytest
import torch
from torch.nn import Parameter

import ampatch as amp
from helpers import (
    Scalar,
    Variant,
    make_net,
    snapshot,
)

INF = float("inf")
HALF = {"O1": torch.float16, "O2": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}
FLOAT32_LEVELS = ["O0", "O1", "O4"]  # whose parameters are float32 themselves
LEVELS = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
DYNAMIC_LEVELS = pytest.mark.parametrize("level", list(HALF))
ADAM, FUSED_ADAM = Variant(torch.optim.Adam), Variant(torch.optim.Adam, {"fused": True})
MOMENTUM = Variant(torch.optim.SGD, {"momentum": 0.9})
FUSED_MOMENTUM = Variant(torch.optim.SGD, {"momentum": 0.9, "fused": True})
SCALE = 2.0**8
# Whole numbers: with a scale that is a power of two, no product or sum of theirs is rounded in any
# half type, so that the gradient of `run_block` is exactly batch * factor at every level.
BATCHES = [
    torch.tensor(batch) for batch in ([1.0, -2.0, 3.0], [4.0, 1.0, -1.0], [-2.0, 5.0, 2.0], [3.0, 3.0, 1.0])
]


def open_scalar(level, make_optimizer=MOMENTUM, loss_scale=None, shape=(3,), **options):
    """A product at some level, and the same weight in a float32 optimizer."""
    model = Scalar(*shape)
    optimizer = make_optimizer(model.parameters())
    oracle = Parameter(model.weight.detach().clone())
    oracle_optimizer = make_optimizer([oracle])
    scale = loss_scale or amp.DynamicLossScale(SCALE)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, **{"verbosity": 0, **options})
    return model, optimizer, oracle, oracle_optimizer


def run_block(model, optimizers, batch, factor=1.0, **options):
    loss = model(batch).float().sum() * factor
    with amp.scale_loss(loss, optimizers, **options) as scaled_loss:
        scaled_loss.backward()


def run_block_that_raises(model, optimizer, batch, error=ValueError):
    with amp.scale_loss(model(batch).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        raise error("no more")


def step_by_hand(oracle, optimizer, *grads):
    oracle.grad = sum(grads)
    optimizer.step()


def param_bits(optimizer):
    return [snapshot(param) for param in amp.master_params(optimizer)]


def all_bits(model, optimizer):
    """Parameters of model and optimizer, and the whole state of the optimizer."""
    params = list(amp.master_params(optimizer))
    states = [snapshot(optimizer.state[param]) if param in optimizer.state else None for param in params]
    options = [{**group, "params": None} for group in optimizer.param_groups]
    return (
        snapshot(list(model.parameters())),
        snapshot(params),
        states,
        snapshot(options),
        len(optimizer.state),
    )


def open_net(level, variant, scale=SCALE, weights=None):
    model = make_net(variant)
    if weights is not None:
        model.load_state_dict(weights)
    optimizer = variant(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=amp.DynamicLossScale(scale), verbosity=0)
    return model, optimizer


def run_iteration(model, optimizer, batch, factor=1.0):
    optimizer.zero_grad()
    loss = model(batch).float().square().mean() * factor
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return loss.detach()
