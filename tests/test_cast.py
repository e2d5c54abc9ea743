"""What is cast and what is not: trees of arguments, and eligible tensors."""

from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import ampatch as amp
from ampatch.casts.cast_tree import cast_batch, cast_call, cast_to, cast_tree

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


def test_a_list_keeps_its_type_and_length():
    result = halve([ones(), "a", 3])
    assert type(result) is list
    assert [getattr(item, "dtype", item) for item in result] == [HALF, "a", 3]


def test_the_original_container_is_not_changed():
    tensor = ones()
    values, mapping = [tensor], {"a": [tensor]}
    halve(values)
    halve(mapping)
    assert values[0] is tensor
    assert mapping["a"][0] is tensor


def test_a_tuple_and_a_namedtuple_keep_their_type():
    assert type(halve((ones(),))) is tuple
    result = halve(Pair(ones(), "b"))
    assert type(result) is Pair
    assert (result.first.dtype, result.second) == (HALF, "b")


def test_a_dict_keeps_its_type_and_order():
    result = halve({"b": ones(), "a": 1, "c": {"d": ones()}})
    assert type(result) is dict
    assert list(result) == ["b", "a", "c"]
    assert result["c"]["d"].dtype is HALF


def test_an_ordered_dict_keeps_its_type_and_order():
    result = halve(OrderedDict(z=ones(), a=1))
    assert type(result) is OrderedDict
    assert list(result) == ["z", "a"]
    assert result["z"].dtype is HALF


def test_a_defaultdict_keeps_its_factory():
    value = defaultdict(list, a=ones())
    result = halve(value)
    assert type(result) is defaultdict
    assert result.default_factory is list
    assert result["a"].dtype is HALF
    assert set(value) == {"a"}


@pytest.mark.parametrize("kind", [UserDict, ChainMap, MappingProxyType])
def test_other_mappings_keep_their_type(kind):
    result = halve(kind({"a": ones(), "b": 2}))
    assert type(result) is kind
    assert (result["a"].dtype, result["b"]) == (HALF, 2)


def test_a_chain_map_is_not_changed_in_place():
    tensor = ones()
    value = ChainMap({}, {"a": tensor})
    halve(value)
    assert value["a"] is tensor


def test_a_dict_subclass_keeps_keys_and_attributes_in_step():
    value = Record()
    value["logits"] = ones()
    result = halve(value)
    assert type(result) is Record
    assert result["logits"] is result.logits
    assert result.logits.dtype is HALF
    assert value.logits.dtype is torch.float32


def test_a_list_subclass_keeps_its_type_and_attributes():
    value = Stack([ones()])
    value.label = "mine"
    result = halve(value)
    assert (type(result), result.label, result[0].dtype) == (Stack, "mine", HALF)
    assert value[0].dtype is torch.float32


def test_a_deque_is_a_sequence_too():
    result = halve(deque([ones(), 1], maxlen=5))
    assert type(result) is deque
    assert result.maxlen == 5
    assert result[0].dtype is HALF


def test_a_dataclass_keeps_its_type_and_its_fields_outside_the_constructor():
    value = Batch(ones(), 3)
    value.derived = ones()
    result = halve(value)
    assert type(result) is Batch
    assert (result.image.dtype, result.derived.dtype, result.label) == (HALF, HALF, 3)
    assert value.image.dtype is torch.float32


@pytest.mark.parametrize("kind", [FrozenBatch, SlottedBatch])
def test_a_frozen_dataclass_is_copied_not_changed(kind):
    value = kind(ones())
    result = halve(value)
    assert type(result) is kind
    assert result.image.dtype is HALF
    assert value.image.dtype is torch.float32


def test_a_packed_sequence_keeps_its_batch_sizes_and_order():
    value = pack_padded_sequence(torch.randn(3, 2, 4), torch.tensor([1, 3]), enforce_sorted=False)
    result = halve(value)
    assert type(result) is PackedSequence
    assert result.data.dtype is HALF
    assert result.batch_sizes is value.batch_sizes
    assert result.sorted_indices is value.sorted_indices


def test_what_torch_returns_by_name_keeps_its_names():
    value = torch.max(torch.randn(2, 3), dim=1)
    result = halve(value)
    assert type(result) is torch.return_types.max
    assert result.values.dtype is HALF
    assert result.indices is value.indices


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
    "namespace": SimpleNamespace(x=1),
}


@pytest.mark.parametrize("value", UNTOUCHED.values(), ids=UNTOUCHED)
def test_what_holds_no_tensor_is_returned_as_it_is(value):
    assert halve(value) is value
    assert halve([value])[0] is value


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


def test_the_parts_in_which_nothing_changes_are_the_same_objects():
    ids, nested = torch.arange(3), {"mask": torch.ones(2, dtype=torch.bool)}
    result = halve({"ids": ids, "nested": nested, "x": ones()})
    assert result["ids"] is ids
    assert result["nested"] is nested


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
    """A session at O4 for a small model on the CPU."""
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


@pytest.mark.parametrize("dtype", NEVER_CAST, ids=str)
def test_a_dtype_that_is_not_eligible_is_never_cast(patched, dtype):
    tensor = torch.ones(2).to(dtype)
    assert show_half(tensor)[0] is tensor
    assert show_float(tensor)[0] is tensor
    assert cast_to(HALF)(tensor) is tensor
    assert cast_to(torch.float32)(tensor) is tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_an_eligible_dtype_is_cast_both_ways(patched, dtype):
    tensor = torch.ones(2, dtype=dtype)
    assert show_half(tensor)[0].dtype is HALF
    assert show_float(tensor)[0].dtype is torch.float32


def test_a_tensor_of_the_right_dtype_is_not_copied(patched):
    half, full = torch.ones(2, dtype=HALF), ones()
    assert show_half(half)[0] is half
    assert show_float(full)[0] is full


def test_a_float64_parameter_is_not_cast(patched):
    weight = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
    assert torch.nn.functional.linear(torch.ones(1, 3, dtype=torch.float64), weight).dtype is torch.float64


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_sparse_tensor_is_cast_and_stays_sparse(patched, layout):
    dense = torch.eye(3)
    result = show_half(dense.to_sparse() if layout is torch.sparse_coo else dense.to_sparse_csr())[0]
    assert (result.dtype, result.layout) == (HALF, layout)
    assert torch.equal(result.float().to_dense(), dense)


def test_a_tensor_subclass_that_is_no_parameter_keeps_its_class(patched):
    class Tagged(Tensor):
        pass

    result = show_half(torch.ones(2).as_subclass(Tagged))[0]
    assert (type(result), result.dtype) == (Tagged, HALF)
