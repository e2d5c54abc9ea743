"""Blocks of scale_loss add up: repeated, delayed, clipped, sparse."""

import copy

import pytest
import torch
from torch.nn import Parameter

import ampatch as amp
from helpers import (
    Scalar,
    Sparse,
    Variant,
    snapshot,
)
from stepping import (
    BATCHES,
    DYNAMIC_LEVELS,
    FLOAT32_LEVELS,
    INF,
    LEVELS,
    MOMENTUM,
    SCALE,
    open_scalar,
    param_bits,
    run_block,
    step_by_hand,
)

GRADS = [(BATCHES[0], 1.0), (BATCHES[1], 0.5), (BATCHES[2], 2.0)]
SUM = sum(batch * factor for batch, factor in GRADS)


@LEVELS
@pytest.mark.parametrize("scale", [amp.DynamicLossScale(SCALE), 128.0, 1.0], ids=str)
def test_repeated_blocks_accumulate(level, scale):
    model, optimizer, oracle, oracle_optimizer = open_scalar(level, loss_scale=scale)
    for _ in range(2):
        optimizer.zero_grad()
        for batch, factor in GRADS:
            run_block(model, optimizer, batch, factor)
        assert snapshot(next(amp.master_params(optimizer)).grad) == snapshot(SUM)
        optimizer.step()
        step_by_hand(oracle, oracle_optimizer, SUM)
        assert param_bits(optimizer) == [snapshot(oracle)]


@LEVELS
@pytest.mark.parametrize("scale", [amp.DynamicLossScale(SCALE), 128.0, 1.0], ids=str)
def test_delayed_blocks_accumulate(level, scale):
    model, optimizer, oracle, oracle_optimizer = open_scalar(level, loss_scale=scale)
    for _ in range(2):
        optimizer.zero_grad()
        for index, (batch, factor) in enumerate(GRADS):
            run_block(model, optimizer, batch, factor, delay_unscale=index < 2)
        assert snapshot(next(amp.master_params(optimizer)).grad) == snapshot(SUM)
        optimizer.step()
        step_by_hand(oracle, oracle_optimizer, SUM)
        assert param_bits(optimizer) == [snapshot(oracle)]


@LEVELS
@pytest.mark.parametrize(
    "delays", [(True, True, True), (False, True, False), (False, True, True), (True, False, True)]
)
def test_delayed_and_plain_blocks_mix_in_any_order(level, delays):
    model, optimizer, oracle, oracle_optimizer = open_scalar(level)
    for _ in range(2):
        optimizer.zero_grad()
        for (batch, factor), delay in zip(GRADS, delays, strict=True):
            run_block(model, optimizer, batch, factor, delay_unscale=delay)
        optimizer.step()
        step_by_hand(oracle, oracle_optimizer, SUM)
        assert param_bits(optimizer) == [snapshot(oracle)]


@pytest.mark.parametrize("level", FLOAT32_LEVELS)
def test_a_delayed_block_neither_unscales_nor_checks_nor_counts(level):
    model, optimizer, *_ = open_scalar(level)
    run_block(model, optimizer, BATCHES[0])
    before = amp.state_dict()
    optimizer.zero_grad()
    run_block(model, optimizer, BATCHES[0], delay_unscale=True)
    assert snapshot(model.weight.grad) == snapshot(BATCHES[0] * SCALE)
    run_block(model, optimizer, BATCHES[0], INF, delay_unscale=True)
    assert amp.state_dict() == before


@DYNAMIC_LEVELS
def test_an_overflow_in_a_delayed_block_is_settled_by_the_next_plain_one(level):
    model, optimizer, *_ = open_scalar(level)
    before = param_bits(optimizer)
    run_block(model, optimizer, BATCHES[0], INF, delay_unscale=True)
    run_block(model, optimizer, BATCHES[1])
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": SCALE / 2, "unskipped": 0}}
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert param_bits(optimizer) == before


@DYNAMIC_LEVELS
def test_an_overflow_in_a_delayed_block_is_settled_by_the_step(level):
    model, optimizer, *_ = open_scalar(level)
    before = param_bits(optimizer)
    run_block(model, optimizer, BATCHES[0], INF, delay_unscale=True)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert param_bits(optimizer) == before
    assert amp.get_loss_scale() == SCALE / 2


