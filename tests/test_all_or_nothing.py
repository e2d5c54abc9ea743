"""An `initialize` that fails, wherever it does, leaves everything as it was."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch as amp
from ampatch.patching.patcher import Patcher
from nets import EVERY_LEVEL, FULL, X, make_trained, train
from pictures import assert_same_picture, picture, picture_gradients, picture_torch

UNROUNDED = ["O0", "O1", "O2", "O4", "O5"]  # O3 keeps no float32 values


class Boom(Exception):
    pass


def fail_after(monkeypatch, owner, name, calls):
    """Lets a method work so many times, and raise then."""
    original = getattr(owner, name)
    count = iter(range(calls))

    def failing(*args, **kwargs):
        if next(count, None) is None:
            raise Boom
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


FAILURES = [
    (Patcher, "replace", 0),
    (Patcher, "replace", 1),
    (Patcher, "replace", 100),
    (nn.Module, "register_forward_pre_hook", 0),
    (nn.Module, "register_forward_pre_hook", 1),
    (nn.Module, "register_forward_hook", 0),
    (nn.Module, "register_forward_hook", 1),
    (nn.Module, "register_state_dict_post_hook", 1),
    (nn.Module, "register_load_state_dict_pre_hook", 0),
    (torch.optim.Optimizer, "register_step_pre_hook", 0),
    (torch.optim.Optimizer, "register_step_post_hook", 0),
]
WHERE = [pytest.param(*failure, id=f"{failure[1]} {failure[2]}") for failure in FAILURES]


@pytest.mark.parametrize(("owner", "name", "calls"), WHERE)
@pytest.mark.parametrize("opt_level", EVERY_LEVEL)
def test_an_initialize_that_fails_half_way_leaves_everything_as_it_was(
    monkeypatch, opt_level, owner, name, calls
):
    model, optimizer = make_trained()
    before, torch_before = picture(model, optimizer), picture_torch()
    failed = False
    with monkeypatch.context() as patch:
        fail_after(patch, owner, name, calls)
        try:
            amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, keep_fp32="out")
        except Boom:
            failed = True
    if not failed:
        pytest.skip(f"{opt_level} does not come so far")
    assert picture_torch() == torch_before
    assert_same_picture(picture(model, optimizer), before)
    with pytest.raises(amp.NotInitializedError):
        amp.state_dict()
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, loss_scale=1.0)
    train(model, optimizer)


@pytest.mark.parametrize("opt_level", EVERY_LEVEL)
def test_an_observer_that_raises_leaves_everything_as_it_was(opt_level):
    model, optimizer = make_trained()
    before, grads, torch_before = picture(model, optimizer), picture_gradients(model), picture_torch()
    with amp.observe(Raises()), pytest.raises(Boom):
        amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    assert picture_torch() == torch_before
    assert_same_picture(picture(model, optimizer), before)
    assert picture_gradients(model) == grads


class Raises(amp.Observer):
    def on_initialize(self, policy):
        raise Boom


@pytest.mark.parametrize("opt_level", EVERY_LEVEL)
def test_a_banner_that_cannot_be_printed_leaves_everything_as_it_was(monkeypatch, opt_level):
    model, optimizer = make_trained()
    before, torch_before = picture(model, optimizer), picture_torch()

    class Closed:
        def write(self, text):
            raise BrokenPipeError

    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", Closed())
        with pytest.raises(BrokenPipeError):
            amp.initialize(model, optimizer, opt_level=opt_level)
    assert picture_torch() == torch_before
    assert_same_picture(picture(model, optimizer), before)


@pytest.mark.parametrize("second", EVERY_LEVEL)
@pytest.mark.parametrize("first", ["O2", "O4"])
def test_a_second_call_that_fails_late_leaves_the_first_as_it_was(first, second):
    if (first, second) == ("O4", "O1"):
        pytest.skip("two half types are refused early")
    model, optimizer = make_trained()
    amp.initialize(model, optimizer, opt_level=first, verbosity=0, loss_scale=1.0)
    expected, torch_before = model(X), picture_torch()
    before = picture(model, optimizer)
    other, other_optimizer = make_trained()
    other_before = picture(other, other_optimizer)
    with amp.observe(Raises()), pytest.raises(Boom):
        amp.initialize(other, other_optimizer, opt_level=second, verbosity=0)
    assert picture_torch() == torch_before
    assert_same_picture(picture(other, other_optimizer), other_before)
    assert_same_picture(picture(model, optimizer), {**before, "tensors": before["tensors"]})
    assert model(X).dtype is expected.dtype
    train(model, optimizer)


def test_a_second_call_that_fails_late_leaves_its_device_uncast():
    amp.initialize(nn.Linear(3, 2), opt_level="O4", verbosity=0)
    with amp.observe(Raises()), pytest.raises(Boom):
        amp.initialize(nn.Linear(3, 2, device="meta"), opt_level="O4", verbosity=0)
    meta = torch.empty(2, 2, device="meta")
    assert torch.mm(meta, meta).dtype is FULL


def test_a_second_call_may_allow_banned_functions():
    amp.initialize(nn.Linear(3, 2), opt_level="O4", verbosity=0)
    amp.initialize(nn.Linear(3, 2), opt_level="O4", verbosity=0, allow_banned=True)
    half = torch.tensor([0.5], dtype=torch.bfloat16)
    assert F.binary_cross_entropy(half, half).dtype is FULL


def test_allowed_banned_functions_are_banned_again_in_the_next_session():
    amp.initialize(nn.Linear(3, 2), opt_level="O4", verbosity=0, allow_banned=True)
    amp.uninitialize()
    amp.initialize(nn.Linear(3, 2), opt_level="O4", verbosity=0)
    half = torch.tensor([0.5], dtype=torch.bfloat16)
    with pytest.raises(amp.BannedFunctionError):
        F.binary_cross_entropy(half, half)
