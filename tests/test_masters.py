"""O2 and O5: the optimizer steps float32 masters as a float32 optimizer would, bit for bit."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch.nn import Parameter
from torch.nn.functional import embedding, linear

import ampatch as amp
from helpers import (
    OPTIMIZER_CLASSES,
    SKIPPING_VARIANTS,
    VARIANTS,
    Dense,
    Variant,
    assert_same_bits,
    make_batches,
    make_net,
    snapshot,
    torch_is_before,
)

HALF = {"O2": torch.float16, "O5": torch.bfloat16}
LEVELS = pytest.mark.parametrize("level", list(HALF))
ADAM = Variant(torch.optim.Adam, {"weight_decay": 0.1})
MOMENTUM = Variant(torch.optim.SGD, {"momentum": 0.9})
SCALE = 2.0**7


class ByHand:
    """A float32 optimizer, fed with the gradients of half copies that are made anew each iteration."""

    def __init__(self, weights, make_optimizer, half, scale=SCALE):
        self.masters = [Parameter(weight.detach().clone()) for weight in weights]
        self.optimizer = make_optimizer(self.masters)
        self.half, self.scale = half, scale

    def compute(self, halves, batch):
        if len(halves) == 1:
            return embedding(batch, halves[0], sparse=True)
        return linear(torch.relu(linear(batch.to(self.half), halves[0])), halves[1])

    def backward(self, batch):
        halves = [master.detach().to(self.half).requires_grad_() for master in self.masters]
        loss = self.compute(halves, batch).float().square().mean()
        (loss * self.scale).backward()
        for master, half in zip(self.masters, halves, strict=True):
            grad = half.grad.float() / self.scale
            master.grad = grad if master.grad is None else master.grad + grad
        return loss.detach()

    def iterate(self, batch):
        def closure():
            self.optimizer.zero_grad()
            return self.backward(batch)

        if isinstance(self.optimizer, torch.optim.LBFGS):
            return self.optimizer.step(closure)
        loss = closure()
        self.optimizer.step()
        return loss

    def train(self, batches):
        return [self.iterate(batch) for batch in batches]


def backward(model, optimizer, batch, **options):
    loss = model(batch).square().mean()
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()
    return loss.detach()


def iterate(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        return backward(model, optimizer, batch)

    if isinstance(optimizer, torch.optim.LBFGS):
        return optimizer.step(closure)
    loss = closure()
    optimizer.step()
    return loss


def train(model, optimizer, batches):
    return [iterate(model, optimizer, batch) for batch in batches]


def open_both(level, variant=ADAM, scale=SCALE, **options):
    """A model and its optimizer at a level, and the same weights in a float32 optimizer."""
    model = make_net(variant)
    optimizer = variant(model.parameters())
    by_hand = ByHand(list(model.parameters()), variant, HALF[level], scale)
    if not variant.needs_closure and level == "O2":
        scale = amp.DynamicLossScale(scale)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0, **options)
    return model, optimizer, by_hand


def optimizer_bits(optimizer):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [snapshot(optimizer.state[param]) for param in params if param in optimizer.state]


def saved(value):
    """What a checkpoint file holds, read back."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def all_state(model, optimizer, *more):
    return [model.state_dict(), optimizer.state_dict(), amp.state_dict(), *[one.state_dict() for one in more]]


# The trajectory


def test_the_variants_hold_every_class_of_torch_optim():
    assert {variant.kind for variant in VARIANTS} == set(OPTIMIZER_CLASSES)
    assert len(OPTIMIZER_CLASSES) >= (14 if torch_is_before("2.9") else 15)


@LEVELS
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_weights_are_bit_equal_to_a_float32_optimizer_fed_the_same_gradients(variant, level):
    model, optimizer, by_hand = open_both(level, variant)
    for batch in make_batches(variant, 5):
        before = [param.clone() for param in model.parameters()]
        assert snapshot(iterate(model, optimizer, batch)) == snapshot(by_hand.iterate(batch))
        assert snapshot(before) != snapshot(list(model.parameters()))
        assert_same_bits(amp.master_params(optimizer), by_hand.masters)
        assert_same_bits(model.state_dict().values(), by_hand.masters)
        assert_same_bits(model.parameters(), [master.to(HALF[level]) for master in by_hand.masters])
    assert optimizer_bits(optimizer) == optimizer_bits(by_hand.optimizer)


