"""What a cast table may say, and what it is told when it says something else."""

import pytest

from ampatch.errors import TableError
from ampatch.table import FP32, FP32_INPLACE, LOWER, PROMOTE, CastTable, Row, validate


def table(*rows, target="torch"):
    return CastTable(target, rows)


def faults_of(*tables, version="2.13.0", **kwargs):
    with pytest.raises(TableError) as caught:
        validate(tables, version, **kwargs)
    return str(caught.value).splitlines()


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
    rows = [Row("exp", FP32, "range", since=since, until=until), Row("mm", LOWER, "GEMM")]
    assert table(*rows).select(version) == table(*rows[not holds :])


@pytest.mark.parametrize("version", ["two", "2", "", "2.13.x", "v2.13"])
def test_a_version_that_is_none_is_refused(version):
    with pytest.raises(
        TableError, match=f"^{version!r} is not a torch version: expected one such as '2.13' or "
    ):
        table().select(version)


EXP, GEMM = Row("exp", FP32, "range"), Row("conv2d", LOWER, "GEMM")
ACCEPTED = {
    "a name and its form in place": [table(EXP, Row("exp_", FP32_INPLACE, "range"))],
    "an op of another version": [table(Row("softmaxx", FP32, "range", until="2.13"))],
    "two rows in different versions": [
        table(Row("exp", LOWER, "no", until="2.12"), Row("exp", FP32, "range", since="2.12"))
    ],
    "two names of one function": [table(GEMM), table(GEMM, target="torch.nn.functional")],
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_tables_without_faults_are_accepted(name):
    validate(ACCEPTED[name], "2.13.0")


MISSING = "no such function in torch 2.13.0; if torch removed it, give the row until="
TWICE = "torch.exp: 2 rows hold in torch 2.13.0; keep one, or separate them with since= and until="
NO_REASON = "torch.exp: no reason; say in one line why the op has its cast"
NO_VERSION = "is not a torch version: expected one such as '2.13' or '2.13.0+cpu'"
FAULTS = {
    "misspelt": ([table(Row("softmaxx", FP32, "range"))], f"torch.softmaxx: {MISSING}"),
    "no target": (
        [table(EXP, target="torch.Tenser")],
        "torch.Tenser: no such module or class in torch 2.13.0; correct the target",
    ),
    "no module": (
        [table(EXP, target="torhc")],
        "torhc: no such module or class in torch 2.13.0; correct the target",
    ),
    "no function": (
        [table(Row("float16", FP32, "range"))],
        "torch.float16: not a function but torch.float16; a row names something callable",
    ),
    "twice": ([table(EXP, EXP)], TWICE),
    "twice in two tables": ([table(EXP), table(Row("exp", LOWER, "no"))], TWICE),
    "names that disagree": (
        [table(GEMM), table(Row("conv2d", PROMOTE, "GEMM"), target="torch.nn.functional")],
        "torch.conv2d and torch.nn.functional.conv2d: two names of one function, "
        "with casts LOWER and PROMOTE; give them the same",
    ),
    "no reason": ([table(Row("exp", FP32, ""))], NO_REASON),
    "an empty reason": ([table(Row("exp", FP32, "  \n"))], NO_REASON),
    "a long reason": (
        [table(Row("exp", FP32, "range,\nmostly"))],
        "torch.exp: the reason has 2 lines; say it in one",
    ),
    "no cast": (
        [table(Row("exp", "fp32", "range"))],
        "torch.exp: unknown cast 'fp32'; "
        "expected one of LOWER, FP32, PROMOTE, BANNED, FP32_INPLACE, MATCH_SELF, CUSTOM",
    ),
    "no versions": (
        [table(Row("exp", FP32, "range", since="two", until=""))],
        f"torch.exp: since='two' {NO_VERSION}\ntorch.exp: until='' {NO_VERSION}",
    ),
    "the same version": (
        [table(Row("exp", FP32, "range", since="2.13", until="2.13.0"))],
        "torch.exp: since='2.13' is not before until='2.13.0'; no torch version is in between",
    ),
    "versions the wrong way": (
        [table(Row("exp", FP32, "range", since="2.13", until="2.9"))],
        "torch.exp: since='2.13' is not before until='2.9'; no torch version is in between",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_what_to_do(name):
    tables, expected = FAULTS[name]
    assert faults_of(*tables) == expected.splitlines()
