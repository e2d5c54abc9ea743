"""Steps after blocks of scale_loss: skipped, scheduled, with a closure."""

import copy

import pytest
import torch
from torch.nn import Parameter

import ampatch as amp
from apex_rows import shows
from helpers import (
    SKIPPING_VARIANTS,
    Dense,
    Scalar,
    Variant,
    assert_same_bits,
    make_batches,
    make_net,
    scaled_backward,
)
from stepping import (
    ADAM,
    BATCHES,
    DYNAMIC_LEVELS,
    FUSED_ADAM,
    INF,
    LEVELS,
    MOMENTUM,
    SCALE,
    Beside,
    all_bits,
    open_net,
    param_bits,
    run_block,
    run_iteration,
)


def fill_free_memory():
    """Puts a number into memory that is then free, to be seen by who uses memory nobody wrote to."""
    for _ in range(4):
        torch.full((6, 6), 7.0), [torch.full((size,), 7.0) for size in range(1, 40)]


@shows("scale-defect-first-skip")
@pytest.mark.exhaustive(keep=6)
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
    before, attributes = all_bits(model, optimizer), set(vars(optimizer))
    fill_free_memory()
    run_iteration(model, optimizer, bad, INF)
    assert amp.step_was_skipped(optimizer)
    compared = 2 if variant.is_fused else None  # which has made its state
    assert all_bits(model, optimizer)[:compared] == before[:compared]
    losses = [run_iteration(model, optimizer, batch) for batch in batches]
    assert_same_bits(losses, expected)
    assert_same_bits(model.state_dict().values(), expected_weights.values())
    assert set(vars(optimizer)) == attributes


class Derived(torch.optim.Adam):
    """As third parties write them: torch wraps both steps, so that hooks run twice, one in the other."""

    def step(self, closure=None):
        return super().step(closure)


def test_a_step_is_given_what_follows_its_closure():
    class Noting(torch.optim.SGD):
        def step(self, closure=None, *rest):
            self.rest = rest
            return super().step(closure)

    model = Dense()
    optimizer = Noting(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    optimizer.step(lambda: None, 5, 6)
    assert optimizer.rest == (5, 6)


STEPS = {
    "closure": lambda optimizer, closure: optimizer.step(closure),
    "closure=": lambda optimizer, closure: optimizer.step(closure=closure),
    "without": lambda optimizer, closure: (closure(), optimizer.step())[0],
}


@shows("scale-defect-closure", "never-closures")
@pytest.mark.exhaustive(keep=8)
@DYNAMIC_LEVELS
@pytest.mark.parametrize("way", STEPS)
@pytest.mark.parametrize(
    "variant", [MOMENTUM, FUSED_ADAM, Variant(Derived), Variant(Derived, {"fused": True})], ids=str
)
def test_a_step_with_a_closure_is_the_step_without_one(level, variant, way):
    FUSED_ADAM([Parameter(torch.ones(1))])  # from its first instance on torch.optim.Adam.step runs hooks
    run = Beside(level, variant)
    for batch, factor in zip(BATCHES, [1.0, INF, 1.0, INF], strict=True):
        before = all_bits(run.model, run.optimizer)

        def closure(batch=batch, factor=factor):
            run.optimizer.zero_grad()
            run.run_block(batch, factor)
            return torch.tensor(5.0)

        assert STEPS[way](run.optimizer, closure) == 5.0
        assert amp.step_was_skipped(run.optimizer) == (factor == INF)
        if factor == INF:
            assert all_bits(run.model, run.optimizer) == before
        else:
            run.step_by_hand(batch)


@DYNAMIC_LEVELS
@pytest.mark.parametrize("variant", [ADAM, FUSED_ADAM], ids=str)
def test_each_skipped_step_prints_one_line_with_scaler_and_new_scale(level, variant, capsys):
    run = Beside(level, variant, num_losses=2, verbosity=1)
    capsys.readouterr()
    for factor in [1.0, INF, 1.0, INF]:
        run.optimizer.zero_grad()
        run.run_block(factor=factor, loss_id=1)
        run.optimizer.step()
    assert capsys.readouterr().out.splitlines() == [
        f"Gradient overflow.  Skipping step, loss scaler 1 reducing loss scale to {scale}"
        for scale in (SCALE / 2, SCALE / 4)
    ]


def test_each_optimizer_that_skips_a_step_prints_its_line(capsys):
    model = torch.nn.ModuleList([Scalar(), Scalar()])
    optimizers = [ADAM([one.weight]) for one in model]
    amp.initialize(model, optimizers, opt_level="O1")
    capsys.readouterr()
    scaled_backward(sum(one(BATCHES[0]).sum() for one in model) * INF, optimizers)
    for optimizer in optimizers:
        optimizer.step()
    assert capsys.readouterr().out.count("Gradient overflow") == 2


@pytest.mark.parametrize("variant", [ADAM, FUSED_ADAM], ids=str)
def test_several_overflows_before_one_step_print_one_line(variant, capsys):
    run = Beside("O1", variant, num_losses=2, verbosity=1)
    run.run_block()
    run.optimizer.step()
    capsys.readouterr()
    for factor, loss_id in [(1.0, 0), (INF, 1), (INF, 0), (INF, 1)]:
        run.run_block(factor=factor, loss_id=loss_id)
    run.optimizer.step()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"Gradient overflow.  Skipping step, loss scaler 1 reducing loss scale to {SCALE / 4}"]


SCHEDULERS = {
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20),
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
}


@shows("scale-defect-scheduler", "never-schedulers", "patterns-schedulers")
@pytest.mark.parametrize("made", ["before", "after", "after a skipped step"])
@pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize(("level", "variant"), [("O1", FUSED_ADAM), ("O5", MOMENTUM)], ids=str)
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
@pytest.mark.parametrize("variant", [MOMENTUM, FUSED_ADAM], ids=str)
@pytest.mark.parametrize("factors", [(INF, 1.0), (1.0, INF)], ids=["before", "inside"])
def test_an_overflow_before_a_step_or_in_its_closure_skips_it(level, variant, factors):
    run = Beside(level, variant)
    run.run_block()
    run.optimizer.step()
    before = param_bits(run.optimizer)
    run.run_block(factor=factors[0])
    run.optimizer.step(lambda: run.run_block(factor=factors[1]))  # accumulates
    assert amp.step_was_skipped(run.optimizer)
    assert param_bits(run.optimizer) == before
    run.optimizer.zero_grad()
    run.run_block()
    run.optimizer.step()  # of which the overflow is over
    assert param_bits(run.optimizer) != before


@LEVELS
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")  # of torch 2.8's own LBFGS
@pytest.mark.parametrize("scale", [1.0, 128.0])
def test_lbfgs_works_with_a_static_scale(level, scale):
    target = torch.tensor([1.0, -2.0, 0.5])
    run = Beside(level, lambda params: torch.optim.LBFGS(params, max_iter=30), scale)

    def closure():
        run.optimizer.zero_grad()
        loss = (run.model(torch.ones(3)) - target).square().sum()
        scaled_backward(loss, run.optimizer)
        return loss

    first = run.optimizer.step(closure)
    assert closure() < first * 1e-3
