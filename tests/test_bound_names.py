"""Names that were bound to torch's functions before they were patched, wherever programs keep them."""

import collections
import contextlib
import functools
import gc
import sys
import types
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampatch as amp
from apex_rows import shows
from patched import HALF, half, open_session

SOURCE = """
import collections, functools
import torch
from torch import matmul, exp
from torch.nn.functional import linear, softmax as _softmax
from torch.nn import functional as F
from torch.nn.functional import relu

ACTIVATIONS = {"softmax": F.softmax, "relu": F.relu, "nested": {"exp": torch.exp}}
CHOICES = [F.softmax, F.relu, "softmax"]
PARTIAL = functools.partial(F.softmax, dim=-1)
BUILD = functools.partial(print, function=torch.exp)
CHOOSE = functools.partial(print, table={"exp": torch.exp})
REGISTRY = collections.OrderedDict(exp=torch.exp)
TENSOR_EXP = torch.Tensor.exp

by_default = lambda x, function=torch.exp: x
by_keyword = lambda x, *, function=torch.exp: x

class Operations:
    builtin = torch.exp
    static = staticmethod(F.softmax)
    by_default = staticmethod(lambda x, function=torch.exp: x)

class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.function = torch.exp

CRITERION = Loss()
"""


@pytest.fixture
def load(monkeypatch):
    def load(name="bound_names_user", source=SOURCE, file="/home/user/script.py"):
        module = types.ModuleType(name)
        module.__file__ = file
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(source, file, "exec"), vars(module))
        return module

    return load


@pytest.fixture
def user(load):
    return load()


# How a program reaches functions that run in float32, in a module of its own.
WAYS = {
    "from-import": lambda m: m.exp,
    "from-import under another name": lambda m: m._softmax,
    "a dictionary": lambda m: m.ACTIVATIONS["softmax"],
    "a dictionary in a dictionary": lambda m: m.ACTIVATIONS["nested"]["exp"],
    "a list": lambda m: m.CHOICES[0],
    "a partial": lambda m: m.PARTIAL.func,
    "an argument of a partial": lambda m: m.BUILD.keywords["function"],
    "a dictionary that is an argument of a partial": lambda m: m.CHOOSE.keywords["table"]["exp"],
    "an ordered dictionary": lambda m: m.REGISTRY["exp"],
    "a method of Tensor": lambda m: m.TENSOR_EXP,
    "a default argument": lambda m: m.by_default.__defaults__[0],
    "a default of a keyword": lambda m: m.by_keyword.__kwdefaults__["function"],
    "an attribute of a class": lambda m: m.Operations.builtin,
    "an attribute of a class, by an instance": lambda m: m.Operations().builtin,
    "a static method": lambda m: m.Operations.static,
    "a default argument of a method": lambda m: m.Operations.by_default.__defaults__[0],
    "a loss that initialize is not given": lambda m: m.CRITERION.function,
}
NAMES = {"matmul", "exp", "linear", "_softmax", "TENSOR_EXP"}


def type_of(function):
    """The type of what a function gives of a half tensor."""
    options = {"dim": -1} if function.__name__ == "softmax" else {}
    return function(half(2, 3), **options).dtype


@shows("never-early-names")
def test_a_name_bound_before_casts_as_torchs_own_does(user):
    names = dict(vars(user))
    assert {type_of(find(user)) for find in WAYS.values()} == {HALF}
    open_session()
    assert {way: type_of(find(user)) for way, find in WAYS.items()} == dict.fromkeys(WAYS, torch.float32)
    assert {name for name, item in names.items() if vars(user)[name] is not item} == NAMES


def test_uninitialize_puts_back_every_object_that_was_there(user):
    def look():
        ways = [find(user) for find in WAYS.values()]
        return [*ways, *vars(user).values(), *vars(user.Operations).values()]

    before = look()
    open_session()
    amp.uninitialize()
    assert list(map(id, look())) == list(map(id, before))


