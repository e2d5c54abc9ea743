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

FULL, HALF, OTHER_HALF = torch.float32, torch.bfloat16, torch.float16


def open_session(opt_level="O4", **kwargs):
    return amp.initialize(nn.Linear(2, 2), opt_level=opt_level, verbosity=0, **kwargs)


def full(*shape):
    return torch.rand(shape or (2,))


def half(*shape):
    return full(*shape).to(HALF)


def show(*args, **kwargs):
    """Returns the dtypes that reach the function."""
    return [value.dtype for value in (*args, *kwargs.values())]


def identity(x):
    return x


# ---- Decorators ----

DECORATORS = {
    "half": (amp.half_function, [HALF, HALF]),
    "bfloat16": (amp.bfloat16_function, [HALF, HALF]),
    "float": (amp.float_function, [FULL, FULL]),
    "promote": (amp.promote_function, [FULL, FULL]),
}


@pytest.mark.parametrize("name", DECORATORS)
def test_a_function_decorated_after_initialize_is_cast(name):
    decorate, expected = DECORATORS[name]
    open_session()
    assert decorate(show)(full(), half()) == expected


@pytest.mark.parametrize("name", DECORATORS)
def test_a_decorated_function_acts_only_while_a_session_patches(name):
    function = DECORATORS[name][0](show)
    untouched = [FULL, HALF]
    assert function(full(), half()) == untouched
    open_session("O0")
    assert function(full(), half()) == untouched
    amp.uninitialize()
    open_session("O4")
    assert function(full(), half()) == DECORATORS[name][1]
    amp.uninitialize()
    assert function(full(), half()) == untouched
    open_session("O5")
    assert function(full(), half()) == untouched


def test_the_half_type_is_that_of_the_level_at_the_time_of_the_call():
    function = amp.half_function(show)
    for opt_level, dtype in (("O1", OTHER_HALF), ("O4", HALF), ("O1", OTHER_HALF)):
        open_session(opt_level)
        assert function(full()) == [dtype]
        amp.uninitialize()


def test_bfloat16_function_is_bfloat16_at_o1_too():
    function = amp.bfloat16_function(show)
    open_session("O1")
    assert function(full(), torch.rand(2).half()) == [HALF, HALF]


def test_a_promoting_function_takes_the_widest_type_and_leaves_arguments_of_one_type_and_float64():
    function = amp.promote_function(show)
    open_session()
    assert function(half(), half()) == [HALF, HALF]
    assert function(half(), torch.arange(2)) == [HALF, torch.int64]
    assert function(half(), full().half()) == [FULL, FULL]
    assert function(half(), full().double()) == [HALF, torch.float64]


def test_disable_casts_holds_for_decorated_functions():
    function = amp.half_function(show)
    open_session()
    with amp.disable_casts():
        assert function(full()) == [FULL]


@amp.half_function
def documented(x, *, scale: float = 1.0):
    """Says what it does."""
    return x * scale


def test_a_decorated_function_keeps_name_documentation_and_signature():
    assert documented.__name__ == documented.__qualname__ == "documented"
    assert documented.__module__ == __name__
    assert documented.__doc__ == "Says what it does."
    assert documented.__annotations__ == {"scale": float}


def test_a_decorated_function_pickles_and_copies():
    assert pickle.loads(pickle.dumps(documented)) is documented
    assert copy.deepcopy(documented) is documented


def test_arguments_by_keyword_and_in_containers_are_cast():
    function = amp.half_function(lambda *args, **kwargs: (args, kwargs))
    open_session()
    args, kwargs = function([full(), 1], {"a": full()}, (full(),), x={"b": [full()]}, mode="same")
    assert args[0][0].dtype is args[1]["a"].dtype is args[2][0].dtype is HALF
    assert kwargs["x"]["b"][0].dtype is HALF
    assert (args[0][1], kwargs["mode"]) == (1, "same")


class Callable:
    def __call__(self, x):
        return x


ODD = [torch.neg, Callable(), functools.partial(torch.add, 1), lambda x: x, nn.Identity()]


@pytest.mark.parametrize("function", ODD, ids=["builtin", "callable", "partial", "lambda", "module"])
def test_whatever_can_be_called_can_be_decorated(function):
    open_session()
    assert amp.half_function(function)(full()).dtype is HALF


