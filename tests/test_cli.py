"""The command line answers bad input with one clear line and exit status 2."""

import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys

import pytest
import torch

import ampatch as amp
import ampatch.apex
from ampatch import lists
from ampatch.__main__ import COMMANDS, main


@pytest.fixture(autouse=True)
def no_apex_left():
    """Undoes what `ampatch run` installs before it looks for the script."""
    yield
    ampatch.apex.uninstall()


def exit_status(*arguments):
    """Runs the command line in this process and returns its exit status."""
    try:
        return main(arguments)
    except SystemExit as exit_:
        return exit_.code


def one_line(capsys):
    """Returns what was said on stderr, which must be one line."""
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["swep", "x.py"], "unknown command 'swep' (did you mean sweep?)"),
        (
            ["train"],
            "unknown command 'train' (choose from run, check, sweep, doctor, lists)",
        ),
        (["--vershon"], "unrecognized argument --vershon (did you mean --version?)"),
        (["--level", "O1"], "unrecognized arguments: --level O1"),
        (["sweep", "."], "'.' is a directory without __main__.py: expected a Python script"),
        (
            ["sweep", "x.py", "--seed=3"],
            "argument --seed (did you mean --seeds?); the script's own arguments",
        ),
        (["lists", "--jsno"], "argument --jsno (did you mean --json?) (help: ampatch lists --help)"),
        (["check"], "the following arguments are required: PATH"),
        (["check", "absent.py"], "'absent.py' does not exist: expected a Python script or a folder"),
        (["lists", "sofmax"], "close: softmax"),
        (["lists", "nn.LSTM"], "'nn.LSTM' is a module, and tables name functions"),
        (["lists", "--cast", "half"], "unknown cast 'half': expected one of LOWER, FP32, PROMOTE"),
        (["lists", "--target", "torch.nn.LSTM"], "no table of 'torch.nn.LSTM': expected one of torch.nn"),
        (["lists", "softmax", "--cast", "fp32"], "--cast and --target select rows of the tables"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_status_2(arguments, message, capsys):
    assert exit_status(*arguments) == 2
    assert message in one_line(capsys)


def test_the_version_is_that_of_the_package(capsys):
    assert exit_status("--version") == 0
    versions = [importlib.metadata.version("ampatch"), torch.__version__, platform.python_version()]
    assert capsys.readouterr().out == "ampatch {}, torch {}, Python {}\n".format(*versions)


def test_without_a_command_the_help_is_printed_which_lists_every_command(capsys):
    assert main([]) == 0
    bare = capsys.readouterr().out
    assert exit_status("--help") == 0
    assert bare == capsys.readouterr().out
    assert all(command.name in bare for command in COMMANDS)


@pytest.mark.process
def test_python_m_ampatch_is_the_command_line():
    command = [sys.executable, "-m", "ampatch", "sweep", "absent.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("ampatch sweep: 'absent.py' does not exist")


@pytest.mark.process
def test_commands_need_torch_and_wrapt_alone(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("print('trained')")
    code = (
        "import sys; path = sys.argv[1]\n"
        "sys.modules.update(dict.fromkeys(['numpy', 'rich', 'matplotlib', 'PIL']))\n"
        "from ampatch.__main__ import main\n"
        "outcomes = [main(['check', path]), main(['run', path])]\n"
        "sys.exit(outcomes != [0, 0] or main(['run', '--legacy', path]) != 2)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    assert "--legacy needs numpy: pip install numpy" in done.stderr


# ---- ampatch lists ----


def show(capsys, *arguments):
    """Runs `ampatch lists` and returns what it prints."""
    assert exit_status("lists", *arguments) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def test_lists_prints_every_row_under_its_place_whose_heading_is_there_once(capsys):
    place, headings, found = None, [], set()
    for line in show(capsys).splitlines():
        if line and not line.startswith(" "):
            place = line
            headings.append(place)
        elif line:
            found.add((place, *line.split(maxsplit=2)))
    expected = {
        (table.target, row.name, row.cast.name, row.reason)
        for table in lists.TABLES
        for row in table.rows
        if not row.since and not row.until
    }
    assert expected <= found
    assert sorted(set(headings)) == sorted(headings)
    assert {table.target for table in lists.TABLES} <= set(headings)


def test_a_row_of_some_torch_versions_or_one_type_of_device_says_which(capsys):
    said = show(capsys)
    rows = [row for table in lists.TABLES for row in table.rows if row.since]
    assert rows
    assert all(f"{row.reason} (since torch {row.since})" in said for row in rows)
    assert all(f"in a half model on a CPU: {row.reason}" in said for row in lists.MODULES_ON_CPU.rows)


@pytest.mark.parametrize("cast", ["BANNED", "banned"])
def test_lists_of_one_cast_holds_no_other(cast, capsys):
    rows = json.loads(show(capsys, "--cast", cast, "--json"))
    assert [(row["target"], row["name"]) for row in rows] == [
        (table.target, row.name) for table in lists.TABLES for row in table.rows if row.cast.name == "BANNED"
    ]


@pytest.mark.parametrize(
    ("short", "target"), [("F", "torch.nn.functional"), ("torch.Tensor", "torch.Tensor")]
)
def test_lists_of_one_place_holds_no_other(short, target, capsys):
    rows = json.loads(show(capsys, "--target", short, "--json"))
    assert {row["target"] for row in rows} == {target}
    names = {row.name for table in lists.TABLES if table.target == target for row in table.rows}
    assert names <= {row["name"] for row in rows}


def test_lists_for_programs_has_every_field_of_a_row(capsys):
    rows = json.loads(show(capsys, "--json"))
    found = {(row["target"], row["name"]): row for row in rows}
    assert found["torch", "mm"] == {
        "target": "torch",
        "name": "mm",
        "cast": "LOWER",
        "reason": next(row.reason for table in lists.TABLES for row in table.rows if row.name == "mm"),
        "since": None,
        "until": None,
    }


def test_lists_of_an_op_prints_its_explanation(capsys):
    assert show(capsys, "F.softmax") == f"{amp.explain('F.softmax')}\n"


def test_lists_takes_an_operator(capsys):
    assert "torch.Tensor.__matmul__" in show(capsys, "@")


def test_lists_of_an_op_for_programs_says_the_same(capsys):
    said = json.loads(show(capsys, "binary_cross_entropy", "--json"))
    name, path = said["names"][0], amp.explain("binary_cross_entropy").names[0].path
    assert (said["op"], name["name"], name["cast"]) == ("binary_cross_entropy", path, "BANNED")
    levels = {level["opt_level"]: level for level in name["levels"]}
    assert list(levels) == list(amp.OPT_LEVELS)
    assert (levels["O1"]["half"], levels["O2"]["half"]) == ("raises", "float16")
    assert json.loads(show(capsys, "gelu", "--json"))["names"][0]["cast"] is None  # it has no row


def be_a_terminal(monkeypatch):
    """Makes stdout a terminal of 100 columns, with colours."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for name, value in {"COLUMNS": "100", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cast", "banned"], ["function", "cast", "reason", "binary_cross_entropy"]),
        (["log_softmax"], ["level", "because", "torch.log_softmax", *amp.OPT_LEVELS]),
    ],
    ids=["tables", "op"],
)
def test_a_terminal_gets_tables_with_headings(arguments, words, capsys, monkeypatch):
    be_a_terminal(monkeypatch)
    shown = show(capsys, *arguments)
    assert "\x1b[" in shown
    assert [word for word in words if word not in shown] == []


def test_a_pipe_gets_plain_lines_of_any_length(capsys):
    said = show(capsys)
    assert "\x1b" not in said
    assert max(map(len, said.splitlines())) > 100


def test_lists_works_without_rich(capsys, monkeypatch):
    be_a_terminal(monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "binary_cross_entropy  BANNED" in show(capsys, "--cast", "banned")


@pytest.mark.process
def test_a_reader_that_has_enough_is_no_error():
    command = f"{sys.executable} -m ampatch lists | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("torch.nn.functional\n", "")
