"""Asserts what an op does with its arguments at an opt level."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves, tree_map_only

import ampatch as amp
from ampatch.casts.catalog import Catalog
from ampatch.casts.wrapper import peel
from ampatch.table import Cast
from ampatch.testing.opening import is_open, make_model, session

HALVES = (torch.float16, torch.bfloat16)
Expected = torch.dtype | Cast | None
ELIGIBLE = (torch.float32, torch.float16, torch.bfloat16)
Function = Callable[..., object]
Arguments = tuple[tuple[object, ...], dict[str, object]]


def assert_casts(
    function: Function | str,
    /,
    *args: object,
    expect: Expected,
    opt_level: str = "O1",
    gradients: bool = True,
    options: Mapping[str, object] | None = None,
    **kwargs: object,
) -> None:
    """Asserts what an op receives at a level, for float32, half and mixed arguments.

    ```python
    assert_casts("my_ops.fused_gelu", x, weight, expect=torch.float16)
    ```

    In a session of the level it calls the function with the floating tensors in `args` and `kwargs`
    (in lists, tuples and dictionaries, too) as float32, as half, and mixed: the first one float32 or half
    and the rest the other. What comes out, the gradients too, must have the types and the bits that the
    function itself, called without casts, gives for arguments cast by hand. Further: float64 arguments
    and calls within `amp.disable_casts()` are left alone, and after the session the function is as before.

    - `function`: a function, or its dotted path. What is registered by name is found by its own name
      (`__module__` and `__qualname__`); give a path or a lambda where another name is registered.
    - `expect`: the dtype that the arguments are cast to, or None if they are left alone. A `Cast` is
      what rows and registrations say, and so casts at O1 and O4 only: `Cast.LOWER` to the half type.
    - `gradients`: False for an op without a backward.
    - `options`: further arguments for `amp.initialize`, such as {"dtype": torch.bfloat16}.

    Raises AssertionError with every fault, also if the arguments cannot show a cast because the result is
    the same in every type.
    """
    options = options or {}
    dtype = options.get("dtype")
    half = dtype if isinstance(dtype, torch.dtype) else amp.OPT_LEVELS[opt_level].half or torch.float16
    name, find = _locate(function)
    check = _Check(find, expect, opt_level, half, gradients, options)
    check.run((args, kwargs))
    if check.faults:
        faults = "\n".join(f"- {fault}" for fault in check.faults)
        raise AssertionError(f"{name} at {opt_level}, expect={expect}:\n{faults}")


def _locate(function: Function | str) -> tuple[str, Callable[[], Function]]:
    """Names a function, and finds it whenever it is asked: a session replaces it where it is looked up."""
    if not isinstance(function, str):
        called, path = function, _path_of(function)
        if path is None:
            return getattr(called, "__qualname__", repr(called)), lambda: called
        function = path
    return function, functools.partial(pkgutil.resolve_name, function)


def _path_of(function: Function) -> str | None:
    """The path that a function says to have, if that is true; torch's own are known better."""
    module = getattr(function, "__module__", None) or "torch"
    if module.partition(".")[0] == "torch":
        return Catalog().find(function)
    path = f"{module}.{getattr(function, '__qualname__', None)}"
    try:
        return path if pkgutil.resolve_name(path) is function else None
    except (ImportError, AttributeError, ValueError):
        return None


@dataclass(slots=True)
class _Call:
    """Arguments of some types, what is to happen to them, and what calls with them gave."""

    name: str
    arguments: Arguments
    dtype: torch.dtype | None  # what they are to be cast to
    refused: bool  # whether the call must raise instead
    # Each for arguments as they are, and cast by hand.
    outside: tuple[CallOutcome, CallOutcome] = field(init=False)
    inside: tuple[CallOutcome, CallOutcome] = field(init=False)
    found: CallOutcome = field(init=False)
    disabled: CallOutcome = field(init=False)
    after: CallOutcome = field(init=False)

    @property
    def is_cast(self) -> bool:
        """Whether something is to happen to these arguments."""
        if self.dtype is None:
            return self.refused
        return any(each.dtype is not self.dtype for each in _floating(self.arguments))

    @property
    def shows_cast(self) -> bool:
        """Whether a cast can be seen in what comes out, or the call must raise."""
        both = self.inside, self.outside
        return self.refused or not all(cast.is_same(alone) for alone, cast in both)


