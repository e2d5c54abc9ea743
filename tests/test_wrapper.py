"""What stands in for patched functions: what it does, what it refuses, how it passes for the original."""

import copy
import inspect
import operator
import pickle
import pkgutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch as amp
from ampatch.apex import amp as apex
from ampatch.casts import kernels
from ampatch.table import BANNED, FP32_INPLACE, MATCH_SELF
from ampatch.testing import assert_casts, parametrize_rows
from apex_rows import shows
from patched import FULL, HALF, LEVELS, full, half, open_session

# ---- A wrapper passes for the function that it wraps ----

PATHS = [path for path, _ in parametrize_rows().args[1]]


@pytest.fixture
def faults(amp_session):
    """A function that names the patched places for which `check(place, name, function, before)` is false."""
    places = [path.rpartition(".") for path in PATHS]
    places = [(pkgutil.resolve_name(target), name) for target, _, name in places]
    before = [getattr(place, name) for place, name in places]
    amp_session("O4")

    def find(check):
        found = zip(PATHS, places, before, strict=True)
        return [path for path, at, old in found if not check(*at, getattr(*at), old)]

    return find


def signature(function):
    try:
        return inspect.signature(function)
    except ValueError:  # a builtin
        return None


def has_its_name(place, name, found, before):
    module = "torch" if place is torch.Tensor else place.__name__
    qualname = f"Tensor.{name}" if place is torch.Tensor else name
    return (found.__module__, found.__qualname__) == (module, qualname)


CHECKS = {
    "differs from the original": lambda place, name, found, before: found is not before and found != before,
    "is a plain function": lambda place, name, found, before: inspect.isfunction(found),
    "bears the name of its place": has_its_name,
    "pickles to itself": lambda place, name, found, before: pickle.loads(pickle.dumps(found)) is found,
    "copies to itself": lambda place, name, found, before: copy.deepcopy(found) is found,
    "has the documentation": lambda place, name, found, before: found.__doc__ == before.__doc__,
    "has the signature": lambda place, name, found, before: signature(before) in (None, signature(found)),
}


def test_every_row_is_patched_by_what_passes_for_the_original(faults):
    assert {said: faults(check) for said, check in CHECKS.items()} == {said: [] for said in CHECKS}


# ---- out= ----


A = full(3, 3)
WITH_OUT = {
    "mm by keywords": lambda out: torch.mm(input=A, mat2=A, out=out),
    "lerp": lambda out: torch.lerp(A, A + 1, 0.5, out=out),
    "linalg.cross": lambda out: torch.linalg.cross(A, A, out=out),
}


def test_a_call_with_out_gives_the_float32_that_it_is_asked_for():
    def run():
        for name, call in WITH_OUT.items():
            out = torch.empty(3, 3)
            assert call(out) is out, name
            yield out

    expected = list(run())
    open_session()
    assert list(map(torch.equal, run(), expected)) == [True] * len(WITH_OUT)


BLACKLISTED_WITH_OUT = {
    "exp": lambda x, **out: torch.exp(x, **out),
    "pow of two tensors": lambda x, **out: torch.pow(x, x, **out),
    "sum": lambda x, **out: torch.sum(x, 0, **out),
    "cumsum": lambda x, **out: torch.cumsum(x, dim=0, **out),
    "norm": lambda x, **out: torch.norm(x, p=3, dim=1, **out),
    "linalg.norm": lambda x, **out: torch.linalg.norm(x, **out),
    "logsumexp": lambda x, **out: torch.logsumexp(input=x, dim=0, **out),
}


@pytest.mark.exhaustive(keep=8)
@pytest.mark.parametrize("dtype", [FULL, torch.float16, HALF], ids=str)
@pytest.mark.parametrize("call", BLACKLISTED_WITH_OUT.values(), ids=BLACKLISTED_WITH_OUT)
def test_what_a_blacklisted_function_writes_into_out_is_computed_in_float32_and_rounded_once(call, dtype):
    x = torch.linspace(5, 12, 9).reshape(3, 3).half()
    expected = call(x.float()).to(dtype)
    open_session(opt_level="O1")
    out = torch.empty_like(expected)
    alias = out.view(-1)
    assert call(x, out=out) is out
    assert torch.equal(alias, expected.view(-1))
    assert torch.equal(call(x, out=torch.empty(0, dtype=dtype)), expected)  # resized, as by torch


def test_a_function_with_out_may_write_over_what_it_reads():
    x = half(3)
    expected = x.float().exp().to(HALF)
    open_session()
    assert torch.equal(torch.exp(x, out=x), expected)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        torch.exp(x, out=half(3).requires_grad_() * 1)


