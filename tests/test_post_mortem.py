"""What training leaves on disk when it breaks, and how it is opened."""

import errno
import gc
import operator
import os
import pickle
import re
import stat
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from torch import nn

import ampatch as amp
from ampatch.__main__ import main
from ampatch.doctor import post_mortem
from ampatch.watching import post_mortem as written
from ampatch.watching.alarms import watch
from ampatch.watching.alarms.watch import SLOTS
from ampatch.watching.post_mortem import LastForward
from helpers import scaled_backward

NAN, INF = float("nan"), float("inf")


class Net(nn.Module):
    """A linear layer after a dropout, and a mask."""

    def __init__(self):
        super().__init__()
        self.drop, self.out = nn.Dropout(), nn.Linear(8, 2)

    def forward(self, x, mask=None, **others):
        return self.out(self.drop(x))


class Run:
    def __init__(self, folder, level="O2", **options):
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        options = {"verbosity": 0, "post_mortem": folder, **options}
        amp.initialize(self.model, self.optimizer, opt_level=level, **options)

    def step(self, x=None, factor=1e-2, **others):
        self.optimizer.zero_grad()
        x = torch.randn(6, 8) if x is None else x
        loss = self.model(x, **others).float().square().mean() * factor
        scaled_backward(loss, self.optimizer)
        self.optimizer.step()
        return loss.item()


def files(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def load(folder):
    (name,) = files(folder)
    return torch.load(folder / name, weights_only=True)


def broken_batch():
    x = torch.randn(6, 8)
    x[3, 5] = NAN
    return x


# ---- What is in a file ----


def test_the_batch_of_a_model_that_is_called_in_vmap_is_in_the_file(tmp_path):
    run, x = Run(tmp_path, "O1"), broken_batch()
    run.model.drop.p = 0.0
    scaled_backward(torch.func.vmap(run.model)(x).float().sum(), run.optimizer)
    run.optimizer.step()
    (given,) = load(tmp_path)["models"][0]["batch"]
    assert torch.equal(given["values"].nan_to_num(7.0), x.nan_to_num(7.0))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_file_holds_the_step_at_which_a_loss_broke(tmp_path, level):
    run, x, mask = Run(tmp_path, level), broken_batch(), torch.arange(0, 600, 100)
    run.step()
    run.step(x, mask=mask, others={"names": ["a", 1.5, None, object()]})
    found = load(tmp_path)
    assert (found["alarm"]["kind"], found["alarm"]["step"], found["alarm"]["steps_later"]) == ("loss", 1, 0)
    assert (found["opt_level"], found["options"]["loss_scale"]) == (level, "dynamic")
    assert found["history"]["updates"][-1] == [1, 2.0**16, 2.0**15, True, False]
    (model,) = found["models"]
    batch = {facts["name"]: facts for facts in model["batch"]}
    assert torch.equal(batch["args[0]"]["values"].nan_to_num(7.0), x.nan_to_num(7.0))
    assert (batch["args[0]"]["nan"], batch["args[0]"]["inf"], batch["args[0]"]["sample"]) == (1, 0, 3)
    assert (batch["kwargs['mask']"]["least"], batch["kwargs['mask']"]["largest"]) == (0, 500)
    assert [batch[f"kwargs['others']['names'][{i}]"]["value"] for i in range(4)] == [
        "a",
        1.5,
        None,
        "<object>",
    ]
    assert [facts["name"] for facts in model["weights"]] == ["out.weight", "out.bias"]
    assert model["weights"][0]["largest"] == pytest.approx(run.model.out.weight.max().item())
    assert all(facts["nan"] for facts in model["gradients"])


def test_a_batch_is_kept_no_longer_than_its_session(tmp_path):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0, post_mortem=tmp_path)
    model(torch.randn(2, 4))
    assert count_forwards() == 1
    amp.uninitialize()
    assert count_forwards() == 0


def count_forwards():
    gc.collect()
    return sum(isinstance(it, LastForward) for it in gc.get_objects())


def test_the_step_of_another_model_leaves_the_batch_to_the_one_that_breaks(tmp_path):
    models = [Net(), Net()]
    first, second = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    amp.initialize(models, [first, second], opt_level="O1", verbosity=0, post_mortem=tmp_path)
    for model, optimizer, x in zip(models, [first, second], [torch.ones(6, 8), broken_batch()], strict=True):
        scaled_backward(model(x).float().square().mean(), optimizer)
    first.step()
    second.step()
    assert load(tmp_path)["models"][1]["batch"][0]["nan"] == 1


