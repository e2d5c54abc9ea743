"""Knows of which type a tensor is from the lines that make it, where a script shows them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from ampatch.apex.checking.uses import Names

# Methods and functions whose tensor is of the type of the one that they take.
KEEP = re.compile(
    r"(un)?squeeze|view(_as)?|reshape|expand(_as)?|repeat|t|transpose|permute|contiguous|clone|detach|flatten"
    r"|cuda|cpu|to|numpy|from_numpy|as_tensor|tensor|triu|tril|flip|roll|cat|stack|chunk|split|unbind|index_select"
    r"|masked_fill_?|clamp_?|Variable|Parameter|array|asarray|concatenate"
)
# What makes tensors of bools, or of another type that the name says, or of floats.
OTHERS = re.compile(
    r"eq|ne|gt|lt|ge|le|bool|logical_\w+|any|all|is\w+|\w+Tensor|float|half|double|long|int"
    r"|ones|zeros|full|empty|randn?|softmax"
)
BYTES = re.compile(r"uint8|ByteTensor")
INTEGERS = re.compile(r"u?int(8|16|32|64)?|long|short|(Byte|Char|Short|Int|Long)Tensor")
# What makes tensors of integers without a word of their type.
COUNTS = re.compile(r"arange|randint|argmax|argmin|argsort|nonzero|randperm|long|int|short|byte")


def is_perhaps_bytes(node: ast.expr, names: Names) -> bool:
    """Whether a mask is of bytes, or may be: nothing shows what it is, and the script makes such masks."""
    ways = {*made_of(node, names, re.compile("byte"), BYTES)}
    return True in ways or (None in ways and names.makes_bytes)


def is_integral(node: ast.expr, names: Names) -> bool:
    """Whether the lines that make a tensor show that it is of integers."""
    return True in made_of(node, names, COUNTS, INTEGERS)


def made_of(
    node: ast.AST, names: Names, makers: re.Pattern, types: re.Pattern, seen: set[ast.AST] | None = None
) -> Iterator[bool | None]:
    """Yields for each way in which a value is made whether it is of these types; None if nothing shows it.

    `makers` are methods and functions that make such values, `types` what others are told. What was
    `seen` is not looked at again: a name that is set in many lines leads to itself in many ways.
    """
    seen = set() if seen is None else seen

    def below(*nodes: object) -> Iterator[bool | None]:
        for each in nodes:
            if each is None:
                yield None
            elif isinstance(each, ast.AST) and each not in seen:
                seen.add(each)
                yield from made_of(each, names, makers, types, seen)

    match node:
        case ast.Name(name):
            yield from below(*names.values(node), *names.parts.get(name, ()))
        case ast.Attribute(value, "T" | "data"):
            yield from below(value)
        case ast.Attribute(attr=name):
            yield from below(*names.attributes.get(name, [None]))
        case ast.Subscript(value) | ast.Starred(value):
            yield from below(value)
        case ast.BinOp(left, _, right):
            yield from below(left, right)
        case ast.UnaryOp(ast.Invert(), value):
            yield from below(value)
        case ast.IfExp(_, first, second):
            yield from below(first, second)
        case ast.Tuple(elts) | ast.List(elts):
            yield from below(*elts)
        case ast.Call():
            yield from below_call(node, names, makers, types, below)
        case _:
            yield False


def below_call(node: ast.Call, names: Names, makers: re.Pattern, types: re.Pattern, below) -> Iterator:
    """Yields the same of what a call returns."""
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    said_types = [each for each in types_of(node) if each]
    if said_types:
        yield any(types.fullmatch(each) for each in said_types)
    elif makers.fullmatch(name) or types.fullmatch(name):
        yield True
    elif name in names.returns:
        yield from below(*names.returns[name])
    elif KEEP.fullmatch(name):
        receiver = getattr(node.func, "value", None)
        is_module = receiver is None or any(isinstance(each, str) for each in names.values(receiver))
        yield from below(*(node.args[:1] if is_module else [receiver]))
    else:
        yield False if OTHERS.fullmatch(name) else None


def types_of(node: ast.Call) -> Iterable[str]:
    """Yields the types that a call is told: `dtype=torch.uint8`, `x.to(torch.uint8)`, `x.astype("uint8")`."""
    for word in node.keywords:
        if word.arg == "dtype":
            yield last_of(word.value)
    if getattr(node.func, "attr", "") in ("to", "type", "astype"):
        for argument in node.args:
            name = last_of(argument)
            yield name if re.fullmatch(r"u?int\d*|bool_?|float\d*|half|double|long|\w+Tensor", name) else ""


def last_of(node: ast.expr) -> str:
    """Returns the last word of a name, or of a text."""
    text = str(getattr(node, "value", "")) if isinstance(node, ast.Constant) else ast.unparse(node)
    return text.rpartition(".")[2]
