"""The names of `torch._six`, which torch 2.0 removed, as scripts import them."""

import builtins
import collections.abc as container_abcs
from math import inf, nan

PY2, PY3, PY37 = False, True, True
string_classes = (str, bytes)
int_classes = int
FileNotFoundError = builtins.FileNotFoundError

__all__ = ["PY2", "PY3", "PY37", "FileNotFoundError", "container_abcs", "inf", "int_classes", "nan"]
__all__ += ["string_classes"]
