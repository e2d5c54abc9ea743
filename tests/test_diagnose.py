"""`amp.diagnose`: steps that break are replayed, and what is found is what was planted."""

import copy
import dataclasses
import gc
import json
import logging
import pickle
import subprocess
import sys
import weakref
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import optimizer as optimizers

import ampatch as amp
from ampatch.__main__ import main
from ampatch.doctor.live.watcher import Check, Patient
from faults import judge, make

KINDS = ("plain", "O1", "O2", "O5", "native")
AGREED = ("step", "micro_step", "phase", "model", "module", "call", "op", "kind", "where", "element")
AGREED += ("sample", "count", "parameter", "dtype", "float32_survives")


@pytest.fixture(autouse=True)
def leave_no_session():
    torch.manual_seed(0)
    yield
    amp.uninitialize()


@pytest.fixture
def places():
    """What a watch hooks into, as it is now."""

    def look(*models):
        hooks = [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
        hooks += [table for m in models for table in (m._forward_pre_hooks, m._forward_hooks)]
        functions = vars(torch.Tensor)["backward"], vars(torch.amp.GradScaler)["step"]
        return [*functions, *map(dict, hooks), torch._C._len_torch_function_stack(), amp.observers()]

    return look


class Block(nn.Module):
    """Breaks at some of its calls, by what `fault` does."""

    def __init__(self, fault=None, at=()):
        super().__init__()
        self.lin, self.fault, self.at, self.calls = nn.Linear(8, 8), fault, at, 0

    def forward(self, x):
        h = F.gelu(self.lin(x))
        if self.calls in self.at:
            h = self.fault(h)
        self.calls += 1
        return x + h.to(x.dtype)


def explode(h):
    return torch.exp(h * 0 + 1000.0)


def make_model(fault=explode, at=(2,)):
    return nn.Sequential(Block(), Block(fault, at), nn.Linear(8, 3))


class Trainer:
    """Trains in one of the ways that are watched."""

    def __init__(self, kind, model, lr=0.1, **options):
        self.kind, self.model = kind, model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if kind == "native" else None
        if kind.startswith("O"):
            if kind in ("O1", "O2"):
                options = {"loss_scale": amp.DynamicLossScale(init_scale=256.0)} | options
            amp.initialize(model, self.optimizer, opt_level=kind, verbosity=0, **options)

    def step(self, change=lambda loss: loss):
        self.optimizer.zero_grad()
        x, y = torch.randn(4, 8), torch.randint(0, 3, (4,))
        with torch.autocast("cpu", torch.float16, enabled=self.kind == "native"):
            loss = change(F.cross_entropy(self.model(x).float(), y))
        if self.kind.startswith("O"):
            with amp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
        elif self.kind == "native":
            self.scaler.scale(loss).backward()
        else:
            loss.backward()
        if self.kind == "native":
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()


def watch(trainer, **options):
    return amp.diagnose.watch(trainer.model, trainer.optimizer, **options)


def train(kind, steps=4, model=None, change=lambda loss: loss, **options):
    trainer = Trainer(kind, model or make_model(), **options)
    with watch(trainer) as patient:
        for _ in range(steps):
            trainer.step(change)
    return patient


def only(patient):
    assert len(patient.findings) == 1, patient.report()
    return patient.findings[0]


# ---- What is found ----


@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5, 6, 7, 9, 14, 21])
def test_a_planted_fault_is_found(seed, tmp_path):
    report, _ = run_planted(seed, tmp_path)
    fault = report.pop("fault")
    assert all(judge(fault, report).values()), (fault, report)
    assert report["unknown"] == ()


def test_a_part_of_a_weight_that_is_zeroed_between_forward_and_backward_does_not_stop_training():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amp.diagnose.watch(model, optimizer) as patient:
        for _ in range(4):
            loss = model(torch.randn(4, 8)).mean()
            with torch.no_grad():
                model[2].bias[:1].fill_(0)
            loss.backward()
            optimizer.step()
    assert only(patient).op == "exp"


def test_a_watch_inside_another_does_not_see_its_replays():
    trainer = Trainer("plain", make_model())
    with watch(trainer) as outer, watch(trainer) as inner:
        for _ in range(4):
            trainer.step()
    assert [only(it).op for it in (outer, inner)] == ["exp", "exp"]
    assert outer.unknown == []


