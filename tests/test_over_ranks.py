"""What torch.distributed adds to a training: checkpoints for other ranks, uneven inputs, ZeRO, pipelines."""

import contextlib
import copy
import functools
import importlib
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import ampatch as amp
from helpers import needs_torch, snapshot
from ranks import FSDP2, fixture, gather, is_equal_on_ranks

pytestmark = pytest.mark.process

two = fixture()


four = fixture(4)


# ---- Checkpoints ----


def build(level, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    for part in (model[0], model):
        fully_shard(part)
    optimizer = AdamW(model.parameters(), lr=0.01, eps=1e-4)
    scale = amp.DynamicLossScale(growth_interval=3) if level in ("O1", "O2") else None
    return amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)


def train(model, optimizer, steps):
    for step in steps:
        # The same on every rank: its mean over ranks is exact, whatever their number.
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        loss = model(x).float().pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def get_states(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "amp": amp.state_dict()}


def full(states):
    def gather_value(value):
        if isinstance(value, dict):
            return {key: gather_value(one) for key, one in value.items()}
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)

    return gather_value(states)


def leg(level, steps, load=None, save=None):
    """Trains for some steps, from a checkpoint or to one, and returns all that there is in the end."""
    model, optimizer = build(level, seed=0 if load is None else 1)
    if load is not None:
        states = get_states(model, optimizer)
        dcp.load(states, checkpoint_id=load)
        set_state_dict(
            model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
        )
        amp.load_state_dict(states["amp"])
    train(model, optimizer, steps)
    states = get_states(model, optimizer)
    if save is not None:
        dcp.save(states, checkpoint_id=save)
    return full(states)


@FSDP2
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_checkpoint_resumes_bit_for_bit_on_another_number_of_ranks(level, two, four, tmp_path):
    two(leg, level, range(3), save=tmp_path / "first")
    four(leg, level, range(3, 5), load=tmp_path / "first", save=tmp_path / "second")
    resumed = two(leg, level, range(5, 8), load=tmp_path / "second")[0]
    whole = two(leg, level, range(8))[0]
    assert resumed["amp"] == whole["amp"]
    assert snapshot(resumed) == snapshot(whole)


@FSDP2
@pytest.mark.parametrize(
    ("before", "level"), [("O2", "O2"), ("O5", "O5"), ("O2", "O5"), ("O5", "O1"), ("O0", "O2"), ("O5", None)]
)
def test_sharded_weights_train_in_a_second_session(before, level, two):
    assert two(train_again, before, level) == [True] * 2


def train_again(before, level):
    """Whether the forwards of a second session, or of float32 after it, see the steps that it has made."""
    model, optimizer = build(before)
    train(model, optimizer, range(1))
    amp.uninitialize()
    amp.initialize(model, optimizer, opt_level=level or "O2", verbosity=0, enabled=level is not None)
    train(model, optimizer, range(2))
    x = torch.ones(2, 6, dtype=model[0].weight.dtype)
    weights = [param.full_tensor() for param in model.parameters()]
    expected = nn.functional.linear(nn.functional.linear(x, *weights[:2]).relu(), *weights[2:])
    return torch.equal(model(x), expected.to(model(x).dtype))


# ---- Optimizers and inputs that differ over ranks ----


