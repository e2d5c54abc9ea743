"""What several test files need: bitwise snapshots, and every optimizer class of torch.optim."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

import ampatch as amp


def torch_is_before(version):
    """Whether the torch that is installed is older."""
    return tuple(map(int, torch.__version__.split(".")[:2])) < tuple(map(int, version.split(".")))


def needs_torch(version, feature):
    """Skips a test before the torch that brought a feature, named in the reason."""
    return pytest.mark.skipif(torch_is_before(version), reason=f"torch {version} brought {feature}")


def import_float8():
    """Imports torchao's module; skips where there is none, or one that fails with this torch, in any way."""
    return pytest.importorskip("torchao.float8", exc_type=Exception)


def wait_until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for two minutes"
        time.sleep(0.05)


def without_chatter(text):
    """Leaves out what torch says of itself: gloo of its connections, a build for CUDA that there is none."""
    text = re.sub(r"\[Gloo\] Rank |\d is connected to \d peer ranks[^:]*: \d\n?", "", text)
    return "".join(line for line in text.splitlines(True) if "No CUDA runtime is found" not in line)


def snapshot(value):
    """A nested value with every tensor turned into its dtype, shape and bytes, to compare by `==`."""
    if isinstance(value, Tensor):
        if value.is_sparse:
            value = value.detach().coalesce()
            return "sparse", snapshot(value.indices()), snapshot(value.values())
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), data.numpy().tobytes()
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [snapshot(item) for item in value]
    return value


@contextlib.contextmanager
def sync_debug_mode(mode):
    """Has CUDA warn of what waits for it, or raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's prototype
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def scaled_backward(loss, optimizers, **options):
    """What most blocks of `scale_loss` are."""
    with amp.scale_loss(loss, optimizers, **options) as scaled_loss:
        scaled_loss.backward()


def assert_same_bits(actual, expected):
    """Fails unless two lists of tensors are equal bit for bit."""
    actual, expected = list(actual), list(expected)
    assert len(actual) == len(expected)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert snapshot(one) == snapshot(other), f"tensor {index}: {one} is not {other}"


OPTIMIZER_CLASSES = [
    found
    for found in vars(torch.optim).values()
    if isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer
]


@dataclass(frozen=True)
class Variant:
    """One way to make an optimizer of torch.optim."""

    kind: type[Optimizer]
    options: dict = field(default_factory=dict)

    def __str__(self):
        options = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.kind.__name__}({options})"

    def __call__(self, params):
        return self.kind(params, **{"lr": 2.0**-4} | self.options)

    @property
    def is_fused(self):
        """Whether it takes `found_inf`, and so skips by itself."""
        return self.options.get("fused", False)

    @property
    def takes_found_inf(self):
        """Whether torch's kernel skips by a flag on the device; that of Adagrad does not before 2.9."""
        if not self.is_fused:
            return False
        optimizer = self.kind([torch.nn.Parameter(torch.ones(2, 2))], **self.options)
        return getattr(optimizer, "_step_supports_amp_scaling", False)

    @property
    def is_sparse(self):
        return self.kind is torch.optim.SparseAdam

    @property
    def needs_closure(self):
        return self.kind is torch.optim.LBFGS


_VARIANTS = {
    "SGD": [
        {},
        {"momentum": 0.9, "nesterov": True, "foreach": True},
        {"momentum": 0.9, "dampening": 0.3, "foreach": False},
        {"momentum": 0.9, "fused": True},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "fused": True},
    ],
    "Adam": [
        {"foreach": True, "weight_decay": 0.1},
        {"foreach": False, "amsgrad": True},
        {"fused": True},
        {"amsgrad": True, "fused": True},
    ],
    "AdamW": [{"foreach": True}, {"fused": True}],
    "Adagrad": [{"foreach": True, "lr_decay": 0.1}, {"fused": True}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "LBFGS": [{"max_iter": 4}, {"max_iter": 4, "line_search_fn": "strong_wolfe"}],
}
VARIANTS = [
    Variant(kind, options) for kind in OPTIMIZER_CLASSES for options in _VARIANTS.get(kind.__name__, [{}])
]
SKIPPING_VARIANTS = [variant for variant in VARIANTS if not variant.needs_closure]


class Dense(Module):
    """Two matrices, which every optimizer but SparseAdam takes (Muon takes no vectors)."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 3, bias=False)
        self.second = torch.nn.Linear(3, 2, bias=False)

    def forward(self, batch):
        return self.second(torch.relu(self.first(batch)))


class Sparse(Module):
    """An embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(6, 3, sparse=True)

    def forward(self, ids):
        return self.table(ids)


class Scalar(Module):
    """A product that no level casts, so that float32 by hand gives the same bits at O0, O1 and O4."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(shape or (3,)))

    def forward(self, batch):
        return self.weight * batch


def make_net(variant):
    return Sparse() if variant.is_sparse else Dense()


def make_batches(variant, count):
    if variant.is_sparse:
        return [torch.randint(0, 6, (5,)) for _ in range(count)]  # with repetitions
    return [torch.randn(5, 4) for _ in range(count)]


def import_torchvision():
    """Imports torchvision, which timm needs, and others take if it is there.

    The wheel on PyPI is for CUDA. Beside a torch for the CPU its own ops are not there, and its import
    fails at the first two that it adds to; declared by name, they are enough.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for op in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{op}", schema)
        importlib.import_module("torchvision")


def is_alive(pid):
    """Says whether a process runs; one that has ended and waits to be asked does not."""
    status = Path(f"/proc/{pid}/stat")
    if status.exists():
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return sys.platform != "linux"
