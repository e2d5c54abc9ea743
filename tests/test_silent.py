"""Silent faults: scripts that train wrongly without a sign, and their sound siblings."""

import linecache
import re
from contextlib import ExitStack, suppress
from dataclasses import replace
from textwrap import dedent

import pytest
import torch

import ampatch as amp
from ampatch.apex.script import level_overrides
from ampatch.doctor.finding import Finding, Report
from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.dispatch import Operations
from ampatch.doctor.instruments.precision import without_casts
from ampatch.doctor.instruments.tape import Enough, Tape
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.silent import gradients
from ampatch.doctor.silent.gradients import Ranges, Sample, compare_gradients
from ampatch.doctor.silent.looks import Looks
from ampatch.doctor.silent.notes import Notes, examine_silent
from ampatch.doctor.silent.scaled import Scaled
from ampatch.doctor.suspects import plan_looks
from ampatch.doctor.words import describe
from doctor_samples import sample_finding
from faults import run_doctor
from helpers import import_float8

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of the library, of the same faults

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


def look(text, window=()):
    """Runs a script under the instruments; returns what they noted, the attempts, and the error."""
    error = None
    linecache.cache["train.py"] = len(text), None, text.splitlines(True), "train.py"
    with ExitStack() as stack:
        tape = Tape(clock := Clock(stack))
        scaled = Scaled(clock, notes := Notes(clock))
        looks = Looks(tape, notes, window, scaled)
        clock.follow_run()
        Operations(tape, [looks]).follow()
        stack.callback(amp.uninitialize)  # before what it is patched over is gone
        try:
            exec(compile(text, "train.py", "exec"), {"__name__": "__main__"})
        except RuntimeError as raised:
            error = raised
    scaled.close()
    return list(notes.found.values()), [Attempt(step) for step in range(clock.attempt)], error


def watch(text):
    """Returns the silent faults of a script, and the error that ended it."""
    found, attempts, error = look(text)
    return examine_silent(found, attempts, ()), error


def marked(text):
    """The kinds and lines of the faults in a script, which are marked there."""
    lines = enumerate(text.splitlines(), 1)
    return [(kind, f"train.py:{n}") for n, line in lines for kind in re.findall(r"#: (\w+)", line)]


def unmarked(text):
    return re.sub(r"  #: \w+", "", text)


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
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
BLOCK = """
with amp.scale_loss(loss, optimizer) as scaled:
    scaled.backward()
"""
AVERAGE = """
if step == 0:
    average = [p.detach().clone() for p in model.parameters()]
for it, p in zip(average, model.parameters()):
    with torch.no_grad():
        p.add_(torch.randn_like(p) / 8)
        {}
"""
STATE = (
    HEAD
    + """
optimizer = torch.optim.Adam(model.parameters())
state = optimizer.state_dict()
for at, p in enumerate(model.parameters()):
    moments = {"exp_avg": torch.full_like(p, 1e-4), "exp_avg_sq": torch.full_like(p, 1e-9)}
    state["state"][at] = {"step": torch.tensor(9.0), **{name: it.float() for name, it in moments.items()}}
optimizer.load_state_dict(state)
"""
)
PENALTY = """
x.requires_grad_()
g = torch.autograd.grad(scaler.scale(model(x).float().sum()), x, create_graph=True)[0]  #: scaled_penalty
loss = loss + ({}).pow(2).mean()
"""
LOST = "lost_updates"
PLAIN = """
for step in range(4):
    loss = model(torch.randn(4, 8)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
IN_HALF = (HEAD + PLAIN.replace("8)).pow", "8).bfloat16()).float().pow")).replace(
    "optimizer =", "model = model.bfloat16()\noptimizer ="
)
CLOSURE = """
for step in range(4):
    x = torch.randn(4, 8)
    def closure():
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss
    optimizer.step(closure)
"""
INSIDE = (
    HEAD
    + """
with torch.autocast("cpu", torch.bfloat16):
    for step in range(4):
        loss = model(torch.randn(4, 8)).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  #: stale_weights
"""
)
SECOND = HEAD + "other = torch.amp.GradScaler('cpu')\n"
ATTENTION = """
n = 128
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(1, 12)
    def forward(self, x):
        q, k, v = (self.qkv(x.unsqueeze(-1)) * {size}).chunk(3, -1)
        {line}
        return out.float().mean(1)
model = nn.Sequential(nn.Linear(8, n), Attention(), nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""


def attention(line, size):
    return native(STEP, HEAD + ATTENTION.format(line=line, size=size))


def forward(line):
    """A model whose forward has a line on `h`, the output of a layer."""
    return HEAD + (
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)\n"
        "    def forward(self, x):\n"
        "        h = self.one(x)\n"
        f"        {line}\n"
        "        return self.two(h)\n"
        "model = Net()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
    )


