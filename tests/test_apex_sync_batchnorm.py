"""Batch normalization over ranks: `apex.parallel.SyncBatchNorm` and what converts models to it."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ampatch as amp
from ampatch.apex import parallel
from ampatch.apex.parallel import SyncBatchNorm, convert_syncbn_model
from apex_rows import shows
from ranks import fixture, is_equal_on_ranks

pytestmark = pytest.mark.process


ranks = fixture()


def make_net():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


SHAPES = {"2D": (6, 3), "3D": (6, 3, 4), "4D": (6, 3, 2, 2), "5D": (6, 3, 2, 2, 2)}
KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def join_batches(shape, first, dtype=torch.float32):
    """One batch, of which the first rank has `first` samples."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(shape, generator=generator).mul(3).add(1).to(dtype)
    return x, (slice(0, first), slice(first, None))[dist.get_rank()]


def run_batch_norm(norm, batches, own):
    """Two forwards and one backward; returns all that comes of it, with gradients summed over ranks."""
    outputs, grads = [], []
    for x in batches:
        x = x[own].clone().requires_grad_()
        output = norm(x)
        output.sin().sum().backward()
        outputs.append(output.detach())
        grads.append(x.grad)
    params = [param.grad for param in norm.parameters()]
    return outputs, grads, params, [buffer.clone() for buffer in norm.buffers()]


def compare_batch_norm(shape, first, dtype, **kwargs):
    x, own = join_batches(shape, first, dtype)
    norm = KINDS[len(shape)](3, **kwargs)
    for param in norm.parameters():
        nn.init.uniform_(param, 0.5, 1.5)
    if dtype is torch.float64:
        norm.double()
    synced = convert_syncbn_model(copy.deepcopy(norm))
    batches = [x, 2 * x + 1]
    expected = run_batch_norm(norm, batches, slice(None))
    found = run_batch_norm(synced, batches, own)
    for grad in found[2]:
        dist.all_reduce(grad)
    # Sums over ranks are made in another order than sums over a batch; half outputs are rounded once.
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        theirs = [tensor[own] for tensor in theirs] if index < 2 else theirs
        assert [tensor.dtype for tensor in mine] == [tensor.dtype for tensor in theirs]
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


PLANE = (6, 3, 2, 2)
CASES = [
    *((shape, first, torch.float32, {}) for shape in SHAPES.values() for first in (3, 1, 0)),
    # Statistics have the precision of the input, or float32.
    *((PLANE, 2, dtype, {}) for dtype in (torch.float64, torch.bfloat16)),
    (PLANE, 4, torch.float32, {"momentum": None}),
    (PLANE, 4, torch.float32, {"track_running_stats": False}),
    (PLANE, 4, torch.float32, {"affine": False}),
    (PLANE, 4, torch.float32, {"eps": 0.1, "momentum": 0.5}),
]


@pytest.mark.parametrize(("shape", "first", "dtype", "options"), CASES, ids=str)
def test_synced_statistics_are_those_of_the_joined_batch(ranks, shape, first, dtype, options):
    ranks(compare_batch_norm, shape, first, dtype, **options)


ON_BOTH_RANKS = []


def on_both_ranks(case):
    """Has both ranks run a function, which asserts what its name says."""
    ON_BOTH_RANKS.append(case)
    return case


@on_both_ranks
def half_input_has_statistics_in_float32():
    """float16 numbers whose squares overflow: statistics in float32 do not."""
    x, own = join_batches((6, 3), 2)
    x = (1000 * x).half()
    norm = SyncBatchNorm(3)
    expected = nn.BatchNorm1d(3)(x.float())[own].half()
    # One rounding to float16, of values below 4.
    torch.testing.assert_close(norm(x[own]), expected, rtol=0, atol=2e-3)
    assert norm.running_var.dtype is torch.float32


@on_both_ranks
def the_gradient_of_a_gradient_is_that_of_batch_norm():
    x, own = join_batches((4, 2), 2, torch.float64)
    results = []
    for norm, part in ((nn.BatchNorm1d(2).double(), slice(None)), (SyncBatchNorm(2).double(), own)):
        x_part = x[part].clone().requires_grad_()
        (grad,) = torch.autograd.grad(norm(x_part).pow(3).sum(), x_part, create_graph=True)
        grad.pow(2).sum().backward()
        results.append(x_part.grad)
    torch.testing.assert_close(results[1], results[0][own], rtol=1e-10, atol=1e-10)


