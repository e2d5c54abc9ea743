"""How a statement of the user's reads when it is mended: another operand, or another call."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ampatch.doctor.text.source import Change, Edit, Source, statement_of, statements_of

ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
OPERATORS = {ast.Div: "div", ast.Pow: "pow"}
PUTTING = re.compile(r"(masked_)?scatter|index_(add|copy|put|reduce)|copy_")
WIDER = {"half": "float", "bfloat16": "float", "float16": "float32"}  # torch.half is torch.float16
NAMESPACES = ("torch", "F", "functional", "linalg", "special")


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


def mended(where: str | None, op: str, mend: Mend) -> Change | None:
    """Returns the change at a line, "file:line", with each call of an operation mended, None without one.

    Those beside it that have the same operand, or are built alike, are mended with it.
    """
    source, statements = statements_of(where)
    statement = next((statement for statement in statements if edits_in(source, statement, op, mend)), None)
    if statement is None:
        return None
    block = source.block_of(statement) if mend.suffix or mend.around else [statement]
    likeness = likeness_of(source, statement, op)
    alike = [statement for statement in block if likeness & likeness_of(source, statement, op)]
    if len(alike) == 1:
        return source.edited(statement, edits_in(source, statement, op, mend))
    edits = [edit for statement in alike for edit in edits_in(source, statement, op, mend)]
    return source.edited(alike[0], edits, alike[-1])


def edits_in(source: Source, statement: ast.stmt, op: str, mend: Mend) -> list[Edit]:
    return [edit for node in ast.walk(statement) for edit in edits_of(source, node, op, mend)]


def likeness_of(source: Source, statement: ast.stmt, op: str) -> set[str]:
    """Returns what statements share that are mended alike: how they are built, what an operation takes."""
    operands = (operand_of(source, node, op.rstrip("_"))[0] for node in ast.walk(statement))
    shape = re.sub(r"(id|arg|value)=('\w*'|[\d.]+)", "", ast.dump(statement))
    return {shape, *(node.id for node in operands if isinstance(node, ast.Name))}


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
        yield from behind(begin, end, is_closed, mend.suffix.format(x=x))
    if not isinstance(node, ast.Call):
        return
    y = next((ast.unparse(arg) for arg in node.args[1:]), "")
    if mend.keyword:
        has_arguments = bool(node.args or node.keywords)
        yield source.end(node) - 1, mend.keyword if has_arguments else mend.keyword.removeprefix(", "), 0
    if mend.name:
        yield source.end(node.func) - len(op), mend.name, len(op)
    if mend.tail:
        yield source.end(node), mend.tail.format(x=x, y=y), 0


def behind(begin: int, end: int, is_closed: bool, suffix: str) -> Iterator[Edit]:
    """Yields the edits that put a suffix behind an expression, in parentheses unless it binds by itself."""
    if not is_closed:
        yield begin, "(", 0
    yield end, ("" if is_closed else ")") + suffix, 0


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


def cast_source(where: str | None) -> Change | None:
    """Returns the statement at a line with what it puts into a tensor cast to the type of that tensor."""
    source, statement = statement_of(where)
    edits: list[Edit] = []
    for node in ast.walk(statement) if statement else ():
        match node:
            case ast.Assign(targets=[ast.Subscript(value=owner)], value=value):
                pass
            case ast.Call(func=ast.Attribute(value=owner, attr=op), args=[*_, value]) if PUTTING.match(op):
                owner = node.args[0] if getattr(owner, "id", "") in NAMESPACES else owner
            case _:
                continue
        cast = f".to({ast.unparse(owner)}.dtype)"
        edits += behind(source.begin(value), source.end(value), isinstance(value, ATOMS), cast)
    return source.edited(statement, edits) if statement and edits else None


def widened(where: str | None) -> Change | None:
    """Returns the statement at a line that casts to half with a cast to float32 in its place."""
    source, statements = statements_of(where)
    for statement in statements:
        edits: list[Edit] = []
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and node.attr in WIDER:
                end = source.end(node)
                edits.append((end - len(node.attr), WIDER[node.attr], len(node.attr)))
        if edits:
            return source.edited(statement, edits)
    return None


def retyped(where: str, dtype: str) -> tuple[Change, ...]:
    """Returns the lines of a file, that of "file:line", which name a half type, with another type there."""
    source, _ = statements_of(where)
    types = ("half", "float16", "bfloat16") if dtype == "float32" else ("half", "float16")
    edits: dict[int, list[Edit]] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in types:
            is_method = node.attr != "float16" and getattr(node.value, "id", "") != "torch"
            new = dtype.removesuffix("32") if is_method else dtype
            edits.setdefault(node.end_lineno or 0, []).append(
                (source.end(node) - len(node.attr), new, len(node.attr))
            )
    return tuple(source.edited_line(line, found) for line, found in sorted(edits.items()))


def summed_source(where: str | None, op: str) -> Change | None:
    """Returns the statement at a line with a sum in float32, of which the result is cast back."""
    source, statements = statements_of(where)
    for statement in statements:
        calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
        for call in (call for call in calls if getattr(call.func, "attr", "") == op and len(call.args) > 1):
            new, dtype = made_in_float32(source, getattr(call.func, "value", None))
            if not dtype:
                continue
            added = call.args[-1]
            in_float32 = behind(source.begin(added), source.end(added), isinstance(added, ATOMS), ".float()")
            edits = made_in_float32(source, added)[0] or [*in_float32]
            return source.edited(statement, [*new, *edits, (source.end(call), f".to({dtype})", 0)])
    return None


def target_source(where: str | None) -> Change | None:
    """Returns the statement that makes what the one at a line writes into, with float32 for its type."""
    source, statement = statement_of(where)
    match statement:
        case ast.Assign(targets=[ast.Subscript(ast.Name(name))]) | ast.AugAssign(
            ast.Subscript(ast.Name(name))
        ):
            pass
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), op))) if PUTTING.match(op):
            pass
        case _:
            return None
    before = [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assign) and node.lineno < statement.lineno
    ]
    for each in sorted(before, key=lambda node: -node.lineno):
        if name in map(ast.unparse, each.targets):
            edits, _ = made_in_float32(source, each.value)
            return source.edited(each, edits) if edits else None
    return None


def made_in_float32(source: Source, made: ast.expr | None) -> tuple[list[Edit], str]:
    """Returns the edits that make a tensor in float32, as by torch.zeros, and the type that it had."""
    if not isinstance(made, ast.Call) or not isinstance(made.func, ast.Attribute):
        return [], ""
    if not made.func.attr.removeprefix("new_").startswith(("zeros", "ones", "full", "empty")):
        return [], ""
    for keyword in (keyword for keyword in made.keywords if keyword.arg == "dtype"):
        begin, end = source.begin(keyword.value), source.end(keyword.value)
        return [(begin, "torch.float32", end - begin)], ast.unparse(keyword.value)
    owner = made.args[0] if made.func.attr.endswith("_like") else made.func.value
    if getattr(owner, "id", "") in NAMESPACES:
        return [], ""
    return [(source.end(made) - 1, ", dtype=torch.float32", 0)], f"{ast.unparse(owner)}.dtype"


def constructed(where: str | None, name: str, keyword: str) -> Change | None:
    """Returns the statement of a line's file that makes an object of a class, with a keyword more."""
    source, _ = statement_of(where)
    for call in (node for node in ast.walk(source.tree) if isinstance(node, ast.Call)):
        statement = source.statement_at(call.lineno)
        if ast.unparse(call.func).rpartition(".")[2] == name and statement:
            more = f", {keyword}" if call.args or call.keywords else keyword
            return source.edited(statement, [(source.end(call) - 1, more, 0)])
    return None


