"""What pip installs is complete, and the source tree cannot be mistaken for it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ampatch as amp

pytestmark = pytest.mark.process

DIST_INFO = f"ampatch-{amp.__version__}.dist-info"
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Builds a wheel from a copy of the tree: a build leaves folders behind."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("ampatch", "lists"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    # Without isolation, since that would fetch setuptools; the extra `test` brings it.
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", source, source]
    subprocess.run(command, check=True)
    return next(source.glob("*.whl"))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """Unpacks the wheel, which is what installing it does."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def python(code, folder, path=None):
    """Runs a line of Python in a folder and returns the finished process."""
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(path) if path else ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def modules(folder, prefix):
    """Returns the files below a folder that the package is made of, as paths in the installed package."""
    kinds = ("*.py", "*.j2", "*.css")
    return {f"{prefix}/{path.relative_to(folder)}" for kind in kinds for path in folder.rglob(kind)}


def test_the_wheel_holds_every_module_the_tables_and_the_page_and_nothing_but_the_package(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = modules(ROOT / "ampatch", "ampatch") | modules(ROOT / "lists", "ampatch/lists")
    assert expected | {"ampatch/py.typed"} <= names
    assert {name.partition("/")[0] for name in names} == {"ampatch", DIST_INFO}


def test_the_wheel_installs_the_command(site):
    entry_points = site / DIST_INFO / "entry_points.txt"
    assert "ampatch = ampatch.__main__:main" in entry_points.read_text()


def test_the_installed_package_finds_its_tables(site, tmp_path):
    done = python("import ampatch.lists; print(ampatch.lists.__file__)", tmp_path, path=site)
    assert done.stdout.strip() == str(site / "ampatch" / "lists" / "__init__.py"), done.stderr


def test_the_tables_cannot_be_imported_a_second_time_from_the_source_tree():
    done = python("import lists", ROOT)
    assert done.returncode == 1
    assert "ampatch.lists" in done.stderr.splitlines()[-1]
