"""The user's statement that broke, and how it reads in float32: lines to paste."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from textwrap import indent
from types import FrameType

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Module

from ampatch.doctor.fixes import Paste
from ampatch.doctor.instruments.dispatch import Operation
from ampatch.doctor.instruments.places import SHOWN, user_frame
from ampatch.doctor.instruments.values import is_finite
from ampatch.doctor.text.source import Change, Edit, Lines, Source, place_of, read, statement_of

STATEMENT = "only that statement in float32"
CAST_BACK = "that statement in float32, and what it gives cast back"
FUNCTION = "that function in float32, by what stands above it here"
Casts = tuple[str, Lines, Lines]  # a context without casts, decorators that cast as well, what to import


def region_of(of: Operation, parameters: Iterable[Tensor]) -> Paste | None:
    """Returns what puts the statement which an operation runs for into float32; None where it could be wrong.

    Its half tensors are cast, and casts are off: those of `torch.autocast` for a device, or ours. A function
    that uses no model is put into float32 as a whole, for what follows there as well. Of statements that
    call modules those are left alone whose modules have parts. In a half model, as its `parameters` tell,
    only what that returns stays float32: what a part of it computes is cast back.
    """
    frame, source, statement = statement_here()
    if frame is None or statement is None:
        return None
    autocast, place, casts = of.record.autocast, of.record.place, None
    if of.is_on or not (autocast or any(map(is_half_tensor, parameters))):
        casts = casts_of(autocast, source, frame.f_lineno, frame.f_locals)
    if casts and (change := function_in_float32(source, frame, *casts[1:])):
        return Paste(FUNCTION, (change,))
    calls = (value_of(node.func, frame) for node in ast.walk(statement) if isinstance(node, ast.Call))
    called = [call for call in calls if isinstance(call, Module)]
    modules = [value for value in frame.f_locals.values() if isinstance(value, Module)]
    in_half = any(is_half_tensor(parameter) for module in modules for parameter in module.parameters())
    if called and (in_half or not casts or any([*module.children()] for module in called)):
        return None
    is_last = isinstance(statement, ast.Return) or name_of_reduction(statement) in ("mean", "sum")
    is_part = not casts and bool(place and place.module)
    if in_half and not (is_last or is_part):
        return None
    half = list(tensors_in_statement(statement, frame, is_half_tensor))
    edits: list[Edit] = [(source.end(node), ".float()", 0) for node in half]
    if is_part:
        edits = cast_back(source, statement, edits, half)
    if casts and not in_half:  # no casts of functions are on in a half model
        inside = indent("\n".join(source.text_of(statement, edits)), "    ").split("\n")
        change = source.replaced(statement, (*casts[2], f"with {casts[0]}:", *inside))
    elif edits:
        change = source.edited(statement, edits)
    else:
        return None
    return Paste(CAST_BACK if is_part else STATEMENT, (change,))


def cast_back(
    source: Source, statement: ast.stmt, edits: Sequence[Edit], half: Sequence[ast.expr]
) -> list[Edit]:
    """Returns edits of a statement, and a cast of what it gives to the type of what it takes; or none."""
    value = statement.value if isinstance(statement, (ast.Assign, ast.Return)) else None
    is_name = not isinstance(statement, ast.Assign) or isinstance(statement.targets[0], ast.Name)
    if not half or value is None or not is_name or isinstance(value, (ast.Tuple, ast.List, ast.Dict)):
        return []
    end = source.end(value)
    last = "".join(new for at, new, _ in edits if at == end)
    inside = [edit for edit in edits if edit[0] != end]
    return [*inside, (source.begin(value), "(", 0), (end, f"{last}).to({ast.unparse(half[0])}.dtype)", 0)]


def statement_here() -> tuple[FrameType | None, Source, ast.stmt | None]:
    """Returns where the user's code is: its frame, its file, and the statement, None where there is none."""
    frame = user_frame()
    if frame is None:
        return None, Source(()), None
    name = frame.f_code.co_filename
    source = read(name, frame.f_globals, name.removeprefix(SHOWN)) or Source(())
    return frame, source, source.statement_of(frame.f_code, frame.f_lasti, frame.f_lineno)