def bare(optimizer_class=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    return model, optimizer


def find_optimizers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it scripts functions
        return importlib.import_module("torch.distributed.optim")


def step_on(model, optimizer, step, factor=1.0, stepper=None):
    """Makes a step on a batch of this rank's own."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    loss = model(x).float().pow(2).mean() * factor
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    (stepper or optimizer).step()
    optimizer.zero_grad()


def copies(optimizer):
    return [param.detach().clone() for param in amp.master_params(optimizer)]


def are_close(some, others):
    # A half gradient has 11 bits (bfloat16: 8), and a few steps of 0.1 add up.
    return all(torch.allclose(one, other, atol=2e-3) for one, other in zip(some, others, strict=True))


def share_state(level, shares, **options):
    """Trains with or without ZeroRedundancyOptimizer, one step of it skipped where scales are dynamic."""
    zero = functools.partial(find_optimizers().ZeroRedundancyOptimizer, optimizer_class=AdamW, **options)
    model, optimizer = bare(zero if shares else AdamW, eps=1e-4)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, alarms=None)
    ddp = DistributedDataParallel(model)
    for step in range(4):
        step_on(ddp, optimizer, step, float("inf") if step == 2 and level in ("O1", "O2") else 1.0)
    trained = copies(optimizer)
    amp.uninitialize()
    DistributedDataParallel(model)(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    return trained, copies(optimizer), is_equal_on_ranks(copies(optimizer))


@pytest.mark.parametrize(
    ("level", "bucket_view"), [("O1", False), ("O2", False), ("O2", True), ("O3", False), ("O5", False)]
)
def test_an_optimizer_whose_state_is_shared_out_takes_the_steps_of_a_whole_one(level, bucket_view, two):
    shared = two(share_state, level, True, parameters_as_bucket_view=bucket_view)
    assert snapshot(shared) == snapshot(two(share_state, level, False))
    assert shared[0][2]


def refuse_for(level, message, **options):
    zero = find_optimizers().ZeroRedundancyOptimizer
    model, optimizer = bare(functools.partial(zero, optimizer_class=torch.optim.SGD, **options))

    def use():
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        Join([optimizer])

    with pytest.raises(amp.AmpError, match=message):
        use()


@pytest.mark.parametrize(
    ("level", "message", "options"),
    [
        ("O3", "parameters_as_bucket_view=False", {"parameters_as_bucket_view": True}),
        ("O1", "overlap_with_ddp=False", {"overlap_with_ddp": True}),
        ("O5", "the same number of batches", {}),
    ],
)
def test_what_sharing_out_cannot_do_is_refused(level, message, options, two):
    two(refuse_for, level, message, **options)


def join(level, message, **options):
    """Asks for uneven inputs, which ampatch refuses with this message, unless `enable` is False."""
    model, optimizer = bare()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    ddp = DistributedDataParallel(model)
    ddp.join(enable=False)
    with contextlib.nullcontext() if message is None else pytest.raises(amp.AmpError, match=message):
        ddp.join()


@pytest.mark.parametrize(
    ("level", "message", "options"),
    [
        ("O1", "SGD has a dynamic loss scale.* the same number of batches", {}),
        ("O5", "SGD has float32 masters.* the same number of batches", {}),
        ("O1", None, {"loss_scale": 128.0}),
    ],
)
def test_uneven_inputs_are_refused_where_ranks_would_differ_after_them(level, message, options, two):
    two(join, level, message, **options)


def average_locally(level, is_wrapped, factor=1.0):
    """Trains each rank alone, with averages after every other step; `factor` is of one step of rank 1."""
    local_sgd = find_optimizers().PostLocalSGDOptimizer
    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    model, optimizer = bare()
    given = local_sgd(optimizer, averager) if is_wrapped else optimizer
    amp.initialize(model, given, opt_level=level, verbosity=0, alarms=None)
    stepper = given if is_wrapped else local_sgd(optimizer, averager)
    with warnings.catch_warnings():
        if not is_wrapped:  # then nobody knows why these ranks step alone
            warnings.filterwarnings("ignore", ".* nothing makes the ranks skip a step together")
        for step in range(7):
            is_odd = step == 4 and dist.get_rank() == 1
            step_on(model, given, step, factor if is_odd else 1.0, stepper)
    return copies(optimizer), is_equal_on_ranks(copies(optimizer))


@pytest.mark.parametrize("is_wrapped", [True, False], ids=["given", "inside"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_rank_that_skips_a_step_of_local_sgd_still_takes_part_in_the_average(level, is_wrapped, two):
    factor = 0.0 if level == "O5" else float("inf")
    (params, are_same), _ = two(average_locally, level, is_wrapped, factor)
    assert are_same
    assert are_close(params, two(average_locally, "O0", True, 0.0)[0][0])


# ---- Several models and losses, pipelines, hooks of DistributedDataParallel ----

SCALE = amp.DynamicLossScale(256.0, growth_interval=3, max_scale=1024.0)
OVERFLOWS = {(1, 0), (2, 2), (3, 1)}  # steps and losses that overflow, on the last rank alone


def build_parts(level, count=1, **options):
    """A model in two parts, an optimizer for each, and a loss scale for each of `count` losses."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 6)]
    optimizers = [AdamW(parts[0].parameters(), lr=0.01, eps=1e-2), bare_sgd(parts[1])]
    options |= {"num_losses": count, "loss_scale": SCALE, "verbosity": 0, "alarms": None}
    amp.initialize(parts, optimizers, opt_level=level or "O0", enabled=level is not None, **options)
    return parts, optimizers


def bare_sgd(part):
    return torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9)