def test_a_bound_method_is_decorated_and_assigned_back():
    class Model:
        scale = 2

        def compute(self, x):
            return x * self.scale

    model = Model()
    model.compute = amp.half_function(model.compute)
    open_session()
    assert model.compute(full()).dtype is HALF
    assert Model().compute(full()).dtype is FULL


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
    assert Model().method(full()).dtype is HALF
    assert Model().static(full()).dtype is Model.static(full()).dtype is HALF
    owner, result = Model().of_class(full())
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
    assert function(full()) == [FULL]


@pytest.mark.parametrize("decorate", [amp.half_function, amp.float_function, amp.promote_function])
def test_what_cannot_be_called_cannot_be_decorated(decorate):
    with pytest.raises(TypeError, match=r"'linear' is a str: expected a function"):
        decorate("linear")


def test_a_weight_given_to_two_decorated_functions_is_cast_once():
    function, again = amp.half_function(identity), amp.half_function(identity)
    open_session()
    weight = nn.Parameter(full())
    assert function(weight) is again(weight)


# ---- By name ----

REGISTER = {
    "half": (amp.register_half_function, [HALF, HALF]),
    "bfloat16": (amp.register_bfloat16_function, [HALF, HALF]),
    "float": (amp.register_float_function, [FULL, FULL]),
    "promote": (amp.register_promote_function, [FULL, FULL]),
}
MOMENTS = ["before", "after"]


def make_module():
    module = types.ModuleType("extension")
    module.show = show
    module.constant = 3
    return module


@pytest.fixture(params=MOMENTS)
def register_and_open(request):
    """Registers before or after `initialize`, in either case with the session open then."""

    def run(register, parent, name, opt_level="O4", **kwargs):
        if request.param == "before":
            register(parent, name)
        open_session(opt_level, **kwargs)
        if request.param == "after":
            register(parent, name)

    return run


@pytest.mark.parametrize("kind", REGISTER)
def test_a_function_of_a_module_is_registered_for_all_sessions_and_itself_between_them(
    register_and_open, kind
):
    register, expected = REGISTER[kind]
    module = make_module()
    register_and_open(register, module, "show")
    assert module.show(full(), half()) == expected
    amp.uninitialize()
    assert module.show is show
    open_session()
    assert module.show(full(), half()) == expected


def test_a_registered_function_is_not_replaced_while_nothing_patches():
    module = make_module()
    amp.register_half_function(module, "show")
    assert module.show is show
    open_session("O5")
    assert module.show is show


def test_the_registered_half_type_is_that_of_the_level(register_and_open):
    module = make_module()
    register_and_open(amp.register_half_function, module, "show", opt_level="O1")
    assert module.show(full()) == [OTHER_HALF]
    amp.uninitialize()
    open_session("O4")
    assert module.show(full()) == [HALF]


def test_einsum_is_registered_as_published_scripts_do(register_and_open):
    before = torch.einsum
    register_and_open(amp.register_half_function, torch, "einsum")
    assert torch.einsum("ij,jk->ik", full(2, 3), full(3, 4)).dtype is HALF
    assert torch.einsum("ij,jk->ik", [full(2, 3), full(3, 4)]).dtype is HALF
    amp.uninitialize()
    assert torch.einsum is before


def test_a_registration_overrides_the_row_of_a_whitelisted_function(register_and_open):
    register_and_open(amp.register_float_function, torch, "mm")
    assert torch.mm(half(2, 3), half(3, 2)).dtype is FULL
    assert torch.mm(full(2, 3), full(3, 2)).dtype is FULL


def test_a_registration_overrides_the_row_of_a_blacklisted_function(register_and_open):
    register_and_open(amp.register_half_function, F, "softmax")
    assert F.softmax(half(2, 3), dim=1).dtype is FULL  # by Tensor.softmax, which has its own row
    register = amp.register_half_function
    register(torch.Tensor, "softmax")
    assert F.softmax(full(2, 3), dim=1).dtype is HALF


def test_the_last_of_two_registrations_counts(register_and_open):
    module = make_module()
    amp.register_float_function(module, "show")
    register_and_open(amp.register_half_function, module, "show")
    assert module.show(full(), half()) == [HALF, HALF]
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


def dtype_of(owner, name):
    result = getattr(owner(), name)(full())
    return result[1].dtype if name == "of_class" else result.dtype


