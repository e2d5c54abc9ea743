"""Blocks of scale_loss and the steps after them: skipped, accumulated, clipped, scheduled, interrupted."""

import contextlib
import copy
import warnings

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.nn import Parameter
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch as amp
from ampatch.apex.parallel import LARC
from helpers import (
    SKIPPING_VARIANTS,
    Dense,
    Scalar,
    Sparse,
    Variant,
    assert_same_bits,
    make_batches,
    make_net,
    snapshot,
)

INF = float("inf")
HALF = {"O1": torch.float16, "O2": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}
FLOAT32_LEVELS = ["O0", "O1", "O4"]  # whose parameters are float32 themselves
LEVELS = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
DYNAMIC_LEVELS = pytest.mark.parametrize("level", list(HALF))
ADAM, FUSED_ADAM = Variant(torch.optim.Adam), Variant(torch.optim.Adam, {"fused": True})
MOMENTUM = Variant(torch.optim.SGD, {"momentum": 0.9})
FUSED_MOMENTUM = Variant(torch.optim.SGD, {"momentum": 0.9, "fused": True})
SCALE = 2.0**8
# Whole numbers: with a scale that is a power of two, no product or sum of theirs is rounded in any
# half type, so that the gradient of `run_block` is exactly batch * factor at every level.
BATCHES = [
    torch.tensor(batch) for batch in ([1.0, -2.0, 3.0], [4.0, 1.0, -1.0], [-2.0, 5.0, 2.0], [3.0, 3.0, 1.0])
]


def open_scalar(level, make_optimizer=MOMENTUM, loss_scale=None, shape=(3,), **options):
    """A product at some level, and the same weight in a float32 optimizer."""
    model = Scalar(*shape)
    optimizer = make_optimizer(model.parameters())
    oracle = Parameter(model.weight.detach().clone())
    oracle_optimizer = make_optimizer([oracle])
    scale = loss_scale or amp.DynamicLossScale(SCALE)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, **{"verbosity": 0, **options})
    return model, optimizer, oracle, oracle_optimizer


def run_block(model, optimizers, batch, factor=1.0, **options):
    loss = model(batch).float().sum() * factor
    with amp.scale_loss(loss, optimizers, **options) as scaled_loss:
        scaled_loss.backward()


def run_block_that_raises(model, optimizer, batch, error=ValueError):
    with amp.scale_loss(model(batch).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        raise error("no more")


def step_by_hand(oracle, optimizer, *grads):
    oracle.grad = sum(grads)
    optimizer.step()


def param_bits(optimizer):
    return [snapshot(param) for param in amp.master_params(optimizer)]


def all_bits(model, optimizer):
    """Parameters of model and optimizer, and the whole state of the optimizer."""
    params = list(amp.master_params(optimizer))
    states = [snapshot(optimizer.state[param]) if param in optimizer.state else None for param in params]
    options = [{**group, "params": None} for group in optimizer.param_groups]
    return (
        snapshot(list(model.parameters())),
        snapshot(params),
        states,
        snapshot(options),
        len(optimizer.state),
    )


# Skipped steps


def open_net(level, variant, scale=SCALE, weights=None):
    model = make_net(variant)
    if weights is not None:
        model.load_state_dict(weights)
    optimizer = variant(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=amp.DynamicLossScale(scale), verbosity=0)
    return model, optimizer


def run_iteration(model, optimizer, batch, factor=1.0):
    optimizer.zero_grad()
    loss = model(batch).float().square().mean() * factor
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return loss.detach()


@DYNAMIC_LEVELS
@pytest.mark.parametrize("variant", SKIPPING_VARIANTS, ids=str)
def test_a_step_after_overflow_changes_neither_params_nor_state(variant, level):
    model, optimizer = open_net(level, variant)
    batches = make_batches(variant, 4)
    for batch in batches[:2]:
        run_iteration(model, optimizer, batch)
    before = all_bits(model, optimizer)
    run_iteration(model, optimizer, batches[2], INF)
    assert amp.step_was_skipped(optimizer)
    assert all_bits(model, optimizer) == before
    run_iteration(model, optimizer, batches[3])
    assert not amp.step_was_skipped(optimizer)
    assert all_bits(model, optimizer)[0] != before[0]


def fill_free_memory():
    """Puts a number into memory that is then free, to be seen by who uses memory nobody wrote to."""
    for _ in range(4):
        torch.full((6, 6), 7.0), [torch.full((size,), 7.0) for size in range(1, 40)]


@DYNAMIC_LEVELS
@pytest.mark.parametrize("variant", SKIPPING_VARIANTS, ids=str)
def test_a_first_step_that_is_skipped_leaves_no_trace_in_what_follows(variant, level):
    bad, *batches = make_batches(variant, 4)
    weights = make_net(variant).state_dict()
    model, optimizer = open_net(level, variant, weights=weights)
    expected = [run_iteration(model, optimizer, batch) for batch in batches]
    expected_weights = copy.deepcopy(model.state_dict())
    amp.uninitialize()
    model, optimizer = open_net(level, variant, 2 * SCALE, weights=weights)
    params = param_bits(optimizer)
    fill_free_memory()
    run_iteration(model, optimizer, bad, INF)
    assert amp.step_was_skipped(optimizer)
    assert param_bits(optimizer) == params
    losses = [run_iteration(model, optimizer, batch) for batch in batches]
    assert_same_bits(losses, expected)
    assert_same_bits(model.state_dict().values(), expected_weights.values())


@DYNAMIC_LEVELS
@pytest.mark.parametrize(
    "variant", [variant for variant in SKIPPING_VARIANTS if not variant.is_fused], ids=str
)
def test_a_first_step_that_is_skipped_makes_no_state(variant, level):
    model, optimizer = open_net(level, variant)
    before = all_bits(model, optimizer)
    run_iteration(model, optimizer, make_batches(variant, 1)[0], INF)
    assert all_bits(model, optimizer) == before


@DYNAMIC_LEVELS
@pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
@pytest.mark.parametrize("variant", [ADAM, FUSED_ADAM, MOMENTUM, FUSED_MOMENTUM], ids=str)
def test_one_gradient_that_is_not_finite_skips_the_whole_step(variant, level, bad):
    model, optimizer = open_net(level, variant)
    for batch in make_batches(variant, 2):
        run_iteration(model, optimizer, batch)
    before = all_bits(model, optimizer)
    optimizer.zero_grad()
    loss = model(torch.randn(5, 4)).float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        model.second.weight.grad[1, 2] = bad
    optimizer.step()
    assert all_bits(model, optimizer) == before


def test_a_loss_scale_too_high_for_float16_finds_its_way_down():
    model = Dense()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=amp.DynamicLossScale(2.0**24), verbosity=0)
    batch = torch.randn(5, 4)
    skipped = []
    for _ in range(20):
        run_iteration(model, optimizer, batch)
        skipped.append(amp.step_was_skipped(optimizer))
    count = sum(skipped)
    assert skipped == [True] * count + [False] * (20 - count)
    assert 4 <= count <= 12
    assert amp.get_loss_scale() == 2.0 ** (24 - count)