def test_a_module_that_is_loaded_while_patched_has_its_own_names_back_afterwards(load):
    open_session()
    module = load()
    assert module.exp(half(2)).dtype is torch.float32
    amp.uninitialize()
    assert module.exp is module.Operations.builtin is torch.exp
    assert module.ACTIVATIONS["softmax"] is module.PARTIAL.func is F.softmax


def test_a_name_that_was_bound_to_something_else_while_patched_is_left(user):
    open_session()
    user.exp = user.linear = mine = lambda *args: "mine"
    amp.uninitialize()
    assert user.exp is user.linear is mine


@pytest.mark.parametrize("name", ["__main__", "test"])  # the script, and one that Python has as well
def test_names_in_a_users_module_are_found_whatever_it_is_called(load, name):
    module = load(name, "from torch import exp")
    open_session()
    assert module.exp(half(2)).dtype is torch.float32
    amp.uninitialize()
    assert module.exp is torch.exp


INSTALLED = """
import torch
from torch import exp
_saved = torch.exp
CHOICES = {"exp": torch.exp}
_cache = {"exp": torch.exp}
"""


def test_of_an_installed_package_all_but_its_private_containers_is_searched(load):
    module = load("bound_names_package", INSTALLED, "/opt/python/site-packages/package.py")
    open_session()
    assert module.exp(half(2)).dtype is module.CHOICES["exp"](half(2)).dtype is torch.float32
    amp.uninitialize()
    open_session()
    assert module._cache["exp"](half(2)).dtype is HALF


def test_torch_itself_is_left_alone_but_for_its_distributions():
    open_session()
    kept = torch._C._VariableFunctions.exp
    assert kept(half(2)).dtype is HALF
    logits = torch.randn(3, dtype=HALF)
    bernoulli = torch.distributions.Bernoulli(logits=logits, validate_args=False)
    assert bernoulli.log_prob(torch.ones(3)).dtype is torch.float32


# ---- Models ----


class Net(nn.Module):
    in_class = staticmethod(F.softmax)

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.act = F.softmax
        self.many = {"softmax": F.softmax, "list": [torch.exp]}
        self.partial = functools.partial(F.softmax, dim=-1)
        self._private = torch.exp
        self.later = lambda x, function=torch.exp: function(x)

    def forward(self, x):
        softmaxes = [function(x, dim=-1) for function in (self.act, self.in_class, self.many["softmax"])]
        others = self.many["list"][0], self.partial, self._private, self.later
        return [*softmaxes, *(function(x) for function in others)]


def kept_by(model):
    return model.act, model.many["list"][0], model.partial, model._private, vars(Net)["in_class"]


def test_what_initialized_models_keep_follows_the_patches_and_is_put_back():
    first, second, model = Net(), Net(), nn.Sequential(nn.Linear(2, 2), Net())
    part = model[1]
    before = [kept_by(net) for net in (first, second, part)]
    assert {out.dtype for out in first(half(2, 3))} == {HALF}
    for net in (first, second, model):
        open_session(net)
    assert {out.dtype for net in (first, second, part) for out in net(half(2, 3))} == {torch.float32}
    del model[1]  # what is taken out is put back as well
    amp.uninitialize()
    assert [kept_by(net) for net in (first, second, part)] == before
    assert part.act is part.partial.func is F.softmax


def test_a_models_class_that_no_module_holds_and_that_holds_itself_is_searched():
    class Local(nn.Module):
        act = staticmethod(torch.exp)

    Local.kinds = [Local]
    model = Local()
    open_session(model)
    assert model.act(half(2)).dtype is torch.float32
    amp.uninitialize()
    assert Local.act is torch.exp


class Failing(amp.Observer):
    def on_initialize(self, policy):
        raise ValueError("no more")


def test_a_call_that_fails_leaves_the_model_as_it_was_and_what_it_shares_with_others(user):
    first, second, alone = Net(), Net(), Net()
    first.many = second.many
    second.choices = user.CHOICES
    with amp.observe(Failing()), pytest.raises(ValueError, match="no more"):
        open_session(alone)
    assert alone.act is F.softmax
    open_session(first)
    with amp.observe(Failing()), pytest.raises(ValueError, match="no more"):
        open_session(second)
    assert first.many["softmax"] is user.CHOICES[0] is F.softmax
    assert second.act is not F.softmax


