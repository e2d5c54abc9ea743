"""Every rank takes the same step: found_inf is agreed on over the meshes of the parameters."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch as amp
from ampatch.apex.fp16_utils import DynamicLossScaler, FP16_Optimizer
from nets import EVERY_LEVEL
from ranks import FSDP2, fixture
from ranks_matrix import RANKS, Case, find_faults, mesh, unsynchronized

pytestmark = pytest.mark.process


ranks = fixture(RANKS)


def open_linear(level="O1", scale="dynamic", shards=True, sizes=(3, 4), **kwargs):
    torch.manual_seed(0)
    model = nn.Linear(*sizes, bias=False)
    if shards:
        fully_shard(model, mesh=mesh(RANKS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(
        model, optimizer, opt_level=level, loss_scale=scale, verbosity=0, alarms=None, **kwargs
    )


def run_block(model, optimizer, factor=1.0, **kwargs):
    with amp.scale_loss(model(torch.ones(2, 3)).sum() * factor, optimizer, **kwargs) as scaled:
        scaled.backward()


# ---- The whole matrix; `python tests/ranks_matrix.py 200` runs it with all kinds of optimizers ----

SMOKE = [
    Case("FSDP2", "O2", "fused", True, "AdamW"),
    Case("HSDP", "O4", "foreach", True),
    Case("TP", "O5", "plain", False),
    Case("TP", "O1", "foreach", False),
    Case("TP+FSDP2", "O2", "plain", True),
    Case("TP+FSDP2", "O1", "fused", False, "AdamW"),
]


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=[FSDP2] * (case.wrapper != "TP")) for case in SMOKE]
)
def test_ranks_take_the_step_of_one_process(ranks, case):
    assert ranks(find_faults, case)[0] == []


# ---- Where torch's GradScaler diverges ----


def make_lists():
    """Lists of parameters whose gradients overflow on rank 3 alone, by name."""
    all_ranks, grid = mesh(RANKS), mesh(2, 2)
    whole, sharded = [Replicate()], [Shard(0)]

    def lay(device_mesh, placements):
        return nn.Parameter(distribute_tensor(torch.ones(4, 2), device_mesh, placements))

    return {
        "sharded": [lay(all_ranks, sharded)],
        "replicated first": [lay(all_ranks, whole), lay(all_ranks, sharded)],
        "HSDP": [lay(grid, [Replicate(), Shard(0)])],
        "norm on dp alone": [lay(grid["dp"], sharded), lay(grid, [Shard(0), Shard(1)])],
        "plain first": [nn.Parameter(torch.ones(2)), lay(all_ranks, sharded)],
    }


def give_grads(params, loss):
    """Gradients of `loss`, with an inf in what rank 3 has of the last."""
    loss.backward()
    overflow_on_rank_3(params)


def overflow_on_rank_3(params):
    if dist.get_rank() == 3:
        with torch.no_grad():
            params[-1].grad.to_local().view(-1)[0] = float("inf")


def step_with_torch(params):
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD(params, lr=0.1)
    total = sum(param.full_tensor().sum() if isinstance(param, DTensor) else param.sum() for param in params)
    give_grads(params, scaler.scale(total))
    try:
        scaler.step(optimizer)
    except RuntimeError:
        return "raises"
    scaler.update()
    return scaler.get_scale()


def step_with_ours(params):
    model = nn.Module()
    model.params = nn.ParameterList(params)
    optimizer = torch.optim.SGD(params, lr=0.1)
    scale = amp.DynamicLossScale(init_scale=8.0)
    model, optimizer = amp.initialize(model, optimizer, loss_scale=scale, verbosity=0, alarms=None)
    total = sum(param.full_tensor().sum() if isinstance(param, DTensor) else param.sum() for param in params)
    with amp.scale_loss(total, optimizer) as scaled:
        give_grads(params, scaled)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    found = amp.get_loss_scale()
    amp.uninitialize()
    return found


def compare_lists(step):
    return {name: step(params) for name, params in make_lists().items()}


# What torch's GradScaler has for a scale on each rank: 4.0 where it saw the inf, 8.0 where it did not.
TORCHS = {
    "sharded": [4.0, 4.0, 4.0, 4.0],
    "replicated first": [8.0, 8.0, 8.0, 4.0],
    "HSDP": [8.0, 8.0, 4.0, 4.0],
    "norm on dp alone": [8.0, 4.0, 8.0, 4.0],
    "plain first": ["raises"] * RANKS,
}


def test_ranks_agree_where_those_of_torchs_grad_scaler_do_not(ranks):
    assert ranks(compare_lists, step_with_ours) == [dict.fromkeys(TORCHS, 4.0)] * RANKS
    theirs = ranks(compare_lists, step_with_torch)
    if torch.__version__.startswith("2.13"):
        assert {name: [each[name] for each in theirs] for name in TORCHS} == TORCHS


# ---- Gradients that are kept back, to be averaged with later ones ----


def accumulate_with_another_scale(level, wrapper, change):
    """A block whose gradients are kept, and one whose backward averages both, at another scale."""
    scale = 64.0 if change == "static" else amp.DynamicLossScale(64.0, growth_interval=1)
    scale, shards = 1.0 if change == "identity" else scale, wrapper == "FSDP2"
    model, optimizer = open_linear(level, scale, shards, num_losses=2)
    model = model if shards else nn.parallel.DistributedDataParallel(model)
    with unsynchronized(model, False):
        run_block(model, optimizer, 1.0 + dist.get_rank())
    kept = amp.get_loss_scale()
    if change == "set_loss_scale":
        amp.set_loss_scale(8.0)
    if change == "loss_id":
        amp.set_loss_scale(16.0, loss_id=1)
    with unsynchronized(model, True):
        run_block(model, optimizer, 1.0 + dist.get_rank(), loss_id=int(change == "loss_id"))
    (param,) = amp.master_params(optimizer)
    grad = param.grad.full_tensor() if shards else param.grad
    return kept == amp.LossScaler(0, scale, grad.device).get_scale(), grad.unique().tolist()


@pytest.mark.parametrize("change", ["set_loss_scale", "loss_id", "nothing", "static", "identity"])
@pytest.mark.parametrize("wrapper", [pytest.param("FSDP2", marks=FSDP2), "DDP"])
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_kept_gradients_are_unscaled_by_what_they_were_made_with(ranks, level, wrapper, change):
    # Two rows of ones, times the mean of 1 to 4, in each of two blocks.
    assert ranks(accumulate_with_another_scale, level, wrapper, change) == [(True, [10.0])] * RANKS


def wrap_first(level):
    """Calls `initialize` on a model that is wrapped already, as Lightning does; returns a step's weight."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = nn.parallel.DistributedDataParallel(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, alarms=None)
    if level in ("O2", "O3", "O5"):
        with pytest.raises(amp.AmpError, match="DistributedDataParallel was made before initialize cast"):
            wrapped(torch.ones(2, 3))
        return amp.uninitialize()
    run_block(wrapped, optimizer, 1.0 + dist.get_rank())
    optimizer.step()
    amp.uninitialize()
    return model.weight.tolist()


