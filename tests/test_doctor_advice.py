"""Scripts after what people report: the first advice, applied to the letter, and the script trains."""

import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent

import pytest

from ampatch.doctor.fixes import Dynamic, Keep, OtherLevel, Paste, Rate
from ampatch.doctor.run import ScriptRun
from ampatch.doctor.runs import Seen
from ampatch.doctor.text.source import changed_texts
from ampatch.doctor.words import MISUSES
from faults import diagnose, fork_child

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


def apply(script, fix):
    """Does what a fix says to the letter; None where that takes a reader."""
    match fix:
        case Paste(changes=changes):
            (text,) = changed_texts(changes).values()
            return text
        case Keep(autocast=str()):
            lines = str(fix).split("\n")[1:]
            return script.replace("optimizer =", dedent("\n".join(lines)) + "\noptimizer =", 1)
        case Keep():
            return script.replace("verbosity=0", f"verbosity=0, keep_fp32={list(fix.modules)}")
        case Dynamic():
            return re.sub(r", loss_scale=[\d.]+", ', loss_scale="dynamic"', script)
        case OtherLevel():
            return re.sub(r'opt_level="O\d"', f'opt_level="{fix.level}"', script)
        case Rate():
            lowered = re.sub(r"weight_decay=[\de.+-]+", "weight_decay=1e-4", script)
            return re.sub(r"lr=[\de.+-]+", "lr=0.1", lowered)
    return None


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
    status, said = fork_child(ScriptRun(str(folder / "fixed.py"), ("--steps", "40"), out=str(out)), folder)
    return status == 0 and trains(Seen.read(out).attempts, said)


@pytest.mark.process(keep=4)
@pytest.mark.parametrize("name", CASES)
def test_a_script_trains_that_does_what_the_first_advice_says(tmp_path, name):
    case = CASES[name]
    script = write_script(case)
    finding = first_of(diagnose(script, tmp_path))
    assert case["line"] in script.split("\n")[int(finding.where.rpartition(":")[2]) - 1]
    assert case["says"] in str(finding.remedies[0])
    fixed = apply(script, finding.remedies[0])
    fixed = fixed or script.replace(*case["edit"].replace("\\n", "\n").split(" => "))
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


@pytest.mark.process
@pytest.mark.parametrize("name", LIVE)
def test_a_watch_within_the_script_says_the_same(tmp_path, name):
    script = write_script(CASES[name]).replace("verbosity=0", "verbosity=0, diagnose=True")
    if "diagnose" not in script:
        script = script.replace("for step", WATCH)
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "ampatch", "run", tmp_path / "train.py"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert CASES[name]["says"] in re.split("\n  -> ", said)[1]


def first_of(report):
    """Returns the first finding, or the first silent fault where that comes before it."""
    if not report.findings or any(it.kind in MISUSES for it in report.silent):
        return report.silent[0]
    return report.findings[0]


@pytest.mark.process(keep=2)
@pytest.mark.parametrize("name", HEALTHY)
def test_of_a_healthy_script_nothing_is_said(tmp_path, name):
    report = diagnose(write_script(HEALTHY[name]), tmp_path)
    assert (report.findings, report.silent, report.unknown, report.untraced) == ((), (), (), "")
