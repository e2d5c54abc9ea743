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
    snapshot,
    torch_is_before,
)
from mastering import ADAM, HALF, LEVELS, MOMENTUM, iterate, open_both, optimizer_bits


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


@LEVELS
def test_a_layer_that_is_made_anew_after_loading_stays_so(level):
    model, optimizer, _ = open_both(level)
    model.load_state_dict(model.state_dict())
    (weight, *_) = model.parameters()
    torch.nn.init.constant_(weight, 0.25)
    model(*make_batches(ADAM, 1))
    assert weight.eq(0.25).all()
    assert next(amp.master_params(optimizer)).eq(0.25).all()
