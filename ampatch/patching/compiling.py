"""Lets graphs see the casts of tensor methods and operators, and torch.compile forget those without them."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from types import CodeType, FunctionType, ModuleType

import torch
import wrapt
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Module

from ampatch import lists
from ampatch.casts.cast import CASTS
from ampatch.casts.wrapper import call_uncast, peel, wrap
from ampatch.levels import private
from ampatch.levels.patcher import Patcher
from ampatch.levels.stack import PACKAGE, logger


def _matmul(left: object, right: object) -> object:
    return left @ right


def _imatmul(left: object, right: object) -> object:
    left @= right
    return left


def _pow(base: object, exponent: object) -> object:
    return base**exponent


def _ipow(base: object, exponent: object) -> object:
    base **= exponent
    return base


# By what method and function a tensor has an operator (`a @= b` finds no method of its own), and what of ours
# a wrapper of it calls: from torch 2.15 on Dynamo traces another function of Python in the place of
# `operator.pow`, which would find the wrapper again, and again.
OPERATORS: dict[object, tuple[str, str, Callable[[object, object], object]]] = {
    operator.matmul: ("__matmul__", "matmul", _matmul),
    operator.imatmul: ("__matmul__", "matmul", _imatmul),
    operator.pow: ("__pow__", "pow", _pow),
    operator.ipow: ("__ipow__", "Tensor.__ipow__", _ipow),
}


def prepare_compiler() -> None:
    """Has Dynamo make its tables from torch's namespace as it is now: before any patch.

    They know functions by identity, and are made on import or first use. A wrapper in them would
    never be traced, and an original that is not in them would not be known after `uninitialize`.
    """
    if not private.explain_missing(private.DYNAMO):
        private.OBJECT_RULES.find()()
        private.TENSOR_METHODS.find()()
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
    skip_code = private.SKIP_CODE.find(lambda code: None)
    own = {name for name in sys.modules if name.partition(".")[0] == "ampatch"}
    for name in own - done:
        done.add(name)
        for value in list(vars(sys.modules[name]).values()):  # other threads may add some
            for item in vars(value).values() if isinstance(value, type) else [value]:
                function = inspect.unwrap(item)
                if isinstance(function, FunctionType) and function.__globals__ is vars(sys.modules[name]):
                    for code in _codes_in(function.__code__):
                        skip_code(code)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


def forget_graphs() -> None:
    """Has every compiled function compiled again when it is called next.

    Graphs are guarded by what their Python code looks up, which methods and operators of tensors are not.
    """
    private.RESET_CODE.find(lambda: None)()


def tag_caches(patcher: Patcher, half: torch.dtype) -> None:
    """Keeps what is compiled while torch is patched apart, in the caches that processes share.

    These know a graph by its text, which does not show what a function casts inside; where ampatch changes
    that, the number does. A tag that the user sets wins. The default is what every thread sees, unlike what
    `torch.compiler.config` is set to.
    """
    entry = getattr(torch.compiler.config, "_config", {}).get("cache_key_tag")
    if entry is not None:
        patcher.replace(entry, "default", f"ampatch 2 {half}")


def restore_compiler() -> None:
    """Forgets graphs with casts, and takes wrappers out of Dynamo's table of functions.

    They get there if it is made again, as `torch.distributed.init_process_group` has it.
    """
    forget_graphs()
    if private.explain_missing(private.DYNAMO):
        return
    rules = private.OBJECT_RULES.find()()
    for wrapper in [function for function in rules if _is_wrapper(function)]:
        rules[peel(wrapper)] = rules.pop(wrapper)


def trace_methods(patcher: Patcher, half: torch.dtype) -> None:
    """Has Dynamo trace the wrappers of methods and operators where it would put their names into the graph.

    So the casts stand in the graph, which is guarded by what the wrappers look at. A wrapper that is
    traced calls the method itself. The third replacement is a table in which Dynamo keeps the second, the
    last has it know methods by what they were before, should it list them again.
    """
    if private.explain_missing(private.DYNAMO):
        return
    _wrap_operators(half)
    insert_method, insert_operator = private.CALL_METHOD.find(), private.INSERT.find()
    methods = private.TENSOR_METHODS.find()()

    def trace_method(variable, tx, name, args, kwargs):
        if _is_wrapper(vars(Tensor).get(name)) and not _is_ours(tx.f_code):
            return _trace(tx, [name], [variable, *args], kwargs)
        return insert_method(variable, tx, name, args, kwargs)

    def trace_operator(variable, tx, args, kwargs):
        method, *_ = OPERATORS.get(variable.fn, (None,))
        name = variable.fn.__name__
        if hasattr(vars(Tensor).get(method), name) and not _is_ours(tx.f_code):
            return _trace(tx, [method, name], args, kwargs)
        return insert_operator(variable, tx, args, kwargs)

    for name, replacement in (
        (private.CALL_METHOD, trace_method),
        (private.INSERT, trace_operator),
        (private.HANDLERS, {}),
        (private.TENSOR_METHODS, functools.cache(lambda: methods)),
    ):
        patcher.replace(*name.find_place(), replacement)


def guard_compiler(half: torch.dtype, undo: ExitStack) -> None:
    """Has functions of torch.compile run as plain Python, and says so, where Dynamo would cast wrongly.

    Called while torch is patched. Of a torch that was never tested a few operations are traced to see.
    """
    (*_, fault) = [None, *private.explain_missing(private.DYNAMO)]
    if fault is None and not private.is_tested():
        fault = find_fault(half)
    if fault is not None:
        logger.warning(
            "torch %s: torch.compile runs functions as plain Python until ampatch.uninitialize(), because it "
            "would not cast as it should: %s",
            torch.__version__,
            fault,
        )
        undo.enter_context(torch.compiler.set_stance("force_eager"))


def find_fault(half: torch.dtype) -> str | None:
    """Says what Dynamo does wrong in this torch, None if it casts as plain Python does; without Inductor."""
    device = next(iter(CASTS.device_types), "cpu")
    x, y = torch.ones(2, 2, device=device), torch.ones(2, 2, dtype=half, device=device)

    def compute(is_off: bool) -> list[torch.dtype]:
        with CASTS.thread.disabled() if is_off else nullcontext():
            return [(y**2).dtype, torch.mm(x, x).dtype, (x @ x).dtype]

    # Code of ours is not compiled, and so this is given another file.
    code = compute.__code__.replace(co_filename="<ampatch: a trial of torch.compile>")
    trial = FunctionType(code, globals(), closure=compute.__closure__)
    for is_off in (False, True):
        try:
            compiled = torch.compile(trial, backend="eager", fullgraph=True)(is_off)
        except Exception as error:
            return f"{type(error).__name__} where a power, a function and an operator are traced"
        if compiled != compute(is_off):
            return f"casts are {'not ' * is_off}made where they are {'off' if is_off else 'on'}"
    return None


def _wrap_operators(half: torch.dtype) -> None:
    """Gives the wrappers of operators' methods one of the operator itself, which graphs hold."""
    kinds = {row.name: row.cast for row in lists.TENSOR.select(torch.__version__).rows}
    for function, (name, equal, call) in OPERATORS.items():
        method = vars(Tensor).get(name)
        if _is_wrapper(method):
            wrapper = wrap(call, kinds[name], half, place=("torch", equal))
            setattr(method, function.__name__, wrapper)


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGE)