@LEVELS
@pytest.mark.parametrize("variant", [ADAM, MOMENTUM], ids=str)
def test_accumulated_gradients_add_up_in_float32(variant, level):
    model, optimizer, by_hand = open_both(level, variant)
    batches = make_batches(variant, 6)
    for index in range(0, 6, 3):
        optimizer.zero_grad()
        by_hand.optimizer.zero_grad()
        for batch in batches[index : index + 3]:
            backward(model, optimizer, batch)
            by_hand.backward(batch)
        optimizer.step()
        by_hand.optimizer.step()
        assert_same_bits(amp.master_params(optimizer), by_hand.masters)


@LEVELS
def test_a_step_too_small_for_the_half_type_is_not_lost(level):
    model, optimizer, by_hand = open_both(level, Variant(torch.optim.SGD, {"lr": 1e-6}))
    batches = make_batches(ADAM, 5)
    train(model, optimizer, batches)
    by_hand.train(batches)
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)


@LEVELS
def test_master_params_are_the_float32_leaves_in_the_param_groups(level):
    model, optimizer, _ = open_both(level)
    masters = list(amp.master_params(optimizer))
    assert [id(master) for group in optimizer.param_groups for master in group["params"]] == [
        *map(id, masters)
    ]
    assert all(master.dtype is torch.float32 and master.is_leaf for master in masters)
    assert all(isinstance(master, Parameter) for master in masters)
    assert [param.dtype for param in model.parameters()] == [HALF[level]] * 2


def test_master_params_works_without_initialize():
    model = Dense()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert [*map(id, amp.master_params(optimizer))] == [*map(id, model.parameters())]


@LEVELS
def test_gradients_of_masters_can_be_clipped(level):
    model, optimizer, by_hand = open_both(level)
    (batch,) = make_batches(ADAM, 1)
    backward(model, optimizer, batch)
    by_hand.backward(batch)
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e-3)
    expected = torch.nn.utils.clip_grad_norm_(by_hand.masters, 1e-3)
    assert snapshot(norm) == snapshot(expected)
    optimizer.step()
    by_hand.optimizer.step()
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)


@LEVELS
def test_a_model_without_masters_is_stepped_itself_where_master_weights_is_false(level):
    model = Dense()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    params = [*map(id, model.parameters())]
    amp.initialize(model, optimizer, opt_level=level, master_weights=False, verbosity=0)
    iterate(model, optimizer, torch.randn(5, 4))
    assert [*map(id, amp.master_params(optimizer))] == params


# Starting over


@LEVELS
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_the_gradients_of_model_and_masters(level, set_to_none):
    model, optimizer, _ = open_both(level)
    backward(model, optimizer, torch.randn(5, 4))
    optimizer.zero_grad(set_to_none=set_to_none)
    for param in [*model.parameters(), *amp.master_params(optimizer)]:
        assert (param.grad is None) if set_to_none else not param.grad.any()


@LEVELS
def test_zero_grad_takes_set_to_none_by_position(level):
    model, optimizer, _ = open_both(level)
    backward(model, optimizer, torch.randn(5, 4))
    optimizer.zero_grad(False)
    assert all(param.grad is not None for param in [*model.parameters(), *amp.master_params(optimizer)])


def clear_param_grads(model):
    for param in model.parameters():
        param.grad = None


def zero_param_grads(model):
    for param in model.parameters():
        param.grad.zero_()


START_OVER = {
    "model.zero_grad": lambda model: model.zero_grad(),
    "model.zero_grad(False)": lambda model: model.zero_grad(set_to_none=False),
    "grad = None": clear_param_grads,
    "grad.zero_": zero_param_grads,
}


@LEVELS
@pytest.mark.parametrize("start_over", START_OVER.values(), ids=START_OVER)
def test_clearing_the_models_gradients_alone_starts_over(level, start_over):
    model, optimizer, by_hand = open_both(level)
    dropped, used, last = make_batches(ADAM, 3)
    backward(model, optimizer, dropped)
    start_over(model)
    backward(model, optimizer, used)
    by_hand.backward(used)
    optimizer.step()
    by_hand.optimizer.step()
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)
    start_over(model)
    by_hand.optimizer.zero_grad()
    backward(model, optimizer, last)
    by_hand.backward(last)
    optimizer.step()
    by_hand.optimizer.step()
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)


@LEVELS
@pytest.mark.parametrize("way", ["model.zero_grad", "grad = None"])
def test_a_step_right_after_clearing_the_models_gradients_changes_nothing(level, way):
    start_over = START_OVER[way]
    model, optimizer, _ = open_both(level, MOMENTUM)
    backward(model, optimizer, torch.randn(5, 4))
    before = snapshot([list(model.parameters()), list(amp.master_params(optimizer))])
    start_over(model)
    optimizer.step()
    assert snapshot([list(model.parameters()), list(amp.master_params(optimizer))]) == before


