"""The user's statement that broke, and how it reads when it is mended: lines to paste."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import dedent, indent
from types import FrameType

from torch import Tensor
from torch.nn import Module

from ampatch.doctor.instruments.places import user_frame

SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)
ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
OPERATORS = {ast.Div: "div", ast.Pow: "pow"}
NAMESPACES = ("torch", "F", "functional", "linalg", "special")
Edit = tuple[int, str, int]  # at a byte of the file, a text in the place of so many bytes
Lines = tuple[str, ...]
Casts = tuple[str, Lines, Lines]  # a context without casts, decorators that cast as well, what to import


class Source:
    """The text of a file, which can be edited by its syntax tree; SyntaxError if it is no Python."""

    def __init__(self, path: str, names: dict[str, object] | None = None) -> None:
        lines = linecache.getlines(path, names)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line.encode()))
        self.text = "".join(lines).encode()
        self.tree = ast.parse(self.text)

    def statement_at(self, line: int, kinds: tuple[type[ast.stmt], ...] = SIMPLE) -> ast.stmt | None:
        """Returns the innermost statement at a line, None where there is none of these kinds."""
        found = (it for it in ast.walk(self.tree) if isinstance(it, kinds))
        within = [it for it in found if it.lineno <= line <= (it.end_lineno or line)]
        return max(within, key=lambda it: it.lineno, default=None)

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """Returns the statements in a row of which it is one."""
        blocks = (getattr(it, name, ()) for it in ast.walk(self.tree) for name in ("body", "orelse"))
        return next(it for it in blocks if isinstance(it, list) and statement in it)

    def before(self, statement: ast.stmt) -> str:
        """Returns what stands before a statement on its line: `def forward(self, x):` of one in one line."""
        first = self._starts[statement.lineno - 1]
        return self.text[first : first + statement.col_offset].decode().strip()

    def begin(self, node: ast.expr) -> int:
        """Returns the first byte of an expression."""
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr) -> int:
        """Returns the byte behind an expression."""
        return self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def edited(self, statement: ast.stmt, edits: list[Edit], last: ast.stmt | None = None) -> Lines:
        """Returns the lines of a statement, or those up to a later one, with some edits."""
        first, end = self._starts[statement.lineno - 1], self._starts[(last or statement).end_lineno or 0]
        first += statement.col_offset if self.before(statement) else 0
        text = self.text[first:end]
        for at, new, length in sorted(edits, reverse=True):
            text = text[: at - first] + new.encode() + text[at - first + length :]
        return tuple(dedent(text.decode()).rstrip().split("\n"))


# ---- Another operand ----


@dataclass(frozen=True, slots=True)
class Mend:
    """What stands differently where an operation is called: `suffix` behind its operand, `around` for it,
    `keyword` as another argument, `name` in the place of its own, `tail` behind the call; {x} is the operand,
    {y} the next one.
    """

    suffix: str = ""
    keyword: str = ""
    name: str = ""
    tail: str = ""
    around: str = ""


def mended(where: str | None, op: str, mend: Mend) -> Lines:
    """Returns the statement at a line, "file:line", with each call of an operation mended, or none.

    Those beside it that have the same operand, or are built alike, are mended with it.
    """
    path, _, line = (where or "").rpartition(":")
    try:
        source = Source(path)
    except SyntaxError:
        return ()
    statement = source.statement_at(int(line)) if line else None
    if statement is None or not (edits := edits_in(source, statement, op, mend)):
        return ()
    block = source.block_of(statement) if mend.suffix or mend.around else [statement]
    likeness = likeness_of(source, statement, op)
    alike = [it for it in block if likeness & likeness_of(source, it, op)]
    if len(alike) == 1:
        return source.edited(statement, edits)
    edits = [edit for it in alike for edit in edits_in(source, it, op, mend)]
    lines = source.edited(alike[0], edits, alike[-1])
    return (f"# in the place of lines {alike[0].lineno} to {alike[-1].end_lineno}", *lines)


def edits_in(source: Source, statement: ast.stmt, op: str, mend: Mend) -> list[Edit]:
    """Returns the edits of a statement."""
    return [edit for node in ast.walk(statement) for edit in edits_of(source, node, op, mend)]


def likeness_of(source: Source, statement: ast.stmt, op: str) -> set[str]:
    """Returns what statements share that are mended alike: how they are built, what an operation takes."""
    found = (operand_of(source, node, op.rstrip("_"))[0] for node in ast.walk(statement))
    shape = re.sub(r"(id|arg|value)=('\w*'|[\d.]+)", "", ast.dump(statement))
    return {shape, *(it.id for it in found if isinstance(it, ast.Name))}


def edits_of(source: Source, node: ast.AST, op: str, mend: Mend) -> Iterator[Edit]:
    """Yields the edits of an expression, where it is the operation."""
    operand, end, is_closed = operand_of(source, node, op.rstrip("_"))
    if operand is None or isinstance(operand, ast.Constant):
        return
    begin = source.begin(operand)
    x = source.text[begin:end].decode()
    opened = x.count(")") - x.count("(")
    x = "(" * opened + x  # which stands before an expression in parentheses
    if mend.around:
        yield begin - opened, mend.around.format(x=x), end - begin + opened
    if mend.suffix:
        if not is_closed:
            yield begin, "(", 0
        yield end, ("" if is_closed else ")") + mend.suffix.format(x=x), 0
    if not isinstance(node, ast.Call):
        return
    y = next((ast.unparse(it) for it in node.args[1:]), "")
    if mend.keyword:
        yield source.end(node) - 1, mend.keyword, 0
    if mend.name:
        yield source.end(node.func) - len(op), mend.name, len(op)
    if mend.tail:
        yield source.end(node), mend.tail.format(x=x, y=y), 0


def operand_of(source: Source, node: ast.AST, op: str) -> tuple[ast.expr | None, int, bool]:
    """Returns what an operation takes (of a quotient the divisor), where it ends, if it binds by itself."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and OPERATORS.get(type(node.op)) == op:
        operand = getattr(node, "value", None) or (node.left if op == "pow" else node.right)
        end, is_open = source.end(operand), source.text[source.begin(operand) - 1 :][:1] == b"("
        is_wrapped = is_open and source.text[end : end + 1] == b")"
        return operand, end + is_wrapped, is_wrapped or isinstance(operand, ATOMS)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None, 0, False
    owner = node.func.value
    is_function = getattr(owner, "id", getattr(owner, "attr", "")) in NAMESPACES
    operands = [*([] if is_function else [owner]), *node.args][1 if op == "div" else 0 :]
    if node.func.attr.rstrip("_") != op or not operands:
        return None, 0, False
    if operands[0] is owner:  # up to the dot, which binds to what is in parentheses alone
        return owner, source.end(node.func) - len(node.func.attr) - 1, True
    return operands[0], source.end(operands[0]), isinstance(operands[0], ATOMS)