def test_a_model_that_was_wrapped_before_its_weights_were_cast_is_refused(ranks):
    for level in EVERY_LEVEL:
        weights = ranks(wrap_first, level)
        assert weights == [weights[0]] * RANKS


def accumulate_with_a_closure(level, wrapper, syncs, by_closure):
    """The second of two backward passes runs in a closure, inside the step, as Lightning has it."""
    shards = wrapper == "FSDP2"
    model, optimizer = open_linear(level, 64.0, shards)
    model = model if shards else nn.parallel.DistributedDataParallel(model)
    with unsynchronized(model, False):
        run_block(model, optimizer, 1.0 + dist.get_rank())
    with unsynchronized(model, syncs):
        if by_closure:
            optimizer.step(lambda: run_block(model, optimizer, 1.0 + dist.get_rank()))
        else:
            run_block(model, optimizer, 1.0 + dist.get_rank())
            optimizer.step()
    (param,) = amp.master_params(optimizer)
    value = (param.full_tensor() if shards else param).tolist()
    amp.uninitialize()
    return value


@pytest.mark.parametrize("wrapper", [pytest.param("FSDP2", marks=FSDP2), "DDP"])
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_kept_gradients_are_averaged_by_the_backward_in_a_closure(ranks, level, wrapper):
    expected = ranks(accumulate_with_a_closure, level, wrapper, True, False)
    assert ranks(accumulate_with_a_closure, level, wrapper, True, True) == expected == [expected[0]] * RANKS


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_gradients_that_a_closure_keeps_are_unscaled_for_its_step(ranks, level):
    expected = ranks(accumulate_with_a_closure, level, "DDP", False, False)
    assert ranks(accumulate_with_a_closure, level, "DDP", False, True) == expected


