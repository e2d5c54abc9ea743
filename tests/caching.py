"""What tests of the cast cache share: a counter of casts, and a linear layer by hand."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch as amp
from helpers import scaled_backward as backward  # noqa: F401 (as most tests here call it)

HALF = torch.bfloat16
WITHOUT_GRAD = [torch.no_grad, torch.inference_mode]
MODES = [*WITHOUT_GRAD, torch.enable_grad]


class CountCasts(TorchDispatchMode):
    """Counts the copies of float32 tensors of one shape to the half type, into new memory or old."""

    def __init__(self, *shape):
        super().__init__()
        self.shape, self.count = torch.Size(shape or (5, 3)), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # Inference mode shows `to` whole, other modes show the copy that it makes.
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype) and result.dtype is HALF:
            self.count += self._is_wanted(args[0])
        elif func is torch.ops.aten._foreach_copy_.default and args[0][0].dtype is HALF:
            self.count += sum(map(self._is_wanted, args[1]))
        return result

    def _is_wanted(self, tensor):
        return tensor.shape == self.shape and tensor.dtype is torch.float32


class Tied(nn.Module):
    """Uses one weight three times in a forward, as a matrix, transposed and by an operator."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, x):
        hidden = torch.nn.functional.linear(x, self.weight)
        return hidden @ self.weight + torch.mm(hidden, self.weight)


def open_session(model, optimizer=None, opt_level="O4", **kwargs):
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, **kwargs)
    return model


def open_training(model, make=torch.optim.SGD, lr=0.1, **options):
    """Opens a session for a model and an optimizer of it, which is returned."""
    optimizer = make(model.parameters(), lr=lr, **options)
    open_session(model, optimizer)
    return optimizer


X = torch.tensor([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]])


def by_hand(model):
    """What a linear layer gives in bfloat16, by an op that no patch sees."""
    with torch.no_grad():
        weight, bias = (param.detach().to(HALF) for param in (model.weight, model.bias))
        return torch.ops.aten.linear(X.to(HALF), weight, bias)


def assert_fresh(model):
    assert torch.equal(model(X).detach(), by_hand(model))
