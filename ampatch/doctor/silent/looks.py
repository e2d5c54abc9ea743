"""What single operations show: what half loses, casts that are undone, gradients that are read, long sums."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ampatch.doctor.finding import Finding
from ampatch.doctor.instruments.clock import MOST_MICRO_STEPS
from ampatch.doctor.instruments.dispatch import Operation, OperationInstrument
from ampatch.doctor.instruments.places import (
    is_called_by_ampatch,
    is_called_by_scaler,
    is_called_by_user,
    user_line,
)
from ampatch.doctor.instruments.region import region_of
from ampatch.doctor.instruments.tape import CASTS, IGNORED, Op, Tape
from ampatch.doctor.instruments.values import HALF, plain
from ampatch.doctor.silent.notes import Notes
from ampatch.doctor.silent.rounding import Rounding
from ampatch.doctor.silent.scaled import Scaled
from ampatch.doctor.silent.stuck import FEWEST, MANY, REPEATED, Stuck, name_of
from ampatch.doctor.silent.twin import Twin, find_loss
from ampatch.doctor.suspects import FIRST
from ampatch.doctor.text.source import is_running_sum
from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.private import is_transformed

LEFT_ALONE = (*IGNORED[1:], "untyped_storage", "data_ptr", "zeros_like", "full_like")  # but not properties

VIEWS = ("", "t", "transpose", "permute", "view", "reshape", "flatten", "unsqueeze", "squeeze", "contiguous")
VIEWS += ("chunk", "split", "unbind", "expand", "index", "detach", "swapaxes", "movedim", "narrow", "select")
# Of gradients that are scaled these say something else than of those that are not.
MEASURES = ("norm", "vector_norm", "linalg_vector_norm", "linalg_norm", "clamp", "clamp_", "clip", "clip_")
MEASURES += ("clamp_max", "clamp_max_", "clamp_min_", "max", "amax", "std", "var", "histc", "square", "pow")
MEASURES += ("mean", "gt", "lt", "ge", "le", "item", "tolist", "_foreach_norm")
UPDATES = ("add_", "sub_", "lerp_")
SUMMING = ("index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
PRODUCTS = ("matmul", "bmm", "mm", "einsum", "sum", "baddbmm")
QUOTIENTS = ("div", "div_", "true_divide", "mul", "mul_")
SATURATING = ("sigmoid", "tanh")
WAVES = ("sin", "cos", "sin_", "cos_")
ANGULAR = (*VIEWS, *CASTS, "mul", "div", "true_divide", "add", "sub", "outer", "einsum", "matmul")

HEADROOM = 16  # times what a sum reached must fit: a length that grows, or the next step
ZEROS = 0.1  # of the numbers that a layer in float8 takes
WRONG = 0.1  # of a sum
MOST_COLUMNS = 256
FEWER = 0.5  # of whole numbers
SHADOWED = (0, 4, 15)  # of the first attempts, which run again in float32
NOISE = 0.25  # of what numbers differ by is rounded away
GROWN = 4.0  # times what it was before
MOST_MAKERS = 8  # operations in modules that what one takes comes of
MISSED = 2  # times that whole numbers are added in vain


@dataclass(slots=True)
class Total:
    """A running sum that stays as it is: since which attempt, what it has lost, how often and in which."""

    value: Tensor
    first: int
    lost: Tensor | float = 0.0
    times: int = 0
    attempts: set[int] = field(default_factory=set)


class Looks(OperationInstrument):
    """Looks at the operations of the first attempts, and of those in `window`, in forwards and losses."""

    about = "what operations lose without a sign"

    def __init__(self, tape: Tape, notes: Notes, window: Collection[int], scaled: Scaled) -> None:
        super().__init__(tape)
        self._notes, self._scaled, self.window = notes, scaled, {*range(FIRST), *window}
        self._stuck = Stuck(self.clock, notes, self.window)
        self._missed: Counter[Hashable] = Counter()  # of what was counted, by where it was
        self._totals: dict[Hashable, Total] = {}  # by where they are added to
        self._mends: dict[str | None, dict[str, object]] = {}  # by line
        self._modules: dict[int, tuple[Module, Op]] = {}  # that a script has cast to float32
        self._looks = (
            (UPDATES, self._stuck.look_at_update),
            (("add_", "add"), self._look_at_addition),
            (SUMMING, self._look_at_sum),
            (("cumsum", "cumsum_"), self._look_at_running_count),
            (CASTS, self._look_at_cast),
            (SATURATING, self._look_at_probabilities),
            (WAVES, self._look_at_angles),
            (PRODUCTS, self._look_at_product),
            (QUOTIENTS, self._look_at_quotient),
            (MEASURES, self._look_at_measure),
            (("float8_linear",), self._look_at_float8),
        )
        self.clock.wrap(Module, "float", self._cast_module)
        self.clock.wrap(Module, "to", self._cast_module)
        self._begin()

    def _begin(self) -> None:
        self._twin, self._rounding = Twin(), Rounding()
        self._rounded: dict[int, Finding] = {}  # by the numbers of records
        self._faults: defaultdict[int, list[Finding]] = defaultdict(list)  # of records, if a loss comes of it
        self._read: list[tuple[Tensor, Tensor]] = []  # parameters and gradients, kept so long

    def wants(self, name: str) -> bool:
        """Leaves out the operations of backward passes and optimizers."""
        is_away = self.clock.in_backward or self.clock.part == "optimizer"
        is_due = self.clock.micro_step < MOST_MICRO_STEPS
        return is_due and not (is_away or name in LEFT_ALONE or is_transformed())

    def before(self, operation: Operation) -> tuple[Operation | None, Operation | None]:
        now, has_begun = self.clock.attempt, bool(self.clock.models.roots)  # weights are drawn before
        is_due = has_begun and (now in SHADOWED or now >= FIRST)
        return self._twin.before(operation), self._rounding.before(operation) if is_due else None

    def after(self, operation: Operation, kept: tuple[Operation | None, Operation | None]) -> None:
        """Looks at what an operation gives."""
        outputs = [tensor for tensor in operation.outputs if tensor.is_floating_point()]
        if not outputs:
            return
        repeated, shadowed = kept
        if shadowed is not None:
            shadowed.outputs = outputs
            self._follow_shadow(operation, shadowed)
        self._note_read(operation, outputs[0])
        if repeated is not None:
            repeated.outputs = outputs
            self._follow_twin(operation, repeated)
        for names, look in self._looks:
            if operation.name in names:
                look(operation, repeated, outputs[0])
        if self._modules and operation.record.is_half and is_undone(operation.record):
            self._look_at_modules(operation.record)

    def end_attempt(self, optimizer: Optimizer) -> None:
        """The next attempt begins."""
        for record, undone in undone_casts(self.tape.records):
            self._notes.add("float32_under_autocast", record, runs=undone)
        self._begin()

    # ---- What half loses, and what comes of it ----

    def _follow_twin(self, operation: Operation, repeated: Operation) -> None:
        """Compares what an operation gives with what its twin does, where half has lost something."""
        known = [tensor for tensor in map(self._twin.find, repeated.floating) if tensor is not None]
        loss = known[0].loss if known else self._find_loss(operation, repeated)
        # A scaler scales the loss, not what was lost: its gradient is none of these zeros.
        if loss is None or (known and is_called_by_scaler()):
            return
        for tensor, wanted in zip(repeated.outputs, self._twin.repeat(repeated), strict=False):
            if (fault := self._twin.judge(tensor, wanted, loss, is_new=not known)) is not None:
                self._faults[operation.record.number].append(fault)

    def _find_loss(self, operation: Operation, repeated: Operation) -> Finding | None:
        """Asks whether an operation loses something."""
        if (loss := find_loss(repeated)) is None:
            return None
        kind, largest, dtype = loss
        return self._finding(kind, operation, {"input_largest": largest, "dtype": dtype})

    def _finding(self, kind: str, operation: Operation, more: dict[str, object], **facts: object) -> Finding:
        """Returns what an operation loses, with how its statement reads in float32."""
        where = operation.record.where
        if where not in self._mends:
            region = region_of(operation, self.clock.models.parameters())
            self._mends[where] = {"region": region, "alike": self.clock.models.like_place()}
        mends = self._mends[where]
        more |= {"region": mends["region"], "autocast": operation.record.autocast, "float32_survives": True}
        return self._notes.finding(kind, operation.record, more, own=True, alike=mends["alike"], **facts)

    def _add(self, kind: str, record: Op, half: str = "", **facts: object) -> None:
        """Notes what an operation loses that float32 would not, as of the type `half`."""
        more = {"autocast": record.autocast, "float32_survives": True, "dtype": half}
        self._notes.add(kind, record, more=more, **facts)

    def _follow_shadow(self, operation: Operation, shadowed: Operation) -> None:
        """Notes what an operation in half rounds away, with the modules that what it takes comes of."""
        error, growth = self._rounding.follow(operation, shadowed)
        if error >= NOISE and growth >= GROWN:
            record = operation.record
            before = list(self.tape.before((record.number,)))
            makers = [record.place for record in before if record.place and record.place.module][:MOST_MAKERS]
            half = next(filter(None, map(half_in, before)), "bfloat16")
            facts = {"error": error, "growth": growth, "makers": tuple(maker.module for maker in makers)}
            facts |= {"model": makers[0].model} if makers else {}
            fault = self._finding("rounding", operation, {"dtype": half}, **facts)
            self._rounded[record.number] = fault

    def begin_backward(self, losses: tuple[Tensor, ...]) -> None:
        """Notes the faults that have reached the loss, and what rounds most of what has."""
        if self._faults or self._rounded:
            reached = {record.number for record in self.tape.before(self.tape.makers_of(losses))}
            for number in sorted(reached & self._faults.keys()):
                for fault in self._faults[number]:
                    self._notes.put(fault)
            rounded = [self._rounded[number] for number in sorted(reached & self._rounded.keys())]
            for fault in sorted(rounded, key=lambda fault: -fault.facts["growth"])[:1]:
                self._notes.put(fault)

    # ---- Sums and updates ----

    def _look_at_addition(self, operation: Operation, repeated: Operation | None, result: Tensor) -> None:
        """Looks for what is added in vain to what a script adds up: whole numbers, or a running sum."""
        if repeated is None or len(repeated.args) < 2 or result.dtype not in HALF_TYPES or not result.numel():
            return
        is_in_place, device = operation.name == "add_", result.device
        into, by = (torch.as_tensor(arg, device=device).detach().float() for arg in repeated.args[:2])
        total = operation.args[0]
        if not is_in_place and by.abs().max() > into.abs().max():
            into, by, total = by, into, operation.args[1]
        by = by * operation.kwargs.get("alpha", 1)
        lost = (by != 0) & ((plain(result).float() - into - by).abs() >= by.abs() / 2)
        if not lost.any() or not (is_in_place or is_running_sum(operation.record.where)):
            return
        if (into.abs() >= limit_of(result.dtype)).any() and is_whole(into, by):
            self._count(operation.record, total, result)
        elif not result.requires_grad and (result.numel() < FEWEST or not is_in_place):
            self._add_up(operation.record, into, by.where(lost, 0), total, result)

    def _count(self, record: Op, total: object, result: Tensor) -> None:
        """Counts how often whole numbers were added in vain."""
        self._missed[record.site] += 1
        if self._missed[record.site] == MISSED:
            dtype, limit = name_of(result.dtype), limit_of(result.dtype)
            self._notes.add("lost_counts", record, dtype=dtype, limit=limit, **self._buffer_of(total))

    def _add_up(self, record: Op, into: Tensor, lost: Tensor, total: object, result: Tensor) -> None:
        """Adds up what a sum loses that stays as it is: attempts that nobody looks at lose as much."""
        known = self._totals.get(record.site)
        if known is None or not torch.equal(known.value, into):
            known = self._totals[record.site] = Total(into, self.clock.attempt)
        known.times, known.lost = known.times + 1, known.lost + lost
        known.attempts.add(self.clock.attempt)
        passed = (self.clock.attempt - known.first + 1) / len(known.attempts)
        if known.times >= REPEATED and (known.lost * passed).abs().max() >= WRONG * into.abs().max():
            numbers = {"have": into.abs().max().item(), "added": lost.abs().max().item(), "running": True}
            numbers |= {"dtype": name_of(result.dtype), **self._buffer_of(total)}
            self._notes.add("lost_sums", record, **numbers)

    def _buffer_of(self, tensor: object) -> dict[str, object]:
        """Returns the name of the buffer that a tensor is, if it was cast with its model."""
        models = self.clock.models
        is_cast = any(parameter.dtype in HALF_TYPES for parameter in models.parameters()) or not models.roots
        name = models.name_of_buffer(tensor) if is_cast and isinstance(tensor, Tensor) else None
        return {} if name is None else {"buffer": name}

    def _look_at_sum(self, operation: Operation, repeated: Operation | None, result: Tensor) -> None:
        """Compares a sum with that of float32."""
        wanted = self._twin.repeat(repeated) if repeated and result.dtype in HALF_TYPES else ()
        for expected in wanted[:1]:
            have = plain(result).float()
            into, buffer = plain(repeated.args[0]).float(), self._buffer_of(operation.args[0])
            wrong = torch.isfinite(expected) & ((have - expected).abs() > WRONG * expected.abs())
            if into.shape == expected.shape and is_whole(into, expected) and (buffer or not wrong.any()):
                if ((expected != into) & ((have - expected).abs() >= (expected - into).abs() / 2)).any():
                    self._count(operation.record, operation.args[0], result)
                continue
            if wrong.any():
                worst = int((have - expected).abs().where(wrong, 0).argmax())
                numbers = {"have": have.flatten()[worst].item(), "wanted": expected.flatten()[worst].item()}
                numbers |= {"dtype": name_of(result.dtype), "limit": limit_of(result.dtype), **buffer}
                self._notes.add("lost_sums", operation.record, **numbers)

    def _look_at_running_count(
        self, operation: Operation, repeated: Operation | None, result: Tensor
    ) -> None:
        """Looks for counts up to each place, as of the tokens of an expert, beyond what half holds."""
        wanted = self._twin.repeat(repeated) if repeated and result.dtype in HALF_TYPES else ()
        for expected in wanted[:1]:
            if is_whole(expected) and (plain(result).float() != expected).any():
                numbers = {"dtype": name_of(result.dtype), "limit": limit_of(result.dtype), "own": True}
                self._add("lost_counts", operation.record, **numbers)

    def _look_at_product(self, operation: Operation, _: object, result: Tensor) -> None:
        """Notes a sum in float16 that comes near to what that holds."""
        is_due = result.dtype is torch.float16 and result.numel() and operation.floating
        largest = result.detach().abs().max().item() if is_due else math.inf
        if math.isfinite(largest) and largest * HEADROOM > torch.finfo(torch.float16).max:
            operation.record.facts["sum"] = {"length": length_of(operation, result), "largest": largest}

    def _look_at_quotient(self, operation: Operation, _: object, result: Tensor) -> None:
        """Looks for sums that are divided by their length, when it may be too late."""
        number = operation.args[1] if len(operation.args) > 1 else None
        if isinstance(number, Tensor):
            number = number.flatten()[0].item() if number.numel() else None
        if not isinstance(number, (int, float)) or not number:
            return
        divisor = 1 / number if operation.name.startswith("mul") else number
        through = (*VIEWS, *CASTS, *PRODUCTS, *QUOTIENTS)
        for record in self.tape.before(operation.record.parents, through):
            numbers = record.facts.get("sum", {"length": 0})
            if numbers["length"] > 1 and math.isclose(divisor, numbers["length"], rel_tol=1e-3):
                self._notes.add("length_alone", record, divided_at=operation.record.where, **numbers)

    # ---- Whole numbers, probabilities, angles ----

    def _look_at_cast(self, operation: Operation, _: object, result: Tensor) -> None:
        """Notes a cast to float32, and whole numbers of which a cast makes fewer, in a column of a table."""
        record = operation.record
        if record.input_dtypes[:1] and record.input_dtypes[0] in HALF and record.dtype == "float32":
            record.facts["widens"] = is_called_by_user()
        if (
            result.dtype not in HALF_TYPES
            or result.numel() < FEWEST
            or not isinstance(operation.args[0], Tensor)
        ):
            return
        limit = limit_of(result.dtype)
        source, cast = plain(operation.args[0]).double(), plain(result)
        is_table = source.dim() > 1 and source.shape[-1] <= MOST_COLUMNS
        columns = source.flatten(0, -2) if is_table else source.reshape(-1, 1)
        is_whole = (columns.abs().amax(0) > limit) & (columns == columns.round()).all(0)
        for index in is_whole.nonzero().flatten().tolist():
            before = len(columns[:, index].unique())
            after = len(cast.reshape(columns.shape)[:, index].unique())
            if after < FEWER * before:
                numbers = {"before": before, "after": after, "limit": limit, "given": is_called_by_ampatch()}
                numbers |= {"dtype": name_of(result.dtype), **self._buffer_of(operation.args[0])}
                self._add("collapsed", record, **numbers)
                return

    def _look_at_probabilities(
        self, operation: Operation, repeated: Operation | None, result: Tensor
    ) -> None:
        """Counts those that are 1 in half alone: their derivative is 0."""
        if result.dtype in HALF_TYPES and result.requires_grad and repeated is not None:
            for wanted in self._twin.repeat(repeated):
                share = ((plain(result).abs() == 1) & (wanted.abs() < 1)).float().mean().item()
                if share >= MANY:
                    self._add("saturated", operation.record, name_of(result.dtype), share=share)

    def _look_at_angles(self, operation: Operation, _: object, result: Tensor) -> None:
        """Looks for angles that half rounds by more than 1, here or in what they are computed of."""
        record = operation.record
        rounded = [
            record
            for record in self.tape.before(record.parents, ANGULAR)
            if record.op in ANGULAR and half_in(record) and "float32" in (record.dtype, *record.input_dtypes)
        ]
        first = min(rounded, key=lambda record: record.number, default=record)
        if half := half_in(first):
            angles = plain(operation.floating[0])
            largest = angles.abs().max().item() if angles.numel() else 0.0
            power = 2.0 ** (math.frexp(largest)[1] - 1) if math.isfinite(largest) else math.inf
            error = power * torch.finfo(getattr(torch, half)).eps / 2
            if 1 <= error < math.inf:
                self._add("coarse_angles", first, largest=largest, error=error, dtype=half)

    def _look_at_float8(self, operation: Operation, _: object, result: Tensor) -> None:
        """Counts what float8 rounds to 0, which is below 2**-10 where the largest number is made 448."""
        by_row = operation.args[4].cast_config_input.scaling_granularity.name == "AXISWISE"
        for what, tensor in zip(("input", "weight"), operation.args[:2], strict=True):
            sizes = plain(tensor).abs().float()
            largest = sizes.amax(-1, keepdim=True) if by_row else sizes.amax()
            lost = ((sizes > 0) & (sizes * (448 / largest) < 2.0**-10)).sum().item()
            share = lost / max(int((sizes > 0).sum()), 1)
            if share > ZEROS:
                numbers = {"share": share, "largest": sizes.max().item(), "what": what}
                self._notes.add("float8_underflow", operation.record, **numbers)

    # ---- Gradients that are measured while they are multiplied by the loss scale ----

    def _note_read(self, operation: Operation, result: Tensor) -> None:
        owner = getattr(operation.func, "__self__", None)
        if operation.name == "" and getattr(owner, "__name__", "") == "grad":
            operation.record.facts["read"] = len(self._read)
            self._read.append((operation.floating[0], result))

    def _look_at_measure(self, operation: Operation, _: object, result: Tensor) -> None:
        """Notes what measures a gradient."""
        before = self.tape.before(operation.record.parents, VIEWS) if self._read else ()
        read = [self._read[record.facts["read"]][0] for record in before if "read" in record.facts]
        scale = self._scaled.scale_of(read) if read and is_called_by_user() else None
        if scale is not None and not self._scaled.was_asked:
            record = Op(operation.name, "optimizer", operation.record.place, operation.record.where)
            self._notes.add("not_unscaled", record, scale=scale)

    # ---- Modules that are cast to float32 in vain ----

    def _cast_module(self, cast: Callable[..., Module], module: Module, *args, **kwargs) -> Module:
        before = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
        cast(module, *args, **kwargs)
        asked = [getattr(each, "dtype", each) for each in (*args, *kwargs.values())]  # by a type or a tensor
        is_to_float32 = cast.__name__ == "float" or torch.float32 in asked
        if is_to_float32 and before == {torch.float32} and is_called_by_user():
            self._modules[id(module)] = module, Op(cast.__name__, "forward", None, user_line())
        return module

    def _look_at_modules(self, record: Op) -> None:
        for _, cast in [
            self._modules.pop(module) for module in self.clock.running if module in self._modules
        ]:
            cast.place = record.place
            self._notes.add("float32_under_autocast", cast, runs=record.op)


def undone_casts(records: Collection[Op]) -> list[tuple[Op, str]]:
    """Returns casts to float32 that autocast, or a patched function, takes back at once, and which operation.

    Of casts at a line none is, if one of them has an effect.
    """
    known: dict[int, set[int]] = {}  # records, and the casts that they come of
    undone: dict[int, str] = {}
    effective: set[object] = set()  # lines
    by_number = {record.number: record for record in records}
    for record in records:
        casts = {cast for parent in record.parents for cast in known.get(parent, ())}
        if not casts:
            known |= {record.number: {record.number}} if record.facts.get("widens") else {}
        elif record.op in VIEWS or (record.op in CASTS and not record.is_half):
            known[record.number] = casts
        elif record.is_half and is_undone(record):
            undone = {**dict.fromkeys(casts, record.op), **undone}
        else:
            effective |= {by_number[cast].site for cast in casts}
    return [
        (by_number[number], op) for number, op in undone.items() if by_number[number].site not in effective
    ]


def is_undone(record: Op) -> bool:
    """Says whether an operation that gives half takes float32 alone, or is a cast that ampatch makes."""
    return record.is_ours if record.op in CASTS else {*record.input_dtypes} == {"float32"}


def half_in(record: Op) -> str:
    """Returns the half type among what an operation takes and gives, "" where there is none."""
    return next((dtype for dtype in (*record.input_dtypes, *record.output_dtypes) if dtype in HALF), "")


def limit_of(dtype: torch.dtype) -> int:
    """Returns up to where a type holds all whole numbers."""
    return int(2 / torch.finfo(dtype).eps)


def is_whole(*tensors: Tensor) -> bool:
    return all(bool((tensor == tensor.round()).all()) for tensor in tensors)


def length_of(operation: Operation, result: Tensor) -> int:
    """Returns how many numbers each of a result is the sum of; 0 if that is not known."""
    if operation.name == "sum":
        return operation.floating[0].numel() // max(result.numel(), 1)
    if operation.name != "einsum":
        return operation.floating[-2].shape[-1] if len(operation.floating) > 1 else 0
    equation = str(operation.args[0]).replace(" ", "")
    inputs, _, output = equation.partition("->")
    sizes: dict[str, int] = {}
    for letters, tensor in zip(inputs.split(","), operation.floating, strict=False):
        sizes |= dict(zip(reversed(letters), reversed(tensor.shape), strict=False))
    return math.prod(size for letter, size in sizes.items() if letter not in output)
