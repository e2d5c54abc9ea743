"""The loss scaler against torch.amp.GradScaler, and against the rule written out in Python."""

import json
import math
import random
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ampatch as amp
from ampatch.steps.scaler import BackwardOutcome, LossScaler
from apex_rows import shows
from helpers import Scalar, scaled_backward, snapshot

CPU = torch.device("cpu")
INF = float("inf")

# growth_factor, backoff_factor, growth_interval
SETTINGS = [
    (2.0, 0.5, 1),
    (2.0, 0.5, 3),
    (2.0, 0.5, 2000),
    (1.5, 0.75, 2),
    (3.0, 0.1, 2),
    (1.001, 0.999, 1),
]
SEQUENCES = 200


class TorchScaler:
    """GradScaler, with gradients of ones or inf to tell it of overflows."""

    def __init__(self, init_scale, settings, unskipped):
        growth, backoff, interval = settings
        self.scaler = torch.amp.GradScaler(
            "cpu",
            init_scale=init_scale,
            growth_factor=growth,
            backoff_factor=backoff,
            growth_interval=interval,
        )
        self.scaler.load_state_dict({**self.scaler.state_dict(), "_growth_tracker": unskipped})
        self.param = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.param], lr=1.0)
        self.scaler.scale(torch.ones(()))  # GradScaler makes its tensors at the first use

    def run(self, overflow):
        self.param.grad = torch.full((1,), INF if overflow else 1.0)
        self.scaler.unscale_(self.optimizer)
        self.scaler.update()
        state = self.scaler.state_dict()
        return state["scale"], state["_growth_tracker"]


def run_ours(scaler, overflow):
    found_inf = scaler.new_found_inf()
    scaler.unscale_([torch.full((1,), INF if overflow else 1.0)], found_inf)
    scaler.finish(found_inf, update=True)
    state = scaler.state_dict()
    return state["loss_scale"], state["unskipped"]


@shows("scaler-schedule")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_scale_follows_random_overflows_as_grad_scaler_does(settings):
    growth, backoff, interval = settings
    chance = random.Random(repr(settings))
    for _ in range(SEQUENCES):
        # Powers of two and others; high enough for growth to meet the largest float32.
        init_scale = chance.choice([2.0**16, 1.0, 2.0**-20, 3.7e8, 2.0**126, chance.uniform(1.0, 1e6)])
        unskipped = chance.randrange(interval)
        if interval > 100:
            unskipped = max(unskipped, interval - 6)
        oracle = TorchScaler(init_scale, settings, unskipped)
        config = amp.DynamicLossScale(init_scale, growth, backoff, interval, max_scale=None)
        ours = LossScaler(0, config, CPU)
        ours.load_state_dict({"loss_scale": init_scale, "unskipped": unskipped})
        rate = chance.choice([0.1, 0.3, 0.7])
        for _ in range(chance.randrange(1, 24)):
            overflow = chance.random() < rate
            assert run_ours(ours, overflow) == oracle.run(overflow)


@given(
    st.lists(st.booleans(), max_size=12),
    st.floats(2.0**-10, 2.0**20, width=32),
    st.floats(2.0**-10, 2.0**10, width=32),
)
def test_gradients_are_unscaled_to_the_bits_of_grad_scaler(overflows, init_scale, value):
    settings = (1.7, 0.3, 2)
    oracle = TorchScaler(init_scale, settings, 0)
    ours = LossScaler(0, amp.DynamicLossScale(init_scale, *settings, max_scale=None), CPU)
    for overflow in overflows:
        assert run_ours(ours, overflow) == oracle.run(overflow)
    grad = torch.tensor([value])
    oracle.param.grad = grad.clone()
    oracle.scaler.unscale_(oracle.optimizer)
    ours.unscale_([grad], ours.new_found_inf())
    assert snapshot(grad) == snapshot(oracle.param.grad)


# Bounds


