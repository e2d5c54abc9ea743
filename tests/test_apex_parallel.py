"""What `apex.parallel` stands for: training in several processes, and layer-wise rates."""

import contextlib
import copy
import pickle
import signal
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampatch as amp
from ampatch.apex.parallel import LARC, DistributedDataParallel, Reducer, convert_syncbn_model, multiproc
from ampatch.apex.parallel.distributed import apply_flat_dist_call, flat_dist_call, flatten, unflatten
from apex_rows import shows
from helpers import without_chatter
from ranks import fixture, gather, is_equal_on_ranks

pytestmark = pytest.mark.process

ranks = fixture()


# ---- DistributedDataParallel: which gradients are averaged ----


class Branches(nn.Module):
    """Two heads on a stem; a forward takes one of them, or both."""

    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, head=None):
        x = self.stem(x)
        if head is None:
            return self.left(x), self.right(x)
        return self.left(x) if head == 0 else self.right(x)


class Output:
    """An object that nobody but the script knows."""

    def __init__(self, y):
        self.y = y


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("backward")


def inner(model):
    return model.module if isinstance(model, DistributedDataParallel) else model


def two_losses_one_after_the_other(model, x, rank):
    left, right = model(x)
    left.sum().backward(retain_graph=True)
    right.pow(2).sum().backward()


def two_forwards_before_two_backwards(model, x, rank):
    first, second = model(x, 0).sum(), model(2 * x, 0).pow(2).sum()
    first.backward()
    second.backward()


def a_branch_that_is_never_used(model, x, rank):
    for _ in range(3):
        model(x, 0).sum().backward()


def another_branch_on_each_rank(model, x, rank):
    model(x, rank).sum().backward()


def outputs_in_objects_and_containers(model, x, rank):
    original = inner(model).forward
    inner(model).forward = lambda *args: Output(original(*args))
    model(x, 0).y.sum().backward()
    inner(model).forward = lambda *args: {"logits": [original(*args)], "name": "left"}
    model(x, 0)["logits"][0].sum().backward()


def reentrant_checkpoints_that_share_a_layer(model, x, rank):
    net = inner(model)

    def forward(x):
        x = checkpoint(net.stem, x, use_reentrant=True)
        x = checkpoint(net.left, x, use_reentrant=True)
        return net.stem(checkpoint(net.stem, x, use_reentrant=True))

    net.forward = forward
    model(x.clone().requires_grad_()).sum().backward()


def a_part_that_is_frozen_for_a_while(model, x, rank):
    for trainable in (True, False, True):
        inner(model).stem.requires_grad_(trainable)
        model(x, 0).sum().backward()


def the_module_called_itself(model, x, rank):
    inner(model)(x, 0).sum().backward()


def a_backward_after_one_that_raised(model, x, rank):
    net, original = inner(model), inner(model).forward
    net.forward = lambda x: net.left(Fails.apply(net.stem(x)))
    with contextlib.suppress(KeyError):
        model(x).sum().backward()
    net.forward = original
    model.zero_grad()
    model(x, 0).sum().backward()


def a_penalty_on_the_gradient_of_the_input(model, x, rank):
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x, 0).pow(2).sum(), x, create_graph=True)
    (model(x, 0).sum() + grad.pow(2).sum()).backward()


def steps_between_that_clear_in_place(model, x, rank):
    model(x, 0).sum().backward()
    for param in model.parameters():
        if param.grad is not None:
            param.grad.detach_()
            param.grad.zero_()
    model(x, 1).sum().backward()


def backwards_that_are_not_synchronized(model, x, rank):
    is_wrapped = isinstance(model, DistributedDataParallel)
    with model.no_sync() if is_wrapped else contextlib.nullcontext():
        model(x, 1).sum().backward()
    if is_wrapped:
        model.disable_allreduce()
    model(x, 0).pow(2).sum().backward()
    if is_wrapped:
        model.enable_allreduce()
    model(x, 0).sum().backward()


