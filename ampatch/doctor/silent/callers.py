"""Who calls a function of torch: the user's code, torch's own, or ampatch."""

from __future__ import annotations

import os
import sys
from types import FrameType

from ampatch.doctor.instruments.places import OURS

DOCTOR = os.path.dirname(os.path.dirname(__file__)) + os.sep
# What torch puts between a caller and a function under a mode.
BETWEEN = tuple(os.path.join(OURS[1], name) for name in ("overrides.py", "_tensor.py", "_jit_internal.py"))


def find_caller() -> FrameType | None:
    """Returns the innermost frame that is neither of the doctor nor what torch puts between."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((DOCTOR, *BETWEEN, "<frozen ")):
        frame = frame.f_back
    return frame


def is_called_by_user() -> bool:
    """Says whether neither torch nor ampatch calls."""
    frame = find_caller()
    return frame is not None and not frame.f_code.co_filename.startswith(OURS)


def is_called_by_ampatch() -> bool:
    """Says whether ampatch calls, as where it casts."""
    frame = find_caller()
    return frame is not None and frame.f_code.co_filename.startswith(OURS[0])


def is_called_by_doctor() -> bool:
    """Says whether the doctor itself calls a function that it has replaced."""
    wrapper = sys._getframe(2)  # what stands in the function's place
    return wrapper.f_back is not None and wrapper.f_back.f_code.co_filename.startswith(DOCTOR)
