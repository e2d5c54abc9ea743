"""What published scripts do that a drop-in for apex easily breaks, row by row of docs/apex-behaviour.md."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ampatch.apex import amp
from apex_rows import (
    CAST,
    EVERY_LEVEL,
    INF,
    PATCHED,
    Net,
    X,
    backward,
    changed,
    initialized,
    is_same,
    loss_of,
    make,
    shows,
    step,
)

FULL, HALF = torch.float32, torch.bfloat16


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


class Lookahead:
    """A wrapper that is no Optimizer: every second step it averages with slow weights."""

    def __init__(self, optimizer):
        self.optimizer, self.steps, self.slow = optimizer, 0, {}
        self.zero_grad = optimizer.zero_grad

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        self.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                slow = self.slow.setdefault(param, param.detach().clone())
                if self.steps % 2 == 0:
                    slow.add_(param - slow, alpha=0.5)
                    param.copy_(slow)


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


@shows("patterns-third-party")
@pytest.mark.parametrize("is_given", [True, False], ids=["given", "made after"])
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_a_lookahead_may_be_given_to_initialize_or_made_around_its_optimizer(level, is_given):
    net, optimizer = make()
    lookahead = Lookahead(optimizer)
    given = lookahead if is_given else optimizer
    amp.initialize(net, given, opt_level=level, loss_scale=4.0, verbosity=0)
    with changed(net):
        for _ in range(4):
            lookahead.zero_grad()
            backward(net, given)
            torch.nn.utils.clip_grad_norm_(amp.master_params(given), 1.0)
            lookahead.step()
    net(X)
    for param, stepped in zip(net.parameters(), amp.master_params(given), strict=True):
        assert torch.equal(param, stepped.to(param.dtype))
        assert torch.equal(stepped, lookahead.slow[stepped])


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


# As torch promotes, by a rule of ours, in place, and by the widest of several.
MIXED = {
    "cat": lambda x, y: torch.cat([x, y]),
    "maximum": lambda x, y: torch.maximum(x, y),
    "dot": lambda x, y: torch.dot(x, y),
    "x[mask] = y": lambda x, y: assign(x, y).float(),
    "grid_sample": lambda x, y: F.grid_sample(
        x.expand(1, 1, 3, 3), y[:2].expand(1, 2, 2, 2), align_corners=False
    ),
}


def assign(x, y):
    x = x.clone()
    x[x > -INF] = y
    return x


@shows("patterns-casts-by-hand")
@pytest.mark.parametrize("types", [(FULL, HALF), (HALF, FULL)], ids=["full-half", "half-full"])
@pytest.mark.parametrize("name", MIXED)
def test_mixed_types_are_no_error(name, types):
    x, y = (torch.tensor([0.5, 0.25, 1.0]).to(dtype) for dtype in types)
    expected = MIXED[name](x.float(), y.float())
    initialized("O4")
    found = MIXED[name](x, y)
    assert found.dtype is FULL
    assert torch.equal(found, expected)


# ---- Weights edited between steps ----


def by_copy(weight, value):
    with torch.no_grad():
        weight.copy_(value)


def by_data(weight, value):
    weight.data = value.to(weight.dtype)


def by_data_copy(weight, value):
    weight.data.copy_(value)


@shows("patterns-edited-weights")
@pytest.mark.parametrize("edit", [by_copy, by_data, by_data_copy])
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_an_edit_of_a_weight_between_steps_is_seen_and_trained_on(level, edit):
    by_hand = Net().eval()
    with torch.no_grad():
        for param in by_hand.parameters():
            param.fill_(0.25)
        expected = by_hand(X)
    net, optimizer = initialized(level, loss_scale=4.0)
    net.eval()
    step(net, optimizer)
    for param in net.parameters():
        edit(param, torch.full_like(param, 0.25).float())
    with torch.no_grad():
        # 0.25 and its products are exact in every type, but for BatchNorm's 1 / sqrt(1 + eps).
        torch.testing.assert_close(net(X).float(), expected, rtol=0.01, atol=0.01)
    optimizer.zero_grad()
    step(net, optimizer, 0.0)
    for param in (*net.parameters(), *amp.master_params(optimizer)):
        assert torch.equal(param, torch.full_like(param, 0.25))


@shows("patterns-retain-graph")
@pytest.mark.parametrize("level", [level for level in EVERY_LEVEL if level not in CAST])
def test_a_graph_that_is_kept_gives_the_same_gradients_again(level):
    net, optimizer = initialized(level, loss_scale=4.0)
    loss = loss_of(net)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward(retain_graph=True)
    again = torch.autograd.grad(loss * 4.0, [*net.parameters()])
    assert is_same([grad / 4.0 for grad in again], [param.grad for param in net.parameters()])


@shows("patterns-plain-backward")
@pytest.mark.parametrize("level", PATCHED)
def test_a_plain_backward_now_and_then_trains_on_fresh_casts(level):
    net, optimizer = initialized(level, net=nn.Linear(4, 2, bias=False), lr=1.0, loss_scale=4.0)
    for _ in range(3):
        expected = X.to(PATCHED[level]) @ net.weight.detach().to(PATCHED[level]).T
        output = net(X)
        assert torch.equal(output, expected.to(output.dtype))
        optimizer.zero_grad()
        output.float().sum().backward()  # no scale_loss
        optimizer.step()


# ---- Decorators on what is not torch's ----


@shows("patterns-decorators")
@pytest.mark.parametrize("level", PATCHED)
def test_c_functions_and_bound_methods_are_wrapped(level):
    function = amp.float_function(torch._C._nn.gelu)  # a builtin, as those of extensions are
    net = nn.Sequential(nn.Identity(), nn.Identity())
    net[0].forward = amp.half_function(net[0].forward)
    net[1].forward = amp.float_function(net[1].forward)
    amp.initialize(net, opt_level=level, verbosity=0)
    assert function(X.to(PATCHED[level])).dtype is FULL
    assert net[0](X).dtype is PATCHED[level]
    assert net(X).dtype is FULL


# ---- On a box with a CPU, and beside a GPU ----


@shows("patterns-cpu")
@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_a_small_model_on_the_cpu_trains_beside_one_on_a_gpu(level):
    with FakeTensorMode():  # a GPU that need not be there
        amp.initialize(nn.LayerNorm(4, device="cuda"), opt_level="O1", verbosity=0)
        x = torch.empty(2, 2, device="cuda")
        assert torch.mm(x, x).dtype is torch.float16
    assert torch.mm(X, X.T).dtype is FULL  # casts are for tensors on the GPU
    net, optimizer = initialized(level, loss_scale=4.0)
    with changed(net):
        step(net, optimizer)
    assert net(X).dtype is FULL
