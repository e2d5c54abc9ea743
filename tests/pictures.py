"""Pictures of a model, its optimizer and torch, to compare before and after."""

import torch
import torch.nn.functional as F

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


def picture(model, optimizer):
    """Everything that a session might change, bits included."""
    tensors = [*model.parameters(), *model.buffers()]
    states = [state for key in tensors for state in [optimizer.state.get(key, {})]]
    return {
        "attributes": [{name: plain(v) for name, v in vars(m).items()} for m in model.modules()],
        "tensors": [(id(tensor), tensor.dtype, tensor.tolist(), tensor.requires_grad) for tensor in tensors],
        "optimizer": {name: plain(v) for name, v in vars(optimizer).items() if name != "state"},
        "groups": [[id(param) for param in group["params"]] for group in optimizer.param_groups],
        "state keys": [id(key) for key in optimizer.state],
        "state": [{name: value.tolist() for name, value in state.items()} for state in states],
    }


def picture_gradients(model):
    return [None if p.grad is None else (p.grad.dtype, p.grad.tolist()) for p in model.parameters()]


def assert_same_picture(found, expected):
    for part, value in expected.items():
        assert found[part] == value, part