def in_forward(line):
    return native(STEP, forward(line))


def in_norm(lines, bias=3000.0):
    return native(STEP, norm(lines, bias))


RMS = "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)  #: zeros"
RMS_LINES = """
variance = (x * x).mean(-1, keepdim=True)  #: zeros
return x * torch.rsqrt(variance + 1e-6)
"""
FAULTS = {
    "norm in lines": in_norm(RMS_LINES),
    "norm at O1": ours(BLOCK, "O1", norm(RMS_LINES)),
    "norm at O2": ours(BLOCK, "O2", norm(RMS_LINES)),
    "a quotient": in_norm("return x / (x * x).sum(-1, keepdim=True).sqrt()  #: zeros"),
    "norm and dropout": in_norm(
        "x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))  #: zeros\nreturn F.dropout(x)"
    ),
    "in place": in_norm("n = (x * x).mean(-1, keepdim=True)  #: zeros\nreturn x * n.add_(1e-6).rsqrt_()"),
    "inside of a function": in_norm("return F.normalize(x, eps=1e-6)  #: zeros", 30000.0),
    "squares of zero": in_norm(
        "x = x - 1e-4\nreturn x + ((x - x + 1e-4) ** 2).sum(-1, keepdim=True).sqrt() * 100  #: underflow",
        1.0,
    ),
    "clip": native(f"{STEP}\n{CLIP}  #: clipped_while_scaled"),
    "clip by value": native(
        f"{STEP}\nnn.utils.clip_grad_value_(parameters=model.parameters(), clip_value=0.5)"
        "  #: clipped_while_scaled"
    ),
    "clip by a norm of one's own": native(
        f"{STEP}\n"
        "nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(64.0))  #: clipped_while_scaled"
    ),
    "a total norm": native(
        f"{STEP}\nnn.utils.get_total_norm([p.grad for p in model.parameters()])  #: not_unscaled"
    ),
    "clip in a block": ours(
        BLOCK + "    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)  #: clipped_while_scaled"
    ),
    "clip in a block at O2": ours(
        BLOCK + "    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)  #: clipped_while_scaled",
        "O2",
    ),
    "the norm of scaled gradients": native(
        f"{STEP}\nnorms = [p.grad.data.norm(2) for p in model.parameters()]  #: not_unscaled"
    ),
    "clamped by hand": native(
        f"{STEP}\nfor p in model.parameters():\n    p.grad.clamp_(-1, 1)  #: not_unscaled"
    ),
    "a step without the scaler": native(f"{STEP}\noptimizer.step()  #: not_unscaled\ncontinue"),
    "unscaled twice": native(
        f"{STEP}\nscaler.unscale_(optimizer)\nscaler.unscale_(optimizer)  #: unscaled_twice"
    ),
    "unscaled twice, caught": native(
        f"{STEP}\nscaler.unscale_(optimizer)\n"
        "try:\n    scaler.unscale_(optimizer)  #: unscaled_twice\nexcept RuntimeError: pass"
    ),
    "unscaled by a second scaler": native(
        f"other.scale(loss.detach())\n{STEP}\nscaler.unscale_(optimizer)\n"
        "other.unscale_(optimizer)  #: unscaled_twice",
        SECOND,
    ),
    "unscaled at each micro-step": native(
        f"{STEP}\nscaler.unscale_(optimizer)\nscaler.update()\n"
        "scaler.scale(F.cross_entropy(model(x), y)).backward()\nscaler.unscale_(optimizer)  #: unscaled_twice"
    ),
    "a loss without a scale": native(
        f"{STEP}\nF.cross_entropy(model(x), y).backward()  #: unscaled_backward"
    ),
    "the loss itself": ours(
        "with amp.scale_loss(loss, optimizer):\n    loss.backward()  #: unscaled_backward"
    ),
    "never backpropagated": native(
        f"extra = scaler.scale(model(x).pow(2).mean())  #: scaled_not_backpropagated\n{STEP}"
    ),
    "a block without a backward": ours(
        BLOCK
        + "with amp.scale_loss(model(x).mean(), optimizer) as more:  #: scaled_not_backpropagated\n    pass"
    ),
    "a step that never comes": native(f"{STEP}  #: never_stepped\ncontinue"),
    "a backward after its block": ours(
        "with amp.scale_loss(loss, optimizer) as scaled:\n    pass\nscaled.backward()  #: late_backward"
    ),
    "a part in half": ours("model[2].half()  #: half_after_initialize\n" + BLOCK, "O4"),
    "an average": ours(BLOCK + AVERAGE.format("it.lerp_(p, 1e-4)  #: lost_updates"), "O5"),
    "an average in two steps": ours(
        BLOCK + AVERAGE.format("it.mul_(0.99999).add_(p, alpha=1e-5)  #: lost_updates"), "O3"
    ),
    "an average that is subtracted from": ours(
        BLOCK + AVERAGE.format("it.sub_((it - p) * 1e-4)  #: lost_updates"), "O5"
    ),
    "steps that are lost": IN_HALF.replace("lr=0.01", "lr=1e-5").replace("step()", "step()  #: lost_updates"),
    "gradients that nothing zeroes": HEAD
    + PLAIN.replace("    optimizer.zero_grad()\n", "").replace("step()", "step()  #: not_zeroed"),
    "an optimizer of layers that are gone": HEAD
    + "model[2] = nn.Linear(8, 3)\nmodel[0] = nn.Linear(8, 8)\n"
    + PLAIN.replace("step()", "step()  #: no_gradients"),
    "a step after that of the scaler": native(
        f"{STEP}\nscaler.step(optimizer)\noptimizer.step()  #: stepped_twice\nscaler.update()\ncontinue"
    ),
    "a scaler for each step": native(f'scaler = torch.amp.GradScaler("cpu")  #: renewed_scaler\n{STEP}'),
    "a loop inside of autocast": INSIDE,
    "positions in half": in_forward("h = h + (torch.arange(32) + 5000).half()[:8]  #: collapsed"),
    "angles of times in half": in_forward(
        "h = h + ((torch.rand(8) * 9000).half() / torch.tensor([2.0])).sin()  #: coarse_angles"
    ),
    "angles in half": in_forward(
        "h = h + torch.cos(torch.linspace(0, 9000, 8, dtype=torch.half))  #: coarse_angles"
    ),
    "a penalty of scaled gradients": native(PENALTY.format("g") + STEP),
    "a checkpoint in half": STATE.replace(".float()", ".half()").replace(
        "(state)\n", "(state)  #: lost_state\n"
    ),
    "a cast that is undone": in_forward("h = h.float()  #: float32_under_autocast"),
    "casts of both factors": in_forward(
        "h = h @ (h.float().t() @ h.float()) * 1e-2  #: float32_under_autocast"
    ),
    "a cast at O1": ours(BLOCK, "O1", forward("h = h.float()  #: float32_under_autocast")),
    "a model in float32": native(STEP, HEAD + "model = model.to(torch.float32)  #: float32_under_autocast\n"),
    "a module in float32": ours(BLOCK, "O1", HEAD + "model[2].float()  #: float32_under_autocast\n"),
    "a sum divided by its length": attention("out = q @ (k.transpose(-2, -1) @ v) / n  #: length_alone", 7),
    "a sum of scores": attention("out = (q @ k.transpose(-2, -1)).relu() @ v / n  #: length_alone", 6),
}

