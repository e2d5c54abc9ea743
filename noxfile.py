"""The one entry to every check: `nox` runs lint, types, docs and the short suite; `nox -l` lists more."""

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "types", "docs", "tests"]

PINNED = "constraints.txt"
QUIET = {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement of the theme's
SHARED = ("-n", "2", "--dist", "loadfile")
# Of each the oldest or newest Python that it goes with, such that all from 3.10 on have their turn. The
# workflows in .github read this table, and a test compares it with the classifiers in setup.cfg.
RELEASES = {"2.6": ["3.10"], "2.8": ["3.10"], "2.11": ["3.12"], "2.13": ["3.11", "3.14"], "2.15": ["3.13"]}
CURRENT = "2.13"  # of constraints.txt, which its first Python goes with


def install(session: nox.Session, extras: str) -> None:
    """Installs ampatch from this folder, in the versions that CI runs."""
    session.install("-c", PINNED, "-e", f".[{extras}]")


@nox.session
def lint(session: nox.Session) -> None:
    """Says what ruff finds, and whether files are formatted."""
    session.install("-c", PINNED, "ruff")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """Checks the public names by mypy; docs/start.md and the examples by mypy and pyright (with node)."""
    install(session, "test,checks")
    session.run("mypy")
    session.run("pytest", "tests/test_types.py", "--all")


@nox.session
def docs(session: nox.Session) -> None:
    """Builds the site into site/; runs the blocks of README and the pages, and the examples in docstrings."""
    install(session, "test,docs")
    session.run("mkdocs", "build", "--strict", env=QUIET)
    session.run("pytest", "tests/test_readme.py", "ampatch")


@nox.session
def tests(session: nox.Session) -> None:
    """Runs the short suite; `nox -s tests -- --all` runs all of it."""
    install(session, "test")
    session.run("pytest", *SHARED, *session.posargs)


@nox.session
def trainers(session: nox.Session) -> None:
    """Runs the plugins for trainers with the packages that they are for."""
    install(session, "test,trainers,timm")
    session.run("pytest", "tests/test_trainers.py", "--all")


@nox.session
def mutants(session: nox.Session) -> None:
    """Plants faults in the engine and counts those that no test catches: `nox -s mutants -- --count 300`."""
    install(session, "test")
    session.install("pytest-cov")
    session.run("python", "tests/mutants.py", *session.posargs)


def add_tests(release: str, pythons: list[str]) -> None:
    """Adds the sessions of one torch, which run the whole suite in a fresh environment of pinned versions."""

    @nox.session(name=f"tests-{release}", python=pythons)
    def tests(session: nox.Session) -> None:
        pinned = PINNED if release == CURRENT else f"constraints/torch-{release}.txt"
        session.install("-c", pinned, f"torch=={release}.*", "-e", ".[test]")
        session.run("pytest", *SHARED, "--all", *session.posargs)


for release, pythons in RELEASES.items():
    add_tests(release, pythons)