@LEVELS
def test_a_step_clears_the_gradients_of_masters_and_leaves_those_of_the_model(level):
    model, optimizer, _ = open_both(level)
    backward(model, optimizer, torch.randn(5, 4))
    grads = [param.grad for param in model.parameters()]
    optimizer.step()
    assert [master.grad for master in amp.master_params(optimizer)] == [None, None]
    assert [param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True)] == [True, True]


def test_a_skipped_step_clears_the_gradients_of_masters_too():
    model, optimizer, by_hand = open_both("O2")
    bad, good = make_batches(ADAM, 2)
    backward(model, optimizer, bad * 1e30)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert [master.grad for master in amp.master_params(optimizer)] == [None, None]
    by_hand.scale = amp.get_loss_scale()
    model.zero_grad()
    backward(model, optimizer, good)
    by_hand.backward(good)
    optimizer.step()
    by_hand.optimizer.step()
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)


@LEVELS
def test_the_models_own_gradients_stay_scaled_in_the_half_type(level):
    model, optimizer, by_hand = open_both(level)
    (batch,) = make_batches(ADAM, 1)
    backward(model, optimizer, batch)
    by_hand.backward(batch)
    expected = [(master.grad * SCALE).to(HALF[level]) for master in by_hand.masters]
    assert_same_bits([param.grad for param in model.parameters()], expected)


@LEVELS
def test_a_backward_outside_the_block_adds_unscaled_gradients(level):
    model, optimizer, by_hand = open_both(level)
    (batch,) = make_batches(ADAM, 1)
    model(batch).square().mean().backward()
    with warnings.catch_warnings(record=True) as caught:  # it counts, and is said where the scale is dynamic
        warnings.simplefilter("always")
        optimizer.step()
    assert all("outside of scale_loss" in str(warning.message) for warning in caught)
    by_hand.scale = 1.0
    by_hand.iterate(batch)
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)


@LEVELS
def test_a_step_before_any_backward_changes_nothing(level):
    model, optimizer, _ = open_both(level)
    before = snapshot([list(model.parameters()), list(amp.master_params(optimizer))])
    optimizer.step()
    assert snapshot([list(model.parameters()), list(amp.master_params(optimizer))]) == before
    assert optimizer.state == {}


# Saving and loading


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


def train_plainly(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


# What an optimizer brings along, and gets later


@LEVELS
@pytest.mark.parametrize("variant", SKIPPING_VARIANTS, ids=str)
def test_state_from_before_initialize_is_kept_bit_for_bit(variant, level):
    model = make_net(variant)
    optimizer = variant(model.parameters())
    train_plainly(model, optimizer, make_batches(variant, 2))
    by_hand = ByHand(list(model.parameters()), variant, HALF[level])
    by_hand.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = optimizer_bits(optimizer)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)
    assert optimizer_bits(optimizer) == before
    batches = make_batches(variant, 2)
    train(model, optimizer, batches)
    by_hand.train(batches)
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)
    assert optimizer_bits(optimizer) == optimizer_bits(by_hand.optimizer)


@LEVELS
def test_a_group_that_is_added_later_gets_masters(level):
    model = Dense()
    by_hand = ByHand(list(model.parameters()), ADAM, HALF[level])
    groups = [{"params": [by_hand.masters[0]]}, {"params": [by_hand.masters[1]], "lr": 0.5}]
    by_hand.optimizer = ADAM(groups)
    optimizer = ADAM([model.first.weight])
    amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)
    optimizer.add_param_group({"params": model.second.parameters(), "lr": 0.5})
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
    assert optimizer.param_groups[1]["lr"] == 0.5
    batches = make_batches(ADAM, 3)
    train(model, optimizer, batches)
    by_hand.train(batches)
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)


@LEVELS
def test_a_float32_parameter_of_no_model_can_be_added_and_is_stepped_itself(level):
    model, optimizer, _ = open_both(level, MOMENTUM)
    extra = Parameter(torch.ones(2))
    optimizer.add_param_group({"params": extra})
    assert list(amp.master_params(optimizer))[-1] is extra
    oracle = Parameter(torch.ones(2))
    oracle_optimizer = MOMENTUM([oracle])
    for batch in make_batches(ADAM, 3):
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        loss = (model(batch) * extra).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        oracle.grad = extra.grad.clone()
        assert extra.grad.any()
        optimizer.step()
        oracle_optimizer.step()
        assert snapshot(extra) == snapshot(oracle)


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


