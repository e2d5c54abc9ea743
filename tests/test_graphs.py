"""torch.export, torch.fx and torch.jit while torch is patched, and of initialized models."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import ampatch as amp
from helpers import assert_same_bits, needs_torch
from patched import LEVELS, open_session

# torch 2.13 calls them deprecated; scripts that use them are what is tested here.
SCRIPTS = pytest.mark.filterwarnings("ignore:.*torch.jit.* (is|are) (deprecated|not supported).*")
CAST_LEVELS = ["O2", "O3", "O5"]
# Hooks note in a graph where its parts begin, and undo it where they end; strict export tells of any write.
SIDE_EFFECTS = pytest.mark.filterwarnings(
    r"ignore:While compiling, we found certain side .*\.thread:UserWarning"
)


HOOKED = needs_torch("2.9", "strict export of a class with forward hooks, whoever registered them")


def strict(test):
    ways = [pytest.param(True, id="strict", marks=HOOKED), pytest.param(False, id="non-strict")]
    return SIDE_EFFECTS(pytest.mark.parametrize("strict", ways)(test))


class Net(nn.Module):
    """Functions, methods, an operator and modules, with a part for `keep_fp32`."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4), nn.LayerNorm(4)
        self.weight = nn.Parameter(torch.rand(4, 4))

    def forward(self, x):
        y = torch.relu(self.norm(self.first(x)))
        y = torch.matmul(F.linear(y, self.weight), self.weight) @ self.weight
        return F.softmax(y, dim=-1).log_softmax(-1)


def open_net(level, **kwargs):
    model = Net()
    open_session(model, level, **kwargs)
    return model


def x_of(rows=2):
    return torch.linspace(-1, 1, 3 * rows).reshape(rows, 3)


# ---- torch.export ----


@pytest.mark.exhaustive(keep=2)
@strict
@pytest.mark.parametrize("level", ["O0", "O2", "O4"])
def test_an_exported_model_computes_what_the_model_does(level, strict):
    model = open_net(level, keep_fp32="first")
    rows = {0: torch.export.Dim("rows", min=2)}
    program = torch.export.export(model, (x_of(),), dynamic_shapes=(rows,), strict=strict)
    for count in (2, 5):
        assert_same_bits([program.module()(x_of(count))], [model(x_of(count))])


@strict
@pytest.mark.parametrize("level", LEVELS)
def test_functions_that_are_off_stay_uncast_in_an_exported_graph(level, strict):
    class Off(nn.Module):
        def forward(self, x):
            with amp.disable_casts():
                return torch.matmul(x, x.T) @ F.softmax(x.half(), -1).float()

    open_session(opt_level=level)
    program = torch.export.export(Off(), (x_of(),), strict=strict)
    found = program.module()(x_of())
    assert found.dtype is torch.float32
    assert torch.equal(found, Off()(x_of()))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11, once
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_an_exported_model_keeps_its_casts_after_uninitialize_saved_or_not(level):
    model = open_net(level)
    expected = model(x_of())
    program, file = torch.export.export(model, (x_of(),), strict=False), io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    amp.uninitialize()
    for kept in (torch.export.load(file), *([program] if level in LEVELS else [])):
        assert torch.equal(kept.module()(x_of()), expected)
    assert not torch.equal(model(x_of()), expected)


# ---- torch.fx ----


def targets(graph_module):
    return [node.target for node in graph_module.graph.nodes if node.op == "call_function"]


def leaf(x):
    return F.softmax(x, dim=-1)


torch.fx.wrap("leaf")


def test_a_symbolic_trace_names_the_originals_and_what_fx_wraps():
    expected = targets(torch.fx.symbolic_trace(Net()))
    open_session()
    assert targets(torch.fx.symbolic_trace(Net())) == expected
    traced = torch.fx.symbolic_trace(lambda x: leaf(x) @ x.t())
    assert leaf in targets(traced)
    assert torch.equal(traced(x_of()), leaf(x_of()) @ x_of().t())


