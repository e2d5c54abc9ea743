"""How much Python a step runs: calls of ampatch's functions, by level.

`python tests/test_step_calls.py` shows them. A step is a block of `scale_loss` and `optimizer.step()`, of two
Linear layers with SGD: the shortest of the fourth iteration and those after it, as what is done now and then
(casts of parameters that are gone are looked for) falls on one of them.
"""

import gc
import itertools
import os
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import ampatch as amp

ROOT = os.path.dirname(amp.__file__) + os.sep
MOST_CALLS = {"O0": 30, "O1": 80, "O2": 90, "O4": 45, "O5": 70}
if not hasattr(torch.Tensor, "grad_dtype"):  # before torch 2.10 each half parameter is given its gradient
    MOST_CALLS |= {"O2": 150, "O5": 120}


def list_calls(level):
    """Returns the file and the function of each call of a step, in order."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    gc.collect()  # or what earlier tests left calls us when it is freed
    steps = []

    def note(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOT):
            steps[-1].append((file.removeprefix(ROOT), frame.f_code.co_name))

    inputs, targets = torch.randn(4, 8), torch.randn(4, 4)
    for step in range(6):
        steps.append([])
        loss = mse_loss(model(inputs).float(), targets)
        optimizer.zero_grad()
        before = sys.getprofile()
        sys.setprofile(note if step >= 3 else before)
        try:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        finally:
            sys.setprofile(before)
    return min(steps[3:], key=len)


@pytest.mark.parametrize("level", MOST_CALLS)
def test_a_step_makes_few_calls(level):
    calls = list_calls(level)
    assert 0 < len(calls) <= MOST_CALLS[level], [name for _, name in calls]


if __name__ == "__main__":
    for level in MOST_CALLS:
        calls = list_calls(level)
        amp.uninitialize()
        files = [file for file, _ in calls]
        changes = sum(one != other for one, other in itertools.pairwise(files))
        print(f"{level}: {len(calls)} calls, {len(set(files))} files, {changes} changes of file")
