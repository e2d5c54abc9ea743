"""What single operations show: casts that are undone, gradients that are read, sums that are too long."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from ampatch.doctor.instruments.clock import MOST_MICRO_STEPS, Clock
from ampatch.doctor.instruments.dispatch import Operation, Rule, Site
from ampatch.doctor.instruments.operations import CASTS, IGNORED
from ampatch.doctor.instruments.places import is_called_by_ampatch, is_called_by_user, user_line
from ampatch.doctor.instruments.values import floating_in, key_of, plain
from ampatch.doctor.silent.notes import Notes, Suspicion
from ampatch.doctor.silent.scaled import Scaled
from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.private import is_transformed

FIRST = 16  # attempts whose operations are watched
LEFT_ALONE = (*IGNORED[1:], "untyped_storage", "data_ptr", "zeros_like", "full_like")  # but not properties

VIEWS = ("", "t", "transpose", "permute", "view", "reshape", "flatten", "unsqueeze", "squeeze", "contiguous")
VIEWS += ("chunk", "split", "unbind", "expand", "index", "detach", "swapaxes", "movedim", "narrow", "select")
# Of gradients that are scaled these say something else than of those that are not.
MEASURES = ("norm", "vector_norm", "linalg_vector_norm", "linalg_norm", "clamp", "clamp_", "clip", "clip_")
MEASURES += ("clamp_max", "clamp_max_", "clamp_min_", "max", "amax", "std", "var", "histc", "square", "pow")
MEASURES += ("mean", "gt", "lt", "ge", "le", "item", "tolist", "_foreach_norm")
PRODUCTS = ("matmul", "bmm", "mm", "einsum", "sum", "baddbmm")
QUOTIENTS = ("div", "div_", "true_divide", "mul", "mul_")
ZEROS = 0.1  # of the numbers that a layer in float8 takes
HEADROOM = 16  # times what was reached must fit: a length that grows, or the next step


class SilentRule(Rule):
    """Looks at the operations of the first attempts, and of those in `window`, in forwards and losses."""

    def __init__(self, clock: Clock, notes: Notes, window: Collection[int]) -> None:
        super().__init__(clock)
        self._notes, self._window = notes, {*range(FIRST), *window}
        self.forget()

    def forget(self) -> None:
        """Begins with the next attempt."""

    def look(self, operation: Operation, kept: object, given: list[Tensor]) -> None:
        """Looks at what an operation gives, which is something; `kept` is what `before` returned."""
        raise NotImplementedError

    def end_attempt(self, optimizer: Optimizer) -> None:
        """The next attempt begins."""
        self.forget()

    def wants(self, name: str) -> bool:
        """Leaves out the operations of backward passes and optimizers."""
        is_away = self.clock.in_backward or self.clock.part == "optimizer"
        is_active = self.clock.attempt in self._window and self.clock.micro_step < MOST_MICRO_STEPS
        return is_active and not (is_away or name in LEFT_ALONE or is_transformed())

    def after(self, operation: Operation, kept: object, result: object) -> None:
        """Finds what an operation gives, in place where it returns nothing, as x[mask] = 0."""
        given = floating_in(result)
        if operation.name.endswith("_") and operation.args and not given:
            given = floating_in(operation.args[0])
        if given:
            self.look(operation, kept, given)


@dataclass(slots=True, eq=False)
class Cast:
    """A cast to float32 that the script makes, and what became of it."""

    site: Site
    undone: str = ""  # the operation that ran in half nevertheless
    has_effect: bool = False


class Casts(SilentRule):
    """Casts to float32 that autocast, or a patched function, takes back at once."""

    def __init__(self, clock: Clock, notes: Notes, window: Collection[int]) -> None:
        super().__init__(clock, notes, window)
        self._modules: dict[int, tuple[Module, str, str | None]] = {}
        self._told: set[int] = set()
        clock.wrap(Module, "float", self._cast_module)
        clock.wrap(Module, "to", self._cast_module)

    def forget(self) -> None:
        self._casts = WeakTensorKeyDictionary()  # those that a tensor comes of
        self._all: list[Cast] = []

    def end_attempt(self, optimizer: Optimizer) -> None:
        """Notes the casts that had no effect, unless another at the same line had."""
        sites = {cast.site for cast in self._all if cast.has_effect}
        for cast in self._all:
            if cast.undone and cast.site not in sites:
                self._notes.add("float32_under_autocast", cast.site, runs=cast.undone)
        self.forget()

    def look(self, operation: Operation, kept: object, given: list[Tensor]) -> None:
        """Follows the tensors of a cast."""
        is_half = any(it.dtype in HALF_TYPES for it in given)
        if is_half and self._modules:
            self._look_at_modules(operation)
        known = [cast for tensor in operation.floating for cast in self._casts.get(tensor, ())]
        if operation.name in CASTS and not known:
            self._look_at_cast(operation, given)
        if not known:
            return
        if operation.name in VIEWS or (operation.name in CASTS and not is_half):
            for it in given:
                self._casts[it] = known
            return
        for cast in known:
            if is_half and is_undone(operation):
                cast.undone = cast.undone or operation.name
            else:
                cast.has_effect = True

    def _look_at_cast(self, operation: Operation, given: list[Tensor]) -> None:
        came = [tensor.dtype for tensor in (*operation.floating[:1], *given[:1])]
        if came[:1] and came[0] in HALF_TYPES and came[1:] == [torch.float32] and is_called_by_user():
            cast = Cast(operation.site)
            for it in given:
                self._casts[it] = [cast]
            self._all.append(cast)

    def _cast_module(self, cast: Callable[..., Module], module: Module, *args, **kwargs) -> Module:
        before = {it.dtype for it in module.parameters() if it.is_floating_point()}
        cast(module, *args, **kwargs)
        asked = [getattr(each, "dtype", each) for each in (*args, *kwargs.values())]  # by a type or a tensor
        is_to_float32 = cast.__name__ == "float" or torch.float32 in asked
        if is_to_float32 and before == {torch.float32} and is_called_by_user():
            self._modules[id(module)] = module, cast.__name__, user_line()
        return module

    def _look_at_modules(self, operation: Operation) -> None:
        if not is_undone(operation):
            return
        for each in self.clock.running:
            _, op, where = self._modules.get(each, (None, "", None))
            if op and each not in self._told:
                self._told.add(each)
                site = "forward", where, op, operation.place
                self._notes.add("float32_under_autocast", site, runs=operation.name)


def is_undone(operation: Operation) -> bool:
    """Says whether an operation that gives half takes float32 alone, or is a cast that ampatch makes."""
    if operation.name in CASTS:
        return is_called_by_ampatch()
    return bool(operation.floating) and all(it.dtype is torch.float32 for it in operation.floating)


class Reads(SilentRule):
    """Gradients that are measured while they are multiplied by the loss scale."""

    def __init__(self, clock: Clock, notes: Notes, window: Collection[int], scaled: Scaled) -> None:
        super().__init__(clock, notes, window)
        self._scaled = scaled

    def forget(self) -> None:
        self._grads: dict[int, tuple[Tensor, Tensor]] = {}  # by storage, kept so long: parameter, gradient

    def look(self, operation: Operation, kept: object, given: list[Tensor]) -> None:
        """Notes what measures a gradient."""
        owner = getattr(operation.func, "__self__", None)
        if operation.name == "" and getattr(owner, "__name__", "") == "grad":
            self._grads[key_of(given[0])] = operation.floating[0], given[0]
        if operation.name not in MEASURES or not self._grads:
            return
        read = [self._grads[key_of(it)][0] for it in operation.floating if key_of(it) in self._grads]
        scale = self._scaled.scale_of(read) if read and is_called_by_user() else None
        if scale is not None and not self._scaled.was_asked:
            self._notes.add("not_unscaled", ("optimizer", *operation.site[1:]), scale=scale)


class Lengths(SilentRule):
    """Sums of products in half that are divided by their length, when it may be too late."""

    def forget(self) -> None:
        self._sums = WeakTensorKeyDictionary()  # those that a tensor comes of

    def look(self, operation: Operation, kept: object, given: list[Tensor]) -> None:
        """Follows sums to what divides them."""
        if len(given) != 1 or not operation.floating:
            return
        sums = [it for tensor in operation.floating for it in self._sums.get(tensor, ())]
        if sums and operation.name in QUOTIENTS:
            self._look_at_quotient(operation, sums)
        elif operation.name in PRODUCTS and given[0].dtype is torch.float16:
            largest = given[0].detach().abs().max().item() if given[0].numel() else 0.0
            if math.isfinite(largest) and largest * HEADROOM > torch.finfo(torch.float16).max:
                numbers = {"length": length_of(operation, given[0]), "largest": largest}
                sums.append(Suspicion("length_alone", operation.site, numbers))
        elif operation.name not in VIEWS + CASTS:
            return
        if sums:
            self._sums[given[0]] = sums

    def _look_at_quotient(self, quotient: Operation, sums: list[Suspicion]) -> None:
        number = quotient.args[1] if len(quotient.args) > 1 else None
        if isinstance(number, Tensor):
            number = number.flatten()[0].item() if number.numel() else None
        if not isinstance(number, (int, float)) or not number:
            return
        divisor = 1 / number if quotient.name.startswith("mul") else number
        for it in sums:
            length = it.numbers["length"]
            if length > 1 and math.isclose(divisor, length, rel_tol=1e-3):
                self._notes.confirm(it, divided_at=quotient.where)


class Float8(SilentRule):
    """Inputs and weights of layers in float8 that are made zeros beside the largest number of their scale."""

    def look(self, operation: Operation, kept: object, given: list[Tensor]) -> None:
        """Counts what float8 rounds to 0, which is below 2**-10 where the largest number is made 448."""
        if operation.name != "float8_linear":
            return
        by_row = operation.args[4].cast_config_input.scaling_granularity.name == "AXISWISE"
        for what, tensor in zip(("input", "weight"), operation.args[:2], strict=True):
            sizes = plain(tensor).abs().float()
            largest = sizes.amax(-1, keepdim=True) if by_row else sizes.amax()
            lost = ((sizes > 0) & (sizes * (448 / largest) < 2.0**-10)).sum().item()
            share = lost / max(int((sizes > 0).sum()), 1)
            if share > ZEROS:
                numbers = {"share": share, "largest": sizes.max().item(), "what": what}
                self._notes.add("float8_underflow", operation.site, **numbers)


def length_of(operation: Operation, given: Tensor) -> int:
    """Returns how many numbers each of a result is the sum of; 0 if that is not known."""
    if operation.name == "sum":
        return operation.floating[0].numel() // max(given.numel(), 1)
    if operation.name != "einsum":
        return operation.floating[-2].shape[-1] if len(operation.floating) > 1 else 0
    equation = str(operation.args[0]).replace(" ", "")
    inputs, _, output = equation.partition("->")
    sizes: dict[str, int] = {}
    for letters, tensor in zip(inputs.split(","), operation.floating, strict=False):
        sizes |= dict(zip(reversed(letters), reversed(tensor.shape), strict=False))
    return math.prod(size for letter, size in sizes.items() if letter not in output)
