"""What is said of an op is what happens to it, under each of its names."""

import pkgutil
import types

import pytest
import torch
import torch.nn.functional as F

import ampatch as amp
from ampatch import lists
from ampatch.casts.catalog import Catalog, Name, promotes
from ampatch.table import BANNED, CUSTOM, FP32, LOWER, PROMOTE, CastTable, Row
from ampatch.testing import parametrize_rows, session
from patched import open_session

FULL = torch.float32


def paths(op):
    return [name.path for name in amp.explain(op).names]


def effects(op, path=None):
    name = next(name for name in amp.explain(op).names if path in (None, name.path))
    return {effect.opt_level: effect for effect in name.effects()}


# ---- Names ----


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("softmax", {"torch.softmax", "torch.Tensor.softmax", "torch.nn.functional.softmax"}),
        ("@", {"torch.matmul", "torch.linalg.matmul", "torch.Tensor.__matmul__", "torch.Tensor.__rmatmul__"}),
        ("**", {"torch.pow", "torch.Tensor.__pow__", "torch.Tensor.__rpow__", "torch.Tensor.__ipow__"}),
        ("arccos", {"torch.acos", "torch.arccos", "torch.Tensor.acos", "torch.Tensor.arccos_"}),
        ("exp_", {"torch.exp", "torch.Tensor.exp"}),
        ("/", {"torch.Tensor.__truediv__", "torch.div", "torch.true_divide"}),
        ("sigmoid", {"torch.special.expit", "torch.sigmoid"}),
        ("[]=", {"torch.Tensor.__setitem__"}),
        ("_convolution", {"torch._convolution"}),
    ],
)
def test_an_op_has_all_its_names(op, expected):
    assert expected <= set(paths(op))


@pytest.mark.parametrize(
    ("op", "path"),
    [
        ("torch.nn.functional.softmax", "torch.nn.functional.softmax"),
        ("nn.functional.softmax", "torch.nn.functional.softmax"),
        ("F.softmax", "torch.nn.functional.softmax"),
        ("functional.softmax", "torch.nn.functional.softmax"),
        ("Tensor.softmax", "torch.Tensor.softmax"),
        ("torch.softmax", "torch.softmax"),
        ("special.softmax()", "torch.special.softmax"),
        (" F.softmax ", "torch.nn.functional.softmax"),
    ],
)
def test_an_op_given_with_its_place_comes_first_and_the_other_names_after_it_once(op, path):
    found = paths(op)
    assert found[0] == path
    assert sorted(found) == sorted(set(paths("softmax")))


@pytest.fixture(scope="module")
def catalog():
    return Catalog()


def test_every_row_is_found_by_its_path_and_by_its_name(catalog):
    for path, row in parametrize_rows().args[1]:
        for op in (path, row.name):
            name = next(name for name in catalog.explain(op).names if name.path == path)
            assert name.cast is row.cast, path
            assert name.reason.startswith(row.reason), path


def test_an_op_is_found_by_its_function(catalog):
    for function in (F.gelu, torch.add, torch.Tensor.relu, torch.linalg.inv, torch.fft.fft):
        assert pkgutil.resolve_name(catalog.find(function)) is function
    assert catalog.find(len) is None


def test_a_function_of_torch_without_a_table_for_its_place_is_explained_as_well():
    assert effects("torch.nn.init.normal_")["O1"].because == "no row"


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("sofmax", r"'sofmax' is not a known op of torch .*close: softmax"),
        ("F.sofmax", r"'F.sofmax' is not a known op .*close: softmax"),
        ("torch.save", r"'torch.save' is not a known op"),
        ("os.remove", r"'os.remove' is not a known op"),
        ("F.has_torch_function", r"is not a known op"),
        ("nn.Parameter", r"'nn.Parameter' is not a known op"),
        ("torch.nn", r"'torch.nn' is not a known op"),
        ("torch.float32", r"'torch.float32' is not a known op"),
        ("", r"'' is not a known op"),
        ("nn.Linear", r"'nn.Linear' is a module, .*look up those$"),
        ("LSTM", r"'LSTM' is a module, .*look up those$"),
    ],
)
def test_what_is_no_op_is_refused_with_what_it_may_be(op, message):
    with pytest.raises(amp.AmpValueError, match=message):
        amp.explain(op)


def test_what_only_looks_like_an_op_is_not_called(monkeypatch):
    called = []
    monkeypatch.setattr(torch, "set_printoptions", lambda *args: called.append(args))
    monkeypatch.setattr(torch.nn.init, "zeros_", lambda *args: called.append(args))
    with pytest.raises(amp.AmpValueError, match="not a known op"):
        amp.explain("torch.set_printoptions")
    amp.explain("torch.nn.init.zeros_")
    assert called == []


# ---- Levels ----

# What functions with one row of each kind are called with: float32 or half, or both.
CALLS = {
    "torch.nn.functional.linear": 2,
    "torch.nn.functional.softmax": 1,
    "torch.lerp": 2,
    "torch.add": 2,
    "torch.nn.functional.gelu": 1,
    "torch.mm": 2,
}


