"""`log_to`: loss scales and skipped steps in TensorBoard, or wherever a function sends them."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampatch as amp
from benchmarks.syncs import count_reads
from helpers import scaled_backward
from ranks import fixture
from stepping import FUSED_MOMENTUM, INF, MOMENTUM
from test_history import Run

two = fixture()
SCALE = amp.DynamicLossScale(2.0**10, growth_interval=3)
FACTORS = [1e-3, 1e-3, INF, 1e-3, 1e-3, 1e-3, INF, INF, 1e-3, 1e-3]


class Rows(list):
    """Keeps what it is called with; the target of a log."""

    def __call__(self, values, step):
        self.append((step, values))

    def of(self, name, loss_id=0):
        return [(step, values[key]) for step, values in self if (key := f"amp/{name}/{loss_id}") in values]


def by_hand(run, factors=FACTORS, loss_id=0):
    """Steps, and reads after each what a script can ask for."""
    found, skipped = [], 0
    for step, factor in enumerate(factors):
        run.step(factor, loss_id=loss_id)
        skipped += amp.step_was_skipped(run.optimizer)
        found.append((step, {"scale": amp.get_loss_scale(loss_id), "skipped": skipped}))
    return found


def named(found, loss_id=0):
    names = {"scale": f"amp/loss_scale/{loss_id}", "skipped": f"amp/skipped_steps/{loss_id}"}
    return [(step, {names[name]: value for name, value in values.items()}) for step, values in found]


@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
@pytest.mark.parametrize("variant", [MOMENTUM, FUSED_MOMENTUM], ids=str)
@pytest.mark.parametrize("scale", [None, SCALE], ids=["own", "dynamic"])
def test_every_step_is_logged_once_and_in_order_as_a_script_would_read_it(level, variant, scale):
    found, rows = by_hand(Run(level, variant, scale)), Rows()
    amp.uninitialize()
    with amp.log_to(rows):
        Run(level, variant, scale).step(*FACTORS)
    assert rows == named(found)
    assert all(type(value) is float for _, values in rows for value in values.values())


def test_the_writer_of_tensorboard_takes_it(tmp_path):
    from tensorboard.backend.event_processing import event_accumulator as tensorboard
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer, amp.log_to(writer, first_step=100):
        found = by_hand(Run("O2", loss_scale=SCALE))
    events = tensorboard.EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    events.Reload()
    assert events.Tags()["scalars"] == ["amp/loss_scale/0", "amp/skipped_steps/0"]
    for tag, name in (("amp/loss_scale/0", "scale"), ("amp/skipped_steps/0", "skipped")):
        seen = [(it.step, it.value) for it in events.Scalars(tag)]
        assert seen == [(100 + step, values[name]) for step, values in found]


def test_each_loss_of_each_call_has_its_own_curve_and_counts_its_own_steps():
    rows = Rows()
    first = Run(num_losses=2)
    with amp.log_to(rows):
        of_losses = by_hand(first, loss_id=1), by_hand(first)
        second = Run("O0", loss_scale="dynamic")
        second.step(1e-3, INF)
    assert [row for row in rows if "amp/loss_scale/1" in row[1]] == named(of_losses[0], 1)
    assert [row for row in rows if "amp/loss_scale/0" in row[1]] == named(of_losses[1], 0)
    assert rows.of("loss_scale", 2) == [(0, 2.0**16), (1, 2.0**15)]
    assert rows.of("skipped_steps", 2) == [(0, 0), (1, 1)]


def test_casts_of_the_session_are_logged_where_they_are_wanted():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = Rows()
    assert amp.cast_counts() == amp.CastCounts(0, 0, 0)
    with amp.log_to(rows, casts=True):
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        counts = []
        for _ in range(3):
            loss = sum(model(torch.ones(4, 3)).float().sum() for _ in range(2))
            scaled_backward(loss * 1e-3, optimizer)
            optimizer.step()
            counts.append((amp.cast_counts().made, amp.cast_counts().reused))
    found = zip(rows.of("casts_made"), rows.of("casts_reused"), strict=True)
    assert [(made, reused) for (_, made), (_, reused) in found] == counts
    # Weight and bias are made half once, and the input at each of the two forwards.
    assert counts[0] == (4, 2)


def test_a_log_ends_when_it_is_closed_and_tells_what_it_has_not_told_yet():
    rows, run = Rows(), Run("O4")
    log = amp.log_to(rows)
    run.step(*[1e-3] * 3)
    assert rows == []
    log.close()
    assert [step for step, _ in rows] == [0, 1, 2]
    run.step(*[1e-3] * 9)
    amp.uninitialize()
    assert len(rows) == 3
    log.close()
    assert len(rows) == 3


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_log_outlives_uninitialize_and_its_undo_is_exact(level, check_torch):
    rows = Rows()
    with amp.log_to(rows, casts=True):
        for _ in range(2):
            model = Run(level).model
            optimizer = MOMENTUM(model.parameters())
            amp.uninitialize()
            check_torch()
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
            scaled_backward(model(torch.ones(3)).float().sum() * 1e-3, optimizer)
            optimizer.step()
            amp.uninitialize()
            check_torch()
            assert model.weight.dtype is torch.float32
    assert [step for step, _ in rows] == [0, 0]


def test_what_the_target_raises_is_logged_once_and_training_goes_on(caplog):
    calls = []

    def fail(values, step):
        calls.append(step)
        raise ConnectionError("no server")

    run = Run()
    with amp.log_to(fail):
        run.step(1e-3, 1e-3)
    assert calls == [0, 1]
    assert caplog.text.count("what log_to was given raised; training goes on") == 1
    assert "no server" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None,), amp.AmpTypeError, r"log_to\(None\): expected a SummaryWriter, or a function"),
        (("runs",), amp.AmpTypeError, r"log_to\('runs'\): expected a SummaryWriter"),
        ((print, 0), amp.AmpValueError, "every is 0: expected a whole number of steps, 1 or more"),
        ((print, True), amp.AmpValueError, "every is True"),
        ((print, 2.0), amp.AmpValueError, "every is 2.0"),
    ],
)
def test_what_cannot_work_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        amp.log_to(*arguments)
    assert amp.observers() == ()


@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
@pytest.mark.parametrize("variant", [MOMENTUM, FUSED_MOMENTUM], ids=str)
def test_a_log_reads_nothing_from_the_device_that_is_not_read_without_one(level, variant):
    run = Run(level, variant)
    run.step(*[1e-3] * 16)
    without = count_reads(lambda: run.step(*[1e-3] * 16))
    log = amp.log_to(Rows())
    assert count_reads(lambda: run.step(*[1e-3] * 16)) == without
    run.step(1e-3)
    assert count_reads(log.close) <= 1


def train_on_ranks():
    rows, model = Rows(), nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amp.log_to(rows):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        parallel = DistributedDataParallel(model)
        for factor in (1e-3, INF if torch.distributed.get_rank() == 1 else 1e-3):
            scaled_backward(parallel(torch.ones(4, 3)).float().sum() * factor, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        amp.uninitialize()
    return list(rows)


@pytest.mark.process
def test_rank_0_logs_the_overflow_of_another(two):
    first, second = two(train_on_ranks)
    assert first == [
        (0, {"amp/loss_scale/0": 2.0**16, "amp/skipped_steps/0": 0.0}),
        (1, {"amp/loss_scale/0": 2.0**15, "amp/skipped_steps/0": 1.0}),
    ]
    assert second == []
