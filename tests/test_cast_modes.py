"""A cast serves every grad mode, and no transform of torch.func leaves a dead one behind."""

import pytest
import torch
from torch import nn

import ampatch as amp
from caching import HALF, MODES, X, assert_fresh, by_hand, open_session


@pytest.fixture
def linear():
    return open_session(nn.Linear(3, 5))


@pytest.mark.parametrize("first", MODES)
def test_a_result_is_of_the_mode_that_it_was_computed_in(first):
    models = [nn.Linear(3, 5) for _ in MODES]
    open_session(models)
    for model, second in zip(models, MODES, strict=True):
        with first():
            model(X)
        with second():
            result = model(X)
        assert result.requires_grad == (second is torch.enable_grad)
        assert result.is_inference() == (second is torch.inference_mode)
        assert torch.equal(result, by_hand(model))
        model(X).sum().backward()
        assert model.weight.grad is not None


@pytest.mark.parametrize("before", [False, True], ids=["frozen first", "trained first"])
def test_requires_grad_toggled_between_two_uses_counts_at_once(linear, before):
    linear.requires_grad_(before)
    assert linear(X).requires_grad == before
    linear.requires_grad_(not before)
    assert linear(X).requires_grad == (not before)
    linear.requires_grad_(True)
    linear(X).sum().backward()
    assert linear.weight.grad is not None


def test_parameters_made_in_inference_mode_are_cast():
    with torch.inference_mode():
        model = nn.Linear(3, 5)
        open_session(model)
        assert_fresh(model)
        model.weight.mul_(-3)
        assert_fresh(model)


def test_a_sparse_parameter_is_cast():
    weight = nn.Parameter(torch.eye(3).to_sparse())
    open_session(nn.Linear(3, 5))
    for _ in range(2):
        result = torch.sparse.mm(weight, torch.ones(3, 2))
        assert torch.equal(result.float(), torch.ones(3, 2))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd])
def test_a_transform_over_the_input_leaves_no_dead_cast_behind(linear, transform):
    transform(lambda x: linear(x).float().sum())(X)
    linear(X).float().sum().backward()
    assert torch.equal(linear.weight.grad, X.to(HALF).float().sum(0).expand(5, 3))
    with torch.no_grad():
        transform(lambda x: linear(x).float().sum())(X)
        assert_fresh(linear)


@amp.half_function
def show_half(tensor):
    return tensor


@pytest.mark.parametrize("first", MODES)
def test_a_users_function_that_returns_the_cast_of_a_weight_returns_one_of_its_mode(linear, first):
    with first():
        linear(X)
        assert show_half(linear.weight).requires_grad == (first is torch.enable_grad)
    with torch.no_grad():
        assert not show_half(linear.weight).requires_grad
    show_half(linear.weight).sum().backward()
    assert torch.equal(linear.weight.grad, torch.ones(5, 3))
