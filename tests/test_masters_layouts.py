"""Masters in whatever layout of memory the model has."""

import copy

import pytest
import torch
from torch.nn import Parameter

import ampatch as amp
from helpers import Dense, Variant, make_batches
from mastering import HALF, LEVELS, SCALE, backward, train


class Convolve(torch.nn.Module):
    """A weight whose layouts differ, in a product whose gradients have the layout of the batch."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, bias=False)

    def forward(self, batch):
        return self.conv(batch)


def to_channels_last(model, optimizer):
    model.to(memory_format=torch.channels_last)


def set_data(model, optimizer):
    weight = model.conv.weight
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)


def assign_state(model, optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    for one in state["state"].values():
        one.update(
            (name, value.contiguous(memory_format=torch.channels_last))
            for name, value in one.items()
            if torch.is_tensor(value) and value.dim() == 4
        )
    optimizer.load_state_dict(state)


def hand_over_gradient(model, optimizer):
    weight = model.conv.weight
    weight.register_hook(lambda grad: grad.contiguous(memory_format=torch.channels_last))


CHANGES = [to_channels_last, set_data, assign_state, hand_over_gradient]
FUSED = [
    Variant(torch.optim.Adam, {"fused": True, "amsgrad": True}),
    Variant(torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    Variant(torch.optim.Adagrad, {"fused": True}),
]


def train_convolution(level, variant, change, when, **options):
    """Trains with a change of layout before the step `when`; returns masters and optimizer state."""
    torch.manual_seed(0)
    model = Convolve()
    optimizer = Variant(variant.kind, variant.options | options)(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)
    for step in range(5):
        if step == when:
            change(model, optimizer)
        optimizer.zero_grad()
        for _ in range(2):
            backward(model, optimizer, torch.randn(2, 3, 6, 6))
        optimizer.step()
    params = [param.detach().clone() for param in amp.master_params(optimizer)]
    state = [{**optimizer.state[param]} for param in amp.master_params(optimizer)]
    amp.uninitialize()
    return params, state


@pytest.mark.exhaustive(keep=24)
@pytest.mark.parametrize(("level", "when"), [("O2", 0), ("O5", 2)])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("variant", FUSED, ids=str)
def test_a_fused_optimizer_steps_masters_in_whatever_layout_the_model_has(level, variant, change, when):
    expected = train_convolution(level, variant, change, when, fused=False, foreach=False)
    found = train_convolution(level, variant, change, when)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


ODD = {
    "transposed": lambda: torch.randn(4, 3).t(),
    "with gaps": lambda: torch.randn(3, 8)[:, ::2],
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
}


@LEVELS
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
@pytest.mark.parametrize("variant", FUSED, ids=str)
def test_a_fused_optimizer_steps_masters_of_weights_that_do_not_fill_their_memory(level, variant, make):
    def run(lay_out, **options):
        torch.manual_seed(0)
        model = Dense()
        model.first.weight = Parameter(lay_out(make()))
        optimizer = Variant(variant.kind, variant.options | options)(model.parameters())
        amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)
        train(model, optimizer, make_batches(variant, 3))
        found = copy.deepcopy(list(amp.master_params(optimizer)))
        amp.uninitialize()
        return found, list(model.parameters())

    expected = run(torch.Tensor.contiguous, fused=False, foreach=False)
    torch.testing.assert_close(run(lambda weight: weight), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", [*HALF, "O3"])
def test_a_gradient_that_is_there_at_uninitialize_has_the_layout_of_its_weight(level):
    model = Convolve()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    amp.initialize(model, optimizer, opt_level=level, master_weights=level != "O3", verbosity=0)
    model.to(memory_format=torch.channels_last)
    model(torch.ones(2, 3, 6, 6)).sum().backward()
    amp.uninitialize()
    weight = model.conv.weight
    assert weight.grad.stride() == weight.stride()
    expected = weight.detach() - 0.5 * weight.grad
    optimizer.step()
    assert torch.equal(weight, expected)