@LEVELS
def test_a_parameter_that_is_unfrozen_later_is_trained_from_its_float32_values(level):
    model = Dense()
    by_hand = ByHand(list(model.parameters()), ADAM, HALF[level])
    model.first.weight.requires_grad_(False)
    optimizer = ADAM(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)
    model.first.weight.requires_grad_(True)
    batches = make_batches(ADAM, 2)
    train(model, optimizer, batches)
    by_hand.train(batches)
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = torch.nn.Linear(4, 4, bias=False)
        self.decode = torch.nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, batch):
        return self.decode(torch.relu(self.encode(batch)))


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
def test_two_optimizers_that_share_a_parameter_share_its_master(level):
    _, optimizers, _ = open_shared(level)
    first, second = [list(amp.master_params(optimizer)) for optimizer in optimizers]
    assert first[1] is second[0]


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
def test_two_optimizers_that_share_a_parameter_both_step_one_gradient(level):
    model, optimizers, by_hand = open_shared(level)
    for batch in make_batches(ADAM, 3):
        for optimizer in [*optimizers, *by_hand.others]:
            optimizer.zero_grad()
        backward(model, optimizers, batch)
        by_hand.backward(batch)
        for optimizer in [*optimizers, *by_hand.others]:
            optimizer.step()
        assert_same_bits(amp.master_params(optimizers[0]), by_hand.masters)


# Weights written by hand


@LEVELS
def test_a_weight_that_was_copied_in_between_steps_is_where_training_goes_on(level):
    model, optimizer, by_hand = open_both(level, MOMENTUM)
    first, second = make_batches(ADAM, 2)
    iterate(model, optimizer, first)
    by_hand.iterate(first)
    new = torch.randn(3, 4).to(HALF[level])
    with torch.no_grad():
        model.first.weight.copy_(new)
        by_hand.masters[0].copy_(new)
    assert snapshot(model.state_dict()["first.weight"]) == snapshot(new.float())
    iterate(model, optimizer, second)
    by_hand.iterate(second)
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)


@LEVELS
def test_a_write_that_leaves_no_trace_shows_in_the_state_dict_and_one_by_data_reaches_the_step(level):
    model, optimizer, _ = open_both(level, Variant(torch.optim.SGD, {"lr": 0.0}))
    kept = model.first.weight.data
    iterate(model, optimizer, torch.randn(5, 4))
    kept.fill_(0.5)
    assert model.state_dict()["first.weight"].eq(0.5).all()
    asked = model.first.weight.data
    model.state_dict()
    asked.fill_(0.25)
    optimizer.step()
    assert next(amp.master_params(optimizer)).eq(0.25).all()


@LEVELS
def test_an_average_that_is_swapped_in_for_evaluation_and_out_again_leaves_no_trace(level):
    model, optimizer, by_hand = open_both(level, MOMENTUM)
    first, second = make_batches(ADAM, 2)
    iterate(model, optimizer, first)
    by_hand.iterate(first)
    own = [param.data for param in model.parameters()]
    for param in model.parameters():
        param.data = torch.zeros_like(param)
    assert not model(first).any()
    for param, data in zip(model.parameters(), own, strict=True):
        param.data = data
    iterate(model, optimizer, second)
    by_hand.iterate(second)
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)


# Copies


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


# The way back


@LEVELS
@pytest.mark.parametrize("variant", SKIPPING_VARIANTS, ids=str)
def test_uninitialize_puts_the_models_parameters_back_and_training_goes_on(variant, level):
    model = make_net(variant)
    optimizer = variant(model.parameters())
    attributes = set(vars(optimizer))
    lists = [id(optimizer.param_groups), *(id(group["params"]) for group in optimizer.param_groups)]
    params = [*map(id, model.parameters())]
    by_hand = ByHand(list(model.parameters()), variant, HALF[level])
    amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)
    batches = make_batches(variant, 4)
    train(model, optimizer, batches[:2])
    by_hand.train(batches[:2])
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
def test_uninitialize_between_backward_and_step_keeps_the_unscaled_gradients(level):
    model, optimizer, by_hand = open_both(level)
    (batch,) = make_batches(ADAM, 1)
    backward(model, optimizer, batch)
    by_hand.backward(batch)
    amp.uninitialize()
    assert_same_bits(
        [param.grad for param in model.parameters()], [master.grad for master in by_hand.masters]
    )
    optimizer.step()
    by_hand.optimizer.step()
    assert_same_bits(model.parameters(), by_hand.masters)


@LEVELS
def test_cycles_of_initialize_and_uninitialize_lose_no_bit(level):
    model = Dense()
    optimizer = ADAM(model.parameters())
    by_hand = ByHand(list(model.parameters()), ADAM, HALF[level])
    for batch in make_batches(ADAM, 4):
        amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)
        iterate(model, optimizer, batch)
        by_hand.iterate(batch)
        amp.uninitialize()
        assert_same_bits(model.parameters(), by_hand.masters)
        assert optimizer_bits(optimizer) == optimizer_bits(by_hand.optimizer)