def test_the_random_state_is_that_from_before_the_forward(tmp_path):
    run = Run(tmp_path, "O0", loss_scale="dynamic")
    run.step()
    x = torch.randn(6, 8)
    weights = [param.detach().clone() for param in run.model.parameters()]
    output = run.model(x)
    scaled_backward(output.sum() * NAN, run.optimizer)
    run.optimizer.step()
    (model,) = load(tmp_path)["models"]
    torch.random.set_rng_state(model["random"]["cpu"])
    with torch.no_grad():
        for param, weight in zip(run.model.parameters(), weights, strict=True):
            param.copy_(weight)
    assert torch.equal(run.model(model["batch"][0]["values"]), output)


def test_a_loss_at_a_static_scale_is_known_later_and_the_file_says_so(tmp_path, capsys):
    run = Run(tmp_path, "O4")
    run.step(broken_batch())
    for _ in range(SLOTS - 1):
        run.step()
    assert load(tmp_path)["alarm"]["steps_later"] == SLOTS - 1
    assert main(["doctor", "--open", str(tmp_path / files(tmp_path)[0])]) == 0
    text = capsys.readouterr().out
    assert "The host knew 7 steps later" in text
    assert "weights are lost: go back to a checkpoint" in text


def test_a_batch_is_cut_to_the_samples_that_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(written, "MOST_BYTES", 4 * 8 * 4 + 7)
    x = torch.randn(100, 16)[:, :8]  # a view of more memory than it shows
    Run(tmp_path).step(x, factor=NAN, mask=torch.ones(50))
    batch = load(tmp_path)["models"][0]["batch"]
    assert batch[0]["shape"] == [100, 8]
    assert torch.equal(batch[0]["values"], x[:4])
    assert batch[0]["values"].untyped_storage().nbytes() == 4 * 8 * 4
    assert torch.equal(batch[1]["values"], torch.ones(1))  # what is left


def test_what_cannot_be_stored_is_described(tmp_path):
    table = torch.eye(3).to_sparse()
    forward = LastForward()
    forward.refresh(
        (table, torch.zeros(0, 2), torch.tensor(True), {"z": torch.ones(2, dtype=torch.complex64)}), {}
    )
    batch = written.pack_batch(forward)
    assert [facts["name"] for facts in batch] == ["args[0]", "args[1]", "args[2]", "args[3]['z']"]
    assert "values" not in batch[0]
    assert (batch[0]["largest"], batch[2]["largest"], batch[3]["largest"]) == (1.0, 1, 1.0)
    assert batch[3]["values"].dtype is torch.complex64


def test_the_tensors_that_are_not_finite_are_kept_first(tmp_path, monkeypatch):
    monkeypatch.setattr(written, "MOST_TENSORS", 1)
    run = Run(tmp_path)
    with torch.no_grad():
        run.model.out.bias[1] = float("inf")
    run.step()
    (facts,) = load(tmp_path)["models"][0]["weights"]
    assert (facts["name"], facts["nan"], facts["inf"], facts["sample"]) == ("out.bias", 0, 1, 1)


# ---- When and where one is written ----


def test_one_collapse_leaves_one_file_and_a_call_three_at_the_most(tmp_path):
    seen = []
    with amp.on_alarm(lambda alarm: seen.append(alarm.post_mortem)):
        run = Run(tmp_path, alarms=amp.Alarms(within=2))
        for factor in [NAN] * 4 + [1e-2] * 3 + [NAN, 1e-2, 1e-2, 1e-2] * 4:
            run.step(factor=factor)
    assert len(files(tmp_path)) == watch.MOST_POST_MORTEMS == 3
    assert [path.name for path in seen if path is not None] == files(tmp_path)
    assert len(seen) > 3