@on_both_ranks
def relu_a_sum_and_channels_in_the_last_place_work():
    x, own = join_batches((6, 3, 2, 2), 2)
    z = torch.randn(6, 3, 2, 2)
    expected = (nn.BatchNorm2d(3)(x) + z).relu()[own]
    fused = SyncBatchNorm(3, fuse_relu=True)(x[own], z[own])
    last = SyncBatchNorm(3, channel_last=True, fuse_relu=True)
    moved = last(x.movedim(1, -1)[own], z.movedim(1, -1)[own]).movedim(-1, 1)
    torch.testing.assert_close(fused, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(moved, fused)


@on_both_ranks
def groups_of_ranks_have_statistics_of_their_own():
    alone, both = (parallel.create_syncbn_process_group(size) for size in (1, 2))
    x, own = join_batches((6, 3), 2)
    assert torch.equal(SyncBatchNorm(3, process_group=alone)(x[own]), nn.BatchNorm1d(3)(x[own]))
    joined = SyncBatchNorm(3, process_group=both)(x[own])
    assert torch.allclose(joined, nn.BatchNorm1d(3)(x)[own], atol=1e-5)
    assert parallel.create_syncbn_process_group(0) is None
    with pytest.raises(amp.AmpValueError, match="group_size 3 with 2 ranks: expected a divisor"):
        parallel.create_syncbn_process_group(3)


@on_both_ranks
def evaluation_waits_for_nobody():
    x = torch.randn(3, 2)
    assert dist.get_rank() == 1 or torch.equal(SyncBatchNorm(2).eval()(x), nn.BatchNorm1d(2).eval()(x))


@on_both_ranks
def it_trains_in_the_distributed_data_parallel_of_torch():
    model = convert_syncbn_model(make_net())
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped(torch.randn(3, 3) + dist.get_rank()).sum().backward()
    assert is_equal_on_ranks([param.grad for param in model.parameters()])


@shows("companions-syncbn")
@pytest.mark.parametrize("case", ON_BOTH_RANKS, ids=lambda case: case.__name__)
def test_on_both_ranks(ranks, case):
    ranks(case)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_on_one_rank_it_is_batch_norm_bit_by_bit(shape, training):
    norm = KINDS[len(shape)](3).train(training)
    synced = convert_syncbn_model(copy.deepcopy(norm))
    assert synced.training is training
    x = torch.randn(shape)
    assert torch.equal(synced(x), norm(x))
    assert torch.equal(synced.running_var, norm.running_var)
    assert synced.state_dict().keys() == norm.state_dict().keys()


def test_other_devices_run_the_forward_of_torch():
    found = SyncBatchNorm(3).to("meta")(torch.randn(4, 3, device="meta"))
    assert (found.shape, found.device.type) == ((4, 3), "meta")


@shows("companions-syncbn")
def test_converting_keeps_parameters_buffers_flags_and_hooks():
    shared = nn.BatchNorm1d(2)
    model = nn.Sequential(
        nn.Sequential(nn.BatchNorm2d(3, eps=0.1), nn.InstanceNorm2d(3)), shared, shared, nn.BatchNorm3d(4)
    )
    model[0][0].eval()
    calls = []
    shared.register_forward_hook(lambda *args: calls.append("hook"))
    before = [*model.parameters(), *model.buffers()]
    converted = convert_syncbn_model(model)
    assert converted is model
    kinds = [type(module).__name__ for module in model.modules() if not isinstance(module, nn.Sequential)]
    assert kinds == ["SyncBatchNorm", "InstanceNorm2d", "SyncBatchNorm", "SyncBatchNorm"]
    after = [*model.parameters(), *model.buffers()]
    assert all(a is b for a, b in zip(after, before, strict=True))
    assert model[1] is model[2]
    assert (model[0][0].eps, model[0][0].training, model[3].training) == (0.1, False, True)
    model[1](torch.randn(3, 2))
    assert calls == ["hook"]


def test_converting_a_batch_norm_itself_returns_a_new_module():
    norm = nn.BatchNorm2d(3)
    converted = convert_syncbn_model(norm, channel_last=True)
    assert isinstance(converted, SyncBatchNorm)
    assert converted.channel_last
    assert converted.weight is norm.weight
    assert type(norm) is nn.BatchNorm2d


def test_torch_converts_it_and_it_converts_torchs():
    model = nn.Sequential(nn.BatchNorm1d(2))
    theirs = nn.SyncBatchNorm.convert_sync_batchnorm(convert_syncbn_model(model))
    assert type(theirs[0]) is nn.SyncBatchNorm
    assert type(convert_syncbn_model(theirs)[0]) is SyncBatchNorm


def test_a_batch_norm_without_parameters_yet_is_refused():
    with pytest.raises(amp.AmpValueError, match="LazyBatchNorm1d is not initialized yet: run one forward"):
        convert_syncbn_model(nn.Sequential(nn.LazyBatchNorm1d()))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_half_model_keeps_it_in_float32(level):
    model = convert_syncbn_model(make_net())
    amp.initialize(model, opt_level=level, verbosity=0)
    assert model[1].weight.dtype is torch.float32
    assert model[0].weight.dtype is not torch.float32
    assert model(torch.randn(4, 3)).dtype is torch.float32
