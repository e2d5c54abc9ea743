"""A fixture for tests, and options that run a whole suite in a session.

`pytest_plugins = ["ampatch.testing.plugin"]` in a conftest.py loads them, as does
`pytest -p ampatch.testing.plugin`. Pytest does not load them automatically: that would import torch in
every run of pytest in every project of the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext

import pytest

import ampatch as amp
from ampatch.testing.opening import session
from ampatch.testing.snapshot import TorchSnapshot


@pytest.fixture
def amp_session() -> Iterator[Callable[..., object]]:
    """A function that opens a session for the rest of the test, and returns what `initialize` returns.

    It takes the arguments of `ampatch.testing.session`, and can be called once per test. When the test
    is over, the session is undone, and the test fails if anything in torch is not what it was before,
    by identity.
    """
    snapshot = TorchSnapshot.take()
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(session(*args, **kwargs))
    snapshot.check()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what asks for a session: at which level, and whether each test has one of its own."""
    group = parser.getgroup("ampatch")
    group.addoption("--amp-level", choices=list(amp.OPT_LEVELS), help="runs the tests in a session")
    group.addoption("--amp-each-test", action="store_true", help="opens one for each test")


def pytest_configure(config: pytest.Config) -> None:
    """Opens the session of the whole run before the tests are imported, and with them what they test."""
    if not config.getoption("--amp-each-test", False):
        stack = ExitStack()
        stack.enter_context(_asked_session(config))
        config.add_cleanup(stack.close)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Runs a test, with its fixtures, in a session of its own."""
    if not item.config.getoption("--amp-each-test", False):
        return (yield)
    with _asked_session(item.config):
        return (yield)


def _asked_session(config: pytest.Config) -> AbstractContextManager[object]:
    # A conftest.py that is loaded late brings the options after the command line was read.
    level = config.getoption("--amp-level", None)
    return session(level) if level else nullcontext()
