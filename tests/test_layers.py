"""Compiled and traced layers with patched functions."""

import pytest
import torch
from torch import nn

from patched import HALF, full, open_session


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:`torch.jit:FutureWarning")
def test_a_traced_model_keeps_the_casts_of_the_trace():
    model = open_session(nn.Linear(2, 3))
    with torch.no_grad():
        traced = torch.jit.trace(model, full(4, 2))
        assert traced(full(4, 2)).dtype is HALF
