"""Blocks of scale_loss add up: repeated, delayed, clipped, sparse."""

import copy

import pytest
import torch

import ampatch as amp
from apex_rows import shows
from helpers import Scalar, Sparse, Variant, scaled_backward, snapshot
from stepping import (
    BATCHES,
    INF,
    LEVELS,
    MOMENTUM,
    SCALE,
    Beside,
    param_bits,
    run_block,
)


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


@LEVELS
def test_plain_backwards_of_a_rank_add_up(level, one_rank):
    run = Beside(level, loss_scale=1.0)
    wrapped = torch.nn.parallel.DistributedDataParallel(run.model)
    for _ in range(2):
        run.optimizer.zero_grad()
        wrapped(BATCHES[0]).float().sum().backward()
        wrapped(BATCHES[1]).float().sum().backward()
        assert snapshot(run.grad) == snapshot(BATCHES[0] + BATCHES[1])
        run.step(BATCHES[0] + BATCHES[1])


@pytest.mark.exhaustive(keep=12)
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


@pytest.mark.exhaustive(keep=12)
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
