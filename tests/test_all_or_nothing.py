"""An `initialize` that fails, wherever it does, leaves everything as it was."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch as amp
from ampatch.levels.patcher import Patcher
from nets import FULL, X, make_trained, train
from pictures import unchanged

LEVELS = pytest.mark.parametrize("opt_level", ["O1", "O2"])  # one that patches and one that casts the model


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
    (Patcher, "replace", 100),
    (nn.Module, "register_forward_pre_hook", 1),
    (nn.Module, "register_forward_hook", 1),
    (nn.Module, "register_state_dict_post_hook", 1),
    (nn.Module, "register_load_state_dict_pre_hook", 0),
    (torch.optim.Optimizer, "register_step_pre_hook", 0),
    (torch.optim.Optimizer, "register_step_post_hook", 0),
]
WHERE = [pytest.param(*failure, id=f"{failure[1]} {failure[2]}") for failure in FAILURES]


@pytest.mark.parametrize(("owner", "name", "calls"), WHERE)
@LEVELS
def test_an_initialize_that_fails_half_way_leaves_everything_as_it_was(
    monkeypatch, opt_level, owner, name, calls
):
    model, optimizer = make_trained()
    failed = False
    with unchanged(model, optimizer), monkeypatch.context() as patch:
        fail_after(patch, owner, name, calls)
        try:
            amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, keep_fp32="out")
        except Boom:
            failed = True
        if not failed:
            pytest.skip(f"{opt_level} does not come so far")
    with pytest.raises(amp.NotInitializedError):
        amp.state_dict()
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, loss_scale=1.0)
    train(model, optimizer)


class Raises(amp.Observer):
    def on_initialize(self, policy):
        raise Boom


@LEVELS
def test_an_observer_that_raises_leaves_everything_as_it_was(opt_level):
    model, optimizer = make_trained()
    with unchanged(model, optimizer), amp.observe(Raises()), pytest.raises(Boom):
        amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)


@pytest.mark.parametrize("first", ["O2", "O4"])
@pytest.mark.parametrize("second", ["O0", "O4", "O5"])
def test_a_second_call_that_fails_late_leaves_the_first_as_it_was(first, second):
    pair, other = make_trained(), make_trained()
    amp.initialize(*pair, opt_level=first, verbosity=0, loss_scale=1.0)
    expected = pair[0](X)
    with unchanged(*pair, *other), amp.observe(Raises()), pytest.raises(Boom):
        amp.initialize(*other, opt_level=second, verbosity=0)
    assert pair[0](X).dtype is expected.dtype
    train(*pair)


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
