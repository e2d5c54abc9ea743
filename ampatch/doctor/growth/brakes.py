"""Looks at the operations of the first steps for what keeps half precision from being faster.

It notes what waits for the device, products that are small or whose sizes are no multiples of 8, and float32
between half operations. Of `torch.compile` it notes the call alone: the trace turns it off.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import dropwhile

import torch
from torch import Tensor
from torch.nn import Module

from ampatch.doctor.instruments.clock import MOST_MICRO_STEPS
from ampatch.doctor.instruments.dispatch import Operation, Rule
from ampatch.doctor.instruments.places import OURS, frames
from ampatch.doctor.instruments.tape import Tape
from ampatch.doctor.instruments.values import tensors_in
from ampatch.levels.precision import HALF_TYPES

SYNCS = ("item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "is_nonzero", "equal", "allclose", "unique")
SYNCS += ("masked_select", "__bool__", "__float__", "__int__", "__index__", "__array__", "__contains__")
PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d")
OWN_SYNCS = tuple(os.path.join(OURS[1], it) + os.sep for it in ("optim", "amp", "utils/data"))  # of torch
CONVOLUTIONS = PRODUCTS[-3:]
SILENT = ("to", "half", "bfloat16", "float", "type", "type_as", "detach", "size", "dim", "requires_grad_")
MOST_STEPS = 4
MULTIPLE = 8  # that tensor cores take
TINY = 2**21  # multiply-adds, as of 128 x 128 x 128: starting such a product takes longer than computing it

Rows = dict[tuple[object, ...], dict]  # of the report, each with how often it was seen


class Brakes(Rule):
    """What was seen: syncs, products and islands by their place, over some attempts.

    These are not that which the first step ends: what comes before it is seen once.
    """

    window = range(1, MOST_STEPS + 1)

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        self.syncs, self.products, self.islands = Rows(), Rows(), Rows()
        self.compiles = 0
        self._open: list[tuple[str, str, str | None]] | None = None  # float32 after a half operation
        self.clock.wrap(torch, "compile", self._compile)

    def _compile(self, compile: Callable[..., object], *args: object, **kwargs: object) -> object:
        self.compiles += 1
        return compile(*args, **kwargs)

    def enter_model(self, model: Module, args: tuple) -> None:
        """An island ends with the forward."""
        self._open = None

    def wants(self, name: str) -> bool:
        """Looks at all operations, but of many backward passes at those of the first."""
        return self.clock.micro_step < MOST_MICRO_STEPS and not self.clock.in_backward

    def after(self, operation: Operation, kept: object) -> None:
        """Notes what an operation says about speed."""
        name, place, where = operation.name, operation.record.place, operation.record.where
        if is_sync(operation.func, name, operation.args) and is_called_by_script() and where is not None:
            count(self.syncs, op=name.strip("_"), module=place.module if place else "", where=where)
        given = next((it for it in operation.given if it.is_floating_point()), None)
        if place is None or given is None or name in SILENT:
            return
        if given.dtype in HALF_TYPES:
            self._end_island()
            if name in PRODUCTS:
                sizes = sizes_of(name, operation.args)
                count(self.products, op=name, module=place.module, where=where, sizes=sizes)
        elif self._open is not None and given.dtype == torch.float32:
            self._open.append((name, place.module, where))

    def _end_island(self) -> None:
        if self._open:
            _, module, line = self._open[0]
            ops = tuple(dict.fromkeys(op for op, _, _ in self._open))
            count(self.islands, module=module, ops=ops, where=line)
        self._open = []

    def to_json(self) -> dict[str, object]:
        """Returns the field `speed` of a report; counts are those of `steps` steps together."""
        products = list(self.products.values())
        return {
            "steps": max(min(self.clock.attempt - 1, MOST_STEPS), 0),
            "compiled": self.compiles > 0,
            "syncs": sorted(self.syncs.values(), key=lambda it: -it["count"]),
            "products": len(products),
            "uneven": [it for it in products if any(size % MULTIPLE for size in it["sizes"][1:])],
            "tiny": [it for it in products if torch.Size(it["sizes"]).numel() < TINY],
            "islands": sorted(self.islands.values(), key=lambda it: -it["count"]),
        }


def count(rows: Rows, **seen: object) -> None:
    """Counts what was seen once more."""
    row = rows.setdefault(tuple(seen.values()), seen | {"count": 0})
    row["count"] += 1


def is_sync(func: Callable[..., object], name: str, args: tuple) -> bool:
    """Says whether a function waits for the device, on a GPU."""
    if getattr(func, "__name__", "") in SYNCS or name in SYNCS:
        return True
    if name == "index" and len(args) > 1:
        return any(it.dtype in (torch.bool, torch.uint8) for it in tensors_in(args[1]))
    return name == "where" and len(args) == 1


def is_called_by_script() -> bool:
    """Says whether neither we nor an optimizer or scaler of torch called what a mode now sees."""
    below_modes = dropwhile(lambda it: it.co_name != "__torch_function__", (it.f_code for it in frames()))
    for code in below_modes:
        if code.co_filename.startswith(OWN_SYNCS):
            return False
        if code.co_name != "__torch_function__" and not code.co_filename.startswith(OURS[1]):
            return not code.co_filename.startswith(OURS[0])
    return False


def sizes_of(name: str, args: tuple) -> tuple[int, ...]:
    """Returns the sizes of a product: rows, then columns and depth, which tensor cores want even.

    >>> sizes_of("linear", (torch.ones(4, 3, 20), torch.ones(7, 20)))
    (12, 7, 20)
    """
    tensors = [it for it in args if isinstance(it, Tensor)]
    if len(tensors) < 2:
        return ()
    left, right = tensors[-2:] if name in ("addmm", "baddbmm") else tensors[:2]
    if name in CONVOLUTIONS:
        places = left.numel() // max(left.shape[1], 1) if left.dim() > 2 else left.numel()
        return places, right.shape[0], right[0].numel()
    depth = left.shape[-1] if left.dim() else 1
    columns = right.shape[0] if name == "linear" else right.shape[-1] if right.dim() > 1 else 1
    return left.numel() // max(depth, 1), columns, depth


def said_of_speed(speed: dict) -> list[str]:
    """Says what keeps a half script from being faster; nothing of a script that computes in float32.

    `speed` is what `Brakes.to_json` returns.
    """
    if not speed["products"]:
        return []
    syncs, many = sum(it["count"] for it in speed["syncs"]) / max(speed["steps"], 1), speed["products"]
    words = {
        "syncs": f"host syncs, {syncs:.3g} a step, each of which waits for a GPU",
        "tiny": f"half products smaller than 128 x 128 x 128, {len(speed['tiny'])} of {many}",
        "uneven": f"half products with sizes not multiples of 8, {len(speed['uneven'])} of {many}",
        "islands": f"lines in float32 between half operations, {len(speed['islands'])} in all",
    }
    said = [f"{text}: {first_of(speed[name])}" for name, text in words.items() if speed[name]]
    if said and not speed["compiled"]:
        said.append("torch.compile is not used: it would join casts with what follows them")
    return said


def first_of(found: list[dict]) -> str:
    """Names the first of what was found."""
    it = found[0]
    op = it["op"] if "op" in it else ", ".join(it["ops"][:3])
    sizes = f" of {' x '.join(map(str, it['sizes']))}" if "sizes" in it else ""
    return f"{op}{sizes} at {it['where']}"
