"""What a cast table may say, and what it is told when it says something else."""

import math
import types

import pytest

from ampatch.errors import TableError
from ampatch.table import FP32, FP32_INPLACE, LOWER, PROMOTE, CastTable, Row, validate


def table(*rows, target="torch"):
    return CastTable(target, rows)


def faults_of(*tables, version="2.13.0", **kwargs):
    with pytest.raises(TableError) as caught:
        validate(tables, version, **kwargs)
    return str(caught.value).splitlines()


def test_rows_and_tables_are_values():
    assert table(Row("exp", FP32, "range")) == table(Row("exp", FP32, "range"))
    with pytest.raises(AttributeError):
        Row("exp", FP32, "range").cast = LOWER


@pytest.mark.parametrize(
    ("since", "until", "version", "holds"),
    [
        ("2.9", None, "2.13.0+cpu", True),
        ("2.13", None, "2.13.0", True),
        ("2.13", None, "2.12.1", False),
        ("2.14", None, "2.14.0a0+git0123abc", True),
        ("2.14", None, "2.14.0.dev20260101+cu130", True),
        ("2.13.1", None, "2.13.0", False),
        (None, "2.13", "2.9.1", True),
        (None, "2.13", "2.13.0rc1", False),
        (None, "2.13", "2.13.0", False),
        ("2.9", "2.13", "2.10.0", True),
        (None, None, "3.0", True),
    ],
)
def test_select_compares_versions_as_numbers_and_until_is_exclusive(since, until, version, holds):
    row = Row("exp", FP32, "range", since=since, until=until)
    assert table(row).select(version) == table(*[row] * holds)


def test_select_keeps_the_order_of_the_rows():
    rows = [
        Row("exp", FP32, "range"),
        Row("old", FP32, "range", until="2.0"),
        Row("mm", LOWER, "GEMM"),
    ]
    assert [row.name for row in table(*rows).select("2.13").rows] == ["exp", "mm"]


@pytest.mark.parametrize("version", ["two", "2", "", "2.13.x", "v2.13"])
def test_a_version_that_is_none_is_refused(version):
    with pytest.raises(
        TableError, match=f"^{version!r} is not a torch version: expected one such as '2.13' or "
    ):
        table().select(version)


def test_a_table_without_faults_is_accepted():
    validate([table(Row("exp", FP32, "range"), Row("exp_", FP32_INPLACE, "range"))], "2.13.0")


def test_a_misspelt_op_is_named_with_the_torch_version_and_the_way_out():
    misspelt = table(Row("softmaxx", FP32, "range"), target="torch.nn.functional")
    assert faults_of(misspelt) == [
        "torch.nn.functional.softmaxx: no such function in torch 2.13.0; "
        "if torch removed it, give the row until="
    ]


def test_an_op_of_another_version_is_not_looked_for():
    validate([table(Row("softmaxx", FP32, "range", until="2.13"))], "2.13.0")


@pytest.mark.parametrize("target", ["torch.nn.funktional", "torhc", "torch.Tenser"])
def test_a_target_that_does_not_exist_is_named(target):
    fault = f"{target}: no such module or class in torch 2.13.0; correct the target"
    assert faults_of(table(Row("exp", FP32, "range"), target=target)) == [fault]


def test_an_attribute_that_cannot_be_called_is_no_op():
    fault = "torch.float16: not a function but torch.float16; a row names what can be called"
    assert faults_of(table(Row("float16", FP32, "range"))) == [fault]


def test_the_same_op_twice_is_refused_also_across_tables():
    row = Row("exp", FP32, "range")
    fault = "torch.exp: 2 rows hold in torch 2.13.0; keep one, or part them with since= and until="
    assert faults_of(table(row, row)) == [fault]
    assert faults_of(table(row), table(Row("exp", LOWER, "no"))) == [fault]


def test_two_rows_of_one_op_may_hold_in_different_versions():
    validate(
        [table(Row("exp", LOWER, "no", until="2.12"), Row("exp", FP32, "range", since="2.12"))],
        "2.13.0",
    )


def test_two_names_of_one_function_must_have_one_cast():
    lower, promote = table(Row("conv2d", LOWER, "GEMM")), Row("conv2d", PROMOTE, "GEMM")
    assert faults_of(lower, table(promote, target="torch.nn.functional")) == [
        "torch.conv2d and torch.nn.functional.conv2d: two names of one function, "
        "with casts LOWER and PROMOTE; give them the same"
    ]


def test_two_names_of_one_function_with_one_cast_are_accepted():
    row = Row("conv2d", LOWER, "GEMM")
    validate([table(row), table(row, target="torch.nn.functional")], "2.13.0")


@pytest.mark.parametrize("reason", ["", "  \n"])
def test_a_row_without_a_reason_is_refused(reason):
    assert faults_of(table(Row("exp", FP32, reason))) == [
        "torch.exp: no reason; say in one line why the op has its cast"
    ]


def test_a_reason_is_one_line():
    assert faults_of(table(Row("exp", FP32, "range,\nmostly"))) == [
        "torch.exp: the reason has 2 lines; say it in one"
    ]


def test_a_cast_is_one_of_the_enumeration():
    assert faults_of(table(Row("exp", "fp32", "range"))) == [
        "torch.exp: unknown cast 'fp32'; "
        "expected one of LOWER, FP32, PROMOTE, BANNED, FP32_INPLACE, MATCH_SELF, CUSTOM"
    ]


def test_a_bad_version_in_a_row_is_a_fault_of_the_row():
    expected = "is not a torch version: expected one such as '2.13' or '2.13.0+cpu'"
    assert faults_of(table(Row("exp", FP32, "range", since="two", until=""))) == [
        f"torch.exp: since='two' {expected}",
        f"torch.exp: until='' {expected}",
    ]


@pytest.mark.parametrize(("since", "until"), [("2.13", "2.13.0"), ("2.13", "2.9")])
def test_since_must_come_before_until(since, until):
    fault = f"torch.exp: since={since!r} is not before until={until!r}; no torch version is between"
    assert faults_of(table(Row("exp", FP32, "range", since=since, until=until))) == [fault]


def test_every_fault_is_listed_at_once():
    rows = [
        Row("exp", FP32, ""),
        Row("mm", LOWER, "a\nb"),
        Row("expp", FP32, "range"),
        Row("mv", LOWER, "x", since="-"),
    ]
    assert [fault.split(":")[0] for fault in faults_of(table(*rows))] == [
        "torch.exp",
        "torch.mm",
        "torch.mv",
        "torch.expp",
    ]


def test_ops_are_looked_up_in_what_resolve_returns():
    place = types.SimpleNamespace(sqrt=math.sqrt)
    validate(
        [table(Row("sqrt", FP32, "digits"), target="anywhere")],
        "2.13.0",
        resolve={"anywhere": place}.get,
    )
    fault = "anywhere.exp: no such function in torch 2.13.0; if torch removed it, give the row until="
    assert faults_of(table(Row("exp", FP32, "x"), target="anywhere"), resolve={"anywhere": place}.get) == [
        fault
    ]
