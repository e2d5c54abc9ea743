"""The operations of a step, and those among them that made the first bad numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from ampatch.doctor.places import Place
from ampatch.doctor.values import Damage

# Operators by the names of their functions; those of torch end with _ where they work in place.
OPERATORS = {"truediv": "div", "itruediv": "div_", "floordiv": "floor_divide", "rpow": "pow", "radd": "add"}
OPERATORS |= {"rmul": "mul", "rmatmul": "matmul", "rtruediv": "div", "rdiv": "div", "rsub": "sub"}
OPERATORS |= {"iadd": "add_", "isub": "sub_", "imul": "mul_", "idiv": "div_", "ipow": "pow_"}
OPERATORS |= {"getitem": "index", "setitem": "index_put_"}


@dataclass(slots=True)
class Call:
    """One operation: what it is called, and where it stands."""

    op: str
    phase: str
    place: Place | None
    where: str | None
    dtype: str = ""
    origins: set[int] = field(default_factory=set)  # whose marks it took or gave


@dataclass(slots=True)
class Origin:
    """An operation that made bad numbers."""

    call: Call
    phase: str
    damage: Damage
    micro_step: int
    input_largest: float | None = None
    parameter: str | None = None
    node: str | None = None
    attempt: int = 0
    has_reached: bool = False
    is_of_scale: bool = False  # it is finite where the gradients that it takes are smaller
    step: int | None = None
    batch_size: int | None = None

    def to_json(self) -> dict[str, object]:
        """Returns what a child process leaves of it."""
        return asdict(self) | {"call": asdict(self.call) | {"origins": sorted(self.call.origins)}}


def name_of(func: Callable[..., object]) -> str:
    """Returns torch's name of a function, for an operator that of its function; "" for a property.

    >>> import torch
    >>> name_of(torch.Tensor.__truediv__), name_of(torch.exp), name_of(torch.Tensor.grad.__get__)
    ('div', 'exp', '')
    """
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return ""
    inner = name.strip("_") if name.startswith("__") else name
    return OPERATORS.get(inner, inner) if name.startswith("__") else name
