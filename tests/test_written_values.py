"""What is written into state_dicts and masters goes into the model, as in plain torch it does."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ampatch as amp
from apex_rows import shows
from helpers import scaled_backward
from mastering import saved
from nets import COPIES, EVERY_LEVEL, HALVES, MASTERED, open_session, sgd

X = torch.ones(2, 4)


def make():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def fill(state_dict, value):
    with torch.no_grad():
        for tensor in state_dict.values():
            tensor.fill_(value)


def assert_filled(model, value):
    """The weights themselves, not what state_dict shows of them."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert (tensor == value).all(), name


OWNERS = {"the model": lambda model, other: model, "one without optimizer": lambda model, other: other} | {
    f"a copy by {name}": lambda model, other, make_copy=make_copy: make_copy(model)
    for name, make_copy in COPIES.items()
}


@pytest.mark.parametrize("level", EVERY_LEVEL)
@pytest.mark.parametrize("find", OWNERS.values(), ids=OWNERS)
def test_what_is_written_into_a_state_dict_shows_in_the_next_forward(find, level):
    model, other = make(), make()
    amp.initialize([model, other], sgd(model), opt_level=level, verbosity=0)
    owner = find(model, other).eval()
    fill(owner.state_dict(), 3.0)
    owner(X)
    assert_filled(owner, 3.0)
    fill(owner.state_dict(), 5.0)
    assert all((tensor == 5).all() for tensor in owner.state_dict().values())
    owner(X)
    assert_filled(owner, 5.0)
    amp.uninitialize()
    assert_filled(owner, 5.0)


@pytest.mark.parametrize("level", EVERY_LEVEL)
@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_what_is_written_into_a_state_dict_is_in_a_copy_that_is_made_before_the_next_forward(
    make_copy, level
):
    model = make()
    open_session(model, sgd(model), level)
    for owner in (copy.deepcopy(model), model):
        fill(owner.state_dict(), 3.0)
        assert_filled(make_copy(owner), 3.0)


@shows("never-copies", "patterns-edited-weights")
@pytest.mark.parametrize("level", EVERY_LEVEL)
@pytest.mark.parametrize("make_average", [COPIES["deepcopy"], COPIES["pickle"]])
def test_an_average_over_state_dicts_is_that_of_float32(level, make_average):
    """As published scripts average: a decay near 1, whose steps half numbers would swallow."""
    model = nn.Linear(4, 4)
    optimizer = sgd(model)
    open_session(model, optimizer, level, loss_scale=1.0)
    average = make_average(model)
    expected = {name: value.clone() for name, value in average.state_dict().items()}
    for _ in range(50):
        with torch.no_grad():
            for param in amp.master_params(optimizer):
                param.add_(0.01)
        latest = model.state_dict()
        for name, value in average.state_dict().items():
            value.mul_(0.99).add_(latest[name], alpha=0.01)
            expected[name].mul_(0.99).add_(latest[name], alpha=0.01)
        average(X.to(average.weight.dtype))
    for name, value in average.state_dict().items():
        assert value.dtype is torch.float32
        assert torch.equal(value, expected[name])
        assert torch.equal(getattr(average, name), expected[name].to(average.weight.dtype))


@pytest.mark.parametrize("level", MASTERED)
@pytest.mark.parametrize("write", ["copy_", "data", "foreach"])
def test_what_is_written_into_masters_is_saved_and_stays_after_uninitialize(write, level):
    model = nn.Linear(4, 4)
    optimizer = sgd(model)
    open_session(model, optimizer, level)
    values = [torch.randn_like(param) for param in amp.master_params(optimizer)]
    with torch.no_grad():
        for param, value in zip(amp.master_params(optimizer), values, strict=True):
            if write == "copy_":
                param.copy_(value)
            elif write == "data":
                param.data.copy_(value)
            else:
                torch._foreach_copy_([param], [value])
    assert all(map(torch.equal, model.state_dict().values(), values))
    amp.uninitialize()
    assert all(map(torch.equal, model.parameters(), values))


@pytest.mark.parametrize("level", HALVES)
def test_a_state_dict_that_nobody_writes_keeps_no_float32_copy_of_a_copied_model(level):
    model = nn.Linear(4, 4)
    open_session(model, sgd(model), level)
    duplicate = copy.deepcopy(model)
    shown = duplicate.state_dict()["weight"]
    duplicate(X.to(duplicate.weight.dtype))
    again = duplicate.state_dict()["weight"]
    assert again.data_ptr() != shown.data_ptr()
    assert torch.equal(again, shown)
    duplicate(X.to(duplicate.weight.dtype))
    duplicate.load_state_dict({"weight": again + 1, "bias": duplicate.bias})
    assert torch.equal(duplicate.weight, (again + 1).to(duplicate.weight.dtype))


@pytest.mark.parametrize("level", HALVES)
def test_a_half_weight_that_is_written_after_its_state_dict_was_shown_wins(level):
    model = nn.Linear(4, 4)
    open_session(model, sgd(model), level)
    for owner in (model, copy.deepcopy(model)):
        owner.state_dict()
        with torch.no_grad():
            owner.weight.fill_(0.5)
        assert (owner.state_dict()["weight"] == 0.5).all()
        owner(X.to(owner.weight.dtype))
        assert (owner.weight == 0.5).all()


