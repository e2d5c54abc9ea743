"""Optimizers that a trainer wraps after `initialize`: whoever is given the wrapper finds the one inside."""

import pytest
import torch
from torch import nn

import ampatch as amp
from helpers import Dense, scaled_backward, snapshot


class Delegates(torch.optim.Optimizer):
    """Derives from Optimizer without its `__init__`, and hands everything on, as Accelerate's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none=set_to_none)


class Imitates:
    """Becomes a class of the optimizer's own, and has its attributes, as Lightning's."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Imitation", (Imitates, type(optimizer)), {})

    def step(self, closure=None):
        return self._optimizer.step(closure)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


class Holds:
    """Derives from nothing."""

    def __init__(self, optimizer):
        self.optim = optimizer

    def __getattr__(self, name):
        return getattr(self.optim, name)


WRAPPERS = {
    "derived": Delegates,
    "imitation": Imitates,
    "twice": lambda optimizer: Delegates(Imitates(optimizer)),
    "twice, of no class that torch knows": lambda optimizer: Holds(Holds(optimizer)),
}
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


def make_pair():
    torch.manual_seed(0)
    model = Dense()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer):
    """Trains with an overflow in the second step; returns which steps were skipped."""
    skipped = []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        loss = model(torch.linspace(-1, 1, 20).view(5, 4)).float().square().mean() * factor
        scaled_backward(loss, optimizer)
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
    return skipped


def trained(level, wrap, *, before):
    """Returns the weights of a net whose optimizer is wrapped before or after `initialize`, and the skips."""
    model, optimizer = make_pair()
    optimizer = wrap(optimizer) if before else optimizer
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    optimizer = optimizer if before else wrap(optimizer)
    skipped = train(model, optimizer)
    assert len(amp.backward_outcomes(optimizer)) == 1
    assert bool(list(amp.master_pairs(optimizer))) == (level in ("O2", "O5"))
    amp.uninitialize()
    return [snapshot(param) for param in model.parameters()], skipped


@pytest.mark.exhaustive(keep=8)
@each_wrapper
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_wrapped_optimizer_trains_as_the_one_inside(level, before, wrap):
    expected = trained(level, lambda optimizer: optimizer, before=False)
    assert expected[1] == [False, True, False]
    assert trained(level, wrap, before=before) == expected


@each_wrapper
def test_a_wrapper_of_an_optimizer_that_nobody_gave_is_refused(wrap):
    amp.initialize(*make_pair(), verbosity=0)
    with pytest.raises(amp.AmpValueError, match="is not one that initialize"):
        amp.scale_loss(torch.ones(()), wrap(make_pair()[1]))


@each_wrapper
def test_a_watch_finds_the_steps_of_a_wrapped_optimizer(wrap):
    model, optimizer = make_pair()
    with amp.diagnose.watch(model, wrap(optimizer)) as patient:
        for _ in range(2):
            model(torch.full((5, 4), float("inf"))).sum().backward()
            optimizer.step()
    assert patient.findings
