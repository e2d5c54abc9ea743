"""Reads what in a script breaks today, or needs CUDA, and in which lines, without running it."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from torch.optim import lr_scheduler

from ampatch.apex.drop_in.mirror import ROOTS as APEX
from ampatch.apex.legacy.table import ASYNC, LOAD, NAMES, PART, PATTERNS, Old
from ampatch.apex.uses import Names, StarNames, Use, find_uses

ROOTS = APEX | {*(row.name.partition(".")[0] for row in NAMES), "random", "torchvision", "yaml"}
ROWS = MappingProxyType({row.name: row for row in (*NAMES, *PATTERNS)})
# What was a method of tensors as well, and of nothing else.
METHODS = ("btrifact", "btrisolve", "gels", "gesv", "potrf", "potrs", "symeig", "trtrs")
SCHEDULERS = "torch.optim.lr_scheduler"
# Handlers that mean: where this is gone, do something else.
FALLBACK = re.compile("ImportError|ModuleNotFoundError|AttributeError|NameError|TypeError|Exception")
ASKS = re.compile(r"version|hasattr", re.IGNORECASE)
ASKS_FOR_CUDA = re.compile(rf"{ASKS.pattern}|is_available|cuda|gpu", re.IGNORECASE)
INDEX = re.compile(r"(id|ids|idx|inds?|index|indices)$", re.IGNORECASE)
NUMBER = re.compile(r"loss|err|cost|acc|prec|correct|sum$|mean$|norm$", re.IGNORECASE)
MASKED = ("masked_fill", "masked_fill_", "masked_select")
CUDA = re.compile(r"torch\.cuda\.(\w+Tensor|Stream|Event|set_device)")
COMPARISONS = ("eq", "ne", "gt", "lt", "ge", "le")
KEYWORD = re.compile(rb"\basync(?=\s*=[^=])")

# Functions that need a keyword today, by the row that says so.
NEEDED = MappingProxyType(
    {
        LOAD: ("torch.load", "weights_only"),
        "numpy.fromstring(bytes)": ("numpy.fromstring", "sep"),
        "torch.fft(...)": ("torch.fft", None),
        "torch.stft(...)": ("torch.stft", "return_complex"),
    }
)
# Keywords that functions of a place, or of any, take no more.
HAS_VERBOSE = "verbose" in inspect.signature(lr_scheduler.StepLR).parameters
TAKEN = MappingProxyType(
    {
        **({} if HAS_VERBOSE else {"lr_scheduler(verbose=)": (SCHEDULERS, "verbose")}),
        "pretrained=": ("torchvision.models", "pretrained"),
        "retain_variables=": ("", "retain_variables"),
        "volatile=": ("", "volatile"),
    }
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A row of the table that a script meets, and the lines where."""

    row: Old
    lines: tuple[int, ...]


def parse(source: bytes, name: str) -> tuple[ast.Module, tuple[Finding, ...]]:
    """Parses a script; one that says `async=` is read as today's Python would have it, and told of."""
    try:
        return ast.parse(source, name), ()
    except SyntaxError:
        mended, count = KEYWORD.subn(b"non_blocking", source)
        if not count:
            raise
        tree = ast.parse(mended, name)
    lines = (source.count(b"\n", 0, match.start()) + 1 for match in KEYWORD.finditer(source))
    return tree, (Finding(ROWS[ASYNC], tuple(dict.fromkeys(lines))),)


def read(source: bytes, path: str, star_names: StarNames) -> tuple[list[Use], tuple[Finding, ...]]:
    """Returns the names that a script uses of apex and of other packages, and what in it is old."""
    tree, findings = parse(source, path)
    names = Names(tree, star_names, ROOTS)
    uses = find_uses(tree, names)
    return uses, (*findings, *find_old(tree, names, uses))


def find_cause(error: Exception) -> Old | None:
    """Returns the row of what `--legacy` would have mended, None if the error is of something else."""
    rows = [row for row in ROWS.values() if row.error and row.error in str(error)]
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno))
    for path, line in reversed(places):
        with suppress(OSError, SyntaxError, ValueError):
            _, findings = read(Path(path).read_bytes(), path, lambda _: ())
            rows += [each.row for each in findings if line in each.lines and not each.row.error]
    return next((row for row in rows if row.is_mended), None)


