"""Makes training scripts with one planted fault each, and knows where it is: the oracle of the doctor.

`python tests/faults.py --count 200` examines as many with `ampatch doctor` and counts what was right;
`--sound` plants nothing and counts the findings. Whether float32 survives is measured: the same script runs
without mixed precision, and says what stayed finite.
"""

import argparse
import json
import linecache
import os
import random
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ampatch.__main__ import main as main_of_ampatch
from ampatch.doctor.campaign import FAULT, Campaign, start_process
from ampatch.doctor.child import carry_out as run_child
from ampatch.doctor.finding import Report
from ampatch.doctor.run import ScriptRun

# ---- Faults ----


@dataclass(frozen=True)
class Kind:
    """A fault: `code` is a line on `h`, whose last dimension is that of the batch's features.

    `places` are where it may stand: in a module's forward, after the model, before it, or at the optimizer.
    `needs` is "half" if no other type breaks, "float16" if bfloat16 does not either.
    """

    phase: str
    op: str
    code: str
    needs: str = ""


FORWARD = (
    Kind("forward", "exp", "h = torch.exp(h * 0 + 1000.)"),
    Kind("forward", "div", "h = h / (h * 0)"),
    Kind("forward", "log", "h = torch.log(torch.relu(-h.abs()))"),
    Kind("forward", "sqrt", "h = (-1 - h.abs()).sqrt()"),
    Kind("forward", "pow", "h = ((h * 0).float() + 1e6) ** 7"),
    Kind("forward", "half", "h = ((h * 0).float() + 1e5).half()"),
    Kind("forward", "to", "h = ((h * 0).float() + 1e5).to(torch.float16)"),
    Kind("forward", "matmul", "h = (h * 0 + 300) @ (h * 0 + 300).mT @ h * 1e-6", "float16"),
    Kind(
        "forward",
        "einsum",
        "h = h * torch.einsum('...i,...i->...', h * 0 + 300, h * 0 + 300)[..., None]",
        "float16",
    ),
    Kind("forward", "softmax", "h = torch.softmax(h.masked_fill(h < 1e9, float('-inf')), -1)"),
    Kind("forward", "log_softmax", "h = F.log_softmax(h.masked_fill(h < 1e9, float('-inf')), -1)"),
    Kind("forward", "linear", "h = self.lin(h * 0 + 60000 * self.lin.weight[0].detach().sign())", "float16"),
    Kind("forward", "rsqrt", "h = h * torch.rsqrt((h * 0).mean(-1, keepdim=True))"),
    Kind("forward", "reciprocal", "h = h + (h * 0).reciprocal()"),
    Kind("forward", "add_", "h = h * 0 + torch.finfo(h.dtype).max; h.add_(h)"),
    Kind("forward", "mul_", "h = h * 0 + torch.finfo(h.dtype).max; h.mul_(4)"),
    Kind("forward", "div_", "h = h.clone(); h.div_(h * 0)"),
    Kind("forward", "cumsum", "h = (h * 0 + torch.finfo(h.dtype).max).cumsum(-1, dtype=h.dtype)"),
    Kind("forward", "logit", "h = torch.logit(torch.sigmoid(h * 0 + 1e4))"),
    Kind("forward", "acos", "h = torch.acos(h.abs() + 2)"),
    Kind(
        "forward",
        "norm",
        "h = h + (h * 0 + torch.finfo(h.dtype).max).norm(dim=-1, keepdim=True, dtype=h.dtype)",
    ),
    Kind("forward", "lerp", "h = torch.lerp(h, h * 0 + torch.finfo(h.dtype).max, h * 0 + 8)"),
)
BACKWARD = (
    Kind("backward", "sqrt", "h = h + (h * 0).abs().sqrt()"),
    Kind("backward", "sqrt", "h = h + (h - h.detach()).pow(2).sum(-1, keepdim=True).sqrt()"),
    Kind("backward", "sqrt", "h = torch.where(h > 1e9, (h - h.detach()).sqrt(), h)"),
    Kind("backward", "Big", "h = h + Big.apply(h)"),
    Kind("backward", "pow", "h = h + (h * 0).abs() ** 0.25"),
    Kind("backward", "asin", "h = h + torch.asin(h * 0 + 1)"),
    Kind("backward", "rsqrt", "h = h + ((h * 0).float() + 1e-30).rsqrt() * 1e-30"),
)
LOSS = (
    Kind("loss", "log", "loss = loss + (loss * 0).log()"),
    Kind("loss", "div", "loss = loss / (loss * 0)"),
    Kind(
        "loss",
        "cross_entropy",
        "loss = F.cross_entropy(out.float().masked_fill(out < 1e9, float('-inf')), y)",
    ),
)
INPUT = (
    Kind("input", "", "x[{sample}] = float('nan')"),
    Kind("input", "", "x[{sample}].mul_(float('nan'))"),
    Kind("input", "", "x = x.clone(); x[{sample}, 0] = float('nan')"),
)