@LEVELS
def test_zero_grad_forgets_what_was_delayed_and_what_was_before_it(level):
    model, optimizer, oracle, oracle_optimizer = open_scalar(level)
    run_block(model, optimizer, BATCHES[0])
    run_block(model, optimizer, BATCHES[1], delay_unscale=True)
    optimizer.zero_grad()
    run_block(model, optimizer, BATCHES[2])
    optimizer.step()
    step_by_hand(oracle, oracle_optimizer, BATCHES[2])
    assert param_bits(optimizer) == [snapshot(oracle)]


@LEVELS
def test_a_delayed_block_of_another_loss_is_unscaled_by_its_own_scale(level):
    model, optimizer, oracle, oracle_optimizer = open_scalar(level, num_losses=2)
    amp.set_loss_scale(4.0, loss_id=1)
    run_block(model, optimizer, BATCHES[0], loss_id=0, delay_unscale=True)
    run_block(model, optimizer, BATCHES[1], loss_id=1, delay_unscale=True)
    run_block(model, optimizer, BATCHES[2], loss_id=0)
    optimizer.step()
    step_by_hand(oracle, oracle_optimizer, BATCHES[0] + BATCHES[1] + BATCHES[2])
    assert param_bits(optimizer) == [snapshot(oracle)]


@DYNAMIC_LEVELS
@pytest.mark.parametrize("delays", [(True, True), (True, False), (False, True)])
def test_the_overflow_of_one_loss_leaves_the_scale_of_another(level, delays):
    model, optimizer, *_ = open_scalar(level, num_losses=2)
    run_block(model, optimizer, BATCHES[0], INF, loss_id=0, delay_unscale=delays[0])
    run_block(model, optimizer, BATCHES[1], loss_id=1, delay_unscale=delays[1])
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert [amp.get_loss_scale(loss_id) for loss_id in (0, 1)] == [SCALE / 2, SCALE]


@DYNAMIC_LEVELS
@pytest.mark.parametrize("hysteresis", [1, 2])
def test_delayed_blocks_do_not_let_the_scale_grow(level, hysteresis):
    rule = amp.DynamicLossScale(SCALE, growth_interval=3, hysteresis=hysteresis)
    model, optimizer, *_ = open_scalar(level, num_losses=2, loss_scale=rule)
    for loss_id in (0, 0, 1, 1, 1, 1):
        run_block(model, optimizer, BATCHES[loss_id], loss_id=loss_id, delay_unscale=loss_id == 1)
        optimizer.step()
        optimizer.zero_grad()
    assert amp.state_dict() == {
        "loss_scaler0": {"loss_scale": SCALE, "unskipped": 2},
        "loss_scaler1": {"loss_scale": SCALE, "unskipped": 0},
    }


@LEVELS
def test_a_delayed_optimizer_is_settled_by_the_scale_it_began_with(level):
    model = torch.nn.ModuleList([Scalar(), Scalar()])
    optimizers = [MOMENTUM([one.weight]) for one in model]
    oracle = Parameter(model[0].weight.detach().clone())
    amp.initialize(model, optimizers, opt_level=level, loss_scale=amp.DynamicLossScale(SCALE), verbosity=0)
    run_block(model[0], optimizers[0], BATCHES[0], delay_unscale=True)
    run_block(model[1], optimizers[1], BATCHES[1], INF)
    optimizers[0].step()
    step_by_hand(oracle, MOMENTUM([oracle]), BATCHES[0])
    assert not amp.step_was_skipped(optimizers[0])
    assert snapshot(next(amp.master_params(optimizers[0]))) == snapshot(oracle)


@LEVELS
def test_losses_with_scales_of_their_own_accumulate(level):
    model, optimizer, oracle, oracle_optimizer = open_scalar(level, num_losses=3)
    for _ in range(2):
        optimizer.zero_grad()
        for loss_id, (batch, factor) in enumerate(GRADS):
            amp.set_loss_scale(4.0 ** (loss_id + 1), loss_id)
            run_block(model, optimizer, batch, factor, loss_id=loss_id)
        optimizer.step()
        step_by_hand(oracle, oracle_optimizer, SUM)
        assert param_bits(optimizer) == [snapshot(oracle)]


@LEVELS
def test_a_scale_changed_between_accumulated_blocks_does_no_harm(level):
    model, optimizer, oracle, oracle_optimizer = open_scalar(level)
    for scale, (batch, factor) in zip([2.0, 512.0, 16.0], GRADS, strict=True):
        amp.set_loss_scale(scale)
        run_block(model, optimizer, batch, factor)
    optimizer.step()
    step_by_hand(oracle, oracle_optimizer, SUM)
    assert param_bits(optimizer) == [snapshot(oracle)]