def test_a_folder_keeps_the_latest_files_and_nobody_elses(tmp_path, monkeypatch):
    monkeypatch.setattr(written, "MOST_FILES", 4)
    others = ["model.pt", "post-mortem.txt", "post-mortem-of-mine.pt"]
    for name in [*others, "post-mortem-20200101-000000-1-rank0-7.part"]:
        (tmp_path / name).write_text("")
    paths = [written.write(tmp_path, 0, dict) for _ in range(6)]
    assert files(tmp_path) == sorted([*others, *(path.name for path in paths[-4:])])


@pytest.mark.parametrize("renames", [False, True], ids=["its own names", "later names"])
def test_a_clock_that_goes_back_loses_no_new_file(tmp_path, monkeypatch, renames):
    monkeypatch.setattr(written, "MOST_FILES", 4)
    hour, now = 3600 * 10**9, written.time.time_ns()
    for path in [written.write(tmp_path, 0, dict) for _ in range(4)]:
        name = path.name.replace("post-mortem-", "post-mortem-9") if renames else path.name
        os.utime(path.rename(path.with_name(name)), ns=(now + hour, now + hour))
    paths = []
    for _ in range(6):
        paths.append(written.write(tmp_path, 0, dict))
        assert paths[-1].exists()
    assert files(tmp_path) == [path.name for path in paths[-4:]]


@pytest.mark.skipif(os.name != "posix", reason="needs permissions of files")
def test_others_cannot_read_the_data_of_a_batch(tmp_path):
    before = os.umask(0)
    try:
        path = written.write(tmp_path / "of" / "ours", 0, dict)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)]
    assert modes == [0o600, 0o700]


def test_names_follow_the_clock_over_the_turn_of_a_second(tmp_path, monkeypatch):
    clock = iter(range(1_700_000_000_999_999_998, 1_700_000_001_000_000_002))
    monkeypatch.setattr(written.time, "time_ns", lambda: next(clock))
    names = [written.write(tmp_path, 0, dict).name for _ in range(4)]
    assert names == sorted(names)


TELLS_HOW = "With initialize(post_mortem=True) the first alarm writes a post-mortem"


@pytest.mark.parametrize(
    ("named", "asked", "folder", "tells"),
    [
        *(("0", asked, None, False) for asked in (None, True, False)),
        *((off, True, None, False) for off in ("off", "")),
        *(("kept", asked, "kept", False) for asked in (None, True)),
        ("kept", False, None, True),
        (None, None, None, True),
        (None, True, "ampatch-post-mortem", False),
        (None, False, None, True),
    ],
)
def test_the_argument_and_the_environment_say_where_files_go(
    tmp_path, monkeypatch, caplog, named, asked, folder, tells
):
    monkeypatch.delenv("AMPATCH_POST_MORTEM")
    if named is not None:
        monkeypatch.setenv("AMPATCH_POST_MORTEM", named)
    monkeypatch.chdir(tmp_path)
    run = Run(asked, verbosity=1)
    assert files(tmp_path) == []  # nothing before something happens
    run.step(factor=NAN)
    assert "the loss is inf or NaN" in caplog.text
    assert (TELLS_HOW in caplog.text) is tells
    assert files(tmp_path) == ([folder] if folder else [])
    if folder:
        (name,) = files(tmp_path / folder)
        assert re.search(rf"ampatch doctor --open \S*{folder}/{name}", caplog.text)


def test_what_names_no_folder_is_refused():
    with pytest.raises(amp.AmpTypeError, match="post_mortem is 3: expected True, False or a folder"):
        Run(3)


def test_other_ranks_write_only_where_their_own_loss_broke(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "find_rank", lambda: 5)
    run = Run(tmp_path, alarms=amp.Alarms(loss=False, skipped=1))
    run.step()
    run.step(factor=NAN)
    assert files(tmp_path) == []
    Run(tmp_path).step(factor=NAN)
    assert "-rank5-" in files(tmp_path)[0]


# ---- Whole or not at all ----


def fail_to_sync(number):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_loses_the_file_and_not_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(os, "fsync", fail_to_sync)
    seen = []
    with amp.on_alarm(seen.append):
        run = Run(tmp_path)
        run.step(factor=NAN)
    assert files(tmp_path) == []
    assert "no post-mortem was written" in caplog.text
    assert "No space left on device" in caplog.text
    assert [alarm.post_mortem for alarm in seen] == [None]
    assert run.step() < INF


