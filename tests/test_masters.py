"""O2 and O5: the optimizer steps float32 masters as a float32 optimizer would, bit for bit."""

import pytest
import torch
from torch.nn import Parameter

import ampatch as amp
from apex_rows import shows
from helpers import (
    OPTIMIZER_CLASSES,
    VARIANTS,
    Dense,
    Variant,
    assert_same_bits,
    make_batches,
    scaled_backward,
    snapshot,
    torch_is_before,
)
from mastering import ADAM, HALF, LEVELS, MOMENTUM, SCALE, backward, iterate, open_both, optimizer_bits

# The trajectory


def test_the_variants_hold_every_class_of_torch_optim():
    assert {variant.kind for variant in VARIANTS} == set(OPTIMIZER_CLASSES)
    assert len(OPTIMIZER_CLASSES) >= (14 if torch_is_before("2.9") else 15)


@shows("optimizers-unrounded")
@pytest.mark.exhaustive(keep=12)
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


@shows("optimizers-masters")
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


@shows("patterns-state-dict")
def test_master_params_works_without_initialize():
    model = Dense()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert [*map(id, amp.master_params(optimizer))] == [*map(id, model.parameters())]


# Starting over


@shows("never-set-to-none", "optimizers-zero-grad")
@LEVELS
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_the_gradients_of_model_and_masters(level, set_to_none):
    model, optimizer, _ = open_both(level)
    backward(model, optimizer, torch.randn(5, 4))
    optimizer.zero_grad(set_to_none)
    for param in [*model.parameters(), *amp.master_params(optimizer)]:
        assert (param.grad is None) if set_to_none else not param.grad.any()


def clear_param_grads(model):
    for param in model.parameters():
        param.grad = None


def zero_param_grads(model):
    for param in model.parameters():
        param.grad.zero_()


def zero_grads_through_data(model):
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data.zero_()


START_OVER = {
    "model.zero_grad": lambda model: model.zero_grad(),
    "model.zero_grad(False)": lambda model: model.zero_grad(set_to_none=False),
    "grad = None": clear_param_grads,
    "grad.zero_": zero_param_grads,
    "grad.data.zero_": zero_grads_through_data,
}


@shows("patterns-model-grads")
@LEVELS
@pytest.mark.parametrize("when", ["before the step", "after the step"])
@pytest.mark.parametrize("is_plain", [False, True], ids=["a block", "a plain backward and a block"])
@pytest.mark.parametrize("start_over", START_OVER.values(), ids=START_OVER)
def test_clearing_the_models_gradients_alone_starts_over(level, start_over, is_plain, when):
    model, optimizer, by_hand = open_both(level)
    first, second, third = make_batches(ADAM, 3)
    if when == "after the step":
        iterate(model, optimizer, first)
        by_hand.iterate(first)
        by_hand.optimizer.zero_grad()
    else:
        backward(model, optimizer, first)
    start_over(model)
    if is_plain:
        model(second).square().mean().backward()
    backward(model, optimizer, third)
    optimizer.step()
    for by_hand.scale, batch in [(1.0, second), (SCALE, third)][not is_plain :]:
        by_hand.backward(batch)
    by_hand.optimizer.step()
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)


@shows("patterns-step-clears")
@LEVELS
def test_a_step_clears_the_gradients_of_masters_and_leaves_those_of_the_model(level):
    model, optimizer, _ = open_both(level)
    backward(model, optimizer, torch.randn(5, 4))
    grads = [param.grad for param in model.parameters()]
    optimizer.step()
    assert [master.grad for master in amp.master_params(optimizer)] == [None, None]
    assert [param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True)] == [True, True]


@shows("patterns-step-clears")
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


@shows("scale-masters", "patterns-model-grads")
@LEVELS
def test_the_models_own_gradients_stay_scaled_in_the_half_type(level):
    model, optimizer, by_hand = open_both(level)
    (batch,) = make_batches(ADAM, 1)
    backward(model, optimizer, batch)
    by_hand.backward(batch)
    expected = [(master.grad * SCALE).to(HALF[level]) for master in by_hand.masters]
    assert_same_bits([param.grad for param in model.parameters()], expected)


@shows("patterns-step-before-backward")
@LEVELS
def test_a_step_before_any_backward_changes_nothing(level):
    model, optimizer, _ = open_both(level)
    before = snapshot([list(model.parameters()), list(amp.master_params(optimizer))])
    optimizer.step()
    assert snapshot([list(model.parameters()), list(amp.master_params(optimizer))]) == before
    assert optimizer.state == {}


# Weights written by hand


@LEVELS
def test_a_weight_that_was_swapped_for_another_is_where_training_goes_on(level):
    model, optimizer, by_hand = open_both(level, MOMENTUM)
    (batch,) = make_batches(ADAM, 1)
    new = torch.randn(3, 4).to(HALF[level])
    for _ in range(model.first.weight._version):
        new.mul_(1)  # so that versions tell nothing
    torch.utils.swap_tensors(model.first.weight, Parameter(new))
    by_hand.masters[0].data.copy_(model.first.weight)
    iterate(model, optimizer, batch)
    by_hand.iterate(batch)
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


CLEAR = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand, through data": lambda model, optimizer: zero_grads_through_data(model),
    "never": lambda model, optimizer: None,
}


