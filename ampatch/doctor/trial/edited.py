"""Has a run read files otherwise than they stand on the disk."""

from __future__ import annotations

import io
import linecache
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from types import CodeType

from ampatch.patching.patcher import Patcher


@contextmanager
def edited(texts: Mapping[str, str]) -> Iterator[None]:
    """Has scripts and modules be compiled from these texts, by the absolute paths of their files."""
    patcher, read, load = Patcher(), io.open_code, SourceFileLoader.get_code

    def open_code(path: str) -> io.BufferedIOBase:
        text = texts.get(os.path.abspath(path))
        return read(path) if text is None else io.BytesIO(text.encode())

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        text = texts.get(os.path.abspath(loader.path))
        return load(loader, name) if text is None else loader.source_to_code(text.encode(), loader.path)

    for path, text in texts.items():
        linecache.cache[path] = (len(text), None, text.splitlines(True), path)
    if texts:
        patcher.put(io, "open_code", open_code)
        patcher.put(SourceFileLoader, "get_code", get_code)
    try:
        yield
    finally:
        patcher.close()
        for path in texts:
            linecache.cache.pop(path, None)
