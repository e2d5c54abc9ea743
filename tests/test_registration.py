"""Functions that users add to the tables: by decorator or by name, before or after `initialize`."""

import collections
import copy
import functools
import pickle
import sys
import types
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch as amp
from apex_rows import shows
from patched import FULL, HALF, full, half, open_session

OTHER_HALF = torch.float16


def show(*args, **kwargs):
    return [value.dtype for value in (*args, *kwargs.values())]


def identity(x):
    return x


# ---- Decorators ----

KINDS = {
    "half": (amp.half_function, amp.register_half_function, [HALF, HALF]),
    "bfloat16": (amp.bfloat16_function, amp.register_bfloat16_function, [HALF, HALF]),
    "float": (amp.float_function, amp.register_float_function, [FULL, FULL]),
    "promote": (amp.promote_function, amp.register_promote_function, [FULL, FULL]),
}
each_kind = pytest.mark.parametrize(("decorate", "register", "expected"), KINDS.values(), ids=KINDS)


def test_the_half_type_is_that_of_the_level_at_the_time_of_the_call_unless_it_is_said():
    function, bfloat16, module = amp.half_function(show), amp.bfloat16_function(show), make_module()
    amp.register_half_function(module, "show")
    for opt_level, dtype in (("O1", OTHER_HALF), ("O4", HALF), ("O1", OTHER_HALF)):
        open_session(opt_level=opt_level)
        assert function(full(2)) == module.show(full(2)) == [dtype]
        assert bfloat16(full(2), half(2).half()) == [HALF, HALF]
        amp.uninitialize()


def test_a_promoting_function_takes_the_widest_type_and_leaves_arguments_of_one_type_and_float64():
    function = amp.promote_function(show)
    open_session()
    assert function(half(2), half(2)) == [HALF, HALF]
    assert function(half(2), torch.arange(2)) == [HALF, torch.int64]
    assert function(half(2), full(2).half()) == [FULL, FULL]
    assert function(half(2), full(2).double()) == [HALF, torch.float64]


@each_kind
def test_what_a_function_takes_in_a_dictionary_is_cast_too(decorate, register, expected):
    def show_values(batch):
        return [value.dtype for value in batch["values"].values()]

    module = types.SimpleNamespace(__name__="module", show=show_values)
    function = decorate(show_values)
    register(module, "show")
    open_session()
    batch = {"values": {"a": half(2), "b": full(2)}}
    assert function(batch) == module.show(batch) == expected


@amp.half_function
def documented(x, *, scale: float = 1.0):
    """Says what it does."""
    return x * scale


def test_a_decorated_function_keeps_name_documentation_and_signature_and_pickles_and_copies():
    assert documented.__name__ == documented.__qualname__ == "documented"
    assert documented.__module__ == __name__
    assert documented.__doc__ == "Says what it does."
    assert documented.__annotations__ == {"scale": float}
    assert pickle.loads(pickle.dumps(documented)) is copy.deepcopy(documented) is documented


class Callable:
    def __call__(self, x):
        return x


ODD = [torch.neg, Callable(), functools.partial(torch.add, 1), lambda x: x, nn.Identity()]


@shows("never-early-names")
@pytest.mark.parametrize("function", ODD, ids=["builtin", "callable", "partial", "lambda", "module"])
def test_whatever_can_be_called_can_be_decorated(function):
    open_session()
    assert amp.half_function(function)(full(2)).dtype is HALF


def below(kind, function):
    return kind(amp.half_function(function))


def above(kind, function):
    return amp.half_function(kind(function))


@pytest.mark.parametrize("decorate", [below, above])
def test_methods_of_a_class_are_decorated_below_and_above_staticmethod_and_classmethod(decorate):
    class Model:
        method = amp.half_function(lambda self, x: x)
        of_class = decorate(classmethod, lambda cls, x: (cls, x))
        static = decorate(staticmethod, identity)

    open_session()
    assert Model().method(full(2)).dtype is HALF
    assert Model().static(full(2)).dtype is Model.static(full(2)).dtype is HALF
    owner, result = Model().of_class(full(2))
    assert (owner, result.dtype) == (Model, HALF)


SEEN = []


class Product(torch.autograd.Function):
    """As C extensions are wrapped: both directions are decorated."""

    @staticmethod
    @amp.half_function
    def forward(ctx, x, weight):
        SEEN.append(("forward", x.dtype, weight.dtype))
        ctx.save_for_backward(x, weight)
        return torch.ops.aten.mm(x, weight)

    @staticmethod
    @amp.float_function
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        SEEN.append(("backward", grad.dtype, x.dtype))
        return torch.ops.aten.mm(grad, weight.float().t()), torch.ops.aten.mm(x.float().t(), grad)


@shows("patterns-decorators")
def test_both_directions_of_an_autograd_function_are_decorated_under_staticmethod():
    SEEN.clear()
    open_session()
    x, weight = full(2, 3).requires_grad_(), full(3, 4).requires_grad_()
    result = Product.apply(x, weight)
    assert result.dtype is HALF
    result.sum().backward()
    assert SEEN == [("forward", HALF, HALF), ("backward", FULL, HALF)]
    assert (x.grad.dtype, weight.grad.dtype) == (FULL, FULL)
    assert torch.allclose(weight.grad, x.detach().to(HALF).float().sum(0)[:, None].expand(3, 4))


