"""Gives a script of earlier years what it expects: what `ampatch run --legacy` sets up, and undoes."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import linecache
import os
import pickle
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from importlib.machinery import SourceFileLoader
from types import ModuleType

import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Sampler

from ampatch.apex.changes import Changes, script_frame, wrap
from ampatch.apex.legacy.arrays import load_objects, make_array, read_bytes
from ampatch.apex.legacy.finding import KEYWORD, READS_RANK, ROWS
from ampatch.apex.legacy.functions import fft
from ampatch.apex.legacy.names import LIBRARIES, Places, Told, put_back_names, tell
from ampatch.apex.legacy.patterns import LIBROSA, POSITIONAL, librosa_wants_names, reads_rank
from ampatch.apex.legacy.table import ASYNC, LOAD
from ampatch.apex.legacy.tensors import LegacyMode, init_at_port

OPTION = re.compile(r"add_argument\([^)]*local[-_]rank")
RANKS = frozenset({"--local_rank", "--local-rank"})


def load_all(load: Callable, told: Told, /, f: object, *args: object, **kwargs: object) -> object:
    """Has `torch.load` load objects as well, where a script says nothing of it."""
    place = f.tell() if hasattr(f, "tell") else 0
    try:
        return load(f, *args, **kwargs)
    except pickle.UnpicklingError:
        if kwargs.get("weights_only") is not None:
            raise
    told.tell(ROWS[LOAD])
    if hasattr(f, "seek"):
        f.seek(place)
    return load(f, *args, **kwargs | {"weights_only": False})


def init_silently(init: Callable, told: Told, /, self: object, *args: object, **kwargs: object) -> None:
    """Has a scheduler take `verbose`, and be silent."""
    if "verbose" in kwargs:
        told.tell(ROWS["lr_scheduler(verbose=)"])
        del kwargs["verbose"]
    init(self, *args, **kwargs)


def init_sampler(init: Callable, told: Told, /, self: object, data_source: object = None) -> None:
    """Has a sampler take what it is to draw from, with which it never did anything."""
    if data_source is not None:
        told.tell(ROWS["Sampler.__init__(data)"])


def init_with_floats(
    init: Callable,
    told: Told,
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
        told.tell(ROWS["Adam(betas=(0, 0.9))"])
        betas = tuple(map(float, betas))
    init(self, params, lr, betas, *args, **kwargs)


def parse_rank(
    parse: Callable,
    told: Told,
    /,
    self: argparse.ArgumentParser,
    args: Iterable[str] | None = None,
    namespace: object = None,
) -> object:
    """Gives an option --local_rank or --local-rank what launchers gave it, who set LOCAL_RANK today.

    As they wrote into `sys.argv`, a list of the script's own is parsed as it is.
    """
    words = sys.argv[1:] if args is None else list(args)
    if words != sys.argv[1:] and not isinstance(args, Rest):
        return parse(self, words, namespace)
    said = {word.partition("=")[0] for word in words}
    given: list[argparse.Action] = []
    with Changes() as changes:
        for parser in parsers(self):
            own = [action for action in parser._actions if is_rank(action)]
            given += (each for each in own if give_rank(changes, each, said, namespace))
            options = parser._option_string_actions
            for word in (RANKS & said).difference(options) if own else ():
                options[word] = own[0]
                changes.callback(options.pop, word)
                given.append(own[0])
        found, rest = parse(self, words, namespace)
    frame = script_frame()
    text = "".join(linecache.getlines(frame.f_code.co_filename)) if frame and given else ""
    if any(hasattr(found, action.dest) for action in given) and not READS_RANK.search(text):
        told.tell(ROWS["--local_rank"])
    return found, Rest(rest)


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


def give_rank(changes: Changes, action: argparse.Action, said: Set[str], namespace: object) -> bool:
    """Has LOCAL_RANK be the value of an option that is not said; returns whether a rank has another there."""
    rank = os.environ.get("LOCAL_RANK")
    if not rank or said & {*action.option_strings, *RANKS} or hasattr(namespace, action.dest):
        return False
    is_alone = rank != "0" or os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
    if is_alone and str(action.default) == rank and not action.required:
        return False
    changes.set_attribute(action, "default", rank)
    changes.set_attribute(action, "required", False)
    return True


def sample_any(
    sample: Callable, told: Told, /, self: object, population: object, *args: object, **kw: object
) -> list:
    """Has `random.sample` draw from sets, in the order that they have."""
    if isinstance(population, Set):
        told.tell(ROWS["random.sample(set(...), k)"])
        population = tuple(population)
    return sample(self, population, *args, **kw)


def load_yaml(load: Callable, told: Told, /, stream: object, Loader: object = None) -> object:
    """Has `yaml.load` and `load_all` take the loader that was theirs."""
    if Loader is None:
        told.tell(ROWS["yaml.load(file)"])
        Loader = sys.modules["yaml"].FullLoader
    return load(stream, Loader)


def take_positional(function: Callable, told: Told, /, *args: object, **kwargs: object) -> object:
    """Has a function of librosa take arguments without their names, if it does not."""
    count = POSITIONAL[function.__name__]
    if not args[count:] or not librosa_wants_names():
        return function(*args, **kwargs)
    told.tell(ROWS["librosa.filters.mel(sr, n_fft)"])
    names = [
        each for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY
    ]
    named = zip((each.name for each in names), args[count:], strict=False)
    return function(*args[:count], **dict(named), **kwargs)


class OldTransforms(ModuleType):
    """The module torch.fft, which was a function as well."""

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        """Transforms pairs of real and imaginary parts."""
        self._told.tell(ROWS["torch.fft(...)"])
        return fft(*args, **kwargs)


def equal_to_tensors(told: Told) -> Callable:
    """Returns the `==` of the class Variable, which is torch.Tensor to it."""

    def equals(cls: type, other: object) -> bool:
        if other is not Tensor:
            return cls is other
        told.tell(ROWS["type(x) == Variable"])
        return True

    return equals


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


def put_rank_first(told: Told, source: bytes, path: str) -> None:
    """Gives `sys.argv` the rank as launchers did, for a script that looks there without argparse."""
    words, text = sys.argv[1:], source.decode("latin-1")
    said = [word for word in words[:1] if word.startswith("--local-rank=")]
    rank = said[0].partition("=")[2] if said else os.environ.get("LOCAL_RANK")
    is_done = not rank or READS_RANK.search(text) or any(word.startswith("--local_rank") for word in words)
    if is_done or "--local_rank" not in text or OPTION.search(text) or path.startswith(LIBRARIES):
        return
    with suppress(SyntaxError, ValueError):
        if any(map(reads_rank, ast.walk(ast.parse(source)))):
            sys.argv[1 : 1 + len(said)] = [f"--local_rank={rank}"]
            told.tell(ROWS["--local_rank"], os.path.relpath(path))


# Functions that take more than today, by the places that have them.
WIDER = (
    ("torch", "load", load_all),
    ("torch.distributed", "init_process_group", init_at_port),
    ("numpy", "fromstring", read_bytes),
    *(("numpy", name, make_array) for name in ("array", "asarray", "asanyarray")),
    ("numpy", "load", load_objects),
    ("argparse.ArgumentParser", "parse_known_args", parse_rank),
    *((f"torch.optim.{name}", "__init__", init_with_floats) for name in ("Adam", "AdamW")),
    ("random.Random", "sample", sample_any),
    *(("yaml", name, load_yaml) for name in ("load", "load_all")),
    *((place, name, take_positional) for place, names in LIBROSA.items() for name in names),
)


def widen(changes: Changes, told: Told, name: str, wider: Callable, owner: object) -> None:
    """Has a function of a module or class take more."""
    changes.set_attribute(owner, name, wrap(getattr(owner, name), wider, told))
    if owner is random.Random:  # of which the module's function is a method
        changes.set_attribute(random, name, getattr(random._inst, name))


@contextmanager
def legacy() -> Iterator[None]:
    """Puts back what torch, NumPy, Python and other packages have taken away while the context is open.

    The log has a warning for each thing, when a script says it for the first time.
    """
    told = Told()
    with Changes() as changes, LegacyMode(told):
        changes.show_warnings_there()
        places = Places(changes)
        put_back_names(changes, places, told)
        for place, name, wider in WIDER:
            places.change(place, functools.partial(widen, changes, told, name, wider))
        changes.set_class(torch.fft, OldTransforms)
        changes.set_attribute(torch.fft, "_told", told)
        # Made with a generator of its own, since to make one draws a number.
        iterator = type(iter(DataLoader([0], generator=torch.Generator()))).__base__
        changes.set_attribute(iterator, "next", wrap(iterator.__next__, tell, told, ROWS["iterator.next()"]))
        changes.set_attribute(type(torch.autograd.Variable), "__eq__", equal_to_tensors(told))
        for kind in [each for each in vars(lr_scheduler).values() if isinstance(each, type)]:
            if issubclass(kind, lr_scheduler.LRScheduler) and "__init__" in vars(kind):
                changes.set_attribute(kind, "__init__", wrap(kind.__init__, init_silently, told))
        if "__init__" not in vars(Sampler):
            changes.set_attribute(Sampler, "__init__", wrap(Sampler.__init__, init_sampler, told))
        loader = SourceFileLoader
        changes.set_attribute(loader, "source_to_code", wrap(loader.source_to_code, compile_mended, told))
        changes.set_attribute(sys, "dont_write_bytecode", True)  # else what is mended would stay on the disk
        yield
