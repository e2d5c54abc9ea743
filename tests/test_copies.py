"""Copies of models, optimizers and functions: deep ones, pickled ones, averages, parametrized weights."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import ampatch as amp
from nets import X, assert_same_state, clone_state, open_session, train

LEVELS = pytest.mark.parametrize("level", ["O0", "O2", "O4"])
MASTERED = pytest.mark.parametrize("level", ["O2", "O5"])
PATCHED = pytest.mark.parametrize("level", ["O1", "O4"])


def make_net():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def open_training(level, model=None, make=torch.optim.SGD):
    model = model or make_net()
    optimizer = make(model.parameters(), lr=0.1)
    return open_session(model, optimizer, opt_level=level, loss_scale=1.0), optimizer


def train_plainly(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).float().pow(2).mean().backward()
        optimizer.step()


# ---- Model and optimizer together ----


class Trainer:
    def __init__(self, model, optimizer):
        self.optimizer, self.model = optimizer, model


def copy_pair(model, optimizer):
    return copy.deepcopy((model, optimizer))


def copy_reversed(model, optimizer):
    return copy.deepcopy([optimizer, model])[::-1]


def copy_a_copy(model, optimizer):
    return copy.deepcopy(copy_pair(model, optimizer))


def pickle_reversed(model, optimizer):
    return pickle.loads(pickle.dumps([optimizer, model]))[::-1]


def save_trainer(model, optimizer):
    torch.save(Trainer(model, optimizer), saved := io.BytesIO())
    saved.seek(0)
    trainer = torch.load(saved, weights_only=False)
    return trainer.model, trainer.optimizer


CLONES = [copy_pair, copy_reversed, copy_a_copy, pickle_reversed, save_trainer]


@pytest.mark.exhaustive(keep=15)
@LEVELS
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam], ids=["sgd", "adam"])
@pytest.mark.parametrize("clone", CLONES)
def test_a_model_and_an_optimizer_that_are_copied_together_train_as_the_originals_do(clone, make, level):
    model, optimizer = open_training(level, make=make)
    train(model, optimizer, steps=2)
    other, its_optimizer = clone(model, optimizer)
    before = clone_state(model)
    train_plainly(other, its_optimizer, 3)
    assert_same_state(model.state_dict(), before)
    train_plainly(model, optimizer, 3)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


@LEVELS
def test_scale_loss_asks_for_the_optimizer_that_was_initialized(level):
    model, optimizer = open_training(level)
    other, its_optimizer = copy_pair(model, optimizer)
    with pytest.raises(amp.AmpValueError, match="not one that initialize"):
        amp.scale_loss(other(X).float().sum(), its_optimizer).__enter__()


# ---- Functions that a model keeps ----

FUNCTIONS = {
    "functional.softmax": lambda: torch.nn.functional.softmax,
    "functional.gelu": lambda: torch.nn.functional.gelu,
    "functional.linear": lambda: torch.nn.functional.linear,
    "functional.layer_norm": lambda: torch.nn.functional.layer_norm,
    "matmul": lambda: torch.matmul,
    "einsum": lambda: torch.einsum,
    "Tensor.softmax": lambda: torch.Tensor.softmax,
    "linalg.norm": lambda: torch.linalg.norm,
    "fft.fft": lambda: torch.fft.fft,
}


class Keeps(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.table = function, {"f": [function]}


@pytest.mark.exhaustive(keep=6)
@PATCHED
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_taken_while_patched_pickles_as_what_it_stands_for(name, level):
    find = FUNCTIONS[name]
    original = find()
    open_session(nn.Linear(1, 1), opt_level=level)
    patched, model = find(), Keeps(find())
    pickled, saved = pickle.dumps(model), io.BytesIO()
    torch.save(model, saved)
    assert pickle.loads(pickled).function is patched
    assert copy.deepcopy(model).table["f"][0] is patched
    amp.uninitialize()
    saved.seek(0)
    for loaded in (pickle.loads(pickled), torch.load(saved, weights_only=False)):
        assert loaded.function is original
        assert loaded.table["f"][0] is original


# ---- Averages ----


def swap_by_copy(model, shadow):
    backup = {name: param.data.clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        param.data.copy_(shadow[name])
    return lambda: [param.data.copy_(backup[name]) for name, param in model.named_parameters()]


def swap_by_assignment(model, shadow):
    backup = {name: param.data for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        param.data = shadow[name].to(param.dtype)

    def restore():
        for name, param in model.named_parameters():
            param.data = backup[name]

    return restore


def swap_by_loading(model, shadow):
    backup = copy.deepcopy(model.state_dict())
    model.load_state_dict({**backup, **shadow})
    return lambda: model.load_state_dict(backup)


@LEVELS
@pytest.mark.parametrize("swap", [swap_by_copy, swap_by_assignment, swap_by_loading])
def test_an_average_swapped_in_around_an_evaluation_is_seen_and_leaves_no_trace(swap, level):
    model, optimizer = open_training(level)
    train(model, optimizer, steps=2)
    shadow = {name: param.detach().float() * 0.5 for name, param in model.named_parameters()}
    before = clone_state(model)
    model.eval()
    with torch.no_grad():
        own = model(X)
        restore = swap(model, shadow)
        averaged = model(X)
        restore()
        assert torch.equal(model(X), own)
    assert_same_state(model.state_dict(), before)
    state = {**before, **shadow}
    amp.uninitialize()
    reference = make_net().eval()
    reference.load_state_dict(state)
    torch.testing.assert_close(averaged.float(), reference(X), atol=0.02, rtol=0.02)


# ---- Weights that are computed ----


NORMS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@LEVELS
@pytest.mark.parametrize("norm", NORMS)
def test_a_normalized_weight_trains_all_that_it_is_made_of(norm, level):
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    NORMS[norm](model[0])
    model, optimizer = open_training(level, model)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    train(model, optimizer, steps=3)
    for name, param in model.named_parameters():
        assert not torch.equal(param, before[name]), name
    amp.uninitialize()
    assert {param.dtype for param in model.parameters()} == {torch.float32}


@LEVELS
def test_pruned_weights_stay_zero_in_training_and_afterwards(level):
    model, optimizer = open_training(level)
    train(model, optimizer)
    prune.l1_unstructured(model[0], "weight", 0.5)
    zeros = model[0].weight_mask == 0
    train(model, optimizer, steps=2)
    model(X)
    assert (model[0].weight[zeros] == 0).all()
    prune.remove(model[0], "weight")
    assert (model[0].weight[zeros] == 0).all()
    amp.uninitialize()
    assert (model[0].weight[zeros] == 0).all()


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_tensors_that_a_half_model_got_in_the_session_are_float32_afterwards(level):
    model = make_net()
    own = torch.ones(2, dtype=torch.float16)
    model.register_buffer("own", own)
    parametrizations.weight_norm(model[3])
    open_session(model, opt_level=level)
    parametrizations.weight_norm(model[0])
    prune.l1_unstructured(model[0], "bias", 0.5)
    parametrize.remove_parametrizations(model[3], "weight")
    model(X).float().sum().backward()
    amp.uninitialize()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        expected = {"own": torch.float16, "1.num_batches_tracked": torch.int64}.get(name, torch.float32)
        assert tensor.dtype is expected, name
    assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {torch.float32}
    model(X)


# ---- Lazy, tied and meta ----


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_a_lazy_model_is_made_by_its_first_forward(level):
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))
    model, optimizer = open_training(level, model)
    train(model, optimizer, steps=2)
    assert type(model[0]) is nn.Linear
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_a_model_on_the_meta_device_may_get_memory_in_the_session(level):
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    open_session(model, opt_level=level)
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.constant_(param, 0.5)
    assert model(X).shape == (3, 2)
    amp.uninitialize()
    assert all(torch.equal(param, torch.full_like(param, 0.5)) for param in model.parameters())
    assert {param.dtype for param in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_model_that_went_to_the_meta_device_is_undone_at_once(level):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    open_session(model, optimizer, opt_level=level)
    model.to("meta")
    amp.uninitialize()
    assert {(param.dtype, param.device.type) for param in model.parameters()} == {(torch.float32, "meta")}


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_group_that_a_copied_optimizer_gets_is_stepped_in_float32(level):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([model.weight], lr=2.0**-12)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    copied, copied_optimizer = copy.deepcopy((model, optimizer))
    copied_optimizer.add_param_group({"params": [copied.bias]})
    with torch.no_grad():
        copied.bias.fill_(1.0)
    for _ in range(4):  # each step alone is less than half can hold beside a 1
        copied_optimizer.zero_grad()
        copied(torch.ones(1, 3).to(copied.weight.dtype)).sum().backward()
        copied_optimizer.step()
    (bias,) = copied_optimizer.param_groups[1]["params"]
    assert torch.equal(bias, torch.full((2,), 1 - 4 * 2.0**-12))


@MASTERED
def test_a_copied_optimizer_refuses_a_parameter_that_it_steps_already(level):
    model, optimizer = copy.deepcopy(open_training(level))
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model[0].weight]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_deepcopy_method_of_an_optimizers_own_is_put_back(level):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = optimizer.__deepcopy__ = lambda memo: "mine"
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    amp.uninitialize()
    assert optimizer.__deepcopy__ is own


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_that_its_owner_casts_to_float32_takes_float32(level, duplicate):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()
    amp.initialize(model, opt_level=level, verbosity=0)
    x = torch.randn(2, 4)
    half = duplicate(model)
    assert torch.equal(half(x), model(x))
    copied = duplicate(model).float()
    expected = copied[2](copied[1](copied[0](x)))
    assert torch.equal(copied(x), expected)
