"""The fixtures: `pytest_plugins = ["ampatch.testing.plugin"]` in a conftest.py loads them.

Pytest does not load them automatically: that would import torch in every run of pytest in
every project of the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

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
