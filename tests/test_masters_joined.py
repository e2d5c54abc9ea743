"""What an optimizer brings along to its masters, gets later, and has again after uninitialize."""

import copy

import pytest
import torch
from torch.nn.functional import linear

import ampatch as amp
from apex_rows import shows
from helpers import (
    SKIPPING_VARIANTS,
    Dense,
    Variant,
    assert_same_bits,
    make_batches,
    make_net,
)
from mastering import (
    ADAM,
    HALF,
    LEVELS,
    MOMENTUM,
    SCALE,
    ByHand,
    backward,
    iterate,
    open_both,
    optimizer_bits,
    train,
    train_plainly,
)


@LEVELS
@pytest.mark.parametrize("which", ["half", "master"])
def test_a_parameter_that_is_in_a_group_already_cannot_be_added_again(level, which):
    model, optimizer, by_hand = open_both(level)
    param = model.first.weight if which == "half" else next(amp.master_params(optimizer))
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [param]})
    assert len(optimizer.param_groups) == 1
    (batch,) = make_batches(ADAM, 1)
    iterate(model, optimizer, batch)
    by_hand.iterate(batch)
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)


@LEVELS
def test_a_group_that_is_taken_out_and_added_again_goes_on_from_its_state(level):
    model = Dense()
    groups = [{"params": [model.first.weight]}, {"params": [model.second.weight]}]
    by_hand = ByHand(list(model.parameters()), MOMENTUM, HALF[level])
    by_hand.optimizer = MOMENTUM([{"params": [master]} for master in by_hand.masters])
    optimizer = MOMENTUM(groups)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)
    for added, batch in zip((None, False, True), make_batches(ADAM, 3), strict=True):
        for one, param in ((optimizer, model.second.weight), (by_hand.optimizer, by_hand.masters[1])):
            if added:
                one.add_param_group({"params": [param]})
            elif added is not None:
                one.param_groups.pop()
        iterate(model, optimizer, batch)
        by_hand.iterate(batch)
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)


@shows("optimizers-frozen")
@LEVELS
def test_frozen_parameters_get_masters_and_stay_as_they_are(level):
    model = Dense()
    model.first.weight.requires_grad_(False)
    frozen = model.first.weight.clone()
    optimizer = ADAM(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    masters = list(amp.master_params(optimizer))
    assert [master.requires_grad for master in masters] == [False, True]
    train(model, optimizer, make_batches(ADAM, 2))
    assert_same_bits([masters[0], model.state_dict()["first.weight"]], [frozen, frozen])
    assert model.first.weight.grad is None


class KeepsParams(torch.optim.Optimizer):
    """Steps the parameters that it was made with, and not what is in its groups."""

    def __init__(self, params, lr, keep):
        params = list(params)
        super().__init__(params, {})
        self.kept = keep(params)

    def step(self, closure=None):
        kept = self.kept["all"] if isinstance(self.kept, dict) else self.kept
        for param in kept:
            param.data.add_(param.grad, alpha=-0.25)


@LEVELS
@pytest.mark.parametrize("keep", [list, tuple])
def test_an_optimizer_that_keeps_a_list_of_its_parameters_steps_masters(level, keep, caplog):
    model, optimizer, by_hand = open_both(level, Variant(KeepsParams, {"keep": keep}))
    batches = make_batches(ADAM, 2)
    for batch in batches:
        iterate(model, optimizer, batch)
    by_hand.train(batches)
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)
    amp.uninitialize()
    assert all(kept is param for kept, param in zip(optimizer.kept, model.parameters(), strict=True))
    assert not caplog.records


@LEVELS
def test_an_optimizer_that_steps_the_half_weights_is_warned_of_once(level):
    model, optimizer, _ = open_both(level, Variant(KeepsParams, {"keep": lambda kept: {"all": kept}}))
    first, second = make_batches(ADAM, 2)
    with pytest.warns(UserWarning, match="KeepsParams.step wrote into the half weights"):
        iterate(model, optimizer, first)
    iterate(model, optimizer, second)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = torch.nn.Linear(4, 4, bias=False)
        self.decode = torch.nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, batch):
        return self.decode(torch.relu(self.encode(batch)))


@shows("patterns-tied")
@LEVELS
def test_tied_weights_have_one_master_and_both_gradients(level):
    model = Tied()
    by_hand = ByHand([model.encode.weight], MOMENTUM, HALF[level])
    by_hand.compute = lambda halves, batch: linear(
        torch.relu(linear(batch.to(HALF[level]), halves[0])), halves[0]
    )
    optimizer = MOMENTUM(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)
    batches = make_batches(ADAM, 3)
    train(model, optimizer, batches)
    by_hand.train(batches)
    assert model.encode.weight is model.decode.weight
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)
    assert_same_bits(model.state_dict().values(), by_hand.masters * 2)