WAYS = [
    two_losses_one_after_the_other,
    two_forwards_before_two_backwards,
    a_branch_that_is_never_used,
    another_branch_on_each_rank,
    outputs_in_objects_and_containers,
    reentrant_checkpoints_that_share_a_layer,
    a_part_that_is_frozen_for_a_while,
    the_module_called_itself,
    a_backward_after_one_that_raised,
    a_penalty_on_the_gradient_of_the_input,
    steps_between_that_clear_in_place,
    backwards_that_are_not_synchronized,
]
MEAN, SUM = {}, {"gradient_average": False}
PREDIVIDED = {"gradient_predivide_factor": 2.0, "allreduce_always_fp32": True}
# How gradients are added up does not depend on what the model did.
SETTINGS = [(way, MEAN) for way in WAYS]
SETTINGS += [(way, it) for way in (WAYS[0], another_branch_on_each_rank) for it in (SUM, PREDIVIDED)]


def make_input():
    torch.manual_seed(10 + dist.get_rank())
    return torch.randn(3, 2)


def find_grads(model):
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


def combine(grads_of_ranks, average):
    """The oracle: what each rank got alone, put together afterwards."""
    combined = []
    for grads in zip(*grads_of_ranks, strict=True):
        present = [grad for grad in grads if grad is not None]
        total = sum(present) if present else None
        combined.append(total / len(grads) if present and average else total)
    return combined


def compare_with_single_processes(way, settings):
    """On each rank: the model alone and the wrapped one; returns whether the gradients agree."""
    model, x = Branches(), make_input()
    alone = copy.deepcopy(model)
    way(alone, x, dist.get_rank())
    expected = combine(gather(find_grads(alone)), settings.get("gradient_average", True))
    way(DistributedDataParallel(model, **settings), x, dist.get_rank())
    found = find_grads(model)
    assert is_equal_on_ranks([grad for grad in found if grad is not None])
    for mine, theirs in zip(found, expected, strict=True):
        # Sums of float32 in another order: a few units in the last place.
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@shows("companions-ddp")
@pytest.mark.parametrize(("way", "settings"), SETTINGS, ids=lambda it: getattr(it, "__name__", str(it)))
def test_gradients_are_the_mean_over_ranks_of_what_each_rank_adds_up(ranks, way, settings):
    ranks(compare_with_single_processes, way, settings)


def average_halves(value, dtype, **settings):
    model = nn.Linear(1, 1, bias=False).to(dtype)
    DistributedDataParallel(model, **settings)(torch.full((1, 1), value, dtype=dtype)).sum().backward()
    return model.weight.grad.item()


@pytest.mark.parametrize(
    ("dtype", "value", "settings", "expected"),
    [
        # 40000 is a float16, twice that is not.
        (torch.float16, 40000.0, {}, float("inf")),
        (torch.float16, 40000.0, {"allreduce_always_fp32": True}, 40000.0),
        (torch.float16, 40000.0, {"gradient_predivide_factor": 2.0}, 40000.0),
        (torch.float16, 40000.0, {"gradient_average_split_factor": 2.0}, 40000.0),
        (torch.bfloat16, 3.0, {}, 3.0),
        (torch.float64, 3.0, {}, 3.0),
    ],
    ids=str,
)
def test_gradients_of_every_type_are_averaged_and_keywords_save_those_that_overflow(
    ranks, dtype, value, settings, expected
):
    assert ranks(average_halves, value, dtype, **settings) == [expected] * 2


CASES = []


def on_both_ranks(case):
    """Has both ranks run a function, which asserts what its name says."""
    CASES.append(case)
    return case


