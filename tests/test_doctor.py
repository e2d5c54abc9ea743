"""`ampatch doctor`: scripts with a planted fault, and what is said of them."""

import dataclasses
import math
import os
import signal
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import ampatch as amp
from ampatch.__main__ import main
from ampatch.doctor.campaign import findings_in, origins_of
from ampatch.doctor.finding import Report, merge, merge_steps
from ampatch.doctor.instruments import watch as instrument
from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.dispatch import Operations
from ampatch.doctor.instruments.places import Models
from ampatch.doctor.instruments.tape import Enough, Op, Origin, Tape
from ampatch.doctor.instruments.trace import Trace
from ampatch.doctor.instruments.values import Damage, holds_no_number, is_finite
from ampatch.doctor.instruments.values import examine as examine_tensor
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.rules.errors import read_error
from ampatch.doctor.rules.table import explain
from ampatch.doctor.run import ScriptRun
from ampatch.doctor.runs import Seen, start_process
from ampatch.doctor.suspects import describe_scale, find_suspects, is_collapse, pick_suspects
from ampatch.doctor.words import describe, describe_finding
from doctor_samples import sample_finding
from faults import (
    FAMILIES,
    diagnose,
    examine,
    judge,
    make,
    measure_float32,
    report_on,
    run_doctor,
    run_forked,
)
from helpers import wait_until

# ---- Whole scripts ----


# One of each family, with a checkpoint of each kind, compiled and distributed.
SEEDS = {"mlp": 47, "conv": 33, "attention": 2240, "reused": 2536, "rnn": 9, "tied": 103, "layer": 1788}


@pytest.mark.process
@pytest.mark.parametrize("family", FAMILIES)
def test_a_planted_fault_is_found(tmp_path, family):
    fault = make(SEEDS[family])
    assert fault.name.startswith(family)
    fault = replace(fault, survives=measure_float32(fault, tmp_path))
    report = examine(fault, tmp_path)
    assert all(judge(fault, report).values()), (fault, report)
    assert report["runs"] == 3
    assert report["unknown"] == []


GIVES_UP = """
import math, torch, torch.nn.functional as F
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    x, y = torch.randn(2, 4), torch.randint(0, 3, (2,))
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x).log() if step == 3 else model(x), y)
    if {asks}:
        {gives_up}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("asks", "gives_up"),
    [
        ("not torch.isfinite(loss)", "raise SystemExit(1)"),
        ("math.isnan(loss.item())", "break"),
        ("math.isnan(loss.item())", "raise ValueError('nan')"),
    ],
)
def test_a_script_that_gives_up_on_a_bad_loss_is_explained(tmp_path, asks, gives_up):
    report = report_on(GIVES_UP.format(asks=asks, gives_up=gives_up), tmp_path)
    (first,) = report["findings"]
    assert (first["step"], first["op"], first["kind"]) == (3, "log", "nan")
    assert first["float32_survives"] is False


OWN_HALF = """
import torch
from torch import nn
torch.manual_seed(0)
half = torch.float16
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(half)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(24):
    x = torch.randn(4, 8) * (3e5 if step == 2 else 1)
    x = x.to(half)  # CAST
    loss = ((model(x / 100) - 1) ** 2).float().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.process
def test_float32_is_what_the_scripts_own_would_be(tmp_path):
    first = diagnose(OWN_HALF, tmp_path).findings[0]
    line = next(number for number, it in enumerate(OWN_HALF.splitlines(), 1) if "# CAST" in it)
    assert (first.op, first.where.rpartition(":")[2], first.float32_survives) == ("to", str(line), True)
    assert any(
        str(it).startswith("write torch.bfloat16 in the place of float16, at") for it in first.remedies
    )


OWN_MASTERS = """
import torch, torch.nn.functional as F
from torch import nn
from apex.fp16_utils import FP16_Optimizer, network_to_half
torch.manual_seed(0)
model = network_to_half(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))
optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=1e6), static_loss_scale=8.0)
for step in range(4):
    loss = F.cross_entropy(model(torch.randn(16, 8)).float(), torch.zeros(16).long())
    optimizer.zero_grad()
    optimizer.backward(loss)
    optimizer.step()
"""


@pytest.mark.process
def test_masters_that_an_optimizer_copies_after_its_step_are_of_the_update(tmp_path):
    first = diagnose(OWN_MASTERS, tmp_path).findings[0]
    assert (first.phase, first.op, first.kind) == ("optimizer", "_foreach_copy_", "inf")
    assert first.parameter.endswith("weight")
    assert str(first.remedies[0]).startswith("lower the learning rate")


# ---- What a trace of a script says, in this process ----

