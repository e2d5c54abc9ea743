"""CUDA graphs for tests: real ones on a GPU, and elsewhere graphs that are played on a CPU."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
READS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero")


class Recorder(TorchDispatchMode):
    """Records operations with their tensors, and leaves no trace of having run them.

    As a capture, which computes nothing: what was written is put back, and what was made is not a number.
    To read a value raises.
    """

    def __init__(self):
        super().__init__()
        self.calls, self._made, self._before = [], set(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func._schema.is_mutable:
            for tensor in given:
                self._keep(tensor)
        out = func(*args, **kwargs)
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        new = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self._made |= {tensor.untyped_storage().data_ptr() for tensor in new} - known
        self.calls.append((func, args, kwargs, out))
        return out

    def _keep(self, tensor):
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in self._made and pointer not in self._before:
            storage = tensor.untyped_storage()
            self._before[pointer] = storage, storage.clone()

    def forget(self):
        """Undoes what the operations did."""
        for storage, before in self._before.values():
            storage.copy_(before)
        for _, _, _, out in self.calls:
            for tensor in tree_leaves(out):
                is_made = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
                if is_made and tensor.untyped_storage().data_ptr() in self._made:
                    with torch.no_grad():
                        tensor.detach().fill_(float("nan"))

    def play(self):
        """Runs the operations again, into the same memory."""
        with torch.no_grad():
            for func, args, kwargs, out in self.calls:
                for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, torch.Tensor) and old is not new and old.data_ptr() != new.data_ptr():
                        old.detach().copy_(new)


@pytest.fixture
def simulated_graphs(monkeypatch):
    """Lets CUDAGraph work on a CPU, beneath whatever ampatch puts around its methods later."""
    if torch.cuda.is_available():
        return

    def capture_begin(graph, *args, **kwargs):
        graph.recorder = Recorder()
        graph.recorder.__enter__()

    def capture_end(graph):
        graph.recorder.__exit__(None, None, None)
        graph.recorder.forget()

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", capture_begin)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", capture_end)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: graph.recorder.play())


def capture(function, device):
    """Returns a graph that replays a function, and what the function returned while it was captured."""
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            return graph, function()
    graph = object.__new__(torch.cuda.CUDAGraph)
    graph._tracker = None
    graph.capture_begin()
    try:
        return graph, function()
    finally:
        graph.capture_end()


@contextlib.contextmanager
def side_stream(device):
    """Runs what comes before a capture on another stream, as torch asks for."""
    if device != "cuda":
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
