"""A half net, optimizers inside FP16_Optimizer, and a loop that trains them."""

import itertools
import sys
import types
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

import ampatch as amp
from ampatch.apex.fp16_utils import FP16_Optimizer, network_to_half
from helpers import snapshot

HALF, FLOAT, BF16 = torch.float16, torch.float32, torch.bfloat16
OPTIMIZERS = {
    "SGD": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD, fused": (SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adam, foreach": (Adam, {"lr": 0.01, "foreach": True, "amsgrad": True}),
    "AdamW, fused": (AdamW, {"lr": 0.01, "fused": True}),
}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def make_net():
    """Half linear layers with a float32 BatchNorm between them."""
    torch.manual_seed(0)
    return network_to_half(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))


def make(name="SGD", **options):
    net = make_net()
    kind, arguments = OPTIMIZERS[name]
    return net, FP16_Optimizer(kind(net.parameters(), **arguments), **options)


def batches(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(16, 4, generator=generator)
        yield x, x[:, :3].argmax(1)


def loss_of(net, x, y):
    return F.cross_entropy(net(x).float(), y)


def backward(net, optimizer, **kwargs):
    """The backward pass of a loss, always of the same batch."""
    optimizer.backward(loss_of(net, *next(batches(1))), **kwargs)


def evaluate(net, optimizer, batch, factor=1.0):
    """What closures do: clears the gradients, makes those of a loss, and returns it."""
    optimizer.zero_grad()
    loss = loss_of(net, *batch)
    optimizer.backward(loss * factor)
    return loss.detach()


def train(net, optimizer, data):
    for batch in data:
        evaluate(net, optimizer, batch)
        optimizer.step()


def overflow(net, optimizer):
    """Runs a backward pass whose gradients are not finite."""
    evaluate(net, optimizer, next(batches(1)), float("inf"))


def states(optimizer):
    """The state of each parameter in bits, in the order of the parameters."""
    return [snapshot(optimizer.state.get(param)) for param in amp.master_params(optimizer)]


def freeze(net, optimizer):
    """Everything that a step changes, in bits."""
    return snapshot([list(net.parameters()), optimizer.param_groups]), states(optimizer)


@contextmanager
def names_of_apex(monkeypatch, module, name, values):
    """Has a class of apex in its place, to save and load an object of it, which is yielded."""
    kind = type(name, (), {"__module__": module})
    item = kind()
    vars(item).update(values)
    with monkeypatch.context() as patch:
        for parent in itertools.accumulate(module.split("."), "{}.{}".format):
            patch.setitem(sys.modules, parent, types.ModuleType(parent))
        setattr(sys.modules[module], name, kind)
        yield item
