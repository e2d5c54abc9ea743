"""The tests on every torch that ampatch supports: `nox -s tests-2.6`, and so on; `nox -l` lists them."""

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["tests-2.13"]

# Of each the oldest or newest Python that it goes with, such that all from 3.10 on have their turn.
RELEASES = {"2.6": "3.10", "2.8": "3.10", "2.11": "3.12", "2.13": "3.11", "2.15": "3.13"}


def add_tests(release: str, python: str) -> None:
    """Adds the session of one torch, in a fresh environment of pinned versions."""

    @nox.session(name=f"tests-{release}", python=python)
    def tests(session: nox.Session) -> None:
        pinned = "constraints.txt" if release == "2.13" else f"constraints/torch-{release}.txt"
        session.install("-c", pinned, f"torch=={release}.*", "-e", ".[test]")
        session.run("pytest", "-n", "2", "--dist", "loadfile", *session.posargs)


for release, python in RELEASES.items():
    add_tests(release, python)
