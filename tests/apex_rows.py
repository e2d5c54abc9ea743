"""Which rows of docs/apex-behaviour.md a test shows, and small nets as legacy scripts have them."""

from contextlib import contextmanager

import torch
from torch import nn

from ampatch.apex import amp

X = torch.tensor([[0.5, -1.0, 0.25, 2.0], [1.5, 0.5, -0.75, 1.0], [0.25, 1.0, 0.5, -0.5]])
MASTERED = {"O2": torch.float16, "O5": torch.bfloat16}
PATCHED = {"O1": torch.float16, "O4": torch.bfloat16}
CAST = {**MASTERED, "O3": torch.float16}
EVERY_LEVEL = ["O0", "O1", "O2", "O3", "O4", "O5"]
INF = float("inf")


def shows(*rows):
    """Names the rows of the page that a test shows."""

    def mark(test):
        test.rows = rows
        return test

    return mark


class Net(nn.Module):
    """Two layers with BatchNorm between, as in a hundred scripts."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


class Recorder(nn.Module):
    """Keeps what its forward was given, and gives something back."""

    def __init__(self, result=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.result, self.args, self.kwargs = result, (), {}

    def forward(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        return self.weight.sum() if self.result is None else self.result


def make(lr=0.1, make_optimizer=torch.optim.SGD, **kwargs):
    """A net and its optimizer, not initialized yet."""
    net = Net()
    return net, make_optimizer(net.parameters(), lr=lr, **kwargs)


def initialized(level="O1", make_optimizer=torch.optim.SGD, net=None, lr=0.1, **kwargs):
    """A net and its optimizer, initialized."""
    net = Net() if net is None else net
    optimizer = make_optimizer(net.parameters(), lr=lr)
    return amp.initialize(net, optimizer, opt_level=level, verbosity=0, **kwargs)


def loss_of(net, x=X):
    return net(x).float().pow(2).mean()


def backward(net, optimizer, factor=1.0, x=X, **kwargs):
    """The backward of a loss times a factor, in a block of `scale_loss`."""
    with amp.scale_loss(loss_of(net, x) * factor, optimizer, **kwargs) as scaled_loss:
        scaled_loss.backward()


def step(net, optimizer, factor=1.0, **kwargs):
    """One iteration but for clearing the gradients."""
    backward(net, optimizer, factor, **kwargs)
    optimizer.step()


def scaler_state(loss_id=0):
    return amp.state_dict()[f"loss_scaler{loss_id}"]


def set_scale(value):
    """Assigns the scale as scripts do."""
    amp._amp_state.loss_scalers[0]._loss_scale = value


def copy_of(net):
    """The values of a net's parameters, in float32."""
    return [param.detach().clone().float() for param in net.parameters()]


def types_of(net):
    return [param.dtype for param in net.parameters()]


def is_same(found, expected):
    """Whether tensors agree bit by bit, and in type."""
    pairs = list(zip(found, expected, strict=True))
    return all(one.dtype is two.dtype and torch.equal(one, two) for one, two in pairs)


@contextmanager
def unchanged(*nets):
    """Fails if a block changes the weights of a net."""
    before = [copy_of(net) for net in nets]
    yield
    assert all(is_same(copy_of(net), weights) for net, weights in zip(nets, before, strict=True))


@contextmanager
def changed(*nets):
    """Fails unless a block changes the weights of every net."""
    before = [copy_of(net) for net in nets]
    yield
    assert not any(is_same(copy_of(net), weights) for net, weights in zip(nets, before, strict=True))
