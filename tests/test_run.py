"""`ampatch run` gives a script apex, and overrides what it passes to `initialize`."""

import os
import pickle
import sys

import pytest

import ampatch.apex
from ampatch.apex.drop_in import Preparation
from ampatch.apex.run_command import split

pytestmark = pytest.mark.process

# Prints the options that `initialize` used, whatever the script was told.
TRAIN = """
import argparse
import torch
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O1")
parser.add_argument("--loss-scale")
parser.add_argument("--keep-batchnorm-fp32")
parser.add_argument("--disabled", dest="enabled", action="store_false")
given = vars(parser.parse_args())

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
amp.initialize(model, optimizer, **given, verbosity=0)
options = amp._amp_state.opt_properties
print(options.enabled, end=" ")
if options.enabled:
    half = options.cast_model_type or options.patch_torch_functions_type
    print(options.opt_level, half, options.loss_scale, options.keep_batchnorm_fp32)
"""


@pytest.fixture
def run(processes, tmp_path):
    """Runs a script with `ampatch run` in a process of its own, and returns how it ended."""

    def run_script(text, *arguments):
        (tmp_path / "train.py").write_text(text)
        return processes.run(f"sys.exit(ampatch.__main__.main({['run', *arguments]!r}))", tmp_path)

    return run_script


