"""CUDA graphs for tests: real ones on a GPU, and graphs that are played on a CPU."""

import contextlib
import ctypes

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ampatch as amp

READS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero")


class PlayedGraph(TorchDispatchMode):
    """A CUDA graph played on a CPU: what is captured is computed by its replays alone.

    So what a capture made is NaN until then, and what it wrote is put back; to read a value raises.
    """

    def __init__(self):
        super().__init__()
        self.calls, self._before, self._made = [], {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        given = memory_of(args, kwargs)
        if func._schema.is_mutable:
            for key, memory in given.items():
                if key not in self._made and key not in self._before:
                    self._before[key] = memory, memory.clone()
        result = func(*args, **(kwargs or {}))
        self._made |= {key: memory for key, memory in memory_of(result).items() if key not in given}
        if "empty" not in func.overloadpacket.__name__:  # which writes nothing, and is no part of a graph
            self.calls.append((func, args, kwargs or {}, result))
        return result

    def capture_begin(self, *args, **kwargs):
        self.__enter__()

    def capture_end(self):
        self.__exit__(None, None, None)
        for memory, before in self._before.values():
            memory.copy_(before)
        for memory in self._made.values():
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
def record(graph, **kwargs):
    graph.capture_begin(**kwargs)
    try:
        yield
    finally:
        graph.capture_end()


@pytest.fixture
def played(monkeypatch):
    """Has torch capture and replay graphs without a GPU."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PlayedGraph)
    monkeypatch.setattr(torch.cuda, "graph", record)
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