def test_a_keyword_that_is_none_says_nothing():
    open_session()
    assert torch.mm(full(2, 3), full(3, 4), out=None).dtype is HALF
    assert F.softmax(half(2, 3), -1, dtype=None).dtype is FULL


# ---- Softmax, whose kernels take half ----

Y, W = torch.tensor([[0, 5], [2, 1], [4, 4]]), torch.rand(6) + 0.5
ON_LOGITS = {
    "loss": lambda x: F.cross_entropy(x, Y),
    "weight": lambda x: F.cross_entropy(x, Y, W, reduction="sum", ignore_index=4),
    "by position": lambda x: F.cross_entropy(x, Y, W, None, 4, None, "none", 0.0),
    "legacy": lambda x: nn.CrossEntropyLoss(size_average=False)(x, Y),
    "one sample": lambda x: F.cross_entropy(x[0, :, 0], Y[0, 0]),
    "smooth": lambda x: F.cross_entropy(x, Y, label_smoothing=0.1),
    "smooth by position": lambda x: F.cross_entropy(x, Y, None, None, 4, None, "mean", 0.1),
    "probabilities": lambda x: F.cross_entropy(x, torch.softmax(x.detach(), 1)),
    "by names": lambda x: F.cross_entropy(input=x, target=Y),
    "softmax": lambda x: F.softmax(x, 1),
    "method": lambda x: x.log_softmax(dim=-1),
    "function": lambda x: torch.log_softmax(x, 0),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
@pytest.mark.parametrize("call", ON_LOGITS.values(), ids=ON_LOGITS)
def test_a_softmax_of_half_logits_has_the_bits_of_one_of_their_float32_copy(monkeypatch, call):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(kernels, "_is_read", lambda tensor: tensor.dtype is torch.float16)
    open_session(nn.Linear(2, 2), "O1")
    logits = torch.randn(3, 6, 2, dtype=torch.float16, requires_grad=True)
    results = []
    for x in (logits, logits.float()):
        result = call(x)
        results += [result, *torch.autograd.grad(result.sum(), logits)]
    assert [it.dtype for it in results] == [FULL, torch.float16] * 2
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    with amp.disable_casts():
        assert F.softmax(logits, 1).dtype is torch.float16
    with pytest.raises(TypeError):
        F.softmax(dim=1)


@pytest.mark.parametrize("name", ["cross_entropy", "softmax"])
def test_what_a_script_has_put_in_the_place_of_a_softmax_is_called_as_before(monkeypatch, name):
    calls = []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(kernels, "_is_read", lambda tensor: True)
    monkeypatch.setattr(F, name, lambda x, other: calls.append(x.dtype))
    open_session(nn.Linear(2, 2), "O1")
    getattr(F, name)(torch.randn(3, 6, dtype=torch.float16), torch.ones((), dtype=torch.long))
    assert calls == [FULL]


# ---- dtype= ----


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


WITH_DTYPE = {
    "softmax": lambda x, dtype: F.softmax(x, -1, dtype=dtype),
    "log_softmax": lambda x, dtype: torch.log_softmax(x, -1, dtype=dtype),
    "sum": lambda x, dtype: x.sum(dtype=dtype),
    "cumsum": lambda x, dtype: torch.cumsum(x, 0, dtype=dtype),
    "vector_norm": lambda x, dtype: torch.linalg.vector_norm(x, dtype=dtype),
}


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
@pytest.mark.parametrize("call", WITH_DTYPE.values(), ids=WITH_DTYPE)
def test_a_call_that_says_its_dtype_is_left_alone(call, dtype):
    x = half(2, 3)
    with Ops() as plain:
        expected = call(x, dtype)
    open_session()
    with Ops() as patched:
        found = call(x, dtype)
    assert patched.names == plain.names
    assert found.dtype is expected.dtype is dtype
    assert torch.equal(found, expected)


# ---- In place ----

ARGUMENTS = {
    **dict.fromkeys(("pow_", "__ipow__"), (3,)),
    "cumsum_": (0,),
    "cumprod_": (0,),
    "renorm_": (2, 0, 1.0),
}
each_blacklisted = parametrize_rows(cast=FP32_INPLACE)


def in_place(path, tensor):
    return pkgutil.resolve_name(path)(tensor, *ARGUMENTS.get(path.rpartition(".")[2], ()))


def run_in_place(path, leaf, dtype):
    """The result of a function in place on a product of a leaf, in a type, and the gradients of the leaf."""
    tensor = (leaf * 1).to(dtype)
    assert in_place(path, tensor) is tensor
    result = (tensor * 1).to(leaf.dtype)
    return result, torch.autograd.grad(result.sum(), leaf)[0]


def test_a_blacklisted_function_in_place_works_on_full_tensors():
    def run():
        for path, _ in each_blacklisted.args[1]:
            x = torch.eye(2) / 2 + 0.25
            assert in_place(path, x) is x, path
            yield path, x.tolist()

    expected = dict(run())
    assert {"torch.Tensor.exp_", "torch.Tensor.pow_", "torch.exp_", "torch.Tensor.__ipow__"} <= set(expected)
    open_session()
    assert dict(run()) == expected


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_blacklisted_function_in_place_rounds_what_float32_gives_once_into_a_half_tensor(opt_level):
    leaves = [
        (torch.rand(3, 4) * 0.9).to(LEVELS[opt_level]).requires_grad_() for _ in each_blacklisted.args[1]
    ]
    paths = [path for path, _ in each_blacklisted.args[1]]
    expected = [run_in_place(path, leaf, FULL) for path, leaf in zip(paths, leaves, strict=True)]
    open_session(opt_level=opt_level)
    for path, leaf, (value, grad) in zip(paths, leaves, expected, strict=True):
        found = run_in_place(path, leaf, LEVELS[opt_level])
        assert torch.equal(found[0], value), path
        assert torch.equal(found[1], grad), path
        with torch.no_grad():
            whole = leaf.detach().clone()
            alias, row = whole.view(-1), whole[1:]
            in_place(path, whole)
            assert torch.equal(alias, value.view(-1)), path  # and who holds the memory sees it
            assert torch.equal(row, value[1:]), path


def test_a_leaf_that_wants_a_gradient_is_not_written_in_place():
    leaf = half(2).requires_grad_()
    before = leaf.detach().clone()
    open_session()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
        leaf.exp_()
    assert torch.equal(leaf.detach(), before)


@shows("o1-in-place")
def test_through_apex_a_blacklisted_function_in_place_raises_on_float16_and_leaves_it_alone():
    apex.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    for path, row in each_blacklisted.args[1]:
        tensor = torch.rand(2, 2).half()
        before = tensor.clone()
        if row.name != "__ipow__":
            message = rf"\b{row.name}\b.*torch\.float16.*use {row.name[:-1]},"
            with pytest.raises(amp.BannedFunctionError, match=message):
                in_place(path, tensor)
        assert torch.equal(tensor, before)
    amp.uninitialize()
    open_session(opt_level="O1")
    assert tensor.exp_() is tensor  # ours again
    amp.uninitialize()
    apex.initialize(nn.Linear(2, 2), opt_level="O4", verbosity=0)
    assert (bfloat16 := tensor.bfloat16()).exp_() is bfloat16


@shows("o1-in-place-power")
def test_through_apex_the_operator_for_a_power_in_place_gives_the_power_in_float32():
    apex.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    x = alias = torch.tensor([300.0, 1e-4]).half()
    x **= 2
    assert torch.equal(x, alias.float() ** 2)
    assert torch.equal(alias, torch.tensor([300.0, 1e-4]).half())
    with amp.disable_casts():
        alias **= 2
    assert alias.dtype is torch.float16


def test_a_function_in_place_leaves_the_cast_of_a_parameter_alone():
    weight = torch.nn.Parameter(half(2).fill_(3.0), requires_grad=False)
    open_session()
    assert torch.equal(weight.exp(), weight.float().exp())  # keeps its cast
    with torch.no_grad():
        cast = weight.sum(0, keepdim=True)
        weight **= 2
    assert torch.equal(weight, half(2).fill_(9.0))
    assert torch.equal(weight.sum(), torch.tensor(18.0))
    assert torch.equal(cast, torch.tensor([6.0]))


ROWS_0_AND_2, LIST, ALL = torch.tensor([0, 2]), [0, 2], slice(None)
ZEROS = torch.zeros(1, 4, dtype=torch.long)
MASK = torch.eye(4).bool()
# What PyTorch's database of ops lacks, and one that it has: test_op_db_on_cpu.py has the others.
MATCHING = {
    "torch.addmv_": ("torch.addmv_", full(4), full(4, 3), full(3)),
    "lerp_": ("torch.Tensor.lerp_", full(4, 4), full(4, 4), 0.5),
    "torch.index_put_": ("torch.index_put_", full(4, 4), (ROWS_0_AND_2,), full(2, 4)),
    "scatter_ by keyword": (lambda x, src: x.scatter_(dim=0, index=ZEROS, src=src), full(4, 4), full(1, 4)),
    "x[mask] = y": (lambda x, y: operator.setitem(x, MASK, y), full(4, 4), full(4)),
    "x[indices] = y": (lambda x, y: operator.setitem(x, ROWS_0_AND_2, y), full(4, 4), full(2, 4)),
    "x[indices, slice] = y": (lambda x, y: operator.setitem(x, (LIST, ALL), y), full(4, 4), full(2, 4)),
    "x[slice] = y": (lambda x, y: operator.setitem(x, slice(0, 2), y), full(4, 4), full(2, 4)),
    "+=": (operator.iadd, full(4, 4), full(4, 4)),
}
PROMOTED_BY_TORCH = ("x[slice] = y", "+=")


@shows("o1-in-place-mixed")
@pytest.mark.exhaustive(keep=8)
@pytest.mark.parametrize("name", MATCHING)
def test_a_function_in_place_on_mixed_types_follows_self(name):
    expected = None if name in PROMOTED_BY_TORCH else MATCH_SELF
    assert_casts(*MATCHING[name], expect=expected, opt_level="O4")


def test_setitem_of_numbers_and_of_integer_tensors_works():
    open_session()
    x, ids = full(4), torch.arange(4)
    x[ids > 1] = 3.0
    ids[ids > 1] = torch.tensor([7, 8])
    assert x.tolist()[2:] == [3.0, 3.0]
    assert ids.tolist() == [0, 1, 7, 8]


# ---- Banned ----


def probabilities(dtype):
    return torch.rand(4).clamp(0.1, 0.9).to(dtype)


@shows("o1-banned")
def test_binary_cross_entropy_on_half_raises_and_points_to_the_logits_form():
    open_session()
    message = r"binary_cross_entropy was called on .*binary_cross_entropy_with_logits.*allow_banned=True"
    with pytest.raises(NotImplementedError, match=message):
        nn.BCELoss()(probabilities(HALF), torch.ones(4))


@shows("o1-allow-banned", "never-allow-banned")
@pytest.mark.parametrize("options", [{}, {"allow_banned": True}], ids=["refused", "allowed"])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_binary_cross_entropy_runs_in_float32_or_not_at_all(opt_level, options):
    given = probabilities(FULL), probabilities(FULL)
    assert_casts(F.binary_cross_entropy, *given, expect=BANNED, opt_level=opt_level, options=options)


# ---- Devices ----


def test_tensors_are_cast_on_the_devices_of_models_alone():
    open_session()
    a = torch.empty(2, 3, device="meta")
    assert torch.mm(a, a.T).dtype is FULL
    assert a.to(HALF).exp_().dtype is torch.exp(a.to(HALF)).dtype is HALF
    with FakeTensorMode():
        a = torch.empty(2, 3, device="cuda")
        assert torch.mm(a, a.T).dtype is FULL
        model = nn.Linear(2, 3)
        assert [model(torch.empty(4, 2)).dtype for _ in range(2)] == [HALF, HALF]


def test_a_second_model_adds_its_device():
    open_session()
    amp.initialize(nn.Linear(2, 2, device="meta"), opt_level="O4", verbosity=0)
    assert torch.mm(torch.empty(2, 3, device="meta"), torch.empty(3, 2, device="meta")).dtype is HALF
    assert torch.mm(full(2, 3), full(3, 2)).dtype is HALF


def test_a_model_moved_after_initialize_takes_its_casts_along():
    model = open_session(nn.Linear(2, 2))
    model.to("meta")
    assert model(torch.empty(3, 2, device="meta")).dtype is HALF


# ---- Operators ----


def test_an_operand_that_torch_does_not_know_gets_its_turn():
    class Other:
        def __rmatmul__(self, left):
            return "right"

        def __rpow__(self, left):
            return "power"

    open_session()
    assert full(2, 2) @ Other() == "right"
    assert full(2) ** Other() == "power"


def test_wrong_operands_raise_what_torch_raises():
    open_session()
    for call in (lambda: full(2) @ "a", lambda: torch.mm(full(2, 3), full(2, 3)), lambda: torch.exp_([1.0])):
        with pytest.raises((TypeError, RuntimeError)) as found:
            call()
        with amp.disable_casts(), pytest.raises(found.type) as expected:
            call()
        assert str(found.value) == str(expected.value)
