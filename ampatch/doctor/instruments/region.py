"""The user's statement that broke, written so that it computes in float32: lines to paste."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from types import FrameType

from torch import Tensor
from torch.nn import Module

from ampatch.doctor.instruments.places import user_frame

SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)


def region_in_float32(autocast: str | None) -> tuple[str, ...]:
    """Returns lines that replace the statement which the user's code is at; none where they could be wrong.

    Its half tensors are cast, and casts are off: those of `torch.autocast` for a device, None for ours. A
    statement that calls a module is left alone, and so is a half model: their parameters would not be cast.
    """
    frame = user_frame()
    statement = None if frame is None else find_statement(frame)
    if (
        statement is None
        or is_half(frame)
        or any(isinstance(value_of(it.func, frame), Module) for it in calls_in(statement))
    ):
        return ()
    context = "amp.disable_casts()" if autocast is None else f"torch.autocast({autocast!r}, enabled=False)"
    half = ToFloat32(frame)
    statement = half.visit(statement)
    return (f"with {context}:", f"    {ast.unparse(statement)}") if half.found else ()


def is_half(frame: FrameType) -> bool:
    """Says whether a module of a frame has half parameters."""
    modules = [value for value in frame.f_locals.values() if isinstance(value, Module)]
    return any(parameter.dtype.itemsize == 2 for module in modules for parameter in module.parameters())


def find_statement(frame: FrameType) -> ast.stmt | None:
    """Returns the simple statement that a frame is at."""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return None
    simple = [it for it in ast.walk(tree) if isinstance(it, SIMPLE)]
    return next((it for it in reversed(simple) if it.lineno <= frame.f_lineno <= it.end_lineno), None)


def calls_in(statement: ast.stmt) -> Iterator[ast.Call]:
    """Yields the calls in a statement."""
    return (it for it in ast.walk(statement) if isinstance(it, ast.Call))


def value_of(node: ast.expr, frame: FrameType) -> object:
    """Returns what a name, or an attribute of one, stands for in a frame; None if that is not known."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = value_of(node.value, frame)
        return getattr(owner, node.attr, None) if isinstance(owner, Module) else None
    return None


class ToFloat32(ast.NodeTransformer):
    """Casts the half tensors that a statement names; `found` says whether there are some."""

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self.found = False

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Casts a variable."""
        return self._cast(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Casts an attribute of a module."""
        return self._cast(node) if value_of(node, self._frame) is not None else self.generic_visit(node)

    def _cast(self, node: ast.Name | ast.Attribute) -> ast.expr:
        value = value_of(node, self._frame)
        if not isinstance(node.ctx, ast.Load) or not isinstance(value, Tensor):
            return node
        if not value.is_floating_point() or value.dtype.itemsize != 2:
            return node
        self.found = True
        return ast.Call(ast.Attribute(node, "float", ast.Load()), [], [])
