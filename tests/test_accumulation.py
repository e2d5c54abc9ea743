"""Blocks of scale_loss add up: repeated, delayed, clipped, sparse."""

import copy

import pytest
import torch

import ampatch as amp
from apex_rows import shows
from helpers import Scalar, Sparse, Variant, scaled_backward, snapshot
from stepping import (
    BATCHES,
    DYNAMIC_LEVELS,
    FLOAT32_LEVELS,
    INF,
    LEVELS,
    MOMENTUM,
    SCALE,
    Beside,
    param_bits,
    run_block,
)

GRADS = [(BATCHES[0], 1.0), (BATCHES[1], 0.5), (BATCHES[2], 2.0)]
SUM = sum(batch * factor for batch, factor in GRADS)
LATER = {"delay_unscale": True}
# The options of three blocks.
ADD_UP = {
    "at once": [{}, {}, {}],
    "delayed until the last": [LATER, LATER, {}],
    "delayed until the step": [LATER, LATER, LATER],
    "delayed amid others": [{}, LATER, {}],
    "delayed after another": [{}, LATER, LATER],
    "delayed around another": [LATER, {}, LATER],
    "of three losses": [{"loss_id": 0}, {"loss_id": 1}, {"loss_id": 2}],
    "of two losses, delayed": [LATER, {"loss_id": 1, **LATER}, {}],
}


@shows("patterns-delay-unscale")
@LEVELS
@pytest.mark.parametrize("blocks", ADD_UP.values(), ids=ADD_UP)
def test_blocks_add_up(level, blocks):
    # Static scales that are 1, and that are not, go their own ways.
    for scale in (amp.DynamicLossScale(SCALE), 128.0, 1.0):
        run = Beside(level, loss_scale=scale, num_losses=3)
        amp.set_loss_scale(4.0, loss_id=1)
        amp.set_loss_scale(16.0, loss_id=2)
        for _ in range(2):
            run.optimizer.zero_grad()
            for (batch, factor), options in zip(GRADS, blocks, strict=True):
                run.run_block(batch, factor, **options)
            if blocks[2] is not LATER:
                assert snapshot(run.grad) == snapshot(SUM)
            run.step(SUM)
        amp.uninitialize()


@LEVELS
def test_a_scale_changed_between_accumulated_blocks_does_no_harm(level):
    run = Beside(level)
    for scale, (batch, factor) in zip([2.0, 512.0, 16.0], GRADS, strict=True):
        amp.set_loss_scale(scale)
        run.run_block(batch, factor)
    run.step(SUM)


@shows("scale-delay-unscale")
@pytest.mark.parametrize("level", FLOAT32_LEVELS)
def test_a_delayed_block_neither_unscales_nor_checks_nor_counts(level):
    run = Beside(level)
    run.run_block()
    before = amp.state_dict()
    run.optimizer.zero_grad()
    run.run_block(delay_unscale=True)
    assert snapshot(run.grad) == snapshot(BATCHES[0] * SCALE)
    run.run_block(factor=INF, delay_unscale=True)
    assert amp.state_dict() == before


@DYNAMIC_LEVELS
@pytest.mark.parametrize("settled", ["by a block", "by the step"])
def test_an_overflow_in_a_delayed_block_skips_the_step(level, settled):
    run = Beside(level)
    run.run_block(factor=INF, delay_unscale=True)
    if settled == "by a block":
        run.run_block()
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": SCALE / 2, "unskipped": 0}}
    run.skip()
    assert amp.get_loss_scale() == SCALE / 2


@LEVELS
def test_zero_grad_forgets_what_was_delayed_and_what_was_before_it(level):
    run = Beside(level)
    run.run_block(BATCHES[0])
    run.run_block(BATCHES[1], delay_unscale=True)
    run.optimizer.zero_grad()
    run.run_block(BATCHES[2])
    run.step(BATCHES[2])


@DYNAMIC_LEVELS
@pytest.mark.parametrize("factors", [(INF, 1.0), (1.0, INF)])
@pytest.mark.parametrize("delays", [(True, True), (True, False), (False, True)])
def test_the_overflow_of_one_loss_leaves_the_scale_of_another(level, delays, factors):
    run = Beside(level, num_losses=2)
    for loss_id in (0, 1):
        run.run_block(factor=factors[loss_id], loss_id=loss_id, delay_unscale=delays[loss_id])
    run.skip()
    scales = [SCALE / 2 if factor == INF else SCALE for factor in factors]
    assert [amp.get_loss_scale(loss_id) for loss_id in (0, 1)] == scales


