"""Casts and CUDA graphs: a graph makes its own, and leaves none to others."""

import ctypes
import threading

import pytest
import torch
from torch import nn

import ampatch as amp
from ampatch.casts import cast as cast_state
from ampatch.casts import kept_cast
from cuda_graphs import PlayedGraph

X = torch.ones(2, 3)


def by_hand(model, x, half):
    """What linear layers and ReLUs give at O1 or O4, by ops that no patch sees."""
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                x = torch.ops.aten.linear(x.to(half), layer.weight.to(half), layer.bias.to(half))
            elif isinstance(layer, nn.ReLU):
                x = torch.ops.aten.relu(x)
    return x


def assert_same(found, expected):
    torch.testing.assert_close(found.detach().float(), expected.float(), rtol=0.02, atol=0.02)


def make_chain(level, device):
    part = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model = nn.Sequential(part, nn.Linear(3, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
    return model, optimizer


def write_weights(model):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(-2)


HALVES = pytest.mark.parametrize(("level", "half"), [("O1", torch.float16), ("O4", torch.bfloat16)])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("is_part", [False, True], ids=["whole", "part"])
@HALVES
def test_a_captured_graph_follows_the_weights_and_leaves_no_cast_to_others(
    device, level, half, is_part, mode
):
    model, _ = make_chain(level, device)
    model, x = model[0] if is_part else model, X.to(device)
    graph = torch.cuda.CUDAGraph()
    with mode():
        kept = model(x)  # whose casts would be constants of the graph
        with torch.cuda.graph(graph):
            captured = model(x)
        assert_same(model(x), by_hand(model, x, half))
        for _ in range(2):
            write_weights(model)
            graph.replay()
            assert_same(captured, by_hand(model, x, half))
    assert kept.shape == captured.shape


def make_graphed_part(model, x):
    x = x.to(model[0][0].weight.dtype)  # a model's own hooks cast what it is given, and its parts have none
    model[0] = torch.cuda.make_graphed_callables(model[0], (x,))
    return model


def make_graphed_model(model, x):
    return torch.cuda.make_graphed_callables(nn.Sequential(model), (x,))


# Torch says it of models without ampatch as well.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize("make_graphed", [make_graphed_part, make_graphed_model])
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_graphed_callables_train_as_they_do_without_graphs(device, level, make_graphed):
    def train(prepare=None):
        torch.manual_seed(0)
        model, optimizer = make_chain(level, device)
        x, target = torch.randn(4, 3, device=device), torch.ones(4, 3, device=device)
        graphed = prepare(model, torch.randn_like(x)) if prepare else model
        losses = []
        for _ in range(5):
            loss = (graphed(x).float() - target).pow(2).mean()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        amp.uninitialize()
        return losses

    expected = train()
    assert expected[-1] < 0.8 * expected[0]
    assert train(make_graphed) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_graphs_of_a_model_with_hooks_are_refused_with_the_way_out(level):
    model = amp.initialize(nn.Linear(3, 3), opt_level=level, verbosity=0)
    for given in (model, (nn.Identity(), model)):
        with pytest.raises(amp.AmpValueError, match=r"Linear: give it torch\.nn\.Sequential\(model\)"):
            torch.cuda.make_graphed_callables(given, ((X,), (X,)))


def test_a_capture_that_fails_leaves_no_cast(played, monkeypatch):
    def fail(graph):
        original(graph)
        raise RuntimeError("invalidated")

    original = PlayedGraph.capture_end
    monkeypatch.setattr(PlayedGraph, "capture_end", fail)
    model, _ = make_chain("O4", "cpu")
    with pytest.raises(RuntimeError, match="invalidated"), torch.cuda.graph(PlayedGraph()):
        model(X)
    assert_same(model(X), by_hand(model, X, torch.bfloat16))


def test_what_another_thread_casts_during_a_capture_is_no_constant_of_the_graph(played, monkeypatch):
    monkeypatch.setattr(cast_state, "_find_device", lambda parameter: 0)
    for module in (cast_state, kept_cast):
        monkeypatch.setattr(module, "find_stream", lambda device: threading.get_ident())
    model, _ = make_chain("O4", "cpu")
    graph, kept = PlayedGraph(), []
    with torch.cuda.graph(graph):
        thread = threading.Thread(target=lambda: kept.append(model(X)))
        thread.start()
        thread.join()
        captured = model(X)
    write_weights(model)
    graph.replay()
    assert_same(captured, by_hand(model, X, torch.bfloat16))


def test_weights_that_a_replayed_graph_wrote_are_seen(played):
    """As the step of an optimizer in a CUDA graph, played here by a write to memory."""
    model = nn.Linear(3, 3, bias=False)
    weight = model.weight
    amp.initialize(model, opt_level="O4", verbosity=0)
    graph = PlayedGraph()
    graph.calls = [(ctypes.memset, (weight.data_ptr(), 0, weight.nbytes), {}, None)]
    with torch.no_grad():
        assert model(X).abs().sum() > 0
        graph.replay()
        assert model(X).abs().sum() == 0


@pytest.mark.cuda
def test_weights_that_a_replayed_graph_writes_are_seen_by_an_evaluation():
    model = nn.Linear(3, 3).cuda()
    amp.initialize(model, opt_level="O4", verbosity=0)
    x, ones = X.cuda(), torch.ones(3, 3, device="cuda")
    weight = model.weight.detach()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        weight.add_(ones)
    for _ in range(3):
        with torch.no_grad():
            model(x)
        graph.replay()
        with torch.no_grad():
            found = model(x).float()
        oracle = torch.nn.functional.linear(x.bfloat16(), model.weight.bfloat16(), model.bias.bfloat16())
        torch.testing.assert_close(found, oracle.float(), rtol=0.01, atol=0.01)