@pytest.mark.parametrize("fails", [True, False], ids=["a call that fails", "a session"])
def test_a_model_that_was_searched_is_freed_when_it_is_dropped(fails):
    model = Net()
    model.itself = [model]
    with amp.observe(Failing()) if fails else contextlib.nullcontext(), contextlib.suppress(ValueError):
        open_session(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_a_name_bound_in_a_model_while_patched_is_put_back():
    model = Net()
    open_session(model)
    model.bound_later = torch.exp
    model.many["later"] = F.softmax
    amp.uninitialize()
    assert model.bound_later is torch.exp
    assert model.many["later"] is F.softmax


def test_an_entry_that_was_deleted_while_patched_stays_deleted(user):
    user.defaults = collections.defaultdict(list, exp=torch.exp)
    open_session()
    del user.defaults["exp"]
    amp.uninitialize()
    assert dict(user.defaults) == {}


def test_a_model_made_while_patched_is_put_right_by_its_own_initialize():
    open_session()
    model = Net()  # holds wrappers
    model.product = torch.matmul
    amp.uninitialize()
    open_session(model, "O1")
    assert model.act is F.softmax
    assert model(torch.rand(2, 3).half())[0].dtype is torch.float32
    assert model.product(torch.ones(2, 3), torch.ones(3, 3)).dtype is torch.float16


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_at_levels_without_patches_nothing_is_searched(user, level):
    before = dict(vars(user))
    model = Net()
    open_session(model, level)
    assert dict(vars(user)) == before
    assert model.act is F.softmax


# ---- Registered functions ----


@pytest.mark.parametrize("first", [False, True], ids=["while patched", "before"])
def test_a_registered_function_is_cast_under_its_other_names(user, first):
    owner, model = types.ModuleType("owner"), Net()
    owner.total = user.total = model.act = user.ACTIVATIONS["total"] = lambda x: x + x
    if first:
        amp.register_float_function(owner, "total")
    open_session(model)
    if not first:
        amp.register_float_function(owner, "total")
    names = [user.total, model.act, user.ACTIVATIONS["total"]]
    assert [function(half(2)).dtype for function in names] == [torch.float32] * 3
    amp.uninitialize()
    assert user.total is model.act is user.ACTIVATIONS["total"] is owner.total
    assert user.total(half(2)).dtype is HALF


def test_a_builtin_registered_in_a_class_is_not_bound_to_instances():
    class Operations:
        add = torch.add

    amp.register_float_function(Operations, "add")
    open_session()
    assert Operations().add(half(2), half(2)).dtype is torch.float32
    assert Operations.add(half(2), half(2)).dtype is torch.float32


# ---- What must not happen ----


def test_decorated_functions_keep_what_they_decorate(user):
    """A user's own cast wins over the row of the function that it wraps."""
    user.product = amp.float_function(torch.matmul)
    open_session()
    assert user.product(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


class Computed:
    """An object whose attributes must not be asked for."""

    def __getattr__(self, name):
        raise RuntimeError(f"{name} was asked for")


class LazyModule(types.ModuleType):
    """As importlib's lazy modules: any access loads it."""

    def __getattribute__(self, name):
        raise RuntimeError(f"{name} was asked for")


def test_nothing_is_computed_by_the_search(user, monkeypatch):
    user.computed = Computed()
    user.itself = [user.CHOICES]
    user.itself.append(user.itself)
    monkeypatch.setitem(sys.modules, "bound_names_lazy", LazyModule("bound_names_lazy"))
    open_session()
    amp.uninitialize()


def test_long_lists_are_data_and_not_searched(user):
    user.data = [torch.exp] * 20_000
    open_session()
    assert user.data[0](half(2)).dtype is HALF
