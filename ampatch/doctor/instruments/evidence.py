"""The operations that made bad numbers, and what their arguments show: constants, casts, means of nothing."""

from __future__ import annotations

import ast
import linecache
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ampatch.doctor.fixes import Paste
from ampatch.doctor.instruments import tape as ops
from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.dispatch import Operation
from ampatch.doctor.instruments.places import Place, is_called_by_user
from ampatch.doctor.instruments.region import statement_of_zeros
from ampatch.doctor.instruments.tape import Op, Origin, Tape
from ampatch.doctor.instruments.values import HALF, Damage, Tensors, examine, is_mask, plain
from ampatch.doctor.text.source import place_of, statement_of
from ampatch.levels.precision import HALF_TYPES

HARMLESS = (*ops.CASTS, "detach")  # which make NaN of nothing
MASKING = ("add", "add_", "sub", "sub_")  # to the lowest number of a type, which is -inf then
LARGEST = tuple(torch.finfo(dtype).max for dtype in (torch.float16, torch.bfloat16, torch.float32))
Constant = tuple[float, str, str]  # what it becomes, and in which type

NEXT_TO_0 = 1e-20  # which the half types hold none of, but for bfloat16
SMALL = 2e-5  # what float16 cannot divide 1 by
DEFAULTS = {"cosine_similarity": (1e-8,)}  # of functions that show no mode their own
COUNTING = ("mul", "mul_", "add", "add_", "sub", "sub_", "where")  # whose integers are no shapes


