"""The logarithm of something as one function: it has a value where that is 0 or infinite."""

from __future__ import annotations

import ast

from ampatch.doctor.text.mend import operand_of
from ampatch.doctor.text.source import Change, Edit, Source, statement_of

SMALL = 0.01  # an eps


def log_source(where: str | None) -> Change | None:
    """Returns the statement at a line with logarithms, and what they are of, as functions of torch's."""
    source, statement = statement_of(where)
    edits: list[Edit] = []
    for node in ast.walk(statement) if statement else ():
        taken, more = operand_of(source, node, "log")[0], operand_of(source, node, "log1p")[0]
        new = log_of(source, taken) if taken else call_of(source, more, "exp", "softplus") if more else ""
        edits += [(source.begin(node), new, source.end(node) - source.begin(node))] if new else []
    return source.edited(statement, edits) if statement and edits else None


def log_of(source: Source, taken: ast.expr) -> str:
    """Returns the function that is the logarithm of an expression; "" where torch has none."""
    match taken:
        case ast.BinOp(ast.Constant(1), ast.Add(), other) | ast.BinOp(other, ast.Add(), ast.Constant(1)):
            return call_of(source, other, "exp", "softplus")
        case ast.BinOp(ast.Constant(1), ast.Sub(), other):
            return call_of(source, other, "sigmoid", "logsigmoid", "-({})")
        case ast.BinOp(other, ast.Add(), eps) if is_small(eps):
            return log_of(source, other)
        case _:
            one = call_of(source, taken, "sigmoid", "logsigmoid")
            return one or call_of(source, taken, "softmax", "log_softmax") or sum_of(source, taken)


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