@pytest.mark.parametrize("level", ["O1", "O4"])  # with masters, a step clears their gradients
@pytest.mark.parametrize("variant", [MOMENTUM, FUSED_MOMENTUM], ids=str)
def test_the_gradients_of_a_skipped_step_are_still_there_after_it(variant, level):
    model, optimizer, *_ = open_scalar(level, variant)
    run_block(model, optimizer, BATCHES[0], INF)
    grad = model.weight.grad
    optimizer.step()
    assert model.weight.grad is grad


@DYNAMIC_LEVELS
def test_an_overflow_skips_one_step_of_every_optimizer_named(level):
    model = torch.nn.ModuleList([Scalar(), Scalar(), Scalar()])
    optimizers = [
        make([one.weight]) for make, one in zip([ADAM, FUSED_MOMENTUM, MOMENTUM], model, strict=True)
    ]
    amp.initialize(model, optimizers, opt_level=level, loss_scale=amp.DynamicLossScale(SCALE), verbosity=0)

    def run(factor, named):
        before = [param_bits(optimizer) for optimizer in optimizers]
        loss = sum(one(BATCHES[0]).float().sum() for one in model) * factor
        with amp.scale_loss(loss, [optimizers[index] for index in named]) as scaled_loss:
            scaled_loss.backward()
        for index in named:
            optimizers[index].step()
        return [param_bits(optimizer) == bits for optimizer, bits in zip(optimizers, before, strict=True)]

    assert run(1.0, [0, 1, 2]) == [False, False, False]
    assert run(INF, [0, 1, 2]) == [True, True, True]
    assert [amp.step_was_skipped(optimizer) for optimizer in optimizers] == [True, True, True]
    for optimizer in optimizers:
        optimizer.zero_grad()
    assert run(1.0, [0, 1, 2]) == [False, False, False]
    assert [amp.step_was_skipped(optimizer) for optimizer in optimizers] == [False, False, False]
    for optimizer in optimizers:
        optimizer.zero_grad()
    assert run(INF, [1]) == [True, True, True]
    assert [amp.step_was_skipped(optimizer) for optimizer in optimizers] == [False, True, False]


@DYNAMIC_LEVELS
@pytest.mark.parametrize("variant", [ADAM, FUSED_ADAM], ids=str)
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_overflow_in_any_of_several_losses_skips_once(level, variant, bad):
    model, optimizer, *_ = open_scalar(level, variant, num_losses=3)
    run_block(model, optimizer, BATCHES[0])
    optimizer.step()
    optimizer.zero_grad()
    before = all_bits(model, optimizer)[:2]
    for loss_id in range(3):
        run_block(model, optimizer, BATCHES[loss_id], INF if loss_id == bad else 1.0, loss_id=loss_id)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert all_bits(model, optimizer)[:2] == before
    scales = [amp.get_loss_scale(loss_id) for loss_id in range(3)]
    assert scales == [SCALE / 2 if loss_id == bad else SCALE for loss_id in range(3)]
    optimizer.zero_grad()
    run_block(model, optimizer, BATCHES[0])
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)
    assert all_bits(model, optimizer)[:2] != before


@pytest.mark.parametrize("variant", [ADAM, FUSED_ADAM, FUSED_MOMENTUM], ids=str)
def test_two_overflows_before_a_step_skip_it_once(variant):
    model, optimizer, *_ = open_scalar("O1", variant)
    run_block(model, optimizer, BATCHES[0])
    optimizer.step()  # a fused optimizer decides by itself from its second step on
    optimizer.zero_grad()
    before = param_bits(optimizer)
    run_block(model, optimizer, BATCHES[0], INF)
    run_block(model, optimizer, BATCHES[1], INF)
    optimizer.step()
    assert param_bits(optimizer) == before
    assert amp.get_loss_scale() == SCALE / 4
    optimizer.zero_grad()
    run_block(model, optimizer, BATCHES[0])
    optimizer.step()
    assert param_bits(optimizer) != before