# ---- In float32 ----


def region_in_float32(autocast: str | None, is_model: bool, casts_are_on: bool) -> Lines:
    """Returns lines that replace the statement which the user's code is at; none where they could be wrong.

    Its half tensors are cast, and casts are off: those of `torch.autocast` for a device, or ours. A function
    that uses no model is put into float32 as a whole, for what follows there as well. A statement that calls
    a module is left alone, and in a half model all but what it returns, if `is_model`.
    """
    frame = user_frame()
    try:
        source = None if frame is None else Source(frame.f_code.co_filename, frame.f_globals)
    except SyntaxError:
        return ()
    statement = None if source is None else source.statement_at(frame.f_lineno)
    if statement is None:
        return ()
    casts = casts_of(autocast, source, frame) if casts_are_on else None
    if casts and (lines := function_in_float32(source, frame, *casts[1:])):
        return lines
    calls = (it for it in ast.walk(statement) if isinstance(it, ast.Call))
    if any(isinstance(value_of(it.func, frame), Module) for it in calls):
        return ()
    in_half = is_half(frame)
    is_last = isinstance(statement, ast.Return) or name_of_reduction(statement) in ("mean", "sum")
    if in_half and not (is_model and is_last):
        return ()
    edits: list[Edit] = [(source.end(it), ".float()", 0) for it in half_in(statement, frame)]
    before, lines = source.before(statement), source.edited(statement, edits)
    if casts and not in_half:  # no casts of functions are on in a half model
        lines = (*casts[2], f"with {casts[0]}:", *indent("\n".join(lines), "    ").split("\n"))
    elif not edits:
        return ()
    return (before, *indent("\n".join(lines), "    ").split("\n")) if before else lines


