"""Masters in checkpoints and copies: saved and loaded bit for bit."""

import copy
import pickle

import pytest
import torch
from torch.nn import Parameter

import ampatch as amp
from helpers import (
    SKIPPING_VARIANTS,
    Dense,
    Variant,
    assert_same_bits,
    make_batches,
    make_net,
    snapshot,
)
from mastering import (
    ADAM,
    HALF,
    LEVELS,
    MOMENTUM,
    SCALE,
    ByHand,
    all_state,
    iterate,
    open_both,
    optimizer_bits,
    saved,
    train,
    train_plainly,
)


@LEVELS
def test_the_models_state_dict_has_the_masters_values_in_float32(level):
    model, optimizer, by_hand = open_both(level)
    batches = make_batches(ADAM, 3)
    train(model, optimizer, batches)
    by_hand.train(batches)
    state = model.state_dict()
    assert list(state) == ["first.weight", "second.weight"]
    assert_same_bits(state.values(), by_hand.masters)
    assert snapshot(saved(state)) == snapshot(state)


@LEVELS
def test_right_after_initialize_the_state_dict_is_that_of_before(level):
    model = Dense()
    before = snapshot(model.state_dict())
    amp.initialize(model, ADAM(model.parameters()), opt_level=level, verbosity=0)
    assert snapshot(model.state_dict()) == before


@LEVELS
def test_a_loaded_state_dict_feeds_the_masters_unrounded(level):
    model, optimizer, _ = open_both(level)
    train(model, optimizer, make_batches(ADAM, 2))
    other = Dense().state_dict()
    model.load_state_dict(other)
    assert_same_bits(amp.master_params(optimizer), other.values())
    assert_same_bits(model.parameters(), [weight.to(HALF[level]) for weight in other.values()])
    assert_same_bits(model.state_dict().values(), other.values())


@LEVELS
def test_training_goes_on_from_a_loaded_state_dict(level):
    model, optimizer, _ = open_both(level, MOMENTUM)
    other = Dense()
    by_hand = ByHand(list(other.parameters()), MOMENTUM, HALF[level])
    model.load_state_dict(other.state_dict())
    batches = make_batches(ADAM, 3)
    train(model, optimizer, batches)
    by_hand.train(batches)
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)


@LEVELS
def test_a_part_of_the_model_loads_and_saves_float32_too(level):
    model, optimizer, _ = open_both(level)
    weight = torch.randn(3, 4)
    model.first.load_state_dict({"weight": weight})
    assert_same_bits(model.first.state_dict().values(), [weight])
    assert snapshot(next(amp.master_params(optimizer))) == snapshot(weight)


@LEVELS
def test_the_optimizers_state_goes_through_its_state_dict_unrounded(level):
    model, optimizer, _ = open_both(level)
    train(model, optimizer, make_batches(ADAM, 3))
    before = optimizer_bits(optimizer)
    optimizer.load_state_dict(saved(optimizer.state_dict()))
    assert optimizer_bits(optimizer) == before
    # A second moment of 1e-12 is 0 in float16.
    state = optimizer.state_dict()
    for one in state["state"].values():
        one["exp_avg_sq"].fill_(1e-12)
    optimizer.load_state_dict(state)
    assert all((one["exp_avg_sq"] == torch.tensor(1e-12)).all() for one in optimizer.state.values())