def test_two_decorators_on_one_function_let_the_inner_one_win():
    function = amp.half_function(amp.float_function(show))
    open_session()
    assert function(full(2)) == [FULL]


def test_a_weight_given_to_two_decorated_functions_is_cast_once():
    function, again = amp.half_function(identity), amp.half_function(identity)
    open_session()
    weight = nn.Parameter(full(2))
    assert function(weight) is again(weight)


# ---- By name ----

MOMENTS = ["before", "after"]


def make_module():
    module = types.ModuleType("extension")
    module.show = show
    module.constant = 3
    return module


@pytest.fixture(params=MOMENTS)
def register_and_open(request):
    """Registers before or after `initialize`, in either case with the session open then."""

    def run(register, parent, name):
        if request.param == "before":
            register(parent, name)
        open_session()
        if request.param == "after":
            register(parent, name)

    return run


@each_kind
def test_a_function_of_a_module_is_registered_for_sessions_that_patch_and_itself_between_them(
    register_and_open, decorate, register, expected
):
    module, original = make_module(), show
    register_and_open(register, module, "show")
    assert module.show(full(2), half(2)) == expected
    for opt_level in ("O5", "O4"):
        amp.uninitialize()
        assert module.show is original
        open_session(opt_level=opt_level)
        assert (module.show is original) == (opt_level == "O5")
    assert module.show(full(2), half(2)) == expected


def test_a_registration_overrides_the_row_of_a_function(register_and_open):
    register_and_open(amp.register_float_function, torch, "mm")
    assert torch.mm(half(2, 3), half(3, 2)).dtype is torch.mm(full(2, 3), full(3, 2)).dtype is FULL
    amp.register_half_function(F, "softmax")
    assert F.softmax(half(2, 3), dim=1).dtype is FULL  # by Tensor.softmax, which has its own row
    amp.register_half_function(torch.Tensor, "softmax")
    assert F.softmax(full(2, 3), dim=1).dtype is HALF


def test_a_registration_overrides_the_row_of_an_operator(register_and_open):
    register_and_open(amp.register_float_function, torch.Tensor, "__matmul__")
    assert (half(2, 3) @ half(3, 2)).dtype is FULL


def test_the_last_of_two_registrations_counts(register_and_open):
    module = make_module()
    amp.register_float_function(module, "show")
    register_and_open(amp.register_half_function, module, "show")
    assert module.show(full(2), half(2)) == [HALF, HALF]
    amp.uninitialize()
    assert module.show is show


class Ops:
    def method(self, x):
        return x

    @staticmethod
    def static(x):
        return x

    @classmethod
    def of_class(cls, x):
        return cls, x


class MoreOps(Ops):
    pass


NAMES = ["method", "static", "of_class"]


def dtype_of(owner, name):
    result = getattr(owner(), name)(full(2))
    return result[1].dtype if name == "of_class" else result.dtype


@pytest.mark.parametrize(
    ("make", "name"),
    [*((lambda owner=owner: owner, name) for owner in (Ops, MoreOps) for name in NAMES), (Ops, "method")],
)
def test_a_method_is_registered_for_what_inherits_it_and_comes_back_as_it_was(register_and_open, make, name):
    owner = make()
    before = dict(vars(owner))
    register_and_open(amp.register_half_function, owner, name)
    result = getattr(owner() if isinstance(owner, type) else owner, name)(full(2))
    assert (result[1] if name == "of_class" else result).dtype is HALF
    assert dtype_of(Ops, name) is (HALF if owner is Ops else FULL)
    assert dtype_of(MoreOps, name) is (HALF if isinstance(owner, type) else FULL)
    assert MoreOps.of_class(full(2))[0] is MoreOps
    amp.uninitialize()
    assert dict(vars(owner)) == before


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_apply_of_an_autograd_function_is_registered_and_comes_back_as_it_was(register_and_open):
    register_and_open(amp.register_half_function, Twice, "apply")
    x = full(2).requires_grad_()
    result = Twice.apply(x)
    result.sum().backward()
    assert (result.dtype, x.grad.dtype) == (HALF, FULL)
    amp.uninitialize()
    assert Twice.apply(x).dtype is FULL
    assert "apply" not in vars(Twice)


def test_a_registered_function_pickles_by_its_name(register_and_open, monkeypatch):
    register_and_open(amp.register_half_function, Ops, "method")
    assert (Ops.method.__module__, Ops.method.__qualname__) == (__name__, "Ops.method")
    module = make_module()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    amp.register_half_function(module, "show")
    assert (module.show.__module__, module.show.__qualname__) == ("extension", "show")
    for function in (Ops.method, module.show):
        assert pickle.loads(pickle.dumps(function)) is function


# ---- What is refused ----


def test_a_registration_whose_function_is_gone_by_the_time_of_initialize_is_told():
    module = make_module()
    amp.register_half_function(module, "show")
    del module.show
    before = torch.mm
    with pytest.raises((AttributeError, ValueError), match="show"):
        open_session()
    assert torch.mm is before


@dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


def test_a_promoted_function_of_a_user_is_looked_into_as_the_others_are():
    open_session()
    held = amp.promote_function(identity)({"a": full(2), "b": collections.deque([Pair(half(2), [half(2)])])})
    (pair,) = held["b"]
    assert pair.first.dtype is pair.second[0].dtype is held["a"].dtype is FULL
