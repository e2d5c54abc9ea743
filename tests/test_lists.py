"""The cast tables against the installed torch: its names, its own promotion, and autocast's lists."""

import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest
import torch

from ampatch import lists
from ampatch.table import FP32, FP32_INPLACE, LOWER, PROMOTE, Cast, CastTable
from helpers import needs_torch

ROWS = [(table.target, row) for table in lists.TABLES for row in table.select(torch.__version__).rows]
CASTS = {(target, row.name): row.cast for target, row in ROWS}
HALF, FULL = torch.float16, torch.float32


def test_the_tables_agree_with_themselves_and_with_the_installed_torch():
    faults, casts, paths = [], {}, set()
    for target, row in ROWS + [
        ("torch.nn", row) for row in lists.MODULES_ON_CPU.select(torch.__version__).rows
    ]:
        path, function = f"{target}.{row.name}", getattr(pkgutil.resolve_name(target), row.name, None)
        if path in paths or not isinstance(row.cast, Cast):
            faults.append(path)
        if len(row.reason.splitlines()) != 1 or len(row.reason.split()) < 2 or row.reason.endswith("."):
            faults.append(path)  # a reason says more than the cast
        paths.add(path)
        if not callable(function) or casts.setdefault(id(function), row.cast) is not row.cast:
            faults.append(path)  # of two names of one function, too
    assert faults == []


def test_versions_of_a_row_are_versions_in_their_order():
    for table in (*lists.TABLES, lists.MODULES_ON_CPU):
        for row in table.rows:
            assert CastTable("", (row,)).select(row.since or "2.6").rows == (row,), row  # before `until`
            assert row.until is None or CastTable("", (row,)).select(row.until).rows == (), row


def test_a_name_has_the_same_cast_in_every_place():
    casts = {}
    for (target, name), cast in CASTS.items():
        if target != "torch.sparse":  # where the same names are other functions
            casts.setdefault(name, set()).add(cast)
    assert {name: found for name, found in casts.items() if len(found) > 1} == {}


def test_every_name_of_a_listed_function_is_listed():
    # torch._VF has every function of torch; its rows are the ones that torch.nn reaches through it.
    places = {target: pkgutil.resolve_name(target) for target, _ in CASTS if target != "torch._VF"}
    functions = {
        (target, name): id(getattr(place, name, None))
        for target, place in places.items()
        for name in dir(place)
    }
    listed = {functions[path] for path in CASTS if path in functions}
    named = {path for path, function in functions.items() if function in listed}
    assert {path for path in named if not path[1].startswith("_")} - set(CASTS) == set()


def test_an_in_place_form_is_computed_in_float32_if_and_only_if_its_functional_form_is():
    for target in ("torch", "torch.Tensor"):
        place = pkgutil.resolve_name(target)
        fp32 = {name for (path, name), cast in CASTS.items() if path == target and cast is FP32}
        expected = {f"{name}_" for name in fp32 if hasattr(place, f"{name}_")}
        expected |= {"__ipow__"} if "__pow__" in fp32 else set()
        found = {name for (path, name), cast in CASTS.items() if path == target and cast is FP32_INPLACE}
        assert found == expected


def test_the_tables_cannot_be_imported_a_second_time_as_plain_lists():
    spec = importlib.util.spec_from_file_location("lists", lists.__file__)
    with pytest.raises(ImportError, match=r"import ampatch\.lists, not lists: this would be a second copy"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# ---- What torch promotes natively ----

NATIVELY_PROMOTED = [
    "add", "sub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "atan2",
    "hypot", "eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "fmax", "fmin", "logaddexp",
]  # fmt: skip


CALLS = {name: getattr(torch, name) for name in NATIVELY_PROMOTED} | {
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y]),
    "addcmul": lambda x, y: torch.addcmul(x, y, x),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, x),
    "where": lambda x, y: torch.where(x > 0, x, y),
}


def test_what_torch_promotes_natively_has_no_row():
    x, y = torch.ones(3, dtype=HALF), torch.ones(3)
    types = {name: {call(x, y).dtype, call(y, x).dtype} for name, call in CALLS.items()}
    assert {name: found for name, found in types.items() if found not in ({FULL}, {torch.bool})} == {}
    listed = {name for _, name in CASTS}
    assert [name for name in CALLS if listed & {name, f"{name}_", f"__{name}__"}] == []


def test_what_is_promoted_here_and_no_database_of_ops_calls_is_refused_natively():
    x, y, ids = torch.ones(3, 3), torch.ones(2, 3, dtype=HALF), torch.tensor([[0, 1, 2]])
    with pytest.raises(RuntimeError, match="dtype"):
        x[[0, 2]] = y
    with pytest.raises(RuntimeError, match="type"):
        torch.nn.functional.embedding_bag(ids, x, per_sample_weights=y[:1], mode="sum")


@pytest.mark.parametrize("name", ["grid_sampler", "grid_sampler_2d"])
@pytest.mark.parametrize("dtypes", [(HALF, FULL), (FULL, HALF)], ids=["half-full", "full-half"])
def test_a_grid_of_another_type_is_refused_natively(name, dtypes):
    x, grid = (
        torch.ones(shape, dtype=dtype)
        for shape, dtype in zip([(1, 1, 3, 3), (1, 2, 2, 2)], dtypes, strict=True)
    )
    with pytest.raises(RuntimeError, match="type"):
        getattr(torch, name)(x, grid, 0, 0, False)


@needs_torch("2.13", "linear_cross_entropy")
def test_a_chunked_loss_of_half_weights_is_refused_natively_and_one_of_half_input_is_not():
    options, labels = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=1), torch.tensor([0, 1])
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    loss = torch.nn.functional.linear_cross_entropy
    assert loss(x.to(HALF), weight, labels, options=options).dtype is HALF
    with pytest.raises(RuntimeError, match=r"(?i)dtype|type|expected"):
        loss(x, weight.to(HALF), labels, options=options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_fourier_transform_refuses_half_natively_on_a_cpu(dtype):
    # Autocast has no rule for these: the oracle above would compare with an error.
    for name in [name for target, name in CASTS if target == "torch.fft"]:
        with pytest.raises(RuntimeError, match=r"(?i)unsupported dtype|doesn't support"):
            getattr(torch.fft, name)(torch.ones(4, 4, dtype=dtype))


# ---- torch.autocast's lists, in the installed header: test_op_db.py asks autocast itself ----

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


def test_every_list_of_the_header_and_every_op_in_it_is_read():
    lists_in_header = set(re.findall(r"#define AT_FORALL_(\w+)\(", HEADER))
    deprecated = {"DEPRECATED_AUTOCAST_BACKENDS", "DEPRECATED_AUTOCAST_BAKCNEDS"}  # as torch 2.6 spells it
    assert lists_in_header - deprecated == set(POLICIES)
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
    assert set(excused) <= set(expected)
    assert all(excused.values())
