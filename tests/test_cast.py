"""What is cast and what is not: trees of arguments, and eligible tensors."""

from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import ampatch as amp
from ampatch.casts.cast_tree import cast_batch, cast_call, cast_listed, cast_to, cast_tree
from apex_rows import shows

HALF = torch.bfloat16
Pair = namedtuple("Pair", ["first", "second"])


# ---- Trees ----


@dataclass
class Batch:
    image: Tensor
    label: int
    derived: Tensor = field(init=False, default=None)


@dataclass(frozen=True)
class FrozenBatch:
    image: Tensor
    name: str = "frozen"


@dataclass(frozen=True, slots=True)
class SlottedBatch:
    image: Tensor
    names: tuple = ()


class Record(OrderedDict):
    """As the outputs of transformers: keys are attributes too."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Stack(list):
    label = "none"


def halve(value):
    return cast_tree(value, cast_to(HALF))


def ones():
    return torch.ones(2)


def with_attributes(value, **attributes):
    """Sets what a constructor does not take."""
    for name, item in attributes.items():
        setattr(value, name, item)
    return value


def pack(x):
    return pack_padded_sequence(x.expand(3, 2, 2), torch.tensor([1, 3]), enforce_sorted=False)


CONTAINERS = {
    "list": lambda x: [x, "a", 3],
    "list subclass": lambda x: with_attributes(Stack([x]), label="mine"),
    "tuple": lambda x: (x, "a"),
    "namedtuple": lambda x: Pair(x, "b"),
    "deque": lambda x: deque([x, 1], maxlen=5),
    "dict": lambda x: {"b": x, "a": 1},
    "OrderedDict": lambda x: OrderedDict(z=x, a=1),
    "defaultdict": lambda x: defaultdict(list, a=x),
    "UserDict": lambda x: UserDict({"a": x, "b": 2}),
    "ChainMap": lambda x: ChainMap({}, {"a": x}),
    "MappingProxyType": lambda x: MappingProxyType({"a": x}),
    "dataclass": lambda x: with_attributes(Batch(x, 3), derived=x),
    "frozen dataclass": FrozenBatch,
    "dataclass with slots": SlottedBatch,
    "packed sequence": pack,
    "what torch returns by name": lambda x: torch.max(x.expand(2, 2), dim=1),
}


def parts_of(value):
    if is_dataclass(value):
        return {item.name: getattr(value, item.name) for item in fields(value)}
    return dict(value if isinstance(value, Mapping) else enumerate(value))


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_keeps_its_type_and_all_but_its_tensors_and_is_not_changed(name):
    value = CONTAINERS[name](ones())
    before = parts_of(value)
    result = halve(value)
    assert type(result) is type(value)
    assert list(parts_of(result)) == list(before)
    for key, item in parts_of(result).items():
        assert parts_of(value)[key] is before[key]
        if isinstance(item, Tensor) and item.is_floating_point():
            assert torch.equal(item, before[key].to(HALF))
            assert item.dtype is HALF
        else:
            assert item is before[key]
    for attribute in ("default_factory", "maxlen", "label"):
        assert getattr(result, attribute, None) == getattr(value, attribute, None)


def test_a_dict_subclass_keeps_keys_and_attributes_in_step():
    value = Record()
    value["logits"] = ones()
    result = halve(value)
    assert type(result) is Record
    assert result["logits"] is result.logits
    assert result.logits.dtype is HALF
    assert value.logits.dtype is torch.float32


UNTOUCHED = {
    "str": "half",
    "bytes": b"half",
    "int": 3,
    "float": 0.5,
    "none": None,
    "range": range(3),
    "array": np.ones(2, dtype=np.float32),
    "array of objects": np.array([None]),
    "slice": slice(0, 2),
    "class": Batch,
    "module": nn.Linear(1, 1),
    "size": torch.Size([2, 3]),
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "empty": [],
    "numbers": [1, 2],
    "namespace": SimpleNamespace(x=1),
}


@pytest.mark.parametrize("value", UNTOUCHED.values(), ids=UNTOUCHED)
def test_what_holds_no_tensor_is_returned_as_it_is(value):
    assert halve(value) is value
    assert halve([value])[0] is value
    assert cast_listed(value, cast_to(HALF)) is value


def test_a_module_among_the_inputs_of_a_cast_model_is_not_cast():
    module = nn.Linear(1, 1)
    assert cast_batch(module, HALF) is module
    assert module.weight.dtype is torch.float32


@pytest.mark.parametrize(
    "value",
    [
        [torch.ones(2, dtype=HALF), {"a": torch.ones(2, dtype=HALF)}],
        (torch.ones(2, dtype=torch.int64), "a"),
        OrderedDict(a=torch.ones(2, dtype=torch.float64)),
        Pair(torch.ones(2, dtype=HALF), 1),
        FrozenBatch(torch.ones(2, dtype=torch.bool)),
    ],
    ids=["half already", "integers", "float64", "namedtuple", "dataclass"],
)
def test_a_container_in_which_nothing_changes_is_the_same_object(value):
    assert halve(value) is value


def test_a_tensor_that_a_call_gives_twice_is_the_same_one_afterwards():
    x, y = ones(), ones()
    (first, [second]), kwargs = cast_call((x, [x]), {"same": x, "other": y}, HALF)
    assert first.dtype is HALF
    assert first is second is kwargs["same"]
    assert first is not kwargs["other"]


class BatchWithTo:
    def __init__(self):
        self.x, self.ids = ones(), torch.arange(2)

    def to(self, dtype):
        moved = BatchWithTo()
        moved.x = self.x.to(dtype)
        return moved


def test_an_object_with_a_method_to_is_asked_to_cast_itself():
    value = BatchWithTo()
    result = cast_batch([value], HALF)[0]
    assert result.x.dtype is HALF
    assert value.x.dtype is torch.float32


class Graph(BatchWithTo):
    """Takes a device alone, as the graphs of torch_geometric do."""

    def to(self, device):
        return self.apply(lambda tensor: tensor.to(device=device, non_blocking=True))

    def apply(self, change):
        self.x, self.ids = change(self.x), change(self.ids)
        return self


def test_an_object_that_goes_to_devices_alone_is_cast_in_a_copy():
    value = Graph()
    result = cast_batch((value,), HALF)[0]
    assert (type(result), result.x.dtype, result.ids.dtype) == (Graph, HALF, torch.int64)
    assert value.x.dtype is torch.float32


def test_an_object_that_cannot_be_cast_stays():
    class Handle:
        def to(self, device):
            raise TypeError

    assert cast_batch(value := Handle(), HALF) is value


def test_a_mapping_with_a_method_to_keeps_its_integer_ids():
    class Encoding(UserDict):
        def to(self, dtype):  # what casts the ids as well, were it called
            return Encoding({key: value.to(dtype) for key, value in self.items()})

    result = cast_batch(Encoding(ids=torch.arange(2), x=ones()), HALF)
    assert type(result) is Encoding
    assert (result["ids"].dtype, result["x"].dtype) == (torch.int64, HALF)


# ---- Eligibility ----


@amp.half_function
def show_half(*args, **kwargs):
    return (*args, *kwargs.values())


@amp.float_function
def show_float(*args, **kwargs):
    return (*args, *kwargs.values())


@pytest.fixture
def patched():
    model = nn.Linear(3, 5)
    return amp.initialize(model, opt_level="O4", verbosity=0)


NEVER_CAST = [
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
]


@shows("initialize-float64")
@pytest.mark.parametrize("dtype", NEVER_CAST, ids=str)
def test_a_dtype_that_is_not_eligible_is_never_cast(patched, dtype):
    tensor = torch.ones(2).to(dtype)
    for cast in (HALF, torch.float32):
        assert cast_to(cast)(tensor) is tensor
    assert show_half(tensor)[0] is show_float(tensor)[0] is tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_an_eligible_dtype_is_cast_both_ways_and_not_copied_where_it_is_right(patched, dtype):
    tensor = torch.ones(2, dtype=dtype)
    for show, expected in ((show_half, HALF), (show_float, torch.float32)):
        (found,) = show(tensor)
        assert found.dtype is expected
        assert (found is tensor) == (dtype is expected)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_sparse_tensor_is_cast_and_stays_sparse(patched, layout):
    dense = torch.eye(3)
    result = show_half(dense.to_sparse() if layout is torch.sparse_coo else dense.to_sparse_csr())[0]
    assert (result.dtype, result.layout) == (HALF, layout)
    assert torch.equal(result.float().to_dense(), dense)