@DYNAMIC_LEVELS
def test_step_was_skipped_tells_of_the_last_step_alone(level):
    model, optimizer, *_ = open_scalar(level)
    assert not amp.step_was_skipped(optimizer)
    found = []
    for factor in [INF, 1.0, INF, INF, 1.0]:
        optimizer.zero_grad()
        run_block(model, optimizer, BATCHES[0], factor)
        optimizer.step()
        found.append(amp.step_was_skipped(optimizer))
    assert found == [True, False, True, True, False]
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


def test_step_was_skipped_is_false_in_a_disabled_session():
    optimizer = torch.optim.SGD([Parameter(torch.ones(1))], lr=1.0)
    amp.initialize(Scalar(), optimizer, enabled=False)
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_static_scale_skips_nothing(level):
    model, optimizer, *_ = open_scalar(level, loss_scale=128.0)
    run_block(model, optimizer, BATCHES[0], INF)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)
    assert not next(amp.master_params(optimizer)).isfinite().all()
    assert amp.get_loss_scale() == 128.0


class Derived(torch.optim.Adam):
    """As third parties write them: torch wraps both steps, so that hooks run twice, one in the other."""

    def step(self, closure=None):
        return super().step(closure)


@DYNAMIC_LEVELS
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("with_closure", [False, True])
def test_an_optimizer_that_calls_the_step_of_its_base_class_is_skipped_too(level, fused, with_closure):
    FUSED_ADAM([Parameter(torch.ones(1))])  # from its first instance on torch.optim.Adam.step runs hooks
    variant = Variant(Derived, {"fused": fused})
    model, optimizer, oracle, oracle_optimizer = open_scalar(level, variant)
    for batch, factor in zip(BATCHES, [1.0, INF, 1.0, INF], strict=True):
        before = all_bits(model, optimizer)

        def closure(batch=batch, factor=factor):
            optimizer.zero_grad()
            run_block(model, optimizer, batch, factor)

        if with_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        assert amp.step_was_skipped(optimizer) == (factor == INF)
        if factor == INF:
            assert all_bits(model, optimizer) == before
        else:
            step_by_hand(oracle, oracle_optimizer, batch)
        assert param_bits(optimizer) == [snapshot(oracle)]


# What is printed


@DYNAMIC_LEVELS
@pytest.mark.parametrize("variant", [ADAM, FUSED_ADAM], ids=str)
def test_each_skipped_step_prints_one_line_with_scaler_and_new_scale(level, variant, capsys):
    model, optimizer, *_ = open_scalar(level, variant, num_losses=2, verbosity=1)
    capsys.readouterr()
    for factor in [1.0, INF, 1.0, INF]:
        optimizer.zero_grad()
        run_block(model, optimizer, BATCHES[0], factor, loss_id=1)
        optimizer.step()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for line, scale in zip(lines, [SCALE / 2, SCALE / 4], strict=True):
        assert "Gradient overflow" in line
        assert "loss scaler 1" in line
        assert line.endswith(str(scale))


def test_each_optimizer_that_skips_a_step_prints_its_line(capsys):
    model = torch.nn.ModuleList([Scalar(), Scalar()])
    optimizers = [ADAM([one.weight]) for one in model]
    amp.initialize(model, optimizers, opt_level="O1")
    capsys.readouterr()
    with amp.scale_loss(sum(one(BATCHES[0]).sum() for one in model) * INF, optimizers) as scaled_loss:
        scaled_loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert capsys.readouterr().out.count("Gradient overflow") == 2


@pytest.mark.parametrize("variant", [ADAM, FUSED_ADAM], ids=str)
def test_several_overflows_before_one_step_print_one_line(variant, capsys):
    model, optimizer, *_ = open_scalar("O1", variant, num_losses=2, verbosity=1)
    run_block(model, optimizer, BATCHES[0])
    optimizer.step()
    capsys.readouterr()
    for factor, loss_id in [(1.0, 0), (INF, 1), (INF, 0), (INF, 1)]:
        run_block(model, optimizer, BATCHES[0], factor, loss_id=loss_id)
    optimizer.step()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"Gradient overflow.  Skipping step, loss scaler 1 reducing loss scale to {SCALE / 4}"]


@DYNAMIC_LEVELS
def test_verbosity_0_prints_nothing_of_overflows(level, capsys):
    model, optimizer, *_ = open_scalar(level)
    run_block(model, optimizer, BATCHES[0], INF)
    optimizer.step()
    assert capsys.readouterr() == ("", "")


