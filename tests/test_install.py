"""What pip installs is complete, and the source tree cannot be mistaken for it."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import setuptools

import ampatch as amp

pytestmark = pytest.mark.process

DIST_INFO = f"ampatch-{amp.__version__}.dist-info"
ROOT = Path(__file__).parents[1]
ONLY_GIT = (".github/", ".gitignore", ".pre-commit-config.yaml")  # is for these, and not in an sdist
GENERATED = ("PKG-INFO", "ampatch.egg-info/")


# Without isolation, since that would fetch setuptools; the extra `test` brings it.
OFFLINE = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]


def project():
    """Returns the files that git knows of or would take; in an unpacked sdist those that it lists."""
    if (ROOT / ".git").exists():
        git = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"]
        said = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    else:
        said = (ROOT / "ampatch.egg-info" / "SOURCES.txt").read_text()
    names = {os.path.normpath(name) for name in said.splitlines()}  # setuptools lists some as ./ampatch/...
    return {name for name in names if (ROOT / name).exists() and not name.startswith(GENERATED)}


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Copies the project into a folder of the name that a clone has: a build leaves folders behind."""
    clone = tmp_path_factory.mktemp("projects") / "ampatch"
    for name in project():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    return clone


@pytest.fixture(scope="module")
def sdist(clone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True)
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(clone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", *OFFLINE, "--wheel-dir", folder, clone]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


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


def test_an_sdist_holds_the_project_and_nothing_else(sdist):
    with tarfile.open(sdist) as file:
        names = {member.name.partition("/")[2] for member in file if member.isfile()}
    assert {name for name in names if not name.startswith(GENERATED)} == {
        name for name in project() if not name.startswith(ONLY_GIT)
    }


def links(text):
    return re.findall(r"\]\(([^)\s]+)\)", text)


def test_the_page_of_the_package_has_a_license_and_links_to_files_of_this_version(site):
    page = importlib.metadata.PathDistribution(site / DIST_INFO).metadata.json
    assert page["license_expression"] == "BSD-3-Clause"
    [home] = [url.partition(", ")[2] for url in page["project_url"] if url.startswith("Source, ")]
    written = links((ROOT / "README.md").read_text(encoding="utf-8"))
    there = [it if ":" in it else f"{home}/blob/v{amp.__version__}/{it}" for it in written]
    assert links(page["description"]) == there


def test_the_pythons_that_the_package_names_are_those_that_nox_and_ci_run(site):
    [text] = re.findall(r"^RELEASES = (.+)", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    named = importlib.metadata.PathDistribution(site / DIST_INFO).metadata.get_all("Classifier")
    pythons = {python for pythons in ast.literal_eval(text).values() for python in pythons}
    assert {it.rpartition(" ")[2] for it in named if ":: Python :: 3." in it} == pythons


def test_the_installed_package_has_the_command_and_finds_its_tables(site, tmp_path):
    assert "ampatch = ampatch.__main__:main" in (site / DIST_INFO / "entry_points.txt").read_text()
    done = python("import ampatch.lists; print(ampatch.lists.__file__)", tmp_path, path=site)
    assert done.stdout.strip() == str(site / "ampatch" / "lists" / "__init__.py"), done.stderr


def test_the_tables_cannot_be_imported_a_second_time_from_the_source_tree():
    done = python("import lists", ROOT)
    assert done.returncode == 1
    assert "ampatch.lists" in done.stderr.splitlines()[-1]


def make_environment(folder, *installed):
    """Makes a virtual environment with setuptools and ampatch; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    interpreter = folder / "bin" / "python"
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "setuptools.pth").write_text(str(Path(setuptools.__file__).parents[1]))
    if installed:
        pip = [sys.executable, "-m", "pip", "--python", interpreter, "install", *OFFLINE]
        subprocess.run([*pip, *installed], check=True)
    return interpreter


# Without torch, which takes seconds: a folder without `__init__.py` has no origin.
FIND = "from importlib.util import find_spec; print(find_spec('ampatch').origin)"


def test_every_way_of_installing_works_beside_the_clone_in_it_and_elsewhere(clone, tmp_path):
    ways = {
        "editable": (make_environment(tmp_path / "editable", "-e", clone), ""),
        "installed": (make_environment(tmp_path / "installed", clone), ""),
        "on PYTHONPATH": (make_environment(tmp_path / "bare"), str(clone)),
    }
    found = {}
    for place in (clone.parent, clone, tmp_path):
        (place / "train.py").write_text(FIND)
        for way, (interpreter, path) in ways.items():
            environment = os.environ | {"PYTHONPATH": path}
            command = [interpreter, place / "train.py"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            found[way, place.name] = done.stdout.strip() or done.stderr
    assert {case: said for case, said in found.items() if not said.endswith("ampatch/__init__.py")} == {}


def test_a_source_tree_finds_its_tables(clone, tmp_path):
    done = python("import ampatch.lists; print(ampatch.lists.__file__)", tmp_path, path=clone)
    assert done.stdout.strip() == str(clone / "lists" / "__init__.py"), done.stderr
