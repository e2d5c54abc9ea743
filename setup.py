"""Builds lists/ as ampatch.lists, and describes the package by README; everything else is in setup.cfg."""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithLists(build_py):
    """Has lists/ at build time alone, so that an editable install puts this folder on sys.path.

    For a `package_dir` that names lists/, setuptools installs a finder instead. That comes after sys.path,
    where a clone in a folder named `ampatch` is an empty namespace package; and type checkers see no finders.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.packages = [*self.packages, "ampatch.lists"]
        self.package_dir = {**self.package_dir, "ampatch.lists": "lists"}


def describe() -> str:
    """Returns README, whose links between files lead to those of this version in the repository."""
    code = Path("ampatch/__init__.py").read_text(encoding="utf-8")
    [version] = re.findall(r'^__version__ = "(.+)"$', code, re.MULTILINE)
    files = f"https://github.com/ampatch/ampatch/blob/v{version}"
    return re.sub(r"\]\((?!https?:)", f"]({files}/", Path("README.md").read_text(encoding="utf-8"))


setup(cmdclass={"build_py": BuildWithLists}, long_description=describe())
