"""Reads what in a script breaks today, or needs CUDA, and in which lines, without running it."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch.optim import lr_scheduler

from ampatch.apex.legacy.table import ASYNC, LOAD, NAMES, PART, PATTERNS, Old
from ampatch.apex.uses import ROOTS as APEX
from ampatch.apex.uses import Names, Use

ROOTS = APEX | {*(row.name.partition(".")[0] for row in NAMES), "torchvision", "yaml"}
ROWS = MappingProxyType({row.name: row for row in (*NAMES, *PATTERNS)})
# What was a method of tensors as well, and of nothing else.
METHODS = ("btrifact", "btrisolve", "gels", "gesv", "potrf", "potrs", "symeig", "trtrs")
SCHEDULERS = "torch.optim.lr_scheduler"
# Handlers that mean: where this is gone, do something else.
FALLBACK = re.compile("ImportError|ModuleNotFoundError|AttributeError|NameError|TypeError|Exception")
ASKS = re.compile(r"version|hasattr|is_available|cuda|gpu", re.IGNORECASE)
INDEX = re.compile(r"(id|ids|idx|inds?|index|indices)$", re.IGNORECASE)
NUMBER = re.compile(r"loss|err|cost|acc|prec|correct|sum$|mean$|norm$", re.IGNORECASE)
COMPARISONS = ("eq", "ne", "gt", "lt", "ge", "le")
KEYWORD = re.compile(rb"\basync(?=\s*=[^=])")


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


def find_old(tree: ast.Module, names: Names, uses: Iterable[Use]) -> tuple[Finding, ...]:
    """Lists what in a script breaks, warns or needs CUDA; what it asks about first is left out."""
    lines: dict[Old | None, list[int]] = defaultdict(list)
    for use in uses:
        if use.sure:
            lines[row_of(use.name)].append(use.line)
    for node in ast.walk(tree):
        for name, matches in MATCHERS.items():
            if matches(node, names):
                lines[ROWS[name]].append(node.lineno)
        if is_method(node, names):
            lines[ROWS[f"torch.{node.func.attr}"]].append(node.lineno)
        if isinstance(node, ast.Constant) and node.value == "LOCAL_RANK":  # which it reads as well, then
            lines.pop(ROWS["--local_rank"], None)
    guarded = set(guarded_lines(tree))
    left = {row: tuple(sorted({*at} - guarded)) for row, at in lines.items()}
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


def guarded_lines(tree: ast.Module) -> Iterator[int]:
    """Yields the lines that run only where a script has asked, or that it falls back from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any(is_fallback(each) for each in node.handlers):
            parts = node.body
        elif isinstance(node, (ast.If, ast.IfExp)) and ASKS.search(ast.unparse(node.test)):
            parts = [*node.body, *node.orelse] if isinstance(node, ast.If) else [node]
        else:
            continue
        for part in parts:
            yield from range(part.lineno, part.end_lineno + 1)


def is_fallback(handler: ast.ExceptHandler) -> bool:
    """Whether a handler is for what is not there."""
    return handler.type is None or bool(FALLBACK.search(ast.unparse(handler.type)))


# ---- Patterns: whether a node is one ----


def last_name(node: ast.AST) -> str:
    """Returns the last word of a name or call: of `self.loss.sum()` the word sum."""
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "attr", getattr(node, "id", ""))


def calls(node: ast.AST, names: Names, *whole: str) -> bool:
    """Whether a node calls one of these functions and cannot mean anything else."""
    found = set(names.resolve(node.func)) if isinstance(node, ast.Call) else set()
    return len(found) == 1 and found <= {*whole}


def keywords(node: ast.AST) -> Mapping[str | None, ast.expr]:
    """Returns the keyword arguments of a call."""
    return {each.arg: each.value for each in node.keywords} if isinstance(node, ast.Call) else {}


def is_method(node: ast.AST, names: Names) -> bool:
    """Whether a node calls a method that tensors had."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_call and node.func.attr in METHODS and not any(names.resolve(node.func))


def is_first(node: ast.AST) -> bool:
    """Whether a node is `....data[0]` of a number, as its name says."""
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and node.slice.value == 0
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "data"
        and bool(NUMBER.search(last_name(node.value.value)))
    )


def is_next(node: ast.AST, names: Names) -> bool:
    """Whether a node calls `.next()` of what `iter` made."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)) or node.args:
        return False
    made = names.values(node.func.value)
    return node.func.attr == "next" and any(isinstance(v, ast.Call) and last_name(v) == "iter" for v in made)


def is_flat_view(node: ast.AST) -> bool:
    """Whether a node is `....[:k].view(-1)`, of what is not contiguous since it was transposed."""
    if not isinstance(node, ast.Call) or not ast.unparse(node).endswith(".view(-1)"):
        return False
    part = node.func.value
    return isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Slice) and part.slice.lower is None


def is_mask(node: object) -> bool:
    """Whether an expression is a comparison."""
    return isinstance(node, ast.Compare) or (isinstance(node, ast.Call) and last_name(node) in COMPARISONS)


