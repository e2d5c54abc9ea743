"""Lets torch.compile see the casts of tensor methods and operators, and forget graphs made without them."""

from __future__ import annotations

import functools
import inspect
import logging
import operator
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import torch
import wrapt
from torch import Tensor

from ampatch import lists
from ampatch.cast import CastState
from ampatch.in_graph import call_uncast
from ampatch.patcher import Patcher
from ampatch.peel import peel
from ampatch.wrapper import wrap

logger = logging.getLogger("ampatch")

# By what method and function a tensor has an operator; `a @= b` finds no method of its own.
OPERATORS: dict[object, tuple[str, str]] = {
    operator.matmul: ("__matmul__", "matmul"),
    operator.imatmul: ("__matmul__", "matmul"),
    operator.pow: ("__pow__", "pow"),
    operator.ipow: ("__ipow__", "Tensor.__ipow__"),
}

PACKAGE = f"{Path(__file__).parent}{os.sep}"


def prepare_compiler() -> None:
    """Has Dynamo make its tables from torch's namespace as it is now: before any patch.

    They know functions by identity, and are made on import or first use. A wrapper in them would
    never be traced, and an original that is not in them would not be known after `uninitialize`.
    """
    import torch._dynamo
    from torch._dynamo import trace_rules

    trace_rules.get_torch_obj_rule_map()
    trace_rules.get_tensor_method()
    torch.compiler.allow_in_graph(call_uncast)


def skip_own_frames(done: set[str]) -> None:
    """Lets code of ours become part of a graph, but not a graph of its own; now, or once Dynamo is imported.

    Hooks and steps that run outside of graphs keep records, and Dynamo (2.13) loses what a graph writes
    to a thread's own objects. Importing Dynamo takes seconds, and not every script compiles. `done` are
    the modules of ours that it has been told of, which need not be told again.
    """
    skip = functools.partial(_skip_own_frames, done=done)
    wrapt.register_post_import_hook(skip, "torch._dynamo.eval_frame")


def _skip_own_frames(eval_frame: ModuleType, done: set[str]) -> None:
    own = {name for name in sys.modules if name.partition(".")[0] == "ampatch"}
    for name in own - done:
        done.add(name)
        for value in vars(sys.modules[name]).values():
            for item in vars(value).values() if isinstance(value, type) else [value]:
                function = inspect.unwrap(item)
                if isinstance(function, FunctionType) and function.__globals__ is vars(sys.modules[name]):
                    for code in _codes_in(function.__code__):
                        eval_frame.skip_code(code)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of those that it makes."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


def forget_graphs() -> None:
    """Has every compiled function compiled anew when it is called next.

    Graphs are guarded by what their Python code looks up, which methods and operators of tensors are not.
    """
    torch._dynamo.reset_code_caches()


def tag_caches(patcher: Patcher, half: torch.dtype) -> None:
    """Keeps what is compiled while torch is patched apart, in the caches that processes share.

    These know a graph by its text, which does not show what a function casts inside. A tag that the
    user sets wins. The default is what every thread sees, unlike what `torch.compiler.config` is set to.
    """
    entry = getattr(torch.compiler.config, "_config", {}).get("cache_key_tag")
    if entry is not None:
        patcher.replace(entry, "default", f"ampatch {half}")


def restore_compiler() -> None:
    """Forgets graphs with casts, and takes wrappers out of Dynamo's tables.

    They get there if the tables are made anew, as `torch.distributed.init_process_group` has it.
    """
    from torch._dynamo import trace_rules

    forget_graphs()
    rules = trace_rules.get_torch_obj_rule_map()
    for wrapper in [function for function in rules if _is_wrapper(function)]:
        rules[peel(wrapper)] = rules.pop(wrapper)
    trace_rules.get_tensor_method.cache_clear()


def trace_methods(patcher: Patcher, casts: CastState, half: torch.dtype) -> None:
    """Has Dynamo trace the wrappers of methods and operators where it would put their names into the graph.

    So the casts stand in the graph, which is guarded by what the wrappers look at. A wrapper that is
    traced calls the method itself. The third replacement is a table in which Dynamo keeps the second.
    """
    _wrap_operators(casts, half)
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.tensor import TensorVariable

    places = (
        (TensorVariable, "call_method"),
        (BuiltinVariable, "_handle_insert_op_in_graph"),
        (BuiltinVariable, "call_function_handler_cache"),
    )
    if not all(hasattr(place, name) for place, name in places):
        logger.warning(
            "torch %s: Dynamo is not as it was in torch 2.13; tensor methods and operators in graphs of "
            "torch.compile are cast also where casts are off",
            torch.__version__,
        )
        return
    insert_method, insert_operator = TensorVariable.call_method, BuiltinVariable._handle_insert_op_in_graph

    def trace_method(variable, tx, name, args, kwargs):
        if _is_wrapper(vars(Tensor).get(name)) and not _is_ours(tx.f_code):
            return _trace(tx, [name], [variable, *args], kwargs)
        return insert_method(variable, tx, name, args, kwargs)

    def trace_operator(variable, tx, args, kwargs):
        method, _ = OPERATORS.get(variable.fn, (None, None))
        name = variable.fn.__name__
        if hasattr(vars(Tensor).get(method), name) and not _is_ours(tx.f_code):
            return _trace(tx, [method, name], args, kwargs)
        return insert_operator(variable, tx, args, kwargs)

    for (place, name), replacement in zip(places, (trace_method, trace_operator, {}), strict=True):
        patcher.replace(place, name, replacement)


def _wrap_operators(casts: CastState, half: torch.dtype) -> None:
    """Gives the wrappers of operators' methods one of the operator itself, which graphs hold."""
    kinds = {row.name: row.cast for row in lists.TENSOR.select(torch.__version__).rows}
    for function, (name, equal) in OPERATORS.items():
        method = vars(Tensor).get(name)
        if name in kinds and _is_wrapper(method):
            wrapper = wrap(function, kinds[name], casts, half, place=("torch", equal))
            setattr(method, function.__name__, wrapper)


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGE)


def _is_wrapper(function: object) -> bool:
    return isinstance(function, FunctionType) and _is_ours(function.__code__)


def _trace(tx, path, args, kwargs):
    """Traces a wrapper that is found on Tensor: a method's, or an operator's beneath it."""
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.base import VariableTracker

    source, function = AttrSource(tx.import_source("torch"), "Tensor"), Tensor
    for name in path:
        source, function = AttrSource(source, name), getattr(function, name)
    return VariableTracker.build(tx, function, source).call_function(tx, args, kwargs)