GAN = (
    HEAD
    + """
critic = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.01)
"""
)
SOUND = {
    "a line of casts, of which one has an effect": in_forward(
        "h = (lambda a, b: (a * 2) @ b.t() @ a)(*(it.float() for it in (h, h)))"
    ),
    "a region of autocast for each step": unmarked(INSIDE)
    .replace("with torch", "for step in range(4):\n  with torch")
    .replace("    for step in range(4):", "    for _ in range(1):"),
    "a loop inside of autocast without its cache": unmarked(INSIDE).replace(
        "bfloat16)", "bfloat16, cache_enabled=False)"
    ),
    "gradients that are zeroed by hand": HEAD
    + PLAIN.replace("optimizer.zero_grad()", "[p.grad.zero_() for p in model.parameters() if step]"),
    "gradients that are zeroed in place": HEAD + PLAIN.replace("grad()", "grad(set_to_none=False)"),
    "steps in half": IN_HALF,
    "steps without a rate": IN_HALF.replace("lr=0.01", "lr=0.0"),
    "whole numbers that half holds": in_forward("h = h + torch.arange(32).half()[:8]"),
    "angles that half holds": in_forward(
        "h = h + torch.sin((torch.rand(8) * 9).half()) + torch.cos(torch.rand(8) * 1e5)"
    ),
    "a penalty": native(unmarked(PENALTY).format("g / scaler.get_scale()") + STEP),
    "an average in float32": ours(BLOCK + AVERAGE.format("it.lerp_(p, 1e-4)"), "O4"),
    "an average of large parts": ours(BLOCK + AVERAGE.format("it.lerp_(p, 0.3)"), "O5"),
    "an average that has arrived": ours(BLOCK + AVERAGE.format("it.copy_(p).lerp_(p, 1e-3)"), "O5"),
    "a checkpoint in float32": STATE,
    "O4": ours(BLOCK, "O4"),
    "O5": ours(BLOCK, "O5"),
    "norm": in_norm(RMS, 1.0),
    "norm in float32": in_norm("return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True))"),
    "a norm that is thrown away": in_norm(
        "thrown = x * torch.rsqrt((x * x).mean(-1, keepdim=True))\nreturn x * 1e-3"
    ),
    "layer norm": in_norm("return F.layer_norm(x.float(), (8,)).type_as(x)"),
    "clip after unscale_": native(
        f"{STEP}\nscaler.unscale_(optimizer)\n{CLIP}\n[p.grad.norm() for p in model.parameters()]\n"
        "norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])\n"
        "nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)"
    ),
    "clip at the scale": native(
        f"{STEP}\nnn.utils.clip_grad_norm_(model.parameters(), 1.0 * scaler.get_scale())"
    ),
    "clip after a block": ours(BLOCK + "nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)"),
    "accumulation": native(
        "scaler.scale(loss / 2).backward()\n"
        "scaler.scale(F.cross_entropy(model(x).float(), y) / 2).backward()\n"
        f"scaler.unscale_(optimizer)\n{CLIP}"
    ),
    "accumulation in blocks": ours(BLOCK + BLOCK.replace("(loss,", "(F.cross_entropy(model(x), y),")),
    "gradients that are zeroed": native(
        f"{STEP}\nscaler.step(optimizer); scaler.update()\noptimizer.zero_grad(set_to_none=False)\n"
        "for p in model.parameters(): p.grad.zero_()\n"
        "scaler.scale(F.cross_entropy(model(x), y)).backward()\nscaler.unscale_(optimizer)"
    ),
    "a step that is dropped by hand": native(
        f"{STEP}\nscaler.unscale_(optimizer)\nscaler.update()\n"
        "for p in model.parameters(): p.grad.zero_()\n"
        "scaler.scale(F.cross_entropy(model(x), y)).backward()\nscaler.unscale_(optimizer)"
    ),
    "a sum of scaled losses": native("(scaler.scale(loss) + scaler.scale(loss * 2)).backward()"),
    "a loss that goes backward twice": native(
        "scaled = scaler.scale(loss)\nscaled.backward(retain_graph=True)\n(scaled * 2).backward()"
    ),
    "a loss that is not trained on": native(
        f"with torch.no_grad():\n    print(end=str(scaler.scale(model(x).mean()).item())[:0])\n{STEP}"
    ),
    "a gradient penalty": native(
        "grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)\n"
        "penalty = sum((g / scaler.get_scale()).pow(2).sum() for g in grads)\n"
        "scaler.scale(F.cross_entropy(model(x), y) + penalty).backward()"
    ),
    "GAN": native(
        "fake = model(x)\n"
        "critic_optimizer.zero_grad()\n"
        "scaler.scale(F.softplus(critic(fake.detach())).mean()).backward()\n"
        "scaler.step(critic_optimizer)\n"
        "scaler.scale(F.softplus(-critic(fake)).mean() + loss).backward()",
        GAN,
    ),
    "dead ReLU": in_forward("h = F.relu(h - 100)"),
    "dropout": in_forward("h = F.dropout(F.relu(h), 0.5)"),
    "unused rows": native(
        STEP,
        HEAD.replace("nn.Linear(8, 8)", "nn.Embedding(50, 8)") + "x_of = lambda: torch.randint(0, 9, (4,))\n",
    ).replace("torch.randn(4, 8), torch", "x_of(), torch"),
    "a mask of -inf": in_forward("h = h.masked_fill(torch.eye(4, 8) > 0, float('-inf')).softmax(-1)"),
    "a mask of large numbers": in_forward("h = (h + (torch.eye(4, 8) * -1e9).to(h)).softmax(-1)"),
    "a mask of logarithms": in_forward("h = (h + (1 - torch.eye(4, 8)).to(h).log()).softmax(-1)"),
    "a clamp of what overflows": in_forward("h = (h * 1e5).clamp(-60000, 60000) * 1e-5"),
    "tanh of what overflows": in_forward("h = torch.tanh(h * 1e6)"),
    "what overflows is written over": in_forward(
        "h = h * 1e6; h[h.abs() > 100] = 0; h = h[:, :8].clone(); h[0].fill_(1)"
    ),
    "a view is written over": in_forward("h = h * 1e6; h.view(-1).mul_(0).fill_(1); h = h + 1"),
    "a loss that vanishes": ours("loss = (model(x) * 1e-6).pow(2).mean()" + BLOCK, "O2"),
    "a mean of nothing": in_forward("nothing = h[:0].mean()"),
    "padding rows": in_forward("h = h * (torch.arange(4) < 2).to(h).unsqueeze(1)"),
    "a small penalty": in_forward("h = h + h * 1e-9"),
    "confident softmax": in_forward("h = (h * 100).softmax(-1)"),
    "a cast for a residual": in_forward("h = h.float(); h = h + h @ torch.eye(8)"),
    "a cast for a loss": native(STEP).replace("model(x), y", "model(x).float(), y"),
    "float64 to float32": native(STEP, HEAD + "model.double().float()\n"),
    "a cast without autocast": in_forward(
        "with torch.autocast('cpu', enabled=False): h = h.float() @ torch.eye(8)"
    ),
    "divided before the sum": attention("out = q @ ((k / n).transpose(-2, -1) @ v)", 7),
    "memory that was a gradient's": native(
        STEP + "\nfor p in model.parameters(): old = p.grad; p.grad = None; del old\n"
        "held = [torch.ones(shape) for shape in [(8, 8), (8,), (3, 8), (3,)] * 8]\n"
        "with torch.autocast('cpu', torch.float16): loss = F.cross_entropy(model(x), y)\n"
        + STEP
        + "\nheld = [it.mean() for it in held]"
    ),
    "a closure": HEAD + CLOSURE,
    "a short sum": attention("out = q @ (k.transpose(-2, -1) @ v) / n", 1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_silent_fault_is_found_at_its_line(name):
    faults, _ = watch(FAULTS[name])
    assert [(it.kind, it.where) for it in faults] == marked(FAULTS[name])
    assert faults[0].step == (faults[0].kind == "not_zeroed")  # which takes a second step
    assert faults[0].why
    assert faults[0].remedies


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_script_has_no_silent_fault(name):
    faults, error = watch(SOUND[name])
    assert faults == ()
    assert error is None


# ---- Gradients ----

SMALL = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.one, self.two = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.dead = nn.Linear(16, 16)
        nn.init.constant_(self.dead.bias, -100.0)
    def forward(self, x):
        h = self.rows(x)
        return self.two(F.dropout(F.relu(self.one(h))) + F.relu(self.dead(h)))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
)
LOSSES = {
    "native": native("loss = loss * {small}\n" + STEP, SMALL).replace("1024.0", "{scale}"),
    "O1": ours("loss = loss * {small}" + BLOCK, "O1", SMALL).replace("verb", "loss_scale={scale}, verb"),
    "O2": ours("loss = loss * {small}" + BLOCK, "O2", SMALL).replace("verb", "loss_scale={scale}, verb"),
}
LOSSES["O1, the second of two"] = LOSSES["O1"].replace(
    "model, optimizer = amp",
    "with torch.random.fork_rng(): other = nn.Linear(2, 2)\n"
    "others = torch.optim.SGD(other.parameters(), 0.1)\n"
    "amp.initialize(other, others, opt_level='O1', loss_scale=64.0, verbosity=0)\n"
    "model, optimizer = amp",
)


def write_loss(style, small):
    """A script that looks up rows, of a loss times something small, at a scale of 1."""
    text = LOSSES[style].replace("torch.randn(4, 8), torch", "torch.randint(0, 9, (4,)), torch")
    return text.replace("{small}", small).replace("{scale}", "1.0")


def run_sample(text, folder, attempt, repeats):
    """Runs a script as the doctor does to save the gradients of an attempt; returns the shares seen."""
    with ExitStack() as stack:
        if repeats:
            stack.enter_context(amp.override(**level_overrides("O0")))
            without_casts(stack)
        ranges = Ranges(clock := Clock(stack))
        Sample(clock, folder, attempt, ends=repeats)
        clock.follow_run()
        stack.callback(amp.uninitialize)
        torch.manual_seed(0)
        with suppress(Enough):
            exec(compile(text, "train.py", "exec"), {"__name__": "__main__"})
    return ranges.shares


@pytest.mark.exhaustive(keep=6)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("attempt", [0, 2])
@pytest.mark.parametrize("style", LOSSES)
def test_gradients_that_underflow_are_told_from_zeros_of_float32(tmp_path, style, attempt, device):
    text = write_loss(style, f"(2e-6 if step >= {attempt} else 1.0)")
    text = text.replace('"cpu"', f'"{device}"').replace("Net()\n", f"Net().to('{device}')\n")
    text = re.sub("    x, y = .*", rf"\g<0>\n    x, y = x.to('{device}'), y.to('{device}')", text)
    shares = run_sample(text, tmp_path, attempt, repeats=False)
    assert shares[attempt] > 0.05
    run_sample(text, tmp_path, attempt, repeats=True)
    found, unknown = compare_gradients(tmp_path, attempt)
    assert unknown == ""
    by_name = {it.parameter: it.facts for it in found}
    assert {"one.weight", "two.weight"} <= set(by_name)
    assert not {"dead.weight", "dead.bias"} & set(by_name)
    rows = by_name.get("rows.weight", {"zeros_in_float32": 1, "share": 0})
    assert rows["share"] <= 1 - rows["zeros_in_float32"] + 1e-6
    numbers = by_name["one.weight"]
    assert numbers["underflow_at_scale"]["2**0"] > 0.1 > numbers["underflow_at_scale"]["2**12"]
    again = text.replace("else 1.0", "else 2e-6").replace(
        "loss_scale=1.0", f"loss_scale={numbers['init_scale']}"
    )
    again = again.replace("init_scale=1.0", f"init_scale={numbers['init_scale']}")
    (second := tmp_path / "again").mkdir()
    for repeats in (False, True):
        run_sample(again, second, attempt, repeats)
    assert compare_gradients(second, attempt) == ([], "")


def test_a_step_that_is_another_in_float32_is_not_compared(tmp_path):
    text = write_loss("native", "1e-3")
    run_sample(text, tmp_path, 0, repeats=False)
    assert compare_gradients(tmp_path, 0) == ([], "whether gradients underflow: the step did not come again")
    run_sample(text.replace("1e-3", "1e-2"), tmp_path, 0, repeats=True)
    assert "another loss" in compare_gradients(tmp_path, 0)[1]


@pytest.mark.parametrize("draws", [False, True])
def test_a_step_that_draws_by_type_is_not_compared_on_a_gpu(tmp_path, monkeypatch, draws):
    monkeypatch.setattr(
        gradients, "random_of", lambda _: dict.fromkeys(("cpu", "gpu"), torch.get_rng_state())
    )
    monkeypatch.setattr(gradients, "set_random", lambda states: torch.set_rng_state(states["gpu"]))
    text = write_loss("O1", "(1.0 + 0 * torch.rand(()))" if draws else "1.0")
    for repeats in (False, True):
        run_sample(text, tmp_path, 0, repeats)
    assert compare_gradients(tmp_path, 0)[1].endswith("others than F.dropout draw some") == draws


@pytest.mark.parametrize(("rate", "falls", "kinds"), [(5e-3, 0, [LOST]), (5e-3, 1, []), (1e-3, 1, [LOST])])
def test_weights_of_which_many_stand_still_are_a_fault_where_the_loss_does_too(rate, falls, kinds):
    found, _ = watch(IN_HALF.replace("lr=0.01", f"lr={rate}").replace("range(4)", "range(16)"))
    attempts = [Attempt(step, value=16.0 - falls * step) for step in range(16)]
    assert [it.kind for it in examine_silent(found, attempts, ())] == kinds


COUNTED = """
correct = torch.zeros((), dtype=torch.{dtype})
for step in range(16):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(torch.randn(4, 8)), torch.zeros(4).long())
    loss.backward()
    optimizer.step()
    for _ in range(20):
        correct += torch.tensor(1.0, dtype=correct.dtype)  # COUNT
"""


def added(line):
    """Adds to a sum of 256 in bfloat16."""
    text = COUNTED.format(dtype="bfloat16").replace("zeros((),", "full((), 256.0,")
    return re.sub("correct \\+= .*", line, text)


POOLED = """
class Pool(nn.Module):
    def forward(self, x):
        n = torch.zeros(4, dtype=torch.half)
        n.index_add_(0, torch.zeros({many}).long(), torch.ones({many}, dtype=torch.half))
        return x / n.max()
model = nn.Sequential(nn.Linear(8, 8), Pool(), nn.Linear(8, 3))
""" + COUNTED.replace("{dtype}", "float32").replace("  # COUNT", "")
IDS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.out = nn.Embedding(8000, 8), nn.Linear(8, 3)
    def forward(self, table):
        return self.out(self.rows(table[:, 0].long()))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
import ampatch as amp
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
for step in range(2):
    table = torch.stack([torch.arange({first}.0, {first}.0 + 64), torch.randn(64)], 1)
    optimizer.zero_grad()
    with amp.scale_loss(F.cross_entropy(model(table).float(), torch.zeros(64).long()), optimizer) as scaled:
        scaled.backward()  # COUNT
    optimizer.step()
"""
SURE = """
class Sure(nn.Module):
    def forward(self, x):
        return torch.sigmoid(x + {bias})  # COUNT
model = nn.Sequential(nn.Linear(8, 1), Sure())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(16, 8)).mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.exhaustive(keep=5)
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (COUNTED.format(dtype="bfloat16"), "lost_counts"),
        (
            COUNTED.format(dtype="bfloat16").replace("torch.tensor(1.0, dtype=correct.dtype)", "1"),
            "lost_counts",
        ),
        (added("correct = correct + 1"), "lost_counts"),
        (added("correct = torch.add(1, correct)"), "lost_counts"),
        (added("correct = correct + 0.9"), "lost_sums"),
        (added("correct += 0.9"), "lost_sums"),
        (added("correct = correct + 1e-3"), None),  # which is nothing beside it
        (added("other = correct + 0.9"), None),
        (COUNTED.format(dtype="float16"), None),
        (POOLED.replace("{many}", "4096").replace("x[:, :8]", "x[:, :8].half()"), "lost_sums"),
        (
            POOLED.replace("{many}", "1024").replace("zeros(4096", "zeros(1024").replace(":8]", ":8].half()"),
            None,
        ),
        (added("places = torch.ones(300).bfloat16().cumsum(0)"), "lost_counts"),
        (added("places = torch.ones(250).bfloat16().cumsum(0)"), None),
        (IDS.format(first=4096), "collapsed"),
        (IDS.format(first=1024), None),
        (SURE.format(bias=8.0), "saturated"),
        (SURE.format(bias=0.0), None),
    ],
)
def test_counts_sums_names_and_probabilities_that_half_cannot_hold_are_told(text, kind):
    kinds = {it.kind for it in look(HEAD + text)[0]}
    assert kinds & {"lost_counts", "lost_sums", "collapsed", "saturated"} == ({kind} if kind else set())


