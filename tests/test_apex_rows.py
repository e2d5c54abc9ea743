"""The page docs/apex-behaviour.md against the tests that show its rows, both ways."""

import ast
import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs/apex-behaviour.md").read_text()
LINES = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| row ")]
ROWS = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in LINES]  # name, apex, here


def rows_shown_by(function):
    calls = [item for item in function.decorator_list if isinstance(item, ast.Call)]
    return [row.value for call in calls if ast.unparse(call.func) == "shows" for row in call.args]


# (file, test) -> the rows that it shows
SHOWN = {
    (path.name, node.name): rows_shown_by(node)
    for path in sorted(TESTS.glob("test_*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
}


def test_every_row_has_a_name_of_its_own_and_says_what_apex_did_and_what_happens_here():
    assert len(ROWS) > 100
    assert [name for name, count in Counter(name for name, *_ in ROWS).items() if count > 1] == []
    for name, apex, here in ROWS:
        assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)+", name)
        assert apex.endswith(".")
        assert here.endswith(".")
        assert "defect" in name or not apex.startswith("Wrong:")


def test_every_row_has_a_test_and_every_row_that_a_test_shows_is_on_the_page():
    assert {row for rows in SHOWN.values() for row in rows} == {name for name, *_ in ROWS}


def test_every_test_of_the_files_that_go_by_rows_shows_one():
    bare = [test for test, rows in SHOWN.items() if not rows]
    assert [test for test in bare if test[0].startswith("test_apex_rows_")] == []