def make_batch(step):
    return torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step))


def train_two_models(level):
    """Trains two models by three losses, two of one optimizer; no level: alone, on joined batches."""
    parts, optimizers = build_parts(level, 3)
    is_alone, rows = level is None, slice(None) if level is None else slice(dist.get_rank(), None, 2)
    first, second = parts if is_alone else map(DistributedDataParallel, parts)
    skips = []
    for step in range(5):
        x, y = make_batch(step)[:, rows]
        for index, ids in ((1, (0, 1)), (0, (2,))):
            skip = [(step, one) for one in ids if (step, one) in OVERFLOWS]
            for one in ids:
                hidden = first(x) if one == 2 else first(x).detach()
                is_odd = (step, one) in OVERFLOWS and not is_alone and dist.get_rank()
                loss = (second(hidden).float() - y / (1 + one)).pow(2).mean() * (
                    float("inf") if is_odd else 1
                )
                with amp.scale_loss(loss, optimizers[index], loss_id=one) as scaled_loss:
                    scaled_loss.backward()
            if not (is_alone and skip):
                optimizers[index].step()
            skips.append(bool(skip) if is_alone else amp.step_was_skipped(optimizers[index]))
            for optimizer in optimizers:
                optimizer.zero_grad()
    return [copies(one) for one in optimizers], skips, [amp.get_loss_scale(one) for one in range(3)]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_models_with_three_losses_take_the_steps_of_one_process(level, two):
    found, others = two(train_two_models, level)
    assert snapshot(found) == snapshot(others)
    expected, skips, _ = train_two_models(None)
    assert found[1:] == (skips, [256.0, 256.0, 128.0])
    assert all(map(are_close, found[0], expected))


def train_stage(level, schedule, steps=6):
    """Trains one stage of a pipeline on each rank, as docs/distributed.md says; step 2 overflows."""
    parts, optimizers = build_parts(level, process_group=dist.group.WORLD)
    rank = dist.get_rank()
    stage = PipelineStage(parts[rank], rank, 2, torch.device("cpu"))
    factors = {}

    def find_loss(output, y):
        return (output.float() - y).pow(2).mean() * factors["scale"] * factors["overflow"]

    pipeline, skips, scales = schedule(stage, 4, find_loss), [], []
    for step in range(steps):
        x, y = make_batch(step)
        factors["overflow"] = float("inf") if step == 2 else 1.0
        with amp.scale_loss(torch.ones(()), optimizers[rank]) as factors["scale"]:
            pipeline.step(x) if rank == 0 else pipeline.step(target=y)
        optimizers[rank].step()
        optimizers[rank].zero_grad()
        skips.append(amp.step_was_skipped(optimizers[rank]))
        scales.append(amp.get_loss_scale())
    return gather(copies(optimizers[rank])), skips, scales


def train_whole(steps=6):
    parts, optimizers = build_parts(None)
    for step in set(range(steps)) - {2}:
        x, y = make_batch(step)
        (parts[1](parts[0](x)) - y).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [copies(one) for one in optimizers]


@needs_torch("2.7", "pipelines that average over their micro-batches")  # and a 1F1B that ends on gloo
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_the_stages_of_a_pipeline_take_the_steps_of_one_process(level, schedule, two):
    for found, skips, scales in two(train_stage, level, schedule):
        assert all(map(are_close, found, train_whole()))
        assert skips == [step == 2 for step in range(6)]
        assert scales == [256.0, 256.0, 128.0, 128.0, 128.0, 256.0]


def compress(clears):
    """Counts skipped steps with gradients that torch compresses, after one that overflows on one rank."""
    model, optimizer = bare()
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=SCALE, verbosity=0, alarms=None)
    ddp, state, skips = DistributedDataParallel(model), PowerSGDState(None, start_powerSGD_iter=2), 0
    ddp.register_comm_hook(state, powerSGD_hook)
    for step in range(7):
        step_on(ddp, optimizer, step, float("inf") if step == 4 and dist.get_rank() else 1.0)
        if amp.step_was_skipped(optimizer):
            skips += 1
            for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict) if clears else ():
                memory.clear()
    return skips, is_equal_on_ranks(copies(optimizer))


def test_compressed_gradients_recover_where_the_errors_of_a_skipped_step_are_cleared(two):
    assert two(compress, True) == [(1, True)] * 2
    assert (
        two(compress, False) == [(3, True)] * 2
    )  # else what docs/distributed.md says is not needed any more
