"""For people who write ops: look an op up, and test what casts do to it."""

from ampatch.testing.casts import assert_casts
from ampatch.testing.opening import session
from ampatch.testing.rows import parametrize_rows
from ampatch.testing.snapshot import TorchSnapshot

__all__ = ["TorchSnapshot", "assert_casts", "parametrize_rows", "session"]
