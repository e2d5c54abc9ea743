"""Several models, several calls of `initialize`, and a model in DistributedDataParallel."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampatch as amp
from apex_rows import shows
from helpers import scaled_backward
from nets import (
    EVERY_LEVEL,
    FULL,
    HALVES,
    MASTERED,
    Net,
    X,
    assert_same_state,
    clone_state,
    open_session,
    sgd,
    train,
)


@shows("never-casts-where-wanted")
@pytest.mark.parametrize("order", ["O0 first", "O0 last"])
@pytest.mark.parametrize("patching", ["O1", "O4"])
def test_a_model_at_o0_beside_a_patching_one_runs_without_casts(order, patching):
    plain, patched = nn.Linear(3, 2), nn.Linear(3, 2)
    expected = plain(X)
    calls = [(plain, "O0"), (patched, patching)]
    for model, opt_level in calls if order == "O0 first" else reversed(calls):
        open_session(model, opt_level=opt_level)
    assert torch.equal(plain(X), expected)
    assert patched(X).dtype in (torch.float16, torch.bfloat16)
    assert torch.equal(plain(X), expected)


@pytest.mark.parametrize("other", ["O2", "O3", "O5"])
def test_a_cast_model_beside_a_patching_one_runs_in_its_own_type(other):
    class Exponent(nn.Linear):
        def forward(self, x):
            self.seen = super().forward(x).exp().dtype
            return x

    cast = Exponent(3, 2)
    patched = open_session(nn.Linear(3, 2), opt_level="O4")
    open_session(cast, opt_level=other)
    cast(X)
    assert cast.seen is HALVES[other]
    assert patched(X).dtype is torch.bfloat16


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["outer first", "inner first"])
@pytest.mark.parametrize("opt_level", EVERY_LEVEL)
def test_a_part_passed_as_a_model_of_its_own_works_alone_and_in_the_whole(opt_level, order):
    outer = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    reference = copy.deepcopy(outer)
    amp.initialize(reference, opt_level=opt_level, verbosity=0)
    expected, expected_inner = reference(X), reference[0](X.to(reference[0].weight.dtype))
    models = [outer, outer[0]]
    amp.initialize([models[index] for index in order], opt_level=opt_level, verbosity=0)
    assert torch.equal(outer(X), expected)
    found = outer[0](X)
    assert torch.equal(found.float(), expected_inner.float())
    if opt_level in HALVES:
        assert found.dtype is FULL


@pytest.mark.parametrize("opt_level", MASTERED)
def test_a_model_shared_by_two_calls_is_stepped_by_both_optimizers(opt_level):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    first, second = sgd(model[0]), sgd(model[1])
    open_session(model, first, opt_level, loss_scale=1.0)
    open_session(model, second, opt_level, loss_scale=1.0)
    before = clone_state(model)
    scaled_backward(model(X).sum(), [first, second])
    first.step()
    second.step()
    after = clone_state(model)
    assert all(not torch.equal(after[name], before[name]) for name in before)
    amp.uninitialize()
    assert_same_state(dict(model.state_dict()), after)
    assert {param.dtype for param in model.parameters()} == {FULL}
    assert not model._forward_hooks


def test_a_model_cast_by_one_call_is_refused_by_a_level_that_needs_float32():
    model = open_session(nn.Linear(3, 2), opt_level="O5")
    with pytest.raises(
        amp.AmpValueError,
        match=r"'weight' was cast to torch\.bfloat16 by an earlier.* ampatch\.uninitialize\(\) first",
    ):
        open_session(model, opt_level="O4")
    assert model(X).dtype is FULL


@pytest.mark.parametrize(("first", "second"), [("O2", "O5"), ("O5", "O3"), ("O3", "O5"), ("O5", "O2")])
def test_a_model_cast_to_one_half_type_is_refused_by_a_level_of_the_other(first, second):
    model = open_session(nn.Linear(3, 2), opt_level=first)
    expected = model(X)
    with pytest.raises(amp.AmpValueError, match=r"'weight' was cast to .* by an earlier initialize.* first"):
        open_session(model, opt_level=second)
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("level", HALVES)
def test_a_half_parameter_of_an_earlier_call_is_told_how_it_came_about(level):
    model = open_session(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), opt_level=level)
    duplicate = copy.deepcopy(model)
    with pytest.raises(amp.AmpValueError, match=r"it belongs to a copy of an initialized model.*\.float\(\)"):
        open_session(duplicate, opt_level=level)
    duplicate.float().load_state_dict(model.state_dict())
    open_session(duplicate, opt_level=level)  # as advised
    assert torch.equal(duplicate(X), model(X))
    model[1].weight = nn.Parameter(torch.ones_like(model[1].weight))  # as embeddings are resized
    with pytest.raises(amp.AmpValueError, match=r"it came into the model after .*call ampatch\.uninitialize"):
        open_session(model, opt_level=level)
    amp.uninitialize()
    open_session(model, opt_level=level)  # as advised
    assert model[1].weight.dtype is HALVES[level]


@pytest.mark.parametrize("patching", ["O1", "O4"])
def test_a_model_that_runs_without_casts_is_refused_by_a_level_that_casts(patching):
    model = open_session(nn.Linear(3, 2), opt_level="O0")
    whole = open_session(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), opt_level=patching, keep_fp32=["1"])
    for one in (model, whole[1]):
        with pytest.raises(
            amp.AmpValueError, match=r"models\[0\] runs without casts since an earlier.* first"
        ):
            open_session(one, opt_level=patching)
    amp.uninitialize()
    assert (
        open_session(model, opt_level=patching)(X).dtype
        is {"O1": torch.float16, "O4": torch.bfloat16}[patching]
    )


@pytest.mark.parametrize("patching", ["O1", "O4"])
def test_a_model_may_be_given_to_two_calls_at_a_level_that_casts(patching):
    model = open_session(nn.Linear(3, 2), opt_level=patching)
    expected = model(X)
    assert torch.equal(open_session(model, opt_level=patching)(X), expected)


@pytest.mark.parametrize("opt_level", EVERY_LEVEL)
def test_the_same_model_twice_in_one_call_is_one_model(opt_level):
    model = nn.Linear(3, 2)
    before = clone_state(model)
    amp.initialize([model, model], opt_level=opt_level, verbosity=0)
    model(X)
    amp.uninitialize()
    if opt_level != "O3":
        assert_same_state(dict(model.state_dict()), before)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def move(model):
    """Gives a model other memory, and other buffers, as a move to another device does."""
    model._apply(torch.clone)


@pytest.mark.parametrize("opt_level", HALVES)
def test_a_model_moved_after_initialize_saves_trains_and_comes_back_as_one_that_was_not(opt_level):
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    before = clone_state(model)
    for one in (model, twin):
        open_session(one, optimizer := sgd(one), opt_level, loss_scale=1.0)
        if one is model:
            move(one)
            if opt_level in MASTERED:
                assert_same_state(dict(one.state_dict()), before)
        train(one, optimizer, X, steps=2)
    amp.uninitialize()
    assert_same_state(dict(model.state_dict()), clone_state(twin))
    assert {param.dtype for param in model.parameters()} == {FULL}
    assert model(X).dtype is FULL


def accumulate_and_step(wrap, opt_level):
    """Trains two steps of two blocks each; returns the parameters and the gradients of the last step."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = sgd(model)
    open_session(model, optimizer, opt_level, loss_scale=64.0)
    wrapped = wrap(model)
    for _ in range(2):
        for x in (X, 2 * X):
            scaled_backward(wrapped(x).pow(2).mean(), optimizer)
        grads = [param.grad.clone() for param in amp.master_params(optimizer)]
        optimizer.step()
        optimizer.zero_grad()
    params = [param.detach().clone() for param in amp.master_params(optimizer)]
    amp.uninitialize()
    return params + grads


@pytest.mark.parametrize("bucket_view", [False, True], ids=["copies", "bucket views"])
@pytest.mark.parametrize("opt_level", ["O2", "O3", "O4"])
def test_training_in_distributed_data_parallel_is_bit_equal_to_training_without(
    one_rank, opt_level, bucket_view
):
    def wrap(model):
        return DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)

    expected = accumulate_and_step(lambda model: model, opt_level)
    found = accumulate_and_step(wrap, opt_level)
    assert len(found) == len(expected) == 8
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype is theirs.dtype
        assert torch.equal(mine, theirs)