@dataclass
class _Check:
    find: Callable[[], Function]
    expect: Expected
    opt_level: str
    half: torch.dtype
    gradients: bool
    options: Mapping[str, object]
    faults: list[str] = field(default_factory=list)

    def run(self, arguments: Arguments) -> None:
        """Makes the calls before, in and after a session, and notes what is wrong."""
        self.refuse(arguments)
        calls = list(self.plan(arguments))
        before = self.find()
        for call in calls:
            call.outside = self.refer(before, call)
        with session(self.opt_level, make_model(_floating(arguments)[0].device), **self.options):
            function = self.find()
            bare = peel(function)
            for call in calls:
                # In the session, if it can be called without its casts: functions that it calls are patched.
                call.inside = self.refer(bare, call) if bare != function else call.outside
                call.found = self.observe(function, call)
                with amp.disable_casts():
                    call.disabled = self.observe(function, call)
        for call in calls:
            call.after = self.observe(self.find(), call)
        self.report_useless(calls)
        if self.faults:
            return
        for call in calls:
            self.judge(call)
        if self.find() != before:
            self.faults.append("after the session it is not the same function as before")

    def refuse(self, arguments: Arguments) -> None:
        """Raises AmpValueError for what cannot be checked."""
        if is_open():
            raise amp.AmpValueError("a session is open already: assert_casts opens one of its own")
        if self.expect in (Cast.CUSTOM, Cast.FP32_INPLACE):
            raise amp.AmpValueError(f"expect={self.expect} says nothing about types: give a dtype, or None")
        if not _floating(arguments):
            raise amp.AmpValueError("no argument is a floating tensor: there is nothing to cast")

    def plan(self, arguments: Arguments) -> Iterator[_Call]:
        """Yields the arguments in each choice of types, with what is to happen to them."""
        full, half = torch.float32, self.half
        choices = [(full, full), (half, half), (torch.float64, torch.float64)]
        if len(_floating(arguments)) > 1:
            choices[2:2] = [(full, half), (half, full)]
        for types in choices:
            converted = _convert(arguments, *types)
            name = " and ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(types))
            yield _Call(name, converted, *self.target([each.dtype for each in _floating(converted)]))

    def target(self, dtypes: Sequence[torch.dtype]) -> tuple[torch.dtype | None, bool]:
        """What arguments of these types are cast to, and whether the op refuses them."""
        kind = self.expect
        if kind is None or torch.float64 in dtypes or not self.is_patched:
            return None, False
        if isinstance(kind, torch.dtype):
            return kind, False
        if kind is Cast.BANNED and self.options.get("allow_banned"):
            kind = Cast.FP32
        return {
            Cast.LOWER: (self.half, False),
            Cast.FP32: (torch.float32, False),
            Cast.PROMOTE: (torch.float32 if len(set(dtypes)) > 1 else None, False),
            Cast.MATCH_SELF: (dtypes[0], False),
            Cast.BANNED: (None, any(dtype in HALVES for dtype in dtypes)),
        }[kind]

    @property
    def is_patched(self) -> bool:
        """Whether the op is to do anything at this level."""
        patches = amp.OPT_LEVELS[self.opt_level].patch_torch_functions
        return self.expect is not None and (patches or isinstance(self.expect, torch.dtype))

    def refer(self, function: Function, call: _Call) -> tuple[CallOutcome, CallOutcome]:
        """What a function gives without casts before it."""
        alone = self.observe(function, call)
        return alone, alone if call.dtype is None else self.observe(function, call, call.dtype)

    def observe(self, function: Function, call: _Call, dtype: torch.dtype | None = None) -> CallOutcome:
        """Calls a function with the arguments, which are cast to a type by hand or left as they are."""
        return observe(function, call.arguments, self.gradients, dtype)

    def report_useless(self, calls: Sequence[_Call]) -> None:
        """Notes what makes the arguments useless.

        A cast is seen outside alone if the function calls one of the same cast: F.softmax does.
        """
        for call in calls:
            error = call.inside[1].error
            if error is not None and (call.dtype is not None or call.name == "float32"):
                cast = f" cast to {call.dtype} by hand" if call.dtype else ""
                hint = "; if it has no backward, give gradients=False" if self.gradients else ""
                text = f"called without casts, it raises {type(error).__name__}: {error}{hint}"
                self.faults.append(f"{call.name} arguments{cast}: {text}")
        cast_calls = [call for call in calls if call.is_cast]
        if self.faults:
            return
        if self.is_patched and not cast_calls:
            self.faults.append("none of these calls would be cast: give two floating tensors or more")
        elif cast_calls and not any(call.shows_cast for call in cast_calls):
            self.faults.append(
                "with these arguments the result is the same with and without the cast, so it cannot be "
                "seen: give others, whose result has their type or needs many digits"
            )

    def judge(self, call: _Call) -> None:
        """Compares what calls in and after the session gave with what they should have given."""
        label, (unchanged, _), (_, expected) = f"{call.name} arguments", call.outside, call.inside
        if not call.refused:
            self.compare(label, call.found, expected)
        elif not isinstance(call.found.error, amp.BannedFunctionError):
            self.faults.append(f"{label}: it must raise BannedFunctionError, but does not")
        self.compare(f"{label} in disable_casts()", call.disabled, unchanged)
        self.compare(f"{label} after the session", call.after, unchanged)

    def compare(self, label: str, actual: CallOutcome, expected: CallOutcome) -> None:
        self.faults += [f"{label}: {difference}" for difference in actual.differences(expected)]