def test_a_folder_that_cannot_be_made_loses_the_file_and_not_the_run(tmp_path, caplog):
    (tmp_path / "taken").write_text("")
    run = Run(tmp_path / "taken" / "folder")
    run.step(factor=NAN)
    assert "no post-mortem was written" in caplog.text
    assert run.step() < INF


def test_a_batch_that_cannot_be_packed_loses_the_file_and_not_the_run(tmp_path, caplog):
    batch = {}
    batch["itself"] = batch
    run = Run(tmp_path)
    run.step(factor=NAN, others=batch)
    assert "RecursionError" in caplog.text
    assert files(tmp_path) == []


def test_a_file_has_its_name_only_once_it_is_whole(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(os, "fsync", lambda number: seen.extend(files(tmp_path)))
    Run(tmp_path).step(factor=NAN)
    assert [name.rpartition(".")[2] for name in [*seen, *files(tmp_path)]] == ["part", "pt"]


# ---- Opening ----


def test_a_file_is_told_in_ten_lines(tmp_path, capsys):
    run = Run(tmp_path)
    run.step()
    run.step(broken_batch(), mask=torch.arange(6))
    capsys.readouterr()
    assert main(["doctor", "--open", str(tmp_path / files(tmp_path)[0])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 8 <= len(lines) <= 12
    assert "loss 0, step 1: the loss is inf or NaN" in lines[0]
    assert lines[1:4] == [
        "  O2 (dynamic loss scale): 1 of 2 steps were skipped",
        "  scale: 65536 at step 0, 65536 at step 1 (skipped)",
        "  batch of Net: args[0] float32 [6, 8], 1 nan, first in sample 3; kwargs['mask'] int64 [6], 0 to 5",
    ]
    assert lines[4].startswith("  weights of Net: 2, all finite; the largest value is 0.")
    assert lines[5] == "  gradients of Net: 2 of 2 are not finite: out.weight (16 nan), out.bias (2 nan)"
    assert lines[7] == "  -> the batch itself is broken: look at sample 3 of args[0]"


def open_file(path, capsys):
    """Opens a file that is no post-mortem, and returns what is said of it."""
    assert main(["doctor", "--open", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


class Runs:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def saved(value):
    return lambda path: torch.save(value, path)


FORMAT = {"format": "ampatch post-mortem", "version": 1}
NO_POST_MORTEMS = {
    "missing": (lambda path: None, "no such file"),
    "folder": (lambda path: path.mkdir(), "a folder"),
    "empty": (lambda path: path.write_bytes(b""), "the file is empty"),
    "text": (lambda path: path.write_text("Dear diary"), "it begins with b'Dear diary'"),
    "damaged": (lambda path: path.write_bytes(b"PK\x03\x04 and no more"), "damaged"),
    "list": (saved([1, 2]), "found list"),
    "checkpoint": (saved({"model": 1, "epoch": 2}), r"found a dict with \['epoch', 'model'\]"),
    "version": (saved(FORMAT | {"version": 2}), "version 2 was written by another"),
    "no version": (saved(FORMAT | {"version": torch.ones(2)}), "version <Tensor> was written"),
    "long name": (saved({"x" * 10**6: 1}), r"found a dict with \['x{500}\.\.\.'\]"),
    "parts": (saved(FORMAT | {"alarm": 3}), "its parts alarm, history, .* damaged"),
}


@pytest.mark.parametrize("name", NO_POST_MORTEMS)
def test_what_is_no_post_mortem_is_told_as_what_it_is(tmp_path, capsys, name):
    make, match = NO_POST_MORTEMS[name]
    path = tmp_path / "file.pt"
    make(path)
    assert re.search(match, open_file(path, capsys))


def test_a_file_from_somebody_else_runs_no_code(tmp_path, capsys):
    path, made = tmp_path / "file.pt", tmp_path / "made"
    found = FORMAT | {"alarm": Runs(str(made))}
    torch.save(found, path)
    assert "refuses it" in open_file(path, capsys)
    path.write_bytes(pickle.dumps(found))
    assert "not written by torch.save" in open_file(path, capsys)
    assert not made.exists()


@pytest.fixture
def changed(tmp_path, capsys):
    """Opens a file of a step that broke, after a change of what it holds."""

    def change_and_open(change):
        Run(tmp_path).step(broken_batch())
        found, path = load(tmp_path), tmp_path / files(tmp_path)[0]
        change(found)
        torch.save(found, path)
        capsys.readouterr()
        status = main(["doctor", "--open", str(path)])
        out, err = capsys.readouterr()
        return status, out if status == 0 else err

    return change_and_open


def test_what_stands_in_a_file_does_not_steer_the_terminal(changed):
    status, said = changed(lambda found: found["where"].update(script="\x1b[2Jtrain.py\nnext"))
    assert (status, "?[2Jtrain.py?next" in said) == (0, True)


@pytest.mark.parametrize(
    ("part", "value", "status"),
    [
        ("history", {"updates": [1]}, 2),
        ("models", [3], 2),
        ("models", [{"name": "a", "weights": [{"least": "b"}]}], 2),
        ("alarm", {}, 0),
    ],
)
def test_a_file_with_parts_of_other_types_is_refused_or_shown(changed, part, value, status):
    assert changed(lambda found: found.update({part: value}))[0] == status


@pytest.mark.parametrize("error", [{"least": "x" * 10**6}, {"nan": torch.ones(2)}], ids=["long", "tensor"])
def test_what_is_said_of_a_damaged_file_is_short(changed, error):
    status, said = changed(lambda found: found["models"][0]["weights"][0].update(error))
    assert (status, len(said) < 1000) == (2, True)


def nested(depth):
    """Makes lists that hold one another twice: short in a file, and 2 ** depth items when written out."""
    value = ["x"]
    for _ in range(depth):
        value = [value, value]
    return value


PLACES = {
    "script": lambda found: found["where"],
    "message": lambda found: found["alarm"],
    "loss_scale": lambda found: found["options"],
    0: lambda found: found["history"]["updates"][-1],
    **{name: lambda found: found["models"][0]["batch"][0] for name in ("name", "shape", "sample")},
}


@pytest.mark.parametrize("value", ["x" * 10**6, nested(22)], ids=["long", "nested"])
@pytest.mark.parametrize("place", PLACES)
def test_a_line_is_short_whatever_stands_in_a_file(changed, place, value):
    status, said = changed(lambda found: operator.setitem(PLACES[place](found), place, value))
    assert (status, max(map(len, said.splitlines())) < 2000) == (0, True)


def test_of_very_many_models_the_first_are_shown(changed):
    status, said = changed(lambda found: found.update(models=found["models"] * 10**5))
    assert (status, "  and 99968 more models\n" in said, said.count("\n") < 200) == (0, True, True)


def test_a_file_that_would_unpack_to_any_size_is_not_unpacked(tmp_path, capsys):
    Run(tmp_path).step(factor=NAN)
    (name,) = files(tmp_path)
    path = tmp_path / "packed.pt"
    with ZipFile(tmp_path / name) as old, ZipFile(path, "w", ZIP_DEFLATED) as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record) + b"\0" * 10**6)
    assert "it is compressed" in open_file(path, capsys)


def test_a_file_of_which_little_is_tensors_is_not_read(tmp_path, capsys, monkeypatch):
    Run(tmp_path).step(factor=NAN)
    monkeypatch.setattr(post_mortem, "MOST_BYTES", 1000)
    assert re.search(
        r"holds [\d,]+ bytes beside its tensors", open_file(tmp_path / files(tmp_path)[0], capsys)
    )


# ---- Scripts ----

SCRIPT = """
import torch
from apex import amp
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for step in range(3):
    x = torch.full((5, 4), float("nan") if step == 1 else 1.0)
    with amp.scale_loss(model(x).float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
"""


@pytest.mark.process
@pytest.mark.usefixtures("doctor_in_forks")
def test_a_script_of_the_drop_in_leaves_a_file_but_not_under_the_doctor(processes, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.setenv("AMPATCH_POST_MORTEM", str(tmp_path / "kept"))
    assert main(["doctor", str(tmp_path / "train.py")]) == 1
    assert files(tmp_path / "kept") == []
    code = "del os.environ['AMPATCH_POST_MORTEM']\nsys.exit(ampatch.__main__.main(['run', 'train.py']))"
    done = processes.run(code, tmp_path)
    assert (done.status, len(files(tmp_path / "ampatch-post-mortem"))) == (0, 1), done.stderr
    assert "the loss is inf or NaN" in done.stderr
