"""A script is looked at before it is run: it has to compile, and to be able to call `initialize`."""

import zipfile

import pytest

from ampatch import AmpValueError
from ampatch.commands.script import Script
from ampatch.sweeps.precheck import validate_source


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes files into the working directory."""
    monkeypatch.chdir(tmp_path)

    def write_files(**files):
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__in__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write_files


def refuses(name, is_module=False):
    with pytest.raises(AmpValueError, match=r"never calls initialize, .* every level would be the same: add"):
        validate_source(Script(name, is_module=is_module))
    return True


@pytest.mark.parametrize(
    "text",
    [
        "",
        "import torch\nmodel = torch.nn.Linear(1, 1)",
        "import numpy as np, os.path\nfrom sklearn import datasets",
        "from ampatch import scale_loss",
        "from apex import amp\namp.scale_loss",
        "model.eval(); torch.compile(model)",
        "torch.distributed.is_initialized()",
        "# initialize",
    ],
    ids=["empty", "torch", "known", "ours", "apex", "methods", "longer-name", "comment"],
)
def test_a_script_that_cannot_call_initialize_is_refused(write, text):
    write(train=text)
    assert refuses("train.py")


@pytest.mark.parametrize(
    "text",
    [
        "amp.initialize(model, optimizer)",
        "from apex.amp import initialize",
        "from apex.amp import initialize as init",
        "start = initialize",
        "getattr(amp, 'initialize')",
        "settings = {'_target_': 'ampatch.initialize'}",
        "import timm",
        "from lightning import Trainer",
        "exec(open('code').read())",
        "import importlib",
        "from importlib import import_module",
        "import runpy",
        "import subprocess",
        "__import__(name)",
    ],
    ids=[
        *("attribute", "import", "import-as", "name", "text", "text-inside", "unknown", "unknown-from"),
        *("exec", "importlib", "from-importlib", "runpy", "subprocess", "__import__"),
    ],
)
def test_a_script_that_may_call_initialize_is_let_run(write, text):
    write(train=text)
    validate_source(Script("train.py"))


@pytest.mark.parametrize(
    "line",
    [
        "import setup",
        "import torch, setup as s",
        "from setup import build",
        "def main():\n    import setup",
        "import pkg.models",
        "from pkg import models",
        "from pkg.models import Model",
        "import pkg.deep.down",
    ],
    ids=["import", "as", "from", "inside", "package", "from-package", "from-module", "namespace"],
)
def test_files_beside_the_script_are_read_with_those_that_they_import(write, line):
    files = {
        "train": line,
        "setup": "import torch\nimport amping",
        "pkg__in____init__": "",
        "pkg__in__models": "from .parts import block",
        "pkg__in__parts": "from amping import start",
        "pkg__in__deep__in__down": "from ..parts import block",
    }
    write(**files, amping="")
    assert refuses("train.py")
    write(amping="from ampatch import initialize as start")
    validate_source(Script("train.py"))


def test_a_package_is_read_with_what_it_runs_when_it_is_imported(write):
    write(train="import pkg.models", pkg__in____init__="from . import amping", pkg__in__models="")
    write(pkg__in__amping="amp.initialize()")
    validate_source(Script("train.py"))
    write(pkg__in__amping="")
    assert refuses("train.py")


def test_files_that_import_each_other_are_read_once(write):
    write(train="import first", first="import second", second="import first, train")
    assert refuses("train.py")


def test_a_file_beside_the_script_hides_what_is_installed(write):
    write(train="import yaml", yaml="import ampatch; ampatch.initialize()")
    validate_source(Script("train.py"))


def test_a_file_beside_the_script_that_cannot_be_read_may_do_anything(write, tmp_path):
    write(train="import broken", broken="def")
    validate_source(Script("train.py"))
    (tmp_path / "fast.so").touch()
    write(train="import fast")
    validate_source(Script("train.py"))


def test_a_folder_is_looked_at_through_its_main(write):
    write(app__in____main__="import steps", app__in__steps="")
    assert refuses("app")
    write(app__in__steps="initialize()")
    validate_source(Script("app"))


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"train": "{}"}, "train"),
        ({"pkg__in__train": "{}"}, "pkg.train"),
        ({"pkg__in____main__": "{}"}, "pkg"),
        ({"pkg__in____main__": "from .train import main", "pkg__in__train": "{}"}, "pkg"),
        ({"pkg__in__run": "from .train import main", "pkg__in__train": "{}"}, "pkg.run"),
        ({"pkg__in__run": "", "pkg__in____init__": "{}"}, "pkg.run"),
    ],
    ids=["module", "in-package", "main", "relative-from-main", "relative", "package-around"],
)
def test_a_module_is_found_from_the_working_directory(write, files, name):
    write(**{path: text.format("") for path, text in files.items()})
    assert refuses(name, is_module=True)
    write(**{path: text.format("initialize()") for path, text in files.items()})
    validate_source(Script(name, is_module=True))


def test_a_module_that_is_installed_is_let_run(write):
    validate_source(Script("timeit", is_module=True))


def test_an_archive_is_let_run(tmp_path):
    path = tmp_path / "app.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("__main__.py", "")
    validate_source(Script(str(path)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import ampatch\n\ndef initialize(:\n", r"^train\.py:3: SyntaxError: invalid syntax$"),
        ("if True:\ninitialize()", r"^train\.py:2: IndentationError: expected an indented block"),
        ("x = 1\nreturn initialize()", r"^train\.py:2: SyntaxError: 'return' outside function$"),
    ],
    ids=["syntax", "indentation", "return"],
)
def test_a_script_that_does_not_compile_is_refused_with_its_line(write, text, message):
    write(train=text)
    with pytest.raises(AmpValueError, match=message):
        validate_source(Script("train.py"))


def test_a_script_in_another_encoding_is_read_as_python_does(write, tmp_path):
    write()
    (tmp_path / "train.py").write_bytes("# coding: latin-1\ninitialize('é')".encode("latin-1"))
    validate_source(Script("train.py"))
    (tmp_path / "train.py").write_bytes("initialize('é')".encode("latin-1"))
    with pytest.raises(AmpValueError, match=r"train\.py"):
        validate_source(Script("train.py"))


def test_what_a_script_warns_of_is_left_to_its_run(write):
    write(train="initialize(1 is 1)", other="'\\d'")
    validate_source(Script("train.py"))
