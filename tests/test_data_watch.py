"""Writes to weights through `.data`, which leave no trace on the tensor itself."""

import numpy as np
import pytest
import torch
from torch import nn

import ampatch as amp
from patched import start

X = torch.ones(2, 3)


def open_model(level):
    return start(level, nn.Linear(3, 3), lr=0.5)


READERS = {
    "numpy": lambda weight: weight.detach().numpy(),
    "asarray": lambda weight: np.asarray(weight.detach()),
    "a row": lambda weight: weight.detach()[1:].numpy(),
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()),
    "capsule": lambda weight: torch.from_dlpack(torch.to_dlpack(weight.detach())),
    "capsule of utils": lambda weight: torch.from_dlpack(torch.utils.dlpack.to_dlpack(weight.detach())),
}


@pytest.mark.exhaustive(keep=6)
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
