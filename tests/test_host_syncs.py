"""How often a step makes the host wait for the device."""

import contextlib
import warnings

import pytest
import torch

import ampatch as amp
from ampatch.apex.parallel import LARC
from benchmarks.syncs import count_reads
from helpers import SKIPPING_VARIANTS, Dense, Variant, make_batches, make_net, sync_debug_mode
from stepping import (
    ADAM,
    DYNAMIC_LEVELS,
    FUSED_ADAM,
    FUSED_MOMENTUM,
    HALF,
    INF,
    MOMENTUM,
    SCALE,
    all_bits,
    open_net,
    run_block,
    run_iteration,
)

SKIPPING_BY_FLAG = [Variant(torch.optim.SGD, {"fused": True})]  # and which have a state
SKIPPING_BY_FLAG += [variant for variant in SKIPPING_VARIANTS if variant.takes_found_inf]
EITHER = pytest.mark.parametrize(("level", "factor"), [("O1", 1.0), ("O1", INF), ("O5", INF)])


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


@pytest.mark.exhaustive(keep=12)
@EITHER
@pytest.mark.parametrize("variant", [v for v in SKIPPING_VARIANTS if not v.is_fused], ids=str)
def test_an_iteration_costs_one_host_sync_at_the_most(variant, level, factor):
    assert count_reads_of(variant, level, factor, verbosity=1) <= 1


@DYNAMIC_LEVELS
@pytest.mark.parametrize("variant", [ADAM, MOMENTUM], ids=str)
def test_accumulation_costs_one_host_sync_an_iteration_all_the_same(variant, level):
    assert count_reads_of(variant, level, accumulate=4, verbosity=1) <= 1


@pytest.mark.exhaustive(keep=12)
@EITHER
@pytest.mark.parametrize("variant", SKIPPING_BY_FLAG, ids=str)
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


@EITHER
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


# Torch's Adagrad has no fused kernel there.
FUSED = [it for it in SKIPPING_VARIANTS if it.is_fused and "Adagrad" not in str(it)]


@pytest.mark.cuda
@DYNAMIC_LEVELS
@pytest.mark.parametrize("variant", [*FUSED, ADAM, MOMENTUM], ids=str)
def test_on_a_gpu_a_step_waits_once_at_the_most_and_not_if_the_optimizer_takes_found_inf(variant, level):
    model = make_net(variant).cuda()
    optimizer = variant(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=1)
    batch = torch.randn(5, 4, device="cuda")
    run_iteration(model, optimizer, batch)
    with sync_debug_mode("warn"):
        for factor in [1.0, INF, 1.0]:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run_iteration(model, optimizer, batch, factor)
            waits = [one for one in caught if "synchroniz" in str(one.message)]
            assert len(waits) <= (0 if variant.is_fused else 1)
    assert amp.get_loss_scale() < 2.0**16
