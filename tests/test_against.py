"""`ampatch doctor --against`: two levels on the same batches, and which module departs first."""

import json
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampatch as amp
from ampatch.__main__ import main
from ampatch.doctor.against.compare import compare, compare_levels, distance, said_of_comparison
from ampatch.doctor.against.sample import Sample, read_samples
from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.operations import Enough
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.run import Run


class Off(nn.Module):
    """Adds what it should not where it sees half."""

    def forward(self, x):
        return x.clone() if x.dtype == torch.float32 else x + x.abs().round()


def take(folder, level, planted=None, scale=1.0, factor=1.0):
    """Trains a net to its second attempt, of which a sample is taken."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 32), nn.Linear(32, 4)]
    model = nn.Sequential(*layers[:3], *([planted] if planted else []), *layers[3:])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if level != "O0":
        given = {"opt_level": level, "verbosity": 0, "loss_scale": scale}
        model, optimizer = amp.initialize(model, optimizer, **given)
    with ExitStack() as stack:
        Sample(clock := Clock(stack), folder, 1, ends=True)
        clock.follow_run()
        with suppress(Enough):
            for _ in range(3):
                loss = factor * F.cross_entropy(model(torch.randn(8, 16)).float(), torch.arange(8) % 4)
                optimizer.zero_grad()
                if level == "O0":
                    loss.backward()
                else:
                    with amp.scale_loss(loss, optimizer) as scaled:
                        scaled.backward()
                optimizer.step()
    amp.uninitialize()


@pytest.fixture
def against(tmp_path):
    """Compares a level with O0."""

    def compared(level, **given):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        take(folder, level, **given)
        take(folder, "O0", **given)
        return compare(*read_samples(folder)) | {"level": "O0"}

    return compared


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_sound_net_does_not_depart(against, level):
    found = against(level)
    assert found["first"] is None
    assert 0 < max(row["error"] for row in found["rows"]) < found["allowed"]["backward"]
    assert said_of_comparison(found) == [
        "Compared with O0, no module departs further than roundings explain."
    ]


def test_rows_are_in_the_order_of_appearance(against):
    rows = [(row["phase"], row["module"], row["parameter"]) for row in against("O2")["rows"]]
    forward = [("forward", str(i), None) for i in range(5)]
    assert rows[:5] == forward
    assert rows[5:10] == [("backward", name, None) for _, name, _ in forward[::-1]]
    assert rows[10:12] == [("backward", "4", "4.bias"), ("backward", "4", "4.weight")]


def test_the_module_that_departs_first_is_named(against):
    found = against("O2", planted=Off())
    row = found["rows"][found["first"]]
    assert (row["phase"], row["module"]) == ("forward", "3")
    assert "model.3 departs first: its output is off by" in said_of_comparison(found)[0]


def test_gradients_that_underflow_depart_in_the_backward(against):
    found = against("O2", factor=1e-6)
    row = found["rows"][found["first"]]
    assert (row["phase"], row["module"]) == ("backward", "4")
    assert row["lost"] > 0.01
    assert "of it became 0" in said_of_comparison(found)[0]
    assert against("O2", scale=2.0**16, factor=1e-6)["first"] is None


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_the_second_run_reads_the_masters_of_the_first(tmp_path, level):
    take(tmp_path, level)
    weights, _ = torch.load(tmp_path / "weights-0.pt")
    assert weights["0.weight"].dtype == torch.float32
    assert not torch.equal(weights["0.weight"], weights["0.weight"].half().float())
    take(tmp_path, "O0")
    own, other = read_samples(tmp_path)
    key = ("forward", "model", "0", 0, "0")
    assert not torch.equal(own["tensors"][key], other["tensors"][key])
    torch.testing.assert_close(own["tensors"][key].float(), other["tensors"][key], rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("attempts", "wanted"),
    [
        ([Attempt(gradients=False)] * 3 + [Attempt()], 3),  # a scale searches
        ([Attempt(gradients=False), Attempt(loss=False, gradients=False), Attempt()], 1),
        ([Attempt(gradients=False)] * 3, 0),
        ([], 0),
    ],
)
def test_an_overflow_of_the_scale_is_passed_over_and_one_of_the_loss_is_not(attempts, wanted):
    runs, unknown = [], []
    assert compare_levels(lambda _, run: runs.append(run), Run("train.py"), "O0", attempts, unknown) is None
    assert [run.sample for run in runs] == [wanted] * 2
    assert unknown == ["nothing to compare: no model ran before a step of an optimizer"]


def test_where_numbers_are_not_finite_there_is_no_error_and_it_departs():
    key = ("forward", "model", "a", 0, "0")
    sound, broken = torch.ones(3), torch.tensor([1.0, float("inf"), 1.0])
    found = compare(*({"attempt": 0, "scale": 1.0, "tensors": {key: each}} for each in (broken, sound)))
    assert (found["first"], found["rows"][0]["error"]) == (0, None)
    json.dumps(found, allow_nan=False)


def test_a_gradient_of_nothing_but_roundings_is_measured_by_its_layer():
    one, two = torch.tensor([1e-7]), torch.tensor([1e-9])
    assert distance(one, two)[0] > 90
    assert distance(one, two, least=1e-2)[0] < 1e-4


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
for step in range(40):
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(4, 8)).float().square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.usefixtures("doctor_in_forks")
@pytest.mark.process
def test_a_script_on_torch_amp_is_compared_and_everything_is_written(tmp_path, capsys):
    (tmp_path / "train.py").write_text(SCRIPT)
    outputs = [f"--{name}={tmp_path}/{name}" for name in ("json", "html", "csv")]
    status = main(["doctor", "--against", "O0", *outputs, str(tmp_path / "train.py")])
    assert status == 0
    report = json.loads((tmp_path / "json").read_text())
    assert report["runs"] == 5  # one of them for what the search of the scale may hide
    assert report["against"]["attempt"] == 5  # the first whose gradients are finite
    assert report["against"]["first"] is None
    assert [row["module"] for row in report["against"]["rows"][:2]] == ["0", "1"]
    assert [layer["module"] for layer in report["growth"]["layers"]] == ["0", "1"]
    assert 0 < report["growth"]["layers"][0]["gradient_overflows"] <= len(report["scale"]["skipped"])
    # The host syncs of the doctor are its own.
    assert (report["speed"]["products"], report["speed"]["syncs"]) == (2, [])
    assert "no module departs" in capsys.readouterr().out
    assert "Compared with O0" in (tmp_path / "html").read_text()
    assert len((tmp_path / "csv").read_text().splitlines()) == 1 + 2 * 40