def is_less_mask(node: ast.AST, names: Names) -> bool:
    """Whether a node is 1 minus a comparison, or minus a name for one."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)):
        return False
    values = names.values(node.right)
    return getattr(node.left, "value", None) == 1 and bool(values) and all(map(is_mask, values))


def is_variable(node: ast.AST, names: Names) -> bool:
    """Whether a node compares a type with the type that all tensors had."""
    is_type = isinstance(node, ast.Compare) and last_name(node.left) == "type"
    is_equal = is_type and isinstance(node.ops[0], (ast.Eq, ast.NotEq))
    return is_equal and any("torch.autograd.Variable" in names.resolve(each) for each in node.comparators)


def is_part(node: ast.AST, names: Names) -> bool:
    """Whether a node changes in place what is one of several parts of a tensor."""
    parts = names.parts.get(getattr(node.target, "id", ""), ()) if isinstance(node, ast.AugAssign) else ()
    return any(last_name(each) in ("chunk", "split", "unbind") for each in parts)


def is_divided_index(node: ast.AST) -> bool:
    """Whether a node divides what is an index, as its name says."""
    is_quotient = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
    return is_quotient and bool(INDEX.search(last_name(node.left)))


def is_byte_mask(node: ast.AST) -> bool:
    """Whether a node fills where a mask of bytes says."""
    fills = isinstance(node, ast.Call) and last_name(node) in ("masked_fill", "masked_fill_", "masked_select")
    return fills and any(isinstance(each, ast.Call) and last_name(each) == "byte" for each in node.args)


def is_verbose(node: ast.AST, names: Names) -> bool:
    """Whether a node makes a scheduler that prints, where schedulers do not."""
    found = names.resolve(node.func) if isinstance(node, ast.Call) and "verbose" in keywords(node) else []
    parameters = inspect.signature(lr_scheduler.StepLR).parameters
    return "verbose" not in parameters and any((name or "").startswith(SCHEDULERS) for name in found)


def is_rank_option(node: ast.AST) -> bool:
    """Whether a node adds the option --local_rank as launchers no longer pass it."""
    if not isinstance(node, ast.Call) or last_name(node) != "add_argument":
        return False
    options = [getattr(each, "value", None) for each in node.args]
    return "--local_rank" in options and "--local-rank" not in options


def is_old_function(node: ast.AST, names: Names) -> bool:
    """Whether a node is an autograd Function whose forward is no static method."""
    if not isinstance(node, ast.ClassDef):
        return False
    bases = {name for base in node.bases for name in names.resolve(base)}
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "forward"]
    is_ours = bool(bases & {"torch.autograd.Function", "torch.autograd.function.Function"})
    return is_ours and any(not each.decorator_list for each in methods)


def is_early_step(node: ast.AST, names: Names) -> bool:
    """Whether a node is a loop whose first step is the scheduler's, before it trains."""
    if not isinstance(node, ast.For):
        return False
    calls = [call for part in node.body for call in ast.walk(part) if isinstance(call, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    steps = [call for call in calls if last_name(call) in ("step", "train", "train_epoch")]
    made = names.values(steps[0].func.value) if steps and isinstance(steps[0].func, ast.Attribute) else []
    found = [name for each in made if isinstance(each, ast.Call) for name in names.resolve(each.func)]
    is_scheduler = last_name(steps[0]) == "step" if steps else False
    return is_scheduler and len(steps) > 1 and any((name or "").startswith(SCHEDULERS) for name in found)


def needs_cuda(node: ast.AST, names: Names) -> bool:
    """Whether a call needs a GPU: `.cuda()`, a device or backend by name, types and streams."""
    if not isinstance(node, ast.Call):
        return False
    given = [getattr(each, "value", None) for each in (*node.args, *keywords(node).values())]
    named = any(isinstance(each, str) and re.fullmatch(r"cuda(:\d+)?|nccl", each) for each in given)
    found = [name or "" for name in names.resolve(node.func)]
    is_type = any(re.fullmatch(r"torch\.cuda\.(\w+Tensor|Stream|Event|set_device)", name) for name in found)
    is_method = isinstance(node.func, ast.Attribute) and node.func.attr == "cuda"
    return named or is_type or is_method


Matcher = Callable[[ast.AST, Names], bool]
MATCHERS: Mapping[str, Matcher] = MappingProxyType(
    {
        "loss.data[0]": lambda node, _: is_first(node),
        "iterator.next()": is_next,
        "correct[:k].view(-1)": lambda node, _: is_flat_view(node),
        "1 - mask": is_less_mask,
        "type(x) == Variable": is_variable,
        PART: is_part,
        "ids / n": lambda node, _: is_divided_index(node),
        "masked_fill(x.byte(), ...)": lambda node, _: is_byte_mask(node),
        LOAD: lambda node, names: calls(node, names, "torch.load") and "weights_only" not in keywords(node),
        "numpy.fromstring(bytes)": lambda node, names: (
            calls(node, names, "numpy.fromstring") and "sep" not in keywords(node)
        ),
        "lr_scheduler(verbose=)": is_verbose,
        "--local_rank": lambda node, _: is_rank_option(node),
        "torch.fft(...)": lambda node, names: calls(node, names, "torch.fft"),
        "torch.stft(...)": lambda node, names: (
            calls(node, names, "torch.stft") and "return_complex" not in keywords(node)
        ),
        "retain_variables=": lambda node, _: "retain_variables" in keywords(node),
        "a Function without @staticmethod": is_old_function,
        "yaml.load(file)": lambda node, names: (
            calls(node, names, "yaml.load") and len(node.args) == 1 and "Loader" not in keywords(node)
        ),
        "volatile=": lambda node, _: "volatile" in keywords(node),
        "scheduler.step() before training": is_early_step,
        "pretrained=": lambda node, names: (
            "pretrained" in keywords(node)
            and any((name or "").startswith("torchvision.models") for name in names.resolve(node.func))
        ),
        "torch.distributed.launch": lambda node, _: (
            getattr(node, "value", None) == "torch.distributed.launch"
        ),
        "CUDA": needs_cuda,
    }
)