def find_old(tree: ast.Module, names: Names, uses: Iterable[Use]) -> tuple[Finding, ...]:
    """Lists what in a script breaks, warns or needs CUDA; what it asks about first is left out."""
    lines: dict[Old | None, list[int]] = defaultdict(list)
    for use in uses:
        if use.sure:
            lines[row_of(use.name)].append(use.line)
    for node in ast.walk(tree):
        for name in patterns(node, names):
            lines[ROWS[name]].append(node.lineno)
        lines[ROWS["Sampler.__init__(data)"]] += [call.lineno for call in sampler_calls(node, names)]
        if isinstance(node, ast.Constant) and node.value == "LOCAL_RANK":  # which it reads as well, then
            lines.pop(ROWS["--local_rank"], None)
    left = {row: tuple(sorted({*at}.difference(guarded_lines(tree, row)))) for row, at in lines.items()}
    return tuple(Finding(row, left[row]) for row in ROWS.values() if left.get(row))


def row_of(name: str) -> Old | None:
    """Returns the row of a name, or of what it is a part of, if the name is gone here."""
    rows = (row for row in NAMES if f"{name}.".startswith(f"{row.name}."))
    return next((row for row in rows if row.name.startswith("torch.") or is_gone(row.name)), None)


def is_gone(name: str) -> bool:
    """Whether what is installed has no such name.

    >>> is_gone("collections.abc.Iterable"), is_gone("time.clock")
    (False, True)
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            pkgutil.resolve_name(name)
        except Exception:  # a package that does not fit torch raises whatever it likes
            return True
    return False


def guarded_lines(tree: ast.Module, row: Old | None) -> Iterator[int]:
    """Yields the lines that run only where a script has asked for such things, or that it falls back from."""
    asks = ASKS_FOR_CUDA if row is ROWS["CUDA"] else ASKS
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any(is_fallback(each) for each in node.handlers):
            parts = node.body
        elif isinstance(node, (ast.If, ast.IfExp)) and asks.search(ast.unparse(node.test)):
            parts = [*node.body, *node.orelse] if isinstance(node, ast.If) else [node]
        else:
            continue
        for part in parts:
            yield from range(part.lineno, part.end_lineno + 1)


def is_fallback(handler: ast.ExceptHandler) -> bool:
    """Whether a handler is for what is not there."""
    return handler.type is None or bool(FALLBACK.search(ast.unparse(handler.type)))


# ---- Patterns ----


def patterns(node: ast.AST, names: Names) -> Iterator[str]:
    """Yields the names of the rows that a node is an example of; what a variable holds, its name says."""
    match node:
        case ast.Call():
            yield from calls(node, names)
        case ast.Subscript(ast.Attribute(of, "data"), ast.Constant(0)) if NUMBER.search(last_name(of)):
            yield "loss.data[0]"
        case ast.BinOp(ast.Constant(1), ast.Sub(), right) if is_mask(right, names):
            yield "1 - mask"
        case ast.UnaryOp(ast.USub(), operand) if is_mask(operand, names):
            yield "-mask"
        case ast.BinOp(left, ast.Div()) if INDEX.search(last_name(left)):
            yield "ids / n"
        case ast.Compare(left, [ast.Eq() | ast.NotEq(), *_], others) if last_name(left) == "type":
            if any("torch.autograd.Variable" in names.resolve(each) for each in others):
                yield "type(x) == Variable"
        case ast.AugAssign(target):
            whole = names.parts.get(getattr(target, "id", ""), ())
            if any(last_name(each) in ("chunk", "split", "unbind") for each in whole):
                yield PART
        case ast.ClassDef() if is_old_function(node, names):
            yield "a Function without @staticmethod"
        case ast.For() if is_early_step(node, names):
            yield "scheduler.step() before training"
        case ast.Constant("torch.distributed.launch"):
            yield "torch.distributed.launch"


def calls(node: ast.Call, names: Names) -> Iterator[str]:
    """Yields the names of the rows that a call is an example of."""
    given, found = {each.arg for each in node.keywords}, names.resolve(node.func)
    for row, (function, keyword) in NEEDED.items():
        if {*found} == {function} and keyword not in given:
            yield row
    if {*found} == {"yaml.load"} and len(node.args) == 1 and "Loader" not in given:
        yield "yaml.load(file)"
    for row, (place, keyword) in TAKEN.items():
        if keyword in given and (not place or any((name or "").startswith(place) for name in found)):
            yield row
    match node:
        case ast.Call(ast.Attribute(iterator, "next"), []):
            if any(isinstance(v, ast.Call) and last_name(v) == "iter" for v in names.values(iterator)):
                yield "iterator.next()"
        case ast.Call(ast.Attribute(ast.Subscript(slice=ast.Slice(lower=None)), "view")):
            if ast.unparse(node).endswith(".view(-1)"):  # not contiguous since it was transposed
                yield "correct[:k].view(-1)"
        case ast.Call(ast.Attribute(attr="tostring"), []):
            yield "array.tostring()"
        case ast.Call(keywords=words) if {*found} & {"torch.optim.Adam", "torch.optim.AdamW"}:
            if any(ast.unparse(word).startswith("betas=(0,") for word in words):
                yield "Adam(betas=(0, 0.9))"
        case ast.Call(args=[sampled, _]) if {*found} == {"random.sample"}:
            if any(isinstance(v, ast.Set) or last_name(v) == "set" for v in names.values(sampled)):
                yield "random.sample(set(...), k)"
        case ast.Call(ast.Attribute(attr=name)) if name in METHODS and not any(found):
            yield f"torch.{name}"
    if last_name(node) in MASKED and any(
        isinstance(e, ast.Call) and last_name(e) == "byte" for e in node.args
    ):
        yield "masked_fill(x.byte(), ...)"
    options = [getattr(each, "value", None) for each in node.args]
    is_option = last_name(node) == "add_argument"
    if is_option and "--local_rank" in options and "--local-rank" not in options:
        yield "--local_rank"
    if needs_cuda(node, found):
        yield "CUDA"


def last_name(node: ast.AST) -> str:
    """Returns the last word of a name or call: of `self.loss.sum()` the word sum."""
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "attr", getattr(node, "id", ""))


def is_mask(node: ast.expr, names: Names) -> bool:
    """Whether an expression is a comparison, or a name for one."""
    values = names.values(node)
    return bool(values) and all(
        isinstance(each, ast.Compare) or (isinstance(each, ast.Call) and last_name(each) in COMPARISONS)
        for each in values
    )


def is_old_function(node: ast.ClassDef, names: Names) -> bool:
    """Whether a class is an autograd Function whose forward is no static method."""
    bases = {name for base in node.bases for name in names.resolve(base)}
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "forward"]
    is_ours = bool(bases & {"torch.autograd.Function", "torch.autograd.function.Function"})
    return is_ours and any(not each.decorator_list for each in methods)


def sampler_calls(node: ast.AST, names: Names) -> Iterator[ast.Call]:
    """Yields the calls in a sampler's class that give the class of samplers what it draws from."""
    bases = {name for base in getattr(node, "bases", ()) for name in names.resolve(base)}
    if bases & {"torch.utils.data.Sampler", "torch.utils.data.sampler.Sampler"}:
        for call in ast.walk(node):
            match call:
                case ast.Call(ast.Attribute(ast.Call(of), "__init__"), [_]) if last_name(of) == "super":
                    yield call


def is_early_step(node: ast.For, names: Names) -> bool:
    """Whether the first step of a loop is the scheduler's, before it trains."""
    calls = [call for part in node.body for call in ast.walk(part) if isinstance(call, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    match [call for call in calls if last_name(call) in ("step", "train", "train_epoch")]:
        case [ast.Call(ast.Attribute(scheduler, "step")), _, *_]:
            made = [each for each in names.values(scheduler) if isinstance(each, ast.Call)]
            found = [name for each in made for name in names.resolve(each.func)]
            return any((name or "").startswith(SCHEDULERS) for name in found)
    return False


def needs_cuda(node: ast.Call, found: Iterable[str | None]) -> bool:
    """Whether a call needs a GPU: `.cuda()`, a device or backend by name, types and streams."""
    given = [getattr(each, "value", None) for each in (*node.args, *(word.value for word in node.keywords))]
    return (
        any(isinstance(each, str) and re.fullmatch(r"cuda(:\d+)?|nccl", each) for each in given)
        or any(re.fullmatch(CUDA, name or "") for name in found)
        or (isinstance(node.func, ast.Attribute) and node.func.attr == "cuda")
    )
