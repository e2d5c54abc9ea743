"""Small models, and what several test files do with them."""

import copy
import pickle

import torch
from torch import nn

import ampatch as amp
from helpers import scaled_backward

EVERY_LEVEL = ["O0", "O1", "O2", "O3", "O4", "O5"]
FULL = torch.float32
HALVES = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
MASTERED = {"O2": torch.float16, "O5": torch.bfloat16}
X = torch.tensor([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0], [0.5, 0.5, 2.0]])


class Net(nn.Module):
    """A layer and a buffer of every kind that casts must tell apart, in miniature."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.out = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor([1.1, 0.7]))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("angles", torch.tensor([0.3], dtype=torch.float64))
        self.register_buffer("waves", torch.tensor([0.3 + 1j]))

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.linear(x)))) * self.scale


def open_session(model, optimizer=None, opt_level="O5", **kwargs):
    amp.initialize(model, optimizer, opt_level=opt_level, **kwargs)
    return model


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def train(model, optimizer, x=X, steps=1):
    """A training loop, as users write it."""
    for _ in range(steps):
        optimizer.zero_grad()
        scaled_backward(model(x).float().pow(2).mean(), optimizer)
        optimizer.step()


def clone_state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_state(found, expected):
    """Same keys, same types, same bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype is value.dtype, name
        assert torch.equal(found[name], value), name


def make_trained():
    """A model and an optimizer with state and gradients, as in the middle of a training."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)
    model(X).sum().backward()
    optimizer.step()
    return model, optimizer


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}
