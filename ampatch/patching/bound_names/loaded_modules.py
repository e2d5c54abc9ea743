"""The loaded modules whose names are looked through for torch's functions."""

from __future__ import annotations

import sys
import sysconfig
import weakref
from types import FunctionType, ModuleType

# What torch and those that patch it keep is what they need to work, or to undo.
_LEFT_ALONE = frozenset({"ampatch", "functorch", "torch", "torchgen", "triton", "wrapt"})
# Of torch itself only this part calls functions that have rows by names of its own (torch 2.13).
_SEARCHED_IN_TORCH = ("torch.distributions.",)
_STANDARD_LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


class LoadedModules:
    """Knows which modules are searched: those of users, and of packages that use torch.

    Python's own, torch's and those of packages without anything of torch's are left alone.
    """

    def __init__(self) -> None:
        self._left_alone = _LEFT_ALONE | set(filter(_is_standard, sys.stdlib_module_names))
        self._passed: set[str] = set()  # names of modules that are left alone
        self._without_torch: weakref.WeakSet[ModuleType] = weakref.WeakSet()
        self._searched: weakref.WeakSet[ModuleType] = weakref.WeakSet()

    def is_searched(self, name: str) -> bool:
        """Whether what a module defines is looked into, by the module's name."""
        return name.partition(".")[0] not in self._left_alone or name.startswith(_SEARCHED_IN_TORCH)

    def list_searched(self) -> list[ModuleType]:
        """The modules to look through that are loaded now."""
        shadowed = {name for name in self._left_alone - _LEFT_ALONE if not _is_standard(name)}
        self._left_alone -= shadowed
        self._passed -= shadowed
        modules = [item for item in list(sys.modules.items()) if item[0] not in self._passed]
        self._passed.update(name for name, _ in modules if not self.is_searched(name))
        return [
            module
            for name, module in modules
            if name not in self._passed and issubclass(type(module), ModuleType) and self._uses_torch(module)
        ]

    def mark_searched(self, module: ModuleType) -> bool:
        """Notes that a module is being searched, and returns whether it was before."""
        is_known = module in self._searched
        self._searched.add(module)
        return is_known

    def _uses_torch(self, module: ModuleType) -> bool:
        if module in self._without_torch:
            return False
        names = read_globals(module)
        is_users = not is_installed(names) or names.get("__name__") == "__main__"
        if is_users or any(map(_is_of_torch, list(names.values()))):
            return True
        self._without_torch.add(module)
        return False


def read_globals(module: ModuleType) -> dict[str, object]:
    """Returns the names of a module, past the `__getattribute__` that loads one that is lazy."""
    return ModuleType.__getattribute__(module, "__dict__")


def is_installed(names: dict[str, object]) -> bool:
    """Whether these are the names of a module of an installed package."""
    file = names.get("__file__")
    return isinstance(file, str) and ("site-packages" in file or "dist-packages" in file)


def _is_standard(name: str) -> bool:
    """Whether a name of a module of Python's stands for that, and not for a user's `test.py`."""
    module = sys.modules.get(name)
    file = None if module is None else read_globals(module).get("__file__")
    return name != "__main__" and (file is None or str(file).startswith(_STANDARD_LIBRARY))


def _is_of_torch(value: object) -> bool:
    """Whether a global is torch, one of its modules, or something that they define."""
    kind = type(value)
    if kind is ModuleType:
        name = read_globals(value).get("__name__")  # type: ignore[arg-type]
    elif kind is FunctionType:
        name = value.__module__
    elif issubclass(kind, type):
        name = type.__getattribute__(value, "__dict__").get("__module__")  # type: ignore[arg-type]
    else:
        return False
    return isinstance(name, str) and name.partition(".")[0] == "torch"