def _is_wrapper(function: object) -> bool:
    return isinstance(function, FunctionType) and _is_ours(function.__code__)


def _trace(tx, path, args, kwargs):
    """Traces a wrapper that is found on Tensor: a method's, or an operator's beneath it."""
    inside, build = private.ATTRIBUTE.find(), private.BUILD.find()
    source, function = inside(tx.import_source("torch"), "Tensor"), Tensor
    for name in path:
        source, function = inside(source, name), getattr(function, name)
    return build(tx, function, source).call_function(tx, args, kwargs)


class GraphNames:
    """Has generated code call functions by their patched places, and not by where torch keeps a builtin.

    That place, such as `torch._C._nn.linear`, stays unpatched: tensor subclasses are told that what is there
    was called.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def add(self, original: object, place: tuple[str | None, str]) -> None:
        """Notes where a function is patched; of several places the first counts."""
        if str(getattr(original, "__module__", None)).startswith("torch._C."):
            self._names.setdefault(id(original), ".".join(filter(None, place)))

    def open(self, patcher: Patcher) -> None:
        """Replaces the function that names functions in generated code."""
        original = private.QUALIFY.find()
        if original is not None:
            place = private.QUALIFY.find_place()
            patcher.replace(*place, lambda function: self._names.get(id(function)) or original(function))

    def recompile(self, models: Iterable[Module]) -> Callable[[], None]:
        """Generates the code of models and their parts once more; returns the undo."""
        recompiled = []
        for module in [part for model in models for part in model.modules() if isinstance(part, GraphModule)]:
            if any(id(node.target) in self._names for node in module.graph.nodes):
                module.recompile()
                recompiled.append(weakref.ref(module))
        return lambda: self._restore(recompiled)

    def _restore(self, modules: list[weakref.ref[GraphModule]]) -> None:
        names, self._names = self._names, {}
        for module in [alive for reference in modules if (alive := reference()) is not None]:
            module.recompile()
        self._names = names
