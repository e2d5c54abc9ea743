"""Patched functions on a CPU against torch.autocast's CUDA rules on fake tensors."""

import itertools
import math
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from patched import FULL, LEVELS, autocast_for_cuda, open_session

pytestmark = pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")


class Make:
    """Makes the arguments of a call: tensors of `dtypes` in turn."""

    def __init__(self, dtypes, device="cpu"):
        self.dtypes, self.device = itertools.cycle(dtypes), device

    def __call__(self, *shape):
        return torch.full(shape, 0.5, dtype=next(self.dtypes), device=self.device)

    def ints(self, *shape, high):
        count = math.prod(shape)
        return (torch.arange(count, device=self.device) % high).reshape(shape)


# A few of each kind, and each form that PyTorch's database of ops lacks: test_op_db.py has the others.
CALLS = {
    # name: call of a Make
    "conv2d": lambda t: F.conv2d(t(1, 2, 5, 5), t(3, 2, 3, 3), t(3)),
    "conv1d by keywords": lambda t: F.conv1d(input=t(1, 2, 5), weight=t(3, 2, 3), bias=t(3)),
    "conv_tbc": lambda t: F.conv_tbc(t(5, 1, 2), t(3, 2, 3), t(3)),
    "linear": lambda t: F.linear(t(2, 3), t(4, 3), t(4)),
    "sdpa": lambda t: F.scaled_dot_product_attention(t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8)),
    "matmul": lambda t: torch.matmul(t(2, 3), t(3, 4)),
    "a @ b": lambda t: t(2, 3) @ t(3, 4),
    "operator.matmul": lambda t: operator.matmul(t(2, 3), t(3, 4)),
    "a.mm(b)": lambda t: t(2, 3).mm(t(3, 4)),
    "Tensor.matmul by keyword": lambda t: Tensor.matmul(t(2, 3), other=t(3, 4)),
    "mm by keywords": lambda t: torch.mm(input=t(2, 3), mat2=t(3, 4)),
    "chain_matmul": lambda t: torch.chain_matmul(t(2, 3), t(3, 4), t(4, 2)),
    "multi_dot": lambda t: torch.linalg.multi_dot([t(2, 3), t(3, 4), t(4, 2)]),
    "einsum of a list": lambda t: torch.einsum("ij,jk->ik", [t(2, 3), t(3, 4)]),
    "einsum by sublists": lambda t: torch.einsum(t(2, 3), [0, 1], t(3, 4), [1, 2], [0, 2]),
    "softmax": lambda t: F.softmax(t(2, 3), dim=1),
    "torch.softmax": lambda t: torch.softmax(input=t(2, 3), dim=1),
    "Tensor.softmax": lambda t: t(2, 3).softmax(dim=-1),
    "cross_entropy with weights": lambda t: F.cross_entropy(
        t(2, 3), t.ints(2, high=3), weight=t(3), label_smoothing=0.1
    ),
    "bce_with_logits": lambda t: F.binary_cross_entropy_with_logits(t(2, 3), t(2, 3)),
    "interpolate bilinear": lambda t: F.interpolate(t(1, 1, 2, 2), size=(4, 4), mode="bilinear"),
    "exp": lambda t: torch.exp(t(3)),
    "Tensor.exp": lambda t: t(3).exp(),
    "pow of two tensors": lambda t: torch.pow(t(3), t(3)),
    "x ** y": lambda t: t(3) ** t(3),
    "pow": lambda t: pow(t(3), t(3)),
    "Tensor.pow by keyword": lambda t: Tensor.pow(t(3), exponent=t(3)),
    "x ** 2": lambda t: t(3) ** 2,
    "2 ** x": lambda t: 2 ** t(3),
    "1 / x": lambda t: 1 / t(3),
    "Tensor.sum": lambda t: t(2, 3).sum(dim=1, keepdim=True),
    "linalg.norm": lambda t: torch.linalg.norm(t(2, 3)),
    "dot": lambda t: torch.dot(input=t(3), tensor=t(3)),
    "index_put": lambda t: t(4).index_put((t.ints(2, high=4),), t(2)),
    "add": lambda t: t(3) + t(3),
    "cat": lambda t: torch.cat([t(2, 3), t(2, 3)]),
    "where": lambda t: torch.where(t.ints(3, high=2) > 0, t(3), t(3)),
    "gelu": lambda t: F.gelu(t(3)),
    "batch_norm": lambda t: F.batch_norm(t(2, 3), torch.zeros(3), torch.ones(3)),
    "embedding": lambda t: F.embedding(t.ints(3, high=2), t(2, 4)),
}


def dtypes_of(result):
    return [leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def ask_autocast(call, dtypes, half):
    """The dtypes that torch.autocast gives on a CUDA device, which need not be there, or None."""
    try:
        with autocast_for_cuda(half), FakeTensorMode(), torch.device("cuda"):
            return dtypes_of(call(Make(dtypes, device="cuda")))
    except RuntimeError as error:
        if "CUDA driver version is insufficient" not in str(error):
            raise
        return None  # a torch built for CUDA asks the driver for the kernel


@pytest.mark.parametrize("opt_level", LEVELS)
def test_results_have_the_dtypes_that_autocast_gives(opt_level):
    half = LEVELS[opt_level]
    inputs = list(itertools.product(CALLS, [(FULL,), (half,), (FULL, half), (half, FULL)]))
    expected = {given: ask_autocast(CALLS[given[0]], given[1], half) for given in inputs}
    expected = {given: dtypes for given, dtypes in expected.items() if dtypes is not None}
    open_session(opt_level=opt_level)
    assert {(name, dtypes): dtypes_of(CALLS[name](Make(dtypes))) for name, dtypes in expected} == expected