@pytest.mark.parametrize(
    ("arguments", "used"),
    [
        (["train.py"], "O1 torch.float16 dynamic None"),
        (["train.py", "--opt-level", "O0"], "O0 torch.float32 1.0 None"),
        (["--opt-level", "O2", "train.py", "--opt-level", "O1"], "O2 torch.float16 dynamic True"),
        (["--opt-level=O5", "train.py"], "O5 torch.bfloat16 1.0 True"),
        (
            ["--opt-level", "O4", "train.py", "--keep-batchnorm-fp32", "True", "--loss-scale", "128.0"],
            "O4 torch.bfloat16 1.0 None",
        ),
        (["--loss-scale", "64", "train.py", "--loss-scale", "dynamic"], "O1 torch.float16 64.0 None"),
        (["--loss-scale", "dynamic", "train.py", "--opt-level", "O3"], "O3 torch.float16 dynamic False"),
        (["--dtype", "bfloat16", "train.py"], "O1 torch.bfloat16 dynamic None"),
        (["--opt-level", "O2", "--dtype", "bfloat16", "--", "train.py"], "O2 torch.bfloat16 dynamic True"),
        (["--opt-level", "O2", "-m", "train", "--loss-scale", "8"], "O2 torch.float16 dynamic True"),
        (["-mtrain", "--opt-level", "O2"], "O2 torch.float16 dynamic True"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_before_the_script_override_it_and_those_after_it_are_its_own(arguments, used, run):
    ended = run(TRAIN, *arguments)
    assert (ended.status, ended.stdout) == (0, f"True {used}\n"), ended.stderr


def test_a_script_that_turns_amp_off_keeps_it_off(run):
    assert run(TRAIN, "--opt-level", "O2", "train.py", "--disabled").stdout.strip() == "False"


def test_a_dtype_replaces_the_one_that_the_script_passes(run):
    text = TRAIN.replace("verbosity=0", "verbosity=0, cast_model_type=torch.float16")
    ended = run(text, "--dtype", "bfloat16", "train.py", "--opt-level", "O2")
    assert ended.stdout == "True O2 torch.bfloat16 dynamic True\n"


@pytest.mark.parametrize(
    ("argv", "own", "script"),
    [
        (["train.py", "-m", "x"], ["train.py"], ["-m", "x"]),
        (["--dtype", "float16", "-"], ["--dtype", "float16", "-"], []),
        (["--", "--odd-name.py", "--", "x"], ["--", "--odd-name.py"], ["--", "x"]),
        (["-h", "train.py", "-h"], ["-h", "train.py"], ["-h"]),
        (["--opt-level"], ["--opt-level"], []),
        ([], [], []),
    ],
    ids=lambda value: " ".join(value),
)
def test_everything_after_the_script_is_the_scripts(argv, own, script):
    assert split(["run", *argv]) == (["run", *own], tuple(script))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script: expected a Python script, or -m and a module"),
        (["absent.py"], "'absent.py' does not exist: expected a Python script"),
        (["."], "'.' is a directory without __main__.py: expected a Python script"),
        (["-m", "no_such.train"], "no module named 'no_such.train': expected one on sys.path"),
        (["-m", "json.no_such"], "no module named 'json.no_such': expected one on sys.path"),
        (["-m", "train.py"], "or leave out -m to run the file 'train.py'"),
        (["-m", "..train"], "'..train' is not the name of a module"),
        (["--opt-level", "02", "train.py"], "'O6' (the letter O: 'O2')"),
        (
            ["--opt-level", "o1", "train.py"],
            "unknown opt_level 'o1': expected one of 'O0', 'O1', 'O2', 'O3',",
        ),
        (["--dtype", "int8", "train.py"], "--dtype='int8': expected a floating dtype"),
        (["--loss-scale", "0", "train.py"], "loss_scale 0.0 is not a finite number above 0"),
        (["--loss-scale", "big", "train.py"], "loss_scale='big' is not a number: expected a number above 0"),
        (["--loss-scale", "nan", "train.py"], "loss_scale nan is not a finite number above 0"),
        (["--epochs", "3", "train.py"], "arguments: --epochs; the script's own arguments follow the script"),
        (["--opt", "O1", "train.py"], "unrecognized arguments: --opt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_status_2_before_the_script_starts(arguments, message, run):
    ended = run("print('started')", *arguments)
    assert (ended.status, ended.stdout) == (2, "")
    assert message in ended.stderr
    assert ended.stderr.startswith("ampatch run: ")
    assert ended.stderr.count("\n") == 1


def test_a_file_that_cannot_be_read_is_bad_input(run, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root reads every file")
    (tmp_path / "secret.py").touch(mode=0)
    assert "'secret.py' cannot be read: Permission denied" in run("", "secret.py").stderr


def test_help_is_ours_before_the_script_and_the_scripts_after_it(run):
    ours = run("", "--help")
    assert (ours.status, "ampatch run [OPTIONS] -m MODULE [ARGS...]" in ours.stdout) == (0, True)
    assert "--keep-batchnorm-fp32" in run(TRAIN, "train.py", "--help").stdout


# ---- Processes that the script starts ----

SPAWN = """
import multiprocessing
import sys
import torch
from apex import amp


def work(queue):
    model = torch.nn.Linear(1, 1)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    queue.put((amp._amp_state.opt_properties.opt_level, sys.argv[1:]))


if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.SimpleQueue()
    context.Process(target=work, args=(queue,)).start()
    print(queue.get())
"""


def test_processes_that_import_the_script_anew_have_apex_and_the_overrides(run):
    ended = run(SPAWN, "--opt-level", "O4", "train.py", "forkserver")
    assert ended.stdout == "('O4', ['forkserver'])\n", ended.stderr


def test_a_program_that_installs_apex_in_its_main_part_has_it_in_its_children(processes, tmp_path):
    text = SPAWN.replace("from apex import amp\n", "").replace(
        "    model =", "    from apex import amp\n    model ="
    )
    install = "    import ampatch.apex\n    ampatch.apex.install(opt_level='O5')\n    context ="
    (tmp_path / "train.py").write_text(text.replace("    context =", install))
    file = str(tmp_path / "train.py")
    start = f"import runpy; sys.argv = ['train.py', 'spawn']; runpy.run_path({file!r}, run_name='__main__')"
    ended = processes.run(start, tmp_path)
    assert ended.stdout == "('O5', ['spawn'])\n", ended.stderr


def test_a_child_does_not_look_for_torch_where_the_shell_is(processes, tmp_path):
    shell = tmp_path / "shell"
    shell.mkdir()
    for name in ("statistics", "torch"):
        (shell / f"{name}.py").write_text("raise RuntimeError('not this one')")
    (tmp_path / "train.py").write_text(SPAWN)
    command = ["run", "--opt-level", "O4", "../train.py", "spawn"]
    ended = processes.run(f"sys.exit(ampatch.__main__.main({command!r}))", shell)
    assert "('O4', ['spawn'])" in ended.stdout, ended.stderr


def test_a_child_finds_ampatch_where_its_parent_found_it(monkeypatch):
    data = pickle.dumps(Preparation(lambda name: {"name": name}, ampatch.apex.install, {})("child"))
    folder = os.path.dirname(os.path.dirname(ampatch.__file__))
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != folder])
    try:
        assert pickle.loads(data)["name"] == "child"
        assert sys.path[-1] == folder
    finally:
        ampatch.apex.uninstall()


def test_a_fork_server_does_not_import_the_script_before_its_children_have_apex(monkeypatch):
    told = {"sys_path": [], "init_main_from_path": "train.py"}
    assert Preparation(lambda name: dict(told), ampatch.apex.install, {})("ignore") == {"sys_path": []}
