"""The cast tables against torch.autocast: its lists in the installed header, its rules on fake tensors."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only

from ampatch import lists
from ampatch.table import FP32, LOWER, PROMOTE
from helpers import torch_is_before
from op_samples import calls_of, full_name

CASTS = {
    (table.target, row.name): row.cast
    for table in lists.TABLES
    for row in table.select(torch.__version__).rows
}
HALF, FULL = torch.float16, torch.float32


# ---- torch.autocast's lists, in the installed header ----

HEADER = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
POLICIES = {
    "LOWER_PRECISION_FP": {LOWER},
    "FP32": {FP32},
    "FP32_SET_OPT_DTYPE": {FP32},
    "DIFFERENT_REDISPATCH_SIGNATURE": {FP32},
    "PROMOTE": {PROMOTE},
}


def autocast_ops():
    for policy in POLICIES:
        macro = re.search(rf"#define AT_FORALL_{policy}\(_\)(.*?[^\\])\n", HEADER, re.DOTALL)[1]
        names = re.findall(r"_\((?:ADD_NS\()?(\w+)", macro)
        yield from ((policy, name) for name in dict.fromkeys(names))


AUTOCAST_OPS = list(autocast_ops())


def test_every_list_of_the_header_is_read():
    lists_in_header = set(re.findall(r"#define AT_FORALL_(\w+)\(", HEADER))
    deprecated = {"DEPRECATED_AUTOCAST_BACKENDS", "DEPRECATED_AUTOCAST_BAKCNEDS"}  # as torch 2.6 spells it
    assert lists_in_header - deprecated == set(POLICIES)


def test_every_op_of_the_lists_is_read():
    begins = HEADER.index("#define AT_FORALL_LOWER_PRECISION_FP")
    entries = re.findall(r"^ +_\(\s*(?:\\\s*)?(?:ADD_NS\()?(\w+)", HEADER[begins:], re.MULTILINE)
    assert len(entries) >= 100
    assert {op for _, op in AUTOCAST_OPS} == set(entries)


def casts_of(op):
    """The casts of the rows of an op of autocast's; one of torch.sparse is another one by the same name."""
    name = op.removeprefix("linalg_")
    return {cast for (target, listed), cast in CASTS.items() if listed == name and target != "torch.sparse"}


def test_an_op_that_autocast_lists_has_that_cast_here_or_a_reason_why_not():
    excused = dict(lists.AUTOCAST_WITHOUT_ROW)
    expected = {op: set() if op in excused else POLICIES[policy] for policy, op in AUTOCAST_OPS}
    assert {op: casts_of(op) for op in expected} == expected


def test_the_deliberate_differences_are_ops_that_autocast_lists():
    assert set(dict(lists.AUTOCAST_WITHOUT_ROW)) <= {op for _, op in AUTOCAST_OPS}
    assert all(reason for _, reason in lists.AUTOCAST_WITHOUT_ROW)


# ---- torch.autocast itself, on fake CUDA tensors ----

# test_op_db.py asks the patched functions; here the rows are asked, and with arguments of mixed types.
NO_ORACLE = {
    "allclose": "returns a truth value, which fake tensors do not have",
    "nn.functional.ctc_loss": "reads lengths, which a fake tensor does not have",
    "nn.functional.gaussian_nll_loss": "reads the variance, which a fake tensor does not have",
    "nn.functional.grid_sample": "the kernel asks for cuDNN, which a build for CPUs lacks",
    "grid_sampler_2d": "the kernel asks for cuDNN, which a build for CPUs lacks",
    "nn.functional.interpolate.area": "autocast leaves this mode in half, unlike every other mode",
    "nn.functional.linear_cross_entropy": "calls functions which have rows",
    "nn.functional.linear_cross_entropy.chunked": "calls functions which have rows",
    "nn.functional.linear_cross_entropy.chunked_none": "calls functions which have rows",
}
if torch_is_before("2.13"):
    NO_ORACLE["nn.functional.rms_norm"] = "autocast knows it from torch 2.13 on"
if torch_is_before("2.9"):
    NO_ORACLE["nn.functional.scaled_dot_product_attention"] = (
        "a build for CUDA asks the driver for the kernel"
    )
OPS = [op for op in op_db if not op.name.startswith(("_refs.", "ops.", "torch.", "fft."))]


def path_of(op):
    """Returns the target and the name of the op that torch's own tests call "linalg.norm"."""
    module, _, name = op.name.rpartition(".")
    if module:
        return f"torch.{module}", name
    return "torch" if ("torch", name) in CASTS else "torch.Tensor", name


def fake(value, dtypes):
    """Returns `value` with fake CUDA tensors of the next of `dtypes` for float32 tensors."""
    dtypes = itertools.cycle(dtypes)

    def convert(tensor):
        dtype = next(dtypes) if tensor.dtype is FULL else tensor.dtype
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cuda")

    return tree_map_only(torch.Tensor, convert, value)


def cast_by_hand(cast, value):
    dtypes = [leaf.dtype for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    dtype = {LOWER: HALF, FP32: FULL, PROMOTE: FULL if FULL in dtypes else HALF}[cast]
    cast_tensor = lambda t: t.to(dtype) if t.dtype in (HALF, FULL) else t
    return tree_map_only(torch.Tensor, cast_tensor, value)


def result_dtypes(op, args, kwargs):
    """Returns the dtypes of the results, or None for a call that torch refuses."""
    try:
        results = tree_leaves(op.op(*args, **kwargs))
    except Exception:
        return None
    return [leaf.dtype for leaf in results if isinstance(leaf, torch.Tensor)]


def autocast_dtypes(op, args, kwargs):
    """Returns the same under autocast, by its switch: torch.autocast needs a GPU to be on."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", HALF)
    try:
        return result_dtypes(op, args, kwargs)
    finally:
        torch.set_autocast_enabled("cuda", False)


ORACLE_OPS = [
    op for op in OPS if CASTS.get(path_of(op)) in (LOWER, FP32, PROMOTE) and full_name(op) not in NO_ORACLE
]


@pytest.mark.exhaustive(keep=8)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", ORACLE_OPS, ids=full_name)
def test_a_row_gives_the_dtypes_that_autocast_gives(op):
    cast = CASTS[path_of(op)]
    patterns = [[HALF], [FULL]]
    # Without a rule of autocast a fake tensor may take mixed dtypes that a real one refuses.
    if op.name.removeprefix("nn.functional.").replace(".", "_") in dict(map(reversed, AUTOCAST_OPS)):
        patterns += [[HALF, FULL], [FULL, HALF]]
    compared = 0
    for call, pattern in itertools.product(calls_of(op, 3), patterns):
        with FakeTensorMode():
            args, kwargs = fake(call, pattern)
            expected = autocast_dtypes(op, args, kwargs)
            if expected is not None:
                assert result_dtypes(op, *cast_by_hand(cast, (args, kwargs))) == expected
                compared += 1
    assert compared
