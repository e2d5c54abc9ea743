"""Writes to weights through `.data`, which leave no trace on the tensor itself."""

import contextlib
import ctypes
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ampatch as amp
from ampatch import cast_cache

X = torch.ones(2, 3)


def open_model(level):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return model, optimizer


def train(model, optimizer):
    with amp.scale_loss(model(X).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_weights_that_are_clipped_through_data_after_each_step_stay_clipped(level):
    model, optimizer = open_model(level)
    oracle, oracle_optimizer = nn.Linear(3, 3), None
    oracle.load_state_dict(model.state_dict())
    oracle_optimizer = torch.optim.SGD(oracle.parameters(), lr=0.5)
    for _ in range(3):
        train(model, optimizer)
        oracle(X).sum().backward()
        oracle_optimizer.step()
        oracle_optimizer.zero_grad()
        for param in [*model.parameters(), *oracle.parameters()]:
            param.data.clamp_(-0.25, 0.25)  # a number that every half type holds
    for saved, expected in zip(model.state_dict().values(), oracle.state_dict().values(), strict=True):
        assert torch.equal(saved, expected)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_write_through_data_between_two_forwards_of_one_iteration_is_seen(level):
    model, _ = open_model(level)
    first = model(X)
    model.weight.data.zero_()
    model.bias.data.zero_()
    second = model(X)
    assert first.abs().sum() > 0
    assert second.abs().sum() == 0


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_master_keeps_its_precision_where_data_is_only_read(level):
    model, optimizer = open_model(level)
    before = [param.clone() for param in amp.master_params(optimizer)]
    assert not torch.equal(before[0], before[0].to(model.weight.dtype).float())
    norms = [param.data.float().norm() for param in model.parameters()]
    optimizer.step()
    assert all(norms)
    for param, earlier in zip(amp.master_params(optimizer), before, strict=True):
        assert torch.equal(param, earlier)


def test_parameters_are_plain_torchs_after_uninitialize():
    assert "data" not in vars(torch.Tensor)
    open_model("O2")
    assert "data" in vars(torch.Tensor)
    amp.uninitialize()
    assert "data" not in vars(nn.Parameter)


def read_by_numpy(weight):
    return weight.detach().numpy()


def read_by_asarray(weight):
    return np.asarray(weight.detach())


def read_a_row(weight):
    return weight.detach()[1:].numpy()


def read_by_dlpack(weight):
    return torch.from_dlpack(weight.detach())


@pytest.mark.parametrize("is_held", [False, True], ids=["dropped", "held"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("read", [read_by_numpy, read_by_asarray, read_a_row, read_by_dlpack])
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_write_through_an_array_between_two_forwards_is_seen(level, read, mode, is_held):
    model, _ = open_model(level)
    array = read(model.weight) if is_held else None
    for value in (0.0, 2.0, -1.0):
        with mode():
            model(X)
        (array if is_held else read(model.weight))[:] = value
        with mode():
            result = model(X)
        oracle = X @ model.weight.detach().T + model.bias.detach()
        torch.testing.assert_close(result.float(), oracle, rtol=0.01, atol=0.01)


def test_arrays_are_made_as_before_while_numpy_is_watched():
    values = {dtype: torch.arange(3).to(dtype) for dtype in (torch.float32, torch.int64, torch.bool)}
    before = [tensor.numpy() for tensor in values.values()]
    open_model("O4")
    for tensor, array in zip(values.values(), before, strict=True):
        assert tensor.numpy() is not array
        assert np.shares_memory(tensor.numpy(), array)
        assert np.array_equal(torch.Tensor.numpy(tensor), array)
    with pytest.raises(RuntimeError, match="detach"):
        torch.ones(2, requires_grad=True).numpy()
    assert torch.ones(2, requires_grad=True).numpy(force=True).tolist() == [1, 1]
    compiled = torch.compile(lambda x: torch.from_numpy(x.numpy() + 1), backend="eager")
    assert compiled(torch.ones(2)).tolist() == [2, 2]


# ---- CUDA graphs ----


class PlayedGraph(TorchDispatchMode):
    """A CUDA graph played on a CPU: what is captured is computed by its replays, and until then is NaN."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def capture_begin(self, *args, **kwargs):
        self.__enter__()

    def capture_end(self):
        self.__exit__(None, None, None)
        given, made = {}, {}
        for _, args, kwargs, result in self.calls:
            given.update(memory_of(args, kwargs))
            made.update({key: memory for key, memory in memory_of(result).items() if key not in given})
        for memory in made.values():
            ctypes.memset(memory.data_ptr(), 0xFF, memory.nbytes())

    def replay(self):
        with torch.no_grad(), amp.disable_casts():
            for func, args, kwargs, result in self.calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.detach().copy_(new)


def memory_of(*trees):
    tensors = [leaf for leaf in tree_leaves(trees) if isinstance(leaf, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}


@contextlib.contextmanager
def capture(graph, **kwargs):
    graph.capture_begin(**kwargs)
    try:
        yield
    finally:
        graph.capture_end()


@pytest.fixture
def played(monkeypatch):
    """Has torch capture and replay graphs without a GPU."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PlayedGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    for name in ("Stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda.graphs, "graph_pool_handle", lambda: None)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    """Where graphs are: played on a CPU, and real ones."""
    if request.param == "cpu":
        request.getfixturevalue("played")
    return request.param


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
    monkeypatch.setattr(cast_cache, "_find_device", lambda parameter: 0)
    monkeypatch.setattr(cast_cache, "find_stream", lambda device: threading.get_ident())
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


def test_a_write_to_one_of_several_weights_in_one_buffer_is_seen():
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    flat = torch.ones(18)
    first.weight.data, second.weight.data = flat[:9].view(3, 3), flat[9:].view(3, 3)
    amp.initialize([first, second], opt_level="O4", verbosity=0)
    kept = first(X), second(X)
    for layer in (first, second):
        layer.weight[0].data.zero_()
        assert layer(X)[:, 0].abs().sum() == 0
    assert len(kept) == 2