def casts_of(autocast: str | None, source: Source, frame: FrameType) -> Casts:
    """Returns how casts are turned off, and the import that this takes."""
    if autocast:
        decorator = f"torch.amp.custom_fwd(device_type={autocast!r}, cast_inputs=torch.float32)"
        return f"torch.autocast({autocast!r}, enabled=False)", (decorator,), ()
    imports = [it for it in source.tree.body if isinstance(it, (ast.Import, ast.ImportFrom))]
    above = [it.asname or it.name for each in imports for it in each.names if each.lineno < frame.f_lineno]
    needed = () if "amp" in (*above, *frame.f_locals) else ("import ampatch as amp",)
    return "amp.disable_casts()", ("amp.float_function", "amp.disable_casts()"), needed


def function_in_float32(source: Source, frame: FrameType, decorators: Lines, imports: Lines) -> Lines:
    """Returns the lines that put the function of a frame into float32; none if it uses a model."""
    function = source.statement_at(frame.f_lineno, (ast.FunctionDef,))
    if frame.f_code.co_name == "<lambda>":
        function = source.statement_at(frame.f_lineno)
    elif not isinstance(function, ast.FunctionDef) or function.name != frame.f_code.co_name:
        return ()
    taken = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    names = {it.id for it in ast.walk(function) if isinstance(it, ast.Name)}
    used = [frame.f_locals.get(it, frame.f_globals.get(it)) for it in names]
    uses_model = any(isinstance(it, Module) and any(True for _ in it.parameters()) for it in used)
    if uses_model or not any(isinstance(frame.f_locals.get(it), Tensor) for it in taken):
        return ()
    if not isinstance(function, ast.FunctionDef):
        lambdas = [it for it in ast.walk(function) if isinstance(it, ast.Lambda)]
        parts = [it for it in lambdas if tuple(each.arg for each in it.args.args) == taken]
        opened = "".join(f"{it}(" for it in decorators)
        edits = [(source.begin(it), opened, 0) for it in parts]
        edits += [(source.end(it), ")" * len(decorators), 0) for it in parts]
        return (*imports, *source.edited(function, edits))
    first = source.text.decode().split("\n")[function.lineno - 1].strip()
    return (*imports, *(f"@{it}" for it in decorators), first)


def is_half(frame: FrameType) -> bool:
    """Says whether a module of a frame has half parameters."""
    modules = [value for value in frame.f_locals.values() if isinstance(value, Module)]
    return any(parameter.dtype.itemsize == 2 for module in modules for parameter in module.parameters())


def is_half_tensor(value: object) -> bool:
    """Says whether a value is a tensor of float16 or bfloat16."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize == 2


def name_of_reduction(statement: ast.stmt) -> str:
    """Returns "mean" of a statement like `loss = 2 * (x - y).mean()`: one number is no input of a layer."""
    value = getattr(statement, "value", None)
    if isinstance(value, ast.BinOp):
        value = value.right if isinstance(value.right, ast.Call) else value.left
    is_plain = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and not value.args
    return value.func.attr if is_plain else ""


def half_in(node: ast.AST, frame: FrameType) -> Iterator[ast.expr]:
    """Yields the half tensors that a statement names: variables, and attributes of modules."""
    if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
        value = value_of(node, frame)
        if is_half_tensor(value):
            yield node
        if value is not None:
            return
    for each in ast.iter_child_nodes(node):
        yield from half_in(each, frame)


def value_of(node: ast.expr, frame: FrameType) -> object:
    """Returns what a name, or an attribute of one, stands for in a frame; None if that is not known."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = value_of(node.value, frame)
        return getattr(owner, node.attr, None) if isinstance(owner, Module) else None
    return None
