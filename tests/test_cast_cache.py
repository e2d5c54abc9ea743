"""The cast cache: one cast a weight and iteration."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex_rows import shows
from caching import MODES, WITHOUT_GRAD, CountCasts, Tied, backward, open_session, open_training

ONES = torch.ones(2, 3)


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_is_cast_once_for_the_uses_of_a_forward_and_an_input_each_time(mode):
    model = open_session(Tied())
    with mode(), CountCasts() as casts, CountCasts(2, 3) as inputs:
        model(ONES)
        assert casts.count == 1
        model(ONES)
    assert inputs.count == 2


@shows("o1-one-gradient")
def test_several_uses_and_forwards_add_up_to_one_gradient():
    model = Tied()
    reference = copy.deepcopy(model)
    x = torch.randn(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = reference(x).sum() + reference(2 * x).sum()
    loss.backward()
    open_session(model)
    (model(x).sum() + model(2 * x).sum()).backward()
    assert model.weight.grad.dtype is torch.float32
    assert torch.equal(model.weight.grad, reference.weight.grad)


# ---- Iterations ----


def count_casts(run, *shape, times=2):
    """How often a weight is cast in each of several iterations."""
    counts = []
    for _ in range(times):
        with CountCasts(*shape) as casts:
            run()
        counts.append(casts.count)
    return counts


def several_forwards(model, optimizer):
    backward(model(ONES).sum() + model(ONES).sum(), optimizer)


def accumulated(model, optimizer):
    for _ in range(3):
        backward(model(ONES).sum(), optimizer)


def checkpointed(reentrant):
    def iterate(model, optimizer):
        x = ONES.clone().requires_grad_()
        backward(checkpoint(model, x, use_reentrant=reentrant).sum(), optimizer)

    return iterate


def evaluated_between_forwards(mode):
    def iterate(model, optimizer):
        loss = model(ONES).sum()
        with mode():
            model(ONES)
        backward(loss + model(ONES).sum(), optimizer)

    return iterate


def evaluated_before(mode):
    def iterate(model, optimizer):
        for _ in range(3):
            with mode():
                model(ONES)
        backward(model(ONES).sum(), optimizer)

    return iterate


ITERATIONS = {
    "several forwards": several_forwards,
    "accumulated": accumulated,
    "checkpointed, reentrant": checkpointed(True),
    "checkpointed": checkpointed(False),
    **{f"evaluated between, {mode.__name__}": evaluated_between_forwards(mode) for mode in WITHOUT_GRAD},
    **{f"evaluated before, {mode.__name__}": evaluated_before(mode) for mode in WITHOUT_GRAD},
}


@shows("o1-cache")
@pytest.mark.parametrize("name", ITERATIONS)
def test_a_weight_is_cast_once_an_iteration(name):
    model = Tied()
    optimizer = open_training(model)

    def iterate():
        ITERATIONS[name](model, optimizer)
        assert model.weight.grad is not None
        optimizer.step()
        optimizer.zero_grad()

    assert count_casts(iterate, times=3) == [1, 1, 1]


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_backbone_is_cast_once_before_a_head_that_trains(mode):
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = Tied().requires_grad_(False), nn.Linear(3, 2)

        def forward(self, x):
            with mode():
                features = self.backbone(x) + self.backbone(2 * x)
            return self.head(features.clone())

    model = Frozen()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    open_session(model, optimizer)

    def iterate():
        backward(model(ONES).sum(), optimizer)
        optimizer.step()

    assert count_casts(iterate, times=3) == [1, 0, 0]
