"""What tests of patched functions share: a session, and tensors of either type."""

from contextlib import contextmanager

import torch
from torch import nn

import ampatch as amp
from helpers import scaled_backward as backward  # noqa: F401 (as most tests here call it)

FULL = torch.float32
LEVELS = {"O1": torch.float16, "O4": torch.bfloat16}
HALF = torch.bfloat16


def open_session(model=None, opt_level="O4", **kwargs):
    model = nn.Linear(2, 2) if model is None else model  # a compiled one cannot say whether it is true
    return amp.initialize(model, opt_level=opt_level, **kwargs)


def half(*shape):
    return torch.rand(shape).to(HALF)


def full(*shape):
    return torch.rand(shape)


def start(opt_level, model=None, wrap=None, lr=0.1, **kwargs):
    """Initializes a small model and an optimizer of it, which `wrap` makes of an SGD."""
    model = nn.Linear(2, 2) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer = wrap(optimizer) if wrap else optimizer
    amp.initialize(model, optimizer, opt_level=opt_level, **kwargs)
    return model, optimizer


@contextmanager
def autocast_for_cuda(half):
    """Has autocast's rules for CUDA at work, by its switch: `torch.autocast` needs a GPU to be on."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", half)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
        torch.clear_autocast_cache()