@on_both_ranks
def sparse_gradients_stay_sparse():
    embedding = nn.Embedding(5, 2, sparse=True)
    wrapped = DistributedDataParallel(embedding)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse invariant checks")  # by torch, when it makes the gradient
        wrapped(torch.tensor([1, 2 * dist.get_rank()])).sum().backward()
    assert embedding.weight.grad.is_sparse
    assert embedding.weight.grad.to_dense()[:, 0].tolist() == [0.5, 1.0, 0.5, 0.0, 0.0]


@on_both_ranks
def a_frozen_model_can_be_wrapped_and_trained_later():
    model = Branches().requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    assert not any(param.requires_grad for param in model.parameters())
    model.left.requires_grad_(True)
    wrapped(make_input(), 0).sum().backward()
    assert is_equal_on_ranks([model.left.weight.grad])
    assert model.stem.weight.grad is None


@on_both_ranks
def a_layer_that_was_added_later_is_averaged():
    model = nn.Sequential(nn.Linear(2, 2))
    wrapped = DistributedDataParallel(model)
    model.append(nn.Linear(2, 1))
    for param in model[1].parameters():
        nn.init.ones_(param)
    for _ in range(2):  # the first forward finds the layer
        wrapped(make_input()).sum().backward()
    assert is_equal_on_ranks(find_grads(model))


@on_both_ranks
def a_module_that_is_wrapped_anew_is_averaged_once():
    model = nn.Linear(1, 1, bias=False)
    DistributedDataParallel(model, gradient_average=False)
    wrapped = DistributedDataParallel(model, gradient_average=False)
    wrapped(torch.ones(1, 1)).sum().backward()
    assert model.weight.grad.item() == 2.0


@on_both_ranks
def a_compiled_model_averages_too():
    model, x = Branches(), make_input()
    compiled = torch.compile(DistributedDataParallel(model), backend="eager")
    compiled(x, 0).sum().backward()
    assert is_equal_on_ranks([model.stem.weight.grad])
    assert model.right.weight.grad is None


@on_both_ranks
def copies_of_a_wrapped_model_average_their_own_gradients():
    wrapped, x = DistributedDataParallel(Branches()), make_input()
    every = [wrapped, copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))]
    for each in reversed(every):
        each(x, 0).sum().backward()
    first, *others = [each.module.stem.weight.grad for each in every]
    assert is_equal_on_ranks([first])
    assert all(torch.equal(grad, first) for grad in others)


# ---- DistributedDataParallel: what it is made from ----


@on_both_ranks
def parameters_come_from_rank_0_and_buffers_stay_what_each_rank_makes_of_them():
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    mean = model[1].running_mean.fill_(dist.get_rank())
    wrapped = DistributedDataParallel(model)
    wrapped(make_input())
    assert is_equal_on_ranks(model.parameters())
    assert mean is model[1].running_mean
    assert not is_equal_on_ranks([mean])
    assert list(wrapped.state_dict())[:2] == ["module.0.weight", "module.0.bias"]


@on_both_ranks
def ranks_with_other_parameters_are_told_at_once():
    told = "rank 1 has 2 parameters with 9 elements, rank 0 has 2 with 6"
    with pytest.raises(amp.AmpValueError, match=told):
        DistributedDataParallel(nn.Linear(2, 2 + dist.get_rank()))


def wrap_masters(level):
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = gather([master.detach().clone() for master in amp.master_params(optimizer)])[0]
    DistributedDataParallel(model)
    optimizer.step()  # takes up what was written into the model
    masters = list(amp.master_params(optimizer))
    return all(torch.equal(a, b) for a, b in zip(masters, before, strict=True))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_masters_come_from_rank_0_in_float32(ranks, level):
    assert ranks(wrap_masters, level) == [True] * 2


def test_it_is_a_distributed_data_parallel_of_torch(one_rank):
    model = nn.Linear(2, 2)
    wrapped = DistributedDataParallel(model)
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
    assert wrapped.module is model
    assert wrapped.delay_allreduce is False
    assert wrapped.train(False) is wrapped
    assert not model.training