def accumulate_in_a_part(keeps):
    """Two blocks; in the first, one of two parts may keep its gradients back. The scale would double."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 4, bias=False))
    for part in (*model, model):
        fully_shard(part, mesh=mesh(RANKS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = amp.DynamicLossScale(64.0, growth_interval=1)
    amp.initialize(model, optimizer, opt_level="O4", loss_scale=scale, verbosity=0, alarms=None)
    for is_last in (False, True):
        model[1].set_requires_gradient_sync(is_last or not keeps, recurse=False)
        run_block(model, optimizer)
    grads = [param.grad.full_tensor() for param in model.parameters()]
    amp.uninitialize()
    return grads


def compare_parts():
    return all(map(torch.equal, accumulate_in_a_part(True), accumulate_in_a_part(False)))


@FSDP2
def test_a_part_that_keeps_its_gradients_keeps_the_scale(ranks):
    assert ranks(compare_parts) == [True] * RANKS


# ---- Gradients averaged by hand ----


def average_by_hand(overflow, named):
    """Averages unscaled gradients after the block; one rank overflows. Returns skips and the scale."""
    group = {"process_group": dist.group.WORLD} if named else {}
    model, optimizer = open_linear("O4", amp.DynamicLossScale(64.0), shards=False, **group)
    run_block(model, optimizer, float("inf") if dist.get_rank() == overflow else 1.0)
    for param in model.parameters():
        dist.all_reduce(param.grad)
    optimizer.step()
    return amp.step_was_skipped(optimizer), amp.get_loss_scale()


def test_ranks_that_average_by_hand_skip_together_in_a_process_group(ranks):
    assert ranks(average_by_hand, 2, named=True) == [(True, 32.0)] * RANKS


def warn_of_ranks(wraps):
    model, optimizer = open_linear("O4", amp.DynamicLossScale(64.0), shards=False)
    model = nn.parallel.DistributedDataParallel(model) if wraps else model
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            run_block(model, optimizer)
            optimizer.step()
    return [str(one.message)[:48] for one in seen]


def test_ranks_that_nothing_joins_are_warned_once(ranks):
    assert ranks(warn_of_ranks, wraps=True) == [[]] * RANKS
    assert ranks(warn_of_ranks, wraps=False) == [["SGD: nothing makes the ranks skip a step togethe"]] * RANKS


def test_what_is_no_process_group_is_refused():
    with pytest.raises(
        amp.AmpTypeError, match=r"expected a torch\.distributed\.ProcessGroup that this rank is"
    ):
        open_linear(shards=False, process_group=[0, 1])


# ---- Loops by hand, delayed blocks, the optimizers of apex ----


def overflow_by_hand():
    """Unscales gradients, of which one rank has none, by a LossScaler of its own."""
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh(RANKS), [Shard(0)]))
    scaler, found = amp.LossScaler(0, amp.DynamicLossScale(8.0), torch.device("cpu")), []
    for step in range(2):
        loss = scaler.scale(weight.sum())
        loss.backward()
        overflow_on_rank_3([weight])
        found_inf = scaler.new_found_inf()
        scaler.unscale_([weight.grad] if step == 0 or dist.get_rank() == 3 else [], found_inf)
        found.append(scaler.update(found_inf))
    return found, scaler.get_scale()


def test_a_scaler_in_a_loop_by_hand_agrees(ranks):
    assert ranks(overflow_by_hand) == [([True, True], 2.0)] * RANKS


def overflow_in_fp16_optimizer():
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 2).half(), mesh(RANKS), [Shard(0)]))
    optimizer = FP16_Optimizer(torch.optim.SGD([weight], lr=0.1), dynamic_loss_scale=True, verbose=False)
    optimizer.backward(weight.sum(), update_master_grads=False)
    overflow_on_rank_3([weight])
    by_hand = DynamicLossScaler().has_overflow([weight])
    optimizer.step()
    return optimizer.overflow, optimizer.loss_scale, by_hand


def test_the_optimizer_of_apex_agrees(ranks):
    assert ranks(overflow_in_fp16_optimizer) == [(True, 2.0**15, True)] * RANKS


def delay(level):
    model, optimizer = open_linear(level, amp.DynamicLossScale(64.0))
    with amp.scale_loss(model(torch.ones(2, 3)).sum(), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
        overflow_on_rank_3(list(model.parameters()))
    optimizer.step()
    return amp.step_was_skipped(optimizer), amp.get_loss_scale()


@FSDP2
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_delayed_block_agrees_at_the_step(ranks, level):
    assert ranks(delay, level) == [(True, 32.0)] * RANKS


# ---- What a step sends, on torch's fake process group ----


class Collectives(TorchDispatchMode):
    """Notes the size of each message."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            self.sizes += [tensor.numel() for tensor in args[0]]
        return function(*args, **(kwargs or {}))


