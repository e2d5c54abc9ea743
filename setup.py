"""Builds the folder lists/ as the package ampatch.lists; everything else is in setup.cfg."""

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


setup(cmdclass={"build_py": BuildWithLists})
