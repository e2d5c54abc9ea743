"""What scripts of earlier years say and today's torch, NumPy and Python do not take, and how it is found."""

from contextlib import AbstractContextManager

from ampatch import AmpError


def open_legacy(unsafe_load: bool = False) -> AbstractContextManager[None]:
    """Returns what mends a script of earlier years; raises AmpError without NumPy, whose names come back."""
    try:
        from ampatch.apex.legacy.compat import legacy
    except ModuleNotFoundError as error:
        raise AmpError(f"--legacy needs {error.name}: pip install {error.name}") from error
    return legacy(unsafe_load)