@pytest.mark.parametrize("level", FLOAT32_LEVELS)
def test_a_backward_outside_a_block_adds_to_the_unscaled_gradients(level):
    model, optimizer, *_ = open_scalar(level)
    run_block(model, optimizer, BATCHES[0])
    model(BATCHES[1]).sum().backward()
    assert snapshot(model.weight.grad) == snapshot(BATCHES[0] + BATCHES[1])
    run_block(model, optimizer, BATCHES[2])
    assert snapshot(model.weight.grad) == snapshot(BATCHES[0] + BATCHES[1] + BATCHES[2])


@LEVELS
def test_clipping_master_params_clips_unscaled_gradients(level):
    model, optimizer, oracle, oracle_optimizer = open_scalar(level)
    for _ in range(2):
        optimizer.zero_grad()
        run_block(model, optimizer, BATCHES[0])
        oracle.grad = BATCHES[0].clone()
        norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
        assert snapshot(norm) == snapshot(torch.nn.utils.clip_grad_norm_([oracle], 0.5))
        optimizer.step()
        oracle_optimizer.step()
        assert param_bits(optimizer) == [snapshot(oracle)]


@LEVELS
def test_gradients_edited_inside_the_block_are_unscaled_afterwards(level):
    model, optimizer, oracle, oracle_optimizer = open_scalar(level)
    with amp.scale_loss(model(BATCHES[0]).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        model.weight.grad.mul_(2.0)
        model.weight.grad[0] = 0.0
    optimizer.step()
    step_by_hand(oracle, oracle_optimizer, BATCHES[0] * torch.tensor([0.0, 2.0, 2.0]))
    assert param_bits(optimizer) == [snapshot(oracle)]


@LEVELS
def test_several_backward_passes_in_one_block_are_unscaled_once(level):
    model, optimizer, oracle, oracle_optimizer = open_scalar(level)
    with amp.scale_loss(model(BATCHES[0]).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward(retain_graph=True)
        scaled_loss.backward()
    optimizer.step()
    step_by_hand(oracle, oracle_optimizer, BATCHES[0] * 2)
    assert param_bits(optimizer) == [snapshot(oracle)]


@pytest.fixture
def unchecked_sparse_tensors():
    """Says what torch asks for once where Adagrad makes a sparse tensor."""
    with torch.sparse.check_sparse_tensor_invariants(False):
        yield


@LEVELS
@pytest.mark.parametrize(
    "make", [Variant(torch.optim.SGD), Variant(torch.optim.SparseAdam), Variant(torch.optim.Adagrad)], ids=str
)
@pytest.mark.usefixtures("unchecked_sparse_tensors")
def test_sparse_embeddings_train_as_in_float32_and_accumulate(level, make):
    model = Sparse()
    optimizer = make(model.parameters())
    oracle = copy.deepcopy(model)
    oracle_optimizer = make(oracle.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=amp.DynamicLossScale(SCALE), verbosity=0)
    ids = [torch.tensor([0, 2, 2]), torch.tensor([5, 2])]
    for overflow in [False, True, False]:
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        before = param_bits(optimizer)
        for index, one in enumerate(ids):
            loss = model(one).float().sum() * (INF if overflow and index == 0 else 2.0)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            (oracle(one).sum() * 2.0).backward()
        assert next(amp.master_params(optimizer)).grad.is_sparse
        optimizer.step()
        assert amp.step_was_skipped(optimizer) == overflow
        if overflow:
            assert param_bits(optimizer) == before
        else:
            oracle_optimizer.step()
        assert param_bits(optimizer) == [snapshot(oracle.table.weight)]


@LEVELS
@pytest.mark.parametrize("scale", [amp.DynamicLossScale(SCALE), 1.0], ids=str)
@pytest.mark.parametrize("kinds", [(True, False), (False, True), (True, True), (True, False, True)])
def test_sparse_and_dense_gradients_of_one_weight_add_up(level, scale, kinds):
    model, optimizer, oracle, oracle_optimizer = open_scalar(
        level, Variant(torch.optim.SGD), scale, shape=(4, 2)
    )
    ids = torch.tensor([1, 3, 3])
    for sparse in kinds:
        rows = torch.nn.functional.embedding(ids, model.weight, sparse=True) if sparse else model.weight[ids]
        with amp.scale_loss(rows.float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    expected = torch.tensor([[0.0] * 2, [1.0] * 2, [0.0] * 2, [2.0] * 2])
    step_by_hand(oracle, oracle_optimizer, expected * len(kinds))
    assert param_bits(optimizer) == [snapshot(oracle)]
