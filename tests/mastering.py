"""What tests of masters share: a float32 optimizer fed by hand, a model beside it."""

import io

import pytest
import torch
from torch.nn import Parameter
from torch.nn.functional import embedding, linear

import ampatch as amp
from helpers import Variant, make_net, scaled_backward, snapshot

HALF = {"O2": torch.float16, "O5": torch.bfloat16}
LEVELS = pytest.mark.parametrize("level", list(HALF))
ADAM = Variant(torch.optim.Adam, {"weight_decay": 0.1})
MOMENTUM = Variant(torch.optim.SGD, {"momentum": 0.9})
SCALE = 2.0**7


class ByHand:
    """A float32 optimizer, fed with the gradients of half copies that are made anew each iteration."""

    def __init__(self, weights, make_optimizer, half, scale=SCALE):
        self.masters = [Parameter(weight.detach().clone()) for weight in weights]
        self.optimizer = make_optimizer(self.masters)
        self.half, self.scale = half, scale

    def compute(self, halves, batch):
        if len(halves) == 1:
            return embedding(batch, halves[0], sparse=True)
        return linear(torch.relu(linear(batch.to(self.half), halves[0])), halves[1])

    def backward(self, batch):
        halves = [master.detach().to(self.half).requires_grad_() for master in self.masters]
        loss = self.compute(halves, batch).float().square().mean()
        (loss * self.scale).backward()
        for master, half in zip(self.masters, halves, strict=True):
            grad = half.grad.float() / self.scale
            master.grad = grad if master.grad is None else master.grad + grad
        return loss.detach()

    def iterate(self, batch):
        def closure():
            self.optimizer.zero_grad()
            return self.backward(batch)

        if isinstance(self.optimizer, torch.optim.LBFGS):
            return self.optimizer.step(closure)
        loss = closure()
        self.optimizer.step()
        return loss

    def train(self, batches):
        return [self.iterate(batch) for batch in batches]


def backward(model, optimizer, batch, **options):
    loss = model(batch).square().mean()
    scaled_backward(loss, optimizer, **options)
    return loss.detach()


def iterate(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        return backward(model, optimizer, batch)

    if isinstance(optimizer, torch.optim.LBFGS):
        return optimizer.step(closure)
    loss = closure()
    optimizer.step()
    return loss


def train(model, optimizer, batches):
    return [iterate(model, optimizer, batch) for batch in batches]


def open_both(level, variant=ADAM, scale=SCALE, dynamic=None, **options):
    """A model and its optimizer at a level, and the same weights in a float32 optimizer."""
    model = make_net(variant)
    optimizer = variant(model.parameters())
    by_hand = ByHand(list(model.parameters()), variant, HALF[level], scale)
    if dynamic or (dynamic is None and level == "O2" and not variant.needs_closure):
        scale = amp.DynamicLossScale(scale)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0, **options)
    return model, optimizer, by_hand


def optimizer_bits(optimizer):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [snapshot(optimizer.state[param]) for param in params if param in optimizer.state]


def saved(value):
    """What a checkpoint file holds, read back."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def all_state(model, optimizer, *more):
    return [model.state_dict(), optimizer.state_dict(), amp.state_dict(), *[one.state_dict() for one in more]]


def train_plainly(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