def run(path, dtypes):
    """The type of what an op gives, in the words of an effect."""
    tensors = [torch.rand(2, 2).to(dtype) for dtype in dtypes]
    kwargs = {"dim": 1} if path.endswith("softmax") else {"weight": 0.5} if path.endswith("lerp") else {}
    try:
        result = pkgutil.resolve_name(path)(*tensors, **kwargs)
    except (RuntimeError, amp.BannedFunctionError):
        return "torch refuses"
    return str(result.dtype).removeprefix("torch.")


@pytest.mark.exhaustive(keep=14)
@pytest.mark.parametrize("opt_level", amp.OPT_LEVELS)
@pytest.mark.parametrize("path", CALLS)
def test_what_is_said_of_a_level_is_what_happens_there(path, opt_level):
    said = effects(path, path)[opt_level]
    half = amp.OPT_LEVELS[opt_level].half or torch.float16
    with session(opt_level):
        found = [run(path, [dtype] * CALLS[path]) for dtype in (FULL, half)]
        mixed = run(path, [FULL, half]) if CALLS[path] == 2 else said.mixed
    assert found == [said.float32, said.half.replace("half", "float16")]
    assert mixed == said.mixed.replace("float32, by torch", "float32")


# ---- Ops without a row ----


@pytest.mark.parametrize(
    ("op", "cast", "reason"),
    [
        ("gelu", None, "runs in the type of its arguments"),
        ("avg_pool3d", CUSTOM, "float32 on a CPU"),
        ("binary_cross_entropy", BANNED, "unlike torch.autocast"),
    ],
)
def test_an_op_says_the_reason_of_what_happens_to_it(op, cast, reason):
    name = amp.explain(op).names[0]
    assert name.cast is cast
    assert reason in name.reason


def test_an_op_that_autocast_lists_and_no_table_says_the_reason(catalog):
    for op, reason in lists.AUTOCAST_WITHOUT_ROW:
        assert reason in [name.reason for name in catalog.explain(op).names], op


def test_an_op_that_parts_from_autocast_on_purpose_says_the_reason():
    for op in ("nn.functional.binary_cross_entropy", "nn.functional.interpolate.area"):
        reason = dict(lists.DIFFERENT_FROM_AUTOCAST)[op]
        path = f"torch.{op.removesuffix('.area')}"
        assert amp.explain(path).names[0].reason.endswith(f" (unlike torch.autocast: {op}: {reason})")


PROMOTES = {
    True: (torch.add, torch.cat, torch.Tensor.copy_, F.kl_div),  # the last warns of its reduction
    False: (torch.mm, torch.lerp),
    None: (torch.dot, torch.exp, F.dropout),
}


def test_whether_torch_promotes_is_asked_of_torch():
    state = torch.get_rng_state()
    for expected, functions in PROMOTES.items():
        assert list(map(promotes, functions)) == [expected] * len(functions)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_row_of_another_torch_version_is_named_as_such():
    rows = (Row("mm", LOWER, "from the future", since="99.0"), Row("mv", FP32, "now"))
    catalog = Catalog([CastTable("torch", rows)], version="2.13.0")
    name = catalog.explain("torch.mm").names[0]
    assert name.cast is None
    assert name.reason == (
        "its row holds only from torch 99.0 on, and this is 2.13.0; it says: LOWER, from the future"
    )
    assert catalog.explain("mv").names[0].cast is FP32


# ---- Registrations, and torch while patched ----


@pytest.fixture
def my_ops():
    module = types.ModuleType("my_ops")
    module.fused = lambda x: x
    return module


def test_what_a_script_registered_is_explained_and_comes_before_the_row(my_ops):
    amp.register_half_function(my_ops, "fused")
    for op in ("fused", "my_ops.fused"):
        name = amp.explain(op).names[0]
        assert (name.path, name.cast, name.reason) == ("my_ops.fused", LOWER, "registered by the script")
    amp.register_float_function(F, "linear")
    assert amp.explain("linear").names[0].cast is FP32


def test_a_function_registered_for_bfloat16_runs_in_it_at_o1(my_ops):
    amp.register_bfloat16_function(my_ops, "fused")
    said = effects("fused")
    assert (said["O1"].float32, said["O4"].half, said["O2"].half) == ("bfloat16", "bfloat16", "float16")
    assert "cast to bfloat16" in str(amp.explain("fused"))


@pytest.mark.parametrize("op", ["softmax", "@", "lerp", "gelu", "cat", "norm"])
def test_the_same_is_said_while_torch_is_patched(op):
    before = amp.explain(op)
    open_session()
    assert amp.explain(op) == before


# ---- Words ----


def test_names_of_which_the_same_happens_are_together():
    names = [Name("a", LOWER, "one"), Name("b", PROMOTE, "two"), Name("c", LOWER, "three")]
    explanation = type(amp.explain("mm"))("op", tuple(names))
    assert [[name.path for name in group] for group in explanation.groups()] == [["a", "c"], ["b"]]


def test_an_explanation_in_words_has_names_reasons_and_levels():
    text = str(amp.explain("softmax"))
    assert "FP32: " in text
    for name in amp.explain("softmax").names:
        assert name.path in text
        assert name.reason in text
    assert all(f"\n  {level} " in text for level in amp.OPT_LEVELS)
    assert text == "\n".join(line.rstrip() for line in text.splitlines())
    assert "float8 in large nn.Linear" in str(amp.explain("linear"))
