"""Tensors that are not plain, dense and float32: subclasses, formats and modes."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import ampatch as amp
from nets import open_session
from patched import backward
from ranks import FSDP2

LEVELS = pytest.mark.parametrize("level", ["O0", "O2", "O4"])
X = torch.tensor([[1.0, -0.5, 0.25], [0.5, 0.75, -1.0], [-0.25, 0.5, 1.0]])


def make_net():
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))


def train(model, x, steps=2, optimizer=None):
    """Trains and returns whether each weight moved; an optimizer that is given was given to `initialize`."""
    scale = backward if optimizer else lambda loss, optimizer: loss.backward()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    before = [param.detach().clone() for param in model.parameters()]
    for _ in range(steps):
        optimizer.zero_grad()
        scale(model(x).float().pow(2).mean(), optimizer)
        optimizer.step()
    return [not torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True)]


# ---- Subclasses ----


class Plain(Tensor):
    """A subclass as simple as can be."""


class Logs(Tensor):
    told: list

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.told.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


class Wraps(Tensor):
    """Holds another tensor, as quantized, sharded and traced ones do."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, strides=inner.stride()
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Wraps, lambda item: item.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, Wraps, function(*args, **kwargs))


class Weight(nn.Parameter):
    """A subclass of Parameter."""


KINDS = {
    "as_subclass": lambda x: x.as_subclass(Plain),
    "_make_subclass": lambda x: Tensor._make_subclass(Plain, x),
    "a wrapper": Wraps,
}


@LEVELS
@pytest.mark.parametrize("kind", KINDS)
def test_an_input_of_a_subclass_gives_an_output_of_it(kind, level):
    model = open_session(make_net(), opt_level=level)
    expected, x = model(X), KINDS[kind](X)
    output = model(x)
    assert type(output) is type(x)
    assert output.dtype is expected.dtype
    output.float().sum().backward()
    assert all(param.grad is not None for param in model.parameters())


WEIGHTS = {
    "a subclass of Parameter": Weight,
    "a subclass in a Parameter": lambda weight: nn.Parameter(weight.as_subclass(Plain)),
    "a wrapper in a Parameter": lambda weight: nn.Parameter(Wraps(weight)),
}


@LEVELS
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_weight_of_a_subclass_trains_and_keeps_its_class(kind, level):
    model = make_net()
    model[0].weight = WEIGHTS[kind](model[0].weight.detach())
    weight, of_class = model[0].weight, type(model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    open_session(model, optimizer, opt_level=level)
    assert all(train(model, X, optimizer=optimizer))
    amp.uninitialize()
    assert model[0].weight is weight
    assert (type(weight), weight.dtype) == (of_class, torch.float32)
    assert train(model, X)


def test_torch_function_is_told_of_the_functions_that_torch_has():
    functional = torch.nn.functional
    # In a tuple, where names bound to torch's functions are not looked for.
    expected = (torch.matmul, torch.exp, functional.softmax, functional.layer_norm, torch.einsum)
    open_session(nn.Linear(1, 1), opt_level="O4")
    Logs.told = []
    x = X.as_subclass(Logs)
    torch.matmul(x, x), torch.exp(x), functional.softmax(x, -1), functional.layer_norm(x, (3,))
    torch.einsum("ij,jk->ik", x, x)
    assert [function for function in expected if function not in Logs.told] == []


def test_the_data_of_a_sparse_tensor_is_read_while_casts_are_kept():
    model = open_session(make_net(), opt_level="O4")
    model(X)
    assert torch.equal(torch.eye(3).to_sparse().data.to_dense(), torch.eye(3))


@LEVELS
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=["jagged", "strided"])
def test_nested_tensors_go_through_a_model(layout, level):
    model = open_session(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), opt_level=level)
    parts = [X[:1], X]
    output = model(torch.nested.nested_tensor(parts, layout=layout))
    for found, part in zip(output.unbind(), parts, strict=True):
        torch.testing.assert_close(found, model(part), atol=0.02, rtol=0.02)


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")  # torch 2.6
@LEVELS
def test_weights_that_are_dtensors_train(one_rank, level):
    from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor

    model, mesh = make_net(), dist.device_mesh.init_device_mesh("cpu", (1,))
    model.register_buffer("mean", torch.zeros(3))
    model = distribute_module(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer, opt_level=level)
    x = distribute_tensor(X, mesh, [Replicate()])
    assert all(train(model, x, optimizer=optimizer))
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    assert model.mean.dtype is model[0].weight.dtype
    assert not isinstance(model.mean, nn.Parameter)
    amp.uninitialize()
    assert all(isinstance(one, DTensor) and one.dtype is torch.float32 for one in model.state_dict().values())