@pytest.mark.parametrize("make", [DistributedDataParallel, Reducer], ids=lambda make: make.__name__)
def test_no_process_group_is_an_error_that_says_what_to_call(make):
    with pytest.raises(amp.AmpValueError, match=r"init_process_group first.* torchrun"):
        make(nn.Linear(2, 2))


@shows("companions-ddp")
def test_keywords_without_a_meaning_are_named_in_one_warning(one_rank):
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="message_size, retain_allreduce_buffers, prof has no") as seen:
        wrapped = DistributedDataParallel(
            model, 1000, shared_param=True, retain_allreduce_buffers=True, prof=True, gradient_average=True
        )
    assert [warning.filename for warning in seen] == [__file__]
    assert wrapped.delay_allreduce


# ---- DistributedDataParallel under ampatch ----


def make_net():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def make_batch(step, rank=None):
    generator = torch.Generator().manual_seed(step)
    batch = [torch.randn(8, 3, generator=generator), torch.randn(8, 2, generator=generator)]
    return batch if rank is None else [part[4 * rank : 4 * rank + 4] for part in batch]


def train(level, rank=None, larc=False, overflow=None, loss_scale=256.0):
    """Trains on a rank's half of each batch, or alone on the whole; returns weights and skipped steps."""
    torch.manual_seed(rank or 0)
    model = make_net() if rank is None else convert_syncbn_model(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    optimizer = LARC(optimizer) if larc else optimizer
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=loss_scale)
    wrapped = model if rank is None else DistributedDataParallel(model)
    skipped = []
    for step in range(4):
        x, y = make_batch(step, rank)
        loss = (wrapped(x).float() - y).pow(2).mean()
        if step == 1 and overflow == rank and overflow is not None:
            loss = loss * 1e10
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
        optimizer.zero_grad()
    weights = [param.detach().clone() for param in amp.master_params(optimizer)]
    weights += [value.clone() for value in model.state_dict().values()]
    amp.uninitialize()
    return weights, skipped


# Products of half numbers differ with the size of the batch, by their precision.
TOLERANCE = {"O0": 1e-6, "O1": 2e-3, "O2": 2e-3, "O3": 4e-3, "O4": 2e-2, "O5": 2e-2}


def compare_training(level, **kwargs):
    found, skipped = train(level, dist.get_rank(), **kwargs)
    assert is_equal_on_ranks(found)
    expected, _ = train(level, **kwargs)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=TOLERANCE[level])
    return skipped


@pytest.mark.parametrize(("level", "larc"), [("O0", False), ("O1", True), ("O3", False), ("O5", True)])
def test_two_ranks_train_as_one_process_on_the_joined_batch(ranks, level, larc):
    assert ranks(compare_training, level, larc=larc) == [[False] * 4] * 2


def train_with_overflow(level, overflow):
    weights, skipped = train(level, dist.get_rank(), overflow=overflow, loss_scale="dynamic")
    assert is_equal_on_ranks(weights)
    assert all(weight.isfinite().all() for weight in weights)
    return skipped


@pytest.mark.parametrize("overflow", [0, 1])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_on_one_rank_skips_the_step_on_both(ranks, level, overflow):
    skipped = ranks(train_with_overflow, level, overflow)
    assert skipped[0] == skipped[1]
    assert skipped[0][1]


def open_linear(level, scale):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)


def run_block(model, optimizer, x, factor=1.0, **kwargs):
    with amp.scale_loss(model(x).sum() * factor, optimizer, **kwargs) as scaled_loss:
        scaled_loss.backward()


def flat_grads(optimizer):
    return [param.grad.flatten().tolist() for param in amp.master_params(optimizer)]


