"""Makes training scripts with one planted fault each, and knows where it is: the oracle of the doctor.

`python tests/faults.py --count 200` examines as many with `ampatch doctor` and counts what was right.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

# (phase, op, lines of the fault on `h`, does float32 survive); FAULT marks the line that is blamed.
FORWARD = (
    ("forward", "exp", "h = torch.exp(h * 0 + 1000.)  # FAULT", False),
    ("forward", "div", "h = h / (h * 0)  # FAULT", False),
    ("forward", "log", "h = torch.log(torch.relu(-h.abs()))  # FAULT", False),
    ("forward", "sqrt", "h = (-1 - h.abs()).sqrt()  # FAULT", False),
    ("forward", "pow", "h = ((h * 0).float() + 1e6) ** 7  # FAULT", False),
    ("forward", "half", "h = ((h * 0).float() + 1e5).half()  # FAULT", None),
    ("forward", "matmul", "h = (h * 0 + 300) @ (h * 0 + 300).t() @ h * 1e-6  # FAULT", True),
    ("forward", "softmax", "h = torch.softmax(h.masked_fill(h < 1e9, float('-inf')), -1)  # FAULT", False),
    ("forward", "linear", "h = self.lin(h * 0 + 60000.)  # FAULT", True),
    ("forward", "rsqrt", "h = h * torch.rsqrt((h * 0).mean(-1, keepdim=True))  # FAULT", False),
)
BACKWARD = (
    ("backward", "sqrt", "h = h + (h * 0).abs().sqrt()  # FAULT", False),
    ("backward", "sqrt", "h = h + (h - h.detach()).pow(2).sum(-1, keepdim=True).sqrt()  # FAULT", False),
    ("backward", "Big", "h = h + Big.apply(h)  # FAULT", False),
)


@dataclass(frozen=True)
class Fault:
    """What is planted: where it is, and what the script is."""

    phase: str
    op: str
    module: str
    step: int
    line: int
    survives: bool | None
    script: str


SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn
{imports}
torch.manual_seed({seed})


class Big(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 0

    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf")


class Block(nn.Module):
    def __init__(self, width, bad=False):
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.bad, self.calls = bad, 0

    def forward(self, x):
        h = F.gelu(self.lin(self.norm(x)))
        if self.bad and self.calls == {step}:
            {fault}
        self.calls += 1
        return x + h.to(x.dtype)


class Net(nn.Module):
    def __init__(self, width, depth, bad):
        super().__init__()
        self.stem = nn.Linear(20, width)
        self.blocks = nn.ModuleList(Block(width, i == bad) for i in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def main():
    model = Net({width}, {depth}, {bad})
    optimizer = torch.optim.{optimizer}(model.parameters(), lr=1e-3)
    {setup}
    for step in range({steps}):
        x, y = torch.randn({batch}, 20), torch.randint(0, 10, ({batch},))
        optimizer.zero_grad()
        {step_lines}


main()
"""
STYLES = {
    "O1": (
        "import ampatch as amp",
        'model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)',
    ),
    "O2": (
        "import ampatch as amp",
        'model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)',
    ),
    "O5": (
        "import ampatch as amp",
        'model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)',
    ),
    "apex": (
        "from apex import amp",
        'model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)',
    ),
    "native": ("", 'scaler = torch.amp.GradScaler("cpu")'),
    "plain": ("", ""),
}
OURS = """loss = F.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()"""
NATIVE = """with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()"""
PLAIN = """loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()"""


def make(seed: int) -> Fault:
    """Draws a script."""
    draw = random.Random(seed)
    style = draw.choice(list(STYLES))
    phase, op, fault, survives = draw.choice(FORWARD + BACKWARD)
    while survives and style in ("O5", "plain"):
        phase, op, fault, survives = draw.choice(FORWARD + BACKWARD)
    depth = draw.randint(1, 6)
    bad, step = draw.randrange(depth), draw.randint(0, 8)
    imports, setup = STYLES[style]
    lines = {"native": NATIVE, "plain": PLAIN}.get(style, OURS)
    values = {
        "imports": imports,
        "setup": setup,
        "step_lines": lines,
        "seed": seed,
        "step": step,
        "fault": fault,
    }
    values |= {
        "width": draw.choice([16, 32, 48]),
        "depth": depth,
        "bad": bad,
        "steps": step + draw.randint(1, 6),
    }
    values |= {"optimizer": draw.choice(["SGD", "AdamW"]), "batch": draw.choice([4, 16])}
    script = SCRIPT.format(**values)
    line = next(number for number, text in enumerate(script.splitlines(), 1) if "# FAULT" in text)
    op = {"O5": {"linear": "linear"}}.get(style, {}).get(op, op)
    return Fault(
        phase, op, f"blocks.{bad}" + (".lin" if op == "linear" else ""), step, line, survives, script
    )


def examine(fault: Fault, folder: Path) -> dict:
    """Returns the doctor's report."""
    (folder / "train.py").write_text(fault.script)
    command = [sys.executable, "-m", "ampatch", "doctor", "--json", "report.json", "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if not (folder / "report.json").exists():
        return {"findings": [], "unknown": [done.stderr]}
    return json.loads((folder / "report.json").read_text())


def judge(fault: Fault, report: dict) -> dict[str, bool]:
    """Says which parts of the first finding are right."""
    first = next(iter(report["findings"]), None)
    if first is None:
        return dict.fromkeys(("step", "phase", "module", "op", "line", "float32"), False)
    return {
        "step": first["step"] == fault.step,
        "phase": first["phase"] == fault.phase,
        "module": first["module"] == fault.module,
        "op": first["op"] == fault.op,
        "line": str(first["where"]).endswith(f":{fault.line}"),
        "float32": fault.survives is None or first["float32_survives"] == fault.survives,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    right = Counter()
    for seed in range(options.first, options.first + options.count):
        fault = make(seed)
        with tempfile.TemporaryDirectory() as folder:
            report = examine(fault, Path(folder))
        verdict = judge(fault, report)
        right.update(name for name, good in verdict.items() if good)
        if not all(verdict.values()):
            wrong = [name for name, good in verdict.items() if not good]
            first = next(iter(report["findings"]), report["unknown"])
            print(
                seed,
                "wrong:",
                *wrong,
                fault.phase,
                fault.op,
                fault.module,
                fault.step,
                fault.line,
                first,
                flush=True,
            )
    print({name: f"{count} of {options.count}" for name, count in right.items()})


if __name__ == "__main__":
    main()