BUFFER = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 3)
        self.register_buffer("seen", torch.full(({size},), 256.0))
    def forward(self, x):
        {line}
        return self.inner(x)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""


@pytest.mark.parametrize(
    ("size", "line", "kind"),
    [
        (1, "self.seen += 1", "lost_counts"),
        (1, "self.seen = self.seen + 1", "lost_counts"),
        (3, "self.seen.index_add_(0, torch.zeros(9).long(), torch.ones(9).to(self.seen))", "lost_counts"),
        (32, "self.seen.lerp_(torch.ones(32).to(x), 1e-9)", "lost_updates"),
    ],
)
def test_a_buffer_that_was_cast_with_its_model_is_called_so(size, line, kind):
    (found,) = watch(ours(BLOCK, "O5", HEAD + BUFFER.format(size=size, line=line)))[0]
    assert (found.kind, "cast with the model" in found.why) == (kind, True)


ANGLES = """
class Waves(nn.Module):
    def forward(self, t):
        phase = torch.matmul(t[:, None], torch.ones(1, 8))  #: coarse_angles
        return torch.sin(phase)
model = nn.Sequential(Waves(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
for step in range(2):
    optimizer.zero_grad()
    with amp.scale_loss(model({first} + torch.rand(64)).mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("first", [8000, 0])
def test_angles_are_told_at_the_line_that_makes_them_half(first):
    text = "import ampatch as amp\n" + HEAD + ANGLES.format(first=first)
    faults = [it for it in watch(text)[0] if it.kind in ("coarse_angles", "rounding")]
    assert [(it.where, it.op, str(it.remedies[0])) for it in faults] == [
        (
            marked(text)[0][1],
            "matmul",
            "amp.initialize(..., keep_fp32=['0']): this module runs in float32",
        )
    ] * (first > 0)


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_count_that_stops_late_is_told_by_the_attempts_that_are_looked_at_later(is_watched):
    text = HEAD + COUNTED.format(dtype="bfloat16").replace("range(16)", "range(40)")
    text = text.replace("range(20)", "range(40 if step > 16 else 0)")
    later = plan_looks([Attempt(step) for step in range(40)])
    assert later == (16, 24, 32, 39)
    found = {it.kind: it.step for it in look(text, later if is_watched else ())[0]}
    assert found.get("lost_counts") == (24 if is_watched else None)


def test_attempts_after_weights_were_lost_are_not_looked_at():
    attempts = [Attempt(step, weights=step < 30) for step in range(40)]
    assert plan_looks(attempts) == (16, 24)


ACCUMULATED = """
model = model.to(torch.{dtype})
for step in range(3):
    optimizer.zero_grad()
    for _ in range(600):
        model(torch.ones(4, 8, dtype=torch.{dtype})).float().sum().backward()
    optimizer.step()
