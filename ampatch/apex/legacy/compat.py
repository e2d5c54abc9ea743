"""Gives a script of earlier years what it expects: what `ampatch run --legacy` sets up, and undoes."""

from __future__ import annotations

import argparse
import ast
import builtins
import functools
import inspect
import linecache
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import DataLoader, Sampler

from ampatch.apex.changes import ProgramChanges, is_library, script_frame, wrap
from ampatch.apex.legacy import rows
from ampatch.apex.legacy.names import Notices, Places, put_back_names, script_place, warned
from ampatch.apex.legacy.patterns import (
    KEYWORD,
    LIBROSA,
    POSITIONAL,
    READS_RANK,
    find_rank,
    librosa_wants_names,
)
from ampatch.apex.legacy.removed import fft
from ampatch.apex.legacy.rows import Old
from ampatch.apex.legacy.safe_load import Loads
from ampatch.apex.legacy.tensors import LegacyMode, init_at_port, take_byte_mask
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


# ---- Python, torch and others ----


def rename_keywords(
    row: Old,
    names: Mapping[str, str | None],
    function: Callable,
    notices: Notices,
    /,
    *args: object,
    **kwargs: object,
) -> object:
    """Has a function take keywords that have another name today, or none, and then say nothing."""
    if names.keys() & kwargs.keys():
        notices.warn(row)
    named = {names.get(name, name): value for name, value in kwargs.items()}
    named.pop(None, None)
    return function(*args, **named)


silent = functools.partial(rename_keywords, rows.VERBOSE, {"verbose": None})


