"""Patched torch on a CPU over PyTorch's OpInfo database: nothing breaks, gradients and values are right."""

import itertools
import pkgutil

import pytest
import torch

from ampatch import lists
from ampatch.table import CUSTOM, FP32, LOWER, MATCH_SELF, PROMOTE
from helpers import snapshot, torch_is_before
from op_samples import FULL, OPS, calls_of, forms_of, full_name, map_tensors, seed, tensors_in
from patched import HALF, LEVELS, open_session

pytestmark = [
    pytest.mark.exhaustive(keep=0),  # test_casts_against_autocast and others stand for it in the short suite
    pytest.mark.filterwarnings("ignore:.*:"),  # ops that warn of their age or of their experiments
]
COUNT = 8
EMPTY = "takes an empty half matrix, whose gradient then has no kernel"
REFUSES_HALF = {
    "_upsample_bilinear2d_aa": "an operator of ATen by itself, which no Python name leads to",
    "nn.functional.binary_cross_entropy": "is banned for half tensors, and says what to use",
    **dict.fromkeys(("linalg.cholesky", "linalg.cholesky_ex", "lu_solve"), EMPTY),
}
if torch_is_before("2.15"):
    REFUSES_HALF["cholesky"] = EMPTY
if torch_is_before("2.13"):
    REFUSES_HALF["trace"] = "has no half kernel on a CPU there, and no row"
else:
    REFUSES_HALF |= dict.fromkeys(
        ("torch._scaled_mm", "torch._scaled_mm_v2"), "takes float8 and nothing else"
    )
# What these run in depends on their arguments: `test_custom.py` has their tests.
IN_PARTS = (
    "matrix_power",
    "sum_to_size",
    "local_response_norm",
    "linear_cross_entropy",
)


def name_of(target, row):
    return f"{pkgutil.resolve_name(target).__name__}.{row.name}"


ROWS = {
    name_of(table.target, row): row
    for table in lists.TABLES
    for row in table.select(torch.__version__).rows
    if row.cast in (LOWER, FP32, PROMOTE, MATCH_SELF, CUSTOM) and row.name not in IN_PARTS
}


def fresh(call, *dtypes):
    """The same call on new tensors of `dtypes` in turn: in-place ops write, and gradients need leaves."""
    made, dtypes = {}, itertools.cycle(dtypes)

    def convert(tensor):
        if id(tensor) not in made:
            new = tensor.detach().to(next(dtypes) if tensor.dtype is FULL else tensor.dtype, copy=True)
            made[id(tensor)] = new.requires_grad_(tensor.requires_grad)
        return made[id(tensor)]

    return map_tensors(convert, call)


def run(function, call, *, backward=True):
    """Returns the results and the gradients of the leaves, or the error."""
    args, kwargs = call
    seed()
    try:
        results = tensors_in(function(*args, **kwargs))
        leaves = [leaf for leaf in tensors_in(call) if leaf.requires_grad and leaf.is_leaf]
        outputs = [out for out in results if out.requires_grad]
        grads = ()
        if backward and outputs and leaves:
            ones = [torch.ones_like(out) for out in outputs]
            grads = torch.autograd.grad(outputs, leaves, ones, allow_unused=True)
    except Exception as error:  # whatever an op raises
        return error
    return results, list(zip(leaves, grads, strict=False))


@pytest.fixture(scope="module")
def calls():
    """(op, form, function as it was, function as programs reach it, call) for what runs in plain float32."""
    found = []
    for op in OPS:
        samples = calls_of(op, COUNT, requires_grad=op.supports_autograd)
        for (name, bound, reached), call in itertools.product(forms_of(op), samples):
            if not isinstance(run(bound, fresh(call, FULL)), Exception):
                found.append((full_name(op), name, bound, reached, call))
    return found


def test_what_runs_in_float32_runs_patched_with_float32_gradients(calls):
    open_session(opt_level="O1")  # a CPU has fewer kernels in float16
    assert len(calls) > 5000
    wrong = {}
    for _, name, _, reached, call in calls:
        result = run(reached, fresh(call, FULL))
        if isinstance(result, Exception):
            wrong[name] = result
        elif any(grad is not None and grad.dtype is not leaf.dtype for leaf, grad in result[1]):
            wrong[name] = "a gradient of another type than its leaf"
    assert wrong == {}


