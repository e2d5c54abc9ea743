"""What is in torch's namespaces at one moment, to compare with later, by identity."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
import types
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from operator import is_

from ampatch.lists import TABLES
from ampatch.session.distributed import IMPORTED_LATER

# Where ampatch patches, or might, beside the places of the tables: under torch.
PLACES = (
    *("nn", "nn.init", "nn.Module", "nn.Parameter", "nn.RNNBase", "nn.modules.module", "nn.modules.rnn"),
    *("nn.utils", "nn.utils.clip_grad", "overrides", "utils", "utils.checkpoint", "utils.dlpack"),
    *("amp.autocast_mode.autocast", "amp.GradScaler", "autograd", "backends.mha", "compiler.config"),
    *(
        "cuda",
        "cuda.CUDAGraph",
        "fx.graph",
        "jit._builtins",
        "jit._recursive",
        "jit._script",
        "_jit_internal",
    ),
    *("optim", "optim.Optimizer", "optim.lr_scheduler", "optim.swa_utils.AveragedModel"),
    *("_tensor", "_ops.OpOverload", "_ops.OpOverloadPacket", "_ops.TorchBindOpOverload"),
    *("_library.autograd.Info", "_library.custom_ops.CustomOpDef"),
    *("_dynamo.eval_frame.OptimizedModule", "_dynamo.variables.builtin.BuiltinVariable"),
    *("_dynamo.variables.tensor.TensorVariable", "_dynamo.trace_rules"),
)
# torch.optim deletes the name of its own submodule, so that these are found by import.
HOOKED = ("torch.optim.optimizer", "torch.nn.modules.module")
# These change vars(torch) when they are first imported, torch.manual_seed among it.
LAZY = ("torch._dynamo", "torch._inductor", "torch.onnx")
_ABSENT = object()
# Python notes there which warnings a module has shown, how to copy instances of a class, and its annotations.
PYTHONS_OWN = ("__warningregistry__", "__slotnames__", "__annotations_cache__")
# Dynamo replaces the first of these for good when it compiles a module, CUDA the others at its first use.
TORCHS_OWN = (
    *("torch.nn.Module.___needs_generation_tag_patch", "torch.nn.Module.___has_generation_tag_patch"),
    *("torch.nn.Module.__init__", "torch.nn.Module.__setstate__", "torch.cuda._initialized"),
    *(
        "torch.cuda._cached_device_count",
        "torch.cuda._get_device_properties",
        "torch.cuda.default_generators",
    ),
)


@dataclass(frozen=True, slots=True)
class TorchSnapshot:
    """Torch's namespaces and global hooks as they were when it was taken.

    >>> snapshot = TorchSnapshot.take()
    >>> snapshot.changes()
    []
    """

    namespaces: Mapping[str, Mapping[str, object]]
    hooks: Mapping[str, list[tuple[object, object]]]

    @classmethod
    def take(cls) -> TorchSnapshot:
        """Remembers what is there now.

        The first time it imports those parts of torch that change torch's namespace when they are
        imported, which takes seconds: later that would look like a change.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where they are errors, torch's own must not be ours
            for name in LAZY:
                importlib.import_module(name)
        imported = [place for module, place in IMPORTED_LATER.items() if module in sys.modules]
        targets = [table.target for table in TABLES if _exists(table.target)]
        places = [*(f"torch.{place}" for place in PLACES), *imported, *targets]
        namespaces = {path: dict(_look_up(path)) for path in places}
        namespaces |= {path: dict(vars(importlib.import_module(path))) for path in HOOKED}
        hooks = {
            f"{path}.{name}": list(item.items())
            for path in HOOKED
            for name, item in namespaces[path].items()
            if name.startswith("_global_") and isinstance(item, dict)
        }
        return cls(namespaces, hooks)

    def changes(self) -> list[str]:
        """Names of what is not the same object any more; the import of a submodule is no change."""
        now = TorchSnapshot.take()
        changed = [
            f"{path}.{name}"
            for path, old in self.namespaces.items()
            for name in _changes(old, now.namespaces[path])
            if f"{path}.{name}" not in TORCHS_OWN
        ]
        hooks = [name for name, old in self.hooks.items() if now.hooks[name] != old]
        return sorted([*changed, *hooks])

    def check(self) -> None:
        """Raises AssertionError, naming what has changed, unless torch is as it was."""
        changes = self.changes()
        if changes:
            raise AssertionError(f"torch is not as it was: changed are {', '.join(changes)}")


@functools.cache
def _look_up(path: str) -> Mapping[str, object]:
    """Returns the names of a module or class, live; to find them takes longer than to copy them."""
    namespace: Mapping[str, object] = vars(pkgutil.resolve_name(path))
    return namespace


def _exists(path: str) -> bool:
    """Whether this torch has the place of a table."""
    try:
        _look_up(path)
    except (ImportError, AttributeError):
        return False
    return True


def _changes(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    if list(old) == list(new) and all(map(is_, old.values(), new.values())):
        return []  # mostly: after each test
    other = [name for name, item in new.items() if old.get(name, _ABSENT) is not item]
    added = [name for name in other if name not in old and isinstance(new[name], types.ModuleType)]
    gone = old.keys() - new.keys()
    return [name for name in (*other, *gone) if name not in added and name not in PYTHONS_OWN]
