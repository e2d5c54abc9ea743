"""What users asked apex for and never got, row by row of docs/apex-behaviour.md."""

import pytest
import torch
from torch import nn

import ampatch
from ampatch.apex import amp
from apex_rows import (
    EVERY_LEVEL,
    INF,
    MASTERED,
    closure_of,
    initialized,
    shows,
    step,
)

FULL, HALF = torch.float32, torch.bfloat16


@shows("never-cpu", "patterns-cpu")
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_every_level_trains_on_a_cpu(level):
    net, optimizer = initialized(level, loss_scale=4.0)
    net.eval()  # one loss from one epoch to the next
    losses = []
    for _ in range(10):
        losses.append(closure_of(net, optimizer)().item())
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


@shows("never-which-layer")
def test_the_gradients_of_a_skipped_step_show_which_layer_overflowed():
    net, optimizer = initialized("O4", loss_scale="dynamic")
    net.last.register_full_backward_pre_hook(lambda module, grads: tuple(grad * INF for grad in grads))
    step(net, optimizer)
    assert ampatch.step_was_skipped(optimizer)
    bad = [name for name, param in net.named_parameters() if not torch.isfinite(param.grad).all()]
    assert bad[-2:] == ["last.weight", "last.bias"]


class KeptBytes:
    """Counts the bytes that a forward keeps for its backward, but for those of parameters."""

    def __init__(self, net):
        self.of_parameters = {param.untyped_storage().data_ptr() for param in net.parameters()}
        self.count, self.seen = 0, set()

    def keep(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.of_parameters | self.seen:
            self.seen.add(storage.data_ptr())
            self.count += storage.nbytes()
        return tensor


def bytes_kept(level):
    net = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(64, 64), nn.Tanh())])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    kept = KeptBytes(net)
    with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor):
        net(torch.ones(64, 64))
    ampatch.uninitialize()
    return kept.count


@shows("never-why-o2")
@pytest.mark.parametrize("level", MASTERED)
def test_a_half_model_keeps_half_the_bytes_for_its_backward(level):
    full, half = bytes_kept("O0"), bytes_kept(level)
    # All but the float32 input, which is cast, and the float32 output.
    assert half < 0.6 * full
    assert half < bytes_kept("O4")
