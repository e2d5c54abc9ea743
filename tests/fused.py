"""Every optimizer of apex.optimizers, parameters of many shapes, and steps with given gradients."""

import functools

import pytest
import torch
from torch.nn import Parameter

from ampatch.apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedNovoGrad,
    FusedSGD,
)
from helpers import snapshot

INF = float("inf")
SHAPES = [(3, 4), (5,), (), (0, 2), (2, 1, 3)]
STEPS = 4
HALF_TYPES = [torch.float16, torch.bfloat16]


def named(kind, **options):
    """A way to make an optimizer."""
    return functools.partial(kind, **options)


EVERY = pytest.mark.parametrize(
    "make",
    ids=lambda make: f"{make.func.__name__}{make.keywords}",
    argvalues=[
        named(FusedAdam, lr=0.05),
        named(FusedAdam, lr=0.05, bias_correction=False, weight_decay=0.1),
        named(FusedAdam, lr=0.05, max_grad_norm=1.0, amsgrad=True),
        named(FusedAdam, lr=0.05, master_weights=True),
        named(FusedSGD, lr=0.05),
        named(FusedSGD, lr=0.05, momentum=0.9, weight_decay=0.1),
        named(FusedSGD, lr=0.05, momentum=0.9, weight_decay=0.1, wd_after_momentum=True),
        named(FusedAdagrad, lr=0.1),
        named(FusedAdagrad, lr=0.1, weight_decay=0.1, adagrad_w_mode=True),
        named(FusedLAMB, lr=0.05),
        named(FusedNovoGrad, lr=0.05),
    ],
)


def make_params(dtype=torch.float32, shapes=SHAPES):
    return [Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def twins(params):
    return [Parameter(param.detach().clone()) for param in params]


def make_grads(params, steps=STEPS):
    return [[torch.randn(param.shape).to(param.dtype) for param in params] for _ in range(steps)]


def step_with(optimizer, params, grads):
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    optimizer.step()


def run(optimizer, params, history):
    for grads in history:
        step_with(optimizer, params, grads)


def state_of(optimizer):
    """State and options, bit for bit."""
    states = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
    return snapshot([dict(state) for state in states]), snapshot(optimizer.state_dict()["param_groups"])