@pytest.mark.parametrize("opt_level", LEVELS)
def test_what_runs_in_float32_takes_half_tensors_while_patched(calls, opt_level):
    open_session(opt_level=opt_level)
    raised = {}
    for op, _, _, reached, call in calls:
        result = run(reached, fresh(call, LEVELS[opt_level]))
        if isinstance(result, Exception):
            raised[op] = result
    # Of this one a CPU has no backward in float16 before torch 2.11.
    expected = {*REFUSES_HALF, *(["logcumsumexp"] if torch_is_before("2.11") and opt_level == "O1" else [])}
    assert set(raised) == expected, raised


def cast_by_hand(row, bound, call, half):
    """Calls a function of unpatched torch on arguments that are cast as its row says."""
    kwargs, tensors = call[1], tensors_in(call)
    types = {tensor.dtype for tensor in tensors} & {FULL, half}
    dtype = {
        LOWER: half,
        FP32: None if kwargs.get("dtype") else FULL,
        PROMOTE: FULL if FULL in types else half,
        MATCH_SELF: tensors[0].dtype if tensors else None,
        CUSTOM: FULL if row.reason.startswith("float32 on a CPU") else None,
    }[row.cast]

    def cast(dtype):
        return map_tensors(lambda t: t.to(dtype) if dtype and t.dtype in (FULL, half) else t, call)

    result = run(bound, cast(dtype), backward=False)
    if row.cast is CUSTOM and isinstance(result, Exception):
        return run(bound, cast(FULL), backward=False)
    return result


@pytest.mark.parametrize(
    ("opt_level", "kinds"),
    [("O4", "full"), ("O4", "half"), ("O4", "full half"), ("O1", "half full")],
)
def test_results_are_bit_equal_to_those_on_arguments_cast_by_hand(calls, opt_level, kinds):
    half = LEVELS[opt_level]
    dtypes = [{"full": FULL, "half": half}[kind] for kind in kinds.split()]
    listed = [item for item in calls if item[1] in ROWS]
    assert {item[1] for item in listed} >= {"torch.matmul", "Tensor.softmax", "torch.linalg.norm"}
    by_hand = [
        cast_by_hand(ROWS[name], bound, fresh(call, *dtypes), half) for _, name, bound, _, call in listed
    ]
    open_session(opt_level=opt_level)
    wrong = []
    for (_, name, _, reached, call), expected in zip(listed, by_hand, strict=True):
        found = run(reached, fresh(call, *dtypes), backward=False)
        if isinstance(expected, Exception) != isinstance(found, Exception):
            wrong.append((name, expected, found))
        elif not isinstance(expected, Exception):
            # LAPACK, behind most CUSTOM rows, rounds by where the memory is: unpatched calls differ as well.
            is_equal = is_close if ROWS[name].cast is CUSTOM else is_same
            if not is_equal(found[0], expected[0]):
                wrong.append(name)
    assert wrong == []


def is_close(found, expected):
    return len(expected) == len(found) and all(
        mine.dtype is theirs.dtype and torch.allclose(*map(complex_of, (mine, theirs)), **CLOSE)
        for mine, theirs in zip(found, expected, strict=True)
    )


CLOSE = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}


def complex_of(tensor):
    return tensor.to(torch.complex128)


def bits_of(tensors):
    """The types and the bits, those of a NaN included."""
    return snapshot([tensor.detach().resolve_conj().resolve_neg() for tensor in tensors])


def is_same(found, expected):
    return bits_of(found) == bits_of(expected)


def refuses(bound, call, *dtypes):
    return isinstance(run(bound, fresh(call, *dtypes), backward=False), Exception)


# Of these the database has no call that torch refuses; test_lists.py has one, or they are another's name.
LACKING = {"torch.addmv_", "torch.index_put_", "torch.grid_sampler", "Tensor.__setitem__"}
LACKING |= {"torch.embedding_bag", "torch.nn.functional.embedding_bag"}


def test_a_function_whose_arguments_are_promoted_refuses_mixed_types_natively():
    rows = {name for name, row in ROWS.items() if row.cast in (PROMOTE, MATCH_SELF)}
    refused = set()
    for op in OPS:
        forms = [(name, bound) for name, bound, _ in forms_of(op) if name in rows]
        for (name, bound), call in itertools.product(forms, calls_of(op, COUNT) if forms else ()):
            if not refuses(bound, call, FULL) and (
                refuses(bound, call, FULL, HALF) or refuses(bound, call, HALF, FULL)
            ):
                refused.add(name)
    assert rows - refused <= LACKING
