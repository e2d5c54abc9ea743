"""Has Python compile a source that says `async=`, which was an argument's name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

from ampatch.apex.legacy.finding import KEYWORD, ROWS
from ampatch.apex.legacy.mending.names import Told
from ampatch.apex.legacy.mending.ranks import put_rank_first
from ampatch.apex.legacy.pattern_rows import ASYNC


def mend_source(source: bytes) -> bytes:
    """Returns a source that Python parses, if it says `async=` where that was an argument's name.

    >>> mend_source(b"x.cuda(async=True)"), mend_source(b"'async=' in text")
    (b'x.cuda(non_blocking=True)', b"'async=' in text")
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of the source itself, with its name
        try:
            compile(source, "<script>", "exec", dont_inherit=True)
        except SyntaxError:
            return KEYWORD.sub(b"non_blocking", source)
    return source


def compile_mended(
    source_to_code: Callable, told: Told, /, self: object, data: object, path: object, **options: object
) -> object:
    """Has the modules of a script compiled with their sources mended."""
    mended = mend_source(data) if isinstance(data, bytes) else data
    if isinstance(mended, bytes):
        put_rank_first(told, mended, os.fsdecode(path))
    if mended is not data:
        told.tell(ROWS[ASYNC], os.path.relpath(os.fsdecode(path)))
    return source_to_code(self, mended, path, **options)