def resume(level, variant, checkpoint, order, make_scheduler=None, scale=SCALE):
    """Fresh objects, loaded in the given order; "initialize" is one of the steps."""
    model = make_net(variant)
    optimizer = variant(model.parameters())
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    config = amp.DynamicLossScale(scale) if level == "O2" and not variant.needs_closure else scale
    steps = {
        "initialize": lambda: amp.initialize(
            model, optimizer, opt_level=level, loss_scale=config, verbosity=0
        ),
        "model": lambda: model.load_state_dict(checkpoint[0]),
        "optimizer": lambda: optimizer.load_state_dict(checkpoint[1]),
        "amp": lambda: amp.load_state_dict(checkpoint[2]),
        "scheduler": lambda: scheduler.load_state_dict(checkpoint[3]) if scheduler else None,
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


@pytest.mark.exhaustive(keep=12)
@LEVELS
@pytest.mark.parametrize("variant", SKIPPING_VARIANTS, ids=str)
def test_a_resumed_run_is_bit_equal_to_the_one_that_never_stopped(variant, level):
    model, optimizer, _ = open_both(level, variant)
    train(model, optimizer, make_batches(variant, 3))
    checkpoint = saved(all_state(model, optimizer))
    batches = make_batches(variant, 3)
    expected = [train(model, optimizer, batches), *all_state(model, optimizer)]
    amp.uninitialize()
    model, optimizer, _ = resume(level, variant, checkpoint, ORDERS[0])
    assert snapshot([train(model, optimizer, batches), *all_state(model, optimizer)]) == snapshot(expected)


@LEVELS
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("variant", [ADAM, MOMENTUM], ids=str)
def test_resuming_works_in_any_order_with_a_scheduler_and_after_overflows(variant, level, order):
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
    if level == "O2":
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
def test_a_float32_checkpoint_goes_on_at_a_level_with_masters_and_back(level):
    model = Dense()
    optimizer = ADAM(model.parameters())
    train_plainly(model, optimizer, make_batches(ADAM, 2))
    checkpoint = saved([model.state_dict(), optimizer.state_dict()])
    by_hand = ByHand(list(model.parameters()), ADAM, HALF[level])
    by_hand.optimizer.load_state_dict(saved(checkpoint[1]))  # loading shares the tensors
    model, optimizer, _ = open_both(level)
    model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(checkpoint[1])
    batches = make_batches(ADAM, 2)
    train(model, optimizer, batches)
    by_hand.train(batches)
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)
    checkpoint = saved([model.state_dict(), optimizer.state_dict()])
    amp.uninitialize()
    model = Dense()
    optimizer = ADAM(model.parameters())
    model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(checkpoint[1])
    assert_same_bits(model.parameters(), by_hand.masters)
    assert optimizer_bits(optimizer) == optimizer_bits(by_hand.optimizer)


@LEVELS
def test_a_deep_copy_of_the_model_shows_and_keeps_its_own_weights(level):
    model, optimizer, by_hand = open_both(level)
    batches = make_batches(ADAM, 3)
    train(model, optimizer, batches[:2])
    by_hand.train(batches[:2])
    rounded = [master.to(HALF[level]) for master in by_hand.masters]
    average = copy.deepcopy(model)
    train(model, optimizer, batches[2:])
    assert_same_bits(average.parameters(), rounded)
    assert_same_bits(average.state_dict().values(), [weight.float() for weight in rounded])
    with torch.no_grad():
        for param in average.parameters():
            param.fill_(0.5)
    assert_same_bits(average.state_dict().values(), [torch.full((3, 4), 0.5), torch.full((2, 3), 0.5)])
    by_hand.train(batches[2:])
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)
    assert average(batches[0]).dtype is torch.float32


@LEVELS
def test_a_deep_copy_of_the_model_loads_a_state_dict_of_the_model(level):
    model, optimizer, by_hand = open_both(level)
    average = copy.deepcopy(model)
    batches = make_batches(ADAM, 2)
    train(model, optimizer, batches)
    average.load_state_dict(model.state_dict())
    assert_same_bits(average.parameters(), model.parameters())
    by_hand.train(batches)
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)


@LEVELS
def test_an_averaged_model_follows_the_model(level):
    model, optimizer, _ = open_both(level)
    average = torch.optim.swa_utils.AveragedModel(model).float()
    for batch in make_batches(ADAM, 3):
        iterate(model, optimizer, batch)
        average.update_parameters(model)
    assert average(torch.randn(5, 4)).dtype is torch.float32
    assert all(value.dtype is not HALF[level] for value in average.state_dict().values())


@LEVELS
def test_the_model_pickles_and_the_copy_runs_with_its_rounded_weights(level):
    model, optimizer, _ = open_both(level)
    train(model, optimizer, make_batches(ADAM, 2))
    clone = pickle.loads(pickle.dumps(model))
    batch = torch.randn(5, 4)
    assert snapshot(clone(batch)) == snapshot(model(batch))
    assert_same_bits(clone.parameters(), model.parameters())
    assert_same_bits(clone.state_dict().values(), [param.float() for param in model.parameters()])


@LEVELS
def test_a_pickled_model_outlives_its_session(level):
    model, _, _ = open_both(level)
    pickled, batch = pickle.dumps(model), torch.randn(5, 4)
    expected = snapshot(model(batch))
    amp.uninitialize()
    assert snapshot(pickle.loads(pickled)(batch)) == expected


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