def normalized_source(where: str | None, module: str, dim: int) -> Change | None:
    """Returns the statement at a line with what a module takes there made vectors of length 1."""
    source, statement = statement_of(where)
    calls = (
        [node for node in ast.walk(statement) if isinstance(node, ast.Call) and node.args]
        if statement
        else []
    )
    modules = [call for call in calls if is_of_module(call.func)]
    named = [call for call in modules if getattr(call.func, "attr", "") in module.split(".")]
    for first in (named or modules)[:1]:
        begin, end = source.begin(first.args[0]), source.end(first.args[0])
        edits = [(begin, "torch.nn.functional.normalize(", 0), (end, f", dim={dim})", 0)]
        return source.edited(statement, edits)
    return None


def is_of_module(called: ast.expr) -> bool:
    """Says whether what is called may be a module: a part of self, or a variable."""
    owner = called.value if isinstance(called, (ast.Attribute, ast.Subscript)) else called
    owner = owner.value if isinstance(owner, ast.Attribute) else owner
    is_plain = owner is called or isinstance(called, ast.Subscript)
    return isinstance(owner, ast.Name) and (
        owner.id == "self" or (is_plain and owner.id not in dir(builtins))
    )


SMALL = 0.01  # an eps
REPEATABLE = {"softmax", "sigmoid", "exp", "sum", "float", "view", "reshape", "squeeze", "unsqueeze"}
Values = dict[str, ast.expr]  # what names hold


def log_source(where: str | None) -> Change | None:
    """Returns the statement at a line with logarithms, and what they are of, as functions of torch's."""
    source, statement = statement_of(where)
    if statement is None:
        return None
    edits = log_edits(source, statement, values_before(source, statement))
    return source.edited(statement, edits) if edits else log_of_exponential(source, statement)


