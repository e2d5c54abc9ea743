"""The page docs/apex-behaviour.md against the tests that it names, both ways."""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs/apex-behaviour.md").read_text()


@functools.cache
def functions_in(file):
    """The functions of a test file, by name."""
    nodes = ast.parse((TESTS / file).read_text()).body
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}


def rows_shown_by(function):
    calls = [item for item in function.decorator_list if isinstance(item, ast.Call)]
    return [row.value for call in calls if ast.unparse(call.func) == "shows" for row in call.args]


# (file, test) -> the rows that it shows
SHOWN = {
    (path.name, name): rows_shown_by(function)
    for path in sorted(TESTS.glob("test_apex_rows_*.py"))
    for name, function in functions_in(path.name).items()
    if name.startswith("test_")
}


def rows_of_the_page():
    """Yields (row, what apex did, what happens here, tests as (file, name or None)) of every table."""
    for section in PAGE.split("\n## ")[1:]:
        own = re.search(r"Tests: `tests/(\w+\.py)`\.", section)[1]
        for line in re.findall(r"^\| ([a-z0-9]+-[a-z0-9-]+ \|.*) \|$", section, re.MULTILINE):
            row, apex, here, tests = (cell.strip() for cell in line.split(" | "))
            names = [name.split("::") for name in re.findall(r"`([^`]+)`", tests)]
            yield row, apex, here, [locate(own, *name) for name in names]


def locate(own, first, name=None):
    if name is not None:
        return first, name
    return (first, None) if first.endswith(".py") else (own, first)


ROWS = list(rows_of_the_page())
EVERY_ROW = pytest.mark.parametrize(("row", "apex", "here", "tests"), ROWS, ids=[row[0] for row in ROWS])


def test_the_page_is_read_whole():
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    headings = [line for line in lines if line.startswith("| row ")]
    assert len(ROWS) == len(lines) - len(headings) > 100


def test_every_row_has_a_name_of_its_own():
    assert [row for row, count in Counter(row for row, *_ in ROWS).items() if count > 1] == []


def test_every_row_that_a_test_shows_is_on_the_page():
    assert {row for rows in SHOWN.values() for row in rows} == {row for row, *_ in ROWS}


def test_every_test_of_these_files_shows_a_row():
    assert [test for test, rows in SHOWN.items() if not rows] == []


@EVERY_ROW
def test_a_row_says_what_apex_did_and_what_happens_here(row, apex, here, tests):
    assert apex.endswith(".")
    assert here.endswith(".")


@EVERY_ROW
def test_a_row_names_exactly_the_tests_that_show_it_and_others_that_exist(row, apex, here, tests):
    showing = {test for test, rows in SHOWN.items() if row in rows}
    named = {test for test in tests if test[0].startswith("test_apex_rows_")}
    assert named == showing != set()
    for file, name in set(tests) - named:
        assert (TESTS / file).is_file()
        assert name is None or name in functions_in(file)


@pytest.mark.parametrize("row", [row for row, apex, *_ in ROWS if apex.startswith("Wrong:")])
def test_what_was_wrong_is_called_a_defect(row):
    assert "defect" in row
