"""Patched torch against torch.autocast's own CUDA rules, over PyTorch's OpInfo database on fake CUDA tensors.

A pair is an op of the database, variant included, with one type of inputs. Its result is the types of
what its first calls return; "raises" is a result, too. Not compared are calls that torch refuses for their
type both without any cast and under autocast: there is no type to agree with. We run some in float32.

Every exception stands in `lists.DIFFERENT_FROM_AUTOCAST`, and every entry there is seen to be one. In-place
forms of functions that run in float32 raise on a half tensor, by design: the tables say which.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import ampatch as amp
from ampatch import lists
from helpers import torch_is_before
from op_samples import FULL, OPS, calls_of, forms_of, full_name, map_tensors
from patched import autocast_for_cuda

pytestmark = [
    pytest.mark.exhaustive(keep=0),  # test_casts_against_autocast and others stand for it in the short suite
    pytest.mark.filterwarnings("ignore:.*:"),  # ops that warn of their age or of their experiments
]
COUNT = 2  # calls of an op: all of them take minutes, and differ in few ops
HALF = torch.float16  # O4 has the same rows
RAISES = "raises"
EXCEPTIONS = dict(lists.DIFFERENT_FROM_AUTOCAST)
if torch_is_before("2.13"):
    EXCEPTIONS["nn.functional.rms_norm"] = "float32 as from torch 2.13 on, when autocast knows it"
if torch_is_before("2.11"):
    EXCEPTIONS["ldexp"] = "autocast gives float32 there, because torch computed it by way of pow"

# `test_wrapper.py` has these; `operator.ipow` is the form of a power.
FP32_IN_PLACE = {
    f"{table.target.removeprefix('torch.')}.{row.name}" if table.target == "torch.Tensor" else row.name
    for table in lists.TABLES
    for row in table.rows
    if row.cast.name == "FP32_INPLACE"
} | {"ipow"}


@dataclass(frozen=True)
class Case:
    """One form of an op with one type of inputs, and the types of what its calls returned."""

    op: str
    form: str
    is_main: bool
    dtype: torch.dtype
    results: list  # of each call: in plain torch, under autocast, patched

    @property
    def compared(self):
        """The calls that torch takes, or autocast does."""
        return [found for found in self.results if found[:2] != (RAISES, RAISES)]

    @property
    def agrees(self):
        return all(theirs == ours for _, theirs, ours in self.compared)

    @property
    def is_changed(self):
        """Whether autocast gives other types than plain torch in a call that it takes."""
        return any(plain != theirs for plain, theirs, _ in self.results if theirs != RAISES)


def fake(call, dtype):
    """The same call with fake CUDA tensors, of `dtype` where they were float32."""

    def convert(tensor):
        new = dtype if tensor.dtype is FULL else tensor.dtype
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=new, device="cuda")

    return map_tensors(convert, call)


def result_of(function, call, dtype):
    args, kwargs = fake(call, dtype)
    try:
        leaves = tree_leaves(function(*args, **kwargs))
    except Exception:  # whatever an op raises
        return RAISES
    return tuple(leaf.dtype if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves)


@pytest.fixture(scope="module")
def cases():
    """Every form of the database's ops, in both types."""
    samples = [(op, calls_of(op, COUNT)) for op in OPS]
    forms = [(op, calls, at, form) for op, calls in samples for at, form in enumerate(forms_of(op))]
    mode, found = FakeTensorMode(), []

    def run(dtype, column):
        with torch.no_grad(), mode, torch.device("cuda"):
            return [[result_of(form[column], call, dtype) for call in calls] for _, calls, _, form in forms]

    for dtype in (FULL, HALF):
        plain = run(dtype, 1)
        with autocast_for_cuda(HALF):
            theirs = run(dtype, 1)
        with mode:  # the model's weights are fake, too
            amp.initialize(nn.LayerNorm(1, device="cuda"), opt_level="O1", verbosity=0)
        ours = run(dtype, 2)
        amp.uninitialize()
        for (op, _, at, (name, *_)), *results in zip(forms, plain, theirs, ours, strict=True):
            found.append(Case(full_name(op), name, at == 0, dtype, list(zip(*results, strict=True))))
    return found


def pairs_in(cases):
    return [case for case in cases if case.is_main and case.compared]


def test_nearly_all_of_the_pairs_have_the_types_that_autocast_gives(cases):
    pairs = pairs_in(cases)
    changed = [case for case in pairs if case.is_changed]
    assert len(pairs) > 1200
    assert len(changed) > 100
    assert sum(case.agrees for case in pairs) >= 0.99 * len(pairs)
    assert sum(case.agrees for case in changed) >= 0.98 * len(changed)


def test_every_exception_is_named_with_its_reason_and_every_named_one_is_an_exception(cases):
    assert {case.op for case in pairs_in(cases) if not case.agrees} == set(EXCEPTIONS)
    assert all(len(reason.split()) > 3 for reason in EXCEPTIONS.values())


def test_every_other_name_of_an_op_agrees_as_well(cases):
    others = [case for case in cases if not case.is_main and case.compared]
    assert len(others) > 1000
    # What fake CUDA tensors cannot do without CUDA: a copy from one type to another.
    copied = {case.form for case in others if case.form in FP32_IN_PLACE}
    wrong = {case.form for case in others if not case.agrees and case.op not in EXCEPTIONS}
    assert wrong - copied == set()
    assert all(case.agrees for case in others if case.form in copied and case.dtype is FULL)


def test_what_torch_and_autocast_refuse_runs_in_float32_or_is_refused_here_too(cases):
    refused = [found for case in cases for found in case.results if found[:2] == (RAISES, RAISES)]
    taken = [ours for _, _, ours in refused if ours != RAISES]
    assert taken
    assert not [result for result in taken if HALF in result]
