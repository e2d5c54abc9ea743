"""The logarithm of something as one function: it has a value where that is 0 or infinite."""

from __future__ import annotations

import ast

from ampatch.doctor.text.mend import operand_of
from ampatch.doctor.text.source import Change, Edit, Source, statement_of

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
    readers = [it for it in block[block.index(statement) + 1 :] for each in names_in_all(it) if each == name]
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
        taken, more = operand_of(source, node, "log")[0], operand_of(source, node, "log1p")[0]
        new = log_of(source, taken, values) if taken else ""
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
    return name not in names_in(value) and all(getattr(it, "attr", "") in REPEATABLE for it in called)


def names_in(value: ast.expr) -> set[str]:
    """Returns the names that an expression reads."""
    return set(names_in_all(value))


def names_in_all(read: ast.AST) -> list[str]:
    """Returns the names in an expression or a statement, as often as they are there."""
    return [node.id for node in ast.walk(read) if isinstance(node, ast.Name)]


def resolve(taken: ast.expr, values: Values) -> ast.expr:
    """Returns what a name holds, and any other expression as it is."""
    while isinstance(taken, ast.Name) and taken.id in values:
        taken = values[taken.id]
    return taken


def log_of(source: Source, taken: ast.expr, values: Values) -> str:
    """Returns the function that is the logarithm of an expression; "" where torch has none."""
    match resolve(taken, values):
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
    """Says whether what is added is an eps."""
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
    rest = [ast.unparse(it) for it in (*call.args, *call.keywords) if it is not inner]
    return f"torch.nn.functional.{new}({', '.join([operand.format(ast.unparse(inner)), *rest])})"


def sum_of(source: Source, call: ast.expr) -> str:
    """Returns the logarithm of a sum of exponentials over some dimensions, "" of what is none."""
    summed = operand_of(source, call, "sum")[0]
    inner = operand_of(source, summed, "exp")[0] if summed else None
    if not isinstance(call, ast.Call) or inner is None:
        return ""
    rest = [ast.unparse(it) for it in (*call.args, *call.keywords) if it is not summed]
    return f"torch.logsumexp({', '.join([ast.unparse(inner), *rest])})" if rest else ""