@shows("scaler-defect-zero", "never-scale-zero")
@pytest.mark.parametrize("backoff", [0.1, 0.999])
def test_thousands_of_overflows_in_a_row_leave_a_scale_that_unscales(backoff):
    scaler = LossScaler(0, amp.DynamicLossScale(backoff_factor=backoff, growth_interval=1), CPU)
    lowest = min(run_ours(scaler, True)[0] for _ in range(3000))
    assert lowest > 0
    grad, found_inf = torch.tensor([2.0**-30, 0.0, -(2.0**-100)]), scaler.new_found_inf()
    scaler.unscale_([grad * scaler.get_scale()], found_inf)
    assert found_inf == 0
    assert run_ours(scaler, False)[0] == 2 * lowest


def test_growth_without_a_bound_stays_finite():
    scaler = LossScaler(0, amp.DynamicLossScale(growth_interval=1, max_scale=None), CPU)
    trace = [run_ours(scaler, False)[0] for _ in range(300)]
    assert trace[-1] == 2.0**127
    grad, found_inf = torch.tensor([2.0**100]), scaler.new_found_inf()
    scaler.unscale_([grad], found_inf)
    assert (grad.item(), found_inf.item()) == (2.0**-27, 0.0)


# Hysteresis


def scale_by_the_rule(config, overflows):
    """The rule of DynamicLossScale's docstring, written out."""
    scale, clean, in_a_row = config.init_scale, 0, 0
    for overflow in overflows:
        if overflow:
            in_a_row, clean = in_a_row + 1, 0
            if in_a_row >= config.hysteresis:
                scale *= config.backoff_factor
        else:
            in_a_row, clean = 0, clean + 1
            if clean == config.growth_interval:
                scale, clean = scale * config.growth_factor, 0
        scale = min(max(scale, config.min_scale), config.max_scale)
        yield scale, clean


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5), st.integers(1, 4))
def test_hysteresis_forgives_overflows_until_enough_came_in_a_row(overflows, hysteresis, interval):
    config = amp.DynamicLossScale(
        2.0**10, growth_interval=interval, hysteresis=hysteresis, min_scale=2.0**4, max_scale=2.0**14
    )
    scaler = LossScaler(0, config, CPU)
    trace = [run_ours(scaler, overflow) for overflow in overflows]
    assert trace == list(scale_by_the_rule(config, overflows))