HEAD = """
import torch, torch.nn.functional as F
from torch import nn
import ampatch as amp
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """
for step in range(6):
    x, y = torch.randn(4, 8), torch.randint(0, 3, (4,))
    {batch}
    loss = F.cross_entropy(model(x), y)
    {loss}
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
"""


def script(level="O1", batch="", loss="", **options):
    """A script that trains at a level."""
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    initialize = f"model, optimizer = amp.initialize(model, optimizer, {level!r}, verbosity=0{given})"
    initialize = initialize.replace(f"optimizer, {level!r}", f"optimizer, opt_level={level!r}")
    return HEAD + initialize + LOOP.format(batch=batch, loss=loss)


FUNCTIONS = """
import torch, torch.nn.functional as F
torch.manual_seed(0)
weight = torch.randn(8, 3, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
for step in range(4):
    x, y = torch.randn(4, 8), torch.randint(0, 3, (4,))
    h = (x @ weight).log() if step == 2 else x @ weight
    loss = F.cross_entropy(h, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
TWO_MODELS = """
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(9, 8, padding_idx=0), nn.Linear(8, 8)
    def forward(self, ids, mask=None):
        return self.last(self.words(ids).mean(1))
first, second = Net(), nn.Linear(8, 1)
optimizers = [torch.optim.Adam(it.parameters()) for it in (first, second)]
for step in range(4):
    for micro in range(2):
        h = first(ids=torch.randint(1, 9, (4, 5)), mask=torch.ones(5, 5))
        is_bad = step == 2 and micro == 1
        h = h / (torch.tensor([1, 1, 0, 1])[:, None] if is_bad else 1)  # FAULT
        (second(h).mean() / 2).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""
OWN_FUNCTION = """
import torch
from torch import nn
torch.manual_seed(0)
class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.sqrt())
        return x.sqrt()
    @staticmethod
    def backward(ctx, gradient):
        return gradient / (2 * ctx.saved_tensors[0])
class Act(nn.Module):
    def forward(self, x):
        return Root.apply(x * (step != 2) + 0 * x.detach())  # FAULT
model = nn.Sequential(nn.Linear(4, 4), nn.Softplus(), Act(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    optimizer.step()
"""
ATTENTION = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)
    def forward(self, x):
        pad = torch.arange(4) >= (0 if step == 2 else 4)
        h, _ = self.attention(x[None], x[None], x[None], key_padding_mask=pad[None])
        return self.head(h[0])
model = Net()
"""
MASKED = """
class Masked(nn.Linear):
    def forward(self, x, mask):
        return super().forward((x + mask).softmax(-1))
model = Masked(8, 3)
"""
NET = "model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))\n"
CLOSURE = """
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy((x @ weight).log() if step == 2 else x @ weight, y)
        loss.backward()
        return loss
    optimizer.step(closure)
"""
TARGET = "y = torch.randn(4, 3); y[1] = float('inf') if step == 2 else 0"
DECAY = "optimizer.param_groups[0]['weight_decay'] = 3e38 if step == 2 else 0.0; model[0].weight.data[0] = 5"
OF_UPDATE = {"phase": "optimizer", "module": "0", "parameter": "0.weight"}
OF_SAMPLE = "sample 3 of the batch holds inf before the model sees it.\n"
OF_DECAY = {"says": ["of the update of 0.weight", "\nlower the learning rate and the weight decay"]}


def rate(value):
    return f"optimizer.param_groups[0]['lr'] = {value} if step == 2 else 0.1"


def left_out(when):
    text = GIVES_UP.format(asks="not torch.isfinite(loss)", gives_up="continue")
    return text.replace("model(x).log() if step == 3", f"model(x * 1e30) if step {when}")


TRACED = {  # the script, and fields of its first finding; without a step it has none, but what is harmless
    "a batch left out": (left_out("== 3"), {"step": 3, "op": "linear", "line": 9}),
    "batches left out": (left_out(">= 3"), {"step": 3, "op": "linear", "line": 9}),
    "a good loss that is asked": (
        GIVES_UP.format(asks="loss.item() > 1e9", gives_up="break").replace(".log() if", " if"),
        {},
    ),
    "an infinite target": (
        script("O0", batch=TARGET).replace("F.cross_entropy(model(x), y)", "F.mse_loss(model(x), y)"),
        {"phase": "input", "op": "", "step": 2, "sample": 1},
    ),
    "a bad weight": (
        script("O1").replace("\nfor step", "\nmodel[2].weight.data[1, 3] = float('nan')\nfor step"),
        {"parameter": "2.weight", "step": 0, "sample": None},
    ),
    "a cast of ours, which is called as what it is made for": (
        script("O1", batch="x = x * (1e7 if step == 2 else 1)"),
        {"phase": "forward", "op": "linear", "module": "0", "step": 2},
    ),
    "a closure": (
        FUNCTIONS.partition("    h =")[0].replace("SGD([weight], 0.1)", "LBFGS([weight])") + CLOSURE,
        {"phase": "loss", "op": "log", "step": 2},
    ),
    "inside of attention": (
        script("O1").replace(NET, ATTENTION),
        {"op": "softmax", "module": "attention", "kind": "nan", "step": 2},
    ),
    "a rate too high for a master": (
        script("O2", batch=rate("3e38"), loss="loss = loss * 1e4 if step == 2 else loss", loss_scale=1.0),
        {"phase": "optimizer", "parameter": "0.weight", "step": 2, "micro_step": 0},
    ),
    "a decay at O0": (script("O0", batch=DECAY, loss_scale=1.0), OF_UPDATE | OF_DECAY | {"step": 2}),
    "a decay at O2": (script("O2", batch=DECAY, loss_scale=1.0), OF_UPDATE | OF_DECAY | {"step": 2}),
    "a second optimizer": (
        TWO_MODELS,
        {"step": 2, "micro_step": 1, "phase": "forward", "op": "div", "sample": 2, "line": 17},
    ),
    "an eps of 0 in half": (
        script("O3", batch="x = 0 * x").replace("SGD(", "Adam(").replace("lr=0.1", "lr=1e-3"),
        {"phase": "optimizer", "step": 0},
    ),
    "an infinite rate": (
        script("O1", batch=rate("float('inf')")).replace("nn.Linear(8, 8), nn.ReLU(), ", ""),
        {"phase": "optimizer", "step": 2, "op": "add_"},
    ),
    "inf in a batch": (
        script(batch="x[3, 5] = float('inf') if step == 2 else 0"),
        {"phase": "input", "op": "", "step": 2, "sample": 3, "says": [OF_SAMPLE]},
    ),
    "-inf in a batch": (
        script(batch="x[3, 5] = float('-inf') if step == 2 else 0"),
        {"phase": "input", "op": "", "step": 2, "sample": 3, "says": [OF_SAMPLE]},
    ),
    "a mask in a batch": (
        script("O4", batch="mask = torch.full((4, 8), float('-inf')); mask[step == 2 :, :3] = 0")
        .replace(NET, MASKED)
        .replace("model(x)", "model(x, mask)"),
        {"phase": "forward", "op": "softmax", "step": 2, "sample": 0},
    ),
    "gradients that are edited": (
        script("O5").replace(
            "    optimizer.step()",
            "    for p in amp.master_params(optimizer): p.grad.div_(step != 2)\n    optimizer.step()",
        ),
        OF_UPDATE | {"op": "div_", "step": 2, "sample": None, "micro_step": 0, "says": ["div_ made"]},
    ),
    "complex numbers": (
        script(
            loss="wave = torch.fft.rfft(x * (step != 2)); wave = wave / wave.abs(); "
            "loss = loss + torch.fft.irfft(wave).mean()"
        ),
        {"op": "div", "step": 2, "dtype": "complex64", "kind": "nan"},
    ),
    "vmap": (
        script("O4").replace("model(x)", "torch.func.vmap(lambda row: model(row).exp() / (step != 2))(x)"),
        {"op": "div", "phase": "loss", "step": 2, "count": 12},
    ),
    "a function of its own": (
        OWN_FUNCTION,
        {"op": "div", "phase": "backward", "module": "2", "step": 2, "line": 12},
    ),
    "inf that reaches nothing": (
        script(loss="seen = (loss.detach() * 0).log()"),
        {"harmless": [("loss", "log")]},
    ),
    "a gradient that vanishes": (
        script(batch="x = F.relu(model[0](x) - 1e3).sqrt()", loss_scale=1.0).replace(
            "F.cross_entropy(model(x), y)", "model[2](x).sum()"
        ),
        {"harmless": [("backward", "sqrt")]},
    ),
    "a mask": (
        script(batch="mask = torch.full((4, 8), float('-inf')).fill_diagonal_(0); x = x + mask.softmax(1)"),
        {},
    ),
}


@pytest.mark.exhaustive(keep=8)
@pytest.mark.filterwarnings("ignore:eps=")  # of the library, of the same fault
@pytest.mark.parametrize("name", TRACED)
def test_what_breaks_is_named_where_it_broke(name):
    text, wanted = TRACED[name]
    with ExitStack() as stack:
        tape = Tape(clock := Clock(stack))
        watch, trace = instrument.Watch(clock), Trace(tape, range(99), goes_on=True)
        clock.follow_run()
        Operations(tape, [trace]).follow()
        stack.callback(amp.uninitialize)
        exec(compile(text, "train.py", "exec"), {"__name__": "__main__"})
    seen = Seen(tuple(watch.attempts), watch.is_open, watch.is_half, tuple(trace.found()))
    found = findings_in(seen, origins_of(seen))
    if "step" not in wanted:
        harmless = merge(seen.attempts, [it for it in seen.origins if not it.has_reached])
        assert (found, [(it.phase, it.op) for it in harmless]) == ([], wanted.get("harmless", []))
        return
    (finding,) = map(explain, found)  # all that follows is told from it
    said = "\n".join([finding.why, str(finding.remedies[0])])
    assert [text for text in wanted.get("says", ()) if text not in said] == []
    first = {**dataclasses.asdict(finding), "line": int(finding.where.rpartition(":")[2])}
    fields = wanted.keys() - {"says"}
    assert {name: first[name] for name in fields} == {name: wanted[name] for name in fields}


@pytest.fixture
def run_script(tmp_path, doctor_in_forks):
    return partial(run_doctor, tmp_path)


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_script_as_well(tmp_path, number):
    pid = tmp_path / "pid"
    (tmp_path / "train.py").write_text(
        f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    doctor = os.fork()
    if doctor == 0:
        run_forked(lambda: sys.exit(main(["doctor", str(tmp_path / "train.py")])), tmp_path / "said")
    wait_until(lambda: pid.exists() and pid.read_text())
    os.kill(doctor, number)
    _, status = os.waitpid(doctor, 0)
    said = (tmp_path / "said").read_text()
    assert (os.waitstatus_to_exitcode(status), "Traceback" in said) == (128 + number, False), said
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.process
def test_a_process_of_the_script_leaves_what_was_seen_its_status_and_what_it_said(tmp_path, monkeypatch):
    (tmp_path / "shell").mkdir()
    monkeypatch.chdir(tmp_path / "shell")
    for name in ("statistics", "torch"):  # which are no modules of the script
        (tmp_path / "shell" / f"{name}.py").write_text("raise RuntimeError")
    (tmp_path / "train.py").write_text(FUNCTIONS + "import sys; print(step, file=sys.stderr); sys.exit(3)")
    run = ScriptRun(str(tmp_path / "train.py"), out=str(tmp_path / "seen"))
    assert start_process(run, tmp_path) == (3, "3\n")
    assert len(Seen.read(tmp_path / "seen").attempts) == 4


@pytest.mark.process
def test_the_search_of_the_scale_is_no_finding(run_script, capsys):
    scales = {"init_scale": 2.0**30}
    text = script("O2").replace(
        "verbosity=0", f"loss_scale=amp.DynamicLossScale(**{scales}, max_scale=2.**40), verbosity=0"
    )
    status, report = run_script(text.replace("range(6)", "range(40)"))
    assert (status, report["findings"]) == (0, [])
    assert report["scale"]["search"]
    skipped = len(report["scale"]["skipped"])
    said = f"{skipped} of 40 steps were skipped (scale 1.07374e+09 to {2.0 ** (30 - skipped):g})"
    assert said in capsys.readouterr().out


@pytest.mark.process
def test_a_fault_that_a_scale_hides_in_its_search_is_found(run_script):
    text = script("O1").replace(
        "verbosity=0", "loss_scale=amp.DynamicLossScale(2.0**30, max_scale=2.0**30), verbosity=0"
    )
    text = text.replace("nn.ReLU()", "Fault()").replace("range(6)", "range(40)")
    fault = "h + (h - h.detach()).pow(2).sum().sqrt() if step == 1 else h"
    text = text.replace(
        "model =", f"class Fault(nn.Module):\n    def forward(self, h):\n        return {fault}\nmodel =", 1
    )
    status, report = run_script(text)
    (found,) = report["findings"]
    assert (status, found["step"], found["phase"], found["op"]) == (1, 1, "backward", "sqrt")
    assert (found["module"], found["where"].rpartition(":")[2]) == ("1", "8")
    assert (found["float32_survives"], report["runs"]) == (False, 4)


@pytest.mark.process
def test_the_scale_of_the_model_that_overflows_is_shown_where_there_are_two(run_script):
    text = script("O1", loss="loss = loss * 1e4").replace("import ampatch as amp", "from apex import amp")
    first = "other = nn.Linear(2, 2)\namp.initialize(other, torch.optim.SGD(other.parameters(), 0.1))\n"
    _, report = run_script(text.replace("model, optimizer =", first + "model, optimizer ="))
    assert report["scale"]["skipped"][:2] == [0, 1]
    assert report["scale"]["history"][:3] == [[0, 65536.0], [1, 32768.0], [2, 16384.0]]


GAN = """
import torch, torch.nn.functional as F
torch.manual_seed(0)
generator, critic = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
for step in range(6):
    of_critic.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = F.softplus(critic(generator(torch.randn(2, 4)).detach())).mean()
    scaler.scale(loss * float("inf") if step == 2 else loss).backward()
    scaler.step(of_critic)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = F.softplus(-critic(generator(torch.randn(2, 4)))).mean()
    inputs = list(generator.parameters()) if step == 2 else None
    scaler.scale(loss).backward(inputs=inputs)
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.process
def test_gradients_that_an_earlier_step_of_another_optimizer_left_are_not_this_ones(tmp_path):
    report = report_on(GAN, tmp_path)
    assert report["scale"]["skipped"] == [4]  # the critic's third step


@pytest.mark.process
def test_an_old_script_for_cuda_is_examined_on_the_cpu(run_script):
    text = script(batch="x = x.cuda(); x[2, 5] = nan if step == 2 else 1")
    text = text.replace("import torch,", "from torch._six import inf; nan = inf - inf; import torch,", 1)
    _, report = run_script(text, "--device", "cpu", "--legacy")
    assert [(it["phase"], it["step"]) for it in report["findings"]] == [("input", 2)]


@pytest.mark.process
@pytest.mark.skipif(torch.cuda.is_available(), reason="autocast is on where there is a GPU")
@pytest.mark.parametrize("context", ["torch.autocast('cuda')", "torch.cuda.amp.autocast()"])
def test_autocast_for_a_gpu_that_is_not_there_is_told(run_script, context):
    text = HEAD + LOOP.format(batch="x = x.cuda(); y = y.cuda()", loss="")
    text = text.replace("with amp.scale_loss(loss, optimizer) as scaled:", f"with {context}:  # HERE")
    text = text.replace("scaled.backward()", "F.cross_entropy(model(x), y).backward()")
    _, report = run_script(text, "--device", "cpu")
    line = next(index for index, it in enumerate(text.splitlines(), 1) if "# HERE" in it)
    assert f"train.py:{line}, is off" in report["unknown"][0]


@pytest.mark.process
def test_on_the_cpu_a_cast_is_no_part_of_the_operation_after_it(run_script):
    loss = "high = (loss * (step != 2)).float()\n    loss = loss + high.log()"
    text = script(batch="x = x.cuda(); y = y.cuda()", loss=loss)
    _, report = run_script(text, "--device", "cpu")
    line = 1 + text.splitlines().index("    loss = loss + high.log()")
    assert [(it["op"], it["where"].rpartition(":")[2]) for it in report["findings"]] == [("log", str(line))]


@pytest.mark.process
def test_a_script_that_never_steps_is_told_so(run_script):
    status, report = run_script("print('hello')")
    assert status == 0
    assert "made no step" in report["unknown"][0]


@pytest.mark.process
def test_an_error_that_float32_does_not_raise_is_a_finding(run_script, capsys):
    line = "assert step < 2 or x.half().dtype != torch.float16, 'half'  # HERE"
    status, report = run_script(text := script("O1", batch=line))
    (found,) = report["findings"]
    number = next(at for at, it in enumerate(text.splitlines(), 1) if "HERE" in it)
    assert (status, found["op"], found["phase"]) == (1, "AssertionError", "error")
    assert found["where"].endswith(f"train.py:{number}")
    assert report["unknown"] == []  # it is said once
    assert "only in half: half" in capsys.readouterr().out


@pytest.mark.process
@pytest.mark.parametrize("batch", ["time.sleep(0.2)", "time.sleep(900 if step else 0)"])
def test_a_script_that_takes_too_long_is_ended_and_reported(run_script, capsys, batch):
    text = script(batch=batch).replace("range(6)", "range(1000)")
    status, report = run_script(f"import time\n{text}", "--seconds", "2")
    assert (status, report["findings"]) == (0, [])
    assert 0 < report["scale"]["steps"] < 20
    assert "was ended after 2 s" in report["unknown"][0]
    assert capsys.readouterr().err.startswith("run 1: watched, the script as it is\n")


@pytest.mark.process
@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ("x = x / (0 if step == 2 and not os.path.exists(__file__ + 'x') else 1); open(__file__ + 'x', 'w')"
        " if step == 2 else 0", "Step 2 broke, and could not be traced: it did not happen again"),
        ("raise ValueError(step)", "The script broke by itself: run ended with status 1: ValueError: 0"),
    ],
)  # fmt: skip
def test_what_broke_and_could_not_be_traced_is_said_first(run_script, capsys, batch, said):
    status, report = run_script("import os" + script("O3", batch=batch))
    assert (status, report["findings"]) == (3, [])
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected a Python script"),
        (["--opt-level", "O9", "x.py"], "expected one of O0"),
        (["missing.py"], "does not exist"),
        (["--json", "missing/report.json", __file__], "expected a file in a folder that exists"),
    ],
)
def test_what_cannot_be_examined_is_refused_in_a_line(capsys, arguments, said):
    assert main(["doctor", *arguments]) == 2
    assert said in capsys.readouterr().err


# ---- Which steps are looked at ----


def attempts(*words, scale=1024.0):
    """Attempts by a letter each: good, overflow (halves the scale), weights bad, loss bad; + doubles."""
    found = []
    for word in "".join(words):
        if word == "+":
            scale *= 2
            continue
        found.append(Attempt(len(found), scale, True, word != "l", word not in "ol", word != "w"))
        scale /= 2 if word in "ol" else 1
    return found


@pytest.mark.parametrize(
    ("words", "suspects", "collapse"),
    [
        ("gggg", (), False),
        ("ooogggg", (0, 1, 2), False),  # the search for the first scale
        ("oogogogg", (0, 3, 5, 1), False),  # what a search explains comes last
        ("ggg+ogg", (3,), False),  # it grew to where it never was
        ("gggogg", (3,), False),
        ("ggogogog", (2, 4, 6), True),
        ("gogg+ogg+ogg+ogg", (1, 4, 7, 10), False),  # it grows, and is too large again
        ("ggogogog" + 16 * "g", (2, 4, 6), False),  # it has found its size
        ("oooooo", (0, 5, 1, 2, 3, 4), True),
        ("gggw", (3,), False),
        ("gggwwww", (3,), True),  # what follows comes of it
        ("lgg", (0,), False),
    ],
)
def test_suspects(words, suspects, collapse):
    run = attempts(words)
    assert find_suspects(run) == suspects
    assert is_collapse(run) is collapse


@pytest.mark.parametrize(
    ("words", "picked"),
    [
        ("gg+ogg+ogg+oggooo", (2, 5, 11, 12)),  # those from which on all break
        ("gg+ogg+ogg+oggoogooo", (2, 5, 11, 12)),  # or most
        ("gg+ogg+ogg+ogg+ogg", (2, 5, 8, 11)),
        ("gg+ogg+ogg+ogg+ogg+ogg", (2, 5, 11, 14)),
        ("ooogg", (0, 1, 2)),
    ],
)
def test_suspects_are_picked_from_both_ends(words, picked):
    run = attempts(words)
    assert pick_suspects(run, find_suspects(run), 4) == picked


def origin(attempt, is_of_scale, op="mul"):
    """What a trace leaves of an operation that reached the loss."""
    call, damage = Op(op, "loss", None, "t.py:1", "float16"), Damage("inf", (0,), 1, 1.0, (1,), "float16")
    more = {"attempt": attempt, "has_reached": True, "is_of_scale": is_of_scale}
    return Origin(call, "backward", damage, 0, 1.0, **more)


@pytest.mark.parametrize(
    ("words", "origins", "found"),
    [
        (
            "oooooo",
            [origin(0, True), origin(5, False, "sqrt")],
            ["sqrt"],
        ),  # the search of a scale is no cause
        ("oooooo", [origin(0, True), origin(5, True)], ["mul"]),  # unless there is no other
        ("ol", [origin(0, True), origin(1, False, "log")], ["log"]),
        ("ggogogog", [origin(2, True)], ["mul"]),  # a good scale that overflows again and again
        ("ggog", [origin(2, True)], []),  # now and then
        ("ggogogog", [origin(2, True), origin(4, True), origin(6, False, "rsqrt")], ["rsqrt"]),
        ("ggog", [origin(2, False)], ["mul"]),
    ],
)
def test_what_a_smaller_scale_mends_counts_where_none_is_found(words, origins, found):
    seen = Seen(tuple(attempts(words)), False, False, tuple(origins))
    assert [it.op for it in findings_in(seen, origins)] == found


def test_what_came_after_weights_were_lost_is_left_out():
    seen = Seen(tuple(attempts("gwg")), False, False, (origin(1, False), origin(2, False)))
    assert [it.attempt for it in origins_of(seen)] == [1]


def test_steps_without_a_scale_do_not_make_a_search_a_collapse():
    assert not is_collapse([Attempt(0), *attempts("oogg"), Attempt(1)])


@pytest.mark.parametrize(
    ("raised", "advice"),
    [
        ("AssertionError: No inf checks were recorded for this optimizer.", "into the branch that has"),
        ("RuntimeError: unscale_() has already been called on this optimizer since the", "same `if`"),
        ("RuntimeError: unscale_() is being called after step().", "before scaler.step"),
        ("ValueError: Attempting to unscale FP16 gradients.", "model.float()"),
        ("RuntimeError: The total norm is non-finite, so it cannot be clipped.", "error_if_nonfinite"),
        ("ValueError: Expected more than 1 value per channel when training", "drop_last"),
        ("RuntimeError: expected scalar type Float but found Half", "custom_fwd"),
        ("ampatch.errors.BannedFunctionError: binary_cross_entropy is not safe", "BCEWithLogitsLoss"),
        ("ValueError: ... to satisfy the constraint Simplex(), but", "logits="),
        ("RuntimeError: step() has already been called since the last update().", "scaler.update() once"),
    ],
)
def test_an_error_of_a_scaler_is_said_with_its_line_and_what_to_do(raised, advice):
    files = [f"{os.getcwd()}/train.py", torch.__file__, f"{os.path.dirname(torch.__file__)}/amp/x.py"]
    said = "".join(f'  File "{it}", line {at}, in f\n    g()\n' for at, it in enumerate(files, 7))
    error = read_error(1, f"Traceback:\n{said}{raised}\n")
    assert str(error) == f"run ended with status 1: {raised} (at train.py:7)"
    assert advice in error.advice


ANOMALY = script("O0", loss="torch.autograd.set_detect_anomaly(True); loss = (loss * (step != 2)).sqrt()")
RUNNING = script("O3", batch="x = x * (3000 if step == 2 else 1)").replace(
    "nn.ReLU(), nn.Linear(8, 3)", "nn.BatchNorm1d(8)"
)


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "phase", "op"), [(ANOMALY, "backward", "sqrt"), (RUNNING, "forward", "batch_norm")]
)
def test_where_a_script_stops_by_itself_or_only_a_buffer_breaks_the_line_is_known(tmp_path, text, phase, op):
    (finding,) = report_on(text, tmp_path)["findings"]
    assert (finding["step"], finding["phase"], finding["op"]) == (2, phase, op)


SECOND_MODEL = """
import math, torch
first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
second.register_buffer("least", torch.tensor([math.inf, 1.0]))
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
for step in range(4):
    loss = second(first(torch.ones(2, 4))).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.process
def test_a_buffer_that_is_infinite_from_the_beginning_breaks_nothing(tmp_path):
    report = report_on(SECOND_MODEL, tmp_path)
    assert (report["findings"], report["untraced"]) == ([], "")


def test_a_run_ends_where_weights_stay_lost_and_goes_on_where_they_come_back(monkeypatch):
    monkeypatch.setattr(instrument, "MOST_LOST", 3)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ExitStack() as stack:
        watch = instrument.Watch(clock := Clock(stack))
        clock.follow_run()
        with suppress(Enough):
            for step in range(99):
                loss = model(torch.ones(1, 2)).sum() / (step not in (4, 9))
                model.zero_grad()
                loss.backward()
                optimizer.step()
                if step == 5:
                    torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
    assert [it.step for it in watch.attempts if not it.weights] == [4, 5, 9, 10, 11]


def test_how_far_float32_was_run_is_said_of_a_long_script():
    said = list(describe_finding(sample_finding(facts={"up_to": 420})))
    assert said[-1] == "  the same run in float32 stays finite up to step 420, and ends there"


def test_a_static_scale_does_not_search():
    run = [Attempt(0, 128.0, False, True, False, True)]
    assert find_suspects(run) == (0,)
    assert is_collapse(run)


def test_the_history_of_a_scale_has_its_changes():
    scale = describe_scale(attempts("oogg+gg"))
    assert scale == {
        "history": [(0, 1024.0), (1, 512.0), (2, 256.0), (4, 512.0)],
        "skipped": [0, 1],
        "search": True,
        "steps": 6,
    }


def finding(**given):
    own = {
        "step": 0,
        "steps": (),
        "model": "m",
        "module": "a",
        "op": "exp",
        "where": "t.py:1",
        "sample": None,
    }
    own |= {"count": 1, "input_largest": 12.0, "float32_survives": None}
    return sample_finding(**own | given)


def test_the_same_at_several_steps_is_one_finding():
    merged = merge_steps([finding(step=1), finding(step=4, call=1), finding(step=4, op="log")])
    assert [(it.op, it.steps) for it in merged] == [("exp", (1, 4)), ("log", (4,))]


def test_a_line_with_a_finding_is_not_called_harmless():
    harmless = (finding(phase="backward"), finding(where="t.py:2"))
    said = list(describe(Report(findings=(finding(step=1),), harmless=harmless)))
    assert [line for line in said if "Harmless" in line] == [
        "Harmless, as it reached no loss, gradient or weight: inf or NaN made at t.py:2"
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"float32_survives": True}, "keep_fp32=['a']): "),
        ({"op": "acos", "kind": "nan"}, "a small margin inside of its domain"),
        ({"float32_survives": True, "module": "h.1.b", "facts": {"own": True}}, "['h.*.b']): these modules"),
        ({"float32_survives": True, "autocast": "cpu"}, "m.get_submodule(name)"),
        ({"float32_survives": True, "keep": ("a", "b")}, "keep_fp32=['a', 'b']): these modules"),
        ({"float32_survives": False, "step": 3}, "learning rate"),
        ({"float32_survives": False}, "no update has been made yet"),
        ({"op": "log"}, "logits"),
        ({"op": "softmax", "facts": {"constant": (-math.inf, "-inf", "float16")}}, "mask with -1e4"),
        ({"op": "sqrt", "phase": "backward"}, "under the root"),
        ({"op": "matmul", "facts": {"own": True}}, "divide before the sum"),
        ({"phase": "input"}, "loader"),
        ({"op": "std", "kind": "nan"}, "correction=0"),
        ({"op": "pow", "phase": "backward"}, "clamp the base"),
    ],
)
def test_remedies_fit(given, said):
    assert any(said in str(remedy) for remedy in explain(finding(**given)).remedies)


@pytest.mark.parametrize("op", ["div", "log", "softmax"])
def test_a_learning_rate_mends_no_domain(op):
    found = explain(finding(op=op, float32_survives=False))
    assert not any("learning rate" in str(remedy) for remedy in found.remedies)
    assert "nothing above" not in found.why


def test_a_view_is_traced_that_torch_refuses_to_tell_of():
    clock = Clock(ExitStack())
    with Operations(tape := Tape(clock), [Trace(tape, None)]):
        assert nn.Embedding(4, 2, padding_idx=0).weight[0].sum() == 0


def test_a_bad_gradient_that_came_of_no_operation_that_was_seen_has_no_origin():
    weight, bad = nn.Parameter(torch.ones(2)), torch.full((2,), math.inf)
    trace, node = Trace(Tape(Clock(ExitStack())), None), (weight * 2).grad_fn
    trace._on_bad_gradient(Op("mul", "forward", None, None), node, None, bad, (bad,))
    weight.grad = bad
    for _ in range(2):  # after the backward pass, and before the step
        trace.end_closure(torch.optim.SGD([weight], lr=1.0))
    assert trace.found() == []


def test_the_reason_names_the_largest_input_and_the_limit_of_the_type():
    assert explain(finding(float32_survives=True)).why == (
        "exp made 1 inf in float16; its largest input is 12. float16 holds nothing above 65504."
    )


# ---- Values and places ----


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_wrong_in_a_tensor(dtype):
    tensor = torch.ones(3, 4, dtype=dtype)
    assert examine_tensor(tensor) is None
    tensor[1, 2], tensor[2, 0] = math.inf, -2
    damage = examine_tensor(tensor)
    assert (damage.kind, damage.element, damage.count, damage.largest_finite) == ("inf", (1, 2), 1, 2.0)
    tensor[2, 3] = math.nan
    assert (examine_tensor(tensor).kind, examine_tensor(tensor).count) == ("nan", 2)
    damage = examine_tensor(tensor, took_inf=True)  # as of a mask
    assert (damage.element, damage.count, damage.largest_finite) == ((2, 3), 1, 2.0)


def test_sparse_and_integers_are_looked_at_as_what_they_hold():
    sparse = torch.sparse_coo_tensor([[0]], [math.inf], (3,))
    assert not is_finite(sparse)
    assert is_finite(torch.arange(3))
    assert is_finite(torch.empty(0))
    large = torch.tensor([60000.0, 60000.0], dtype=torch.float16)
    assert not is_finite(torch.sparse_coo_tensor([[1, 1]], large, (3,)))  # their sum


def test_an_infinity_that_the_script_names_is_seen_in_arguments():
    assert holds_no_number((1, [2.0, -math.inf]))
    assert not holds_no_number((1, 2.0, "inf", torch.tensor(math.inf)))


def test_a_loss_without_parameters_is_no_model():
    models = Models()
    assert not models.enter(nn.CrossEntropyLoss())
    assert not models.is_inside
