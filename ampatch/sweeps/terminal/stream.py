"""A standard stream that takes any text, and may fail, as a full disk does, without an end to the sweep."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TextIO

from ampatch import AmpError


class Stream:
    """Passes text on to a stream; after its first error, which it keeps, nothing."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._error: OSError | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes text, and says that all of it was taken."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._try("write", text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Sends what was written on its way."""
        self._try("flush")

    def _try(self, method: str, *given: str) -> None:
        if self._stream is None or self._error is not None:
            return
        try:
            getattr(self._stream, method)(*given)
        except OSError as error:
            self._error = error
            with suppress(OSError):  # of a stream that is no file
                # What the stream still holds is flushed when Python ends.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def raise_error(self) -> None:
        """Raises BrokenPipeError if nobody read what was written, AmpError if it failed in another way."""
        self.flush()
        if isinstance(self._error, BrokenPipeError):
            raise self._error
        if self._error is not None:
            raise AmpError(f"the table could not be printed: {self._error.strerror}")
