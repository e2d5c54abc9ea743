"""Gives a script of earlier years what it expects: what `ampatch run --legacy` sets up, and undoes."""

from __future__ import annotations

import functools
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Sampler

from ampatch.apex.changes import Changes, wrap
from ampatch.apex.legacy import pattern_rows as rows
from ampatch.apex.legacy.finding import KEYWORD
from ampatch.apex.legacy.gone.functions import fft
from ampatch.apex.legacy.mending.arguments import (
    give_hex_colors,
    init_sampler,
    init_silently,
    init_with_floats,
    load_yaml,
    make_array,
    read_bytes,
    sample_any,
    take_positional,
)
from ampatch.apex.legacy.mending.loading import Loads
from ampatch.apex.legacy.mending.names import Notices, Places, put_back_names, warned
from ampatch.apex.legacy.mending.ranks import parse_rank, put_rank_first
from ampatch.apex.legacy.mending.tensors import LegacyMode, init_at_port, take_byte_mask
from ampatch.apex.legacy.patterns import LIBROSA
from ampatch.levels.private import MASK_CHECKS


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
    source_to_code: Callable, notices: Notices, /, self: object, data: object, path: object, **options: object
) -> object:
    """Has the modules of a script compiled with their sources mended."""
    mended = mend_source(data) if isinstance(data, bytes) else data
    if isinstance(mended, bytes):
        put_rank_first(notices, mended, os.fsdecode(path))
    if mended is not data:
        notices.warn(rows.ASYNC, os.path.relpath(os.fsdecode(path)))
    return source_to_code(self, mended, path, **options)


class OldTransforms(ModuleType):
    """The module torch.fft, which was a function as well."""

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        """Transforms pairs of real and imaginary parts."""
        self._notices.warn(rows.FFT)
        return fft(*args, **kwargs)


def equal_to_tensors(notices: Notices) -> Callable:
    """Returns the `==` of the class Variable, which is torch.Tensor to it."""

    def equals(cls: type, other: object) -> bool:
        if other is not Tensor:
            return cls is other
        notices.warn(rows.VARIABLE)
        return True

    return equals


# Functions that take more than today, by the places that have them.
WIDER = (
    ("torch.distributed", "init_process_group", init_at_port),
    ("numpy", "fromstring", read_bytes),
    *(("numpy", name, make_array) for name in ("array", "asarray", "asanyarray")),
    ("argparse.ArgumentParser", "parse_known_args", parse_rank),
    *((f"torch.optim.{name}", "__init__", init_with_floats) for name in ("Adam", "AdamW")),
    ("random.Random", "sample", sample_any),
    *(("yaml", name, load_yaml) for name in ("load", "load_all")),
    *((place, name, take_positional) for place, names in LIBROSA.items() for name in names),
    ("cycler.Cycler", "by_key", give_hex_colors),
    ("importlib.machinery.SourceFileLoader", "source_to_code", compile_mended),
)


def script_as(function: Callable, wrapper: Callable) -> Callable:
    """Has torch.jit.script compile a function for its wrapper, by what torch has for one of its own."""
    wrapper.__dict__.update({"__script_if_tracing_wrapper": True, "__original_fn": function})
    return wrapper


def widen(changes: Changes, notices: Notices, name: str, wider: Callable, owner: object) -> None:
    """Has a function of a module or class take more."""
    changes.set_attribute(owner, name, wrap(getattr(owner, name), wider, notices))
    if owner is random.Random:  # of which the module's function is a method
        changes.set_attribute(random, name, getattr(random._inst, name))


@contextmanager
def legacy(unsafe_load: bool = False) -> Iterator[None]:
    """Puts back what torch, NumPy, Python and other packages have taken away while the context is open.

    The log has a warning for each thing, when a script says it for the first time. With `unsafe_load` files
    are loaded as well that hold more than data, and each is named.
    """
    notices = Notices()
    with Changes() as changes, LegacyMode(notices):
        changes.show_warnings_in_script()
        places = Places(changes)
        put_back_names(changes, places, notices)
        for place, name, wider in WIDER:
            places.change(place, functools.partial(widen, changes, notices, name, wider))
        for check in MASK_CHECKS:
            if not check.is_missing():
                owner, name = check.find_place()
                taking = script_as(check.find(), wrap(check.find(), take_byte_mask, notices))
                changes.set_attribute(owner, name, taking)
        loads = Loads(notices, unsafe_load)
        for module, wider in ((torch, loads.torch_load), (np, loads.numpy_load)):
            changes.set_attribute(module, "load", wrap(module.load, wider))
        changes.set_class(torch.fft, OldTransforms)
        changes.set_attribute(torch.fft, "_notices", notices)
        # Made with a generator of its own, since to make one draws a number.
        iterator = type(iter(DataLoader([0], generator=torch.Generator()))).__base__
        next_of = wrap(iterator.__next__, warned, notices, rows.NEXT)
        changes.set_attribute(iterator, "next", next_of)
        changes.set_attribute(type(torch.autograd.Variable), "__eq__", equal_to_tensors(notices))
        for kind in [each for each in vars(lr_scheduler).values() if isinstance(each, type)]:
            if issubclass(kind, lr_scheduler.LRScheduler) and "__init__" in vars(kind):
                widen(changes, notices, "__init__", init_silently, kind)
        if "__init__" not in vars(Sampler):
            widen(changes, notices, "__init__", init_sampler, Sampler)
        changes.set_attribute(sys, "dont_write_bytecode", True)  # else what is mended would stay on the disk
        yield
