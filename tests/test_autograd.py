"""Custom functions, hooks, higher derivatives and steps inside of backward, on initialized models."""

import pytest
import torch
from torch import nn
from torch.autograd import Function

import ampatch as amp
from nets import open_session
from patched import backward, start

LEVELS = pytest.mark.parametrize("level", ["O0", "O2", "O4"])
HALF = {"O1": torch.float16, "O2": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}
X = torch.tensor([[1.0, -0.5, 0.25], [0.5, 0.75, -1.0]])


def make_net():
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))


def open_training(level, model=None, loss_scale=1.0):
    return start(level, model or make_net(), loss_scale=loss_scale if level != "O0" else None)


def train(model, optimizer):
    optimizer.zero_grad()
    backward(model(X).float().pow(2).mean(), optimizer)
    optimizer.step()


# ---- Functions ----


class Product(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class ProductInTwoParts(Function):
    @staticmethod
    def forward(x, weight):
        return torch.matmul(x, weight.t())

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    backward = Product.backward


class ProductForAutocast(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        return Product.forward(ctx, x, weight)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        return Product.backward(ctx, grad)


class ProductInFloat32(ProductForAutocast):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, weight):
        return Product.forward(ctx, x, weight)


class Applies(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(4, 2)
        self.weight, self.function = nn.Parameter(torch.randn(4, 8)), function

    def forward(self, x):
        return self.last(torch.tanh(self.function.apply(self.first(x), self.weight)))


@LEVELS
@pytest.mark.parametrize("function", [Product, ProductInTwoParts, ProductForAutocast, ProductInFloat32])
def test_a_functions_own_forward_and_backward_are_patched_as_other_code_is(function, level):
    model = Applies(function)
    x = X.clone().requires_grad_()
    expected = torch.autograd.grad(model(x).pow(2).sum(), [x, *model.parameters()])
    open_session(model, opt_level=level)
    found = torch.autograd.grad(model(x).float().pow(2).sum(), [x, *model.parameters()])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs, atol=0.05, rtol=0.05)


# ---- Hooks ----


@LEVELS
def test_hooks_of_a_module_are_called_in_order_with_what_the_module_has(level):
    model, log = make_net(), []
    last = model[3]
    last.register_forward_pre_hook(lambda module, args: log.append(("pre", args[0].dtype)))
    last.register_forward_hook(lambda module, args, output: log.append(("post", output.dtype)))
    last.register_full_backward_pre_hook(lambda module, grads: log.append(("back pre", grads[0].dtype)))
    last.register_full_backward_hook(lambda module, inputs, grads: log.append(("back", inputs[0].dtype)))
    model, optimizer = open_training(level, model)
    train(model, optimizer)
    inside = HALF.get(level, torch.float32)
    # LayerNorm gives float32 at O1 and O4, and half at O2 and O5.
    taken = torch.float32 if level in ("O1", "O4") else inside
    assert log == [("pre", taken), ("post", inside), ("back pre", inside), ("back", taken)]


# ---- Steps inside of backward ----


def step_in_backward(model):
    """One optimizer a parameter, which steps as soon as the gradient is there."""
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    return list(optimizers.values())


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
@pytest.mark.parametrize("block", ["scale_loss", "plain"])
def test_optimizers_that_step_inside_of_backward_do_what_one_does_after_it(block, level):
    def run(is_inside):
        torch.manual_seed(0)
        model = make_net()
        one = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizers = step_in_backward(model) if is_inside else [one]
        open_session(model, optimizers, opt_level=level)
        for _ in range(3):
            loss = model(X).float().pow(2).mean()
            if block == "plain":
                loss.backward()
            else:
                backward(loss, optimizers)
            if not is_inside:
                one.step()
                one.zero_grad()
        amp.uninitialize()
        return [param.detach() for param in model.parameters()]

    for ours, theirs in zip(run(True), run(False), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("loss_scale", ["dynamic", 8.0])
def test_a_step_inside_of_backward_under_a_loss_scale_is_refused(loss_scale, level):
    model = make_net()
    optimizers = step_in_backward(model)
    open_session(model, optimizers, opt_level=level, loss_scale=loss_scale)
    before = [param.detach().clone() for param in model.parameters()]
    with (
        pytest.raises(amp.AmpError, match="step ran inside of backward"),
        amp.scale_loss(model(X).float().sum(), optimizers) as scaled,
    ):
        scaled.backward()
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, old)


# ---- Gradients by hand ----


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_whole_block_may_run_inside_of_somebodys_backward(level):
    """An inner loop, as meta-learning has it: the block's own backward has ended before its step."""
    model, found = nn.Linear(2, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)

    def step_inside(grad):
        with torch.enable_grad(), amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        found.extend(param.grad.clone() for param in amp.master_params(optimizer))
        optimizer.step()

    x = torch.ones(2, requires_grad=True)
    x.register_hook(step_inside)
    (x * 2).sum().backward()
    assert all(torch.equal(grad, torch.ones_like(grad)) for grad in found)
    assert len(found) == 2
