"""Patching: what was there comes back exactly, and what others put over it stays."""

import gc
import logging
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch as amp
from ampatch import lists
from ampatch.patching.patcher import Patcher, place_rows
from ampatch.table import FP32, LOWER, CastTable, Row
from patched import open_session


def replacement(*args, **kwargs):
    return "replaced"


def other(*args, **kwargs):
    return "other"


class Base:
    def inherited(self):
        return "inherited"

    @staticmethod
    def static():
        return "static"

    @classmethod
    def bound(cls):
        return cls.__name__


class Derived(Base):
    def own(self):
        return "own"

    value = property(lambda self: "property")


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


@pytest.mark.parametrize("name", ["static", "bound", "inherited"])
@pytest.mark.parametrize("make", [lambda: Derived, Derived], ids=["class", "instance"])
def test_what_a_class_or_an_instance_inherits_is_absent_again(patcher, make, name):
    owner = make()
    patcher.replace(owner, name, replacement)
    assert getattr(owner, name)() == "replaced"
    patcher.close()
    assert name not in vars(owner)


@pytest.mark.parametrize(
    ("parent", "name"), [(Base, "static"), (Base, "bound"), (Derived, "own"), (Derived, "value")]
)
def test_an_attribute_of_a_class_comes_back_unbound(patcher, parent, name):
    before = vars(parent)[name]
    patcher.replace(parent, name, replacement)
    patcher.close()
    assert vars(parent)[name] is before


def test_what_a_module_provides_by_getattr_is_absent_again(patcher):
    assert "lstm" not in vars(torch._VF)
    before = torch._VF.lstm
    patcher.replace(torch._VF, "lstm", replacement)
    assert torch._VF.lstm is replacement
    patcher.close()
    assert "lstm" not in vars(torch._VF)
    assert torch._VF.lstm == before


def test_a_missing_attribute_raises_and_changes_nothing(patcher):
    with pytest.raises(AttributeError):
        patcher.replace(Derived, "missing", replacement)
    assert "missing" not in vars(Derived)


def test_the_order_of_undoing_is_last_in_first_out(patcher):
    undone = []

    class Watched(type):
        def __setattr__(cls, name, value):
            undone.append(name)
            super().__setattr__(name, value)

    watched = Watched("watched", (), dict.fromkeys("abc"))
    for name in "abc":
        patcher.replace(watched, name, replacement)
    patcher.close()
    assert undone == ["a", "b", "c", "c", "b", "a"]


def test_initialize_and_uninitialize_leave_every_name_of_torch_as_it_was():
    places = [torch, torch.Tensor, torch._VF, torch.functional, F, torch.linalg, torch.special, torch.fft]
    before = [dict(vars(place)) for place in places]
    open_session()
    assert [dict(vars(place)) for place in places] != before
    amp.uninitialize()
    after = [dict(vars(place)) for place in places]
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        assert all(old[name] is new[name] for name in old)


# ---- Conflicts ----


def test_every_patch_over_ours_is_left_and_named_once_and_the_rest_is_undone(patcher):
    module = make_module()
    own = vars(Derived)["own"]
    patcher.replace(Derived, "own", replacement)
    patcher.replace(module, "function", replacement)
    patcher.replace(module, "function", replacement)
    module.function = other
    with pytest.raises(amp.PatchConflictError, match=r"^made\.function: replaced by other code"):
        patcher.close()
    assert module.function is other
    assert vars(Derived)["own"] is own


def test_all_that_others_have_patched_is_undone_once_their_patches_are_gone(patcher):
    modules = [make_module(), make_module()]
    before = [module.function for module in modules]
    for module in modules:
        patcher.replace(module, "function", replacement)
        module.function = other
    with pytest.raises(amp.PatchConflictError):
        patcher.close()
    for module in modules:
        module.function = replacement
    patcher.close()
    assert [module.function for module in modules] == before


@pytest.mark.parametrize("back", ["ours", "the original"])
@pytest.mark.parametrize("is_deleted", [False, True], ids=["replaced", "deleted"])
def test_closing_again_when_the_other_patch_is_gone_undoes_ours_once(patcher, back, is_deleted):
    module = make_module()
    before = module.function
    patcher.replace(module, "function", replacement)
    module.function = other
    if is_deleted:
        del module.function
    with pytest.raises(amp.PatchConflictError, match=r"^made\.function"):
        patcher.close()
    assert vars(module).get("function") is (None if is_deleted else other)
    module.function = replacement if back == "ours" else before
    patcher.close()
    assert module.function is before
    module.function = other
    patcher.close()
    assert module.function is other


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


def test_a_conflict_is_told_once_and_settled_when_the_other_patch_is_gone(patched_over):
    _, ours, theirs = patched_over
    with pytest.raises(amp.PatchConflictError):
        amp.uninitialize()
    open_session()
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    amp.uninitialize()
    assert torch.mm is theirs
    torch.mm = ours
    amp.uninitialize()
    assert torch.mm is not ours


# ---- Rows ----


def test_what_this_torch_lacks_is_passed_over_with_a_warning_unless_its_version_says_so(caplog):
    rows = (
        Row("linear", LOWER, "GEMM"),
        Row("softmaxx", FP32, "sums"),
        Row("gone", FP32, "sums", until="2.0"),
    )
    tables = [CastTable("torch.nn.functional", rows), CastTable("torch.no_such_module", rows[:1])]
    with caplog.at_level(logging.WARNING, logger="ampatch"):
        placed = place_rows(tables, torch.__version__)
    assert [(place, row.name) for place, row in placed] == [((F, "linear"), "linear")]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "torch.nn.functional.softmaxx" in caplog.text
    assert "torch.no_such_module" in caplog.text


def test_the_tables_of_ampatch_are_placed_whole_without_a_warning(caplog):
    rows = [row for table in lists.TABLES for row in table.select(torch.__version__).rows]
    assert len(place_rows(lists.TABLES, torch.__version__)) == len(rows)
    assert caplog.text == ""


def test_initialize_works_with_a_row_that_this_torch_lacks(monkeypatch, caplog):
    table = CastTable("torch", (Row("no_such_function", FP32, "a sum"),))
    monkeypatch.setattr(lists, "TABLES", (table, *lists.TABLES))
    model = open_session()
    assert "torch.no_such_function" in caplog.text
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
