"""Writes to weights through `.data`, which leave no trace on the tensor itself."""

import numpy as np
import pytest
import torch
from torch import nn

import ampatch as amp
from patched import backward, start

X = torch.ones(2, 3)


def open_model(level):
    return start(level, nn.Linear(3, 3), lr=0.5)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_weights_that_are_clipped_through_data_after_each_step_stay_clipped(level):
    model, optimizer = open_model(level)
    oracle = nn.Linear(3, 3)
    oracle.load_state_dict(model.state_dict())
    oracle_optimizer = torch.optim.SGD(oracle.parameters(), lr=0.5)
    for _ in range(3):
        backward(model(X).float().sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        oracle(X).sum().backward()
        oracle_optimizer.step()
        oracle_optimizer.zero_grad()
        for param in [*model.parameters(), *oracle.parameters()]:
            param.data.clamp_(-0.25, 0.25)  # a number that every half type holds
    for saved, expected in zip(model.state_dict().values(), oracle.state_dict().values(), strict=True):
        assert torch.equal(saved, expected)


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


def read_halves(model, optimizer):
    assert all(param.data.float().norm() for param in model.parameters())


def read_masters(model, optimizer):
    assert all(param.data.norm() for param in amp.master_params(optimizer))


def clip(params, through_data):
    for param in params:
        if through_data:
            param.data.clamp_(-0.25, 0.25)
        else:
            with torch.no_grad():
                param.clamp_(-0.25, 0.25)


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("order", ["read, write", "write, read"])
@pytest.mark.parametrize("read", [read_halves, read_masters])
@pytest.mark.parametrize("through_data", [True, False])
def test_a_write_counts_whatever_was_read_before_or_after_it(level, order, read, through_data):
    model, optimizer = open_model(level)
    for _ in range(3):
        backward(model(X).float().sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if order == "read, write":
            read(model, optimizer)
        clip(amp.master_params(optimizer) if read is read_halves else model.parameters(), through_data)
        if order == "write, read":
            read(model, optimizer)
    assert all(param.abs().max() <= 0.25 for param in model.state_dict().values())
    model(X)
    assert all(param.abs().max() <= 0.25 for param in model.parameters())


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_master_params_show_what_was_written_into_the_model_and_keep_what_is_written_afterwards(level):
    model, optimizer = open_model(level)
    with torch.no_grad():
        model.weight.fill_(0.5)
        assert next(amp.master_params(optimizer)).eq(0.5).all()
        model(X)
        next(amp.master_params(optimizer)).fill_(0.25)
    optimizer.step()
    assert next(amp.master_params(optimizer)).eq(0.25).all()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_was_written_into_a_master_is_in_its_data(level):
    model, optimizer = open_model(level)
    master = next(amp.master_params(optimizer))
    with torch.no_grad():
        master.fill_(0.25)
    assert master.data.eq(0.25).all()
    model(X)
    assert model.weight.eq(0.25).all()


READERS = {
    "numpy": lambda weight: weight.detach().numpy(),
    "asarray": lambda weight: np.asarray(weight.detach()),
    "a row": lambda weight: weight.detach()[1:].numpy(),
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()),
    "capsule": lambda weight: torch.from_dlpack(torch.to_dlpack(weight.detach())),
    "capsule of utils": lambda weight: torch.from_dlpack(torch.utils.dlpack.to_dlpack(weight.detach())),
}


@pytest.mark.parametrize("is_held", [False, True], ids=["dropped", "held"])
@pytest.mark.parametrize("name", READERS)
def test_a_write_through_an_array_between_two_forwards_is_seen(name, is_held):
    model, _ = open_model("O4")
    read = READERS[name]
    array = read(model.weight) if is_held else None
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for value in (0.0, 2.0, -1.0):
            with mode():
                model(X)
            (array if is_held else read(model.weight))[:] = value
            with mode():
                result = model(X)
            oracle = X @ model.weight.detach().T + model.bias.detach()
            torch.testing.assert_close(result.float(), oracle, rtol=0.01, atol=0.01)


def test_arrays_are_made_as_before_while_numpy_is_watched():
    values = {dtype: torch.arange(3).to(dtype) for dtype in (torch.float32, torch.int64, torch.bool)}
    before = [tensor.numpy() for tensor in values.values()]
    open_model("O4")
    for tensor, array in zip(values.values(), before, strict=True):
        assert tensor.numpy() is not array
        assert np.shares_memory(tensor.numpy(), array)
        assert np.array_equal(torch.Tensor.numpy(tensor), array)
    with pytest.raises(RuntimeError, match="detach"):
        torch.ones(2, requires_grad=True).numpy()
    assert torch.ones(2, requires_grad=True).numpy(force=True).tolist() == [1, 1]
    compiled = torch.compile(lambda x: torch.from_numpy(x.numpy() + 1), backend="eager")
    assert compiled(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_write_to_one_of_several_weights_in_one_buffer_or_not_is_seen(is_shared):
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    if is_shared:
        flat = torch.ones(18)
        first.weight.data, second.weight.data = flat[:9].view(3, 3), flat[9:].view(3, 3)
    amp.initialize([first, second], opt_level="O4", verbosity=0)
    kept = []  # graphs that wait for their backward: the iteration goes on
    for layer in (first, second):
        kept.append(layer(X))
        layer.weight[0].data.zero_()
        kept.append(layer(X))
        assert kept[-1][:, 0].abs().sum() == 0
