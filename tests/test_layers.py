"""Layers of several kinds with patched functions: recurrent networks, attention, compiled models."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import ampatch as amp
from patched import DOUBLE, FULL, HALF, LEVELS, full, half, open_session

# ---- Recurrent networks ----

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

RECURRENT = {
    "lstm": lambda: nn.LSTM(4, 6),
    "lstm, both directions": lambda: nn.LSTM(4, 6, bidirectional=True),
    "lstm with projection": lambda: nn.LSTM(4, 6, proj_size=3),
    "gru": lambda: nn.GRU(4, 6, batch_first=True),
    "rnn": lambda: nn.RNN(4, 6),
    "rnn with relu": lambda: nn.RNN(4, 6, nonlinearity="relu", bias=False),
}
CELLS = {
    "lstm cell": lambda: nn.LSTMCell(4, 6),
    "gru cell": lambda: nn.GRUCell(4, 6),
    "rnn cell": lambda: nn.RNNCell(4, 6),
    "rnn cell with relu": lambda: nn.RNNCell(4, 6, nonlinearity="relu"),
}


def leaves(value):
    return [value] if isinstance(value, torch.Tensor) else [leaf for item in value for leaf in leaves(item)]


def assert_same(found, expected):
    for mine, theirs in zip(leaves(found), leaves(expected), strict=True):
        assert mine.dtype is theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("given", ["float32", "half"])
@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_network_runs_in_half_on_float32_weights(name, given, opt_level):
    dtype = LEVELS[opt_level]
    model, x = RECURRENT[name](), torch.randn(3, 2, 4).to(dtype)
    expected = copy.deepcopy(model).to(dtype)(x)
    open_session(model, opt_level)
    found = model(x.float() if given == "float32" else x)
    assert_same(found, expected)
    found[0].float().sum().backward()
    assert {param.grad.dtype for param in model.parameters()} == {FULL}


@pytest.mark.parametrize("state", [FULL, HALF], ids=str)
@pytest.mark.parametrize("given", [FULL, HALF], ids=str)
def test_a_recurrent_network_takes_its_state_in_any_type(given, state):
    model = open_session(nn.LSTM(4, 6))
    hidden = (torch.zeros(1, 2, 6, dtype=state), torch.zeros(1, 2, 6, dtype=state))
    output, last = model(torch.randn(3, 2, 4).to(given), hidden)
    assert {tensor.dtype for tensor in leaves((output, last))} == {HALF}
    model(torch.randn(3, 2, 4).to(given), last)


@pytest.mark.parametrize("given", [FULL, HALF], ids=str)
@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_network_takes_a_packed_sequence(name, given):
    model = RECURRENT[name]()
    x = pack_padded_sequence(torch.randn(3, 2, 4).to(HALF), torch.tensor([3, 1]))
    expected = copy.deepcopy(model).to(HALF)(x)
    open_session(model)
    found = model(x._replace(data=x.data.to(given)))
    assert_same(found[0].data, expected[0].data)
    assert_same(found[1], expected[1])


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("given", ["float32", "half"])
@pytest.mark.parametrize("name", CELLS)
def test_a_recurrent_cell_runs_in_half_on_float32_weights(name, given, opt_level):
    dtype = LEVELS[opt_level]
    model, x = CELLS[name](), torch.randn(2, 4).to(dtype)
    expected = copy.deepcopy(model).to(dtype)(x)
    open_session(model, opt_level)
    assert_same(model(x.float() if given == "float32" else x), expected)


def test_a_recurrent_network_behind_a_linear_layer_works():
    model = nn.Sequential(nn.Linear(4, 4), nn.GRU(4, 6))
    open_session(model)
    assert model(torch.randn(3, 2, 4))[0].dtype is HALF


def test_a_recurrent_network_still_checks_the_shape_of_its_input():
    model = open_session(nn.LSTM(4, 6))
    with pytest.raises(RuntimeError, match=r"input\.size"):
        model(half(3, 2, 5))


def test_a_recurrent_network_still_refuses_float64():
    model = open_session(nn.LSTM(4, 6))
    with pytest.raises((ValueError, RuntimeError), match="dtype"):
        model(torch.randn(3, 2, 4, dtype=DOUBLE))


def test_a_recurrent_network_with_casts_off_is_plain_torchs():
    model = nn.LSTM(4, 6)
    x = full(3, 2, 4)
    expected = model(x)
    open_session(model)
    with amp.disable_casts():
        assert_same(model(x), expected)
        with pytest.raises((ValueError, RuntimeError), match="dtype"):
            model(x.to(HALF))


# ---- Attention ----


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("given", [FULL, HALF], ids=str)
def test_attention_in_training_runs_in_half(given, need_weights):
    model = open_session(nn.MultiheadAttention(8, 2, batch_first=True))
    x = torch.randn(2, 3, 8).to(given)
    output, weights = model(x, x, x, need_weights=need_weights)
    assert output.dtype is HALF
    assert weights is None or weights.dtype is FULL
    output.float().sum().backward()
    assert {param.grad.dtype for param in model.parameters()} == {FULL}


MASKS = {
    "float": torch.zeros(3, 3),
    "half": torch.zeros(3, 3, dtype=HALF),
    "bool": torch.zeros(3, 3, dtype=torch.bool),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("given", [FULL, HALF], ids=str)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_attention_takes_masks(given, mask):
    model = open_session(nn.MultiheadAttention(8, 2, batch_first=True))
    x = torch.randn(2, 3, 8).to(given)
    assert model(x, x, x, attn_mask=MASKS[mask])[0].dtype is HALF


@pytest.mark.parametrize("given", [FULL, HALF], ids=str)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_attention_in_evaluation_works_for_either_input(given, mode):
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        expected = model(x, x, x)[0]
    open_session(model)
    with mode():
        found = model(x.to(given), x.to(given), x.to(given))[0]
    # Outputs are of order 1, each a sum of 8 products in bfloat16 (8 bits) after four matrix products.
    assert (found.float() - expected).abs().max() < 0.05


@pytest.mark.parametrize("given", [FULL, HALF], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_transformer_layer_works_for_either_input(given, training, mode):
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(training)
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        expected = model(x)
    open_session(model)
    with mode():
        found = model(x.to(given))
    # Layer norms keep the outputs at order 1; bfloat16 rounds the inputs and six products to 8 bits.
    assert (found.float() - expected).abs().max() < 0.1


# ---- Compiled and traced ----

# The first compilation puts a tag on torch.nn.Module for good: before any fixture looks.
torch._dynamo.mutation_guard.install_generation_tagging_init()


def test_casts_survive_torch_compile():
    model = open_session(nn.Sequential(nn.Linear(2, 3), nn.Softmax(dim=1)))
    x = full(4, 2)
    expected = model(x)
    seen = []

    def backend(graph, inputs):
        values = [node.meta.get("example_value") for node in graph.graph.nodes if node.op != "placeholder"]
        seen.extend(value.dtype for value in values if isinstance(value, torch.Tensor))
        return graph.forward

    torch._dynamo.reset()
    found = torch.compile(model, backend=backend)(x)
    assert HALF in seen
    assert torch.equal(found, expected)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_model_keeps_the_casts_of_the_trace():
    model = open_session(nn.Linear(2, 3))
    with torch.no_grad():
        traced = torch.jit.trace(model, full(4, 2))
        assert traced(full(4, 2)).dtype is HALF
