"""What a model saves and loads at every level, and what its copies are."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import ampatch as amp
from apex_rows import shows
from helpers import scaled_backward
from nets import (
    COPIES,
    EVERY_LEVEL,
    FULL,
    MASTERED,
    Net,
    X,
    assert_same_state,
    clone_state,
    open_session,
    sgd,
    train,
)


class WithExtraState(Net):
    def __init__(self):
        super().__init__()
        self.extra = {"epoch": 3, "name": "net", "scores": [0.1]}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@shows("scaler-model-state", "scaler-defect-rounded")
@pytest.mark.parametrize("opt_level", EVERY_LEVEL)
@pytest.mark.parametrize("with_optimizer", [True, False], ids=["optimizer", "no optimizer"])
def test_state_dict_has_the_unrounded_values_of_every_tensor(opt_level, with_optimizer):
    model = Net()
    if opt_level == "O3":  # which has no others
        for value in (*model.linear.parameters(), *model.norm.parameters(), *model.out.parameters()):
            value.data = value.half().float()
        model.scale.data = model.scale.half().float()
    before = clone_state(model)
    open_session(model, sgd(model) if with_optimizer else None, opt_level)
    assert_same_state(dict(model.state_dict()), before)
    model.eval()(X)
    assert_same_state(dict(model.state_dict()), before)


class TwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = self.again = nn.Parameter(torch.rand(2, 3))
        self.register_buffer("shift", torch.rand(2))
        self.register_buffer("offset", self.shift)

    def forward(self, x):
        return nn.functional.linear(x, self.again, self.offset)


@pytest.mark.parametrize("opt_level", MASTERED)
def test_a_tensor_of_two_names_in_one_module_is_saved_and_loaded_under_both(opt_level):
    model = TwoNames()
    before = clone_state(model)
    open_session(model, sgd(model), opt_level)
    assert_same_state(dict(model.state_dict()), before)
    doubled = {name: 2 * value for name, value in before.items()}
    model.load_state_dict(doubled)
    assert_same_state(dict(model.state_dict()), doubled)
    amp.uninitialize()
    assert_same_state(dict(model.state_dict()), doubled)
    assert model.weight is model.again


@pytest.mark.parametrize("opt_level", MASTERED)
def test_an_edit_of_the_half_weights_shows_in_state_dict(opt_level):
    model = Net()
    open_session(model, sgd(model), opt_level)
    with torch.no_grad():
        model.linear.weight.fill_(0.1)
        model.scale.fill_(0.2)
    expected = torch.tensor(0.1).to(MASTERED[opt_level]).float()
    assert (model.state_dict()["linear.weight"] == expected).all()
    assert (model.state_dict()["scale"] == torch.tensor(0.2).to(MASTERED[opt_level]).float()).all()


@shows("scaler-extra-state")
@pytest.mark.parametrize("opt_level", EVERY_LEVEL)
def test_extra_state_that_is_no_tensor_passes(opt_level):
    model = WithExtraState()
    open_session(model, sgd(model), opt_level)
    state = model.state_dict()
    assert state["_extra_state"] == {"epoch": 3, "name": "net", "scores": [0.1]}
    other = WithExtraState()
    other.extra = None
    other.load_state_dict(state)
    assert other.extra == model.extra
    model.load_state_dict(state)


@pytest.mark.parametrize("opt_level", MASTERED)
def test_a_part_of_the_model_saves_float32_too(opt_level):
    model = Net()
    before = clone_state(model)
    open_session(model, opt_level=opt_level)
    assert torch.equal(model.linear.state_dict()["weight"], before["linear.weight"])
    assert torch.equal(model.state_dict(prefix="net.")["net.scale"], before["scale"])
    weight = torch.randn(4, 3)
    model.linear.load_state_dict({"weight": weight, "bias": before["linear.bias"]})
    assert torch.equal(model.state_dict()["linear.weight"], weight)


@pytest.mark.parametrize("opt_level", MASTERED)
def test_state_dict_with_keep_vars_gives_what_takes_gradients(opt_level):
    model = Net()
    open_session(model, sgd(model), opt_level)
    assert model.state_dict(keep_vars=True)["linear.weight"].requires_grad


@pytest.mark.parametrize("opt_level", MASTERED)
def test_loading_a_part_leaves_the_rest(opt_level):
    model = Net()
    open_session(model, sgd(model), opt_level)
    expected = clone_state(model)
    weight = torch.randn(4, 3)
    model.load_state_dict({"linear.weight": weight}, strict=False)
    assert_same_state(dict(model.state_dict()), {**expected, "linear.weight": weight})


@pytest.mark.parametrize("opt_level", MASTERED)
def test_loading_a_wrong_shape_raises_and_changes_nothing_of_that_tensor(opt_level):
    model = Net()
    open_session(model, sgd(model), opt_level)
    before = model.state_dict()["linear.weight"].clone()
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"linear.weight": torch.ones(2, 2)}, strict=False)
    assert torch.equal(model.state_dict()["linear.weight"], before)


@pytest.mark.parametrize("opt_level", MASTERED)
def test_loading_by_assignment_is_refused_where_weights_were_cast(opt_level):
    model = Net()
    open_session(model, None, opt_level)
    before = clone_state(model)
    with pytest.raises(amp.AmpValueError, match=r"assign=True\).*: leave assign out"):
        model.load_state_dict({name: value + 1 for name, value in before.items()}, assign=True)
    assert_same_state(dict(model.state_dict()), before)


@shows("never-copies")
@pytest.mark.parametrize("opt_level", EVERY_LEVEL)
def test_a_deep_copy_shows_its_own_weights(opt_level):
    model = Net()
    optimizer = sgd(model)
    open_session(model, optimizer, opt_level, loss_scale=1.0)
    twin = copy.deepcopy(model)
    before = clone_state(twin)
    train(model, optimizer, X)
    assert_same_state(dict(twin.state_dict()), before)
    with torch.no_grad():
        twin.linear.weight.fill_(2.0)
    assert (twin.state_dict()["linear.weight"] == 2).all()
    twin.load_state_dict({name: value + 1 for name, value in before.items()})
    assert not (model.state_dict()["linear.weight"] == 2).any()
    assert not torch.equal(model.state_dict()["linear.weight"], twin.state_dict()["linear.weight"])


@shows("never-copies")
@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("opt_level", EVERY_LEVEL)
def test_a_copy_works_within_the_session(duplicate, opt_level):
    model = open_session(Net().eval(), opt_level=opt_level)
    twin = duplicate(model)
    assert torch.equal(twin(X), model(X))
    twin(X).sum().backward()
    assert twin.linear.weight.grad is not None
    assert model.linear.weight.grad is None


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("opt_level", EVERY_LEVEL)
def test_a_copy_works_after_uninitialize(duplicate, opt_level):
    model = open_session(Net().eval(), opt_level=opt_level)
    expected = model(X)
    twin = duplicate(model)
    amp.uninitialize()
    found = twin(X)
    if opt_level in ("O1", "O4"):  # functions are patched no longer
        assert found.dtype is FULL
    else:
        assert torch.equal(found, expected)
    assert twin.state_dict()["linear.weight"].dtype is FULL


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_pickled_model_does_not_switch_casts_off_or_on(duplicate):
    plain = duplicate(open_session(nn.Linear(3, 2), opt_level="O0"))
    amp.uninitialize()
    model = open_session(nn.Linear(3, 2), opt_level="O4")
    plain(X)
    assert model(X).dtype is torch.bfloat16


def add_half_layer(model, optimizer):
    model.block.append(nn.Linear(4, 4).to(model.first.weight.dtype))


def add_half_buffer(model, optimizer):
    model.block[0].register_buffer("late", torch.randn(3).to(model.first.weight.dtype))


def train_new_half_parameter(model, optimizer):
    add_half_layer(model, optimizer)
    optimizer.add_param_group({"params": model.block[-1].parameters()})


def save_and_train_new_half_parameter(model, optimizer):
    add_half_layer(model, optimizer)
    model.state_dict()
    optimizer.add_param_group({"params": model.block[-1].parameters()})


def parametrize_and_train(model, optimizer):
    parametrizations.weight_norm(model.first)
    optimizer.add_param_group({"params": model.first.parametrizations.parameters()})


CHANGES = {
    "weight norm": lambda model, optimizer: parametrizations.weight_norm(model.first),
    "spectral norm": lambda model, optimizer: parametrizations.spectral_norm(model.first),
    "weight norm, trained": parametrize_and_train,
    "pruned": lambda model, optimizer: prune.l1_unstructured(model.first, "weight", amount=0.5),
    "tied": lambda model, optimizer: setattr(model.block[2], "weight", model.first.weight),
    "tied the other way": lambda model, optimizer: setattr(model.first, "weight", model.block[2].weight),
    "a layer": add_half_layer,
    "a buffer": add_half_buffer,
    "a trained layer": train_new_half_parameter,
    "a saved layer, then trained": save_and_train_new_half_parameter,
    "a layer moved": lambda model, optimizer: setattr(model, "other", model.block),
}


class Stacked(nn.Module):
    """A layer, and others in a container that holds no tensor itself."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Tanh()), nn.Linear(4, 4))

    def forward(self, x):
        return self.block(self.first(x))