def count_collectives(sizes, count):
    """The sizes of what the end of a block sends, with parameters on a mesh of these sizes; none: plain."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(count)]
    if sizes:
        device_mesh, places = init_device_mesh("cpu", sizes), [Shard(0), *[Replicate()] * (len(sizes) - 1)]
        params = [nn.Parameter(DTensor.from_local(param.data, device_mesh, places)) for param in params]
    model, optimizer = nn.Module(), torch.optim.SGD(params, lr=0.1)
    model.params = nn.ParameterList(params)
    amp.initialize(model, optimizer, opt_level="O4", loss_scale="dynamic", verbosity=0, alarms=None)
    with Collectives() as sent:
        for _ in range(2):
            with amp.scale_loss(torch.ones((), requires_grad=True), optimizer):
                for param in params:
                    param.grad = param.detach().clone()
    amp.uninitialize()
    return sent.sizes


@pytest.mark.parametrize("world", [8, 64, 1024])
def test_a_block_sends_one_number_for_each_dimension_of_a_mesh(world):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        for sizes in [(), (world,), (world // 4, 4), (world // 4, 2, 2)]:
            assert [count_collectives(sizes, count) for count in (1, 9)] == [[1] * 2 * len(sizes)] * 2
    finally:
        dist.destroy_process_group()


# ---- Refused ----


def shard_after_initialize(level, way):
    model, optimizer = open_linear(level, shards=False)
    if way == "fully_shard":
        fully_shard(model, mesh=mesh(RANKS))
    else:
        parallelize_module(model, mesh(RANKS), ColwiseParallel())
    try:
        run_block(model, optimizer)
    except amp.AmpError as error:
        return str(error)


@pytest.mark.parametrize("way", [pytest.param("fully_shard", marks=FSDP2), "parallelize_module"])
@pytest.mark.parametrize("level", ["O0", "O1", "O5"])
def test_parameters_that_are_replaced_after_initialize_are_refused(ranks, level, way):
    for text in ranks(shard_after_initialize, level, way):
        assert "Linear: 1 parameters were replaced after initialize ('weight' for one)" in text


def shard_beside_batch_norm(apart, is_frozen=False):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).requires_grad_(not is_frozen))
    for part in (*([model[1]] if apart else []), model):
        fully_shard(part, mesh=mesh(RANKS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0, alarms=None)
    except amp.AmpError as error:
        return str(error)
    with amp.scale_loss(model(torch.ones(4, 4)).sum(), optimizer) as scaled:
        scaled.backward()
    return None


@FSDP2
def test_fsdp_with_weights_of_two_types_in_one_part_is_refused(ranks):
    for text in ranks(shard_beside_batch_norm, False):
        assert "holds torch.bfloat16 and torch.float32 weights in one part" in text
    for rest in ((True,), (False, True)):
        assert ranks(shard_beside_batch_norm, *rest) == [None] * RANKS
