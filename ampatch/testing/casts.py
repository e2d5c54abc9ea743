"""Asserts what an op does with its arguments at an opt level."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import ampatch as amp
from ampatch.patching.patcher import peel
from ampatch.table import Cast
from ampatch.testing.opening import is_open, make_model, session
from ampatch.testing.outcome import Arguments, Outcome, observe
from ampatch.testing.place import locate

HALVES = (torch.float16, torch.bfloat16)
Expected = torch.dtype | Cast | None


def assert_casts(
    function: Callable | str,
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
    function itself, without casts before it, gives for arguments cast by hand. Further: float64 arguments
    and calls within `amp.disable_casts()` are left alone, and after the session the function is what it was.

    - `function`: a function, or its dotted path. What is registered by name is found by its own name
      (`__module__` and `__qualname__`); give a path or a lambda where another name is registered.
    - `expect`: the dtype that the arguments are cast to, or None if they are left alone. A `Cast` is
      what rows and registrations say, and so casts at O1 and O4 only: `Cast.LOWER` to the half type.
    - `gradients`: False for an op without a backward.
    - `options`: further arguments for `amp.initialize`, such as {"dtype": torch.bfloat16}.

    Raises AssertionError with every fault, also if the arguments cannot show a cast: their result is
    the same in every type.
    """
    options = options or {}
    half = options.get("dtype") or amp.OPT_LEVELS[opt_level].half or torch.float16
    place = locate(function)
    check = _Check(place.find, expect, opt_level, half, gradients, options)
    check.run((args, kwargs))
    if check.faults:
        faults = "\n".join(f"- {fault}" for fault in check.faults)
        raise AssertionError(f"{place.name} at {opt_level}, expect={expect}:\n{faults}")


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of some types, and what is to happen to them."""

    name: str
    arguments: Arguments
    dtype: torch.dtype | None  # what they are to be cast to
    refused: bool  # whether the call must raise instead

    @property
    def is_cast(self) -> bool:
        """Whether something is to happen to these arguments."""
        if self.dtype is None:
            return self.refused
        return any(it.dtype is not self.dtype for it in _floating(self.arguments))


@dataclass(frozen=True, slots=True)
class _Reference:
    """What the function gives without casts before it: for arguments as they are, and cast by hand."""

    call: _Call
    as_they_are: Outcome
    by_hand: Outcome


@dataclass
class _Check:
    find: Callable[[], Callable]
    expect: Expected
    opt_level: str
    half: torch.dtype
    gradients: bool
    options: Mapping[str, object]
    faults: list[str] = field(default_factory=list)

    def run(self, arguments: Arguments) -> None:
        """Makes the calls before, in and after a session, and notes what is wrong."""
        self.refuse(arguments)
        calls = [self.plan(name, given) for name, given in self.vary(arguments).items()]
        before = self.find()
        outside = [self.refer(before, call) for call in calls]
        with session(self.opt_level, make_model(_floating(arguments)[0].device), **self.options):
            function = self.find()
            bare = peel(function)
            # In the session, if it can be called without its casts: functions that it calls are patched.
            references = [self.refer(bare, call) for call in calls] if bare != function else outside
            found = [self.observe(function, call) for call in calls]
            with amp.disable_casts():
                disabled = [self.observe(function, call) for call in calls]
        after = [self.observe(self.find(), call) for call in calls]
        if self.cannot_show(references, outside):
            return
        for reference, was, one, two, three in zip(references, outside, found, disabled, after, strict=True):
            what = f"{was.call.name} arguments"
            self.judge(what, reference, one)
            self.compare(f"{what} in disable_casts()", two, was.as_they_are)
            self.compare(f"{what} after the session", three, was.as_they_are)
        if self.find() != before:
            self.faults.append("after the session it is not the function that it was")

    def refuse(self, arguments: Arguments) -> None:
        """Raises AmpValueError for what cannot be checked."""
        if is_open():
            raise amp.AmpValueError("a session is open already: assert_casts opens one of its own")
        if self.expect is Cast.CUSTOM:
            raise amp.AmpValueError("expect=Cast.CUSTOM says nothing of types: give a dtype, or None")
        if not _floating(arguments):
            raise amp.AmpValueError("no argument is a floating tensor: there is nothing to cast")

    def vary(self, arguments: Arguments) -> dict[str, Arguments]:
        """The arguments in each choice of types, by its name."""
        full, half = torch.float32, self.half
        choices = {"float32": (full, full), _name(half): (half, half)}
        if len(_floating(arguments)) > 1:
            choices[f"float32 and {_name(half)}"] = (full, half)
            choices[f"{_name(half)} and float32"] = (half, full)
        choices["float64"] = (torch.float64, torch.float64)
        return {name: _convert(arguments, first, rest) for name, (first, rest) in choices.items()}

    def plan(self, name: str, arguments: Arguments) -> _Call:
        """Says what is to happen to arguments."""
        dtype, refused = self.target([it.dtype for it in _floating(arguments)])
        return _Call(name, arguments, dtype, refused)

    def refer(self, function: Callable, call: _Call) -> _Reference:
        """Calls a function with the arguments as they are, and cast by hand."""
        alone = by_hand = self.observe(function, call)
        if call.dtype is not None:
            by_hand = observe(function, call.arguments, self.gradients, lambda it: _to(it, call.dtype))
        return _Reference(call, alone, by_hand)

    def target(self, dtypes: Sequence[torch.dtype]) -> tuple[torch.dtype | None, bool]:
        """What arguments of these types are cast to, and whether the op refuses them."""
        kind = self.expect
        if kind is None or torch.float64 in dtypes:
            return None, False
        if isinstance(kind, torch.dtype):
            return kind, False
        if not amp.OPT_LEVELS[self.opt_level].patch_torch_functions:
            return None, False
        if kind is Cast.BANNED and self.options.get("allow_banned"):
            kind = Cast.FP32
        has_half = any(dtype in HALVES for dtype in dtypes)
        return {
            Cast.LOWER: (self.half, False),
            Cast.FP32: (torch.float32, False),
            Cast.PROMOTE: (torch.float32 if len(set(dtypes)) > 1 else None, False),
            Cast.MATCH_SELF: (dtypes[0], False),
            Cast.FP32_INPLACE: (None, dtypes[0] in HALVES),
            Cast.BANNED: (None, has_half),
        }[kind]

    def cannot_show(self, references: Sequence[_Reference], outside: Sequence[_Reference]) -> bool:
        """Notes what makes the arguments useless; whether something does.

        A cast is seen outside alone if the function calls one of the same cast: F.softmax does.
        """
        for reference in references:
            call, error = reference.call, reference.by_hand.error
            if error is not None and (call.dtype is not None or call.name == "float32"):
                by_hand = f" cast to {call.dtype} by hand" if call.dtype else ""
                hint = "; if it has no backward, give gradients=False" if self.gradients else ""
                said = f"without casts before it, it raises {type(error).__name__}: {error}{hint}"
                self.faults.append(f"{call.name} arguments{by_hand}: {said}")
        cast = [reference for reference in (*references, *outside) if reference.call.is_cast]
        if self.faults:
            return True
        if self.is_patched and not cast:
            self.faults.append("no choice of types is cast: give two floating tensors or more")
        elif cast and all(not it.call.refused and it.by_hand.is_same(it.as_they_are) for it in cast):
            self.faults.append(
                "with these arguments it gives the same cast or not, so that a cast cannot be seen: "
                "give others, whose result has their type or needs many digits"
            )
        return bool(self.faults)

    @property
    def is_patched(self) -> bool:
        """Whether the op is to do anything at this level."""
        patches = amp.OPT_LEVELS[self.opt_level].patch_torch_functions
        return self.expect is not None and (patches or isinstance(self.expect, torch.dtype))

    def observe(self, function: Callable, call: _Call) -> Outcome:
        """Calls a function with the arguments as they are."""
        return observe(function, call.arguments, self.gradients)

    def judge(self, what: str, reference: _Reference, found: Outcome) -> None:
        """Compares what a call in the session gave with what it should have given."""
        if not reference.call.refused:
            self.compare(what, found, reference.by_hand)
        elif not isinstance(found.error, amp.BannedFunctionError):
            self.faults.append(f"{what}: it must raise BannedFunctionError, and does not")

    def compare(self, what: str, found: Outcome, expected: Outcome) -> None:
        """Notes each difference."""
        self.faults += [f"{what}: {difference}" for difference in found.differences(expected)]


def _floating(arguments: Arguments) -> list[Tensor]:
    """The tensors that may be cast."""
    kinds = (torch.float32, torch.float64, *HALVES)
    return [it for it in tree_leaves(arguments) if isinstance(it, Tensor) and it.dtype in kinds]


def _convert(arguments: Arguments, first: torch.dtype, rest: torch.dtype) -> Arguments:
    """The arguments with floating tensors of these types."""
    ids = [id(it) for it in _floating(arguments)]

    def convert(tensor: Tensor) -> Tensor:
        if id(tensor) not in ids:
            return tensor
        converted = tensor.detach().to(first if id(tensor) == ids[0] else rest)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(converted, requires_grad=tensor.requires_grad)
        return converted

    return tree_map_only(Tensor, convert, arguments)


def _to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype in (torch.float32, *HALVES) else tensor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
