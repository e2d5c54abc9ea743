"""Patching: what was there comes back exactly, and what others put over it stays."""

import datetime
import gc
import sys
import types

import pytest
import torch
from torch import nn

import ampatch as amp
from ampatch import lists
from ampatch.levels.patcher import Patcher
from ampatch.table import FP32, LOWER, CastTable, Row
from patched import open_session


def replacement(*args, **kwargs):
    return "replaced"


def other(*args, **kwargs):
    return "other"


class Owner:
    def own(self):
        return "own"


def make_module():
    module = types.ModuleType("made")
    module.function = lambda: "function"
    return module


@pytest.fixture
def patcher():
    return Patcher()


# ---- Undo ----


@pytest.mark.parametrize("value", [None, replacement])
def test_two_replacements_of_a_place_are_undone_and_the_original_is_found_beneath_them(patcher, value):
    module = make_module()
    module.function = value
    before = dict(vars(module))
    patcher.replace(module, "function", replacement)
    patcher.replace(module, "function", other)
    assert module.function() == "other"
    assert patcher.find_original(module, "function") is value
    patcher.close()
    assert vars(module) == before


class Refuses(type):
    def __setattr__(cls, name, value):
        raise TypeError(f"{name} stays")


def test_a_class_written_in_c_takes_an_attribute_and_one_that_refuses_it_does_not(patcher):
    patcher.put(datetime.date, "added", 1)
    patcher.put(datetime.date, "today", 2)
    assert (datetime.date.added, datetime.date.today) == (1, 2)
    patcher.close()
    assert not hasattr(datetime.date, "added")
    assert isinstance(datetime.date.today(), datetime.date)
    with pytest.raises(TypeError, match="added stays"):
        patcher.put(Refuses("Owner", (), {}), "added", 1)
    assert len(patcher) == 0


# ---- Conflicts ----


def test_every_patch_over_ours_is_left_and_named_once_and_the_rest_is_undone(patcher):
    module = make_module()
    own = vars(Owner)["own"]
    patcher.replace(Owner, "own", replacement)
    patcher.replace(module, "function", replacement)
    patcher.replace(module, "function", replacement)
    module.function = other
    with pytest.raises(amp.PatchConflictError, match=r"^made\.function: replaced by other code"):
        patcher.close()
    assert module.function is other
    assert vars(Owner)["own"] is own


@pytest.fixture
def patched_over():
    """A session whose patch of torch.mm somebody else has patched over; undone at the end."""
    original = torch.mm
    model = open_session()
    ours = torch.mm

    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    torch.mm = theirs
    yield model, ours, theirs
    torch.mm = ours if torch.mm is theirs else torch.mm
    amp.uninitialize()
    torch.mm = original


def test_uninitialize_leaves_a_patch_of_torch_over_ours_which_casts_no_more_and_undoes_the_rest(patched_over):
    model, _, theirs = patched_over
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    with pytest.raises(amp.PatchConflictError, match=r"^torch\.mm: replaced by other code"):
        amp.uninitialize()
    assert torch.mm is theirs
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
    assert "mm" not in vars(torch.Tensor)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    with pytest.raises(amp.NotInitializedError):
        amp.state_dict()


# ---- Rows ----


def test_what_this_torch_lacks_is_passed_over_with_a_warning_unless_its_version_says_so(monkeypatch, caplog):
    rows = (Row("no_such_function", FP32, "a sum"), Row("gone", FP32, "a sum", until="2.0"))
    tables = CastTable("torch", rows), CastTable("torch.no_such_module", (Row("linear", LOWER, "GEMM"),))
    monkeypatch.setattr(lists, "TABLES", (*tables, *lists.TABLES))
    model = open_session()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "torch.no_such_function" in caplog.text
    assert "torch.no_such_module" in caplog.text
    assert model(torch.ones(1, 2)).dtype is torch.bfloat16


# ---- Many cycles ----


def test_many_cycles_leave_no_objects_behind():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def cycle(count):
        for index in range(count):
            level = ("O0", "O2", "O4", "O5")[index % 4]
            amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
            with amp.scale_loss(model(torch.ones(2, 2)).sum(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
            amp.uninitialize()
        gc.collect()
        return len(gc.get_objects()), sys.getallocatedblocks()

    cycle(8)
    objects, blocks = cycle(8)
    later_objects, later_blocks = cycle(8)
    assert later_objects - objects <= 8
    # Blocks also count numbers and strings, which Python keeps for reuse; a cycle at O4 makes
    # over 2000 of them, so that 500 is less than one wrapper in four.
    assert later_blocks - blocks < 500
