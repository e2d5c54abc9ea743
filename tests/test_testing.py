"""The helpers for people who test ops: they pass what is right, and say what is wrong."""

import pkgutil
import sys
import textwrap
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch as amp
from ampatch import lists
from ampatch.levels.patcher import Patcher
from ampatch.session.session import SESSION
from ampatch.table import BANNED, CUSTOM, FP32, LOWER, PROMOTE
from ampatch.testing import TorchSnapshot, assert_casts, parametrize_rows, session
from ampatch.testing.opening import is_open
from apex_rows import shows

pytest_plugins = ["pytester"]

FULL, HALF = torch.float32, torch.bfloat16
X = torch.tensor([[1.1, -2.3, 0.7], [0.3, 3.1, -1.7]])
W = torch.tensor([[0.9, 1.3, -0.2], [2.1, -0.4, 0.6]])
each_level = pytest.mark.parametrize("opt_level", ["O1", "O2", "O4"])


def scale(x, weight):
    """Has no row, and takes no mixed types."""
    return torch.ops.aten.dot(x.flatten(), weight.flatten())


@pytest.fixture
def my_ops(monkeypatch):
    module = types.ModuleType("my_ops")
    module.scale = types.FunctionType(scale.__code__, globals(), "scale")
    monkeypatch.setitem(sys.modules, "my_ops", module)
    return module


# ---- assert_casts: what is right ----

DECORATORS = {
    LOWER: amp.half_function,
    FP32: amp.float_function,
    PROMOTE: amp.promote_function,
    None: lambda function: function,
}
REGISTER = {
    LOWER: amp.register_half_function,
    FP32: amp.register_float_function,
    PROMOTE: amp.register_promote_function,
}


@pytest.mark.exhaustive(keep=6)
@shows("o1-decorators")
@each_level
@pytest.mark.parametrize("cast", DECORATORS)
def test_a_decorated_function_passes_for_its_cast_at_every_level(cast, opt_level):
    assert_casts(DECORATORS[cast](scale), X, W, expect=cast, opt_level=opt_level)


@pytest.mark.parametrize("cast", REGISTER)
def test_a_registered_function_is_found_by_its_path_and_in_a_lambda_and_by_its_own_name(cast, my_ops):
    my_ops.scale.__module__, my_ops.scale.__qualname__ = "my_ops", "scale"
    REGISTER[cast](my_ops, "scale")
    for function in ("my_ops.scale", lambda x, weight: my_ops.scale(x, weight), my_ops.scale):
        assert_casts(function, X, weight=W, expect=cast, opt_level="O4")


def to_numpy_and_back(x):
    return torch.from_numpy(x.numpy() * 2)


