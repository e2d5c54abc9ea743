"""Masters in checkpoints and copies: saved and loaded bit for bit."""

import copy
import pickle

import pytest
import torch
from torch.nn import Parameter

import ampatch as amp
from helpers import SKIPPING_VARIANTS, Variant, assert_same_bits, make_batches, make_net, snapshot
from mastering import ADAM, LEVELS, MOMENTUM, SCALE, all_state, iterate, open_both, saved, train


def resume(level, variant, checkpoint, order, make_scheduler, scale=SCALE):
    """Fresh objects, loaded in the given order; "initialize" is one of the steps."""
    model = make_net(variant)
    optimizer = variant(model.parameters())
    scheduler = make_scheduler(optimizer)
    config = amp.DynamicLossScale(scale) if level == "O2" and not variant.needs_closure else scale
    steps = {
        "initialize": lambda: amp.initialize(
            model, optimizer, opt_level=level, loss_scale=config, verbosity=0
        ),
        "model": lambda: model.load_state_dict(checkpoint[0]),
        "optimizer": lambda: optimizer.load_state_dict(checkpoint[1]),
        "amp": lambda: amp.load_state_dict(checkpoint[2]),
        "scheduler": lambda: scheduler.load_state_dict(checkpoint[3]),
    }
    for name in order.split():
        steps[name]()
    return model, optimizer, scheduler


ORDERS = [
    "initialize model optimizer amp scheduler",
    "initialize amp optimizer model scheduler",
    "model optimizer initialize amp scheduler",
    "model initialize optimizer amp scheduler",
    "optimizer initialize model amp scheduler",
]


RESUMED = [(variant, ORDERS[0]) for variant in SKIPPING_VARIANTS]
RESUMED += [(variant, order) for variant in (ADAM, MOMENTUM) for order in ORDERS]


@pytest.mark.exhaustive(keep=24)
@LEVELS
@pytest.mark.parametrize(("variant", "order"), RESUMED, ids=str)
def test_a_resumed_run_is_bit_equal_to_the_one_that_never_stopped(variant, level, order):
    def make_scheduler(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)

    def run(model, optimizer, scheduler, batches):
        losses = []
        for batch in batches:
            losses.append(iterate(model, optimizer, batch))
            scheduler.step()
        return losses

    model, optimizer, _ = open_both(level, variant)
    scheduler = make_scheduler(optimizer)
    batches = make_batches(variant, 3)
    if level == "O2" and not variant.is_sparse:
        batches.insert(1, batches[0] * 1e30)  # a step that is skipped
    run(model, optimizer, scheduler, batches)
    checkpoint = saved(all_state(model, optimizer, scheduler))
    batches = make_batches(variant, 3)
    expected = [run(model, optimizer, scheduler, batches), *all_state(model, optimizer, scheduler)]
    amp.uninitialize()
    model, optimizer, scheduler = resume(level, variant, checkpoint, order, make_scheduler)
    found = [run(model, optimizer, scheduler, batches), *all_state(model, optimizer, scheduler)]
    assert snapshot(found) == snapshot(expected)


@LEVELS
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("variant", [ADAM, Variant(torch.optim.Adam, {"fused": True})], ids=str)
def test_a_copy_of_the_optimizer_is_a_plain_one_with_masters_of_its_own(level, clone, variant):
    model, optimizer, by_hand = open_both(level, variant)
    batches = make_batches(ADAM, 3)
    train(model, optimizer, batches[:2])
    by_hand.train(batches[:2])
    other = clone(optimizer)
    params = [param for group in other.param_groups for param in group["params"]]
    assert_same_bits(params, by_hand.masters)
    for param in params:
        param.grad = torch.ones_like(param)
    other.zero_grad(set_to_none=False)
    other.step()
    other.add_param_group({"params": Parameter(torch.ones(1))})
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)
    train(model, optimizer, batches[2:])
    by_hand.train(batches[2:])
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)