"""


@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize(
    ("dtype", "many", "line", "found"),
    [
        ("bfloat16", 600, "", 1),
        ("bfloat16", 9, "", 0),
        ("float32", 600, "", 0),
        ("bfloat16", 70, "    model.zero_grad()", 0),
        ("bfloat16", 70, "    for it in model.parameters(): it.grad.zero_()", 0),
    ],
)
def test_gradients_that_are_added_up_in_half_are_told_where_their_sum_is_wrong(dtype, many, line, found):
    text = (
        ACCUMULATED.format(dtype=dtype)
        .replace("600", str(many))
        .replace("    optimizer.step()", f"    {line}\n    optimizer.step()")
    )
    faults, *_ = look(HEAD + text)
    assert [it.op for it in faults if it.kind == LOST and it.op != "step"] == ["accumulate_grad"] * found


@pytest.mark.parametrize(("kind", "share"), [("lost_updates", 0.9), ("saturated", 0.9)])
def test_what_may_do_no_harm_is_a_fault_where_float32_learns_more(kind, share):
    doubtful = Finding(kind, 0, "optimizer", None, "", "step", "train.py:9", facts={"share": share})
    attempts = [Attempt(step, value=16.0 - step) for step in range(16)]
    for learns in (False, True):
        given = [replace(doubtful, steps=(0,))], attempts
        found = examine_silent(*given, (), learns_less=lambda x=learns: x)
        assert len(found) == learns
        assert examine_silent(*given, [sample_finding()], learns_less=lambda: True) == ()


# ---- The whole command ----


@pytest.mark.usefixtures("doctor_in_forks")
@pytest.mark.process
@pytest.mark.parametrize("tries", [True, False])
def test_a_silent_fault_whose_fix_helps_is_exit_status_1(tmp_path, capsys, tries):
    text = native(f"{STEP}\n{CLIP}  #: clip", norm(unmarked(RMS))).replace("1024.0", "2.0")
    status, report = run_doctor(tmp_path, text, *([] if tries else ["--no-tries"]))
    said = capsys.readouterr().out
    assert status == tries
    assert report["findings"] == []
    clip, zeros = sorted(report["silent"], key=lambda it: it["kind"])
    assert (clip["kind"], clip["where"].rpartition(":")[2]) == (
        "clipped_while_scaled",
        marked(text)[0][1][9:],
    )
    assert clip["steps"] == list(range(4))
    assert (zeros["kind"], zeros["op"], zeros["model"], zeros["module"]) == ("zeros", "pow", "model", "1")
    assert zeros["remedies"][0].split("\n") == [
        "that function in float32, by what stands above it here:",
        "     @torch.amp.custom_fwd(device_type='cpu', cast_inputs=torch.float32)",
        "     def forward(self, x):",
    ]
    assert [it.startswith("the script trains") for it in zeros["tried"][:1]] == [True] * tries
    assert "clipped_while_scaled" in said
    assert "float32" in said


@pytest.mark.parametrize(("kind", "step", "leads"), [("not_unscaled", 3, True), ("zeros", 3, False)])
def test_a_misuse_that_breaks_the_run_comes_before_what_broke(kind, step, leads):
    fault = Finding(kind, step, "step", None, "", "step", "train.py:9", facts={"scale": 65536.0})
    said = list(describe(Report((sample_finding(step=step),), silent=(fault,))))
    assert said[0].startswith("What probably breaks the run" if leads else f"Step {step}, forward")


TWO_OPTIMIZERS = """
first, second = [torch.optim.SGD(part.parameters(), lr=1e-6) for part in (model[0], model[2])]
optimizers = [first, second]
import ampatch as amp
amp.initialize(model, optimizers, opt_level="O1", verbosity=0)
x = torch.randn(4, 8)
for step in range(9):
    first.zero_grad(); second.zero_grad()
    with amp.scale_loss(99 * model(x).pow(2).mean(), {named}) as scaled:
        scaled.backward()
    first.step(); second.step()
