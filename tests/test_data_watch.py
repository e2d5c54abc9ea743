"""Writes to weights through `.data`, which leave no trace on the tensor itself."""

import pytest
import torch
from torch import nn

import ampatch as amp

X = torch.ones(2, 3)


def open_model(level):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return model, optimizer


def train(model, optimizer):
    with amp.scale_loss(model(X).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_weights_that_are_clipped_through_data_after_each_step_stay_clipped(level):
    model, optimizer = open_model(level)
    oracle, oracle_optimizer = nn.Linear(3, 3), None
    oracle.load_state_dict(model.state_dict())
    oracle_optimizer = torch.optim.SGD(oracle.parameters(), lr=0.5)
    for _ in range(3):
        train(model, optimizer)
        oracle(X).sum().backward()
        oracle_optimizer.step()
        oracle_optimizer.zero_grad()
        for param in [*model.parameters(), *oracle.parameters()]:
            param.data.clamp_(-0.25, 0.25)  # a number that every half type holds
    for saved, expected in zip(model.state_dict().values(), oracle.state_dict().values(), strict=True):
        assert torch.equal(saved, expected)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_write_through_data_between_two_forwards_of_one_iteration_is_seen(level):
    model, _ = open_model(level)
    first = model(X)
    model.weight.data.zero_()
    model.bias.data.zero_()
    second = model(X)
    assert first.abs().sum() > 0
    assert second.abs().sum() == 0


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_master_keeps_its_precision_where_data_is_only_read(level):
    model, optimizer = open_model(level)
    before = [param.clone() for param in amp.master_params(optimizer)]
    assert not torch.equal(before[0], before[0].to(model.weight.dtype).float())
    norms = [param.data.float().norm() for param in model.parameters()]
    optimizer.step()
    assert all(norms)
    for param, earlier in zip(amp.master_params(optimizer), before, strict=True):
        assert torch.equal(param, earlier)


def test_parameters_are_plain_torchs_after_uninitialize():
    assert "data" not in vars(nn.Parameter)
    open_model("O2")
    assert "data" in vars(nn.Parameter)
    amp.uninitialize()
    assert "data" not in vars(nn.Parameter)
