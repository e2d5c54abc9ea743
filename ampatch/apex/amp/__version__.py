"""The version that `apex.amp` said it had, which scripts print."""

VERSION = (0, 1, 0)
__version__ = ".".join(map(str, VERSION))