@DYNAMIC_LEVELS
@pytest.mark.parametrize("hysteresis", [1, 2])
def test_delayed_blocks_do_not_let_the_scale_grow(level, hysteresis):
    rule = amp.DynamicLossScale(SCALE, growth_interval=3, hysteresis=hysteresis)
    run = Beside(level, num_losses=2, loss_scale=rule)
    for loss_id in (0, 0, 1, 1, 1, 1):
        run.run_block(loss_id=loss_id, delay_unscale=loss_id == 1)
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert amp.state_dict() == {
        "loss_scaler0": {"loss_scale": SCALE, "unskipped": 2},
        "loss_scaler1": {"loss_scale": SCALE, "unskipped": 0},
    }


@LEVELS
def test_a_delayed_optimizer_is_settled_by_the_scale_it_began_with(level):
    model = torch.nn.ModuleList([Scalar(), Scalar()])
    optimizers = [MOMENTUM([one.weight]) for one in model]
    oracle = copy.deepcopy(model[0].weight)
    amp.initialize(model, optimizers, opt_level=level, loss_scale=amp.DynamicLossScale(SCALE), verbosity=0)
    run_block(model[0], optimizers[0], BATCHES[0], delay_unscale=True)
    run_block(model[1], optimizers[1], BATCHES[1], INF)
    optimizers[0].step()
    assert not amp.step_was_skipped(optimizers[0])
    oracle.grad = BATCHES[0].clone()
    MOMENTUM([oracle]).step()
    assert param_bits(optimizers[0]) == [snapshot(oracle)]


@shows("patterns-backward-outside")
@pytest.mark.parametrize("level", FLOAT32_LEVELS)
def test_a_backward_outside_a_block_adds_to_the_unscaled_gradients(level):
    run = Beside(level)
    run.run_block(BATCHES[0])
    run.model(BATCHES[1]).sum().backward()
    assert snapshot(run.grad) == snapshot(BATCHES[0] + BATCHES[1])
    run.run_block(BATCHES[2])
    assert snapshot(run.grad) == snapshot(BATCHES[0] + BATCHES[1] + BATCHES[2])


@LEVELS
@pytest.mark.parametrize("is_cleared", [False, True])
def test_a_backward_outside_a_block_adds_to_what_was_delayed_as_well(level, is_cleared):
    run = Beside(level, loss_scale=128.0)
    run.run_block(BATCHES[0], delay_unscale=True)
    if is_cleared:
        run.optimizer.zero_grad()
    run.model(BATCHES[1]).float().sum().backward()
    expected = BATCHES[1] if is_cleared else BATCHES[0] + BATCHES[1]
    assert snapshot(run.grad) == snapshot(expected)
    run.run_block(BATCHES[2])
    assert snapshot(run.grad) == snapshot(expected + BATCHES[2])


@LEVELS
def test_what_a_rank_kept_is_unscaled_once_if_masters_are_read_inside_the_block(level, one_rank):
    run = Beside(level)
    wrapped = torch.nn.parallel.DistributedDataParallel(run.model)
    with wrapped.no_sync():
        run_block(wrapped, run.optimizer, BATCHES[0])
    with amp.scale_loss(wrapped(BATCHES[1]).float().sum(), run.optimizer) as scaled:
        scaled.backward()
        list(amp.master_params(run.optimizer))
    run.step(BATCHES[0] + BATCHES[1])


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("loss_scale", [1.0, 128.0, amp.DynamicLossScale(SCALE)], ids=str)
@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.filterwarnings("ignore:backward.. outside of scale_loss")
def test_a_plain_backward_adds_to_what_a_rank_kept(level, loss_scale, is_read, count, one_rank):
    run = Beside(level, loss_scale=loss_scale)
    wrapped = torch.nn.parallel.DistributedDataParallel(run.model)
    for _ in range(2):
        run.optimizer.zero_grad()
        with wrapped.no_sync():
            run_block(wrapped, run.optimizer, BATCHES[0])
        if is_read:
            assert snapshot(run.grad) == snapshot(BATCHES[0])
        for _ in range(count - 1):
            with wrapped.no_sync():
                wrapped(BATCHES[1]).float().sum().backward()
        wrapped(BATCHES[1]).float().sum().backward()
        assert snapshot(run.grad) == snapshot(BATCHES[0] + count * BATCHES[1])
        run_block(wrapped, run.optimizer, BATCHES[2])
        run.step(BATCHES[0] + count * BATCHES[1] + BATCHES[2])


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("loss_scale", [1.0, 128.0, amp.DynamicLossScale(SCALE)], ids=str)
@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("is_averaged", [False, True])
def test_what_a_rank_keeps_is_added_to_what_was_there(level, loss_scale, is_read, is_averaged, one_rank):
    run = Beside(level, loss_scale=loss_scale)
    wrapped = torch.nn.parallel.DistributedDataParallel(run.model)
    for _ in range(2):
        run.optimizer.zero_grad()
        run_block(wrapped, run.optimizer, BATCHES[0])
        with wrapped.no_sync():
            run_block(wrapped, run.optimizer, BATCHES[1])
            if is_read:
                assert snapshot(run.grad) == snapshot(BATCHES[0] + BATCHES[1])
            run_block(wrapped, run.optimizer, BATCHES[2])
        if is_averaged:
            run_block(wrapped, run.optimizer, BATCHES[3])
        run.step(BATCHES[0] + BATCHES[1] + BATCHES[2] + is_averaged * BATCHES[3])


