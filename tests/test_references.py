"""What was given a function of torch while it was patched has torch's own after `uninitialize`."""

import functools
import gc
import types
from collections import OrderedDict, deque, namedtuple

import pytest
import torch
from torch.nn import functional as F

import ampatch as amp
from ampatch.patching.bound_names import References
from patched import open_session

ORIGINALS = (
    torch.exp,
    F.softmax,
    torch.Tensor.matmul,
)  # in a tuple, which the search for names passes by


class Plain:
    def __init__(self, function):
        self.function = function


class Slotted:
    __slots__ = ("empty", "function")

    def __init__(self, function):
        self.function = function


class Pair(namedtuple("Pair", "function number")):
    """A tuple of a class of its own."""


def close_over(function):
    return lambda: function


def take_default(function):
    def call(number=1, given=(function,), *, by_name=function):
        return given[0], by_name

    return call


def define(function):
    kind = type("Defined", (), {"function": function, "static": staticmethod(function)})
    assert kind.function is function  # Python remembers what it found
    return kind


def remember(function):
    @functools.cache
    def name(key):
        return key

    @functools.lru_cache(4)
    def result(key):
        return function

    return name(function), name, result("a"), result


# How something holds a function, and how one looks at what it holds.
HOLDERS = {
    "a dictionary": (lambda f: {"exp": f}, lambda held: held["exp"]),
    "a key": (lambda f: {1: 1, f: 2, 3: 3}, lambda held: list(held)[1]),
    "an ordered dictionary": (
        lambda f: OrderedDict({f: f, 1: 1}),
        lambda held: next(iter(held.items())),
    ),
    "a key that is a tuple": (lambda f: {(f, 1): 2}, lambda held: next(iter(held))[0]),
    "a list": (lambda f: [[[[f]]]], lambda held: held[0][0][0][0]),
    "a deque": (lambda f: deque([f]), lambda held: held[0]),
    "a set": (lambda f: {f}, lambda held: next(iter(held))),
    "a frozen set": (lambda f: [frozenset({f})], lambda held: next(iter(held[0]))),
    "a tuple in a tuple": (lambda f: [(1, (2, f))], lambda held: held[0][1][1]),
    "a named tuple": (lambda f: [Pair(f, 1)], lambda held: held[0].function),
    "a closure": (close_over, lambda held: held()),
    "a default argument": (take_default, lambda held: held()),
    "an object": (Plain, lambda held: held.function),
    "an object with slots": (Slotted, lambda held: held.function),
    "a class": (define, lambda held: (vars(held)["function"], held.function, held.static)),
    "a partial": (
        lambda f: functools.partial(f, f, key=f),
        lambda held: (held.func, *held.args, held.keywords["key"]),
    ),
    "a method": (lambda f: [types.MethodType(f, 1)], lambda held: held[0].__func__),
    "a property": (lambda f: property(f), lambda held: held.fget),
    "a function that wraps it": (lambda f: functools.wraps(f)(lambda: 1), lambda held: held.__wrapped__),
    "caches": (remember, lambda held: (held[1](held[0]), held[3]("a"))),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_holds_a_function_of_the_session_holds_torchs_own_after_it(holder):
    hold, look = HOLDERS[holder]
    open_session()
    held = [hold(function) for function in (torch.exp, F.softmax, torch.Tensor.matmul)]
    amp.uninitialize()
    for each, original in zip(held, ORIGINALS, strict=True):
        found = look(each)
        assert all(item is original for item in (found if isinstance(found, tuple) else (found,)))


def test_a_table_keeps_its_order_and_the_entry_that_was_made_last():
    table = {"first": 1, torch.exp: "earlier", "last": 3}
    open_session()
    table[torch.exp] = "later"
    amp.uninitialize()
    assert list(table.items()) == [("first", 1), (ORIGINALS[0], "later"), ("last", 3)]


def test_what_a_cache_answered_about_a_wrapper_is_not_said_of_the_original():
    @functools.cache
    def is_builtin(function):
        return isinstance(function, types.BuiltinFunctionType)

    open_session()
    assert not is_builtin(torch.exp)
    amp.uninitialize()
    assert is_builtin(torch.exp)


def test_a_patch_over_ours_that_is_undone_later_leaves_torch_as_it_was():
    open_session()
    held = [torch.Tensor.exp, torch.exp]
    torch.Tensor.exp = torch.exp = lambda *args: "theirs"
    with pytest.raises(amp.PatchConflictError, match=r"torch\.Tensor\.exp.*"):
        amp.uninitialize()
    torch.Tensor.exp, torch.exp = held  # which are torch's own by now
    amp.uninitialize()
    assert "exp" not in vars(torch.Tensor)
    assert torch.exp is ORIGINALS[0]


def test_the_garbage_collector_is_not_asked_where_nobody_holds_a_wrapper(monkeypatch):
    open_session()
    monkeypatch.setattr(gc, "get_referrers", None)
    amp.uninitialize()
    assert torch.exp is ORIGINALS[0]


def test_what_asks_for_holders_is_none_of_them():
    """Python 3.13 returns its own arguments: each answer held the one before, and the search never ended."""
    thing = Plain(None)
    table = {thing: 1}
    References({id(thing): (thing, "new")}).add_keys()
    assert list(table) == [thing, "new"]
