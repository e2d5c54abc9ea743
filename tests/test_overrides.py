"""What `__torch_function__` and modes are told of while torch is patched, and the tables that know it."""

import operator
import sys
import types

import pytest
import torch
from torch import overrides
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import ampatch as amp
from patched import full, half, open_session

NAMES = {
    "matmul": lambda lazy, x: torch.matmul(lazy, x),
    "Tensor.matmul": lambda lazy, x: x.matmul(lazy),
    "exp": lambda lazy, x: torch.exp(lazy),
    "softmax": lambda lazy, x: F.softmax(lazy, dim=-1),
    "Tensor.__setitem__": lambda lazy, x: x.__setitem__(lazy, 1),
    "solve": lambda lazy, x: torch.linalg.solve(lazy, x),
    "addmm": lambda lazy, x: torch.addmm(x, x, mat2=lazy),
    "Tensor.index_copy_": lambda lazy, x: x.index_copy_(0, lazy, x),
    "Tensor.sum": lambda lazy, x: x.as_subclass(Named).sum(),
}

LIBRARY = """
import torch
from torch.nn import functional as F

FUNCTIONS = [torch.matmul, torch.Tensor.matmul, torch.exp, F.softmax, torch.Tensor.__setitem__,
             torch.linalg.solve, torch.addmm, torch.Tensor.index_copy_, torch.Tensor.sum]
NAMES = ["matmul", "Tensor.matmul", "exp", "softmax", "Tensor.__setitem__",
         "solve", "addmm", "Tensor.index_copy_", "Tensor.sum"]

def keep_to_itself():
    table = dict(zip(FUNCTIONS, NAMES))
    pairs, members, fixed = {(function, 0): 0 for function in FUNCTIONS}, set(FUNCTIONS), frozenset(FUNCTIONS)

    def find(function):
        is_known = function in members and function in fixed and (function, 0) in pairs
        return table[function] if is_known else f"not found: {function!r}"

    return find

find = keep_to_itself()
FUNCTIONS = None
"""


class Lazy:
    """No tensor, as the operators of linear_operator are none."""

    find = None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return cls.find(function)


class Named(torch.Tensor):
    """A tensor that calls nothing."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return Lazy.find(function)


def load(name="late_library"):
    library = types.ModuleType(name)
    exec(LIBRARY, vars(library))
    sys.modules[name] = library
    # New classes: those of a library are loaded with it.
    lazy = type("Lazy", (Lazy,), {"find": staticmethod(library.find)})
    Lazy.find = staticmethod(library.find)
    return lazy


@pytest.fixture(autouse=True)
def unload():
    yield
    for name in ("late_library", "later_library"):
        sys.modules.pop(name, None)


def look_up(lazy):
    return {name: call(lazy(), full(2, 2)) for name, call in NAMES.items() if name != "Tensor.__setitem__"}


PLAIN = {name: name for name in NAMES if name != "Tensor.__setitem__"}


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("when", ["before", "while patched"])
def test_a_librarys_tables_find_what_torch_hands_over_whenever_it_was_loaded(level, when):
    lazy = load() if when == "before" else None
    open_session(opt_level=level)
    lazy = lazy or load()
    assert look_up(lazy) == PLAIN
    with amp.disable_casts():
        assert look_up(lazy) == PLAIN
    amp.uninitialize()
    assert look_up(lazy) == PLAIN


def test_a_table_that_is_loaded_later_is_found_by_a_class_that_was_there():
    open_session()
    lazy = load()
    assert look_up(lazy) == PLAIN
    lazy.find = load("later_library").find
    assert look_up(lazy) == PLAIN


def test_an_operator_is_handed_over_as_the_method_that_torch_names():
    lazy = load()
    open_session()
    x = full(2, 2)
    assert x @ lazy() == operator.matmul(x, lazy()) == "Tensor.matmul"
    x[0] = lazy()  # which is asked, or torch would fail on what is no tensor


class Refuses:
    """What does a product itself, after torch has asked it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return NotImplemented

    def __rmatmul__(self, other):
        return "its own"