@LEVELS
def test_a_block_at_another_scale_adds_to_what_a_rank_kept(level, one_rank):
    run = Beside(level, loss_scale=128.0, num_losses=2)
    amp.set_loss_scale(4.0, loss_id=1)
    other = Scalar()
    wrapped = torch.nn.parallel.DistributedDataParallel(run.model)
    stranger = MOMENTUM(other.parameters())
    amp.initialize(other, stranger, opt_level=level, loss_scale=8.0, verbosity=0)
    with wrapped.no_sync():
        run_block(wrapped, run.optimizer, BATCHES[0])
    loss = wrapped(BATCHES[1]).float().sum() + other(BATCHES[0]).float().sum()
    scaled_backward(loss, stranger)
    run_block(wrapped, run.optimizer, BATCHES[2], loss_id=1)
    run.step(BATCHES[0] + BATCHES[1] + BATCHES[2])


@shows("optimizers-master-params")
@LEVELS
def test_clipping_master_params_clips_unscaled_gradients(level):
    run = Beside(level)
    for _ in range(2):
        run.optimizer.zero_grad()
        run.run_block()
        run.oracle.grad = BATCHES[0].clone()
        norm = torch.nn.utils.clip_grad_norm_(amp.master_params(run.optimizer), 0.5)
        assert snapshot(norm) == snapshot(torch.nn.utils.clip_grad_norm_([run.oracle], 0.5))
        run.step(run.oracle.grad)


@shows("patterns-edited-grads")
@LEVELS
def test_gradients_edited_inside_the_block_are_unscaled_afterwards(level):
    run = Beside(level)
    with amp.scale_loss(run.model(BATCHES[0]).float().sum(), run.optimizer) as scaled_loss:
        scaled_loss.backward()
        run.model.weight.grad.mul_(2.0)
        run.model.weight.grad[0] = 0.0
    run.step(BATCHES[0] * torch.tensor([0.0, 2.0, 2.0]))


@LEVELS
def test_several_backward_passes_in_one_block_are_unscaled_once(level):
    run = Beside(level)
    with amp.scale_loss(run.model(BATCHES[0]).float().sum(), run.optimizer) as scaled_loss:
        scaled_loss.backward(retain_graph=True)
        scaled_loss.backward()
    run.step(BATCHES[0] * 2)


@shows("never-sparse")
@LEVELS
@pytest.mark.parametrize(
    "make", [MOMENTUM, Variant(torch.optim.SparseAdam), Variant(torch.optim.Adagrad)], ids=str
)
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
            run_block(model, optimizer, one, INF if overflow and index == 0 else 2.0)
            (oracle(one).sum() * 2.0).backward()
        assert next(amp.master_params(optimizer)).grad.is_sparse
        optimizer.step()
        assert amp.step_was_skipped(optimizer) == overflow
        if overflow:
            assert param_bits(optimizer) == before
        else:
            oracle_optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert param_bits(optimizer) == [snapshot(oracle.table.weight)]


@LEVELS
@pytest.mark.parametrize("scale", [SCALE, 1.0])
@pytest.mark.parametrize("kinds", [(True, False), (False, True), (True, False, True)])
def test_sparse_and_dense_gradients_of_one_weight_add_up(level, scale, kinds):
    run = Beside(level, Variant(torch.optim.SGD), scale, shape=(4, 2))
    ids, weight = torch.tensor([1, 3, 3]), run.model.weight
    for sparse in kinds:
        rows = torch.nn.functional.embedding(ids, weight, sparse=True) if sparse else weight[ids]
        scaled_backward(rows.float().sum(), run.optimizer)
    grad = torch.tensor([[0.0] * 2, [1.0] * 2, [0.0] * 2, [2.0] * 2])
    run.step(grad * len(kinds))
    weight.grad = None
    torch.nn.functional.embedding(ids, weight, sparse=True).float().sum().backward()
    run.step(grad)
