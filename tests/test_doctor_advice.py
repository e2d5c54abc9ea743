"""Scripts after what people report: the first advice, applied to the letter, and the script trains."""

import ast
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from textwrap import dedent, indent

import pytest

from ampatch.doctor.causes import explain
from ampatch.doctor.finding import Finding
from ampatch.doctor.runs import Run, Seen
from ampatch.doctor.silent.fault import MISUSES
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
features = torch.randn(320, 16)
batches = DataLoader(TensorDataset(features, features[:, :4].argmax(1)), batch_size=8)

"""
SCALED = """
{imports} amp
model, optimizer = amp.initialize(model, optimizer, opt_level="{level}", verbosity=0{options})
for step, (x, y) in zip(range(options.steps), batches):
{loss}
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
{end}
    optimizer.step()
    print("loss", loss.item())
"""
AUTOCAST = """
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step, (x, y) in zip(range(options.steps), batches):
    with torch.autocast("cpu", torch.float16):
{loss}
    optimizer.zero_grad()
    scaler.scale(loss).backward()
{end}
    scaler.step(optimizer)
    scaler.update()
    print("loss", loss.item())
"""
PLAIN = {
    "edit": "",
    "modules": "",
    "model": "nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))",
    "optimizer": "torch.optim.SGD(model.parameters(), lr=0.2)",
    "options": "",
    "loss": "loss = F.cross_entropy(model(x).float(), y)",
    "end": "",
}
IMPORTS = {"apex": "from apex import", "ampatch": "import ampatch as"}


def read_cases():
    """Reads the cases by name: fields of one line, or of the indented lines below."""
    cases = {}
    for block in (Path(__file__).parent / "reported.txt").read_text().split("## ")[1:]:
        name, _, text = block.partition("\n")
        fields = re.findall(r"^(\w+):(?: (.*)|((?:\n    .*|\n(?=\n))+)|)$", text, re.MULTILINE)
        cases[name] = PLAIN | {key: line or dedent(below).strip() for key, line, below in fields}
    return cases


CASES = {name: case for name, case in read_cases().items() if "says" in case}
HEALTHY = {name: case for name, case in read_cases().items() if "says" not in case}


def write_script(case):
    """Puts a case into a script that trains."""
    kind, _, level = case["style"].partition(" ")
    filled = {"imports": IMPORTS.get(kind), "level": level, "options": case["options"]}
    filled |= {"loss": indent(case["loss"], " " * (4 if level else 8)), "end": indent(case["end"], "    ")}
    parts = f"{case['modules']}\n\nmodel = {case['model']}\noptimizer = {case['optimizer']}\n"
    return HEAD + parts + (SCALED if level else AUTOCAST).format(**filled)


def apply(script, finding, advice):
    """Does what advice says to the letter; None where that takes a reader."""
    line = int(finding["where"].rpartition(":")[2])
    said, _, text = advice.partition("\n")
    text = dedent(text)
    if found := re.search(r"where it is (?:used|made), at .*:(\d+):$", said):
        line = int(found[1])
    if "get_submodule" in text:
        return script.replace("optimizer =", f"{text}\noptimizer =", 1)
    if "by what stands above it" in said:
        function = text.rpartition("\n")[2]
        return re.sub(f"( *){re.escape(function)}", lambda it: indent(text, it[1]), script, count=1)
    if text:
        return replace(script, line, text)
    if found := re.match(r"write (-?)(\S+) in the place of \1(.+?), at ", said):
        lines = script.split("\n")
        for at in map(int, re.findall(r"\.py:(\d+)", said)):
            assert found[3] in lines[at - 1]
            lines[at - 1] = lines[at - 1].replace(found[3], found[2])
        return "\n".join(lines)
    if said.startswith(("keep_fp32=", "loss_scale=")):
        script = re.sub(r", loss_scale=[\d.]+", "", script)
        return script.replace("verbosity=0", f"verbosity=0, {re.split(': | in the place', said)[0]}")
    if found := re.match(r".*opt_level (O\d)", said):
        return re.sub(r'opt_level="O\d"', f'opt_level="{found[1]}"', script)
    if "lower the learning rate" in said:
        return re.sub(
            r"weight_decay=[\de.+-]+", "weight_decay=1e-4", re.sub(r"lr=[\de.+-]+", "lr=0.1", script)
        )
    if "cast to float32 there" in said:
        at = int(finding["facts"]["cast"].rpartition(":")[2])
        return replace(script, at, script.split("\n")[at - 1].strip().replace(".half()", ".float()"))
    return None


def replace(script, line, text):
    """Puts a statement in the place of the one at a line, or of the lines that it names."""
    found = [it for it in ast.walk(ast.parse(script)) if isinstance(it, ast.stmt) and it.lineno == line]
    named = re.match(r"# in the place of lines (\d+) to (\d+)", text)
    line, last = map(int, named.groups()) if named else (line, found[-1].end_lineno)
    lines = script.split("\n")
    lines[line - 1 : last] = [indent(text, re.match(" *", lines[line - 1])[0])]
    return "\n".join(lines)


def trains(attempts, said):
    """Says whether losses are finite and fall, and no step is skipped once the scale has found its size."""
    losses = [float(it) for it in re.findall(r"^loss (\S+)$", said, re.MULTILINE)]
    part = len(losses) // 4
    stays = all(it.loss and it.weights for it in attempts) and all(it.is_finite for it in attempts[-part:])
    return part > 0 and stays and sum(losses[-part:]) < 0.98 * sum(losses[:part])


def run(script, folder):
    """Says whether a script trains."""
    (folder / "fixed.py").write_text(script)
    out = folder / "seen"
    status, said = fork_child(Run(str(folder / "fixed.py"), ("--steps", "40"), out=str(out)), folder)
    return status == 0 and trains(Seen.read(out).attempts, said)


@pytest.mark.process(keep=8)
@pytest.mark.parametrize("name", CASES)
def test_a_script_trains_that_does_what_the_first_advice_says(tmp_path, name):
    case = CASES[name]
    script = write_script(case)
    report = report_on(script, tmp_path)
    finding = explained(report)
    assert case["line"] in script.split("\n")[int(finding["where"].rpartition(":")[2]) - 1]
    advice = finding["remedies"][0]
    assert case["says"] in advice
    fixed = apply(script, finding, advice) or script.replace(*case["edit"].replace("\\n", "\n").split(" => "))
    assert not run(script, tmp_path)
    assert run(fixed, tmp_path)


LIVE = (
    "eps of Adam",
    "decay",
    "rate too high",
    "static loss scale",
    "buffer that is not set",
    "focal power",
    "box coder",
)
WATCH = "import ampatch\n\nwatch = ampatch.diagnose.watch(model, optimizer)\nwatch.__enter__()\nfor step"


@pytest.mark.process(keep=1)
@pytest.mark.parametrize("name", LIVE)
def test_a_watch_within_the_script_says_the_same(tmp_path, name):
    script = write_script(CASES[name]).replace("verbosity=0", "verbosity=0, diagnose=True")
    if "diagnose" not in script:
        script = script.replace("for step", WATCH)
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "ampatch", "run", tmp_path / "train.py"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert CASES[name]["says"] in re.split("\n  -> ", said)[1]


def explained(report):
    """Returns the first finding, with its remedies, or the first silent fault where that comes before it."""
    if not report["findings"] or any(it["kind"] in MISUSES for it in report["silent"]):
        return report["silent"][0]
    return asdict(explain(Finding(**report["findings"][0])))


@pytest.mark.process(keep=2)
@pytest.mark.parametrize("name", HEALTHY)
def test_of_a_healthy_script_nothing_is_said(tmp_path, name):
    report = report_on(write_script(HEALTHY[name]), tmp_path)
    assert (report["findings"], report["silent"], report["untraced"]) == ([], [], "")
