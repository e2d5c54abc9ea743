"""Reads what in a script breaks today, or needs CUDA, and in which lines, without running it."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from torch.optim import lr_scheduler
from torch.torch_version import TorchVersion

from ampatch.apex.drop_in import ROOTS as APEX
from ampatch.apex.legacy import rows
from ampatch.apex.legacy.rows import BERT, CANVAS, LINALG, NAMES, Old
from ampatch.apex.legacy.source_names import (
    Names,
    Use,
    find_uses,
    is_byte_tensor,
    is_integral,
    is_perhaps_bytes,
)

ROOTS = APEX | {"json", "librosa", "random", "torchvision", "yaml"}
ROOTS |= {row.name.partition(".")[0] for row in NAMES}
ROWS = (*NAMES, *rows.PATTERNS)
# Handlers that mean: where this is gone, do something else.
FALLBACK = re.compile("ImportError|ModuleNotFoundError|AttributeError|NameError|TypeError|Exception")
ASKS = re.compile(r"version|hasattr", re.IGNORECASE)
ASKS_FOR_CUDA = re.compile(rf"{ASKS.pattern}|is_available|cuda|gpu|cpu", re.IGNORECASE)
READS_RANK = re.compile(r"[\"']LOCAL_RANK[\"']")  # which needs no option, then
KEYWORD = re.compile(rb"\basync(?=\s*=[^=])")


@dataclass(frozen=True, slots=True)
class OldLines:
    """A row of the table that a script meets, and the lines where."""

    row: Old
    lines: tuple[int, ...]


def parse(source: bytes, name: str) -> tuple[ast.Module, tuple[OldLines, ...]]:
    """Parses a script; one that says `async=` is read as today's Python would have it, and told of."""
    try:
        return ast.parse(source, name), ()
    except SyntaxError:
        mended, count = KEYWORD.subn(b"non_blocking", source)
        if not count:
            raise
        tree = ast.parse(mended, name)
    lines = (source.count(b"\n", 0, match.start()) + 1 for match in KEYWORD.finditer(source))
    return tree, (OldLines(rows.ASYNC, tuple(dict.fromkeys(lines))),)


def read(
    source: bytes, path: str, read_names: Callable[[ast.Module], Names]
) -> tuple[list[Use], tuple[OldLines, ...]]:
    """Returns the names that a script uses of apex and of other packages, and what in it is old."""
    tree, findings = parse(source, path)
    names = read_names(tree)
    uses = find_uses(tree, names)
    return uses, (*findings, *find_old(tree, names, uses))


def read_alone(tree: ast.Module) -> Names:
    """Returns the names in a script, but for what its own modules bring."""
    return Names(tree, lambda module, level: {}, ROOTS)


def find_cause(error: Exception) -> Old | None:
    """Returns the row of what `--legacy` would have mended, None if the error is of something else."""
    frames = traceback.extract_tb(error.__traceback__)
    said = f"{error} in {frames[-1].name}" if frames else str(error)
    causes = [row for row in ROWS if row.error and re.search(row.error, said)]
    places = [(frame.filename, frame.lineno) for frame in frames]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno))
    for path, line in reversed(places):
        with suppress(OSError, SyntaxError, ValueError):
            _, findings = read(Path(path).read_bytes(), path, read_alone)
            causes += [each.row for each in findings if line in each.lines and not each.row.error]
    return next((row for row in causes if row.is_mended), None)


def find_old(tree: ast.Module, names: Names, uses: Iterable[Use]) -> tuple[OldLines, ...]:
    """Lists what in a script breaks, warns or needs CUDA; what it asks about first is left out."""
    lines: dict[Old | None, list[int]] = defaultdict(list)
    for use in uses:
        if use.sure:
            lines[row_of(use.name)].append(use.line)
    for node in ast.walk(tree):
        for row in patterns(node, names):
            lines[row].append(node.lineno)
        lines[rows.LEAF] += [write.lineno for write in writes_into_leaves(node)]
        lines[rows.SAMPLER] += [call.lineno for call in sampler_calls(node, names)]
        if isinstance(node, ast.Constant) and node.value == "LOCAL_RANK":  # which it reads as well, then
            lines.pop(rows.RANK, None)
    left = {row: tuple(sorted({*at}.difference(guarded_lines(tree, row)))) for row, at in lines.items()}
    return tuple(OldLines(row, left[row]) for row in ROWS if left.get(row))