"""


@pytest.mark.usefixtures("doctor_in_forks")
@pytest.mark.process
@pytest.mark.parametrize("named", ["first", "optimizers"])
def test_the_scales_search_of_two_optimizers_is_no_finding_whether_the_block_names_both_or_one(
    named, tmp_path
):
    status, report = run_doctor(tmp_path, HEAD + TWO_OPTIMIZERS.format(named=named))
    assert (status, report["findings"], report["silent"]) == (0, [], [])


@pytest.mark.usefixtures("doctor_in_forks")
@pytest.mark.process
def test_a_script_of_apex_whose_gradients_underflow_is_told_a_scale(tmp_path):
    text = write_loss("O2", "2e-6").replace("import ampatch as amp", "from apex import amp")
    status, report = run_doctor(tmp_path, text)
    assert status == 1
    assert {it["kind"] for it in report["silent"]} == {"underflow"}
    assert "one.weight" in {it["parameter"] for it in report["silent"]}
    assert "init_scale=2.0**24" in report["silent"][0]["remedies"][0]
    assert report["silent"][0]["tried"][0].startswith("the script trains")
    assert (report["runs"], report["unknown"]) == (5, [])


FLOAT8 = """
import torch
from torch import nn
import ampatch as amp
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
amp.initialize(model, optimizer, opt_level="O6", float8_layers=["0"], float8_recipe={recipe!r}, verbosity=0)
x = torch.randn(16, 16) * 1e-3
x[{first}, 0] = {largest}
with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
"""


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("recipe", "first", "largest", "found"),
    [
        ("tensorwise", 0, 1e4, True),
        ("tensorwise", 0, 1.0, False),
        ("rowwise", 0, 1e4, False),  # one row of 16 is under the limit
        ("rowwise", slice(None), 1e4, True),
    ],
)
def test_numbers_that_are_zeros_in_float8_beside_a_large_one_are_told(recipe, first, largest, found):
    import_float8()
    rows = "slice(None)" if isinstance(first, slice) else first
    faults, _ = watch(FLOAT8.format(recipe=recipe, first=rows, largest=largest))
    assert [(it.kind, it.module, it.facts["what"]) for it in faults] == found * [
        ("float8_underflow", "0", "input")
    ]