# ---- Reading ----

KEEP = {  # how scripts keep the weights that they swap for others, and put them there
    "data": (lambda p: p.data.clone(), lambda p, values: p.data.copy_(values)),
    "in place": (lambda p: p.detach().clone(), lambda p, values: p.copy_(values)),
    "another tensor": (lambda p: p.data, lambda p, values: setattr(p, "data", values.to(p.dtype))),
}
READ = {
    "state_dict": lambda model, optimizer: model.state_dict(),
    "of a part": lambda model, optimizer: model[0].state_dict(),
    "keep_vars": lambda model, optimizer: model.state_dict(keep_vars=True),
    "saved": lambda model, optimizer: saved(model.state_dict()),
    "master_params": lambda model, optimizer: list(amp.master_params(optimizer)),
    "master_params, data": lambda model, optimizer: [p.data for p in amp.master_params(optimizer)],
    "average": lambda model, optimizer: AveragedModel(model).float().update_parameters(model),
    "printed": lambda model, optimizer: (repr(model), repr(optimizer), amp.explain(model)),
    "copied": lambda model, optimizer: copy.deepcopy((model, optimizer)),
    "pickled": lambda model, optimizer: pickle.dumps((model, optimizer)),
    "twice": lambda model, optimizer: (model.state_dict(), list(amp.master_params(optimizer))) * 2,
}


@pytest.mark.parametrize("level", MASTERED)
@pytest.mark.parametrize(
    ("read", "keep"), [*((read, "data") for read in READ), ("twice", "in place"), ("twice", "another tensor")]
)
def test_reading_while_other_weights_are_swapped_in_changes_nothing_of_the_training(read, keep, level):
    """A float32 optimizer by hand is fed what the half model makes; reading must not show in it."""
    store, put = KEEP[keep]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    model[1].weight.requires_grad_(False)
    frozen = model[1].weight.detach().clone()
    optimizer = torch.optim.AdamW([model[0].weight], lr=1e-3, fused=True)
    oracle = nn.Parameter(model[0].weight.detach().clone())
    by_hand = torch.optim.AdamW([oracle], lr=1e-3, fused=True)
    open_session(model, optimizer, level, loss_scale=1.0, verbosity=0)
    masters = list(amp.master_params(optimizer))
    for step in range(6):
        optimizer.zero_grad()
        for _ in range(2):  # accumulates
            scaled_backward(model(torch.randn(2, 4)).float().square().sum(), optimizer)
        (oracle.grad,) = [p.grad.clone() for p in masters]
        with torch.no_grad():
            before = list(map(store, model.parameters()))
            for param in model.parameters():
                put(param, torch.randn(param.shape))
            expected = [param.float() for param in model.parameters()]
            READ[read](model, optimizer)
            assert all(map(torch.equal, model.state_dict().values(), expected))
            assert torch.equal(next(amp.master_params(optimizer)), expected[0])
            model(X)
            READ[read](model, optimizer)
            for param, values in zip(model.parameters(), before, strict=True):
                put(param, values)
            if step % 2:
                READ[read](model, optimizer)
        optimizer.step()
        by_hand.step()
        assert torch.equal(masters[0], oracle)
    assert all(map(torch.equal, model.state_dict().values(), [oracle, frozen]))
    amp.uninitialize()
    assert all(map(torch.equal, model.parameters(), [oracle, frozen]))


@pytest.mark.parametrize("level", MASTERED)
@pytest.mark.parametrize("end", [lambda model, optimizer: optimizer.step(), lambda *_: amp.uninitialize()])
def test_a_step_and_uninitialize_take_an_edit_that_was_read(end, level):
    model = nn.Linear(4, 4, bias=False)
    optimizer = sgd(model)
    expected = model.weight.detach().clone()
    open_session(model, optimizer, level)
    with torch.no_grad():
        model.weight[0].fill_(0.5)
    expected[0] = 0.5
    model.state_dict()
    list(amp.master_params(optimizer))
    end(model, optimizer)
    assert torch.equal(model.state_dict()["weight"], expected)
    assert torch.equal(next(amp.master_params(optimizer)), expected)


@pytest.mark.parametrize("level", MASTERED)
def test_what_is_written_into_what_shows_an_edit_goes_into_the_model(level):
    model = nn.Linear(4, 4, bias=False)
    optimizer = sgd(model)
    open_session(model, optimizer, level)
    for find in (lambda: model.state_dict()["weight"], lambda: next(amp.master_params(optimizer))):
        before = model.state_dict()["weight"].clone()
        with torch.no_grad():
            model.weight[0].fill_(0.5)
            find()[1].fill_(0.25)
        model(X)
        expected = before.clone()
        expected[0], expected[1] = 0.5, 0.25
        assert torch.equal(model.weight, expected.to(model.weight.dtype))
        optimizer.step()
        assert torch.equal(next(amp.master_params(optimizer)), expected)
        model.load_state_dict({"weight": before})
        optimizer.step()
        assert torch.equal(next(amp.master_params(optimizer)), before)
