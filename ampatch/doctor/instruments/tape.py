"""The tape of a run: a record of each operation, which holds no tensor, and which one a tensor comes of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ampatch.doctor.fixes import Paste
from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.places import Models, Place
from ampatch.doctor.instruments.values import (
    HALF,
    Damage,
    is_finite,
    key_of,
    node_of,
    quiet,
    tensors_in,
)


@dataclass(slots=True, eq=False)
class Op:
    """One operation: what it is called, where it stands, and what the tensors were that it took and gave.

    `taken` and `given` are their types, `parents` the records, by number, of what made those that it takes.
    """

    op: str
    phase: str
    place: Place | None
    where: str | None
    dtype: str = ""  # of the first that it gives
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    parents: tuple[int, ...] = ()
    is_ours: bool = False  # whether ampatch calls it
    number: int = -1  # on the tape
    autocast: str | None = None  # the device for which torch.autocast was on
    origins: set[Origin] = field(default_factory=set)  # of bad numbers in what it took or gave
    hidden: set[Origin] = field(default_factory=set)  # of bad data, of which it makes finite numbers
    infinite: Damage | None = None  # of what it took, and what may be a mask
    is_data: bool = False  # whether that came with the batch
    facts: dict[str, object] = field(default_factory=dict)  # see `evidence`
    handed: dict[str, object] = field(default_factory=dict)  # facts of what it gives

    @property
    def is_half(self) -> bool:
        return any(dtype in HALF for dtype in self.output_dtypes)

    @property
    def site(self) -> tuple[object, ...]:
        return self.phase, self.where, self.op, self.place


class Tape:
    """The records of the present attempt, and of what was made before the first step, which lasts.

    A tensor comes of the latest record of the memory that it lies in, which views share.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.records: list[Op] = []
        self._made: dict[Hashable, int] = {}
        self._early: tuple[int, dict[Hashable, int]] = 0, {}
        self._attempt = 0

    def add(self, record: Op, inputs: Collection[Tensor] = (), outputs: Collection[Tensor] = ()) -> None:
        """Adds a record of what takes and gives some tensors; `put` then has these come of it."""
        record.dtype = next((str(tensor.dtype)[6:] for tensor in outputs), "")
        record.input_dtypes, record.output_dtypes = (
            tuple(str(tensor.dtype)[6:] for tensor in each) for each in (inputs, outputs)
        )
        record.parents = self.makers_of([*inputs, *outputs])
        record.origins = {origin for parent in record.parents for origin in self.records[parent].origins}
        record.number = len(self.records)
        self.records.append(record)

    def put(self, record: Op, outputs: Collection[Tensor]) -> None:
        """Has tensors come of a record."""
        self._made.update((key_of(tensor), record.number) for tensor in outputs)

    def keep(self) -> None:
        self._early = len(self.records), self._made.copy()

    def _begin(self) -> None:
        if self._attempt != self.clock.attempt:
            self._attempt, (count, made) = self.clock.attempt, self._early
            del self.records[count:]
            self._made = made.copy()

    def makers_of(self, tensors: Collection[Tensor]) -> tuple[int, ...]:
        """Returns the records, by number, of what made some tensors, each once."""
        self._begin()
        numbers = (self._made.get(key_of(tensor)) for tensor in tensors) if self._made else ()
        return tuple(dict.fromkeys(number for number in numbers if number is not None))

    def before(self, numbers: Collection[int], through: Collection[str] | None = None) -> Iterator[Op]:
        """Yields records, and those before them, each once; only `through` operations of these names."""
        waiting, seen = list(numbers), set(numbers)
        while waiting:
            record = self.records[waiting.pop()]
            yield record
            if through is None or record.op in through:
                waiting += (new := [parent for parent in record.parents if parent not in seen])
                seen.update(new)

    # ---- Origins of bad numbers ----

    def origins_of(self, *tensors: Tensor) -> set[Origin]:
        return {origin for maker in self.makers_of(tensors) for origin in self.records[maker].origins}

    def mark(self, tensor: Tensor, origins: set[Origin]) -> None:
        """Notes origins of what is in a tensor, and in all that shares its memory."""
        self.add(record := Op("", "", None, None), [tensor])
        record.origins |= origins
        for parent in record.parents:
            record.handed |= self.records[parent].handed
        self.put(record, [tensor])