def row_of(name: str) -> Old | None:
    """Returns the row of a name, or of what it is a part of, if the name is gone here."""
    named = (row for row in NAMES if f"{name}.".startswith(f"{row.name}."))
    return next((row for row in named if row.name.startswith(("torch.", BERT)) or is_gone(row.name)), None)


def is_gone(name: str) -> bool:
    """Whether what is installed has no such name.

    >>> is_gone("collections.abc.Iterable"), is_gone("time.clock")
    (False, True)
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = pkgutil.resolve_name(name)
        except Exception:  # a package that does not fit torch raises whatever it likes
            return True
    return inspect.isgetsetdescriptor(value)  # by which NumPy 2.2 raises for methods that are gone


def guarded_lines(tree: ast.Module, row: Old | None) -> Iterator[int]:
    """Yields the lines that run only where a script has asked for such things, or that it falls back from."""
    asks = ASKS_FOR_CUDA if row is rows.CUDA else ASKS
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
    return handler.type is None or bool(FALLBACK.search(ast.unparse(handler.type)))


# ---- What is old by the form of its code ----

# What was a method of tensors as well, and of nothing else.
GONE_METHODS = {"btrifact", "btrisolve", "gels", "gesv", "potrf", "potrs", "symeig", "trtrs"}
METHODS = {
    name: row
    for row in NAMES
    for place, _, name in [row.name.rpartition(".")]
    if place == "torch" and (row in LINALG or name in GONE_METHODS)
}
# Methods of classes, by their names, which nothing else has that scripts use.
PIL = ("PIL.ImageDraw.ImageDraw", "PIL.ImageFont.FreeTypeFont")
CLASSES = ("numpy.ndarray", *PIL, "threading.Thread", CANVAS)
METHODS_OF = {row.name.rpartition(".")[2]: row for row in NAMES if row.name.startswith(CLASSES)}
# Types, and modules of XML, have methods of those names, too.
NOT_ARRAY = re.compile(r"dtype|^dt$|\bET\b|etree|xml")
SCHEDULERS = "torch.optim.lr_scheduler"
# But for what counts batches, which is no tensor.
INDEX = re.compile(r"(?!batch|epoch|step|iter)(\w*(_|[a-z](?=I)))?[Ii](ds?|dx|nds?|ndex|ndices)$")
NUMBER = re.compile(r"loss|err|cost|acc|prec|correct|sum$|mean$|norm$", re.IGNORECASE)
MASKED = re.compile(r"masked_(fill|scatter)_?|masked_select")
CLAMPED = re.compile(r"cl(am|i)p_(min_|max_)?")
CUDA_TYPE = r"torch\.cuda\.\w+Tensor"
CUDA = re.compile(
    rf"{CUDA_TYPE}|torch\.cuda\.(Stream|Event|set_device|get_device_\w+|current_\w+|synchronize"
    r"|get_rng_state|init|ipc_collect|reset_\w+|nvtx\.\w+)"
)
# What makes options, by other parsers than that of argparse.
OPTIONS = ("option", "add_option", "DEFINE_integer", "DEFINE_string", "getopt", "gnu_getopt")
RANK = re.compile(r"(--local[-_]rank)(=|$)")
COMPARISONS = ("eq", "ne", "gt", "lt", "ge", "le")
# Functions of librosa that take so many arguments without their names, by module.
LIBROSA = {
    "librosa.filters": {"mel": 0, "window_sumsquare": 0},
    "librosa.core.audio": {"load": 1, "resample": 1, "get_duration": 0},
    "librosa.core.spectrum": dict.fromkeys(
        ("stft", "istft", "power_to_db", "amplitude_to_db", "griffinlim"), 1
    ),
    "librosa.feature.spectral": {"melspectrogram": 0, "mfcc": 0, "rms": 0, "chroma_stft": 0},
    "librosa.feature.utils": {"delta": 1},
    "librosa.util.utils": {"frame": 1, "pad_center": 1, "fix_length": 1},
    "librosa.effects": dict.fromkeys(("trim", "split", "time_stretch", "pitch_shift"), 1),
}
POSITIONAL = {name: count for names in LIBROSA.values() for name, count in names.items()}

# Functions that need a keyword today.
NEEDED = (
    (rows.LOAD, "torch.load", "weights_only"),
    (rows.NUMPY_LOAD, "numpy.load", "allow_pickle"),
    (rows.FFT, "torch.fft", None),
    (rows.STFT, "torch.stft", "return_complex"),
    (rows.ONNX, "torch.onnx.export", "dynamo"),
)
# Keywords that functions of a place, or of any, take no more.
HAS_VERBOSE = "verbose" in inspect.signature(lr_scheduler.StepLR).parameters
TAKEN = (
    *([] if HAS_VERBOSE else [(rows.VERBOSE, SCHEDULERS, "verbose")]),
    (rows.PRETRAINED, "torchvision.models", "pretrained"),
    (rows.RANGE, "torchvision.utils", "range"),
    *((rows.RESAMPLE, "torchvision.transforms", keyword) for keyword in ("resample", "fillcolor")),
    (rows.HISTOGRAM, "numpy.histogram", "normed"),
    (rows.ENCODING, "json.load", "encoding"),
    (rows.RETAIN, "", "retain_variables"),
    (rows.VOLATILE, "", "volatile"),
)
LAUNCH = next(row for row in NAMES if row.name == "torch.distributed.launch")


def patterns(node: ast.AST, names: Names) -> Iterator[Old]:
    """Yields the rows that a node is an example of; what a variable holds, its name says."""
    match node:
        case ast.Call():
            yield from calls(node, names)
        case ast.Subscript(ast.Attribute(of, "data"), ast.Constant(0)) if NUMBER.search(last_name(of)):
            yield rows.NUMBER
        case ast.Subscript(ast.Call(ast.Attribute(attr="by_key")), ast.Constant("color")):
            yield rows.COLORS
        case ast.BinOp(ast.Constant(1), ast.Sub(), right) if is_mask(right, names):
            yield rows.FROM_ONE
        case ast.UnaryOp(ast.USub(), operand) if is_mask(operand, names):
            yield rows.NEGATED
        case ast.UnaryOp(ast.Invert(), operand) if is_perhaps_bytes(operand, names):
            yield rows.INVERTED
        case ast.BinOp(left, ast.Div()) if INDEX.match(last_name(left)) and node not in names.cut:
            yield rows.DIVISION
        case ast.Compare(left, [ast.Eq() | ast.NotEq(), *_], others) if last_name(left) == "type":
            if any("torch.autograd.Variable" in names.resolve(each) for each in others):
                yield rows.VARIABLE
        case ast.AugAssign(target):
            whole = names.parts.get(getattr(target, "id", ""), ())
            if any(last_name(each) in ("chunk", "split", "unbind") and not is_text(each) for each in whole):
                yield rows.PART
        case ast.ClassDef():
            if is_old_function(node, names):
                yield rows.FUNCTION
            if is_bare_optimizer(node, names):
                yield rows.OPTIMIZER
        case ast.Attribute(of, "pretrained_config_archive_map") if last_name(of) not in ("cls", "self"):
            yield rows.ARCHIVES
        case ast.For() if is_early_step(node, names):
            yield rows.EARLY_STEP
        case ast.Assign([ast.Subscript(slice=ast.Constant("MASTER_PORT"))], ast.Constant(port)):
            if str(port).isdigit() and int(port) >= 2**16:
                yield rows.PORT
        case ast.Assign([ast.Subscript(slice=index)], ast.Constant() | ast.UnaryOp()):
            if any(is_byte_tensor(each, names) for each in getattr(index, "elts", [index])):
                yield rows.MASK
        case ast.Constant("torch.distributed.launch"):
            yield LAUNCH
        case ast.Attribute(of) | ast.Subscript(of) if [*names.resolve(of)] == ["torch.version.cuda"]:
            yield rows.CUDA
    if find_rank(node):
        yield rows.RANK


def find_rank(node: ast.AST) -> str:
    """Returns how an expression that looks for --local_rank in words, without argparse, spells it, or ""."""
    match node:
        case ast.Call() if last_name(node) in OPTIONS:
            texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            words = [f"--{str(text).lstrip('-')}" for text in texts]
        case ast.Call(ast.Attribute(attr="startswith" | "index"), [ast.Constant(str(word)), *_]):
            words = [word]
        case ast.Compare(left, comparators=others):
            words = [str(getattr(each, "value", "")) for each in (left, *others)]
        case _:
            return ""
    return next((match_[1] for word in words if (match_ := RANK.match(word))), "")


def calls(node: ast.Call, names: Names) -> Iterator[Old]:
    """Yields the rows that a call is an example of."""
    passed, functions = {each.arg for each in node.keywords}, names.resolve(node.func)
    for row, function, keyword in NEEDED:
        if {*functions} == {function} and keyword not in passed:
            yield row
    if {*functions} == {"yaml.load"} and len(node.args) == 1 and "Loader" not in passed:
        yield rows.YAML
    for row, place, keyword in TAKEN:
        if keyword in passed and (not place or any((name or "").startswith(place) for name in functions)):
            yield row
    match node:
        case ast.Call(ast.Attribute(iterator, "next"), []):
            made = [last_name(each) for each in names.values(iterator) if isinstance(each, ast.Call)]
            if {*made} & {"iter", "__iter__"}:
                yield rows.NEXT
        case ast.Call(ast.Attribute(ast.Subscript(slice=ast.Slice(lower=None)), "view")):
            if ast.unparse(node).endswith(".view(-1)"):  # not contiguous since it was transposed
                yield rows.VIEW
        case ast.Call(keywords=words) if {*functions} & {"torch.optim.Adam", "torch.optim.AdamW"}:
            if any(ast.unparse(word).startswith("betas=(0,") for word in words):
                yield rows.BETAS
        case ast.Call(args=[_, value]) if {*functions} == {"torch.full"} and not passed & {"dtype", "out"}:
            if {repr(getattr(each, "value", None)) for each in names.values(value)} & {"0", "1"}:
                yield rows.LABELS  # another number is an index, or padding
        case ast.Call(args=[sampled, _]) if {*functions} == {"random.sample"}:
            if any(isinstance(v, ast.Set) or last_name(v) in ("set", "keys") for v in names.values(sampled)):
                yield rows.SAMPLE
        case ast.Call(ast.Attribute(attr=name)) if name in METHODS and not any(functions):
            yield METHODS[name]
    options = [getattr(each, "value", None) for each in (*node.args, *(word.value for word in node.keywords))]
    if last_name(node) == "add_argument" and any(
        RANK.match(f"--{str(option).lstrip('-')}") for option in options
    ):
        yield rows.RANK
    if needs_cuda(node, names, functions):
        yield rows.CUDA
    yield from calls_by_type(node, names, functions)
    yield from calls_of_arrays(node, names, functions)


def calls_by_type(node: ast.Call, names: Names, functions: Sequence[str | None]) -> Iterator[Old]:
    """Yields the rows that a call is an example of for the type of a tensor in it."""
    name = last_name(node)
    if MASKED.fullmatch(name):
        place = 1 if any((each or "").startswith("torch.") for each in functions) else 0
        masks = [word.value for word in node.keywords if word.arg == "mask"]
        if any(is_perhaps_bytes(mask, names) for mask in (*node.args[place : place + 1], *masks)):
            yield rows.MASK
    if CLAMPED.fullmatch(name) and isinstance(node.func, ast.Attribute):
        limits = (*node.args, *(word.value for word in node.keywords))
        if is_integral(node.func.value, names) and not all(map(is_whole, limits)):
            yield rows.CLAMP


def calls_of_arrays(node: ast.Call, names: Names, functions: Sequence[str | None]) -> Iterator[Old]:
    """Yields the rows that a call of NumPy or librosa, or of an array, is an example of."""
    separators = [getattr(word.value, "value", " ") for word in node.keywords if word.arg == "sep"]
    if {*functions} == {"numpy.fromstring"} and not any(separators):
        yield rows.FROM_STRING
    if {*functions} & {"numpy.array", "numpy.asarray"}:
        if any(word.arg == "copy" and getattr(word.value, "value", None) is False for word in node.keywords):
            yield rows.COPY
        lists = getattr(node.args[0], "elts", ()) if len(node.args) == 1 else ()
        if len({len(getattr(each, "elts", ())) for each in lists}) > 1 and len(node.keywords) == 0:
            yield rows.RAGGED
    for name in functions:
        package, _, last = (name or "").rpartition(".")
        is_short = len(node.args) <= POSITIONAL.get(last, len(node.args))
        if package.startswith("librosa") and not is_short and librosa_wants_names():
            yield rows.LIBROSA
    match node.func:
        case ast.Attribute(of, name) if name in METHODS_OF and not any(functions):
            made = [each for each in (of, *names.values(of)) if isinstance(each, ast.expr)]
            if not any(NOT_ARRAY.search(ast.unparse(each)) for each in made):
                yield METHODS_OF[name]


def librosa_wants_names() -> bool:
    """Whether librosa, that which is installed if one is, takes such arguments by their names alone."""
    with suppress(metadata.PackageNotFoundError):
        return TorchVersion(metadata.version("librosa")) >= "0.10"
    return True


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


def is_bare_optimizer(node: ast.ClassDef, names: Names) -> bool:
    """Whether a class is an optimizer that is made without what all optimizers have, and uses that."""
    bases = {name for base in node.bases for name in names.resolve(base)}
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    is_ours = bool(bases & {"torch.optim.Optimizer", "torch.optim.optimizer.Optimizer"})
    is_bare = "__init__" in methods and ".__init__(" not in ast.unparse(methods["__init__"])
    return is_ours and is_bare and not {"zero_grad", "state_dict"} <= {*methods}


def is_text(call: ast.expr) -> bool:
    """Whether what is split is a text: at white space, or at a text."""
    first = next(iter(getattr(call, "args", ())), None)
    is_at_text = isinstance(getattr(first, "value", None), str)
    return last_name(call) == "split" and (first is None or is_at_text)


def sampler_calls(node: ast.AST, names: Names) -> Iterator[ast.Call]:
    """Yields the calls in a sampler's class that give the class of samplers what it draws from."""
    bases = {name for base in getattr(node, "bases", ()) for name in names.resolve(base)}
    if bases & {"torch.utils.data.Sampler", "torch.utils.data.sampler.Sampler"}:
        for call in ast.walk(node):
            match call:
                case ast.Call(ast.Attribute(ast.Call(of), "__init__"), [_]) if last_name(of) == "super":
                    yield call


