"""Hooks of `optimizer.step` that change weights act as in float32, on masters and model."""

import pytest
import torch
from torch.optim import optimizer as every_optimizer

import ampatch as amp
from helpers import Variant, assert_same_bits, make_batches, make_net, scaled_backward
from mastering import HALF, LEVELS, MOMENTUM, SCALE, ByHand, backward


class Nested(torch.optim.SGD):
    """Its step calls that of its base class, so that the hooks run twice, and goes on."""

    def step(self, closure=None):
        result = super().step(closure)
        with torch.no_grad():
            for param in list_stepped(self):
                param.add_(0.25)
        return result


def list_stepped(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


@torch.no_grad()
def write_in_place(param, mask):
    param.mul_(mask)


def write_through_data(param, mask):
    param.data.mul_(mask)


class Prune:
    """Sets entries to 0, which no half type rounds: others each time, and from the second step on."""

    def __init__(self, find_params, write):
        self.find_params, self.write, self.calls = find_params, write, 0

    def __call__(self, optimizer, args, kwargs):
        self.calls += 1
        draw = torch.Generator().manual_seed(self.calls)
        for param in self.find_params(optimizer) if self.calls > 2 else ():
            self.write(param, (torch.rand(param.shape, generator=draw) > 0.25).to(param.dtype))


REGISTER = {
    "after a step": lambda optimizer, hook: optimizer.register_step_post_hook(hook),
    "before a step": lambda optimizer, hook: optimizer.register_step_pre_hook(hook),
    "after every step": lambda _, hook: every_optimizer.register_optimizer_step_post_hook(hook),
    "before every step": lambda _, hook: every_optimizer.register_optimizer_step_pre_hook(hook),
}
VARIANTS = [
    MOMENTUM,
    Variant(torch.optim.AdamW, {"fused": True}),
    Variant(torch.optim.LBFGS, {"max_iter": 2}),
    Variant(Nested),
]
# After the inner one of two steps, a hook that comes later than ours sees a model that is not rounded yet.
CASES = [
    (variant, place, is_first)
    for variant in VARIANTS
    for place in REGISTER
    for is_first in (True, False)
    if variant.kind is not Nested or "before" in place or (is_first and place == "after a step")
]


def step(optimizer, zero_grad, run_backward, batches):
    """One step of accumulated gradients."""

    def closure():
        zero_grad()
        return sum(map(run_backward, batches))

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


@LEVELS
@pytest.mark.exhaustive(keep=16)
@pytest.mark.parametrize("what", ["model", "model through data", "masters"])
@pytest.mark.parametrize(("variant", "place", "is_first"), CASES, ids=str)
def test_what_a_hook_of_the_step_writes_counts_as_in_float32(variant, what, place, is_first, level, request):
    model = make_net(variant)
    optimizer = variant(model.parameters())
    by_hand = ByHand(list(model.parameters()), variant, HALF[level], SCALE)
    find = list_stepped if what == "masters" else lambda _: model.parameters()
    prune = Prune(find, write_through_data if what == "model through data" else write_in_place)
    hooks = {id(optimizer): prune, id(by_hand.optimizer): Prune(list_stepped, write_in_place)}

    def run_hook(owner, args, kwargs):
        hooks[id(owner)](owner, args, kwargs)

    def register():
        for one in [optimizer, by_hand.optimizer][: 1 if "every" in place else 2]:
            request.addfinalizer(REGISTER[place](one, run_hook).remove)

    if is_first:
        register()
    amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)
    if not is_first:
        register()
    batches = make_batches(variant, 12)
    for pair in zip(batches[::2], batches[1::2], strict=True):
        step(optimizer, optimizer.zero_grad, lambda batch: backward(model, optimizer, batch), pair)
        step(by_hand.optimizer, by_hand.optimizer.zero_grad, by_hand.backward, pair)
        assert_same_bits(amp.master_params(optimizer), by_hand.masters)
        assert_same_bits(model.state_dict().values(), by_hand.masters)
    amp.uninitialize()
    assert_same_bits(model.parameters(), by_hand.masters)


@LEVELS
def test_a_hook_that_was_there_first_sees_the_step_and_its_gradients(level):
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []

    def look(*_):
        (param,) = list_stepped(optimizer)
        seen.append((model.weight.tolist(), param.tolist(), param.grad.tolist()))

    optimizer.register_step_post_hook(look)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)
    with torch.no_grad():
        model.weight.fill_(3.0)
    scaled_backward(model(torch.ones(1, 2)).float().sum(), optimizer)
    optimizer.step()
    assert seen == [([[2.0, 2.0]], [[2.0, 2.0]], [[1.0, 1.0]])]


@LEVELS
def test_hooks_around_others_leave_with_the_session(level):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    amp.uninitialize()
    assert len(optimizer._optimizer_step_post_hooks) == len(optimizer._optimizer_step_pre_hooks) == 1
    assert "register_step_pre_hook" not in vars(optimizer)
    optimizer.step()
    assert calls == ["before", "after"]