@pytest.mark.parametrize("name", ["method", "static", "of_class"])
def test_a_method_of_a_class_is_registered_and_comes_back_unbound(register_and_open, name):
    before = vars(Ops)[name]
    register_and_open(amp.register_half_function, Ops, name)
    assert dtype_of(Ops, name) is dtype_of(MoreOps, name) is HALF
    assert Ops.static(full()).dtype is (HALF if name == "static" else FULL)
    assert MoreOps.of_class(full())[0] is MoreOps
    amp.uninitialize()
    assert vars(Ops)[name] is before


@pytest.mark.parametrize("name", ["method", "static", "of_class"])
def test_what_a_class_inherits_is_registered_for_it_alone(register_and_open, name):
    register_and_open(amp.register_half_function, MoreOps, name)
    assert (dtype_of(MoreOps, name), dtype_of(Ops, name)) == (HALF, FULL)
    amp.uninitialize()
    assert name not in vars(MoreOps)


def test_a_method_of_one_instance_is_registered(register_and_open):
    instance = Ops()
    register_and_open(amp.register_half_function, instance, "method")
    assert instance.method(full()).dtype is HALF
    assert Ops().method(full()).dtype is FULL
    amp.uninitialize()
    assert vars(instance) == {}


def test_a_registered_method_pickles_by_its_name(register_and_open):
    register_and_open(amp.register_half_function, Ops, "method")
    assert (Ops.method.__module__, Ops.method.__qualname__) == (__name__, "Ops.method")
    assert pickle.loads(pickle.dumps(Ops.method)) is Ops.method


def test_a_registered_function_of_an_imported_module_pickles_by_its_name(register_and_open, monkeypatch):
    module = make_module()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    register_and_open(amp.register_half_function, module, "show")
    assert (module.show.__module__, module.show.__qualname__) == ("extension", "show")
    assert pickle.loads(pickle.dumps(module.show)) is module.show


# ---- What is refused ----


@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_missing_name_raises_value_error(kind, moment):
    if moment == "after":
        open_session()
    with pytest.raises(ValueError, match=r"no function named 'softmaxx' in torch\.nn\.functional"):
        REGISTER[kind][0](F, "softmaxx")


def test_what_is_no_function_raises_value_error():
    with pytest.raises(ValueError, match=r"extension\.constant is a int: expected a function"):
        amp.register_half_function(make_module(), "constant")


@pytest.mark.parametrize("name", [None, 3, torch.mm])
def test_a_name_that_is_no_string_raises_type_error(name):
    with pytest.raises(TypeError, match="expected a string"):
        amp.register_half_function(torch, name)


def test_a_refused_registration_leaves_nothing_behind():
    module = make_module()
    with pytest.raises(ValueError, match="missing"):
        amp.register_half_function(module, "missing")
    module.missing = show
    open_session()
    assert module.missing is show


def test_a_registration_whose_function_is_gone_by_the_time_of_initialize_is_told():
    module = make_module()
    amp.register_half_function(module, "show")
    del module.show
    before = torch.mm
    with pytest.raises((AttributeError, ValueError), match="show"):
        open_session()
    assert torch.mm is before


def test_an_argument_dtype_of_a_users_function_is_the_users():
    @amp.float_function
    def cast_twice(x, dtype=None):
        return x.dtype, dtype

    amp.initialize(torch.nn.Linear(1, 1), opt_level="O4", verbosity=0)
    assert cast_twice(torch.ones(2).bfloat16(), dtype=torch.float16) == (torch.float32, torch.float16)


@dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.parametrize(
    "hold",
    [
        lambda a, b: ({"a": a, "b": b},),
        lambda a, b: (collections.deque([a, b]),),
        lambda a, b: (Pair(a, b),),
        lambda a, b: ([a, b],),
        lambda a, b: (a, {"b": b}),
    ],
)
def test_a_promoted_function_of_a_user_is_looked_into_as_the_others_are(hold):
    seen = []

    @amp.promote_function
    def function(*args):
        seen.append(list(find_tensors(args)))

    open_session()
    function(*hold(full(), half()))
    assert [tensor.dtype for tensor in seen[0]] == [FULL, FULL]


def find_tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
        return
    items = vars(value) if isinstance(value, Pair) else value
    for item in items.values() if isinstance(items, dict) else items:
        yield from find_tensors(item)
