"""What keeps mixed precision from being faster, as the doctor sees it."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn

from ampatch.doctor.growth.brakes import Brakes, said_of_speed, sizes_of
from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.dispatch import Operations
from ampatch.doctor.instruments.tape import Tape
from doctor_samples import sample_speed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 24), nn.LayerNorm(24), nn.Linear(24, 10)

    def forward(self, x):
        x = self.first(x)
        x = self.norm(x.float()).exp()
        return self.last(x)


def look(steps=2, half=True, after=lambda loss: None):
    """Trains under an eye on speed, from the first step on; returns the field of the report."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # whose step calls item() itself
    with ExitStack() as stack:
        brakes = Brakes(tape := Tape(clock := Clock(stack)))
        clock.follow_run()
        Operations(tape, [brakes]).follow()
        for _ in range(1 + steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = model(torch.ones(8, 16)).float().mean()
            loss.backward()
            after(loss)
            optimizer.step()
    return brakes.to_json()


def test_what_a_script_does_before_its_first_step_is_not_told():
    assert look(0, after=lambda loss: loss.item())["syncs"] == []


def test_a_host_sync_of_the_steps_that_were_looked_at_is_told_with_its_line():
    found = look(9, after=lambda loss: loss.item())
    assert [(it["op"], it["count"]) for it in found["syncs"]] == [("item", 4)]
    assert found["syncs"][0]["where"].rpartition(":")[0].endswith("test_slow.py")
    assert found["steps"] == 4


@pytest.mark.parametrize(
    "wait",
    [bool, float, torch.Tensor.cpu, torch.Tensor.tolist, torch.where, lambda it: it[None][it[None] > 0]],
    ids=["if", "float", "cpu", "tolist", "where", "mask"],
)
def test_what_waits_for_the_device(wait):
    assert len(look(1, after=lambda loss: wait(loss.detach()))["syncs"]) == 1


def test_what_does_not_wait_is_no_sync():
    found = look(1, after=lambda loss: torch.where(loss.detach() > 0, 1, 2)[None][torch.tensor([0])])
    assert found["syncs"] == []


def test_products_that_are_small_or_uneven_are_named():
    found = look(1)
    assert found["products"] == 2
    assert [it["sizes"] for it in found["tiny"]] == [(8, 24, 16), (8, 10, 24)]
    assert [(it["module"], it["op"]) for it in found["uneven"]] == [("last", "linear")]


@pytest.mark.parametrize(
    ("name", "shapes", "sizes"),
    [
        ("matmul", [(2, 3, 4, 5), (2, 3, 5, 7)], (24, 7, 5)),
        ("addmm", [(7,), (4, 5), (5, 7)], (4, 7, 5)),
        ("conv2d", [(2, 3, 8, 8), (16, 3, 3, 3)], (128, 16, 27)),
        ("mv", [(4, 5), (5,)], (4, 1, 5)),
    ],
)
def test_sizes_of_products(name, shapes, sizes):
    assert sizes_of(name, tuple(map(torch.ones, shapes))) == sizes


def test_float32_between_half_operations_is_an_island():
    island = look(1)["islands"]
    assert [(it["module"], it["ops"]) for it in island] == [("norm", ("layer_norm", "exp"))]


def test_a_float32_script_has_neither_products_nor_islands_and_nothing_is_said():
    found = look(half=False, after=lambda loss: loss.item())
    assert (found["products"], found["islands"], len(found["syncs"])) == (0, [], 1)
    assert said_of_speed(found) == []


def test_a_call_of_torch_compile_is_noted():
    assert look(1)["compiled"] is False
    assert look(1, after=lambda loss: torch.compile(Net(), backend="eager"))["compiled"] is True


def test_what_is_said_names_a_number_and_a_line():
    said = said_of_speed(sample_speed())
    assert said == [
        "host syncs, 2 a step, each of which waits for a GPU: item at train.py:90",
        "half products smaller than 128 x 128 x 128, 1 of 6: linear of 32 x 10 x 128 at train.py:48",
        "half products with sizes not multiples of 8, 1 of 6: linear of 32 x 10 x 128 at train.py:48",
        "lines in float32 between half operations, 1 in all: layer_norm, gelu at train.py:48",
        "torch.compile is not used: it would join casts with what follows them",
    ]