@LEVELS
@pytest.mark.parametrize("when", ["before backward", "after step"])
@pytest.mark.parametrize("clear", CLEAR)
def test_steps_without_scale_loss_are_those_of_float32_however_gradients_are_cleared(level, when, clear):
    weights = {}
    for opt_level in ("O0", level):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=1.0, verbosity=0)
        for _ in range(4):  # of the same gradient each
            if when == "before backward":
                CLEAR[clear](model, optimizer)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if when == "after step":
                CLEAR[clear](model, optimizer)
        weights[opt_level] = model.state_dict()["weight"].float().clone()
        amp.uninitialize()
    assert torch.equal(weights[level], weights["O0"])


@LEVELS
@pytest.mark.parametrize("clear", ["optimizer", "optimizer, to zero", "model"])
def test_a_backward_before_a_block_adds_to_it_however_gradients_are_cleared(level, clear):
    model, optimizer, by_hand = open_both(level)
    for batch in make_batches(ADAM, 3):
        CLEAR[clear](model, optimizer)
        model(batch).float().square().mean().backward()
        backward(model, optimizer, batch)
        optimizer.step()
        by_hand.optimizer.zero_grad()
        for by_hand.scale in (1.0, SCALE):
            by_hand.backward(batch)
        by_hand.optimizer.step()
        assert_same_bits(amp.master_params(optimizer), by_hand.masters)


class Heads(torch.nn.Module):
    """Two weights of which each forward uses one."""

    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ParameterList(torch.ones(2).split(1))

    def forward(self, batch, head):
        return self.heads[head] * batch


@LEVELS
@pytest.mark.parametrize("run", [scaled_backward, lambda loss, _: loss.backward()], ids=["block", "plain"])
def test_zeros_of_zero_grad_step_what_a_backward_does_not_use_as_in_float32(level, run):
    weights = {}
    for opt_level in ("O0", level):
        model = Heads()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
        amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=1.0, verbosity=0)
        for head in (0, 1, 0, 1):
            optimizer.zero_grad(set_to_none=False)
            run(model(torch.ones(1), head).sum(), optimizer)
            optimizer.step()
        weights[opt_level] = torch.stack(list(model.state_dict().values()))
        amp.uninitialize()
    assert torch.equal(weights[level], weights["O0"])


def replace_grads(model, batch):
    for param in model.parameters():
        param.grad = param.grad / 4


def backward_in_a_graph(model, batch):
    """Accumulates into new tensors."""
    model(batch).sum().backward(inputs=list(model.parameters()), create_graph=True)


CHANGE = {
    "in place": lambda model, batch: model.weight.grad.div_(4),
    "through data": lambda model, batch: model.weight.grad.data.clamp_(-1, 1),
    "data replaced": lambda model, batch: setattr(model.weight.grad, "data", model.weight.grad.data / 4),
    "zeros through data": lambda model, batch: model.weight.grad.data.zero_(),
    "replaced": replace_grads,
    "clipped": lambda model, batch: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "zeros": lambda model, batch: model.zero_grad(set_to_none=False),
    "backward": lambda model, batch: model(batch).sum().backward(),
    "backward in a graph": backward_in_a_graph,
    "cleared, backward": lambda model, batch: (model.zero_grad(), model(batch).sum().backward()),
}


@LEVELS
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("change", CHANGE.values(), ids=CHANGE)
def test_what_changes_the_gradient_of_a_block_that_scaled_nothing_counts_as_in_float32(level, change):
    weights, batch = {}, torch.tensor([[1.0, 2.0, 2.0]])
    for opt_level in ("O0", level):
        model = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
        amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=1.0, verbosity=0)
        for is_changed in (False, True):
            optimizer.zero_grad()
            scaled_backward(model(batch).sum(), optimizer)
            if is_changed:
                change(model, 2 * batch)
            optimizer.step()
        weights[opt_level] = model.state_dict()["weight"].clone()
        amp.uninitialize()
    assert torch.equal(weights[level], weights["O0"])


def halve_through_data(model, batch):
    for param in model.parameters():
        param.grad.data.div_(2)


@LEVELS
@pytest.mark.parametrize("change", [replace_grads, halve_through_data])
def test_what_is_put_in_the_place_of_a_scaled_gradient_is_ignored_with_a_warning(level, change):
    model, optimizer, by_hand = open_both(level)
    (batch,) = make_batches(ADAM, 1)
    backward(model, optimizer, batch)
    change(model, batch)
    with pytest.warns(UserWarning, match="the step ignores that"):
        optimizer.step()
    by_hand.iterate(batch)
    assert_same_bits(amp.master_params(optimizer), by_hand.masters)


@LEVELS
@pytest.mark.parametrize("scale", [1.0, SCALE])
def test_gradients_that_are_only_read_through_data_leave_those_of_masters_as_they_are(level, scale, caplog):
    model, optimizer, _ = open_both(level, scale=scale)
    first, second = make_batches(ADAM, 2)
    for batch in (first, second):
        backward(model, optimizer, batch)
        assert all(param.grad.data.norm() for param in model.parameters())
    masters = list(amp.master_params(optimizer))
    torch.nn.utils.clip_grad_norm_(masters, 0.01)
    assert all(param.grad.data.norm() for param in model.parameters())
    expected = [master.grad.clone() for master in amp.master_params(optimizer)]
    optimizer.register_step_pre_hook(lambda *_: assert_same_bits([it.grad for it in masters], expected))
    optimizer.step()
    assert "the step ignores that" not in caplog.text


@LEVELS
def test_a_layer_that_is_made_anew_after_loading_stays_so(level):
    model, optimizer, _ = open_both(level)
    model.load_state_dict(model.state_dict())
    (weight, *_) = model.parameters()
    torch.nn.init.constant_(weight, 0.25)
    model(*make_batches(ADAM, 1))
    assert weight.eq(0.25).all()
    assert next(amp.master_params(optimizer)).eq(0.25).all()
