"""Lets modules that torch.fx made look functions up where these are patched."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch.fx
from torch.fx import GraphModule
from torch.nn import Module

from ampatch.levels.private import QUALIFY
from ampatch.patching.patcher import Patcher


class GraphNames:
    """Has generated code name functions by their patched places.

    It names a builtin by where torch keeps it, as in `torch._C._nn.linear`, which stays unpatched: what is
    there is what tensor subclasses are told was called.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def add(self, original: object, place: tuple[str | None, str]) -> None:
        """Notes where a function is patched; of several places the first counts."""
        if str(getattr(original, "__module__", None)).startswith("torch._C."):
            self._names.setdefault(id(original), ".".join(filter(None, place)))

    def open(self, patcher: Patcher) -> None:
        """Replaces the function that names functions in generated code."""

        original = QUALIFY.find()
        if original is None:
            return

        def name(function: object) -> str:
            return self._names.get(id(function)) or original(function)

        patcher.replace(torch.fx.graph, "_get_qualified_name", name)

    def follow(self, models: Iterable[Module]) -> Callable[[], None]:
        """Generates the code of models and their parts once more; returns the undo."""
        followed = []
        parts = [part for model in models for part in model.modules()]
        for module in [part for part in parts if isinstance(part, GraphModule)]:
            if any(id(node.target) in self._names for node in module.graph.nodes):
                module.recompile()
                followed.append(weakref.ref(module))
        return lambda: self._unfollow(followed)

    def _unfollow(self, modules: list[weakref.ref[GraphModule]]) -> None:
        """Generates the code of modules as it was."""
        names, self._names = self._names, {}
        for module in [alive for reference in modules if (alive := reference()) is not None]:
            module.recompile()
        self._names = names

    def close(self) -> None:
        """Forgets the names."""
        self._names.clear()
