"""The command line answers bad input with one clear line and exit status 2."""

import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest

from ampatch.cli import COMMANDS, main


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('must not be run')")
    return str(path)


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
        ([], "the following arguments are required: COMMAND"),
        (["train"], "invalid choice: 'train'"),
        (["sweep"], "the following arguments are required: SCRIPT"),
        (["sweep", "absent.py"], "'absent.py' does not exist: expected a Python script"),
        (["sweep", "."], "'.' is a directory: expected a Python script"),
        (["sweep", "x.py", "--epochs", "3"], "unrecognized arguments: --epochs 3"),
    ],
    ids=["nothing", "command", "no-script", "absent", "directory", "no-dashes"],
)
def test_bad_input_is_one_line_and_exit_status_2(arguments, message, capsys):
    assert exit_status(*arguments) == 2
    assert message in one_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--levels", "O0,o1"], "unknown opt_level 'o1': expected one or more of O0, O1, O2"),
        (["--levels", "02"], "unknown opt_level '02'"),
        (["--levels", ""], "unknown opt_level ''"),
        (["--levels", "O1,O1"], "opt_level 'O1' is there twice: name each level once"),
        (["--timeout", "0"], "timeout 0.0: expected seconds, more than 0"),
        (["--timeout", "nan"], "timeout nan: expected seconds, more than 0"),
        (["--timeout", "soon"], "invalid float value: 'soon'"),
    ],
    ids=["lower-case", "zero", "empty", "twice", "timeout-0", "timeout-nan", "timeout-word"],
)
def test_a_bad_option_is_refused_before_the_script_runs(arguments, message, script, capsys):
    assert exit_status("sweep", script, *arguments) == 2
    assert message in one_line(capsys)


def test_a_missing_rich_is_named_with_the_way_to_get_it(script, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert exit_status("sweep", script) == 2
    assert "rich is not installed: pip install 'ampatch[tools]'" in one_line(capsys)


def test_the_version_is_that_of_the_package(capsys):
    assert exit_status("--version") == 0
    assert capsys.readouterr().out == f"ampatch {importlib.metadata.version('ampatch')}\n"


def test_help_lists_every_command(capsys):
    assert exit_status("--help") == 0
    said = capsys.readouterr().out
    assert all(command.name in said for command in COMMANDS)


def test_python_m_ampatch_is_the_command_line():
    command = [sys.executable, "-m", "ampatch", "sweep", "absent.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("ampatch sweep: 'absent.py' does not exist")


def test_the_command_line_itself_does_not_import_what_is_slow():
    # ampatch's own __init__ needs torch; what the commands add must not cost anything.
    code = (
        "import sys, ampatch; before = set(sys.modules)\n"
        "import ampatch.cli\n"
        "print({name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    added = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert not {"rich", "torch", "matplotlib", "numpy"} & eval(added)
