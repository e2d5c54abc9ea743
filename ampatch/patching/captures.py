"""CUDA graphs: what is noted outside of the device while one is captured, and repeated by its replays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from weakref import WeakKeyDictionary

import torch

from ampatch.casts.cast import CASTS
from ampatch.patching.patcher import Patcher, SessionPatch, get_raw

Repeats = list[Callable[[], None]]


class Captures(SessionPatch):
    """Knows whether a thread captures a CUDA graph, and has each replay repeat what the capture noted.

    A replay computes on the device what was captured. What Python notes beside it, an outcome that the next
    step must look at for example, is put into `current()` during the capture and called after each replay.
    Casts end where a capture begins and ends and after each replay: one from before would be a constant of
    the graph, what a capture casts is computed by replays alone, and a graph may hold an optimizer's step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[int, Repeats] = {}  # by thread
        self._repeats: WeakKeyDictionary[torch.cuda.CUDAGraph, Repeats] = WeakKeyDictionary()

    def current(self) -> Repeats | None:
        """Returns what collects what is to be repeated, None if this thread captures nothing."""
        return self._open.get(get_ident()) if self._open else None  # torch.compile knows no get_ident

    def patch(self, patcher: Patcher) -> None:
        """Replaces the methods by which graphs are captured and replayed."""
        names = ("capture_begin", "capture_end", "replay")
        originals = {name: get_raw(torch.cuda.CUDAGraph, name) for name in names}

        def capture_begin(graph: torch.cuda.CUDAGraph, *args: object, **kwargs: object) -> None:
            CASTS.forget_casts()  # first: it may raise
            originals["capture_begin"](graph, *args, **kwargs)
            self._open[get_ident()] = self._repeats[graph] = []

        def capture_end(graph: torch.cuda.CUDAGraph) -> None:
            self._open.pop(get_ident(), None)
            CASTS.forget_casts()
            originals["capture_end"](graph)

        def replay(graph: torch.cuda.CUDAGraph) -> None:
            originals["replay"](graph)
            CASTS.forget_casts()
            for repeat in self._repeats.get(graph, ()):
                repeat()

        for name, function in zip(names, (capture_begin, capture_end, replay), strict=True):
            patcher.replace(torch.cuda.CUDAGraph, name, functools.wraps(originals[name])(function))

    def forget(self) -> None:
        """Drops what replays would repeat."""
        self._open.clear()
        self._repeats.clear()