# Host syncs


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait for a device: reading a value of a tensor."""

    OPS = frozenset(
        {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "allclose", "masked_select"}
    )

    def __init__(self):
        super().__init__()
        self.count = 0
        self._functions = ListReads(self)

    def __enter__(self):
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in self.OPS
        return func(*args, **(kwargs or {}))


class ListReads(TorchFunctionMode):
    """Counts the reads that no dispatched op shows on a CPU."""

    FUNCTIONS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu})

    def __init__(self, counter):
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self._counter.count += func in self.FUNCTIONS
        return func(*args, **(kwargs or {}))


def count_reads(iterate):
    with HostReads() as reads:
        iterate()
    return reads.count


def count_reads_of(variant, level=None, factor=1.0, accumulate=1, **options):
    """Reads of one iteration, less those that the optimizer makes by itself."""
    model = make_net(variant)
    optimizer = variant(model.parameters())
    (batch,) = make_batches(variant, 1)

    def iterate(factor=1.0, scaled=contextlib.nullcontext):
        for _ in range(accumulate):
            with scaled(model(batch).float().square().mean() * factor) as loss:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def iterate_scaled(factor=1.0):
        iterate(factor, lambda loss: amp.scale_loss(loss, optimizer))

    iterate()  # the first step makes state
    own = 0 if factor == INF and not variant.is_fused else count_reads(iterate)
    amp.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, "loss_scale": "dynamic", **options})
    amp.set_loss_scale(SCALE)
    iterate_scaled()
    return count_reads(lambda: iterate_scaled(factor)) - own


def test_the_counter_of_host_reads_sees_every_way_to_read():
    value = torch.ones(())
    for read in [
        value.item,
        value.tolist,
        value.__bool__,
        value.__float__,
        value.__int__,
        value.cpu,
        value.nonzero,
    ]:
        with HostReads() as reads:
            read()
        assert reads.count == 1, read
    with HostReads() as reads:
        torch.equal(value, value)
    assert reads.count == 1


@DYNAMIC_LEVELS
@pytest.mark.parametrize("factor", [1.0, INF], ids=["clean", "overflow"])
@pytest.mark.parametrize("variant", [v for v in SKIPPING_VARIANTS if not v.is_fused], ids=str)
def test_an_iteration_costs_one_host_sync_at_the_most(variant, level, factor):
    assert count_reads_of(variant, level, factor, verbosity=1) <= 1


@DYNAMIC_LEVELS
@pytest.mark.parametrize("variant", [ADAM, MOMENTUM], ids=str)
def test_accumulation_costs_one_host_sync_an_iteration_all_the_same(variant, level):
    assert count_reads_of(variant, level, accumulate=4, verbosity=1) <= 1


@DYNAMIC_LEVELS
@pytest.mark.parametrize("factor", [1.0, INF], ids=["clean", "overflow"])
@pytest.mark.parametrize("variant", [v for v in SKIPPING_VARIANTS if v.takes_found_inf], ids=str)
def test_an_iteration_costs_no_host_sync_with_an_optimizer_that_takes_found_inf(variant, level, factor):
    assert count_reads_of(variant, level, factor) <= 0


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("what", ["model.zero_grad(set_to_none=False)", "model.state_dict()"])
def test_what_scripts_do_with_a_half_model_each_iteration_costs_no_host_sync(what, level):
    model, optimizer = open_net(level, FUSED_MOMENTUM)
    model.register_buffer("kept", torch.ones(3).to(HALF[level]))
    batch = torch.randn(5, 4)
    run_iteration(model, optimizer, batch)

    def iterate():
        if what == "model.state_dict()":
            optimizer.zero_grad()
            model.state_dict()
        else:
            model.zero_grad(set_to_none=False)
        run_block(model, optimizer, batch)
        optimizer.step()

    iterate()
    assert count_reads(iterate) == 0


class Wrapper:
    """Does more after a step than its optimizer, as Lookahead does: it must know whether to."""

    def __init__(self, optim):
        self.optim = optim

    def step(self):
        self.optim.step()


@DYNAMIC_LEVELS
@pytest.mark.parametrize("factor", [1.0, INF], ids=["clean", "overflow"])
@pytest.mark.parametrize(("wrap", "reads"), [(LARC, 0), (Wrapper, 1)], ids=["LARC", "another"])
def test_a_wrapper_that_changes_gradients_alone_costs_no_host_sync(wrap, reads, level, factor):
    model = Dense()
    wrapper = wrap(FUSED_MOMENTUM(model.parameters()))
    amp.initialize(model, wrapper, opt_level=level, loss_scale=amp.DynamicLossScale(SCALE), verbosity=0)
    batch = torch.randn(5, 4)

    def iterate(factor=1.0):
        wrapper.optim.zero_grad()
        run_block(model, wrapper, batch, factor)
        wrapper.step()

    iterate()
    before = all_bits(model, wrapper.optim)
    assert count_reads(lambda: iterate(factor)) == reads
    assert (all_bits(model, wrapper.optim) == before) == (factor == INF)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("variant", [ADAM, FUSED_ADAM], ids=str)
def test_a_static_scale_costs_no_host_sync(level, variant):
    assert count_reads_of(variant, level, loss_scale=SCALE, verbosity=1) <= 0


@pytest.mark.cuda
@DYNAMIC_LEVELS
@pytest.mark.parametrize("variant", [v for v in SKIPPING_VARIANTS if v.is_fused], ids=str)
def test_on_a_gpu_nothing_waits_with_an_optimizer_that_takes_found_inf(variant, level):
    model = make_net(variant).cuda()
    optimizer = variant(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=1)
    batch = torch.randn(5, 4, device="cuda")
    run_iteration(model, optimizer, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for factor in [1.0, INF, 1.0]:
            run_iteration(model, optimizer, batch, factor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert amp.get_loss_scale() < 2.0**16


@pytest.mark.cuda
@DYNAMIC_LEVELS
@pytest.mark.parametrize("variant", [ADAM, MOMENTUM], ids=str)
def test_on_a_gpu_a_step_waits_once_at_the_most(variant, level):
    model = make_net(variant).cuda()
    optimizer = variant(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=1)
    batch = torch.randn(5, 4, device="cuda")
    run_iteration(model, optimizer, batch)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        for factor in [1.0, INF, 1.0]:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run_iteration(model, optimizer, batch, factor)
            assert len([one for one in caught if "synchroniz" in str(one.message)]) <= 1
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Learning rates


SCHEDULERS = {
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20),
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
}


@DYNAMIC_LEVELS
@pytest.mark.parametrize("made", ["before", "after", "after a skipped step"])
@pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("variant", [MOMENTUM, FUSED_ADAM], ids=str)
def test_schedulers_change_the_rate_as_without_amp_and_never_warn(variant, level, make_scheduler, made):
    oracle = variant([Parameter(torch.ones(1))])
    oracle_scheduler = make_scheduler(oracle)
    model = Scalar()
    optimizer = variant(model.parameters())
    scheduler = make_scheduler(optimizer) if made == "before" else None
    amp.initialize(model, optimizer, opt_level=level, loss_scale=amp.DynamicLossScale(SCALE), verbosity=0)
    if made == "after a skipped step":
        run_block(model, optimizer, BATCHES[0], INF)
        optimizer.step()
    scheduler = scheduler or make_scheduler(optimizer)
    for factor in [INF, 1.0, INF, 1.0]:  # the very first step is skipped
        optimizer.zero_grad()
        run_block(model, optimizer, BATCHES[0], factor)
        optimizer.step()
        assert amp.step_was_skipped(optimizer) == (factor == INF)
        scheduler.step()
        oracle.step()
        oracle_scheduler.step()
        assert optimizer.param_groups[0]["lr"] == oracle.param_groups[0]["lr"]


@DYNAMIC_LEVELS
def test_a_scheduler_that_follows_the_loss_works(level):
    model, optimizer, *_ = open_scalar(level)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for loss in [1.0, 2.0]:
        run_block(model, optimizer, BATCHES[0], INF)
        optimizer.step()
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] == 2.0**-5


# Closures


@LEVELS
@pytest.mark.parametrize("variant", [ADAM, FUSED_ADAM, MOMENTUM, FUSED_MOMENTUM], ids=str)
@pytest.mark.parametrize("by_keyword", [True, False])
def test_a_step_with_a_closure_is_the_step_without_one(level, variant, by_keyword):
    model, optimizer, oracle, oracle_optimizer = open_scalar(level, variant)
    for index, factor in enumerate([1.0, INF, 1.0, 1.0]):
        batch = BATCHES[index]

        def closure(batch=batch, factor=factor):
            optimizer.zero_grad()
            run_block(model, optimizer, batch, factor)
            return torch.tensor(5.0)

        before = param_bits(optimizer)
        result = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
        assert result == 5.0
        assert amp.step_was_skipped(optimizer) == (factor == INF)
        if factor == INF:
            assert param_bits(optimizer) == before
        else:
            step_by_hand(oracle, oracle_optimizer, batch * factor)
        assert param_bits(optimizer) == [snapshot(oracle)]


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_functions_are_cast_inside_a_closure_and_not_inside_the_step(level):
    seen = []

    class Nosy(torch.optim.SGD):
        def step(self, closure=None):
            with torch.enable_grad():
                closure()
            seen.append(torch.nn.functional.linear(torch.ones(1, 4), torch.ones(1, 4)).dtype)

    model, optimizer = open_net(level, Variant(Nosy))

    def closure():
        optimizer.zero_grad()
        output = model(torch.ones(1, 4))
        seen.append(output.dtype)
        with amp.scale_loss(output.float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()

    optimizer.step(closure)
    seen.append(model(torch.ones(1, 4)).dtype)
    assert seen == [HALF[level], torch.float32, HALF[level]]


@LEVELS
def test_a_closure_that_raises_leaves_optimizer_and_casts_usable(level):
    model, optimizer, oracle, oracle_optimizer = open_scalar(level)

    def closure():
        raise KeyError("data")

    with pytest.raises(KeyError, match="data"):
        optimizer.step(closure)
    run_block(model, optimizer, BATCHES[0])
    optimizer.step()
    step_by_hand(oracle, oracle_optimizer, BATCHES[0])
    assert param_bits(optimizer) == [snapshot(oracle)]
    if level in ("O1", "O4"):
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is HALF[level]


@DYNAMIC_LEVELS
def test_lbfgs_is_refused_with_a_dynamic_scale(level):
    model = Scalar()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(amp.AmpValueError, match=r"optimizers\[0\] is LBFGS.*cannot skip.*use a static scale"):
        amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)


@LEVELS
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")  # of torch 2.8's own LBFGS
@pytest.mark.parametrize("scale", [1.0, 128.0])
def test_lbfgs_works_with_a_static_scale(level, scale):
    target = torch.tensor([1.0, -2.0, 0.5])
    model, optimizer, *_ = open_scalar(level, lambda params: torch.optim.LBFGS(params, max_iter=30), scale)

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(3)) - target).square().sum()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        return loss

    first = optimizer.step(closure)
    assert closure() < first * 1e-3


# Accumulation


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


# Gradients of gradients


class Critic(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.second = torch.nn.Linear(8, 1)

    def forward(self, batch):
        return self.second(torch.tanh(self.first(batch)))


def penalty_of_inputs(model, batch, scale):
    batch = batch.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(batch).float().sum(), batch, create_graph=True)
    return (grad.norm(2, dim=1) - 1).square().mean()


def penalty_of_params(model, batch, scale):
    loss = model(batch).float().square().mean()
    grads = torch.autograd.grad(loss * scale, list(model.parameters()), create_graph=True)
    return sum((grad.float() / scale).square().sum() for grad in grads)


@LEVELS
@pytest.mark.parametrize("compute_penalty", [penalty_of_inputs, penalty_of_params])
def test_a_gradient_penalty_has_the_gradients_of_float32(level, compute_penalty):
    batch = torch.randn(6, 4)
    model = Critic()
    oracle = copy.deepcopy(model)
    (oracle(batch).square().mean() + compute_penalty(oracle, batch, 1.0)).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=amp.DynamicLossScale(SCALE), verbosity=0)
    loss = model(batch).float().square().mean()
    penalty = compute_penalty(model, batch, amp.get_loss_scale())
    with amp.scale_loss(loss + penalty, optimizer) as scaled_loss:
        scaled_loss.backward()
    # 8 bits of bfloat16 and 11 of float16, through four products forward and four backward.
    tolerance = {"O0": 1e-6, "O1": 2e-2, "O2": 2e-2, "O4": 1e-1, "O5": 1e-1}[level]
    for param, expected in zip(amp.master_params(optimizer), oracle.parameters(), strict=True):
        assert param.grad.dtype is torch.float32
        assert (param.grad - expected.grad).norm() <= tolerance * expected.grad.norm() + tolerance * 1e-2
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


@LEVELS
def test_a_penalty_made_inside_the_block_is_unscaled_with_the_loss(level):
    model, optimizer, oracle, _ = open_scalar(level)
    batch = BATCHES[0]
    with amp.scale_loss((model(batch).float() ** 2).sum(), optimizer) as scaled_loss:
        scale = amp.get_loss_scale()
        (grad,) = torch.autograd.grad(scaled_loss, model.weight, create_graph=True)
        (scaled_loss + (grad.float() / scale).sum() * scale).backward()
    if level in ("O2", "O5"):
        oracle = Parameter(model.weight.detach().float())
    loss = ((oracle * batch) ** 2).sum()
    (grad,) = torch.autograd.grad(loss, oracle, create_graph=True)
    (loss + grad.sum()).backward()
    tolerance = 1e-6 if level in FLOAT32_LEVELS else 2e-2
    torch.testing.assert_close(next(amp.master_params(optimizer)).grad, oracle.grad, rtol=tolerance, atol=0.0)


@LEVELS
def test_autograd_grad_inside_the_block_without_a_parameter_gradient_counts_as_clean(level):
    model, optimizer, *_ = open_scalar(level)
    delta = torch.zeros(3, requires_grad=True)
    with amp.scale_loss(model(BATCHES[0] + delta).float().sum(), optimizer) as scaled_loss:
        (grad,) = torch.autograd.grad(scaled_loss, delta)
    assert grad.isfinite().all()
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": SCALE, "unskipped": 1}}
    before = param_bits(optimizer)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)
    assert param_bits(optimizer) == before


@LEVELS
def test_gradients_of_inputs_stay_scaled(level):
    model, optimizer, *_ = open_scalar(level)
    batch = BATCHES[0].clone().requires_grad_()
    with torch.no_grad():
        model.weight.fill_(2.0)
    run_block(model, optimizer, batch)
    assert batch.grad.tolist() == [2.0 * SCALE] * 3


@LEVELS
def test_the_scaled_loss_divided_by_the_loss_is_the_scale_inside_the_graph(level):
    model, optimizer, *_ = open_scalar(level)
    loss = model(BATCHES[0]).float().square().sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert (scaled_loss / loss).item() == SCALE
        assert scaled_loss.requires_grad
        scaled_loss.backward()


# Several models, optimizers and losses


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_gan_with_two_models_two_optimizers_and_three_losses_trains_as_by_hand(level):
    models = [Scalar(), Scalar()]
    makes = [ADAM, MOMENTUM]
    optimizers = [make(model.parameters()) for make, model in zip(makes, models, strict=True)]
    oracles = [Parameter(model.weight.detach().clone()) for model in models]
    by_hand = [make([oracle]) for make, oracle in zip(makes, oracles, strict=True)]
    (generator, critic), (generator_optimizer, critic_optimizer) = amp.initialize(
        models, optimizers, opt_level=level, num_losses=3, loss_scale=amp.DynamicLossScale(SCALE), verbosity=0
    )
    half = {"O2": torch.float16, "O5": torch.bfloat16}.get(level, torch.float32)

    def forward_by_hand(index, batch):
        return (oracles[index].to(half) * batch.to(half)).float()

    def update_by_hand(index, *losses):
        grads = [torch.autograd.grad(loss * SCALE, oracles[index])[0] / SCALE for loss in losses]
        oracles[index].grad = sum(grads)
        by_hand[index].step()

    for batch in BATCHES:
        critic_optimizer.zero_grad()
        run_block(critic, critic_optimizer, batch, -1.0, loss_id=0)
        fake = generator(batch).detach()
        run_block(critic, critic_optimizer, fake, 1.0, loss_id=1)
        critic_optimizer.step()
        fake_by_hand = forward_by_hand(0, batch).detach()
        update_by_hand(1, -forward_by_hand(1, batch).sum(), forward_by_hand(1, fake_by_hand).sum())
        generator_optimizer.zero_grad()
        with amp.scale_loss(
            -critic(generator(batch)).float().sum(), generator_optimizer, loss_id=2
        ) as scaled_loss:
            scaled_loss.backward()
        generator_optimizer.step()
        update_by_hand(0, -forward_by_hand(1, forward_by_hand(0, batch)).sum())
        assert param_bits(critic_optimizer) == [snapshot(oracles[1])]
        assert param_bits(generator_optimizer) == [snapshot(oracles[0])]
    assert {state["unskipped"] for state in amp.state_dict().values()} == {len(BATCHES)}


@LEVELS
def test_two_calls_of_initialize_have_scalers_of_their_own(level):
    first, optimizer, oracle, _ = open_scalar(level)
    second, other_optimizer, other_oracle, other_oracle_optimizer = open_scalar(level)
    run_block(first, optimizer, BATCHES[0], INF)
    run_block(second, other_optimizer, BATCHES[1])
    optimizer.step()
    other_optimizer.step()
    step_by_hand(other_oracle, other_oracle_optimizer, BATCHES[1])
    assert param_bits(optimizer) == [snapshot(oracle)]
    assert param_bits(other_optimizer) == [snapshot(other_oracle)]
    assert [amp.get_loss_scale(index) for index in range(2)] == [SCALE / 2, SCALE]


@LEVELS
def test_one_loss_may_name_several_optimizers(level):
    model = torch.nn.ModuleList([Scalar(), Scalar()])
    optimizers = [MOMENTUM([one.weight]) for one in model]
    oracles = [Parameter(one.weight.detach().clone()) for one in model]
    amp.initialize(model, optimizers, opt_level=level, loss_scale=amp.DynamicLossScale(SCALE), verbosity=0)
    loss = model[0](BATCHES[0]).float().sum() + model[1](BATCHES[1]).float().sum()
    with amp.scale_loss(loss, tuple(optimizers)) as scaled_loss:
        scaled_loss.backward()
    for optimizer, oracle, batch in zip(optimizers, oracles, BATCHES, strict=False):
        optimizer.step()
        step_by_hand(oracle, MOMENTUM([oracle]), batch)
        assert param_bits(optimizer) == [snapshot(oracle)]
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1


@LEVELS
def test_an_optimizer_that_is_named_twice_is_unscaled_once(level):
    model, optimizer, oracle, oracle_optimizer = open_scalar(level)
    run_block(model, [optimizer, optimizer], BATCHES[0])
    run_block(model, [optimizer, optimizer], BATCHES[1])
    optimizer.step()
    step_by_hand(oracle, oracle_optimizer, BATCHES[0] + BATCHES[1])
    assert param_bits(optimizer) == [snapshot(oracle)]
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 2


@LEVELS
@pytest.mark.parametrize("factor", [1.0, INF], ids=["growth", "overflow"])
def test_blocks_of_two_optimizers_can_be_nested(level, factor):
    model = torch.nn.ModuleList([Scalar(), Scalar()])
    optimizers = [MOMENTUM([one.weight]) for one in model]
    oracle = Parameter(model[0].weight.detach().clone())
    scale = amp.DynamicLossScale(SCALE, growth_interval=1)
    amp.initialize(model, optimizers, opt_level=level, loss_scale=scale, verbosity=0)
    # The inner block changes the scale that the outer one began with.
    with amp.scale_loss(model[0](BATCHES[0]).float().sum(), optimizers[0]) as scaled_loss:
        run_block(model[1], optimizers[1], BATCHES[1], factor)
        scaled_loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    step_by_hand(oracle, MOMENTUM([oracle]), BATCHES[0])
    assert param_bits(optimizers[0]) == [snapshot(oracle)]
    assert [amp.step_was_skipped(optimizer) for optimizer in optimizers] == [False, factor == INF]


# Interrupted blocks


class Interruption(BaseException):
    """As KeyboardInterrupt is, no Exception."""


@LEVELS
@pytest.mark.parametrize("scale", [amp.DynamicLossScale(SCALE), 128.0], ids=str)
@pytest.mark.parametrize("error", [ValueError, Interruption])
def test_a_block_that_raises_leaves_the_gradients_as_they_were(level, scale, error):
    model, optimizer, oracle, oracle_optimizer = open_scalar(level, loss_scale=scale)
    run_block(model, optimizer, BATCHES[0])
    state = amp.state_dict()
    with pytest.raises(error, match="no more"):
        run_block_that_raises(model, optimizer, BATCHES[1], error)
    assert snapshot(next(amp.master_params(optimizer)).grad) == snapshot(BATCHES[0])
    assert amp.state_dict() == state
    run_block(model, optimizer, BATCHES[2])
    optimizer.step()
    step_by_hand(oracle, oracle_optimizer, BATCHES[0] + BATCHES[2])
    assert param_bits(optimizer) == [snapshot(oracle)]


@LEVELS
@pytest.mark.parametrize("scale", [amp.DynamicLossScale(SCALE), 128.0], ids=str)
def test_a_block_that_raises_leaves_no_gradient_where_none_was(level, scale):
    model, optimizer, oracle, oracle_optimizer = open_scalar(level, loss_scale=scale)
    with pytest.raises(ValueError, match="no more"):
        run_block_that_raises(model, optimizer, BATCHES[1])
    assert next(amp.master_params(optimizer)).grad is None
    assert model.weight.grad is None
    run_block(model, optimizer, BATCHES[2])
    optimizer.step()
    step_by_hand(oracle, oracle_optimizer, BATCHES[2])
    assert param_bits(optimizer) == [snapshot(oracle)]


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_a_block_that_raises_at_a_static_scale_of_1_leaves_what_plain_torch_leaves(level):
    model, optimizer, _, _ = open_scalar(level, loss_scale=1.0)
    run_block(model, optimizer, BATCHES[0])
    with pytest.raises(ValueError, match="no more"):
        run_block_that_raises(model, optimizer, BATCHES[1])
    assert snapshot(model.weight.grad) == snapshot(BATCHES[0] + BATCHES[1])


@LEVELS
def test_a_block_that_raises_after_a_delayed_one_leaves_what_was_delayed(level):
    model, optimizer, oracle, oracle_optimizer = open_scalar(level)
    run_block(model, optimizer, BATCHES[0], delay_unscale=True)
    with pytest.raises(ValueError, match="no more"):
        run_block_that_raises(model, optimizer, BATCHES[1])
    run_block(model, optimizer, BATCHES[2])
    optimizer.step()
    step_by_hand(oracle, oracle_optimizer, BATCHES[0] + BATCHES[2])
    assert param_bits(optimizer) == [snapshot(oracle)]


@LEVELS
def test_continue_break_and_return_leave_the_block_as_its_end_does(level):
    model, optimizer, oracle, oracle_optimizer = open_scalar(level)

    def iterate():
        for batch in BATCHES[:2]:
            with amp.scale_loss(model(batch).float().sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
                continue
        for batch in BATCHES[2:]:
            with amp.scale_loss(model(batch).float().sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
                break
        with amp.scale_loss(model(BATCHES[3]).float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
            return

    iterate()
    optimizer.step()
    step_by_hand(oracle, oracle_optimizer, sum(BATCHES))
    assert param_bits(optimizer) == [snapshot(oracle)]
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 4


@LEVELS
def test_a_batch_that_is_given_up_inside_the_block_costs_no_step(level):
    model, optimizer, oracle, oracle_optimizer = open_scalar(level)
    for batch, bad in zip(BATCHES[:3], [False, True, False], strict=True):
        optimizer.zero_grad()
        with amp.scale_loss(model(batch).float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
            if bad:
                for param in model.parameters():
                    param.grad.zero_()
                continue
        optimizer.step()
        step_by_hand(oracle, oracle_optimizer, batch)
    assert param_bits(optimizer) == [snapshot(oracle)]


# Sparse gradients


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


# Random programs, against GradScaler and a float32 optimizer


class Programs(RuleBasedStateMachine):
    """Whatever the order of blocks, overflows and steps, bits are those of a float32 optimizer by hand."""

    @initialize(
        level=st.sampled_from(["O1", "O4"]),
        variant=st.sampled_from([ADAM, FUSED_ADAM, MOMENTUM, FUSED_MOMENTUM, Variant(torch.optim.RMSprop)]),
        interval=st.integers(1, 3),
        seed=st.integers(0, 9),
    )
    def open(self, level, variant, interval, seed):
        torch.manual_seed(seed)
        self.half, self.variant = HALF[level], variant
        self.model = Dense()
        self.optimizer = variant(self.model.parameters())
        self.oracles = [Parameter(param.detach().clone()) for param in self.model.parameters()]
        self.oracle_optimizer = variant(self.oracles)
        scale = amp.DynamicLossScale(2.0**6, growth_interval=interval, max_scale=None)
        amp.initialize(self.model, self.optimizer, opt_level=level, loss_scale=scale, verbosity=0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=interval)
        self.scaler.scale(torch.ones(()))
        self.overflowed, self.was_skipped = False, False

    def teardown(self):
        amp.uninitialize()

    def forward_by_hand(self, batch):
        first, second = [oracle.to(self.half) for oracle in self.oracles]
        return linear(torch.relu(linear(batch.to(self.half), first)), second)

    @rule(overflow=st.booleans(), rows=st.integers(1, 3))
    def run_block(self, overflow, rows):
        batch, factor = torch.randn(rows, 4), INF if overflow else 1.0
        loss = self.model(batch).float().square().sum() * factor
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        expected = self.forward_by_hand(batch).float().square().sum() * factor
        assert snapshot(loss) == snapshot(expected)
        grads = torch.autograd.grad(self.scaler.scale(expected), self.oracles)
        fresh = [Parameter(torch.zeros_like(oracle)) for oracle in self.oracles]
        for param, grad in zip(fresh, grads, strict=True):
            param.grad = grad.clone()
        self.scaler.unscale_(torch.optim.SGD(fresh, lr=1.0))
        before = self.scaler.get_scale()
        self.scaler.update()
        self.overflowed |= self.scaler.get_scale() < before
        for oracle, param in zip(self.oracles, fresh, strict=True):
            oracle.grad = param.grad if oracle.grad is None else oracle.grad + param.grad

    @rule()
    def raise_inside_a_block(self):
        loss = self.model(torch.randn(2, 4)).float().sum()
        with contextlib.suppress(ValueError), amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
            raise ValueError

    @rule()
    def step(self):
        self.optimizer.step()
        if not self.overflowed:
            self.oracle_optimizer.step()
        assert amp.step_was_skipped(self.optimizer) == self.overflowed
        self.overflowed = False

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none):
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.oracle_optimizer.zero_grad(set_to_none=set_to_none)

    @precondition(lambda self: not self.overflowed)
    @rule()
    def clip(self):
        norm = torch.nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), 0.1)
        assert snapshot(norm) == snapshot(torch.nn.utils.clip_grad_norm_(self.oracles, 0.1))

    @rule()
    def write_weights(self):
        with torch.no_grad():
            for param, oracle in zip(self.model.parameters(), self.oracles, strict=True):
                new = torch.randn_like(param)
                param.copy_(new)
                oracle.copy_(new)

    @rule()
    def evaluate(self):
        batch = torch.randn(2, 4)
        with torch.no_grad():
            assert snapshot(self.model(batch)) == snapshot(self.forward_by_hand(batch))

    @rule()
    def save_and_load(self):
        amp.load_state_dict(amp.state_dict())
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.model.load_state_dict(self.model.state_dict())

    @invariant()
    def bits_are_those_of_the_oracle(self):
        if not hasattr(self, "scaler"):
            return
        state, expected = amp.state_dict()["loss_scaler0"], self.scaler.state_dict()
        assert state == {"loss_scale": expected["scale"], "unskipped": expected["_growth_tracker"]}
        assert_same_bits(self.model.parameters(), self.oracles)
        if not self.overflowed:
            for param, oracle in zip(self.model.parameters(), self.oracles, strict=True):
                assert (param.grad is None) == (oracle.grad is None)
                assert param.grad is None or snapshot(param.grad) == snapshot(oracle.grad)


Programs.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True
)
TestRandomPrograms = Programs.TestCase
