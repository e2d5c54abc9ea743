"""The user's statement that broke, and how it reads in float32: lines to paste."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from textwrap import indent
from types import FrameType

from torch import Tensor
from torch.nn import Module

from ampatch.doctor.instruments.dispatch import Operation
from ampatch.doctor.instruments.places import user_frame
from ampatch.doctor.instruments.values import is_finite
from ampatch.doctor.text.source import Edit, Lines, Source, place_of, read, statement_of

Casts = tuple[str, Lines, Lines]  # a context without casts, decorators that cast as well, what to import


def region_of(of: Operation, parameters: Iterable[Tensor]) -> Lines:
    """Returns lines that replace the statement which an operation runs for; `parameters` are the models'."""
    is_cast = of.is_on or not (of.autocast or any(map(is_half_tensor, parameters)))
    return region_in_float32(of.autocast, not (of.place and of.place.module), is_cast)


def region_in_float32(autocast: str | None, is_model: bool, casts_are_on: bool) -> Lines:
    """Returns lines that replace the statement which the user's code is at; none where they could be wrong.

    Its half tensors are cast, and casts are off: those of `torch.autocast` for a device, or ours. A function
    that uses no model is put into float32 as a whole, for what follows there as well. A statement that calls
    a module is left alone, and in a half model all but what it returns, if `is_model`.
    """
    frame, source, statement = statement_here()
    if statement is None:
        return ()
    casts = casts_of(autocast, source, frame.f_lineno, frame.f_locals) if casts_are_on else None
    if casts and (lines := function_in_float32(source, frame, *casts[1:])):
        return lines
    calls = (it for it in ast.walk(statement) if isinstance(it, ast.Call))
    if any(isinstance(value_of(it.func, frame), Module) for it in calls):
        return ()
    modules = [value for value in frame.f_locals.values() if isinstance(value, Module)]
    in_half = any(is_half_tensor(parameter) for module in modules for parameter in module.parameters())
    is_last = isinstance(statement, ast.Return) or name_of_reduction(statement) in ("mean", "sum")
    if in_half and not (is_model and is_last):
        return ()
    edits: list[Edit] = [
        (source.end(it), ".float()", 0) for it in tensors_in_statement(statement, frame, is_half_tensor)
    ]
    before, lines = source.before(statement), source.edited(statement, edits)
    if casts and not in_half:  # no casts of functions are on in a half model
        lines = (*casts[2], f"with {casts[0]}:", *indent("\n".join(lines), "    ").split("\n"))
    elif not edits:
        return ()
    return (before, *indent("\n".join(lines), "    ").split("\n")) if before else lines


def statement_here() -> tuple[FrameType | None, Source, ast.stmt | None]:
    """Returns where the user's code is: its frame, its file, and the statement, None where there is none."""
    frame = user_frame()
    source = (frame and read(frame.f_code.co_filename, frame.f_globals)) or Source(())
    return frame, source, source.statement_at(frame.f_lineno) if frame else None


def statement_of_zeros() -> Lines:
    """Returns the statement that the user's code is at, with 0 for each inf and NaN that it takes."""
    frame, source, statement = statement_here()
    found = tensors_in_statement(statement, frame, lambda it: not is_finite(it)) if statement else ()
    edits: list[Edit] = [(source.end(it), ".nan_to_num(0, 0, 0)", 0) for it in found]
    return source.edited(statement, edits) if statement and edits else ()


def function_at(where: str | None, autocast: str | None) -> Lines:
    """Returns the lines that put the function of a line, "file:line", into float32; none of a method."""
    source, _ = statement_of(where)
    _, line = place_of(where)
    function = source.statement_at(line, (ast.FunctionDef,))
    taken = [it.arg for it in function.args.args] if isinstance(function, ast.FunctionDef) else []
    if function is None or taken[:1] in ([], ["self"]):
        return ()
    return decorated(source, function, *casts_of(autocast, source, line, {})[1:])


def casts_of(autocast: str | None, source: Source, line: int, names: Collection[str]) -> Casts:
    """Returns how casts are turned off, and the import that this takes."""
    if autocast:
        decorator = f"torch.amp.custom_fwd(device_type={autocast!r}, cast_inputs=torch.float32)"
        return f"torch.autocast({autocast!r}, enabled=False)", (decorator,), ()
    imports = [it for it in source.tree.body if isinstance(it, (ast.Import, ast.ImportFrom))]
    above = [it.asname or it.name for each in imports for it in each.names if each.lineno < line]
    needed = () if "amp" in (*above, *names) else ("import ampatch as amp",)
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
    return decorated(source, function, decorators, imports)


def decorated(source: Source, function: ast.stmt, decorators: Lines, imports: Lines) -> Lines:
    """Returns the first line of a function, with what stands above it then."""
    return (*imports, *(f"@{it}" for it in decorators), source.line(function.lineno))


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


def tensors_in_statement(
    node: ast.AST, frame: FrameType, is_wanted: Callable[[Tensor], bool]
) -> Iterator[ast.expr]:
    """Yields the tensors of a kind that a statement names: variables, and parts of objects and of a batch."""
    if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Load):
        value = value_of(node, frame)
        if isinstance(value, Tensor) and is_wanted(value):
            yield node
        if value is not None:
            return
    is_put = isinstance(node, (ast.Assign, ast.AugAssign))  # into a tensor, and not into a copy of it
    for each in [node.value] if is_put else ast.iter_child_nodes(node):
        yield from tensors_in_statement(each, frame, is_wanted)


def value_of(node: ast.expr, frame: FrameType) -> object:
    """Returns what a name, or a part of one, stands for in a frame; None if that is not known."""
    match node:
        case ast.Name(id=name):
            return frame.f_locals.get(name, frame.f_globals.get(name))
        case ast.Attribute(value=owner, attr=name):
            held = value_of(owner, frame)
            is_plain = isinstance(held, (Module, tuple)) or name in getattr(held, "__dict__", ())
            return getattr(held, name, None) if is_plain else None
        case ast.Subscript(value=owner, slice=ast.Constant(value=key)):
            held = value_of(owner, frame)
            with suppress(LookupError):
                return held[key] if isinstance(held, (dict, list, tuple)) else None
    return None
