"""Silent faults: scripts that train wrongly without a sign, and their sound siblings."""

from contextlib import ExitStack
from textwrap import dedent

import pytest

from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.silent.examine import examine_silent
from ampatch.doctor.silent.watch import Silent

HEAD = """
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
NATIVE = """
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(4):
    x, y = torch.randn(4, 8), torch.randint(0, 3, (4,))
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x), y)
    {backward}
    scaler.step(optimizer)
    scaler.update()
"""
OURS = """
import ampatch as amp
model, optimizer = amp.initialize(model, optimizer, opt_level={level!r}, verbosity=0)
for step in range(4):
    x, y = torch.randn(4, 8), torch.randint(0, 3, (4,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    {backward}
    optimizer.step()
"""


def native(backward, head=HEAD):
    return head + NATIVE.format(backward=indent(backward, 4))


def ours(backward, level="O1", head=HEAD):
    return head + OURS.format(backward=indent(backward, 4), level=level)


def indent(text, width):
    return dedent(text).strip("\n").replace("\n", "\n" + " " * width)


def watch(text):
    """Runs a script under the instruments; returns its silent faults and the error that ended it."""
    silent, error = Silent(), None
    with ExitStack() as stack:
        silent.open(stack, window=())
        try:
            exec(compile(text, "train.py", "exec"), {"__name__": "__main__"})
        except RuntimeError as raised:
            error = raised
    found = silent.to_json()
    attempts = [Attempt(step) for step in range(silent.notes.attempt)]
    return examine_silent(found, attempts, ()), error


def lines_of(text):
    """The lines that are marked as faults."""
    return [f"train.py:{n}" for n, line in enumerate(text.splitlines(), 1) if "# FAULT" in line]


NORM = """
class Norm(nn.Module):
    def forward(self, x):
        {lines}
h = nn.Linear(8, 8)
nn.init.constant_(h.bias, {bias})
model = nn.Sequential(h, Norm(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""


def norm(lines, bias=3000.0):
    return HEAD + NORM.format(lines=indent(lines, 8), bias=bias)


STEP = "scaler.scale(loss).backward()"
BLOCK = """
with amp.scale_loss(loss, optimizer) as scaled:
    scaled.backward()
"""
FAULTS = {
    "norm": ("zeros", native(STEP, norm("return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))  # FAULT"))),
    "clip": (
        "clipped_while_scaled",
        native(STEP + "\nnn.utils.clip_grad_norm_(model.parameters(), 1.0)  # FAULT"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_silent_fault_is_found_at_its_line(name):
    kind, text = FAULTS[name]
    faults, _ = watch(text)
    assert [(it.kind, it.where) for it in faults] == [(kind, line) for line in lines_of(text)]
    assert faults[0].step == 0
    assert faults[0].why
    assert faults[0].remedies