# ---- Models ----

HEAD = """
import os
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
{imports}
torch.manual_seed({seed})
NOW = {{"step": 0, "micro": 0}}
{compile_setup}


class Big(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 0

    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf")


def is_due(module):
    return module.bad and NOW == {{"step": {step}, "micro": {micro}}}
"""
BLOCK = """

class Block(nn.Module):
    def __init__(self, width, bad=False):
        super().__init__()
        self.lin = {inner}
        self.norm = nn.LayerNorm(width)
        self.bad = bad

    def forward(self, x):
        h = F.gelu(self.lin(self.norm(x)))
        if is_due(self):
            {fault}
        return x + h.to(x.dtype)
"""
NET = """

class Net(nn.Module):
    def __init__(self, width, depth, bad):
        super().__init__()
        self.stem = {stem}
        self.blocks = nn.ModuleList(Block(width, i == bad) for i in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        h = self.stem(x){after_stem}
        for block in self.blocks:
            h = {run_block}
        return self.head(h{pool})
"""
LINEAR = {"inner": "nn.Linear(width, width)", "stem": "nn.Linear(20, width)", "after_stem": "", "pool": ""}
ATTENTION = """

class Block(nn.Module):
    def __init__(self, width, bad=False):
        super().__init__()
        self.qkv, self.lin = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.bad = nn.LayerNorm(width), bad

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        h = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1).to(v.dtype) @ v
        if is_due(self):
            {fault}
        return x + self.lin(h.to(x.dtype)).to(x.dtype)
"""
REUSED = """

class Net(nn.Module):
    def __init__(self, width, depth, bad):
        super().__init__()
        self.stem, self.head = nn.Linear(20, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList([Block(width, True)])
        self.blocks[0].bad = False
        self.depth, self.bad = depth, bad

    def forward(self, x):
        h = self.stem(x)
        for i in range(self.depth):
            self.blocks[0].bad = i == self.bad
            h = {run_block}
        return self.head(h)
"""
RNN = """

class Block(nn.Module):
    def __init__(self, width, bad=False):
        super().__init__()
        self.cell, self.lin = nn.LSTMCell(width, width), nn.Linear(width, width)
        self.norm, self.bad = nn.LayerNorm(width), bad

    def forward(self, x):
        state = None
        for part in x.unbind(1):
            state = self.cell(part, state)
        h = self.norm(state[0])
        if is_due(self):
            {fault}
        return x + self.lin(h.to(x.dtype)).to(x.dtype)[:, None]
"""
TIED = """

class Net(nn.Module):
    def __init__(self, width, depth, bad):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, width), nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block(width, i == bad) for i in range(depth))

    def forward(self, x):
        h = self.embed((x.detach() > 0).long()).mean(1)
        for block in self.blocks:
            h = {run_block}
        return self.head(h)
"""
LAYER = """

class Block(nn.TransformerEncoderLayer):
    def __init__(self, width, bad=False):
        super().__init__(width, 2, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.bad, self.lin = bad, nn.Linear(width, width)

    def _ff_block(self, x):
        h = super()._ff_block(x)
        if is_due(self):
            {fault}
        return h.to(x.dtype)
"""
SEQUENCE = LINEAR | {
    "after_stem": ".view(len(x), 4, -1)",
    "stem": "nn.Linear(20, 4 * width)",
    "pool": ".mean(1)",
}
IMAGE = {
    "inner": "nn.Sequential(nn.Unflatten(-1, (1, -1)), nn.Conv1d(1, 2, 3, padding=1),"
    " nn.Conv1d(2, 1, 3, padding=1), nn.Flatten(-2))",
    "stem": "nn.Linear(20, width)",
    "after_stem": "",
    "pool": "",
}
FAMILIES = {
    "mlp": (BLOCK + NET, LINEAR),
    "conv": (BLOCK + NET, IMAGE),
    "attention": (ATTENTION + NET, SEQUENCE),
    "reused": (BLOCK + REUSED, LINEAR),
    "rnn": (RNN + NET, SEQUENCE),
    "tied": (BLOCK + TIED, LINEAR),
    "layer": (LAYER + NET, SEQUENCE),
}
CHECKPOINTS = {None: "block(h)", False: "checkpoint(block, h, use_reentrant=False)"}
CHECKPOINTS[True] = "checkpoint(block, h, use_reentrant=True)"