class SharedByHand(ByHand):
    """Two float32 optimizers over the same weights."""

    def __init__(self, model, level):
        super().__init__(list(model.parameters()), MOMENTUM, HALF[level])
        self.others = [self.optimizer, ADAM(self.masters[1:])]


def open_shared(level):
    model = Dense()
    by_hand = SharedByHand(model, level)
    optimizers = [MOMENTUM(model.parameters()), ADAM(model.second.parameters())]
    amp.initialize(model, optimizers, opt_level=level, loss_scale=SCALE, verbosity=0)
    return model, optimizers, by_hand


@LEVELS
def test_two_optimizers_that_share_a_parameter_take_turns(level):
    model, optimizers, by_hand = open_shared(level)
    for turn, batch in enumerate(make_batches(ADAM, 4)):
        one, other = optimizers[turn % 2], by_hand.others[turn % 2]
        for optimizer in [*optimizers, *by_hand.others]:
            optimizer.zero_grad()
        backward(model, one, batch)
        by_hand.backward(batch)
        one.step()
        other.step()
        assert_same_bits(amp.master_params(optimizers[0]), by_hand.masters)


@LEVELS
@pytest.mark.parametrize("names", [[0, 1], [0], [1]])
@pytest.mark.parametrize("first", [0, 1])
def test_two_optimizers_that_share_a_parameter_step_what_was_delayed_unscaled(level, names, first):
    model, optimizers, by_hand = open_shared(level)
    (batch,) = make_batches(ADAM, 1)
    with amp.scale_loss(
        model(batch).square().mean(), [optimizers[index] for index in names], delay_unscale=True
    ) as scaled:
        scaled.backward()
    by_hand.scale = SCALE
    by_hand.backward(batch)
    for index in (first, 1 - first):
        optimizers[index].step()
        by_hand.others[index].step()
    assert_same_bits(amp.master_params(optimizers[0]), by_hand.masters)


@shows("initialize-state-defect")
@pytest.mark.exhaustive(keep=12)
@LEVELS
@pytest.mark.parametrize("variant", SKIPPING_VARIANTS, ids=str)
def test_state_is_taken_over_by_initialize_and_put_back_by_uninitialize_bit_for_bit(variant, level):
    model = make_net(variant)
    optimizer = variant(model.parameters())
    train_plainly(model, optimizer, make_batches(variant, 2))
    attributes = set(vars(optimizer))
    lists = [id(optimizer.param_groups), *(id(group["params"]) for group in optimizer.param_groups)]
    params = [*map(id, model.parameters())]
    by_hand = ByHand(list(model.parameters()), variant, HALF[level])
    by_hand.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = optimizer_bits(optimizer)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)
    assert optimizer_bits(optimizer) == before
    batches = make_batches(variant, 4)
    train(model, optimizer, batches[:2])
    by_hand.train(batches[:2])
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)
    assert optimizer_bits(optimizer) == optimizer_bits(by_hand.optimizer)
    amp.uninitialize()
    assert [*map(id, model.parameters())] == params
    assert [id(param) for group in optimizer.param_groups for param in group["params"]] == params
    assert [id(optimizer.param_groups), *(id(group["params"]) for group in optimizer.param_groups)] == lists
    assert {id(param) for param in optimizer.state} <= set(params)
    assert set(vars(optimizer)) == attributes
    assert_same_bits(model.parameters(), by_hand.masters)
    assert optimizer_bits(optimizer) == optimizer_bits(by_hand.optimizer)
    plain_model = make_net(variant)
    plain_model.load_state_dict(model.state_dict())
    plain_optimizer = variant(plain_model.parameters())
    plain_optimizer.load_state_dict(by_hand.optimizer.state_dict())
    train_plainly(model, optimizer, batches[2:])
    train_plainly(plain_model, plain_optimizer, batches[2:])
    assert_same_bits(model.parameters(), plain_model.parameters())


@LEVELS
def test_a_group_that_was_added_meanwhile_holds_the_models_parameters_afterwards(level):
    model = Dense()
    optimizer = ADAM([model.first.weight])
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    optimizer.add_param_group({"params": model.second.parameters()})
    amp.uninitialize()
    assert [group["params"][0] for group in optimizer.param_groups][1] is model.second.weight
