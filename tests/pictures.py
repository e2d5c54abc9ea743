"""Pictures of models, optimizers and torch, to compare before and after."""

import contextlib

import torch
import torch.nn.functional as F
from torch.nn import Module

from helpers import snapshot

NAMESPACES = [torch, torch.Tensor, torch._VF, F, torch.linalg, torch.nn.RNNBase, torch.utils.checkpoint]


def picture_torch():
    """What every name in torch's namespaces is, by identity."""
    return {
        f"{place.__name__}.{name}": id(value)
        for place in NAMESPACES
        for name, value in vars(place).items()
        if name != "__slotnames__"
    }


def plain(value):
    """A comparable picture of an attribute: containers one level deep, by identity inside."""
    if isinstance(value, dict):
        return type(value), [(key, id(item)) for key, item in value.items()]
    if isinstance(value, list | set):
        return type(value), [id(item) for item in value]
    return value if isinstance(value, int | str | bool | None) else id(value)


def picture_attributes(it):
    return {name: plain(value) for name, value in vars(it).items() if name != "state"}


def picture_model(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        "modules": {name: picture_attributes(module) for name, module in model.named_modules()},
        "tensors": [(id(tensor), snapshot(tensor), dict(vars(tensor))) for _, tensor in tensors],
        "gradients": [(tensor.requires_grad, snapshot(tensor.grad)) for _, tensor in tensors],
    }


def picture_optimizer(optimizer):
    return {
        "attributes": picture_attributes(optimizer),
        "groups": [(id(group["params"]), *map(id, group["params"])) for group in optimizer.param_groups],
        "options": snapshot([{**group, "params": None} for group in optimizer.param_groups]),
        "state": [(id(param), snapshot(state)) for param, state in optimizer.state.items()],
    }


def picture(*objects):
    """Everything that a session might change of models and optimizers, bits included."""
    return [picture_model(one) if isinstance(one, Module) else picture_optimizer(one) for one in objects]


def assert_same_picture(found, expected):
    for one, other in zip(found, expected, strict=True):
        for part, value in other.items():
            assert one[part] == value, part


@contextlib.contextmanager
def unchanged(*objects):
    """Fails if a block changes anything of models, optimizers or torch."""
    before, torch_before = picture(*objects), picture_torch()
    yield
    assert picture_torch() == torch_before
    assert_same_picture(picture(*objects), before)