class Origins:
    """All of a run, in the order of their appearance."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.all: list[Origin] = []
        self.batch_sizes: tuple[int, ...] = ()
        self.asked: set[Origin] = set()  # those of what the script asked about
        self.came_back: set[Origin] = set()  # those seen in a backward pass, until a gradient is bad

    def add(self, call: Op, damage: Damage, **more: object) -> Origin:
        """Notes an origin, and returns it; one that a checkpoint repeats is noted already."""
        more |= {"attempt": self._clock.attempt, "batch_sizes": self.batch_sizes}
        origin = Origin(call, call.phase, damage, self._clock.latest_pass, **more)
        for known in self.all if self._clock.repeats else ():
            if origin.identity == known.identity:
                return known
        self.all.append(origin)
        return origin

    def add_unseen(self, tensor: Tensor, name: str | None, where: str | None, is_first: bool) -> Origin:
        """Notes bad numbers that no operation made: those of a weight that has a name, or of the data."""
        if tensor.dim() and name is None:
            self.batch_sizes = self.batch_sizes or (tensor.shape[0],)
        call = Op("", "input" if name is None or is_first else "optimizer", None, where)
        return self.add(call, examine(tensor), parameter=name)

    def add_data(self, tensor: Tensor, place: Place | None, where: str | None) -> set[Origin]:
        """Notes what is bad in what a model is given; a mask, which holds nothing but 0 and -inf, is not."""
        if is_mask(tensor):
            return set()
        origin = self.add(Op("", "input", place, where), damage := examine(tensor))
        origin.is_quiet |= damage.kind == "inf"
        return {origin}

    def reach(self, origins: Iterable[Origin]) -> None:
        """Notes that origins have reached a loss, a gradient or a weight."""
        for origin in origins:
            origin.has_reached = True

    def give_up(self) -> None:
        """A script that saw bad numbers and made no backward pass of them has left them out."""
        self.reach(self.asked)
        self.asked = set()

    def note_turn(self, call: Op, damage: Damage, origins: Collection[Origin]) -> None:
        """Notes what makes NaN of an infinity, and of which sample: that may be another than the first."""
        self.note_taken(origins, call.phase)
        in_batch = bool(damage.element) and damage.shape[0] in self.batch_sizes
        is_told = call.op not in HARMLESS and not call.op.startswith("_")
        for origin in origins if is_told else ():
            if origin.damage.kind == "inf" and origin.turns is None:
                origin.turns = call.op, call.where, damage.element[0] if in_batch else None

    def note_taken(self, origins: Collection[Origin], phase: str) -> None:
        """Notes the first statement behind the data that takes what is bad there, and how it takes 0."""
        for call in (origin.call for origin in of_phase("input", origins) if phase != "input"):
            if "taken" not in call.facts:
                call.facts["taken"] = statement_of_zeros()

    def move_to_step(self, origins: Collection[Origin], name: str | None) -> bool:
        """What is done to the gradient of a parameter after its backward pass is no part of the next input.

        Says whether there are origins.
        """
        attempt, micro_step = self._clock.attempt, self._clock.latest_pass
        for origin in of_phase("input", origins):
            if origin.attempt == attempt and origin.micro_step > micro_step:
                origin.phase, origin.micro_step, origin.parameter = "optimizer", micro_step, name
        return bool(origins)

    def move_to_loss(self) -> None:
        """What a script without a model does before the backward pass is its loss."""
        now = self._clock.attempt, self._clock.latest_pass
        for origin in of_phase("input", self.all):
            if (origin.attempt, origin.micro_step) == now and origin.call.op:
                origin.phase = "loss"

    def end_attempt(self) -> None:
        """The sizes of the batch are known now."""
        for origin in self.all:
            if origin.attempt == self._clock.attempt:
                origin.batch_sizes = origin.batch_sizes or self.batch_sizes


def of_phase(phase: str, origins: Iterable[Origin]) -> list[Origin]:
    """Returns those of some origins that are of a phase: "input" before the model, "loss" after it."""
    return [origin for origin in origins if origin.phase == phase]


def follow(tape: Tape, of: Operation) -> None:
    """Puts into the facts of an operation what its arguments show, and what it hands on.

    Constants that became 0, and casts that the script makes, are followed to what they are given to.
    """
    call, outputs = of.record, of.outputs
    for facts in (
        *(cast.facts for cast in of.casts),
        *(tape.records[parent].handed for parent in call.parents),
    ):
        call.facts |= facts
    if outputs[0].dtype not in HALF_TYPES:
        return
    constant = find_lost_constant(call.op, (of.args, of.kwargs), outputs[0].dtype)
    if constant is not None:
        call.facts["constant"] = constant
    is_cast = call.op in ops.CASTS and call.phase != "input" and is_called_by_user()
    if is_cast and not re.search(r"\.dtype|type_as", text_of(call.where)):  # not the type of another tensor
        call.facts["cast"] = call.where
    for name, value in [(name, call.facts[name]) for name in ("constant", "cast") if name in call.facts]:
        result = plain(outputs[0])
        is_lost = (result == 1) | (result == -1 if value[1] == "1" else result.abs() < SMALL)
        if name == "cast" or (value[1] in ("0", "1") and bool(is_lost.any())):
            call.handed[name] = value


def text_of(where: str | None) -> str:
    """Returns the line at "file:line"."""
    return linecache.getline(*place_of(where))


def explain_arguments(origin: Origin, of: Operation, like: list[str]) -> None:
    """Puts into the facts of what broke what its arguments show; `like` are modules of the class it is in."""
    call, inputs = origin.call, of.inputs
    call.facts["own"] = is_called_by_user() or call.op in text_of(call.where)  # not a layer of torch's
    if call.facts["own"] and (call.phase == "forward" or call.facts.get("within")):
        call.facts["alike"] = like
    nothing = find_nothing(of)
    is_length = nothing == "count" and bool(re.search("norm|std|var", text_of(call.where)))
    if nothing and not is_length and (origin.damage.kind == "nan" or nothing == "count"):
        call.facts["nothing"] = nothing
    if call.op in ops.QUOTIENTS and len(inputs) > 1:
        call.facts["signed"] = bool((plain(inputs[-1]) < 0).any())
    if call.op in (*ops.QUOTIENTS, "pow", "pow_"):
        call.facts["zero"] = divides_by_zero(origin, of.arguments)
        call.facts["inverse"] = divisor_of(call.op, of.args) is not None
    if call.op in ops.LOGARITHMS and inputs[0].dtype is torch.float32:
        call.facts["sums"] = "exp(" in text_of(call.where)  # which are small together
    bad = [constant for constant in constants_in((of.args, of.kwargs), False) if not math.isfinite(constant)]
    if bad and call.phase == "optimizer":
        call.facts["given"] = str(float(bad[0]))
    is_cast = call.op in ops.CASTS or call.phase == "input"  # as of a buffer, by initialize
    if is_cast and (constant := find_overflow_of(inputs, call.dtype)):
        call.facts["constant"] = constant
    if call.op in ops.SOFTMAXES:
        call.facts.setdefault("constant", (-math.inf, "-inf", call.dtype))
    if constant := find_infinity(origin, of):
        call.facts |= {"constant": constant, "mask": True}


def find_lost_constant(op: str, arguments: object, dtype: torch.dtype) -> Constant | None:
    """Returns the first constant in some arguments that a type makes 0 or inf, and which of them.

    >>> find_lost_constant("normalize", {"eps": 1e-12}, torch.float16)
    (1e-12, '0', 'float16')
    """
    info, name = torch.finfo(dtype), str(dtype)[6:]
    for value in [*constants_in(arguments, op in COUNTING)] or DEFAULTS.get(op, ()):
        if 0 < abs(value) <= info.smallest_normal * info.eps / 2:
            return value, "0", name
        if op.startswith("clamp") and abs(value - 1) <= info.eps / 4 and value != 1:
            return value, "1", name
        if info.max * (1 + info.eps / 4) <= abs(value) < math.inf:
            return value, "inf" if value > 0 else "-inf", name
    return None


def constants_in(value: object, counts: bool, depth: int = 3) -> Iterator[float]:
    """Yields the numbers among arguments, and those in tensors without dimensions that nothing learns."""
    if isinstance(value, float) or (counts and type(value) is int):
        yield value
    elif isinstance(value, Tensor):
        is_number = value.dim() == 0 and value.dtype in (torch.float32, torch.float64)
        if is_number and not (value.requires_grad or value.is_meta) and plain(value).numel() == 1:
            yield plain(value).item()
    elif isinstance(value, (tuple, list, dict)) and depth:
        for each in value.values() if isinstance(value, dict) else value:
            yield from constants_in(each, counts, depth - 1)


def note_error(error: Exception, of: Operation, origins: Origins, region: Paste | None) -> None:
    """Notes an operation that raises an error, as where a constant does not fit into the type of a tensor."""
    call = of.record
    call.facts["error"] = str(error).split("\n")[0]
    if "without overflow" in str(error):
        constant = find_lost_constant(call.op, (of.args, of.kwargs), of.inputs[0].dtype)
        call.facts = {"raised": True, "constant": constant or (math.nan, "", "")}
    damage = Damage("inf", (), 1, None, (), call.dtype)
    origins.reach([origins.add(call, damage, region=region)])


def find_overflow_of(tensors: Tensors, dtype: str) -> Constant | None:
    """Returns the number that alone is too large for half where tensors are cast: that of a mask."""
    half = dtype if dtype in HALF else "float16"
    for tensor in tensors:
        values = plain(tensor).float()
        too_large = values[values.abs() >= torch.finfo(getattr(torch, half)).max]
        if too_large.numel() > 1 and (too_large == too_large[0]).all():
            return too_large[0].item(), "inf" if too_large[0] > 0 else "-inf", half
    return None


def find_infinity(origin: Origin, of: Operation) -> Constant | None:
    """Returns the infinity that a mask multiplies by 0, or the lowest number that it adds to another."""
    inputs = of.inputs
    dtype = str(inputs[0].dtype)[6:] if inputs else ""
    if origin.call.op in ("mul", "mul_") and origin.damage.kind == "nan":
        numbers = [
            *constants_in((of.args, of.kwargs), False),
            *(plain(tensor).min().item() for tensor in inputs),
        ]
        infinite = next((number for number in numbers if math.isinf(number)), None)
        return None if infinite is None else (infinite, str(infinite), dtype)
    if origin.call.op in ops.OF_ALL and inputs and plain(inputs[0]).isinf().any():
        return -math.inf, "-inf", dtype
    lowest = torch.finfo(inputs[0].dtype).min if origin.call.op in MASKING and inputs else 0.0
    is_added = (
        lowest and origin.damage.kind == "inf" and any((plain(tensor) == lowest).any() for tensor in inputs)
    )
    return (lowest, "-inf", dtype) if is_added else None


def note_written(call: Op) -> bool:
    """Notes an infinity that the script writes into what a product takes; says whether it does."""
    is_written = call.op in ("mul", "mul_") and bool(lines_with(call.where, math.inf)[1])
    if is_written:
        call.facts["constant"] = (math.inf, "inf", call.dtype)
    return is_written


def divisor_of(op: str, args: Sequence[object]) -> object:
    """Returns what an operation divides by, None where it does not; a negative power divides as well."""
    place = 1 if op in ("div", "div_", "true_divide") else 0
    power = args[1] if op in ("pow", "pow_") and len(args) > 1 else -1
    is_quotient = op in (*ops.QUOTIENTS, "pow", "pow_") and isinstance(power, (int, float)) and power < 0
    return args[place] if is_quotient and op != "atan2" and len(args) > place else None


def divides_by_zero(origin: Origin, operands: Sequence[object]) -> bool | str:
    """Says whether the first bad number is a quotient or a power of 0; "number" of one that is no tensor."""
    if any(isinstance(operand, (int, float)) and operand == 0 for operand in operands[1:]):
        return "number"
    tensors = [plain(operand) for operand in operands if isinstance(operand, Tensor)]
    divisor = tensors["div" in origin.call.op and len(tensors) > 1]
    return bool(divisor.expand(origin.damage.shape)[origin.damage.element].float().abs() < NEXT_TO_0)


def find_nothing(of: Operation) -> str | None:
    """Says what nothing a mean is of: "ignored" targets, "empty", or a "count" of 0."""
    tensors = [argument for argument in of.arguments if isinstance(argument, Tensor)]
    if any(tensor.numel() == 0 for tensor in tensors):
        return "empty"
    if of.name in ops.LOSSES and len(tensors) > 1 and not tensors[1].is_floating_point():
        kept = tensors[1][tensors[1] != of.kwargs.get("ignore_index", -100)]
        weighed = kept if len(tensors) < 3 else tensors[2][kept]
        return "ignored" if not weighed.numel() or (len(tensors) > 2 and not weighed.any()) else None
    number = divisor_of(of.name, of.args)
    if isinstance(number, (Tensor, int)):
        divisor = plain(number) if isinstance(number, Tensor) else torch.tensor(number)
        whole = divisor.float() == divisor.float().round()
        is_count = divisor.dim() == 0 or bool(divisor.max() >= 1)
        return "count" if is_count and bool(whole.all()) and bool((divisor == 0).any()) else None
    return None


def lines_with(where: str | None, constant: float) -> tuple[list[str], str]:
    """Returns the lines of a file that have a number, as "file:line", and how the first writes it.

    The given line alone if it has it.
    """
    (path, line), (source, _) = place_of(where), statement_of(where)
    found: dict[int, str] = {}
    for node in ast.walk(source.tree):  # -1e9 before 1e9
        value = number_of(node, constant)
        if value is not None and (value == constant or abs(value) == abs(constant) < math.inf):
            text = source.text[source.begin(node) : source.end(node)].decode()
            found.setdefault(node.lineno, text if value == constant else "")
    lines = [line] if line in found else sorted(found)
    return [f"{path}:{line}" for line in lines], found[lines[0]] if lines else ""


def number_of(node: ast.AST, lowest: float) -> float | None:
    """Returns the number that an expression writes; `lowest` where that is the one of a type."""
    match node:
        case ast.Constant(value=float(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = number_of(operand, -lowest)
            return None if value is None else -value
        case ast.BinOp(
            op=ast.Sub(), left=ast.Constant(value=(int() | float()) as a), right=ast.Constant(value=float(b))
        ):
            return a - b
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value="inf" | "-inf" as text)]):
            return float(text)
        case ast.Attribute(attr="inf"):
            return math.inf
        case ast.Attribute(
            attr="min" | "max", value=ast.Call(func=ast.Name(id="finfo") | ast.Attribute(attr="finfo"))
        ):
            return lowest if abs(lowest) in LARGEST else None
    return None
