"""Activation checkpointing: gradients bit-equal to those without it, whatever is inside."""

import functools
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import ampatch as amp
from apex_rows import shows
from helpers import assert_same_bits

LEVELS = pytest.mark.parametrize("level", ["O1", "O5"])  # one that patches and one that casts the model
REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
aten = torch.ops.aten


class Net(nn.Module):
    """Runs its middle part through `around`, with one weight used twice in it."""

    def __init__(self, around=None):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(3, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(8, 2)
        self.around = around or (lambda function, *args: function(*args))

    def middle(self, x):
        x = torch.softmax(self.norm(nn.functional.gelu(self.second(x))), -1)
        # A kept norm returns float32, which torch multiplies by no half weight.
        return self.drop(x.to(self.second.weight.dtype) @ self.second.weight)

    def forward(self, x):
        return self.last(self.around(self.middle, self.first(x)))


def measure(level, around=None, make=Net, backward=None, **kwargs):
    """Two steps of training; the gradients that both made, and the weights afterwards."""
    torch.manual_seed(0)
    model = make(around)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0, **kwargs)
    x = torch.randn(4, 3, requires_grad=True)
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        optimizer.zero_grad()
        with amp.scale_loss(model(x).float().pow(2).mean(), optimizer) as loss:
            (backward or torch.Tensor.backward)(loss)
        found += [item.grad.clone() for item in [*model.parameters(), x] if item.grad is not None]
        optimizer.step()
    found += [param.detach().clone() for param in model.parameters()]
    amp.uninitialize()
    return found


def recompute(reentrant, **kwargs):
    return functools.partial(checkpoint, use_reentrant=reentrant, **kwargs)


class WithoutDropout(Net):
    def __init__(self, around=None):
        super().__init__(around)
        self.drop = nn.Identity()


class Uncast(Net):
    def middle(self, x):
        with amp.disable_casts():
            x = nn.functional.linear(x.float(), self.second.weight.float())
        return torch.exp(-self.second(x.to(self.second.weight.dtype)))


class Around(Net):
    def forward(self, x):
        with amp.disable_casts():
            x = self.around(self.middle, self.first(x))
        return self.last(x)


class Sequence(nn.Module):
    def __init__(self, around=None):
        super().__init__()
        parts = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.GELU()) for _ in range(4)]
        self.parts, self.around = nn.Sequential(*parts), around

    def forward(self, x):
        if self.around is None:
            return self.parts(x)
        return checkpoint_sequential(self.parts, 2, x, **self.around.keywords)


def backward_uncast(loss):
    with amp.disable_casts():
        loss.backward()


# What the model is, and how the run with checkpoints differs from the one without.
CASES = {
    "dropout": ({}, {}, {}),
    "random state not kept": ({"make": WithoutDropout}, {"preserve_rng_state": False}, {}),
    # At O2 and O5 it has to hand on float32, at O1 and O4 to leave the casts around it where they are.
    "a kept module": ({"keep_fp32": ["norm"]}, {}, {}),
    "casts off inside": ({"make": Uncast}, {}, {}),
    "casts off around": ({"make": Around}, {}, {}),
    "casts off in backward": ({}, {}, {"backward": backward_uncast}),
    "a sequence with batch norms": ({"make": Sequence}, {}, {}),
}


@shows("patterns-reversible")
@pytest.mark.exhaustive(keep=9)
@LEVELS
@REENTRANT
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_without_it(name, reentrant, level):
    options, checkpoint_options, more = CASES[name]
    found = measure(level, recompute(reentrant, **checkpoint_options), **options, **more)
    assert_same_bits(found, measure(level, **options))


class Nested(Net):
    def __init__(self, around=None, inner=None):
        super().__init__(around)
        self.inner = inner or self.around

    def middle(self, x):
        x = self.inner(lambda y: torch.tanh(self.second(y)).exp(), x)
        return torch.softmax(self.second(x), -1)