# Operators by the names of their functions; those of torch end with _ where they work in place.
OPERATORS = {"truediv": "div", "itruediv": "div_", "floordiv": "floor_divide", "rpow": "pow", "radd": "add"}
OPERATORS |= {"rmul": "mul", "rmatmul": "matmul", "rtruediv": "div", "rdiv": "div", "rsub": "sub"}
OPERATORS |= {"iadd": "add_", "isub": "sub_", "imul": "mul_", "idiv": "div_", "ipow": "pow_"}
OPERATORS |= {"getitem": "index", "setitem": "index_put_"}
# These make no values: they return uninitialized memory, or a property, and of a backward pass hooks tell.
IGNORED = ("", "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "set_")
IGNORED += ("backward", "register_hook", "size")
REPEATED = "CheckpointFunctionBackward"  # what it gives comes of the operations that it repeats
ASKING = ("isnan", "isfinite", "isinf", "item", "tolist", "__bool__", "__float__", "allclose")
CASTS = ("to", "half", "bfloat16", "float", "type", "type_as", "_to_copy")
CASTING = (*CASTS, "_foreach_copy_", "copy_")  # as of weights to half
# What breaks alike, see `causes`.
EXPONENTIALS = ("exp", "exp_", "expm1", "expm1_", "exp2", "exp2_", "sinh", "cosh")
LOGARITHMS = ("log", "log2", "log10", "log1p", "log_", "logit", "binary_cross_entropy", "xlogy")
LOGARITHMS += ("log1p_", "log2_", "log10_", "logit_", "entr", "special_entr")  # whose gradient is one
NORMS = ("norm", "cdist", "vector_norm", "linalg_vector_norm")
SPREADS = ("std", "var", "std_mean", "var_mean")
QUOTIENTS = ("div", "div_", "reciprocal", "reciprocal_", "rsqrt", "rsqrt_", "true_divide", "atan2")
SUMS = ("sum", "mean", "cumsum", "matmul", "linear", "bmm", "mm", "addmm", "einsum", "conv1d", "conv2d")
SUMS += ("conv3d", "baddbmm", "norm", "var", "std", "prod", "dot", "mv")

ROOTS = ("sqrt", "sqrt_", "rsqrt", "rsqrt_")
LOSSES = ("cross_entropy", "nll_loss", "nll_loss_nd", "cross_entropy_loss")
RUNNING = ("batch_norm", "instance_norm")
OF_ALL = ("mean", "sum", *LOSSES)  # which hide no mask
SOFTMAXES = ("softmax", "log_softmax")
WEIGHING = ("softmax", "attention", "cross_entropy")  # these make NaN of nothing but -inf
DOMAINS = ("acos", "acos_", "asin", "asin_", "arccos", "arcsin", "atanh", "atanh_", "acosh", "acosh_")
ADDCDIV = ("addcdiv_", "_foreach_addcdiv_", "_fused_adam_", "_fused_adamw_")  # of optimizers
NORMALIZERS = ("normalize", "cosine_similarity", "pairwise_distance", *ADDCDIV)
# Nodes that multiply gradients by what is finite in the forward.
MULTIPLY = tuple(
    f"{name}Backward0"
    for name in (
        *("Addmm", "Mm", "Bmm", "Baddbmm", "Mv", "Mul", "Convolution", "Linear", "Add", "Sub", "Neg"),
        *("Mean", "Sum", "Embedding", "Index", "Cat", "Stack", "Select", "Slice", "Clone", "Repeat"),
        *("NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm", "CudnnBatchNorm", "NativeDropout"),
        *("Softmax", "LogSoftmax", "Gelu", "Silu", "Tanh", "Sigmoid", "Relu", "LeakyRelu", "Softplus"),
    )
)
MULTIPLY += ("SumBackward1", "MeanBackward1")
SMALLER = 2.0**-12  # of the present loss scale, to ask whether a gradient overflows for it
SMALL = 16.0  # a loss scale that is smaller than any search begins with
KNOWN = "ampatch.doctor"  # in a node's metadata
# Nodes that change the layout or type of a gradient alone.
CHAIN = ("TBackward0", "ToCopyBackward0", "ViewBackward0", "UnsafeViewBackward0", "TransposeBackward0")
CHAIN += ("ExpandBackward0", "PermuteBackward0", "ReshapeAliasBackward0")


class Enough(BaseException):
    """Ends a script when all that is wanted has been seen."""


@dataclass(slots=True, eq=False)
class Origin:
    """An operation that made bad numbers."""

    call: Op
    phase: str
    damage: Damage
    micro_step: int
    input_largest: float | None = None
    parameter: str | None = None
    node: str | None = None
    attempt: int = 0
    has_reached: bool = False
    is_quiet: bool = False  # an infinity in the data, which may reach nothing
    is_of_scale: bool = False  # it is finite where the gradients it takes are smaller
    batch_sizes: tuple[int, ...] = ()  # of what the model took
    region: Paste | None = None  # what puts the statement into float32
    turns: tuple[str, str | None, int | None] | None = None  # what made NaN of its inf, where, which sample
    float32_survives: bool | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """What it shares with the same operation at the same place of the same micro-step."""
        call = self.call
        return (self.attempt, self.micro_step, call.op, call.where, call.place, self.node, self.parameter)


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


# ---- The graph ----


class Graph:
    """Follows the graphs of one step; `on_bad` hears of each bad gradient."""

    def __init__(self, models: Models, on_bad: Callable[..., None]) -> None:
        self._models, self._on_bad = models, on_bad
        self._nodes: list[object] = []  # kept, so that each stays one object of Python

    def tag(self, inputs: list[Tensor], outputs: list[Tensor], call: Op) -> None:
        """Has the nodes of an operation know it; what it takes may come of a function that nobody saw."""
        for tensor in inputs:
            node = node_of(tensor)
            if node is not None and KNOWN not in node.metadata:
                name = node.name().removesuffix("Backward")
                self._tag_nodes(node, Op(name, call.phase, call.place, call.where, call.dtype))
        for tensor in outputs:
            self._tag_nodes(node_of(tensor), call)

    def _tag_nodes(self, node: object, call: Op) -> None:
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node is None or KNOWN in node.metadata or is_leaf(node):
                continue
            node.metadata[KNOWN] = call
            followers = [each for each, _ in node.next_functions]
            names = [self._models.name_of(variable_of(each)) for each in followers]
            node.register_hook(functools.partial(self._look, len(self._nodes), call, names))
            self._nodes.append(node)
            waiting += followers

    def _look(self, index: int, call: Op, names: list[str | None], made: tuple, arrived: tuple) -> None:
        """A hook of a node: `made` are the gradients that it made of those that `arrived`."""
        with quiet():
            for tensor, name in zip(made, names, strict=False):
                if tensor is not None and not is_finite(tensor):
                    self._on_bad(call, self._nodes[index], name, tensor, arrived)
                    return


def nodes_of(roots: Sequence[Tensor], first: int = 0) -> Iterator[object]:
    """Yields the nodes of a graph, each once, but none that is older than the first."""
    waiting = [node_of(root) for root in roots]
    seen: set[object] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node._sequence_nr() < first:
            continue
        seen.add(node)
        yield node
        waiting += [each for each, _ in node.next_functions]


def is_leaf(node: object) -> bool:
    return node.name().endswith("AccumulateGrad")


def variable_of(node: object) -> object:
    """Returns the parameter whose gradient a node makes, but for its layout and type, or None."""
    while node is not None:
        if is_leaf(node):
            return node.variable
        if node.name() not in CHAIN:
            return None
        node = node.next_functions[0][0]
    return None


def is_cured_by_scale(node: Callable[..., object], grads: tuple, scale: float) -> bool:
    """Asks a node, before it forgets what it saved, whether a smaller loss scale would do.

    One that cannot be asked, as those in a checkpoint, which unpack what they saved once, is judged by its
    name: does it multiply gradients by what was finite in the forward?
    """
    try:
        factor = min(SMALLER, SMALL / scale) if scale else SMALLER  # one that has fallen to 0
        smaller = [None if tensor is None else tensor * factor for tensor in grads]
        function = getattr(node, "_forward_cls", None)  # of a torch.autograd.Function
        again = node(*smaller) if function is None else function.backward(node, *smaller)
    except (RuntimeError, TypeError):
        return node.name() in MULTIPLY
    return all(map(is_finite, tensors_in(again)))