# ---- Training ----

MAIN = """

def main():
    model = Net({width}, {depth}, {bad})
    optimizer = torch.optim.{optimizer}(model.parameters(), lr=1e-3)
    {setup}
    {wrap}
    for step in range({steps}):
        NOW["step"] = step
        optimizer.zero_grad()
        for micro in range({micros}):
            NOW["micro"] = micro
            x, y = torch.randn({batch}, 20), torch.randint(0, 10, ({batch},))
            if step == {step} and micro == {micro}:
                {input_fault}
            {step_lines}


main()
"""
FORWARD_LINES = """out = model(x)
            {indent}loss = F.cross_entropy(out, y)
            {indent}if step == {step} and micro == {micro}:
            {indent}    {loss_fault}"""
LAST = "if micro == {micros} - 1:\n                "
OURS = (
    "{forward}\n            with amp.scale_loss(loss, optimizer{delay}) as scaled:\n"
    "                scaled.backward()\n            " + LAST + "optimizer.step()"
)
CAST = 'with torch.autocast("cpu", torch.{half}):\n                {forward}\n            '
NATIVE = (
    CAST
    + "scaler.scale(loss).backward()\n            "
    + LAST
    + "{clip}scaler.step(optimizer); scaler.update()"
)
PLAIN = "{forward}\n            loss.backward()\n            " + LAST + "optimizer.step()"
BFLOAT16 = CAST + "loss.backward()\n            " + LAST + "optimizer.step()"
INITIALIZE = 'model, optimizer = amp.initialize(model, optimizer, opt_level="{level}", verbosity=0)'
STYLES = {
    level: ("import ampatch as amp", INITIALIZE.format(level=level), OURS)
    for level in ("O1", "O2", "O3", "O4", "O5")
}
STYLES["apex"] = ("from apex import amp", INITIALIZE.format(level="O1"), OURS)
STYLES["apex O2"] = ("from apex import amp", INITIALIZE.format(level="O2"), OURS)
STYLES["native"] = STYLES["clipped"] = ("", 'scaler = torch.amp.GradScaler("cpu")', NATIVE)
STYLES["bfloat16"] = ("", "", BFLOAT16)
STYLES["plain"] = ("", "", PLAIN)
NARROW = {"O4": "bfloat16", "O5": "bfloat16", "bfloat16": "bfloat16", "plain": ""}  # others: float16
CLIP = "scaler.unscale_(optimizer); nn.utils.clip_grad_norm_(model.parameters(), 1.0); "
DDP = (
    'os.environ.setdefault("MASTER_ADDR", "127.0.0.1"); import torch.distributed as dist; import tempfile; '
    'dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1); '
    "model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)"
)


@dataclass(frozen=True)
class Fault:
    """What is planted: where it is, and what the script is. `survives` is None until it was measured."""

    name: str
    phase: str
    op: str
    module: str
    call: int
    step: int
    micro: int
    line: int
    sample: int | None
    script: str
    survives: bool | None = None


def breaks(kind: Kind, style: str) -> bool:
    """Says whether a fault breaks at the precision of a style; at O2 and O3 all of `h` may be half."""
    half = NARROW.get(style, "float16")
    return {"": True, "half": half != "", "float16": half == "float16"}[kind.needs]