@pytest.mark.process
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_watch_is_looked_up_first_once_torch_is_patched(level):
    script = f"""
import torch, ampatch as amp
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
amp.initialize(model, optimizer, opt_level={level!r}, verbosity=0)
with amp.diagnose.watch(model, optimizer) as patient:
    with amp.scale_loss((model(torch.ones(1, 2)) * 0).log().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
assert [found.op for found in patient.findings] == ["log"], patient
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)


def run_planted(seed, tmp_path):
    """Runs a script of tests/faults.py with a watch in it; returns the report, and the script."""
    fault = make(seed)
    at = "    for step in range("
    begin = "    watching = amp.diagnose.watch(model, optimizer); patients.append(watching.__enter__())\n"
    text = "import ampatch as amp; patients = []" + fault.script.replace(at, begin + at, 1)
    text = text.replace("\n\nmain()\n", "\n    watching.__exit__(None, None, None)\n\n\nmain()\n")
    text = text.replace("from apex import amp", "import ampatch as amp")
    path = tmp_path / "train.py"
    path.write_text(text)
    names = {"__name__": "__main__"}
    exec(compile(text, str(path), "exec"), names)
    line = next(number for number, each in enumerate(text.splitlines(), 1) if "# FAULT" in each)
    fault = dataclasses.replace(fault, line=line)
    return {**names["patients"][0].report().to_json(), "fault": fault}, path


@pytest.mark.usefixtures("doctor_in_forks")
@pytest.mark.process(keep=1)
@pytest.mark.parametrize("seed", [10, 8])
def test_the_command_finds_the_same(seed, tmp_path):
    report, path = run_planted(seed, tmp_path)
    main(["doctor", "--json", str(tmp_path / "report.json"), str(path)])
    command = json.loads((tmp_path / "report.json").read_text())
    first, other = report["findings"][0], command["findings"][0]
    assert {name: first[name] for name in AGREED} == {name: _as_tuple(other[name]) for name in AGREED}
    assert report.keys() - {"fault"} == command.keys()


def _as_tuple(value):
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_found_where_nothing_breaks(kind):
    patient = train(kind, model=make_model(at=()))
    report = patient.report()
    assert (report.findings, report.harmless, report.runs, report.unknown) == ((), (), 0, ())
    assert "Nothing broke" in str(patient)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_that_breaks_once_is_found(kind):
    found = only(train(kind))
    assert (found.step, found.phase, found.module, found.op) == (2, "forward", "1", "exp")
    assert found.where.endswith(f":{explode.__code__.co_firstlineno + 1}")
    assert found.float32_survives is False


@pytest.mark.parametrize("kind", ["O1", "O2", "native"])
def test_what_float32_would_survive_is_told(kind):
    found = only(train(kind, model=make_model(lambda h: (h.half() * 0 + 6e4) * 2)))
    assert (found.op, found.dtype, found.float32_survives) == (
        "mul",
        "float16",
        False,
    )  # the script's own half
    found = only(train(kind, model=make_model(lambda h: (h * 0 + 300) @ (h.t() * 0 + 300) @ h * 1e-6)))
    assert (found.op, found.float32_survives) == ("matmul", True)
    found = only(train(kind, model=make_model(lambda h: (h * 0 + 300) @ (h.t() * 0 + 300) @ (h * 0 + 1))))
    assert (found.module, found.keep) == ("1", ("1", "2"))  # what the fault hides as well


@pytest.mark.parametrize("kind", KINDS)
def test_an_operation_of_the_loss_has_its_line(kind):
    calls = []

    def change(loss):
        calls.append(loss.detach())
        return loss + (loss * 0).log() if len(calls) == 3 else loss

    found = only(train(kind, model=make_model(at=()), change=change))
    assert (found.step, found.phase, found.op, found.module) == (2, "loss", "log", "")
    assert found.where.endswith(f":{change.__code__.co_firstlineno + 2}")
    assert len(calls) == 4  # the script's own code did not run again


def test_an_operation_of_the_loss_has_its_line_where_a_script_has_set_a_default_device():
    def change(loss):
        torch.set_default_device("cpu")  # again, while the operations of the loss are noted
        return loss + (loss * 0).log()

    torch.set_default_device("cpu")
    try:
        found = only(train("plain", model=make_model(at=()), change=change, steps=1))
    finally:
        torch.set_default_device(None)
    assert (found.phase, found.op, found.float32_survives) == ("loss", "log", False)
    assert torch._C._len_torch_function_stack() == 0


def test_a_mode_of_the_script_around_a_forward_ends_as_it_does_without_a_watch():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amp.diagnose.watch(model, optimizer):
        with torch.overrides.BaseTorchFunctionMode():
            loss = model(torch.randn(4, 8)).mean()
        assert torch._C._len_torch_function_stack() == 0
        loss.backward()
        optimizer.step()


def test_a_loss_that_nobody_can_make_again_is_told_with_what_is_not_known():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss * float("inf")

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("nan")

    patient = train("plain", steps=1, model=make_model(at=()), change=Bad.apply)
    assert only(patient).phase == "loss"
    assert only(patient).float32_survives is None
    assert "whether float32 survives is not known" in patient.report().unknown[0]


def test_a_backward_that_is_not_of_a_tensor():
    trainer = Trainer("plain", make_model())
    with watch(trainer) as patient:
        for _ in range(3):
            torch.autograd.backward([trainer.model(torch.randn(4, 8)).sum()])
            trainer.optimizer.step()
    assert (only(patient).step, only(patient).op) == (2, "exp")
    assert "whether float32 survives is not known" in patient.report().unknown[0]


def test_a_penalty_on_gradients_has_its_line():
    trainer = Trainer("plain", make_model(at=()))
    with watch(trainer) as patient:
        for step in range(4):
            x = torch.randn(4, 8, requires_grad=True)
            out = trainer.model(x).sum() * (step != 2)
            (grad,) = torch.autograd.grad(out, x, create_graph=True)
            norm = grad.pow(2).sum(-1).sqrt()
            (out + ((norm - 1) ** 2).mean()).backward()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
    found = only(patient)
    assert (found.step, found.phase, found.op, found.float32_survives) == (2, "backward", "sqrt", False)
    assert patient.report().unknown == ()


@pytest.mark.parametrize("power", [26, 40])
def test_the_search_of_a_scale_is_no_finding(power):
    scale = amp.DynamicLossScale(2.0**power, max_scale=2.0**power)
    report = train("O2", power + 4, make_model(at=()), loss_scale=scale).report()
    assert report.findings == ()
    assert 1 <= report.runs < len(report.scale["skipped"])


def test_a_fault_that_a_scale_hides_in_its_search_is_found():
    scale = amp.DynamicLossScale(2.0**26, max_scale=2.0**26)
    model = make_model(lambda h: h + (h - h.detach()).pow(2).sum().sqrt(), (0,))
    found = only(patient := train("O1", 30, model, loss_scale=scale))
    assert (found.step, found.phase, found.module, found.op) == (0, "backward", "1", "sqrt")
    assert found.float32_survives is False
    assert not patient.unknown


def test_the_search_is_that_of_the_scale_in_use_where_there_are_two():
    other = nn.Linear(2, 2)
    amp.initialize(other, torch.optim.SGD(other.parameters(), 0.1), opt_level="O0", verbosity=0)
    scale = amp.DynamicLossScale(2.0**26, max_scale=2.0**26)
    report = train("O1", 30, make_model(at=()), loss_scale=scale).report()
    assert report.findings == ()
    assert report.scale["history"][0] == (0, 2.0**26)


@pytest.mark.parametrize("steps", [1, 4])
def test_weights_that_a_step_broke_belong_to_that_step_if_none_follows_as_well(steps):
    patient = train("plain", steps, make_model(at=()), change=lambda loss: loss * 1e6, lr=1e38)
    assert (only(patient).step, only(patient).phase) == (0, "optimizer")
    assert bool(patient.unknown) == (steps == 1)  # which operation of the optimizer made them


def test_a_closure_is_looked_at_before_its_step():
    trainer = Trainer("plain", make_model())

    def closure():
        trainer.optimizer.zero_grad()
        loss = trainer.model(torch.randn(4, 8)).sum()
        loss.backward()
        return loss

    with watch(trainer) as patient:
        for _ in range(3):
            trainer.optimizer.step(closure)
    assert (only(patient).step, only(patient).op) == (2, "exp")


def test_two_optimizers_of_one_backward():
    model = make_model()
    one, two = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[1:].parameters(), lr=0.1)
    with amp.diagnose.watch(model, [one, two]) as patient:
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
            one.step()
            two.step()
    assert [(it.step, it.op) for it in patient.findings] == [(2, "exp")]
    assert patient.replays == 2


def test_findings_are_logged_once(caplog):
    with caplog.at_level(logging.WARNING, logger="ampatch"):
        train("native", steps=6, model=make_model(at=(2, 4)))
    assert [record.message.split(",")[0] for record in caplog.records if "exp" in record.message] == [
        "Step 2"
    ]


# ---- What a watch changes: nothing ----


class Noisy(nn.Module):
    """Holds all that a replay has to put back."""

    def __init__(self):
        super().__init__()
        self.block, self.norm, self.head = Block(explode, (2, 4)), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(F.dropout(self.norm(self.block(x)), 0.3))


@pytest.mark.parametrize("kind", ["O1", "O2", "native"])
def test_a_run_that_is_watched_is_bit_equal(kind):
    def run(watched):
        torch.manual_seed(1)
        trainer = Trainer(kind, Noisy())
        with watch(trainer) if watched else torch.enable_grad() as patient:
            for _ in range(7):
                trainer.step()
        amp.uninitialize()
        return patient, [*trainer.model.state_dict().values(), torch.randn(3), trainer.model.block.calls]

    (_, alone), (patient, watched) = run(False), run(True)
    assert patient.findings
    for one, other in zip(alone, watched, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_leaving_undoes_every_hook(kind, places):
    trainer = Trainer(kind, make_model())
    before = places(trainer.model)
    with watch(trainer):
        for _ in range(4):
            trainer.step()
        assert places(trainer.model) != before
    assert places(trainer.model) == before


def test_a_forward_without_a_backward_leaves_no_mode_behind(places):
    trainer = Trainer("plain", make_model())
    before = places(trainer.model)
    with watch(trainer):
        trainer.model(torch.ones(4, 8))
    assert places(trainer.model) == before


def test_modes_of_the_script_stay_in_order():
    trainer = Trainer("plain", make_model())
    with watch(trainer) as patient:
        for _ in range(3):
            with torch.device("cpu"):
                trainer.step()
                assert torch._C._len_torch_function_stack() == 1
            loss = trainer.model(torch.ones(4, 8)).sum()
            with torch.device("meta"):
                loss.backward()
            assert torch.empty(1).device.type == "cpu"
            trainer.optimizer.step()
    assert torch._C._len_torch_function_stack() == 0
    assert patient.findings[0].op == "exp"


@given(st.permutations(range(4)))
@settings(max_examples=12, deadline=None)
def test_watches_end_in_any_order(order):
    trainer = Trainer("plain", make_model(at=()))
    before = vars(torch.Tensor)["backward"], vars(torch.amp.GradScaler)["step"]
    contexts = [watch(trainer) for _ in order]
    patients = [context.__enter__() for context in contexts]
    for ended, index in enumerate(order):
        trainer.step()
        assert all(patients[other].latest == ended for other in order[ended:])
        contexts[index].__exit__(None, None, None)
    assert (vars(torch.Tensor)["backward"], vars(torch.amp.GradScaler)["step"]) == before


def test_copies_and_pickles_of_a_watched_model_are_free_of_it():
    trainer = Trainer("plain", make_model(at=()))
    with watch(trainer) as patient:
        trainer.step()
        for other in (copy.deepcopy(trainer.model), pickle.loads(pickle.dumps(trainer.model))):
            other(torch.ones(4, 8)).sum().backward()
        trainer.step()
    assert patient.latest == 1


def test_a_watch_keeps_no_model_alive():
    trainer = Trainer("O1", make_model(), diagnose=True)
    trainer.step()
    found = weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert found() is None


def test_what_the_script_counts_is_not_counted_twice():
    trainer, total = Trainer("plain", make_model()), torch.zeros(3)
    with watch(trainer) as patient:
        for _ in range(3):
            out = trainer.model(torch.randn(4, 8))
            total += 1
            out.sum().backward()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
    assert total.tolist() == [3, 3, 3]
    assert only(patient).op == "exp"


SIZES = {"large": 200, "large beside small": 200}


@pytest.mark.parametrize(
    "kind", ["small", *SIZES, "small beside large", "half", "sparse", "complex", "whole"]
)
def test_a_check_sees_one_number_that_is_not_finite_among_tensors_of_each_kind(kind):
    one = torch.ones(SIZES.get(kind, 3), SIZES.get(kind, 3))
    other = {
        "large beside small": torch.ones(3, 3),
        "small beside large": torch.ones(200, 200),
        "half": one.half(),
        "sparse": one.to_sparse(),
        "complex": one * 1j,
        "whole": one.int(),
    }.get(kind, one.clone())
    check = Check()
    assert not check.is_bad([one, other])
    one[1, 2] = float("inf")
    assert check.is_bad([other, one])
    one[1, 2] = float("nan")
    assert check.is_bad([one, other])
    one[1, 2] = 1
    assert not check.is_bad([one, other])


def test_finite_numbers_whose_sum_is_infinite_are_fine_and_a_large_sparse_gradient_is_not():
    large = torch.full((200, 200), 3e38)
    assert not Check().is_bad([large, torch.ones(3)])
    large[1, 2] = float("inf")
    assert Check().is_bad([torch.ones(3), large.to_sparse()])


# ---- The session ----


def test_diagnose_of_initialize_lasts_as_long_as_the_session(places):
    model = make_model()
    before = places(model)
    trainer = Trainer("O1", model, diagnose=True)
    for _ in range(4):
        trainer.step()
    assert only(amp.diagnose.patient()).op == "exp"
    amp.uninitialize()
    assert places(model) == before
    with pytest.raises(amp.AmpError, match="nothing is watched"):
        amp.diagnose.patient()


def test_a_session_may_end_inside_of_a_watch(places):
    model = make_model()
    before = places(model)
    trainer = Trainer("O1", model)
    with watch(trainer) as patient:
        trainer.step()
        amp.uninitialize()
    assert patient.latest == 0
    assert places(model) == before


def test_the_latest_patient_is_the_one():
    trainer = Trainer("O1", make_model(at=()), diagnose=True)
    outer = amp.diagnose.patient()
    with watch(trainer) as inner:
        assert amp.diagnose.patient() is inner
    assert amp.diagnose.patient() is outer
    assert isinstance(outer, Patient)


def test_what_cannot_be_watched_is_refused():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for arguments, match in {
        (optimizer, model): r"models\[0\] is a SGD",
        (model, 3): r"optimizers\[0\] is a int",
        (model, optimizer, optimizer): "scaler is a SGD",
    }.items():
        with pytest.raises(amp.AmpTypeError, match=match), amp.diagnose.watch(*arguments):
            pass


def test_a_model_that_is_not_called_is_told():
    trainer = Trainer("plain", make_model(at=(0,)))
    with watch(trainer) as patient:
        trainer.model.forward(torch.ones(4, 8)).sum().backward()
        trainer.optimizer.step()
    assert "watch what is called as model(...)" in patient.report().unknown[0]


def test_synchronized_norms_are_not_replayed():
    model = nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8))
    trainer = Trainer("plain", model)
    model[1].forward = lambda x: x * float("inf")
    with watch(trainer) as patient:
        model(torch.ones(4, 8)).sum().backward()
        trainer.optimizer.step()
    assert "SyncBatchNorm" in patient.report().unknown[0]


def test_a_compiled_model_is_replayed_in_eager_mode():
    model = torch.compile(make_model(lambda h: h * 0 + h.sum() / 0, at=(1,)), backend="eager")
    found = train("plain", steps=2, model=model).findings
    assert list(chain(*[(one.step, one.module, one.op) for one in found[:1]])) == [1, "1", "div"]