def test_a_function_that_looks_at_what_it_is_given_is_traced_as_without_a_session():
    model = lambda x: F.local_response_norm(x[None], 2)
    expected = targets(torch.fx.symbolic_trace(model))
    open_session()
    assert targets(torch.fx.symbolic_trace(model)) == expected


@pytest.mark.parametrize("is_initialized", [True, False], ids=["initialized", "another"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_symbolic_trace_runs_with_casts_and_without_after_uninitialize(level, is_initialized):
    model = Net()
    uncast = model(x_of())
    open_session(model if is_initialized else None, level)
    traced = torch.fx.symbolic_trace(model)
    expected = model(x_of())
    assert not torch.equal(expected, uncast)
    assert torch.equal(traced(x_of()), expected)
    amp.uninitialize()
    assert torch.equal(traced(x_of()), uncast)
    traced.recompile()
    assert torch.equal(traced(x_of()), uncast)


@pytest.mark.parametrize("level", LEVELS)
def test_a_graph_module_that_is_initialized_computes_what_its_model_does(level):
    traced = torch.fx.symbolic_trace(Net())
    code = traced.code
    model = copy.deepcopy(traced)
    oracle = Net()
    oracle.load_state_dict(traced.state_dict())
    open_session([traced, oracle], level)
    assert torch.equal(traced(x_of()), oracle(x_of()))
    amp.uninitialize()
    assert traced.code == code
    assert torch.equal(traced(x_of()), model(x_of()))


@SCRIPTS
@pytest.mark.parametrize("record", [torch.jit.trace, lambda function, x: make_fx(function)(x)])
def test_what_torch_refuses_in_half_is_not_tried_while_it_is_recorded(record):
    """A call that fails stays in what make_fx recorded, and ends the process in a trace."""
    x = torch.eye(3) + 0.1 * torch.rand(3, 3)
    expected = torch.linalg.inv(x.bfloat16().float())
    open_session(opt_level="O4")
    assert torch.equal(record(lambda x: torch.linalg.inv(x.bfloat16()), x)(x), expected)


def test_make_fx_takes_no_cast_from_the_cache_for_a_constant():
    model = open_session(nn.Linear(3, 2))
    pending = model(x_of())
    graph = make_fx(model)(x_of())
    with torch.no_grad():
        model.weight.add_(1)
    assert not torch.equal(pending, model(x_of()))
    assert torch.equal(graph(x_of()), model(x_of()))


# ---- torch.jit.trace ----


@SCRIPTS
@pytest.mark.parametrize("level", ["O0", "O2", "O4"])
def test_a_traced_model_computes_what_the_model_does_and_follows_its_weights(level):
    model = open_net(level, keep_fp32="first")
    waiting = model(x_of(4))  # keeps the casts of its weights in the cache
    traced = torch.jit.trace(model, x_of(), check_trace=True)
    for _ in range(2):
        assert_same_bits([traced(x_of(4))], [model(x_of(4))])
        with torch.no_grad():
            model.weight.mul_(-2)
    assert waiting.requires_grad


@SCRIPTS
@pytest.mark.parametrize("level", [*LEVELS, *CAST_LEVELS])
def test_a_traced_model_keeps_its_casts_after_uninitialize_saved_and_frozen(level):
    model = open_net(level).eval()
    expected = model(x_of())
    traced, file = torch.jit.trace(model, x_of()), io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    frozen = torch.jit.freeze(traced)
    amp.uninitialize()
    for kept in (torch.jit.load(file), frozen, *([traced] if level in LEVELS else [])):
        assert torch.equal(kept(x_of()), expected)


# ---- torch.jit.script ----


@SCRIPTS
@pytest.mark.parametrize("level", ["O0", *LEVELS])
def test_a_scripted_model_or_part_runs_uncast(level):
    model = Net()
    expected = model(x_of()), model.first(x_of())
    open_session(model, level)
    assert torch.equal(torch.jit.script(model)(x_of()), expected[0])
    assert torch.equal(torch.jit.script(model.first)(x_of()), expected[1])


@SCRIPTS
@pytest.mark.parametrize("level", CAST_LEVELS)
def test_a_scripted_half_model_takes_half_inputs(level):
    model = open_net(level)
    half = model.weight.dtype
    with amp.disable_casts():
        expected = model.forward(x_of().to(half))
    assert_same_bits([torch.jit.script(model)(x_of().to(half))], [expected.to(half)])


@SCRIPTS
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_scripting_a_model_says_once_that_it_runs_uncast_and_leaves_its_hooks(level, caplog):
    model = open_net(level, keep_fp32="first")
    expected = model(x_of())
    before = [list(part._forward_hooks.items()) for part in model.modules()]
    for _ in range(2):
        torch.jit.script(model)
    assert [list(part._forward_hooks.items()) for part in model.modules()] == before
    assert torch.equal(model(x_of()), expected)
    said = [record.message for record in caplog.records if "uncast" in record.message]
    assert len(said) == (level != "O0")
    assert all(text.startswith("torch.jit.script(Net): scripted code runs uncast") for text in said)


@SCRIPTS
def test_users_hooks_are_scripted():
    def double(self, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (inputs[0] * 2,)

    model = nn.Linear(3, 2)
    model.register_forward_pre_hook(double)
    expected = model(x_of())
    open_session(model)
    assert torch.equal(torch.jit.script(model)(x_of()), expected)


def product(x):
    return torch.matmul(x, x.t()) @ x


def normalize(x):
    return F.layer_norm(F.softmax(x, dim=-1), [3])


def contract(x):
    return torch.tensordot(x, x, dims=[[1], [1]]) / torch.norm(x)


def resize(x):
    return F.interpolate(x[None], scale_factor=2.0)


def factorize(x):
    return torch.lu(x @ x.t())[0]


@pytest.mark.exhaustive(keep=4)
@SCRIPTS
@pytest.mark.filterwarnings("ignore:torch.lu is deprecated", "ignore:.*empty non-base types")
@pytest.mark.parametrize("is_traced", [False, True], ids=["written", "traced"])
@pytest.mark.parametrize("function", [product, normalize, contract, resize, factorize])
def test_scripted_functions_run_uncast_in_a_session_and_after_it(function, is_traced):
    """The last three scripts choose by their arguments."""
    expected, softmax = function(x_of()), F.softmax(x_of(), -1)
    for _ in range(2):
        open_session(opt_level="O1")
        assert torch.equal(torch.jit.script(F.softmax)(x_of(), -1), softmax)
        given = torch.fx.symbolic_trace(function) if is_traced else function
        assert torch.equal(torch.jit.script(given)(x_of()), expected)
        amp.uninitialize()
        assert torch.equal(torch.jit.script(given)(x_of()), expected)


class ScriptsInside(nn.Module):
    """A part is scripted before initialize, as published detection models have it."""

    def __init__(self):
        super().__init__()
        self.first, self.scripted = nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 2))

    def forward(self, x):
        return self.scripted(self.first(x).float())


@SCRIPTS
@pytest.mark.parametrize("options", [{}, {"cast_model_outputs": torch.float32}])
@pytest.mark.parametrize("level", LEVELS)
def test_a_scripted_part_of_an_initialized_model_runs_uncast_which_is_said(level, options, caplog):
    model = open_session(ScriptsInside(), level, **options)
    assert "module 'scripted' is scripted: scripted code runs uncast" in caplog.text
    assert model.first(x_of()).dtype is LEVELS[level]
    assert model(x_of()).dtype is torch.float32


# ---- torch.func.functional_call ----


def test_a_call_that_fails_leaves_the_code_of_a_graph_module_as_it_was():
    class Failing(amp.Observer):
        def on_initialize(self, policy):
            raise ValueError("no more")

    module = torch.fx.symbolic_trace(Net())
    before = module.code
    open_session(nn.Linear(1, 1))
    with amp.observe(Failing()), pytest.raises(ValueError, match="no more"):
        open_session(module)
    assert module.code == before
    open_session(module)
    assert module.code != before
    amp.uninitialize()
    assert module.code == before
