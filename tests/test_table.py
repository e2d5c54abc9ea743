"""Which rows of a cast table hold in a version of torch."""

import pytest

from ampatch.errors import TableError
from ampatch.table import FP32, LOWER, CastTable, Row


def table(*rows):
    return CastTable("torch", rows)


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