def writes_into_leaves(node: ast.AST) -> Iterator[ast.Assign]:
    """Yields the assignments into tensors whose history the same block clears afterwards."""
    body = getattr(node, "body", ())
    detached: set[str] = set()
    for statement in reversed(body if isinstance(body, list) else ()):
        match statement:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "detach_"))):
                detached.add(name)
            case ast.Assign([ast.Subscript(ast.Name(name))]) if name in detached:
                yield statement


def is_early_step(node: ast.For, names: Names) -> bool:
    """Whether the first step of a loop is the scheduler's, before it trains."""
    calls = [call for part in node.body for call in ast.walk(part) if isinstance(call, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    match [call for call in calls if last_name(call) in ("step", "train", "train_epoch")]:
        case [ast.Call(ast.Attribute(scheduler, "step")), _, *_]:
            made = [each for each in names.values(scheduler) if isinstance(each, ast.Call)]
            functions = [name for each in made for name in names.resolve(each.func)]
            return any((name or "").startswith(SCHEDULERS) for name in functions)
    return False


def is_whole(limit: ast.expr) -> bool:
    """Whether a limit is shown to be an integer, or a size."""
    text = ast.unparse(limit)
    is_number = re.fullmatch(r"-?\d+|None", text) is not None
    return is_number or re.search(r"\.size\(|\.shape|\blen\(|\bint\(|\.long\(", text) is not None


def needs_cuda(node: ast.Call, names: Names, functions: Iterable[str | None]) -> bool:
    """Whether a call needs a GPU: `.cuda()`, a device or backend by name, types and streams."""
    is_of_torch = any((each or "").startswith("torch.") for each in functions)
    is_of_torch |= last_name(node) in ("to", "type")
    arguments = (*node.args, *(word.value for word in node.keywords))
    return (
        any(is_gpu(each, names) for each in arguments if is_of_torch or isinstance(each, ast.Constant))
        or (last_name(node) in ("int", "float") and ast.unparse(node).endswith("(torch.version.cuda)"))
        or any(re.fullmatch(CUDA, name or "") for name in functions)
        or (isinstance(node.func, ast.Attribute) and node.func.attr == "cuda")
    )


def is_gpu(node: ast.expr, names: Names) -> bool:
    """Whether an expression names a GPU, or what its ranks speak by; a variable, if it names nothing else."""
    values = [getattr(each, "value", "") for each in names.values(node) if each is not None]
    values = [name for name in names.resolve(node) if name] or values
    return bool(values) and all(
        isinstance(each, str) and re.fullmatch(rf"cuda(:\d+)?|nccl|{CUDA_TYPE}", each) for each in values
    )
