"""Says which packages are missing, and what installs them."""

from __future__ import annotations

import importlib.util

from ampatch import AmpError

# What the extra of this name brings, all at once.
TOOLS = "'ampatch[tools]'"
IN_TOOLS = ("rich", "numpy")


def require(*packages: str) -> None:
    """Raises AmpError if packages are missing, with the command that installs them."""
    if absent := [name for name in packages if importlib.util.find_spec(name) is None]:
        are = "is" if len(absent) == 1 else "are"
        wanted = dict.fromkeys(TOOLS if name in IN_TOOLS else name for name in absent)
        raise AmpError(f"{' and '.join(absent)} {are} not installed: pip install {' '.join(wanted)}")