@LEVELS
def test_a_group_that_was_added_meanwhile_holds_the_models_parameters_afterwards(level):
    model = Dense()
    optimizer = ADAM([model.first.weight])
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    optimizer.add_param_group({"params": model.second.parameters()})
    amp.uninitialize()
    assert [group["params"][0] for group in optimizer.param_groups][1] is model.second.weight


@LEVELS
def test_schedulers_and_zero_grad_work_after_uninitialize(level):
    model, optimizer, _ = open_both(level)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    iterate(model, optimizer, torch.randn(5, 4))
    scheduler.step()
    amp.uninitialize()
    train_plainly(model, optimizer, make_batches(ADAM, 1))
    scheduler.step()
    optimizer.zero_grad(set_to_none=False)
    assert not any(param.grad.any() for param in model.parameters())


# Layouts of memory


class Convolve(torch.nn.Module):
    """A weight whose layouts differ, in a product whose gradients have the layout of the batch."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, bias=False)

    def forward(self, batch):
        return self.conv(batch)


def to_channels_last(model, optimizer):
    model.to(memory_format=torch.channels_last)


def set_data(model, optimizer):
    weight = model.conv.weight
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)


def assign_state(model, optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    for one in state["state"].values():
        one.update(
            (name, value.contiguous(memory_format=torch.channels_last))
            for name, value in one.items()
            if torch.is_tensor(value) and value.dim() == 4
        )
    optimizer.load_state_dict(state)


def hand_over_gradient(model, optimizer):
    weight = model.conv.weight
    weight.register_hook(lambda grad: grad.contiguous(memory_format=torch.channels_last))


CHANGES = [to_channels_last, set_data, assign_state, hand_over_gradient]
FUSED = [
    Variant(torch.optim.Adam, {"fused": True, "amsgrad": True}),
    Variant(torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    Variant(torch.optim.Adagrad, {"fused": True}),
]


def train_convolution(level, variant, change, when, **options):
    """Trains with a change of layout before the step `when`; returns masters and optimizer state."""
    torch.manual_seed(0)
    model = Convolve()
    optimizer = Variant(variant.kind, variant.options | options)(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)
    for step in range(5):
        if step == when:
            change(model, optimizer)
        optimizer.zero_grad()
        for _ in range(2):
            backward(model, optimizer, torch.randn(2, 3, 6, 6))
        optimizer.step()
    params = [param.detach().clone() for param in amp.master_params(optimizer)]
    state = [{**optimizer.state[param]} for param in amp.master_params(optimizer)]
    amp.uninitialize()
    return params, state


@LEVELS
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("variant", FUSED, ids=str)
def test_a_fused_optimizer_steps_masters_in_whatever_layout_the_model_has(level, variant, change, when):
    expected = train_convolution(level, variant, change, when, fused=False, foreach=False)
    found = train_convolution(level, variant, change, when)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


ODD = {
    "transposed": lambda: torch.randn(4, 3).t(),
    "with gaps": lambda: torch.randn(3, 8)[:, ::2],
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
}


@LEVELS
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
@pytest.mark.parametrize("variant", FUSED, ids=str)
def test_a_fused_optimizer_steps_masters_of_weights_that_do_not_fill_their_memory(level, variant, make):
    def run(lay_out, **options):
        torch.manual_seed(0)
        model = Dense()
        model.first.weight = Parameter(lay_out(make()))
        optimizer = Variant(variant.kind, variant.options | options)(model.parameters())
        amp.initialize(model, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)
        train(model, optimizer, make_batches(variant, 3))
        found = copy.deepcopy(list(amp.master_params(optimizer)))
        amp.uninitialize()
        return found, list(model.parameters())

    expected = run(torch.Tensor.contiguous, fused=False, foreach=False)
    torch.testing.assert_close(run(lambda weight: weight), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", [*HALF, "O3"])
def test_a_gradient_that_is_there_at_uninitialize_has_the_layout_of_its_weight(level):
    model = Convolve()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    amp.initialize(model, optimizer, opt_level=level, master_weights=level != "O3", verbosity=0)
    model.to(memory_format=torch.channels_last)
    model(torch.ones(2, 3, 6, 6)).sum().backward()
    amp.uninitialize()
    weight = model.conv.weight
    assert weight.grad.stride() == weight.stride()
    expected = weight.detach() - 0.5 * weight.grad
    optimizer.step()
    assert torch.equal(weight, expected)