def log_of_exponential(source: Source, statement: ast.stmt) -> Change | None:
    """Returns the statement that gives exponentials a name, and the one that takes their logarithm, mended.

    The name then holds what the exponentials are of, so nothing else may read it.
    """
    match statement:
        case ast.Assign(targets=[ast.Name(name)], value=ast.Call() as call):
            exponent = operand_of(source, call, "exp")[0]
        case _:
            return None
    block = source.block_of(statement)
    readers = [
        statement
        for statement in block[block.index(statement) + 1 :]
        for each in names_in_all(statement)
        if each == name
    ]
    if exponent is None or len(readers) != 1:
        return None
    exponential = ast.parse(f"torch.exp({name})", mode="eval").body
    edits = log_edits(source, readers[0], {name: exponential})
    start = source.begin(call)
    first = (start, ast.unparse(exponent), source.end(call) - start)
    return source.edited(statement, [first, *edits], readers[0]) if edits else None


def log_edits(source: Source, statement: ast.stmt, values: Values) -> list[Edit]:
    """Returns the edits that make each logarithm of a statement one function with what it is of."""
    edits: list[Edit] = []
    for node in ast.walk(statement):
        argument, more = operand_of(source, node, "log")[0], operand_of(source, node, "log1p")[0]
        new = log_of(source, argument, values) if argument else ""
        new = new or (call_of(source, resolve(more, values), "exp", "softplus") if more else "")
        edits += [(source.begin(node), new, source.end(node) - source.begin(node))] if new else []
    return edits


def values_before(source: Source, statement: ast.stmt) -> Values:
    """Returns what names hold at a statement, of those that are assigned in a row with it and not since."""
    values: Values = {}
    block = source.block_of(statement)
    for each in block[: block.index(statement)]:
        written = set(filter(None, map(name_written, ast.walk(each))))
        values = {
            name: value
            for name, value in values.items()
            if name not in written and written.isdisjoint(names_in(value))
        }
        match each:
            case ast.Assign(targets=[ast.Name(name)], value=value) if is_repeatable(value, name):
                values[name] = value
    return values


def name_written(node: ast.AST) -> str | None:
    """Returns the name that is assigned, or whose tensor is written in place, None of other nodes."""
    match node:
        case (
            ast.Name(name, ast.Store())
            | ast.Subscript(ast.Name(name), _, ast.Store())
            | ast.AugAssign(ast.Subscript(ast.Name(name)))
        ):
            return name
        case ast.Call(ast.Attribute(ast.Name(name), method)) if method.endswith("_"):
            return name
    return None


def is_repeatable(value: ast.expr, name: str) -> bool:
    """Says whether an expression that a name was given to is the same once more, as a layer may not be."""
    called = [node.func for node in ast.walk(value) if isinstance(node, ast.Call)]
    return name not in names_in(value) and all(getattr(node, "attr", "") in REPEATABLE for node in called)


def names_in(value: ast.expr) -> set[str]:
    return set(names_in_all(value))


def names_in_all(read: ast.AST) -> list[str]:
    """Returns the names in an expression or a statement, as often as they are there."""
    return [node.id for node in ast.walk(read) if isinstance(node, ast.Name)]


def resolve(value: ast.expr, values: Values) -> ast.expr:
    """Returns what a name holds, and any other expression as it is."""
    while isinstance(value, ast.Name) and value.id in values:
        value = values[value.id]
    return value


def log_of(source: Source, argument: ast.expr, values: Values) -> str:
    """Returns the function that is the logarithm of an expression; "" where torch has none."""
    match resolve(argument, values):
        case ast.BinOp(ast.Constant(1), ast.Add(), other) | ast.BinOp(other, ast.Add(), ast.Constant(1)):
            return call_of(source, resolve(other, values), "exp", "softplus")
        case ast.BinOp(ast.Constant(1), ast.Sub(), other):
            return call_of(source, resolve(other, values), "sigmoid", "logsigmoid", "-({})")
        case ast.BinOp(other, ast.Add(), eps) if is_small(eps):
            return log_of(source, other, values)
        case value:
            one = call_of(source, value, "sigmoid", "logsigmoid")
            return one or call_of(source, value, "softmax", "log_softmax") or sum_of(source, value)


def is_small(added: ast.expr) -> bool:
    match added:
        case ast.Constant(float(value)):
            return value < SMALL
        case _:
            return "eps" in ast.unparse(added).lower()


def call_of(source: Source, call: ast.expr, name: str, new: str, operand: str = "{}") -> str:
    """Returns the call of one function in the place of another, "" of what calls none of that name."""
    inner = operand_of(source, call, name)[0]
    if not isinstance(call, ast.Call) or inner is None:
        return ""
    rest = [ast.unparse(arg) for arg in (*call.args, *call.keywords) if arg is not inner]
    return f"torch.nn.functional.{new}({', '.join([operand.format(ast.unparse(inner)), *rest])})"


def sum_of(source: Source, call: ast.expr) -> str:
    """Returns the logarithm of a sum of exponentials over some dimensions, "" of what is none."""
    summed = operand_of(source, call, "sum")[0]
    inner = operand_of(source, summed, "exp")[0] if summed else None
    if not isinstance(call, ast.Call) or inner is None:
        return ""
    rest = [ast.unparse(arg) for arg in (*call.args, *call.keywords) if arg is not summed]
    return f"torch.logsumexp({', '.join([ast.unparse(inner), *rest])})" if rest else ""