def statement_of_zeros() -> Change | None:
    """Returns the statement that the user's code is at, with 0 for each inf and NaN that it takes."""
    frame, source, statement = statement_here()
    nodes = (
        tensors_in_statement(statement, frame, lambda tensor: not is_finite(tensor))
        if statement and frame
        else ()
    )
    edits: list[Edit] = [(source.end(node), ".nan_to_num(0, 0, 0)", 0) for node in nodes]
    return source.edited(statement, edits) if statement and edits else None


def function_at(where: str | None, autocast: str | None) -> Paste | None:
    """Returns what puts the function of a line, "file:line", into float32; None of a method."""
    source, _ = statement_of(where)
    _, line = place_of(where)
    function = source.statement_at(line, (ast.FunctionDef,))
    names = [arg.arg for arg in function.args.args] if isinstance(function, ast.FunctionDef) else []
    if function is None or names[:1] in ([], ["self"]):
        return None
    return Paste(FUNCTION, (decorated(source, function, *casts_of(autocast, source, line, {})[1:]),))


def casts_of(autocast: str | None, source: Source, line: int, names: Collection[str]) -> Casts:
    """Returns how casts are turned off, and the import that this takes."""
    if autocast:
        decorator = f"torch.amp.custom_fwd(device_type={autocast!r}, cast_inputs=torch.float32)"
        return f"torch.autocast({autocast!r}, enabled=False)", (decorator,), ()
    imports = [
        statement for statement in source.tree.body if isinstance(statement, (ast.Import, ast.ImportFrom))
    ]
    above = [name.asname or name.name for each in imports for name in each.names if each.lineno < line]
    needed = () if "amp" in (*above, *names) else ("import ampatch as amp",)
    return "amp.disable_casts()", ("amp.float_function", "amp.disable_casts()"), needed


def function_in_float32(source: Source, frame: FrameType, decorators: Lines, imports: Lines) -> Change | None:
    """Returns the change that puts the function of a frame into float32; None if it uses a model."""
    function = source.statement_at(frame.f_lineno, (ast.FunctionDef,))
    if frame.f_code.co_name == "<lambda>":
        function = source.statement_at(frame.f_lineno)
    elif not isinstance(function, ast.FunctionDef) or function.name != frame.f_code.co_name:
        return None
    parameters = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    is_of_function = any(isinstance(frame.f_locals.get(name), BackwardCFunction) for name in parameters[:1])
    if is_of_function and frame.f_code.co_name == "backward":
        return None  # a backward, of which the gradients have the types of what its forward took
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    used = [frame.f_locals.get(name, frame.f_globals.get(name)) for name in names]
    uses_model = any(isinstance(value, Module) and any(True for _ in value.parameters()) for value in used)
    if uses_model or not any(isinstance(frame.f_locals.get(name), Tensor) for name in parameters):
        return None
    if not isinstance(function, ast.FunctionDef):
        lambdas = [node for node in ast.walk(function) if isinstance(node, ast.Lambda)]
        parts = [
            function for function in lambdas if tuple(each.arg for each in function.args.args) == parameters
        ]
        opened = "".join(f"{decorator}(" for decorator in decorators)
        edits = [(source.begin(part), opened, 0) for part in parts]
        edits += [(source.end(part), ")" * len(decorators), 0) for part in parts]
        if not imports:
            return source.edited(function, edits)
        return source.replaced(function, (*imports, *source.text_of(function, edits)))
    return decorated(source, function, decorators, imports)


def decorated(source: Source, function: ast.stmt, decorators: Lines, imports: Lines) -> Change:
    """Returns the change of the first line of a function, with what stands above it then."""
    lines = (*imports, *(f"@{decorator}" for decorator in decorators), source.line(function.lineno))
    return source.change(function.lineno, function.lineno, lines)


def is_half_tensor(value: object) -> bool:
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
