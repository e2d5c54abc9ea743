"""The errors that ampatch raises, all of one family.

Every error is an `AmpError`, which is a `RuntimeError` because that is what scripts written for
apex catch. The built-in type that fits the fault is mixed in, so `except ValueError` works as well.
"""


class AmpError(RuntimeError):
    """Base of every error that ampatch raises."""


class AmpValueError(AmpError, ValueError):
    """An argument has the right type, but a value that cannot work."""


class AmpTypeError(AmpError, TypeError):
    """An argument has a type that cannot work."""


class TableError(AmpValueError):
    """A version of torch (the installed one, or one in a cast table) cannot be parsed."""


class NotInitializedError(AmpError, AttributeError):
    """`initialize` has not been called.

    Also an `AttributeError`: scripts written for apex probe `amp.state_dict()` that way.
    """


class BannedFunctionError(AmpError, NotImplementedError):
    """A function that cannot be computed safely on half tensors was called on one."""


class PatchConflictError(AmpError):
    """Other code replaced what ampatch had patched, so undoing ampatch's patch would undo that one too."""
