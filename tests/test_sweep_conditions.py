"""The conditions of a sweep's run: seeds, what it waits for, and the yardstick, which casts as torch does."""

import os
import subprocess
import sys
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampatch as amp
from ampatch.sweeps.measure import load
from ampatch.sweeps.measure.yardstick import Autocast
from ampatch.sweeps.plan import parse_variant

# What a run waits for


@pytest.mark.parametrize(
    ("groups", "files", "seconds"),
    [
        ("0::/a/b", {"a/b": "usage_usec 9\nthrottled_usec 2500000", "a": "throttled_usec 4000000"}, 4.0),
        ("0::/docker/1", {"": "nr_throttled 3\nthrottled_usec 500000"}, 0.5),
        ("3:cpuset:/a\n2:cpu,cpuacct:/a", {"cpu,cpuacct/a": "throttled_time 3000000000"}, 3.0),
        ("1:cpu:/", {"cpu": "throttled_time 0"}, 0.0),
        ("0::/", {"": "usage_usec 9"}, None),
        ("0::/", {}, None),
        (None, {}, None),
    ],
    ids=["above it", "a container", "version 1", "never", "no limit", "no files", "no groups"],
)
def test_how_long_a_cgroup_was_stopped_is_read_where_it_is_counted(tmp_path, groups, files, seconds):
    if groups is not None:
        (tmp_path / "groups").write_text(f"{groups}\n")
    for name, text in files.items():
        (tmp_path / "fs" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name / "cpu.stat").write_text(f"{text}\n")
    assert load.read_throttled(tmp_path / "groups", tmp_path / "fs") == seconds


needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux pins processes")
BUSY_ON = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"


