"""Patched functions on a CPU against torch.autocast's CUDA rules on fake tensors, and casts by hand."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from patched import FULL, LEVELS, open_session

pytestmark = pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")


# What the arguments are cast to: stated here by hand, apart from the tables.
LOWER, FP32, PROMOTE, NATIVE = "lower", "fp32", "promote", "native"


class Make:
    """Makes the arguments of a call, alike in every run: tensors of `dtypes` in turn.

    `then` casts them once more, which is the cast by hand. On the fake device they have no values.
    """

    def __init__(self, dtypes, then=None, device="cpu"):
        self.dtypes, self.then, self.device = itertools.cycle(dtypes), then, device
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, *shape):
        dtype = next(self.dtypes)
        if self.device != "cpu":
            return torch.empty(shape, dtype=dtype, device=self.device)
        values = (0.1 + 0.8 * torch.rand(shape, generator=self.generator)).to(dtype)
        return values if self.then is None else values.to(self.then)

    def ints(self, *shape, high):
        count = math.prod(shape)
        return (torch.arange(count, device=self.device) % high).reshape(shape)


# A few of each kind, and each form that PyTorch's database of ops lacks: test_op_db.py has the others.
CALLS = {
    # name: (cast, call of a Make)
    "conv2d": (LOWER, lambda t: F.conv2d(t(1, 2, 5, 5), t(3, 2, 3, 3), t(3))),
    "conv1d by keywords": (LOWER, lambda t: F.conv1d(input=t(1, 2, 5), weight=t(3, 2, 3), bias=t(3))),
    "conv_tbc": (LOWER, lambda t: F.conv_tbc(t(5, 1, 2), t(3, 2, 3), t(3))),
    "linear": (LOWER, lambda t: F.linear(t(2, 3), t(4, 3), t(4))),
    "sdpa": (LOWER, lambda t: F.scaled_dot_product_attention(t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8))),
    "matmul": (LOWER, lambda t: torch.matmul(t(2, 3), t(3, 4))),
    "a @ b": (LOWER, lambda t: t(2, 3) @ t(3, 4)),
    "mm by keywords": (LOWER, lambda t: torch.mm(input=t(2, 3), mat2=t(3, 4))),
    "chain_matmul": (LOWER, lambda t: torch.chain_matmul(t(2, 3), t(3, 4), t(4, 2))),
    "multi_dot": (LOWER, lambda t: torch.linalg.multi_dot([t(2, 3), t(3, 4), t(4, 2)])),
    "einsum of a list": (LOWER, lambda t: torch.einsum("ij,jk->ik", [t(2, 3), t(3, 4)])),
    "einsum by sublists": (LOWER, lambda t: torch.einsum(t(2, 3), [0, 1], t(3, 4), [1, 2], [0, 2])),
    "softmax": (FP32, lambda t: F.softmax(t(2, 3), dim=1)),
    "torch.softmax": (FP32, lambda t: torch.softmax(input=t(2, 3), dim=1)),
    "Tensor.softmax": (FP32, lambda t: t(2, 3).softmax(dim=-1)),
    "cross_entropy with weights": (
        FP32,
        lambda t: F.cross_entropy(t(2, 3), t.ints(2, high=3), weight=t(3), label_smoothing=0.1),
    ),
    "bce_with_logits": (FP32, lambda t: F.binary_cross_entropy_with_logits(t(2, 3), t(2, 3))),
    "interpolate bilinear": (FP32, lambda t: F.interpolate(t(1, 1, 2, 2), size=(4, 4), mode="bilinear")),
    "exp": (FP32, lambda t: torch.exp(t(3))),
    "Tensor.exp": (FP32, lambda t: t(3).exp()),
    "pow of two tensors": (FP32, lambda t: torch.pow(t(3), t(3))),
    "x ** 2": (FP32, lambda t: t(3) ** 2),
    "2 ** x": (FP32, lambda t: 2 ** t(3)),
    "1 / x": (FP32, lambda t: 1 / t(3)),
    "Tensor.sum": (FP32, lambda t: t(2, 3).sum(dim=1, keepdim=True)),
    "linalg.norm": (FP32, lambda t: torch.linalg.norm(t(2, 3))),
    "dot": (PROMOTE, lambda t: torch.dot(input=t(3), tensor=t(3))),
    "index_put": (PROMOTE, lambda t: t(4).index_put((t.ints(2, high=4),), t(2))),
    "add": (NATIVE, lambda t: t(3) + t(3)),
    "cat": (NATIVE, lambda t: torch.cat([t(2, 3), t(2, 3)])),
    "where": (NATIVE, lambda t: torch.where(t.ints(3, high=2) > 0, t(3), t(3))),
    "gelu": (NATIVE, lambda t: F.gelu(t(3))),
    "batch_norm": (NATIVE, lambda t: F.batch_norm(t(2, 3), torch.zeros(3), torch.ones(3))),
    "embedding": (NATIVE, lambda t: F.embedding(t.ints(3, high=2), t(2, 4))),
}


def input_dtypes(half):
    return {
        "float32": (FULL,),
        "half": (half,),
        "float32 first": (FULL, half),
        "half first": (half, FULL),
    }


def dtypes_of(result):
    return [leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def ask_autocast(call, dtypes, half):
    """The dtypes that torch.autocast gives on a CUDA device, which need not be there, or None."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", half)
    try:
        with FakeTensorMode(), torch.device("cuda"):
            return dtypes_of(call(Make(dtypes, device="cuda")))
    except RuntimeError as error:
        if "CUDA driver version is insufficient" not in str(error):
            raise
        return None  # a torch built for CUDA asks the driver for the kernel
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
        torch.clear_autocast_cache()


@pytest.mark.parametrize("opt_level", LEVELS)
def test_results_have_the_dtypes_that_autocast_gives(opt_level):
    half = LEVELS[opt_level]
    calls = {name: call for name, (_, call) in CALLS.items()}
    inputs = [(name, dtypes) for name in calls for dtypes in input_dtypes(half).values()]
    expected = {given: ask_autocast(calls[given[0]], given[1], half) for given in inputs}
    expected = {given: dtypes for given, dtypes in expected.items() if dtypes is not None}
    open_session(opt_level=opt_level)
    assert {(name, dtypes): dtypes_of(calls[name](Make(dtypes))) for name, dtypes in expected} == expected


def is_same(found, expected):
    """Whether dtypes and bits are the same."""
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    return all(mine.dtype is theirs.dtype and torch.equal(mine, theirs) for mine, theirs in pairs)


def cast_by_hand(cast, dtypes, half):
    """The dtype that every floating argument is brought to; None leaves them."""
    if cast == LOWER:
        return half
    if cast == FP32 or (cast == PROMOTE and FULL in dtypes):
        return FULL
    return None


def test_results_are_those_of_the_function_on_arguments_cast_by_hand():
    half = torch.bfloat16
    inputs = [(name, dtypes) for name in CALLS for dtypes in input_dtypes(half).values()]
    expected = []
    for name, dtypes in inputs:
        cast, call = CALLS[name]
        expected.append(call(Make(dtypes, then=cast_by_hand(cast, dtypes, half))))
    open_session(opt_level="O4")
    found = [CALLS[name][1](Make(dtypes)) for name, dtypes in inputs]
    same = map(is_same, found, expected)
    assert [given for given, is_right in zip(inputs, same, strict=True) if not is_right] == []