def _floating(arguments: Arguments) -> list[Tensor]:
    kinds = (torch.float32, torch.float64, *HALVES)
    return [each for each in tree_leaves(arguments) if isinstance(each, Tensor) and each.dtype in kinds]


def _convert(arguments: Arguments, first: torch.dtype, rest: torch.dtype) -> Arguments:
    """The arguments with floating tensors of these types."""
    ids = [id(each) for each in _floating(arguments)]

    def convert(tensor: Tensor) -> Tensor:
        if id(tensor) not in ids:
            return tensor
        converted = tensor.detach().to(first if id(tensor) == ids[0] else rest)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(converted, requires_grad=tensor.requires_grad)
        return converted

    converted: Arguments = tree_map_only(Tensor, convert, arguments)
    return converted


# What is cast: float64, complex and 8-bit types are not.


# ---- What a call gives, and in what two calls differ ----


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What a call gave; everything is detached."""

    result: tuple[object, ...] = ()
    arguments: tuple[object, ...] = ()  # after the call: a function may write into them
    gradients: tuple[object, ...] = ()  # of the floating arguments
    error: Exception | None = None

    def differences(self, expected: CallOutcome) -> Iterator[str]:
        """Yields how this outcome differs from `expected`; values are compared bit by bit."""
        if self.error is not None or expected.error is not None:
            own, wanted = _error(self.error), _error(expected.error)
            if own != wanted:
                yield f"it {own}, expected: it {wanted}"
            return
        for part in ("result", "arguments", "gradients"):
            yield from _compare(part, getattr(self, part), getattr(expected, part))

    def is_same(self, other: CallOutcome) -> bool:
        return not any(True for _ in self.differences(other))


def observe(
    function: Function, arguments: Arguments, gradients: bool, dtype: torch.dtype | None = None
) -> CallOutcome:
    """Calls a function with copies of the arguments, cast to `dtype` by hand, and says what it gave."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor if dtype is None or tensor.dtype not in ELIGIBLE else tensor.to(dtype)

    leaves = tree_map_only(Tensor, lambda each: _copy(each, gradients), arguments)
    # A copy of the copy: a leaf that wants a gradient must not be written.
    copies = tree_map_only(Tensor, lambda each: each if isinstance(each, Parameter) else each.clone(), leaves)
    args, kwargs = tree_map_only(Tensor, cast, copies)
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    devices = {each.device.index for each in tensors if each.device.type == "cuda"}
    try:
        # Every call begins at the same random numbers, for a function that draws some.
        with torch.random.fork_rng(devices=sorted(devices)):
            result = function(*args, **kwargs)
            grads = _gradients(result, leaves) if gradients else ()
    except Exception as error:
        return CallOutcome(error=error)
    return CallOutcome(_detach(result), _detach(copies), grads)


def _copy(tensor: Tensor, gradients: bool) -> Tensor:
    copy = tensor.detach().clone()
    if isinstance(tensor, Parameter):
        return Parameter(copy, requires_grad=tensor.requires_grad)
    return copy.requires_grad_(gradients and copy.is_floating_point())


def _gradients(result: object, leaves: object) -> tuple[object, ...]:
    """The gradients of all floating arguments, for a result of which each element has the gradient 1."""
    outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.requires_grad]
    inputs = [each for each in tree_leaves(leaves) if isinstance(each, Tensor) and each.requires_grad]
    if not outputs or not inputs:
        return ()
    ones = [torch.ones_like(each) for each in outputs]
    return tuple(torch.autograd.grad(outputs, inputs, ones, allow_unused=True))


def _detach(tree: object) -> tuple[object, ...]:
    leaves = tree_leaves(tree)
    return tuple(each.detach().clone() if isinstance(each, Tensor) else each for each in leaves)


def _error(error: Exception | None) -> str:
    return "returns" if error is None else f"raises {type(error).__name__}: {error}"


def _compare(part: str, actual: tuple[object, ...], expected: tuple[object, ...]) -> Iterator[str]:
    if len(actual) != len(expected):
        yield f"{part} has {len(actual)} parts, expected {len(expected)}"
        return
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        name = part if len(actual) == 1 else f"{part}[{index}]"
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            yield from _compare_tensors(name, one, other)
        elif type(one) is not type(other):
            yield f"{name} is {_describe(one)}, expected {_describe(other)}"


def _compare_tensors(name: str, actual: Tensor, expected: Tensor) -> Iterator[str]:
    if actual.dtype is not expected.dtype:
        yield f"{name} is {actual.dtype}, expected {expected.dtype}"
    elif actual.shape != expected.shape:
        yield f"{name} has the shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    else:
        try:
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        except AssertionError:
            yield f"{name} has other values than expected, in {actual.dtype}"


def _describe(item: object) -> str:
    return str(item.dtype) if isinstance(item, Tensor) else repr(item)
