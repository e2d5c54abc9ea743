"""Says which packages are missing, and what installs them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from ampatch import AmpError


def require(*packages: str, also: Sequence[str] = ()) -> None:
    """Raises AmpError if packages are missing, with the command that installs them; and `also` these."""
    missing = [name for name in (*packages, *also) if importlib.util.find_spec(name) is None]
    if absent := [name for name in packages if name in missing]:
        are = "is" if len(absent) == 1 else "are"
        raise AmpError(f"{' and '.join(absent)} {are} not installed: pip install {' '.join(missing)}")
