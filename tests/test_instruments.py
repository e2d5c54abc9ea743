"""What the doctor follows a run with, by hand: the tape, which layers grow, and one attempt taken twice."""

import gc
import math
import weakref
from contextlib import ExitStack

import pytest
import torch
from torch import nn

import ampatch as amp
from ampatch.doctor.instruments import watch
from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.tape import Op, Tape
from ampatch.doctor.instruments.watch import Growth
from ampatch.doctor.silent.gradients import Sample, read_samples
from ampatch.doctor.silent.looks import undone_casts


@pytest.fixture
def tape():
    return Tape(Clock(ExitStack()))


def write(tape, op, taken=(), given=(), **more):
    """Writes an operation as the doctor does; returns its record."""
    tape.add(record := Op(op, "forward", None, "train.py:1", **more), taken, given)
    tape.put(record, given)
    return record


def ops(tape, *tensors, through=None):
    return [it.op for it in tape.before(tape.makers_of(tensors), through)]


def test_a_tensor_comes_of_the_latest_record_of_its_memory_which_views_share(tape):
    x = torch.ones(4)
    write(tape, "ones", [], [x])
    write(tape, "add_", [x[:2]], [x[:2]])
    assert ops(tape, x) == ["add_", "ones"]
    assert ops(tape, x.clone()) == []


def test_what_an_operation_returns_that_was_there_before_keeps_what_is_known_of_it(tape):
    weight, gradient = torch.ones(2), torch.ones(2)
    write(tape, "backward", [], [gradient])
    tape.mark(gradient, {7})
    write(tape, "", [weight], [gradient])  # weight.grad
    assert tape.origins_of(gradient) == {7}
    assert "backward" in ops(tape, gradient)


def test_origins_and_facts_are_handed_on(tape):
    x, y, z = torch.ones(3, 1).unbind(0)
    x, y, z = (it.clone() for it in (x, y, z))
    write(tape, "div", [], [x]).handed["constant"] = 1e-8
    tape.mark(x, {0})
    write(tape, "mul", [x, z], [y])
    assert (tape.origins_of(y), tape.origins_of(z)) == ({0}, set())
    assert tape.records[tape.records[-1].parents[0]].handed == {"constant": 1e-8}


def test_the_tape_keeps_no_tensor_alive_and_takes_no_new_one_for_an_old_one(tape):
    x = torch.ones(10**6)
    write(tape, "ones", [], [x])
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    later = [torch.ones(10**6) for _ in range(3)]  # of which one often has the memory that was freed
    assert [ops(tape, it) for it in later] == [[], [], []]


def test_an_attempt_begins_with_what_was_made_before_the_first_step(tape):
    early, late = torch.ones(2), torch.ones(2)
    write(tape, "arange", [], [early])
    tape.keep()
    write(tape, "exp", [early], [late])
    tape.clock.attempt += 1
    assert (ops(tape, late), ops(tape, early)) == ([], ["arange"])
    assert len(tape.records) == 1


def test_records_before_others_are_asked_for_through_some_operations(tape):
    a, b, c, d = (torch.ones(2) for _ in range(4))
    write(tape, "linear", [], [a])
    write(tape, "exp", [a], [b])
    write(tape, "view", [b], [c])
    write(tape, "view", [c], [d])
    assert ops(tape, d, through=("view",)) == ["view", "view", "exp"]


@pytest.mark.parametrize(
    ("takers", "undone"),
    [
        ([("linear", ["float32", "float32"], "float16")], ["linear"]),
        ([("view", ["float32"], "float32"), ("linear", ["float32"], "float16")], ["linear"]),
        ([("softmax", ["float32"], "float32")], []),
        ([("linear", ["float32"], "float16"), ("softmax", ["float32"], "float32")], []),
        ([("index_put_", ["float32", "float16"], "float16")], []),
        ([], []),
    ],
)
def test_a_cast_to_float32_is_undone_if_all_that_takes_it_gives_half(tape, takers, undone):
    half, wide, out = torch.ones(2).half(), torch.ones(2), torch.ones(2)
    write(tape, "float", [half], [wide]).facts["widens"] = True
    for name, taken, given in takers:
        record = write(tape, name, [wide], [wide if name == "view" else out.clone()])
        record.input_dtypes, record.output_dtypes = tuple(taken), (given,)
    assert [op for _, op in undone_casts(tape.records)] == undone


# ---- Numbers that grow ----


def growth_of(*curves):
    """Trains layers whose weights, and so their outputs, follow curves; returns the facts."""
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in curves))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ExitStack() as stack:
        growth = Growth(clock := Clock(stack))
        clock.follow_run()
        for weights in zip(*curves, strict=True):
            for layer, weight in zip(model, weights, strict=True):
                nn.init.constant_(layer.weight, weight)
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.full((1, 1), 1e9))  # which is no training
    return growth.facts()


def growing(start, factor=2.0, steps=30):
    return [factor ** max(0, step - start) for step in range(steps)]


@pytest.mark.parametrize(
    ("curves", "grown", "grew"),
    [
        ([growing(30), growing(30)], 1.0, ""),
        ([growing(30), growing(10)], 2.0**19, ", from step 10 on in model.1"),
        ([growing(15), growing(10)], 2.0**33, ", from step 10 on in model.1"),  # what follows hands it on
        ([growing(10), growing(30)], 2.0**19, ", from step 10 on in model.0"),
        ([growing(30), growing(19)], 2.0**10, ""),  # far from overflow
        ([growing(30), [*growing(30, steps=29), 1e5]], 1e5, ", from step 28 on in model.1"),
        ([growing(30), [1.0] * 10 + [1e5] + [1.0] * 19], 1e5, ""),  # a spike
        ([growing(30), [*growing(10, steps=29), math.inf]], 2.0**18, ", from step 10 on in model.1"),
        ([growing(30), [0.0, *growing(29, steps=29)]], 1.0, ""),  # of 0 everything is larger
    ],
)
def test_numbers_grow_from_the_first_layer_on_that_comes_near_overflow(curves, grown, grew):
    assert growth_of(*curves) == {"grown": pytest.approx(grown), "grew": grew, "half": "float16"}


def test_what_grows_is_fetched_by_a_host_sync_in_fifty_attempts(monkeypatch):
    fetches, fetched = [], watch.read_numbers
    monkeypatch.setattr(watch, "read_numbers", lambda tensors: fetches.append(1) or fetched(tensors))
    growth_of(growing(120, steps=120))
    assert len(fetches) == 3


# ---- One attempt, taken twice ----


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_the_second_run_begins_with_the_masters_of_the_first(tmp_path, level):
    for opt_level in (level, "O0"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, loss_scale=1.0)
        with ExitStack() as stack:
            Sample(clock := Clock(stack), str(tmp_path), 1, ends=False)
            clock.follow_run()
            for _ in range(2):
                loss = model(torch.randn(8, 16)).float().square().mean()
                optimizer.zero_grad()
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
        amp.uninitialize()
    weights, _ = torch.load(tmp_path / "weights-0.pt")
    assert weights["0.weight"].dtype == torch.float32
    assert not torch.equal(weights["0.weight"], weights["0.weight"].half().float())
    own, other = (it["tensors"]["model", "0.weight"] for it in read_samples(str(tmp_path)))
    assert not torch.equal(own.float(), other)
    torch.testing.assert_close(own.float(), other, rtol=0.02, atol=0.02)