@pytest.mark.exhaustive(keep=10)
@pytest.mark.parametrize("opt_level", MASTERED)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_changed_after_initialize_is_saved_in_float32_and_resumes_bit_for_bit(change, opt_level):
    def run(state=None):
        model = Stacked()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        open_session(model, optimizer, opt_level, loss_scale=64.0, verbosity=0)
        change(model, optimizer)
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        for _ in range(3):
            optimizer.zero_grad()
            scaled_backward(model(torch.ones(2, 4)).float().square().mean(), optimizer)
            optimizer.step()
        return model, optimizer

    torch.manual_seed(0)
    model, optimizer = run()
    half = {id(half): master for half, master in amp.master_pairs(optimizer)}
    state = model.state_dict()
    saved = copy.deepcopy([state, optimizer.state_dict()])
    for name, param in model.named_parameters(remove_duplicate=False):
        assert state[name].dtype is FULL
        expected = half.get(id(param), param.detach().float())
        assert torch.equal(state[name], expected), name
        twins = [key for key, one in model.named_parameters(remove_duplicate=False) if one is param]
        assert {state[key].data_ptr() for key in twins} == {state[name].data_ptr()}, name
    assert {value.dtype for value in state.values()} == {FULL}
    assert {value.dtype for value in model.block.state_dict().values()} == {FULL}
    for _ in range(3):
        optimizer.zero_grad()
        scaled_backward(model(torch.ones(2, 4)).float().square().mean(), optimizer)
        optimizer.step()
    expected = clone_state(model)
    amp.uninitialize()
    assert_same_state(dict(model.state_dict()), expected)
    torch.manual_seed(1)
    model, optimizer = run(saved)
    assert_same_state(dict(model.state_dict()), expected)
