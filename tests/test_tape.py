"""The tape of what the doctor sees, by hand: which record a tensor comes of, and what is asked of records."""

import gc
import weakref
from contextlib import ExitStack

import pytest
import torch

from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.tape import Op, Tape
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
        record.taken, record.given = tuple(taken), (given,)
    assert [op for _, op in undone_casts(tape.records)] == undone