@LEVELS
@REENTRANT
@pytest.mark.parametrize("inner", [True, False], ids=["reentrant inside", "not reentrant inside"])
def test_one_inside_another(reentrant, inner, level):
    make = functools.partial(Nested, inner=recompute(inner))
    # Reentrant ones run backward in parts, which add to a weight that several parts use in another order.
    found, expected = measure(level, recompute(reentrant), make), measure(level, make=Nested)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
    if not reentrant and not inner:
        assert_same_bits(found, expected)


def gradients_of(call, level, make):
    """The gradients that one backward makes of what `call(model, x)` returns."""
    torch.manual_seed(0)
    model = make()
    amp.initialize(model, opt_level=level, verbosity=0)
    x = torch.randn(4, 3, requires_grad=True)
    call(model, x).float().pow(2).mean().backward()
    found = [item.grad.clone() for item in [*model.parameters(), x]]
    amp.uninitialize()
    return found


@LEVELS
@REENTRANT
def test_a_whole_model_that_is_called_twice_in_it(reentrant, level):
    def in_a_checkpoint(model, x):
        return checkpoint(lambda x: model(torch.tanh(model(x))), x, use_reentrant=reentrant)

    def make():
        return nn.Linear(3, 3)

    expected = gradients_of(lambda model, x: model(torch.tanh(model(x))), level, make)
    assert_same_bits(gradients_of(in_a_checkpoint, level, make), expected)


# What plain torch says of a reentrant one without grad mode.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@LEVELS
@REENTRANT
def test_evaluations_between_forward_and_backward_do_not_matter(reentrant, level):
    def evaluate_between(model, x):
        output = model(x)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                model(x)
        return output

    found = gradients_of(evaluate_between, level, lambda: WithoutDropout(recompute(reentrant)))
    assert_same_bits(found, gradients_of(evaluate_between, level, WithoutDropout))


def save_products(context, op, *args, **kwargs):
    if op in (aten.mm.default, aten.addmm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


POLICIES = {
    "products are saved": save_products,
    "casts are saved": [aten._to_copy.default],
    "all is recomputed": [],
}


@LEVELS
@pytest.mark.parametrize("policy", POLICIES)
def test_selective_checkpointing(policy, level):
    """It counts operations in both runs: casts of weights that were in the cache the first time, too."""
    contexts = functools.partial(create_selective_checkpoint_contexts, POLICIES[policy])
    found = measure(level, recompute(False, context_fn=contexts), WithoutDropout)
    assert_same_bits(found, measure(level, make=WithoutDropout))


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_selective_checkpointing_of_a_weight_that_was_cast_before(level):
    """The recomputation finds no cast in the cache, and the forward must not have found one either."""

    class Tied(WithoutDropout):
        def forward(self, x):
            x = torch.tanh(self.second(self.first(x)))
            return self.last(self.around(self.middle, x))

    def backward(loss):
        amp.clear_cache()
        loss.backward()

    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    found = measure(level, recompute(False, context_fn=contexts), Tied, backward)
    expected = measure(level, make=Tied)
    for ours, theirs in zip(found, expected, strict=True):
        # The weight is cast twice, so that its two gradients are added in float32, not in half.
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)


@LEVELS
def test_no_reference_to_the_calls_of_a_recomputation_stays(level):
    """A frame that is kept would keep every tensor of that call."""
    marker = torch.nn.Module()
    alive = weakref.ref(marker)

    class Holds(WithoutDropout):
        def forward(self, x, marker):
            return self.last(self.around(lambda y, marker: self.middle(y), self.first(x), marker))

    model = Holds(recompute(False))
    amp.initialize(model, opt_level=level, verbosity=0)
    gc.collect()
    gc.disable()
    try:
        model(torch.randn(4, 3), marker).float().sum().backward()
        del marker
        assert alive() is None
    finally:
        gc.enable()
