"""What published scripts do that a drop-in for apex easily breaks, row by row of docs/apex-behaviour.md."""

import pytest
import torch

from ampatch.apex import amp
from apex_rows import (
    CAST,
    EVERY_LEVEL,
    PATCHED,
    X,
    backward,
    changed,
    initialized,
    is_same,
    loss_of,
    shows,
)

FULL = torch.float32


# ---- Steps ----


class AllocatesEarly(torch.optim.Optimizer):
    """A third-party Adam that makes its state in the constructor, and has its own step and zero_grad."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {"mean": torch.zeros_like(param), "steps": 0}
        self.calls = []

    @torch.no_grad()
    def step(self, closure=None):
        self.calls.append("step")
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                assert state["mean"].dtype is param.dtype
                state["mean"].mul_(0.9).add_(param.grad, alpha=0.1)
                state["steps"] += 1
                param.sub_(group["lr"] * state["mean"])

    def zero_grad(self, set_to_none=True):
        self.calls.append("zero_grad")
        super().zero_grad(set_to_none)


@shows("patterns-third-party", "patterns-early-state", "never-cpu")
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_an_optimizer_that_makes_its_state_at_once_and_overrides_everything_trains(level):
    net, optimizer = initialized(level, AllocatesEarly, loss_scale=4.0)
    by_hand = [param.detach().clone().requires_grad_() for param in amp.master_params(optimizer)]
    plain = AllocatesEarly(by_hand, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        backward(net, optimizer)
        for param, master in zip(by_hand, amp.master_params(optimizer), strict=True):
            param.grad = master.grad.clone()
        with changed(net):
            optimizer.step()
        plain.step()
    assert is_same(amp.master_params(optimizer), by_hand)
    assert optimizer.calls == ["zero_grad", "step"] * 3
    for param in amp.master_params(optimizer):
        assert optimizer.state[param]["steps"] == 3
        assert optimizer.state[param]["mean"].dtype is (torch.float16 if level == "O3" else FULL)


# ---- Casts by hand ----


@shows("patterns-casts-by-hand")
@pytest.mark.parametrize("level", PATCHED)
def test_a_batchnorm_and_inputs_that_a_script_casts_itself_are_taken(level):
    net, _ = initialized(level)
    net.eval()
    expected = net(X).float()
    net.norm.to(PATCHED[level])
    for x in (X, X.half()):
        assert net(x).dtype is PATCHED[level]
        torch.testing.assert_close(net(x).float(), expected, atol=0.05, rtol=0)


@shows("patterns-casts-by-hand")
def test_isinstance_of_a_half_tensor_type_still_answers():
    initialized("O1")
    q = torch.mm(X, X.T)
    assert isinstance(q, torch.HalfTensor)
    assert not isinstance(q.cpu(), torch.HalfTensor)
    assert isinstance(q.cpu(), torch.FloatTensor)
    assert not isinstance(q, torch.cuda.HalfTensor)  # it is on the CPU


# ---- Graphs that are kept ----


@shows("patterns-retain-graph")
@pytest.mark.parametrize("level", [level for level in EVERY_LEVEL if level not in CAST])
def test_a_graph_that_is_kept_gives_the_same_gradients_again(level):
    net, optimizer = initialized(level, loss_scale=4.0)
    loss = loss_of(net)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward(retain_graph=True)
    again = torch.autograd.grad(loss * 4.0, [*net.parameters()])
    assert is_same([grad / 4.0 for grad in again], [param.grad for param in net.parameters()])
