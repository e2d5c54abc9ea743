"""How large the numbers of layers are over a run, where growth began, and what is written of it."""

import csv
import importlib.util
import math
from contextlib import ExitStack

import pytest
import torch
from torch import nn

import ampatch as amp
from ampatch.__main__ import main
from ampatch.doctor.command import COLUMNS, rows_of, write_csv, write_scalars
from ampatch.doctor.finding import Report
from ampatch.doctor.growth import notes
from ampatch.doctor.growth.curves import describe_growth, first_to_grow, headroom, said_of_growth
from ampatch.doctor.growth.notes import Growth
from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.words import describe
from doctor_samples import STEPS, attempts_of, growing, notes_of, sample_finding, sample_growth

# ---- Notes of a run ----


def train(steps, level=None, look=lambda model, step: None, every=0):
    """Trains a net under notes; returns these."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if level:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
    with ExitStack() as stack:
        growth = Growth(clock := Clock(stack), every)
        clock.follow_run()
        for step in range(steps):
            look(model, step)
            loss = model(torch.ones(3, 4)).float().square().mean()
            optimizer.zero_grad()
            if level:
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            else:
                loss.backward()
            optimizer.step()
    growth.fetch()
    return growth


@pytest.mark.parametrize(("level", "scale"), [(None, 1.0), ("O2", 8.0), ("O1", 8.0)])
def test_a_layer_has_its_largest_output_gradient_and_weight(level, scale):
    seen = []

    def look(model, step):
        layer = model[0]
        if step == 0:
            layer.register_forward_hook(lambda _, __, output: seen.append(output.detach().abs().max().item()))
            layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
            layer.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))

    torch.manual_seed(3)
    growth = train(1, level, look)
    found = describe_growth(growth.to_json(), [Attempt(0, scale)])
    layer = found["layers"][0]
    gradients = torch.cat([it.flatten().float() for it in seen[1:]]) / scale
    assert (layer["model"], layer["module"]) == ("model", "0")
    assert layer["output"] == [pytest.approx(seen[0])]
    assert layer["gradient"] == [pytest.approx(gradients.abs().max().item())]
    assert layer["gradient_norm"] == [pytest.approx(gradients.norm().item(), rel=1e-3)]
    assert 0.1 < layer["weight"][0] < 0.6
    assert layer["headroom"] == [pytest.approx(65504 / max(seen[0], scale * layer["gradient"][0]))]


def test_an_output_belongs_to_the_innermost_module_that_gave_it():
    growth = train(1)
    noted = [layer for layer, row in growth.kept[0][2].items() if "output" in row]
    assert noted == [("model", "0"), ("model", "1.0"), ("model", "1.1")]


def test_what_is_noted_costs_a_host_sync_in_fifty_attempts(monkeypatch):
    fetches, fetched = [], notes.read_numbers
    monkeypatch.setattr(notes, "read_numbers", lambda tensors: fetches.append(1) or fetched(tensors))
    growth = train(120)
    assert len(fetches) == 3
    assert [attempt for attempt, _, _ in growth.kept] == list(range(120))


@pytest.mark.parametrize(("every", "kept"), [(5, [0, 5, 7, 10]), (0, [0, 4, 7, 8])])
def test_of_many_attempts_some_are_kept_and_the_first_overflow(monkeypatch, every, kept):
    monkeypatch.setattr(notes, "MOST_KEPT", 4)

    def look(model, step):
        for layer in (model[0], model[1][1]):
            layer.reset_parameters()
        with torch.no_grad():
            model[0].bias.fill_(math.inf if step in (7, 9) else 1.0)

    growth = train(12, look=look, every=every)
    assert [attempt for attempt, _, _ in growth.kept][:4] == kept
    assert growth.overflows["model", "0"]["output"] == 2


def test_a_forward_without_gradients_is_not_noted():

    def look(model, step):
        with torch.no_grad():
            model(torch.full((1, 4), 1e6))

    growth = train(1, look=look)
    assert growth.kept[0][2]["model", "0"]["output"] < 10


# ---- Curves ----


def test_headroom_counts_the_larger_of_output_and_scaled_gradient():
    assert headroom(10.0, 6550.4, 65504.0) == 10.0
    assert headroom(10.0, math.nan, 65504.0) == 0.0
    assert headroom(None, 0.0, 65504.0) > 1e30


def test_growth_began_where_it_began_and_not_where_it_overflowed():
    growth = sample_growth()
    began = growth["began"]
    assert (began["module"], began["quantity"], began["reached"]["module"]) == ("blocks.1", "output", "head")
    assert 19 <= began["attempt"] <= 23
    assert began["weight_times"] > 100
    said = said_of_growth(growth)[0]
    assert said.startswith(f"Growth began at step {began['attempt']} in model.blocks.1")
    assert "its weights are" in said
    assert "Nearest to overflow: model.head." in said


@pytest.mark.parametrize(("step", "grown", "is_said"), [(53, 1.0, True), (53, 1e4, False), (3, 1.0, False)])
def test_growth_is_said_where_no_finding_tells_of_it_or_came_before(step, grown, is_said):
    finding = sample_finding(step=step, steps=(step,), facts={"grown": grown})
    said = "\n".join(describe(Report((finding,), growth=sample_growth())))
    assert ("Growth began" in said) is is_said


def test_nothing_began_where_nothing_grows_or_there_is_room():
    still = {"a": (60000.0, 1.0, 1.0), "b": (growing(20, 1.02), 1.0, 1.0)}
    assert describe_growth(notes_of(still), attempts_of())["began"] is None
    far = {"a": (growing(20, 1.1), 1.0, 1.0)}
    assert describe_growth(notes_of(far), attempts_of())["began"] is None


def test_gradients_are_followed_from_the_loss_on():
    layers = {name: (1.0, growing(start, 1.4), 1.0) for name, start in (("a", 22), ("b", 21), ("c", 99))}
    began = describe_growth(notes_of(layers), attempts_of())["began"]
    assert (began["module"], began["quantity"]) == ("b", "gradient")


def test_a_dynamic_scale_that_keeps_gradients_near_overflow_is_no_growth():
    layers = {"a": (growing(20, 1.1), 30000.0, 1.0), "b": (1.0, growing(20, 1.2, 10.0), 1.0)}
    assert describe_growth(notes_of(layers), attempts_of())["began"] is None


def test_a_spike_is_no_growth():
    spike = [1.0] * 30 + [1e5] + [1.0] * 29
    assert first_to_grow([spike]) is None
    assert first_to_grow([[None] * 5, [1.0]]) is None


def test_gradients_are_without_their_scale():
    growth = describe_growth(notes_of({"a": (1.0, 512.0, 1.0)}), attempts_of(256.0))
    assert growth["layers"][0]["gradient"] == [2.0] * STEPS
    assert growth["layers"][0]["headroom"][0] == 65504 / 512


# ---- What is written ----


def test_a_table_has_a_row_for_each_step_and_layer(tmp_path):
    write_csv(sample_growth(), tmp_path / "curves.csv")
    with open(tmp_path / "curves.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == 5 * STEPS
    last = rows[-1]
    assert (last["attempt"], last["module"], last["output"], last["headroom"]) == ("59", "head", "", "0.0")


def test_scalars_are_those_of_the_table(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    growth = sample_growth()
    write_scalars(growth, str(tmp_path))
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    events.Reload()
    seen = events.Scalars("output/model.blocks.1")
    expected = [row[5] for row in rows_of(growth) if row[3] == "blocks.1"]
    assert [it.step for it in seen] == list(range(STEPS))
    assert [it.value for it in seen] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--against", "O9"], "--against 'O9': expected one of O0"),
        (["--every", "-1"], "--every -1: expected a number"),
        (["--html", "absent/r.html"], "--html 'absent/r.html': expected a file in a folder that exists"),
        (["--tensorboard", "runs"], "tensorboard is not installed: pip install tensorboard"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_script_runs(arguments, said, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboard" else find(name, *rest)
    )
    assert main(["doctor", *arguments, __file__]) == 2
    assert said in capsys.readouterr().err