# Unscaling


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.cuda)])
@pytest.mark.parametrize("bad", [INF, -INF, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_not_finite_is_found_in_gradients_of_any_dtype(dtype, bad, device):
    scaler = LossScaler(0, amp.DynamicLossScale(2.0), device)
    good, found_inf = torch.ones(3, dtype=dtype, device=device), scaler.new_found_inf()
    scaler.unscale_([good], found_inf)
    assert found_inf == 0
    assert good.tolist() == [0.5] * 3
    scaler.unscale_([good, torch.tensor([1.0, bad], dtype=dtype, device=device)], found_inf)
    assert found_inf == 1


@shows("scaler-defect-sum")
def test_finite_gradients_whose_sum_overflows_are_no_overflow():
    scaler = LossScaler(0, amp.DynamicLossScale(), CPU)
    found_inf = scaler.new_found_inf()
    scaler.unscale_([torch.full((100,), 3e38), torch.full((100,), 60000.0, dtype=torch.float16)], found_inf)
    assert found_inf == 0


def test_an_overflow_in_a_sparse_gradient_is_found():
    scaler = LossScaler(0, amp.DynamicLossScale(4.0), CPU)
    clean = torch.sparse_coo_tensor([[0, 2, 2]], torch.tensor([4.0, 8.0, 12.0]), (5,), check_invariants=True)
    found_inf = scaler.new_found_inf()
    scaler.unscale_([clean], found_inf)
    assert (clean.to_dense().tolist(), found_inf.item()) == ([1.0, 0.0, 5.0, 0.0, 0.0], 0.0)
    scaler.unscale_(
        [torch.sparse_coo_tensor([[1]], torch.tensor([INF]), (5,), check_invariants=True)], found_inf
    )
    assert found_inf == 1


# By hand and from checkpoints


def open_session(level="O1", **options):
    model = Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return model, optimizer


def run_iteration(model, optimizer, factor=1.0, **options):
    scaled_backward(model(torch.ones(3)).sum() * factor, optimizer, **options)
    optimizer.step()


@shows("scaler-state-dict")
def test_a_state_dict_is_that_of_apex_and_survives_json():
    model, optimizer = open_session(num_losses=2)
    run_iteration(model, optimizer)
    run_iteration(model, optimizer, INF, loss_id=1)
    expected = {
        "loss_scaler0": {"loss_scale": 65536.0, "unskipped": 1},
        "loss_scaler1": {"loss_scale": 32768.0, "unskipped": 0},
    }
    assert amp.state_dict() == expected
    assert json.loads(json.dumps(amp.state_dict())) == expected


@shows("scaler-state-dict")
def test_a_checkpoint_of_apex_goes_on_as_grad_scaler_would():
    model, optimizer = open_session(loss_scale=amp.DynamicLossScale(growth_interval=4, max_scale=None))
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 1024, "unskipped": 2}})
    assert repr(amp.state_dict()) == "{'loss_scaler0': {'loss_scale': 1024.0, 'unskipped': 2}}"
    oracle = TorchScaler(1024.0, (2.0, 0.5, 4), 2)
    for overflow in [False, False, False, True, False]:
        run_iteration(model, optimizer, INF if overflow else 1.0)
        assert amp.get_loss_scale() == oracle.run(overflow)[0]


STATE = {"loss_scale": 4.0, "unskipped": 2}


@shows("scaler-load")
@pytest.mark.parametrize(
    ("faulty", "message"),
    [
        ({"model": {}}, "unknown key 'model'.*expected 'loss_scaler0'.*nothing is loaded"),
        ({"loss_scalerX": STATE}, "unknown key 'loss_scalerX'"),
        ({1: STATE}, "unknown key 1"),
        ({"loss_scaler1": {"loss_scale": 4.0}}, r"loss_scaler1.*expected \['loss_scale', 'unskipped'\]"),
        ({"loss_scaler1": {**STATE, "extra": 1}}, "loss_scaler1.*extra"),
        ({"loss_scaler1": 4.0}, "loss_scaler1.*float"),
        ({"loss_scaler1": {**STATE, "loss_scale": 0.0}}, "loss_scaler1.*above 0"),
        ({"loss_scaler1": {**STATE, "loss_scale": math.nan}}, "loss_scaler1.*nan"),
        ({"loss_scaler1": {**STATE, "loss_scale": "many"}}, "loss_scaler1.*'many'"),
        ({"loss_scaler1": {**STATE, "unskipped": None}}, "loss_scaler1.*None"),
        ([STATE, STATE], "state_dict is a list.*expected what amp.state_dict"),
        (None, "state_dict is a NoneType: expected what amp.state_dict"),
    ],
)
def test_a_faulty_checkpoint_is_refused_and_nothing_of_it_is_loaded(faulty, message):
    open_session(num_losses=2)
    before = amp.state_dict()
    faulty = {"loss_scaler0": STATE, **faulty} if isinstance(faulty, dict) else faulty
    with pytest.raises(amp.AmpError, match=message):
        amp.load_state_dict(faulty)
    assert amp.state_dict() == before


@shows("patterns-state-dict")
def test_strictness_is_no_argument_of_load_state_dict():
    open_session()
    with pytest.raises(TypeError, match="strict"):
        amp.load_state_dict(amp.state_dict(), strict=False)


