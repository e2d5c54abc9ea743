"""PyTorch's own OpInfo database as tests use it: an op's names in torch, and calls of it."""

import functools
import itertools
import operator

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only

FULL = torch.float32
PLACES = (
    torch,
    Tensor,
    torch.nn.functional,
    torch.linalg,
    torch.special,
    torch.fft,
    torch.functional,
    torch.masked,
    torch.sparse,
)
OPS = op_db


@functools.cache
def index_functions():
    """Every (place, name) of each function in torch's namespaces, by the function's id."""
    found = {}
    for place in PLACES:
        for name in dir(place):
            found.setdefault(id(getattr(place, name, None)), []).append((place, name))
    return found


# Read before anything is patched, as op_db itself is.
index_functions()


def full_name(op):
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def look_up(place, name):
    """A function that is looked up when it is called, as a program does."""
    return lambda *args, **kwargs: getattr(place, name)(*args, **kwargs)


def forms_of(op):
    """Yields (name, function as it was before any patch, function as programs reach it), the op first.

    The others are its places in torch, its method, its operator, its in-place forms and those of its
    aliases. An operator is reached by itself, and a lambda of the database looks torch up when called.
    """
    forms = [op.op, *(getattr(op, form, None) for form in ("method_variant", "inplace_variant"))]
    forms += [op.operator_variant, op.inplace_operator_variant]
    for alias in op.aliases:
        forms += [alias.op, alias.method_variant, alias.inplace_variant]
    for form in filter(None, forms):
        places = index_functions().get(id(form), [])
        if not places or getattr(operator, getattr(form, "__name__", ""), None) is form:
            yield getattr(form, "__name__", str(form)), form, form
        for place, name in places:
            yield f"{place.__name__}.{name}", form, look_up(place, name)


def seed():
    """Seeds the CPU alone: `torch.manual_seed` also notes the call stack, which takes longer than an op."""
    torch.default_generator.manual_seed(0)


def calls_of(op, count, *, requires_grad=False):
    """Returns the arguments of the first calls, made of real CPU tensors: some samples read numbers.

    `op.sample_inputs` would look through the call stack first, for the name of the test.
    """
    seed()
    found = itertools.islice(op.sample_inputs_func(op, "cpu", FULL, requires_grad), count)
    calls = [((sample.input, *sample.args), sample.kwargs) for sample in found]
    return [call for call in calls if all(leaf.layout is torch.strided for leaf in tensors_in(call))]


def tensors_in(value):
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def map_tensors(function, value):
    return tree_map_only(Tensor, function, value)