def make(seed: int, is_sound: bool = False) -> Fault:
    """Draws a script."""
    draw = random.Random(seed)
    style, family = draw.choice(list(STYLES)), draw.choice(list(FAMILIES))
    kinds = [it for it in FORWARD * 2 + BACKWARD * 4 + LOSS * 3 + INPUT * 3 if breaks(it, style)]
    if style == "O3":  # a half loss of 1e9 and a batch of half make other faults than those planted
        kinds = [it for it in kinds if it.phase != "loss"]
    if family == "tied":
        kinds = [it for it in kinds if it.phase != "input"]  # it embeds a comparison
    if family == "conv":
        kinds = [it for it in kinds if it.op != "linear"]  # its layer is no linear one
    kind = draw.choice(kinds)
    depth, steps = draw.randint(1, 6), draw.randint(1, 6)
    bad, step = draw.randrange(depth), draw.randint(0, 8)
    micros = draw.choice([1, 1, 1, 2, 3])
    micro, batch = draw.randrange(micros), draw.choice([4, 16])
    width, sample = draw.choice([16, 32, 48]), draw.randrange(4)
    again = None if family == "reused" else draw.choice([None, None, None, True, False])
    wrapping = draw.choice(["", "", "", "", "compile", "ddp"]) if again is None else ""
    if family == "rnn" and style in ("O1", "apex", "native", "clipped", "O2", "O3", "apex O2"):
        wrapping = wrapping if wrapping != "compile" else ""
    code, options = FAMILIES[family]
    imports, setup, lines = STYLES[style]
    planted = dict.fromkeys(("fault", "loss_fault", "input_fault"), "pass")
    where = {"loss": "loss_fault", "input": "input_fault"}.get(kind.phase, "fault")
    if not is_sound:
        planted[where] = kind.code.format(sample=sample) + "  # FAULT"
    values = {"seed": seed, "step": step, "micro": micro, "micros": micros, "width": width, "depth": depth}
    values |= {"bad": bad, "steps": step + steps, "batch": batch, "imports": imports}
    values["setup"] = setup or "pass"
    # The 1e-8 of AdamW is 0 in half.
    values["optimizer"] = "SGD" if style == "O3" else draw.choice(["SGD", "AdamW"])
    values["clip"] = CLIP if style == "clipped" else ""
    values |= {"half": NARROW.get(style) or "float16", "delay": "", "compile_setup": "", "wrap": "pass"}
    values |= {"run_block": CHECKPOINTS[again], **planted}
    if micros > 1 and style.startswith(("O", "apex")):
        values["delay"] = f", delay_unscale=micro < {micros - 1}"
    if family == "reused":
        values["run_block"] = "self.blocks[0](h)"
    if wrapping == "compile":
        values["wrap"] = 'model = torch.compile(model, backend="eager")'
    if wrapping == "ddp":
        values["wrap"] = DDP
    indent = "    " if style in ("native", "clipped", "bfloat16") else ""
    forward = FORWARD_LINES.format(indent=indent, **values)
    values["step_lines"] = lines.format(forward=forward, **values)
    script = (HEAD + code.replace("{stem}", options["stem"]) + MAIN).format(
        **{key: text for key, text in options.items() if key != "stem"}, **values
    )
    words = [family, style, f"checkpoint {again}" if again is not None else "", wrapping]
    name = " ".join([*filter(None, words), kind.op])
    where = truth_of(kind, family, bad, sample, script)
    return Fault(name, script=script, step=step, micro=micro, **where)


def truth_of(kind: Kind, family: str, bad: int, sample: int, script: str) -> dict[str, object]:
    """Returns where a fault is."""
    line = next((number for number, text in enumerate(script.splitlines(), 1) if "# FAULT" in text), 0)
    module = "" if kind.phase in ("loss", "input") else f"blocks.{0 if family == 'reused' else bad}"
    call = bad if family == "reused" and module else 0
    if kind.op == "linear":
        module += ".lin"
        call += family not in ("attention", "rnn", "layer")  # where the block has called it before
    return {
        "phase": kind.phase,
        "op": kind.op,
        "module": module,
        "call": call,
        "line": line,
        "sample": sample if kind.phase == "input" else None,
    }


# ---- Runs ----


def fork_child(run: ScriptRun, folder: Path) -> tuple[int, str]:
    """Runs a script in a fork, which has torch already; not beside a GPU, whose threads forbid it."""
    if torch.cuda.is_available():
        return start_process(run, folder)
    import_for_forks()
    said = folder / "said.txt"
    child = os.fork()
    if child == 0:
        run_forked(lambda: run_child(ScriptRun.from_json(run.to_json())), said)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), said.read_text()


def import_for_forks() -> None:
    """Imports once what each fork would: scripts load digits, and optimizers Dynamo at the first step."""
    import sklearn.datasets  # noqa: F401
    import torch._dynamo  # noqa: F401


def run_forked(function, said: Path) -> None:
    """Ends this fork with a function's exit status; what it prints goes to a file."""
    status = 1
    try:
        torch.set_num_threads(1)  # a fork has no threads of its parent
        warnings.simplefilter("default")  # nor pytest's filters
        with said.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  # and not pytest's
        function()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        sys.__stderr__.flush()
        os._exit(status)


def diagnose(script: str, folder: Path, tries: bool = False) -> Report:
    """Returns the doctor's report on a script."""
    (folder / "train.py").write_text(script)
    linecache.clearcache()
    report = Campaign(ScriptRun(str(folder / "train.py")), launch=fork_child, tries=tries).report()
    assert [it for it in report.unknown if FAULT in it] == []
    return report


