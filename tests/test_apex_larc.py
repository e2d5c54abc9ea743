"""Layer-wise adaptive rates: `apex.parallel.LARC`."""

import copy
import pickle

import pytest
import torch
from torch import nn

import ampatch as amp
from ampatch.apex.parallel import LARC
from apex_rows import shows


def reference_step(params, grads, buffers, lr, momentum, decay, trust, eps, clip):
    """SGD with momentum after LARC, from the paper, in plain numbers."""
    for param, grad, buffer in zip(params, grads, buffers, strict=True):
        norm, grad_norm = param.norm().item(), grad.norm().item()
        if norm != 0 and grad_norm != 0:
            rate = trust * norm / (grad_norm + decay * norm + eps)
            rate = min(rate / lr, 1.0) if clip else rate
            grad = rate * (grad + decay * param)
        buffer.mul_(momentum).add_(grad)
        param.sub_(lr * buffer)


@pytest.mark.parametrize("clip", [True, False], ids=["LARC", "LARS"])
@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("lr", [0.001, 0.5])
def test_larc_steps_as_the_paper_says(clip, decay, lr):
    params = [torch.randn(4, 3, dtype=torch.float64).requires_grad_() for _ in range(3)]
    with torch.no_grad():
        params[1].zero_()
    expected = [param.detach().clone() for param in params]
    buffers = [torch.zeros_like(param) for param in expected]
    inner_optimizer = torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=decay)
    optimizer = LARC(inner_optimizer, trust_coefficient=0.1, clip=clip, eps=1e-6)
    for step in range(3):
        grads = [torch.randn(4, 3, dtype=torch.float64) for _ in params]
        if step == 1:
            grads[2].zero_()
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        reference_step(expected, grads, buffers, lr, 0.9, decay, 0.1, 1e-6, clip)
    for param, reference in zip(params, expected, strict=True):
        # The norms of float64 are sums in another order.
        torch.testing.assert_close(param.detach(), reference, rtol=1e-12, atol=1e-13)
    assert optimizer.param_groups[0]["weight_decay"] == decay


def make_param(*values):
    param = nn.Parameter(torch.tensor(values))
    param.grad = torch.ones_like(param)
    return param


class Raising(torch.optim.SGD):
    def step(self, closure=None):
        assert self.param_groups[0]["weight_decay"] == 0
        raise KeyError("step")


def test_weight_decay_is_given_back_when_the_step_raises():
    optimizer = LARC(Raising([make_param(1.0)], lr=0.1, weight_decay=0.5))
    with pytest.raises(KeyError, match="step"):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
    assert not optimizer.optim._optimizer_step_pre_hooks


def test_a_group_without_weight_decay_gets_none():
    param = make_param(1.0)
    inner_optimizer = torch.optim.Rprop([param], lr=0.1)
    before = set(inner_optimizer.param_groups[0])
    LARC(inner_optimizer).step()
    assert set(inner_optimizer.param_groups[0]) == before
    assert param.item() != 1.0


class Twice(torch.optim.SGD):
    """Overrides `step` and calls that of its base: torch runs the hooks of both."""

    def step(self, closure=None):
        return super().step(closure)


def step_once(make, closure=False):
    def evaluate():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    param = make_param(3.0, 4.0)
    optimizer = LARC(make([param], lr=0.1, momentum=0.9, weight_decay=0.1), clip=False)
    if closure:
        assert optimizer.step(evaluate).item() == 25.0
    else:
        evaluate()
        optimizer.step()
    return param.detach()


def test_a_closure_and_a_step_that_calls_the_base_scale_once():
    expected = step_once(torch.optim.SGD)
    assert torch.equal(step_once(torch.optim.SGD, closure=True), expected)
    assert torch.equal(step_once(Twice), expected)


@shows("companions-larc")
def test_larc_shows_what_is_inside_and_is_no_optimizer():
    param = make_param(1.0, 1.0)
    inner_optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    optimizer = LARC(inner_optimizer)
    assert not isinstance(optimizer, torch.optim.Optimizer)
    assert repr(optimizer) == repr(inner_optimizer)
    for name in ("state", "param_groups", "defaults"):
        assert getattr(optimizer, name) is getattr(inner_optimizer, name)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optim, 1, 0.5)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    saved = copy.deepcopy(optimizer.state_dict())
    expected = saved["state"][0]["momentum_buffer"].clone()
    optimizer.state[param]["momentum_buffer"].zero_()
    optimizer.load_state_dict(saved)
    assert torch.equal(inner_optimizer.state[param]["momentum_buffer"], expected)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner_optimizer.param_groups) == 2
    optimizer.zero_grad(set_to_none=True)
    assert param.grad is None
    optimizer.param_groups = inner_optimizer.param_groups[:1]
    assert len(inner_optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"]
)
def test_copies_of_larc_step_their_own_parameters(copied):
    param = make_param(1.0, 1.0)
    optimizer = LARC(torch.optim.SGD([param], lr=0.1), trust_coefficient=0.5, clip=False, eps=0.0)
    other = copied(optimizer)
    theirs = other.param_groups[0]["params"][0]
    theirs.grad = torch.ones(2)
    other.step()
    assert torch.equal(param, torch.ones(2))
    assert theirs.tolist() == pytest.approx([0.95, 0.95])


def train_with_larc(level, loss_scale, overflow=False, delay=False):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01))
    # Without a level nothing is scaled, nor cast.
    options = {"enabled": False} if level is None else {"opt_level": level, "loss_scale": loss_scale}
    amp.initialize(model, optimizer, verbosity=0, **options)
    states = []
    for step in range(3):
        torch.manual_seed(step)
        loss = (model(torch.randn(8, 3)).float() - torch.randn(8, 2)).pow(2).mean()
        loss = loss * (1e15 if overflow and step == 1 else 1)
        with amp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        params = list(amp.master_params(optimizer))
        buffers = [optimizer.state[param]["momentum_buffer"] for param in params if optimizer.state[param]]
        states.append([value.detach().clone() for value in [*params, *buffers]])
    amp.uninitialize()
    return states


@shows("companions-larc", "optimizers-larc")
@pytest.mark.parametrize(("loss_scale", "delay"), [(None, False), (1024.0, False), (1024.0, True)], ids=str)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_larc_under_every_level_trains_as_in_float32(level, loss_scale, delay):
    expected = train_with_larc(None, None)[-1]
    found = train_with_larc(level, loss_scale, delay=delay)[-1]
    # O0 unscales by a power of two, exactly; the others are as precise as their half type.
    tolerance = {"O0": 0.0, "O1": 1e-3, "O2": 1e-3, "O4": 1e-2, "O5": 1e-2}[level]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_of_larc_that_is_skipped_changes_neither_weights_nor_state(level):
    first, second, third = train_with_larc(level, "dynamic", overflow=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(second[0], third[0])
    assert all(value.isfinite().all() for value in third)


def test_it_is_found_as_a_class_and_in_what_looks_like_its_module():
    import ampatch.apex.parallel.LARC as found
    from ampatch.apex.parallel.LARC import LARC as imported

    assert found.LARC is imported is LARC