RIGHT = {
    "a literal type": (amp.bfloat16_function(scale), (X, W), {"expect": HALF, "opt_level": "O1"}),
    "a decorator of others": (amp.half_function(torch.no_grad()(scale)), (X, W), {"expect": LOWER}),
    "options of initialize": (F.linear, (X, W), {"expect": HALF, "options": {"dtype": HALF}}),
    "allow_banned": (
        *(F.binary_cross_entropy, (X.sigmoid(), W.sigmoid())),
        {"expect": BANNED, "options": {"allow_banned": True}},
    ),
    "numbers that are drawn": (amp.float_function(lambda x: F.dropout(x)), (X,), {"expect": FULL}),
    "nan": (amp.float_function(lambda x: x.log2()), (X,), {"expect": FULL}),
    "no backward": (amp.float_function(to_numpy_and_back), (X,), {"expect": FULL, "gradients": False}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name):
    function, args, kwargs = RIGHT[name]
    state = torch.get_rng_state()
    assert_casts(function, *args, **kwargs)
    assert torch.equal(torch.get_rng_state(), state)


# ---- assert_casts: what is wrong ----


def fails(match, function, *args, **kwargs):
    """Fails unless assert_casts does, in these words, and leaves no session."""
    with pytest.raises(AssertionError, match=match):
        assert_casts(function, *args, **kwargs)
    assert not is_open()


def is_casting():
    return is_open() and not SESSION.casts.thread.is_off()


def writes(x):
    if is_casting():
        with torch.no_grad():
            x.mul_(2)
        return amp.half_function(lambda x: x / 2)(x)
    return amp.half_function(lambda x: x * 1)(x)


FAULTS = {
    "casts float64": (
        lambda x: x.to(HALF) if is_casting() else x,
        "float64 arguments: result is torch.bfloat16, expected torch.float64",
    ),
    "ignores disable_casts": (
        lambda x: x.to(HALF) if is_open() and x.dtype is FULL else x,
        r"float32 arguments in disable_casts\(\): result is torch.bfloat16",
    ),
    "loses the gradient": (
        lambda x: amp.half_function(lambda x: x * 2)(x.detach() + 0 * x if is_casting() else x),
        "float32 arguments: gradients has other values than expected",
    ),
    "rounds": (
        lambda x: amp.half_function(lambda x: x * (1.01 if is_casting() else 1))(x),
        "float32 arguments: result has other values than expected, in torch.bfloat16",
    ),
    "writes": (writes, "float32 arguments: arguments has other values than expected"),
    "returns more": (
        lambda x: [x.to(HALF)] * 2 if is_casting() else x,
        "float32 arguments: result has 2 parts, expected 1",
    ),
    "returns None": (
        lambda x: None if is_casting() else x,
        "float32 arguments: result is None, expected torch.bfloat16",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_each_kind_is_named(name):
    function, message = FAULTS[name]
    fails(message, function, X, expect=HALF, opt_level="O4")


def test_a_function_that_stays_patched_fails(my_ops):
    def patch(x):
        if is_open():
            my_ops.scale = lambda x: x + 1
        return x

    my_ops.scale = patch
    message = "after the session it is not the same function as before"
    fails(message, "my_ops.scale", X, expect=None, opt_level="O4")


# ---- assert_casts: what shows nothing ----


LINEAR_FAILS = (
    r"^torch.nn.functional.linear at O4, expect=torch.float32:\n"
    r"- float32 arguments: result is torch.bfloat16, expected torch.float32\n"
)
ARGMAX, NEGATE = amp.float_function(torch.argmax), amp.promote_function(torch.neg)
NOT_BFLOAT16 = "float32 arguments: result is torch.float32, expected"
REFUSES = "called without casts, it raises RuntimeError: .*mat1 and mat2"


@pytest.mark.parametrize(
    ("message", "function", "args", "expect", "opt_level"),
    [
        (LINEAR_FAILS, F.linear, (X, W), FULL, "O4"),
        *((NOT_BFLOAT16, F.linear, (X, W), HALF, level) for level in ("O0", "O2", "O3", "O5")),
        ("bfloat16 arguments: it must raise BannedFunctionError", torch.exp, (X,), BANNED, "O4"),
        ("the result is the same with and without the cast", ARGMAX, (X,), FULL, "O1"),
        ("give two floating tensors or more", NEGATE, (X,), PROMOTE, "O1"),
        (REFUSES, F.linear, (X, X.T), LOWER, "O1"),
        ("give gradients=False", amp.float_function(to_numpy_and_back), (X,), FULL, "O1"),
    ],
)
def test_what_is_wrong_or_shows_nothing_is_told(message, function, args, expect, opt_level):
    fails(message, function, *args, expect=expect, opt_level=opt_level)


def test_arguments_that_say_no_types_and_an_open_session_are_refused(amp_session):
    with pytest.raises(amp.AmpValueError, match="no argument is a floating tensor"):
        assert_casts(torch.add, torch.arange(3), 1, expect=None)
    with pytest.raises(amp.AmpValueError, match="give a dtype, or None"):
        assert_casts(torch.fft.fft, X, expect=CUSTOM)
    amp_session("O4")
    with pytest.raises(amp.AmpValueError, match="a session is open already"):
        assert_casts(scale, X, W, expect=None)


# ---- session ----


@each_level
def test_a_session_is_open_for_its_block_and_says_nothing_unless_told(opt_level, capsys):
    model = nn.Linear(2, 2)
    with session(opt_level, model) as found:
        assert found is model
        assert is_open()
        assert (X @ W.T).dtype is {"O1": torch.float16, "O4": HALF}.get(opt_level, FULL)
    assert not is_open()
    assert model.weight.dtype is FULL
    assert capsys.readouterr().out == ""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with session(opt_level, model, optimizer, loss_scale=8, verbosity=1) as found:
        assert found == (model, optimizer)
        assert amp.get_loss_scale() == 8
    assert "Selected optimization level" in capsys.readouterr().out


def test_a_session_ends_with_an_exception_and_opens_alone():
    with pytest.raises(KeyError), session("O4"):
        raise KeyError
    assert not is_open()
    with pytest.raises(amp.AmpValueError, match="unknown opt_level"), session("O9"):
        pytest.fail("the block must not run")
    assert not is_open()
    with session("O4"):
        with pytest.raises(amp.AmpValueError, match="open already"), session("O4"):
            pytest.fail("the block must not run")
        assert is_open()


# ---- TorchSnapshot ----


@pytest.mark.parametrize(
    ("place", "name"),
    [(torch, "mm"), (F, "linear"), (torch.Tensor, "numpy"), (nn.Module, "forward"), (torch.linalg, "new")],
    ids=["torch", "functional", "Tensor", "Module", "new"],
)
def test_a_snapshot_names_what_was_replaced_added_or_deleted(place, name, monkeypatch):
    snapshot = TorchSnapshot.take()
    with monkeypatch.context() as patch:
        patch.setattr(place, name, lambda: None, raising=False)
        assert [change.rpartition(".")[2] for change in snapshot.changes()] == [name]
        with pytest.raises(AssertionError, match=rf"torch is not as it was: changed are .*\.{name}"):
            snapshot.check()
    with monkeypatch.context() as patch:
        patch.delattr(torch, "mm")
        assert snapshot.changes() == ["torch.mm"]


# ---- parametrize_rows ----


def test_without_tables_the_rows_are_those_of_ampatch():
    mark = parametrize_rows()
    rows = [row for table in lists.TABLES for row in table.select(torch.__version__).rows]
    assert mark.args[0] == ("path", "row")
    assert [row for _, row in mark.args[1]] == rows
    assert "torch.nn.functional.linear" in mark.kwargs["ids"]


# ---- The fixture ----


@pytest.fixture
def run(pytester):
    """Runs a test file as a user's project has it, and returns what pytest says."""
    pytester.makeconftest('pytest_plugins = ["ampatch.testing.plugin"]')

    def run(code):
        pytester.makepyfile("import torch\n" + textwrap.dedent(code))
        return pytester.runpytest_inprocess("-p", "no:cacheprovider")

    return run


def test_a_project_gets_the_fixture_from_the_plugin_which_closes_and_checks(run, monkeypatch):
    monkeypatch.setattr(torch, "left_behind", None, raising=False)
    result = run(
        """
        def test_fails(amp_session):
            amp_session("O4")
            assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is not torch.bfloat16

        def test_finds_no_session():
            assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float32

        def test_fails_to_open_two(amp_session):
            amp_session("O1")
            amp_session("O4")

        def test_leaves_torch_changed(amp_session):
            amp_session("O4")
            torch.left_behind = 1
        """
    )
    result.assert_outcomes(passed=2, failed=2, errors=1)
    result.stdout.fnmatch_lines(["*a session is open already*"])
    result.stdout.fnmatch_lines(["*torch is not as it was: changed are torch.left_behind*"])


@pytest.mark.parametrize(
    ("options", "imported", "called"),
    [
        ((), torch.float32, torch.float32),
        (("--amp-level=O4",), torch.bfloat16, torch.bfloat16),
        (("--amp-level=O4", "--amp-each-test"), torch.float32, torch.bfloat16),
    ],
)
def test_the_options_of_the_plugin_open_a_session_before_the_import_or_for_each_test(
    pytester, options, imported, called
):
    pytester.makepyfile(
        f"""
        import torch

        def product():
            return torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype

        IMPORTED = product()

        def test_first():
            assert (IMPORTED, product()) == ({imported}, {called})

        def test_second():
            assert product() == {called}
        """
    )
    plugins = ("-p", "ampatch.testing.plugin", "-p", "no:cacheprovider")
    pytester.runpytest_inprocess(*plugins, *options).assert_outcomes(passed=2)
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float32


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_snapshot_has_every_place_of_torch_that_a_session_patches(monkeypatch, level):
    places, replace = {}, Patcher.replace

    def note(self, parent, attribute, replacement, **options):
        places[id(parent)] = parent
        replace(self, parent, attribute, replacement, **options)

    monkeypatch.setattr(Patcher, "replace", note)
    model = torch.nn.Linear(1, 1)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    kept = {id(pkgutil.resolve_name(path)) for path in TorchSnapshot.take().namespaces}
    shared = [place for place in places.values() if isinstance(place, type | types.ModuleType)]
    of_torch = [it for it in shared if (getattr(it, "__module__", None) or it.__name__).startswith("torch")]
    assert len(of_torch) > 3
    assert [place for place in of_torch if id(place) not in kept] == []