def find_late(notices: Notices) -> Callable:
    """Returns the `__getattr__` of optimizers, for those made without what all optimizers have."""

    def find(self: Optimizer, name: str) -> object:
        if name == "defaults" or name.startswith("_optimizer_"):
            notices.warn(rows.OPTIMIZER)
            Optimizer.__setstate__(self, {"defaults": vars(self).get("defaults", {})})
        if name in vars(self):
            return vars(self)[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    return find


def init_sampler(init: Callable, notices: Notices, /, self: object, data_source: object = None) -> None:
    """Has a sampler take what it is to draw from, with which it never did anything."""
    if data_source is not None:
        notices.warn(rows.SAMPLER)


def init_with_floats(
    init: Callable,
    notices: Notices,
    /,
    self: object,
    params: object,
    lr: object = 1e-3,
    betas: tuple = (0.9, 0.999),
    *args: object,
    **kwargs: object,
) -> None:
    """Has Adam and AdamW take a 0 among their betas."""
    if any(isinstance(each, int) for each in betas):
        notices.warn(rows.BETAS)
        betas = tuple(map(float, betas))
    init(self, params, lr, betas, *args, **kwargs)


def sample_any(
    sample: Callable, notices: Notices, /, self: object, population: object, *args: object, **kw: object
) -> list:
    """Has `random.sample` draw from sets, in the order that they have."""
    if isinstance(population, Set):
        notices.warn(rows.SAMPLE)
        population = tuple(population)
    return sample(self, population, *args, **kw)


def load_yaml(load: Callable, notices: Notices, /, stream: object, Loader: object = None) -> object:
    """Has `yaml.load` and `load_all` take the loader that was theirs."""
    if Loader is None:
        notices.warn(rows.YAML)
        Loader = sys.modules["yaml"].FullLoader
    return load(stream, Loader)


def take_positional(function: Callable, notices: Notices, /, *args: object, **kwargs: object) -> object:
    """Has a function of librosa take arguments without their names, if it does not."""
    count = POSITIONAL[function.__name__]
    if not args[count:] or not librosa_wants_names():
        return function(*args, **kwargs)
    notices.warn(rows.LIBROSA)
    names = [
        each for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY
    ]
    named = zip((each.name for each in names), args[count:], strict=False)
    return function(*args[:count], **dict(named), **kwargs)


def give_hex_colors(by_key: Callable, notices: Notices, /, self: object) -> dict[str, list]:
    """Has a script get the colors in a cycle of matplotlib as texts, such as "#1f77b4"."""
    values = by_key(self)
    colors = values.get("color", [])
    if script_place() is not None and any(isinstance(each, tuple) for each in colors):
        notices.warn(rows.COLORS)
        to_hex = sys.modules["matplotlib.colors"].to_hex
        values["color"] = [to_hex(each) if isinstance(each, tuple) else each for each in colors]
    return values


# ---- NumPy ----


def read_bytes(
    fromstring: Callable,
    notices: Notices,
    /,
    string: object,
    dtype: object = float,
    count: int = -1,
    *,
    sep: str = "",
    **like: object,
) -> object:
    """Has `numpy.fromstring` read bytes, too."""
    if sep:
        return fromstring(string, dtype, count, sep=sep, **like)
    notices.warn(rows.FROM_STRING)
    return np.frombuffer(string, dtype, count).copy()


def make_array(
    make: Callable, notices: Notices, /, object: object, dtype: object = None, **kwargs: object
) -> np.ndarray:
    """Has NumPy make arrays of rows of several lengths, and copies where it is told to make none."""
    try:
        return make(object, dtype, **kwargs)
    except ValueError as error:
        row = next((row for row in (rows.RAGGED, rows.COPY) if row.error in str(error)), None)
        if row is None or (dtype is not None and row is rows.RAGGED):
            raise
    notices.warn(row)
    if row is rows.COPY:
        return make_array(make, notices, object, dtype, **{**kwargs, "copy": None})
    return make(object, builtins.object, **kwargs)


# ---- The local rank, as launchers of earlier years passed it ----

OPTION = re.compile(r"add_argument\([^)]*local[-_]rank")
RANKS = frozenset({"--local_rank", "--local-rank"})


def parse_rank(
    parse: Callable,
    notices: Notices,
    /,
    self: argparse.ArgumentParser,
    args: Iterable[str] | None = None,
    namespace: object = None,
) -> object:
    """Gives an option --local_rank or --local-rank what launchers gave it, who set LOCAL_RANK today.

    As they wrote into `sys.argv`, a list that does not begin or end with that is parsed as it is.
    """
    argv = sys.argv[1:]
    words = argv if args is None else list(args)
    has_argv = words == argv or (argv and argv in (words[: len(argv)], words[-len(argv) :]))
    if not has_argv and not isinstance(args, Rest):
        return parse(self, words, namespace)
    passed = {word.partition("=")[0] for word in words}
    filled: list[argparse.Action] = []
    with ProgramChanges() as changes:
        for parser in parsers(self):
            own = [action for action in parser._actions if is_rank(action)]
            filled += (each for each in own if give_rank(changes, each, passed, namespace))
            options = parser._option_string_actions
            for word in (RANKS & passed).difference(options) if own else ():
                options[word] = own[0]
                changes.callback(options.pop, word)
                filled.append(own[0])
        parsed, rest = parse(self, words, namespace)
    frame = script_frame()
    text = "".join(linecache.getlines(frame.f_code.co_filename)) if frame and filled else ""
    if any(hasattr(parsed, action.dest) for action in filled) and not READS_RANK.search(text):
        notices.warn(rows.RANK)
    return parsed, Rest(rest)


class Rest(list):
    """Words of `sys.argv` that a parser did not know, which scripts give to the next."""


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yields a parser, and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in {*action.choices.values()}:
                yield from parsers(below)


def is_rank(action: argparse.Action) -> bool:
    """Whether an option is that for the local rank."""
    names = {action.dest, *(word.strip("-").replace("-", "_") for word in action.option_strings)}
    return bool(action.option_strings) and "local_rank" in names


def give_rank(changes: ProgramChanges, action: argparse.Action, passed: Set[str], namespace: object) -> bool:
    """Has LOCAL_RANK be the value of an option that is not said; returns whether a rank has another there."""
    rank = os.environ.get("LOCAL_RANK")
    if not rank or passed & {*action.option_strings, *RANKS} or hasattr(namespace, action.dest):
        return False
    is_alone = rank != "0" or os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
    if is_alone and str(action.default) == rank and not action.required:
        return False
    changes.set_attribute(action, "default", rank)
    changes.set_attribute(action, "required", False)
    return True


def put_rank_first(notices: Notices, source: bytes, path: str) -> None:
    """Gives `sys.argv` the rank as launchers did, for a script that looks there without argparse."""
    words, text = sys.argv[1:], source.decode("latin-1")
    options = [word for word in words[:1] if word.startswith("--local-rank=")]
    rank = options[0].partition("=")[2] if options else os.environ.get("LOCAL_RANK")
    is_done = not rank or READS_RANK.search(text) or any(word.startswith("--local_rank") for word in words)
    is_none = not re.search("local[-_]rank", text) or OPTION.search(text)
    if is_done or is_none or is_library(path):
        return
    with suppress(SyntaxError, ValueError):
        spelled = next(filter(None, map(find_rank, ast.walk(ast.parse(source)))), None)
        if spelled and options != [word := f"{spelled}={rank}"]:
            sys.argv[1 : 1 + len(options)] = [word]
            notices.warn(rows.RANK, os.path.relpath(path))


# ---- All of it ----

TRANSFORMS = {"resample": "interpolation", "fillcolor": "fill"}
# Functions whose keywords have other names today, or none.
RENAMED = (
    (rows.HISTOGRAM, "numpy", "histogram", {"normed": "density"}),
    *((rows.ENCODING, "json", name, {"encoding": None}) for name in ("load", "loads")),
    (rows.RANGE, "torchvision.utils", "make_grid", {"range": "value_range"}),
    *(
        (rows.RESAMPLE, f"torchvision.transforms.{place}", name, TRANSFORMS)
        for place, name in (
            *(("functional", "affine"), ("functional", "rotate")),
            *(("transforms.RandomAffine", "__init__"), ("transforms.RandomRotation", "__init__")),
        )
    ),
)
# Functions that take more than today, by the places that have them.
WIDER = (
    *((place, name, functools.partial(rename_keywords, row, names)) for row, place, name, names in RENAMED),
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


def widen(changes: ProgramChanges, notices: Notices, name: str, wider: Callable, owner: object) -> None:
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
    with ProgramChanges() as changes, LegacyMode(notices):
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
                widen(changes, notices, "__init__", silent, kind)
        changes.set_attribute(Optimizer, "__getattr__", find_late(notices))
        if "__init__" not in vars(Sampler):
            widen(changes, notices, "__init__", init_sampler, Sampler)
        changes.set_attribute(sys, "dont_write_bytecode", True)  # else what is mended would stay on the disk
        yield