def test_an_operator_that_a_class_does_not_override_is_left_to_the_class():
    open_session()
    assert full(2, 2) @ Refuses() == "its own"
    with pytest.raises(TypeError, match="matmul"):
        full(2, 2).matmul(Refuses())


class Holds:
    """No tensor, but it holds one."""

    def __init__(self, tensor):
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        given = [arg.tensor if isinstance(arg, Holds) else arg for arg in args]
        return [arg.dtype for arg in given], torch.mm(*given).dtype


PRODUCTS = {"a function": torch.matmul, "a method": torch.Tensor.matmul, "an operator": operator.matmul}


@pytest.mark.parametrize("product", PRODUCTS)
def test_what_is_no_tensor_is_given_tensors_as_they_are_and_its_own_calls_are_cast_as_under_autocast(product):
    x = full(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = PRODUCTS[product](x, Holds(x))
    open_session()
    assert PRODUCTS[product](x, Holds(x)) == expected == ([torch.float32] * 2, torch.bfloat16)


class Notes(TorchFunctionMode):
    """Notes the functions that it is told of, and the types of what these are given."""

    def __init__(self):
        super().__init__()
        self.told = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.told[function] = [getattr(arg, "dtype", None) for arg in args]
        return function(*args, **(kwargs or {}))


def test_a_mode_is_told_of_the_originals_and_of_what_was_cast():
    expected = {
        torch.Tensor.matmul: [torch.bfloat16] * 2,
        torch.exp: [torch.float32],
        torch.Tensor.exp: [torch.float32],
    }
    open_session()
    with Notes() as outer, Notes() as inner:
        results = [full(2, 2) @ full(2, 2), torch.exp(half(2)), half(2).exp()]
    assert [result.dtype for result in results] == [torch.bfloat16, torch.float32, torch.float32]
    for mode in (outer, inner):
        assert expected.items() <= mode.told.items()
        assert not any(isinstance(function, types.FunctionType) for function in mode.told)


def test_a_default_device_is_no_mode_that_a_call_goes_round_for(monkeypatch):
    open_session()
    torch.set_default_device("cpu")
    try:
        monkeypatch.setattr(overrides, "handle_torch_function", None)
        assert (full(2, 2) @ full(2, 2)).dtype is torch.bfloat16
    finally:
        torch.set_default_device(None)


# ---- What torch itself keeps ----


def ask_torch():
    """What `torch.overrides` says of functions as they are now, and what torch.fx makes of a product."""
    functions = {"exp": torch.exp, "glu": F.glu, "Tensor.exp": torch.Tensor.exp}
    told = {
        name: (
            overrides.resolve_name(function),
            overrides.is_tensor_method_or_property(function),
            function in overrides.get_testing_overrides(),
        )
        for name, function in functions.items()
    }
    counts = {place: len(names) for place, names in overrides.get_overridable_functions().items()}
    graph = torch.fx.symbolic_trace(lambda p: torch.ones(2, 2) @ p).graph
    return told, counts, [(node.op, node.target) for node in graph.nodes if node.op.startswith("call")]


CACHES = (
    "get_ignored_functions",
    "get_testing_overrides",
    "_get_overridable_functions",
    "_get_tensor_methods",
)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_torch_says_of_its_functions_while_patched_and_afterwards_what_it_says_before(level):
    expected = ask_torch()
    for name in CACHES:  # as in a process in which nobody has asked yet
        getattr(overrides, name).cache_clear()
    open_session(opt_level=level)
    assert ask_torch() == expected
    amp.uninitialize()
    assert ask_torch() == expected


def test_a_table_of_torchs_own_that_is_made_while_patched_holds_the_originals():
    from torch._prims import context

    context.torch_to_refs_map.cache_clear()
    open_session()
    table = context.torch_to_refs_map()
    amp.uninitialize()
    assert table[torch.exp] is torch._refs.exp
    assert torch.Tensor.pow in table