def accumulate_unsynchronized(level, scale, wrap, stop, delay, read=False):
    model, optimizer = open_linear(level, scale)
    wrapped, x = wrap(model), torch.full((1, 2), dist.get_rank() + 1.0)
    with getattr(wrapped, stop)() or contextlib.nullcontext():
        for _ in range(2):
            run_block(wrapped, optimizer, x, delay_unscale=delay)
            if read:  # a norm for the log
                assert max(flat_grads(optimizer)[0]) <= 4.0, "unscaled"
        assert not is_equal_on_ranks([model.weight.grad]), "averaged"
    getattr(wrapped, stop.replace("disable", "enable"))()
    run_block(wrapped, optimizer, x)
    return flat_grads(optimizer)


@pytest.mark.parametrize("delay", [True, False], ids=["delayed", "each"])
@pytest.mark.parametrize(
    ("wrap", "stop"),
    [
        (DistributedDataParallel, "no_sync"),
        (DistributedDataParallel, "disable_allreduce"),
        (nn.parallel.DistributedDataParallel, "no_sync"),
    ],
    ids=["ours", "ours-disable", "torchs"],
)
@pytest.mark.parametrize(("level", "scale"), [("O1", 128.0), ("O2", 128.0), ("O5", 1.0)])
def test_gradients_accumulated_without_averaging_are_averaged_with_the_next(
    ranks, level, scale, wrap, stop, delay
):
    # Ranks have inputs of 1 and 2: three times their mean is 4.5; the bias gets 1 each time.
    expected = [[[4.5, 4.5], [3.0]]] * 2
    assert ranks(accumulate_unsynchronized, level, scale, wrap, stop, delay) == expected


@pytest.mark.parametrize(("level", "scale"), [("O2", 128.0), ("O1", amp.DynamicLossScale(128.0))])
def test_reading_the_masters_meanwhile_keeps_nothing_from_being_averaged(ranks, level, scale):
    arguments = level, scale, nn.parallel.DistributedDataParallel, "no_sync", False, True
    assert ranks(accumulate_unsynchronized, *arguments) == [[[4.5, 4.5], [3.0]]] * 2


def read_after_an_overflow_on_one_rank(level):
    model, optimizer = open_linear(level, amp.DynamicLossScale(512.0))
    wrapped, x, found = nn.parallel.DistributedDataParallel(model), torch.ones(1, 2), []
    for step in range(3):
        optimizer.zero_grad()
        with wrapped.no_sync():
            run_block(wrapped, optimizer, x, float("inf") if (step, dist.get_rank()) == (0, 0) else 1.0)
        assert all(param.grad is not None for param in amp.master_params(optimizer))
        run_block(wrapped, optimizer, x)
        optimizer.step()
        weights = [param.detach().flatten().tolist() for param in amp.master_params(optimizer)]
        found.append((amp.get_loss_scale(), amp.step_was_skipped(optimizer), weights))
    return found


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_reading_after_an_overflow_on_one_rank_leaves_the_ranks_equal(ranks, level):
    one, other = ranks(read_after_an_overflow_on_one_rank, level)
    assert one == other
    assert [(scale, skipped) for scale, skipped, _ in one] == [(256, True), (256, False), (256, False)]


def train_beside_an_unsynchronized_model(level):
    (first, _), (second, optimizer) = open_linear(level, 128.0), open_linear(level, 128.0)
    first, second = map(DistributedDataParallel, (first, second))
    x = torch.ones(1, 2)
    for model in (first, second):  # the forward is for a metric: no backward follows
        with model.no_sync():
            model(x)
        run_block(second, optimizer, x)
    return flat_grads(optimizer)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_block_that_synchronizes_is_not_delayed_by_another_forward(ranks, level):
    assert ranks(train_beside_an_unsynchronized_model, level) == [[[2.0, 2.0], [2.0]]] * 2


# ---- Reducer, and collectives on many tensors ----


