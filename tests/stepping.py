"""What tests of blocks and steps share: a product, a float32 optimizer by hand, and their bits."""

import pytest
import torch
from torch.nn import Parameter

import ampatch as amp
from helpers import Scalar, Variant, make_net, scaled_backward, snapshot

INF = float("inf")
HALF = {"O1": torch.float16, "O2": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}
LEVELS = pytest.mark.parametrize("level", ["O0", "O1", "O5"])
DYNAMIC_LEVELS = pytest.mark.parametrize("level", ["O1", "O5"])  # either half type, without masters and with
ADAM, FUSED_ADAM = Variant(torch.optim.Adam), Variant(torch.optim.Adam, {"fused": True})
MOMENTUM = Variant(torch.optim.SGD, {"momentum": 0.9})
FUSED_MOMENTUM = Variant(torch.optim.SGD, {"momentum": 0.9, "fused": True})
SCALE = 2.0**8
# Whole numbers: with a scale that is a power of two, no product or sum of theirs is rounded in any
# half type, so that the gradient of `run_block` is exactly batch * factor at every level.
BATCHES = [
    torch.tensor(batch) for batch in ([1.0, -2.0, 3.0], [4.0, 1.0, -1.0], [-2.0, 5.0, 2.0], [3.0, 3.0, 1.0])
]


def param_bits(optimizer):
    return [snapshot(param) for param in amp.master_params(optimizer)]


def run_block(model, optimizers, batch, factor=1.0, **options):
    loss = model(batch).float().sum() * factor
    scaled_backward(loss, optimizers, **options)


class Beside:
    """A product at some level, and beside it the same weight in a float32 optimizer, fed by hand."""

    def __init__(self, level, make_optimizer=MOMENTUM, loss_scale=None, shape=(3,), **options):
        self.model = Scalar(*shape)
        self.optimizer = make_optimizer(self.model.parameters())
        self.oracle = Parameter(self.model.weight.detach().clone())
        self.by_hand = make_optimizer([self.oracle])
        options = {"verbosity": 0, "loss_scale": loss_scale or amp.DynamicLossScale(SCALE)} | options
        amp.initialize(self.model, self.optimizer, opt_level=level, **options)

    @property
    def grad(self):
        """The gradient that the optimizer steps."""
        return next(amp.master_params(self.optimizer)).grad

    def run_block(self, batch=BATCHES[0], factor=1.0, **options):
        run_block(self.model, self.optimizer, batch, factor, **options)

    def raise_in_block(self, batch=BATCHES[1], error=ValueError):
        def run():
            with amp.scale_loss(self.model(batch).float().sum(), self.optimizer) as scaled_loss:
                scaled_loss.backward()
                raise error("no more")

        with pytest.raises(error, match="no more"):
            run()

    def step_by_hand(self, grad):
        """Steps the weight by hand with this gradient, and compares with what the optimizer did."""
        self.oracle.grad = grad.clone()
        self.by_hand.step()
        assert param_bits(self.optimizer) == [snapshot(self.oracle)]

    def step(self, grad):
        self.optimizer.step()
        assert not amp.step_was_skipped(self.optimizer)
        self.step_by_hand(grad)

    def skip(self):
        before = param_bits(self.optimizer)
        self.optimizer.step()
        assert amp.step_was_skipped(self.optimizer)
        assert param_bits(self.optimizer) == before


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
    scaled_backward(loss, optimizer)
    optimizer.step()
    return loss.detach()