@shows("scaler-load")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("raised", [False, True], ids=["warns", "-W error"])
def test_another_number_of_scalers_warns_and_loads_those_that_both_have(count, raised):
    open_session(num_losses=2)
    told = f"holds {count} loss scalers, this session has 2"
    if raised:
        warnings.simplefilter("error")  # until the test ends
    with (pytest.raises if raised else pytest.warns)(UserWarning, match=told):
        amp.load_state_dict({f"loss_scaler{index}": STATE for index in range(count)})
    expected = [4.0] * min(count, 2) + [2.0**16] * (2 - min(count, 2))
    assert [amp.get_loss_scale(loss_id) for loss_id in range(2)] == expected


def test_complex_gradients_are_unscaled_and_checked():
    scaler = LossScaler(0, amp.DynamicLossScale(init_scale=4.0), torch.device("cpu"))
    grad, found_inf = torch.tensor([4 + 8j, 2j]), scaler.new_found_inf()
    scaler.unscale_([grad], found_inf)
    assert torch.equal(grad, torch.tensor([1 + 2j, 0.5j]))
    assert found_inf == 0
    scaler.unscale_([torch.tensor([complex(1, math.inf)])], found_inf)
    assert found_inf == 1


# What a pass did, on several devices and on a GPU that is not the current one


class SameDevice(torch.overrides.TorchFunctionMode):
    """Raises where torch.maximum gets tensors of two devices, as it does on two GPUs."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func is not torch.maximum or args[0].device == args[1].device
        return func(*args, **(kwargs or {}))


def test_outcomes_of_two_devices_are_combined_on_the_first():
    outcomes = [BackwardOutcome(0, torch.zeros(4, device=device)) for device in ("meta", "cpu")]
    with SameDevice():
        assert BackwardOutcome.combine(outcomes).device.type == "meta"


class OnSecondGpu:
    """The numbers of an outcome on a GPU that is not the current one."""

    is_cuda, device = True, torch.device("cuda:1")


class Event:
    """A CUDA event that has arrived on one stream, and on others never."""

    def record(self, stream="that of the current device"):
        self._stream = stream

    def query(self):
        return self._stream == "that of cuda:1"


def test_an_outcome_is_polled_on_the_stream_of_its_device_whatever_the_default_device(monkeypatch):
    sent = []

    class Host:
        def copy_(self, numbers, non_blocking):
            assert non_blocking
            sent.append(numbers)

        def tolist(self):
            return [1.0, 4.0, 2.0, 0.5]

    def empty(size, *, device=None, pin_memory):
        assert (size, device, pin_memory) == (4, "cpu", True)
        return Host()

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"that of {device}")
    numbers = OnSecondGpu()
    outcome = BackwardOutcome(0, numbers)
    assert outcome.poll() == (True, 4.0, 2.0)
    assert sent == [numbers]


@pytest.mark.cuda
def test_overflows_are_told_where_cuda_is_the_default_device(capsys):
    model = torch.nn.Linear(3, 3).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    torch.set_default_device("cuda")
    try:
        amp.initialize(model, optimizer, opt_level="O2", verbosity=1, loss_scale=amp.DynamicLossScale(256.0))
        for factor in (1.0, INF, 1.0):
            scaled_backward(model(torch.ones(2, 3)).sum() * factor, optimizer)
            optimizer.step()
            torch.cuda.synchronize()
        optimizer.step()
    finally:
        torch.set_default_device(None)
    assert capsys.readouterr().out.count("Gradient overflow") == 1


def test_an_outcome_says_whether_the_loss_itself_was_finite():
    model, optimizer = open_session()
    for factor, expected in [(1.0, True), (INF, False), (math.nan, False)]:
        run_iteration(model, optimizer, factor)
        assert [outcome.is_loss_finite for outcome in amp.backward_outcomes(optimizer)] == [expected]
    amp.set_loss_scale(2.0**24)
    run_iteration(model, optimizer, 1e35)
    assert [outcome.is_loss_finite for outcome in amp.backward_outcomes(optimizer)] == [True]
    assert amp.step_was_skipped(optimizer)
