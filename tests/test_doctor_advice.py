"""Scripts after what people report: the first advice, applied to the letter, and the script trains."""

import json
import re
from pathlib import Path
from textwrap import dedent, indent

import pytest

from ampatch.doctor.causes import explain
from ampatch.doctor.finding import Finding
from ampatch.doctor.runs import Run, Seen
from faults import fork_child, report_on

HEAD = """
import argparse
import math
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
options = parser.parse_args()
torch.manual_seed(0)
batches = DataLoader(TensorDataset(torch.randn(160, 16), torch.randint(0, 4, (160,))), batch_size=8)

"""
AMPATCH = """
import ampatch as amp
model, optimizer = amp.initialize(model, optimizer, opt_level="{style}", verbosity=0)
for step, (x, y) in zip(range(options.steps), batches):
{loss}
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""
AUTOCAST = """
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step, (x, y) in zip(range(options.steps), batches):
    with torch.autocast("cpu", torch.float16):
{loss}
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
PLAIN = {
    "edit": "",
    "modules": "",
    "model": "nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))",
    "optimizer": "torch.optim.SGD(model.parameters(), lr=0.01)",
    "loss": "loss = F.cross_entropy(model(x).float(), y)",
}


def read_cases():
    """Reads the cases by name: fields of one line, or of the indented lines below."""
    cases = {}
    for block in (Path(__file__).parent / "reported.txt").read_text().split("## ")[1:]:
        name, _, text = block.partition("\n")
        fields = re.findall(r"^(\w+):(?: (.*)|((?:\n    .*|\n(?=\n))+)|)$", text, re.MULTILINE)
        cases[name] = PLAIN | {key: line or dedent(below).strip() for key, line, below in fields}
    return cases


CASES = read_cases()


def write_script(case):
    """Puts a case into a script that trains."""
    is_autocast = case["style"] == "autocast"
    loss = indent(case["loss"], " " * (8 if is_autocast else 4))
    parts = f"{case['modules']}\n\nmodel = {case['model']}\noptimizer = {case['optimizer']}\n"
    return HEAD + parts + (AUTOCAST if is_autocast else AMPATCH).format(style=case["style"], loss=loss)


def apply(script, advice, line, edit):
    """Does what the first advice says; `line` is the one that broke."""
    if edit:
        before, after = edit.replace("\\n", "\n").split(" => ")
        assert before in script
        return script.replace(before, after)
    if advice.startswith("keep_fp32="):
        return script.replace("verbosity=0", f"verbosity=0, {advice.partition(': ')[0]}")
    pasted = dedent("\n".join(advice.splitlines()[1:]))
    if "get_submodule" in pasted:
        return script.replace("optimizer =", f"{pasted}\noptimizer =", 1)
    text = script.splitlines()
    text[line - 1] = indent(pasted, re.match(" *", text[line - 1]).group())
    return "\n".join(text)


def trains(script, tmp_path):
    """Says whether a script runs to its end with no bad number after the search of its scale."""
    (tmp_path / "fixed.py").write_text(script)
    out = tmp_path / "seen.json"
    status, said = fork_child(Run(str(tmp_path / "fixed.py"), ("--steps", "20"), out=str(out)), tmp_path)
    attempts = Seen.read(json.loads(out.read_text())).attempts
    assert status == 0, said
    kept = all(it.loss and it.weights for it in attempts)  # a scale that is too large loses gradients alone
    return len(attempts) >= 5 and kept and all(it.is_finite for it in attempts[-3:])


@pytest.mark.process(keep=8)
@pytest.mark.parametrize("name", CASES)
def test_a_script_trains_that_does_what_the_first_advice_says(tmp_path, name):
    case = CASES[name]
    script = write_script(case)
    first = Finding(**report_on(script, tmp_path)["findings"][0])
    advice = explain(first).remedies[0]
    line = int(first.where.rpartition(":")[2])
    assert case["line"] in script.splitlines()[line - 1]
    assert case["says"] in advice
    assert trains(apply(script, advice, line, case["edit"]), tmp_path)
