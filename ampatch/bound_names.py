"""Names that programs bound to torch's functions before these were patched, or while they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch.nn import Module

from ampatch.loaded_modules import LoadedModules
from ampatch.search import Search
from ampatch.slots import Change

Function = Callable[..., object]


class BoundNames:
    """Has names such as those of `from torch.nn.functional import softmax` follow the patches.

    They are found by identity in loaded modules and in initialized models. `close` puts back what
    was there, and the originals in the place of wrappers that were bound in the meantime.
    """

    def __init__(self) -> None:
        # Wrappers of closed sessions too: a name that no search reached may still hold one.
        self._originals: weakref.WeakKeyDictionary[Function, object] = weakref.WeakKeyDictionary()
        self._wrappers: dict[int, tuple[object, Function]] = {}
        self._modules = LoadedModules()
        self._models: list[Module] = []
        self._changes: list[Change] = []

    def add(self, original: object, wrapper: Function) -> None:
        """Notes what stands for a function now; of several wrappers the latest counts."""
        self._wrappers[id(original)] = original, wrapper
        self._originals[wrapper] = original

    def follow(self, models: Iterable[Module], *, in_modules: bool) -> Callable[[], None]:
        """Replaces bound functions in models and, if asked, in loaded modules; returns the undo."""
        replacements = dict(self._wrappers)
        for old, original in list(self._originals.items()):
            wrapper = self._wrappers.get(id(original), (None, old))[1]
            if wrapper is not old:
                replacements[id(old)] = old, wrapper
        search = Search(replacements, self._modules)
        models = list(models)
        before = len(self._changes), len(self._models)
        self._models += models
        search.search_models(models)
        if in_modules:
            search.search_modules()
        self._changes += search.changes
        return lambda: self._forget(*before)

    def follow_everywhere(self) -> None:
        """Replaces bound functions anew, for a wrapper that was added late."""
        models, self._models = self._models, []
        self.follow(models, in_modules=True)

    def close(self) -> None:
        """Puts the originals back, also where a wrapper was bound since."""
        self._forget(0, 0)
        self._wrappers.clear()
        self._search_wrappers().search_modules(only_names=True)

    def _forget(self, changes: int, models: int) -> None:
        """Undoes what came after so many changes and models."""
        while len(self._changes) > changes:
            self._changes.pop().revert()
        dropped = self._models[models:]
        del self._models[models:]
        kept = set(map(id, self._models))
        self._search_wrappers().search_models([model for model in dropped if id(model) not in kept])

    def _search_wrappers(self) -> Search:
        originals = {id(wrapper): (wrapper, original) for wrapper, original in self._originals.items()}
        return Search(originals, self._modules)