def reduce_module():
    model, x = Branches(), make_input()
    reducer = Reducer(model)
    alone = copy.deepcopy(model)
    for each in (alone, model):
        each(x)[0].sum().backward()
        another_branch_on_each_rank(each, x, dist.get_rank())
    expected = combine(gather(find_grads(alone)), True)
    reducer.reduce()
    return all(torch.equal(a, b) for a, b in zip(find_grads(model), expected, strict=True))


@shows("companions-reducer")
def test_a_reducer_averages_when_it_is_told_to(ranks):
    assert ranks(reduce_module) == [True] * 2


@on_both_ranks
def a_reducer_averages_tensors_in_lists():
    rank = float(dist.get_rank())
    grads = [torch.full((2, 2), rank), [torch.full((3,), rank + 2, dtype=torch.float64)]]
    Reducer(grads).reduce()
    assert torch.equal(grads[0], torch.full((2, 2), 0.5))
    assert grads[1][0].tolist() == [2.5] * 3


@on_both_ranks
def a_reducer_broadcasts_and_flat_calls_run_once_for_each_type():
    torch.manual_seed(dist.get_rank())
    model = Branches()
    Reducer(model)
    assert is_equal_on_ranks(model.parameters())
    tensors = [torch.full((2,), dist.get_rank() + 1.0), torch.full((3,), dist.get_rank() + 1.0).half()]
    flat_dist_call(tensors, dist.broadcast, (1,))
    apply_flat_dist_call(tensors[:1], dist.all_reduce)
    assert [tensor.tolist() for tensor in tensors] == [[2.0] * 2, [2.0] * 3]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_both_ranks(ranks, case):
    ranks(case)


def test_unflatten_gives_back_what_flatten_took():
    tensors = [torch.randn(2, 3), torch.randn(()), torch.randn(3, 2).T]
    for tensor, back in zip(tensors, unflatten(flatten(tensors), tensors), strict=True):
        assert torch.equal(tensor, back)


# ---- multiproc ----

SCRIPT = """
import argparse
import torch
from apex import amp
from apex.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--rank", type=int)
parser.add_argument("--world-size", type=int)
args = parser.parse_args()
print("rank", args.rank, "of", args.world_size)
torch.distributed.init_process_group("gloo", "env://", rank=args.rank, world_size=args.world_size)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
model = DistributedDataParallel(model)
with amp.scale_loss(model(torch.full((1, 2), float(args.rank))).sum(), optimizer) as scaled:
    scaled.backward()
print(model.module.weight.dtype, [param.grad.tolist() for param in amp.master_params(optimizer)][0])
"""


@shows("companions-multiproc")
def test_multiproc_starts_ranks_that_have_apex_and_the_options_of_the_run(processes, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["run", "--opt-level", "O5", "-m", "apex.parallel.multiproc", "train.py", "--world-size", "2"]
    started = f"sys.orig_argv = [sys.executable, '-m', 'ampatch', *{words}]"  # as without the fork
    ended = processes.run(f"{started}\nsys.exit(ampatch.__main__.main({words}))", tmp_path)
    assert ended.status == 0, ended.stderr
    expected = "torch.bfloat16 [[0.5, 0.5]]\n"
    assert without_chatter(ended.stdout) == f"rank 0 of 2\n{expected}"
    assert without_chatter((tmp_path / "GPU_1.log").read_text()) == f"rank 1 of 2\n{expected}"


WAITS_OR_FAILS = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)"


def test_multiproc_returns_the_status_of_the_rank_that_failed_and_ends_the_others(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(WAITS_OR_FAILS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["multiproc.py", "--nproc_per_node=2", "train.py"])
    monkeypatch.setattr(multiproc, "child_command", lambda own: [sys.executable])  # which imports no torch
    wait, ranks = multiproc.wait, []
    monkeypatch.setattr(multiproc, "wait", lambda workers: ranks.extend(workers) or wait(workers))
    assert multiproc.main() == 7
    assert [rank.returncode for rank in ranks] == [-signal.SIGTERM, 7]
