"""Names that programs bound to torch's functions before these were patched, or while they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from torch.nn import Module

from ampatch.levels.undo import weakly
from ampatch.patching.bound_names.loaded_modules import LoadedModules
from ampatch.patching.bound_names.search import Search
from ampatch.patching.bound_names.slots import Change

Function = Callable[..., object]


class ChangesInModule:
    """What was changed inside of a module; a hook of its `load_state_dict`, which does nothing there.

    Since changes refer to the module, nobody else may keep them, or it would never be freed.
    """

    def __init__(self, changes: Iterable[Change] = ()) -> None:
        self._undo = ExitStack()
        for change in changes:
            self._undo.callback(change.revert)

    def __call__(self, module: Module, incompatible_keys: object) -> None:
        pass

    def __deepcopy__(self, memo: dict) -> ChangesInModule:
        return ChangesInModule()

    def __reduce__(self) -> tuple:
        return ChangesInModule, ()

    def attach(self, module: Module) -> None:
        """Has a module keep it."""
        self._undo.callback(module.register_load_state_dict_post_hook(self).remove)

    def revert(self) -> None:
        """Undoes the changes, and lets go of the module."""
        self._undo.close()


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
        self._models: list[weakref.ref[Module]] = []
        self._undo: list[Callable[[], None]] = []

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
        models = list(models)
        self._models = [model for model in self._models if model() is not None]
        before = len(self._undo), len(self._models)
        self._models += map(weakref.ref, models)
        if in_modules:  # first, because what a model shares with the program is the program's
            search = Search(replacements, self._modules)
            search.search_modules()
            self._keep(search.changes)
        search = Search(replacements, self._modules)
        search.search_models(models)
        self._keep(search.changes)
        return lambda: self._forget(*before)

    def _keep(self, changes: Iterable[tuple[Module | None, Change]]) -> None:
        by_owner: dict[int, tuple[Module, list[Change]]] = {}
        for owner, change in changes:
            if "_load_state_dict_post_hooks" in getattr(owner, "__dict__", ()):
                by_owner.setdefault(id(owner), (owner, []))[1].append(change)
            else:
                self._undo.append(change.revert)
        for owner, found in by_owner.values():
            in_module = ChangesInModule(found)
            in_module.attach(owner)
            self._undo.append(weakly(ChangesInModule.revert, in_module))

    def follow_everywhere(self) -> None:
        """Replaces bound functions anew, for a wrapper that was added late."""
        models, self._models = self._models, []
        self.follow(_list_alive(models), in_modules=True)

    def close(self) -> None:
        """Puts the originals back, also where a wrapper was bound since."""
        self._forget(0, 0)
        self._wrappers.clear()
        self._search_wrappers().search_modules(only_names=True)

    def _forget(self, changes: int, models: int) -> None:
        """Undoes what came after so many changes and models."""
        while len(self._undo) > changes:
            self._undo.pop()()
        dropped, kept = _list_alive(self._models[models:]), _list_alive(self._models[:models])
        del self._models[models:]
        others = set(map(id, kept))
        self._search_wrappers().search_models([model for model in dropped if id(model) not in others])

    def _search_wrappers(self) -> Search:
        originals = {id(wrapper): (wrapper, original) for wrapper, original in self._originals.items()}
        return Search(originals, self._modules)


def _list_alive(models: Iterable[weakref.ref[Module]]) -> list[Module]:
    # An empty container of modules is false, and a compiled model may have no length at all.
    return [model for reference in models if (model := reference()) is not None]