@needs_affinity
@pytest.mark.parametrize("counted", [True, False], ids=["schedstat", "switches alone"])
def test_a_thread_that_shares_its_processor_waits_for_half_of_its_time(monkeypatch, counted):
    if not counted:
        monkeypatch.setattr(load, "read_threads", dict)
    before = os.sched_getaffinity(0)
    core = min(before)
    command = [sys.executable, "-S", "-c", BUSY_ON, str(core)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        try:
            other.stdout.readline()
            os.sched_setaffinity(0, {core})
            waiting, ran = load.Load(), time.process_time()
            while time.process_time() - ran < 0.3:
                pass
            found = waiting.fields(30)
        finally:
            os.sched_setaffinity(0, before)
            other.kill()
    assert found["waited"] > 0.25  # more programs may have been there
    assert found["processor_ms"] == pytest.approx(10, rel=0.2)  # of 0.3 seconds, whoever else was there


def test_where_nobody_counts_nothing_is_known_and_nothing_raises(monkeypatch):
    nothing = {"read_threads": dict, "read_switches": lambda: (0, 0), "read_throttled": lambda: None}
    for name, read in nothing.items():
        monkeypatch.setattr(load, name, read)
    monkeypatch.setattr(load, "read_times", lambda path, cpus: [])
    assert set(load.Load().fields(0).values()) == {None}


# The yardstick


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(F.gelu(self.norm(self.first(x))))


def start(lr=0.5):
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


INPUTS = torch.randn(20, 6, 8, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(4, (20, 6), generator=torch.Generator().manual_seed(2))


def overflow(number, loss):
    return loss * (float("inf") if number in (4, 9) else 1)


def cross_entropy(model, teacher, inputs, targets):
    return F.cross_entropy(model(inputs), targets)


def hinge(model, teacher, inputs, targets):
    return torch.relu(1 - model(inputs)).mean()  # in half: nothing in it is cast to float32


def distill(model, teacher, inputs, targets):
    outputs = model(inputs)
    with torch.no_grad():
        wanted = teacher(inputs)
    return F.mse_loss(outputs @ outputs.T, wanted @ wanted.T)


def use_twice(model, teacher, inputs, targets):
    with torch.no_grad():
        offset = teacher(inputs).float().mean()
    return F.cross_entropy(model(inputs) + model(-inputs), targets) + offset


def checkpointed(model, teacher, inputs, targets):
    return F.cross_entropy(checkpoint(model, inputs, use_reentrant=False), targets)


LOSSES = (cross_entropy, hinge, distill, use_twice, checkpointed)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


def by_hand(dtype, compute):
    (model, optimizer), (teacher, _) = start(), start()
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    losses = []
    for number, (inputs, targets) in enumerate(zip(INPUTS, TARGETS, strict=True)):
        with torch.autocast("cpu", dtype):
            loss = compute(model, teacher, inputs, targets)
        losses.append(loss)
        optimizer.zero_grad()
        scaler.scale(overflow(number, loss.float())).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad(), torch.autocast("cpu", dtype):
            losses.append(model(inputs).float().sum())
    return losses, list(model.parameters())


def run_yardstick(dtype, compute):
    (model, optimizer), (teacher, _) = start(), start()
    row = parse_variant(f"autocast dtype={str(dtype).removeprefix('torch.')}")
    losses = []
    with amp.observe(Autocast(dtype)), amp.override(**row.overrides):
        amp.initialize([model, teacher], optimizer, opt_level="O2", verbosity=0)
        for number, (inputs, targets) in enumerate(zip(INPUTS, TARGETS, strict=True)):
            loss = compute(model, teacher, inputs, targets)
            losses.append(loss)
            optimizer.zero_grad()
            with amp.scale_loss(overflow(number, loss), optimizer) as scaled_loss:
                assert not torch.is_autocast_enabled("cpu")
                scaled_loss.backward()
            optimizer.step()
            with torch.no_grad():
                losses.append(model(inputs).float().sum())
            assert not torch.is_autocast_enabled("cpu")
        amp.uninitialize()
    return losses, list(model.parameters())


@each_dtype
@pytest.mark.parametrize("compute", LOSSES, ids=lambda it: it.__name__)
def test_the_yardstick_is_autocast_with_a_grad_scaler_bit_by_bit(dtype, compute):
    losses, params = by_hand(dtype, compute)
    found, found_params = run_yardstick(dtype, compute)
    # Without a scale nothing is skipped, and the first overflow makes everything NaN.
    count = len(losses) if dtype is torch.float16 else 9
    assert [it.dtype for it in found] == [it.dtype for it in losses]
    assert all(map(torch.equal, found[:count], losses[:count]))
    if dtype is torch.float16:
        assert all(map(torch.equal, found_params, params))


@pytest.fixture
def yardstick():
    """A model and its optimizer, initialized while the yardstick watches."""
    with amp.observe(Autocast(torch.bfloat16)):
        model, optimizer = start()
        amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
        yield model, optimizer
        amp.uninitialize()
    assert not torch.is_autocast_enabled("cpu")


def is_half(model):
    """Whether a model computes what it does with autocast, though its output is float32 to the script."""
    plain, _ = start()
    uncast = plain(INPUTS[0])
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(INPUTS[0]).float()
    return torch.equal(model(INPUTS[0]), expected) and not torch.equal(expected, uncast)


def test_a_forward_without_gradients_keeps_no_cast_for_one_with(yardstick):
    model, optimizer = yardstick
    first = model(INPUTS[0])
    with torch.no_grad():
        model(INPUTS[1])
    loss = (first + model(INPUTS[2])).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    assert all(param.grad is not None for param in model.parameters())


def test_a_forward_that_raises_leaves_no_autocast_behind_after_the_next_step(yardstick):
    model, optimizer = yardstick
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    optimizer.step()
    assert not torch.is_autocast_enabled("cpu")
    assert is_half(model)


def test_a_compiled_model_computes_in_half_too(yardstick):
    torch._dynamo.reset()
    assert is_half(torch.compile(yardstick[0], backend="eager"))


def test_a_scripted_model_is_refused():
    observer = Autocast(torch.bfloat16)
    model = torch.jit.ScriptModule()
    with pytest.raises(amp.AmpValueError, match="scripted"):
        observer.on_objects((model,), ())
