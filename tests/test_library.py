"""Ops that are made with `torch.library`: they run as they are written, and their arguments may be cast."""

import itertools
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch as amp
from ampatch.table import Cast
from ampatch.testing import assert_casts
from patched import FULL, LEVELS, open_session

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")  # which inductor imports
SCHEMA = "(Tensor x, Tensor w) -> Tensor"
COUNT = itertools.count()
LIBRARY = torch.library.Library("ampatch_tests", "FRAGMENT")


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Op:
    """A product of matrices, and a softmax of half ones, as an op; `seen` are their types inside of it."""

    def __init__(self, write):
        self.seen, self.name = [], f"ampatch_tests::{write.__name__}{next(COUNT)}"
        self.made = write(self)
        packet = getattr(torch.ops.ampatch_tests, self.name.partition("::")[2])
        self.calls = [packet, packet.default, *([self.made] if self.made else [])]

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        self.seen += [y.dtype, torch.mm(x, w).dtype, F.softmax(y.half(), dim=0).dtype]
        return y

    def fake(self, x, w):
        self.seen += [(x @ w).dtype, torch.mm(x, w).dtype, F.softmax(x.half(), dim=0).dtype]
        return x.new_empty(x.shape[0], w.shape[1])

    def save(self, ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(self, ctx, grad):
        x, w = ctx.saved_tensors
        return self.product(grad, w.T), self.product(x.T, grad)

    def in_mode(self, mode, func, types, args, kwargs):
        return self.product(*args)

    def in_vmap(self, info, dims, x, w):
        self.seen += [torch.matmul(x, w).dtype, (x @ w).dtype, F.softmax(x.half(), dim=0).dtype]
        return x.matmul(w), 0


def custom_op(op):
    made = torch.library.custom_op(op.name, op.product, mutates_args=())
    made.register_fake(op.fake)
    made.register_autograd(op.backward, setup_context=op.save)
    made.register_vmap(op.in_vmap)
    made.register_torch_dispatch(Mode, op.in_mode)
    return made


def kernel_of_a_device(op):
    made = torch.library.custom_op(op.name, lambda x, w: 1 / 0, mutates_args=(), schema=SCHEMA)
    torch.library.register_kernel(op.name, "cpu", op.product)
    torch.library.register_fake(op.name, op.fake)
    torch.library.register_autograd(op.name, op.backward, setup_context=op.save)
    return made


def impl(op):
    torch.library.define(op.name, SCHEMA)
    torch.library.impl(op.name, "cpu", op.product)
    torch.library.register_fake(op.name, op.fake)
    torch.library.register_autograd(op.name, op.backward, setup_context=op.save)
    torch.library.register_torch_dispatch(op.name, Mode, op.in_mode)
    torch.library.register_vmap(op.name, op.in_vmap)


def composite(op):
    LIBRARY.define(op.name.partition("::")[2] + SCHEMA)
    LIBRARY.impl(op.name, op.product, "CompositeImplicitAutograd")


def triton_op(op):
    made = torch.library.triton_op(op.name, op.product, mutates_args=())
    made.register_autograd(op.backward, setup_context=op.save)
    return made


def compiled(backend):
    return lambda call, x, w: torch.compile(call, backend=backend, fullgraph=True)(x, w)


def mapped(call, x, w):
    with torch.no_grad():
        y = torch.vmap(call, (0, None))(x.expand(2, 3, 3), w)[0]
    return y + call(x, w)


def watched(call, x, w):
    with Mode():
        return call(x, w)


RUNS = {
    "eager": lambda call, x, w: call(x, w),
    "aot_eager": compiled("aot_eager"),
    "inductor": compiled("inductor"),
    "vmap": mapped,
    "dispatch mode": watched,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # 2.15 says so of composite ops
@pytest.mark.exhaustive(keep=4)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("write", [custom_op, kernel_of_a_device, impl, composite, triton_op])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("is_earlier", [True, False], ids=["made earlier", "made later"])
def test_an_op_runs_as_it_is_written_in_the_forward_and_the_backward(is_earlier, run, write, level):
    op = Op(write) if is_earlier else None
    open_session(opt_level=level)
    op = op or Op(write)
    for call in op.calls:
        torch._dynamo.reset()
        x, w = (torch.randn(3, 3, requires_grad=True) for _ in "xw")
        y = RUNS[run](call, x, w)
        y.sum().backward()
        assert [y.dtype, x.grad.dtype, w.grad.dtype] == [FULL] * 3
    triples = set(zip(*[iter(op.seen)] * 3, strict=True))  # of the types that each function saw
    assert triples == {(FULL, FULL, torch.float16)}
    assert (x @ w).dtype is LEVELS[level]


def test_an_op_that_raises_leaves_casts_on():
    op = Op(custom_op)
    open_session()
    with pytest.raises(RuntimeError, match="shape"):
        op.made(torch.ones(2, 3), torch.ones(2, 3))
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own look
@pytest.mark.parametrize("level", LEVELS)
def test_opcheck_finds_nothing_wrong_with_an_op(level):
    op = Op(custom_op)
    open_session(opt_level=level)
    torch.library.opcheck(op.made, (torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)))


@pytest.mark.parametrize("level", LEVELS)
def test_the_arguments_of_an_op_are_cast_where_it_is_registered(level, monkeypatch):
    op, x, w = Op(custom_op), torch.randn(3, 3), torch.randn(3, 3)
    assert_casts(op.made, x, w, expect=None, opt_level=level)
    assert_casts(amp.half_function(op.made), x, w, expect=Cast.LOWER, opt_level=level)
    monkeypatch.setitem(sys.modules, "ops_of_tests", module := ModuleType("ops_of_tests"))
    module.product = op.made
    amp.register_half_function(module, "product")
    assert_casts("ops_of_tests.product", x, w, expect=Cast.LOWER, opt_level=level)
    open_session(opt_level=level)
    call = torch.compile(lambda x, w: module.product(x, w), backend="aot_eager", fullgraph=True)
    assert call(x, w).dtype is LEVELS[level]
    amp.uninitialize()
    assert module.product is op.made


def test_uninitialize_leaves_of_the_calls_and_backwards_of_ops_nothing_behind():
    earlier, call = Op(custom_op), torch._ops.OpOverload.__call__
    open_session()
    later = Op(custom_op)
    amp.uninitialize()
    for kind in (torch._library.autograd.Info, torch._library.custom_ops.CustomOpDef):
        assert "_backward_fn" not in vars(kind)
    assert torch._ops.OpOverload.__call__ is call
    for op in (earlier, later):
        assert op.made._backward_fn == op.backward