def report_on(script: str, folder: Path, tries: bool = False) -> dict:
    """Returns the doctor's report on a script, as it is written to a file."""
    return json.loads(json.dumps(diagnose(script, folder, tries).to_json()))


def run_doctor(folder: Path, script: str, *options: str) -> tuple[int, dict]:
    """Runs `ampatch doctor` on a script; returns the exit status and the report."""
    (folder / "train.py").write_text(script)
    out = folder / "report.json"
    status = main_of_ampatch(["doctor", "--json", str(out), *options, str(folder / "train.py")])
    return status, json.loads(out.read_text())


def examine(fault: Fault, folder: Path) -> dict:
    """Returns the doctor's report on a planted fault."""
    return report_on(fault.script, folder)


def measure_float32(fault: Fault, folder: Path) -> bool:
    """Runs a script without mixed precision or casts of its own; says if its weights stayed finite."""
    script = fault.script.replace(").half()", ")")
    for half in ("float16", "bfloat16"):
        script = script.replace(
            f'torch.autocast("cpu", torch.{half})', 'torch.autocast("cpu", enabled=False)'
        )
    script = script.replace('GradScaler("cpu")', 'GradScaler("cpu", enabled=False)')
    for level in ("O1", "O2", "O3", "O4", "O5"):
        script = script.replace(f'opt_level="{level}"', 'opt_level="O0"')
    check = "\n            if not all(torch.isfinite(it).all() for it in (loss, *model.parameters())):\n"
    script = script.replace("\n\n\nmain()", check + "                raise SystemExit(7)\n\n\nmain()")
    (folder / "plain.py").write_text(script.replace("from apex import amp", "import ampatch as amp"))

    def run() -> None:
        exec(compile((folder / "plain.py").read_text(), "plain.py", "exec"), {"__name__": "__main__"})

    said = folder / "plain.txt"
    child = os.fork()
    if child == 0:
        run_forked(run, said)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, 7):
        raise RuntimeError(said.read_text())
    return status == 0


def judge(fault: Fault, report: dict) -> dict[str, bool]:
    """Says which parts of the first finding are right."""
    first = next(iter(report["findings"]), None)
    names = ("step", "micro", "phase", "module", "call", "op", "line", "sample", "float32")
    if first is None:
        return dict.fromkeys(names, False)
    found = (first["step"], first["micro_step"], first["phase"], first["module"], first["call"], first["op"])
    planted = (fault.step, fault.micro, fault.phase, fault.module, fault.call, fault.op)
    right = [mine == its for mine, its in zip(planted, found, strict=True)]
    right[-1] |= fault.phase == "input"  # it may be named after what wrote the batch
    right.append(str(first["where"]).endswith(f":{fault.line}") or fault.phase == "input")
    right.append(fault.sample is None or first["sample"] == fault.sample)
    right.append(fault.survives is None or first["float32_survives"] == fault.survives)
    return dict(zip(names, right, strict=True))


# ---- Proposals ----


def run_faults(seeds: range) -> None:
    """Counts what is right in the first findings."""
    right: Counter[str] = Counter()
    for seed in seeds:
        fault = make(seed)
        with tempfile.TemporaryDirectory() as folder:
            fault = replace(fault, survives=measure_float32(fault, Path(folder)))
            report = examine(fault, Path(folder))
        verdict = judge(fault, report)
        right.update(name for name, good in verdict.items() if good)
        if not all(verdict.values()):
            wrong = [name for name, good in verdict.items() if not good]
            first, planted = next(iter(report["findings"]), {}), replace(fault, script="")
            print(seed, fault.name, "wrong:", *wrong, planted, first, report["unknown"], flush=True)
    print({name: f"{count} of {len(seeds)}" for name, count in right.items()})


def run_sound(seeds: range) -> None:
    """Counts the runs without a finding."""
    silent = 0
    for seed in seeds:
        fault = make(seed, is_sound=True)
        with tempfile.TemporaryDirectory() as folder:
            report = examine(fault, Path(folder))
        said = [*report["findings"], *report["silent"], *report["unknown"]]
        silent += not said
        if said:
            print(seed, fault.name, *said, flush=True)
    print(f"without a finding: {silent} of {len(seeds)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--sound", action="store_true", help="plant nothing")
    parser.add_argument("--show", action="store_true", help="print the first script")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.count)
    if options.show:
        print(make(options.first, options.sound).script)
        return
    (run_sound if options.sound else run_faults)(seeds)


if __name__ == "__main__":
    main()