@FSDP2
@LEVELS
def test_a_model_that_fsdp_has_sharded_computes_as_before_once_it_is_given_back(one_rank, level):
    from torch.distributed.fsdp import fully_shard

    model = make_net()
    expected = model(X)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    open_session(model, opt_level=level)
    model(X).float().sum().backward()
    amp.uninitialize()
    assert torch.equal(model(X), expected)


# ---- Modes ----


@LEVELS
def test_fake_tensors_leave_no_cast_behind(level):
    model = open_session(make_net(), opt_level=level)
    expected = model(X)
    amp.clear_cache()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.randn(2, 3)).shape == (2, 2)
    assert torch.equal(model(X), expected)


@LEVELS
def test_float64_is_left_alone_where_it_is_the_default(level):
    torch.set_default_dtype(torch.float64)
    try:
        warns = pytest.warns(UserWarning, match="the model is float64")
        with contextlib.nullcontext() if level == "O0" else warns:
            model = open_session(make_net(), opt_level=level)
        assert model(X.double()).dtype is torch.float64
        assert all(train(model, X.double()))
    finally:
        torch.set_default_dtype(torch.float32)


# ---- Formats ----


@LEVELS
@pytest.mark.parametrize("when", ["before", "after"])
def test_channels_last_is_kept_by_casts_of_weights_inputs_and_masters(when, level):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    if when == "before":
        model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer, opt_level=level)
    if when == "after":
        model.to(memory_format=torch.channels_last)

    def is_last(tensor):
        return tensor.is_contiguous(memory_format=torch.channels_last)

    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    assert is_last(model(x))
    train(model, x, optimizer=optimizer)
    assert is_last(model[0].weight)
    assert is_last(model(x))
    if when == "before":
        assert is_last(next(iter(amp.master_params(optimizer))))
        assert is_last(model.state_dict()["0.weight"])
        amp.uninitialize()
        assert is_last(model[0].weight)


# ---- What has no half kernel on a CPU ----


class Transform(nn.Module):
    """Has no parameters: a half model around it gives it half tensors."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x.reshape(1, 1, 2, 2, 2)).real.reshape(1, 8)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("call", [torch.fft.fft, torch.fft.ifft2, lambda x: F.avg_pool3d(x, 1)])
def test_an_error_that_there_is_no_half_kernel_says_which_module_to_keep(call, level):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Transform(call))), torch.randn(1, 8)
    expected = model(x)
    open_session(model, opt_level=level)
    other = "O4" if level == "O5" else "O1"
    with pytest.raises(RuntimeError, match=rf"ampatch: '1.0' \(Transform\) .*, or use {other}") as error:
        model(x)
    assert "keep_fp32=['1.0']" in str(error.value)
    assert str(error.value).count("ampatch:") == 1
    amp.uninitialize()
    open_session(model, opt_level=level, keep_fp32=["1.0"])
    torch.testing.assert_close(model(x).float(), expected, atol=0.05, rtol=0.05)  # of half weights


def test_what_the_model_itself_calls_is_cast_there_or_by_another_level():
    class Net(nn.Linear):
        def forward(self, x):
            return torch.fft.fft(super().forward(x))

    model = Net(4, 4)
    open_session(model, opt_level="O5")
    with pytest.raises(RuntimeError, match=r"ampatch: '' \(Net\) .*: cast to float32 there, or use O4"):
        model(torch.ones(1, 4))


# ---- Containers that hold themselves ----


class Records(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x, record):
        record["output"] = self.linear(x)
        return record


@LEVELS
def test_a_dictionary_that_holds_itself_goes_in_and_out(level):
    model = open_session(Records(), opt_level=level)
    record = {"mask": X}
    record["self"] = record
    output = model(X, record)["output"]
    assert output.dtype is (torch.bfloat16 if level == "O4" else torch.float32)
    output.float().sum().backward()
    assert model.linear.weight.grad is not None


def test_a_list_that_holds_itself_is_cast_around_that():
    @amp.half_function
    def take(values):
        return values

    open_session(nn.Linear(1, 1), opt_level="O4")
    values = [X, [X]]
    values.append(values)
    first, inner, itself = take(values)
    assert first.dtype is inner[0].dtype is torch.bfloat16
    assert itself is values


@pytest.mark.parametrize("level", ["O0", "O2", "O4", "O5"])
def test_gradients_of_a_subclass_stay_plain_and_what_it_is_told_is_torchs_own(level, monkeypatch):
    """Torch tells the getter of `.grad` from others by identity."""
    own = [Tensor.grad.__get__, Tensor.grad.__set__]
    model = make_net()
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    monkeypatch.setattr(Logs, "told", [], raising=False)
    weight = torch.ones(3).as_subclass(Logs).requires_grad_()
    (weight * 2).sum().backward()
    Logs.told.clear()
    assert type(weight.grad) is Tensor
    weight.grad = torch.zeros(3)
    assert Logs.told == own
    del weight.grad
    assert weight.grad is None
