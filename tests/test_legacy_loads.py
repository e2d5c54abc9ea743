"""What `ampatch run --legacy` loads of checkpoints and arrays, and what it refuses."""

import argparse
import collections
import datetime
import importlib
import importlib.util
import io
import os
import pathlib
import pickle
import re
import sys
import types
import zipfile

import numpy as np
import pytest
import torch

import ampatch as amp
from ampatch.apex import fp16_utils, normalization, optimizers, parallel
from ampatch.apex.legacy import open_legacy as legacy
from ampatch.apex.legacy import pickles

MODELS = """
import collections, enum, os, subprocess, torch
from os import system
from subprocess import Popen

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d
        self.kind, self.act = Kind.B, torch.nn.functional.relu

    def forward(self, x):
        return self.act(self.linear(x))

class Kind(enum.Enum):
    A = 1
    B = 2

class Meter:
    def __init__(self):
        self.average = 3.0

    def __hash__(self):
        mark("hash")
        return 1

    def __iter__(self):
        mark("iter")
        return iter("a")

class Config(dict):
    def __setitem__(self, key, value):
        mark("setitem")
        super().__setitem__(key, value)

class Attributes(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self

    def keys(self):
        mark("keys")
        return super().keys()

    def __iter__(self):
        mark("iter")
        return super().__iter__()

class Ordered(collections.OrderedDict):
    pass

Pair = collections.namedtuple("Pair", "a b")

class Runner:
    def __init__(self, command):
        mark("init")

class Setter:
    def __setstate__(self, state):
        mark("setstate")

class Deleter:
    def __del__(self):
        if vars(self):
            mark("del")

class Maker:
    def __new__(cls, *args):
        mark("new")
        return super().__new__(cls)

class Outer:
    class Inner:
        pass

def function(*args):
    mark("function")

def mark(name):
    ran.append(name)

ran = []
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A module of the script's folder; `ran` names what of it was run."""
    (tmp_path / "train.py").touch()
    (tmp_path / "models_of_script.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path / "train.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    module = importlib.import_module("models_of_script")
    yield module
    del sys.modules["models_of_script"]


class Call:
    """Pickles as the call of a function."""

    def __init__(self, function, *args, state=None):
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self):
        return self.reduced


def saved(value, **options):
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


def with_pickle(make, value=()):
    """Returns a checkpoint whose pickle is what `make` returns for that of a value."""
    file = io.BytesIO()
    with zipfile.ZipFile(saved(value)) as old, zipfile.ZipFile(file, "w") as new:
        for each in old.infolist():
            is_pickle = each.filename.endswith("data.pkl")
            new.writestr(each, make(old.read(each)) if is_pickle else old.read(each))
    file.seek(0)
    return file


def refused(load):
    """Returns what is said of a file that is refused."""
    with pytest.raises(pickle.UnpicklingError, match="may run any code") as error, legacy():
        load()
    assert "--legacy --unsafe-load" in str(error.value)
    return str(error.value)


def values(models):
    return {
        "args": argparse.Namespace(lr=0.1, path=pathlib.Path("a", "b")),
        "default": collections.defaultdict(list, a=[1]),
        "deque": collections.deque([1, 2], maxlen=5),
        "counter": collections.Counter("aab"),
        "ordered": collections.OrderedDict(a=torch.ones(2)),
        "scalar": np.float32(0.5),
        "array": np.arange(4, dtype=">i4").reshape(2, 2),
        "texts": np.array(["ab", "c"]),
        "objects": np.array([{"a": 1}, None], object),
        "state": np.random.RandomState(0).get_state(),
        "sets": ({1, 2}, frozenset({3})),
        "plain": (b"ab", 2**70, 1j, slice(1, 2), None, "x"),
        "date": datetime.datetime(2019, 1, 1),
        "simple": types.SimpleNamespace(a=1),
        "type": np.float64,
        "config": models.Config(a=1),
        "attributes": models.Attributes(a=1),
        "own": models.Ordered(a=1),
        "pair": models.Pair(1, [2]),
        "kind": models.Kind.B,
    }


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_what_training_checkpoints_hold_is_loaded_as_pickle_has_it(protocol, models):
    file = saved(values(models), pickle_protocol=protocol)
    expected = torch.load(file, weights_only=False)
    models.ran.clear()
    file.seek(0)
    with legacy():
        actual = torch.load(file)
    for name, value in expected.items():
        assert type(actual[name]) is type(value), name
        assert repr(actual[name]) == repr(value), name
    assert actual["default"]["new"] == []
    assert actual["attributes"].a == 1
    assert actual["kind"] is models.Kind.B
    assert models.ran == []


@pytest.mark.parametrize("place", ["pathlib", "pathlib._local"])
def test_a_path_is_loaded_that_any_python_saved(place):
    """3.13 names a private module of it."""
    path = pathlib.Path("a", "b")
    text = re.sub(rb"cpathlib(\._local)?\n", f"c{place}\n".encode(), pickle.dumps(path, 2))
    assert pickles.load(io.BytesIO(text)) == path


@pytest.mark.parametrize("zipped", [True, False], ids=["today", "before 1.6"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_what_the_scripts_of_docs_scripts_save_is_loaded(zipped, models):
    net = torch.nn.Sequential(torch.nn.utils.weight_norm(torch.nn.Linear(2, 2)), models.Net())
    net.act, net.norm = torch.tanh, normalization.FusedLayerNorm(2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scaler = fp16_utils.DynamicLossScaler()
    scaler.update_scale(overflow=True)
    whole = {
        "model": [torch.nn.DataParallel(net), torch.nn.CrossEntropyLoss()],  # waveglow, sha-rnn
        "whole optimizer": optimizer,
        "features": [models.Meter()],  # BERT-NER
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1).state_dict(),
        "optimizer": {"loss_scaler": scaler, "fp32_from_fp16": [[torch.ones(2)]]},  # DALI, sparse_learning
        "args": argparse.Namespace(device=torch.device("cpu"), lr=0.1),  # T2T-ViT, efficientdet
        "metrics": collections.defaultdict(list, {"loss": [np.float64(0.5)]}),
    }
    with legacy():
        loaded = torch.load(saved(whole, _use_new_zipfile_serialization=zipped))
    x = torch.randn(3, 2)
    model = loaded["model"][0].module
    assert torch.equal(model(x), net(x))
    assert model[1].kind is models.Kind.B
    assert model.act(x).equal(x.tanh())
    assert str(loaded["whole optimizer"].state_dict()) == str(optimizer.state_dict())
    assert loaded["features"][0].average == 3.0
    assert loaded["optimizer"]["loss_scaler"].loss_scale == scaler.loss_scale
    for name in ("scheduler", "args", "metrics"):
        assert loaded[name] == whole[name]


OF_APEX = {
    "normalization.fused_layer_norm": lambda: normalization.FusedLayerNorm(2),
    "parallel.sync_batchnorm": lambda: parallel.SyncBatchNorm(2),
    "optimizers.fused_adam": lambda: optimizers.FusedAdam([torch.ones(1)]),
    "parallel.LARC": lambda: parallel.LARC(torch.optim.SGD([torch.ones(1)], 0.1)),
}


@pytest.mark.parametrize("module", OF_APEX)
@pytest.mark.parametrize("root", ["", "ampatch."], ids=["apex", "ampatch"])
def test_modules_and_optimizers_of_apex_are_loaded_by_its_name_and_by_ours(module, root):
    made = OF_APEX[module]()
    written, wanted = f"c{type(made).__module__}\n".encode(), f"c{root}apex.{module}\n".encode()
    file = with_pickle(lambda data: data.replace(written, wanted), made)
    with legacy():
        assert type(torch.load(file)) is type(made)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("keeps", [False, True], ids=["bare", "watched"])
def test_a_whole_model_that_is_initialized_is_loaded(level, keeps, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watched = {"post_mortem": tmp_path} if keeps else {}  # the command `run` does so by itself
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **watched)
    x = torch.randn(3, 2)
    with amp.scale_loss(model(x).sum(), optimizer) as scaled:
        scaled.backward()
    file = saved(model)
    with legacy():
        loaded = torch.load(file)
    assert torch.equal(loaded(x), model(x))


def test_what_a_module_of_ours_only_imports_is_refused():
    named = b"campatch.steps.optimizer\nExitStack\n"
    file = with_pickle(
        lambda data: data.replace(b"ccollections\nOrderedDict\n", named), collections.OrderedDict()
    )
    assert "ampatch.steps.optimizer.ExitStack" in refused(lambda: torch.load(file))


@pytest.mark.parametrize("of", [torch.nn.functional, torch, torch.Tensor], ids=lambda of: of.__name__)
def test_a_model_may_hold_the_activations_of_torch(of):
    names = [name for name in pickles.ACTIVATIONS if hasattr(of, name)]
    with legacy():
        loaded = torch.load(saved({name: getattr(of, name) for name in names}))
    assert len(names) >= 6
    assert all(loaded[name] is getattr(of, name) or loaded[name] == getattr(of, name) for name in names)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda m: Call(os.system, "true"), "posix.system"),
        (lambda m: Call(m.function, "true"), "models_of_script.function"),
        (lambda m: m.function, "models_of_script.function"),
        (lambda m: Call(m.Runner, "true"), "a call of models_of_script.Runner"),
        (lambda m: Call(m.Popen, ["true"]), "subprocess.Popen"),
        (lambda m: Call(eval, "1"), "builtins.eval"),
        (lambda m: Call(getattr, m.Net, "forward"), "builtins.getattr"),
        (lambda m: Call(getattr, torch.Tensor.__base__, "__class__"), "builtins.getattr"),
        (lambda m: Call(getattr, torch.tanh.__reduce__()[1][0], "from_file"), "'from_file'"),
        (lambda m: torch.from_file, "'from_file'"),
        (lambda m: torch.nn.functional.layer_norm, "torch.nn.functional.layer_norm"),
        (lambda m: Call(torch.storage._load_from_bytes, b""), "torch.storage._load_from_bytes"),
        (lambda m: m.Setter, "models_of_script.Setter with its __setstate__"),
        (lambda m: m.Deleter, "models_of_script.Deleter with its __del__"),
        (lambda m: m.Maker, "models_of_script.Maker with its __new__"),
        (
            lambda m: Call(torch._tensor._rebuild_from_type_v2, m.Runner, torch.Tensor, ("true",), {}),
            "that models_of_script.Runner makes",
        ),
        (lambda m: Call(set, [m.Meter()]), "a call of builtins.set"),
        (lambda m: Call(collections.Counter, m.Meter()), "a call of collections.Counter"),
        (lambda m: {m.Meter(): 1}, "items of builtins.dict"),
        (lambda m: Call(torch.nn.Linear, 1, 1), "a call of torch.nn.modules.linear.Linear"),
        (lambda m: Call(argparse.Namespace), "a call of argparse.Namespace"),
    ],
)
def test_what_is_more_than_data_is_refused_by_its_name_and_does_not_run(make, wanted, models, request):
    value = make(models)
    file = saved([1, value])
    models.ran.clear()
    assert wanted in refused(lambda: torch.load(file))
    assert models.ran == []


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"\x80\x02cargparse\n_os.system\nX\x04\x00\x00\x00true\x85R.", "argparse._os.system"),
        (b"\x80\x04\x8c\x08argparse\x8c\x0a_os.system\x93\x8c\x04true\x85R.", "argparse._os.system"),
        (b"\x80\x02cmodels_of_script\nOuter.Inner\n)\x81.", "models_of_script.Outer.Inner"),
        (b"\x80\x02cmodels_of_script\nsystem\nX\x04\x00\x00\x00true\x85R.", "models_of_script.system"),
        (b"\x80\x02cmodels_of_script\nPopen\n)\x81.", "models_of_script.Popen"),
        (b"\x80\x02cmodels_of_script\nos\n.", "models_of_script.os"),
        (b"\x80\x02c__main__\n__file__\n.", "__main__.__file__"),
        (b"\x80\x02cthis\nd\n.", "this.d"),
        (b"\x80\x02(X\x04\x00\x00\x00trueiposix\nsystem\n.", "opcodes that run what they name"),
        (b"\x80\x02\x82\x01.", "opcodes that run what they name"),
        (b"\x80\x02cmodels_of_script\nMeter\n}X\x01\x00\x00\x00aK\x01sb.", "a state of builtins.type"),
        (b"\x80\x02cmodels_of_script\nMeter\nN}X\x01\x00\x00\x00aK\x01s\x86b.", "a state of builtins.type"),
        (
            b"\x80\x02cmodels_of_script\nMeter\n)\x81N}X\x01\x00\x00\x00aK\x01s\x86b.",
            "slots of models_of_script.Meter",
        ),
        (b"\x80\x02cmodels_of_script\nKind\n)\x81.", "an object of models_of_script.Kind"),
        (b"\x80\x02cmodels_of_script\nMeter\n)\x81K\x01a.", "items of models_of_script.Meter"),
        (b"\x80\x02X\x01\x00\x00\x00aX\x01\x00\x00\x00b\x86Q.", "a persistent 'a'"),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_that_was_made_by_hand_reaches_nothing_more(data, wanted, models):
    assert wanted in refused(lambda: torch.load(with_pickle(lambda _: data)))
    assert models.ran == []
    assert "this" not in sys.modules


def test_a_configuration_of_yacs_is_a_dict(models, monkeypatch):
    library = types.ModuleType("yacs.config")
    exec("class CfgNode(dict):\n    def __setitem__(self, key, value): raise AttributeError", vars(library))
    library.CfgNode.__module__ = "yacs.config"
    monkeypatch.setitem(sys.modules, "yacs", types.ModuleType("yacs"))
    monkeypatch.setitem(sys.modules, "yacs.config", library)
    config = library.CfgNode(rate=0.1)
    config.__dict__["frozen"] = True
    with legacy():
        loaded = torch.load(saved({"config": config, "ours": models.Meter()}))["config"]
    assert type(loaded) is library.CfgNode
    assert (loaded, loaded.frozen) == ({"rate": 0.1}, True)


def test_all_that_a_file_wants_is_told_at_once(models):
    file = saved([Call(eval, "1"), {"a": models.function}, Call(os.system, "true")])
    said = refused(lambda: torch.load(file))
    assert "builtins.eval, models_of_script.function, posix.system" in said


def test_a_class_of_a_library_in_the_folder_is_not_the_scripts(models, tmp_path):
    library = tmp_path / "env" / "site-packages"
    library.mkdir(parents=True)
    models.__file__ = str(library / "models_of_script.py")
    assert "models_of_script.Meter" in refused(lambda: torch.load(saved(models.Meter())))


@pytest.mark.parametrize(
    "state",
    [
        (1, (1000,), np.dtype("f8"), False, b"\0" * 8),
        (1, (-1,), np.dtype("f8"), False, b""),
        (1, (1,), np.dtype("O"), False, b"\0" * 8),
        (1, (1,), np.dtype([("a", "O")]), False, b"\0" * 8),
    ],
)
def test_an_array_that_does_not_fit_its_bytes_is_refused(state):
    function, args, _ = np.empty(0).__reduce__()
    with pytest.raises(pickles.RefusedError, match="numpy"):
        pickles.load(io.BytesIO(pickle.dumps(Call(function, *args, state=state), 2)))


def test_an_array_whose_memory_a_tensor_shares_is_not_filled_again():
    array = np.ones(2)
    with pytest.raises(pickles.RefusedError, match="does not fit"):
        pickles.fill_array(array, array.__reduce__()[2])


def test_a_type_of_numpy_that_lies_about_its_memory_is_refused():
    lie = Call(np.dtype, "f8", False, True, state=(3, "<", None, None, None, 800, 1, 0))
    with pytest.raises(pickles.RefusedError, match="fields or units"):
        pickles.load(io.BytesIO(pickle.dumps(lie, 2)))


def test_what_a_script_says_itself_is_obeyed(models):
    with legacy():
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            torch.load(saved(models.Meter()), weights_only=True)
        torch.load(saved(Call(models.function)), weights_only=False)
    assert models.ran == ["function"]


def test_the_environment_that_forces_weights_alone_is_obeyed(models, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with legacy(), pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(saved(models.Meter()))


def test_unsafe_load_names_each_file_and_what_it_wants(models, tmp_path, caplog):
    for name in "ab":
        torch.save(Call(models.function), tmp_path / name)
        np.save(tmp_path / name, np.array([Call(models.function)], object), allow_pickle=True)
    with legacy(unsafe_load=True):
        for name in "ab":
            torch.load(tmp_path / name)
            np.load(tmp_path / f"{name}.npy")
    assert models.ran == ["function"] * 4
    for said, name in zip(caplog.messages, ("a", "a.npy", "b", "b.npy"), strict=True):
        assert said.startswith(
            f"--unsafe-load loads {str(tmp_path / name)!r}, which wants models_of_script.function"
        )


def test_a_file_that_holds_data_needs_no_word_of_unsafe_load(models, caplog):
    with legacy(unsafe_load=True):
        torch.load(saved(models.Meter()))
    assert not any("unsafe" in said for said in caplog.messages)


def find_in(archive):
    with archive:
        assert archive["y"].tolist() == [1, 1]
        return archive["x"][0]


def arrays(folder, name, value):
    array = np.empty(1, object)
    array[0] = value
    if name == "npy":
        np.save(folder / "a.npy", array, allow_pickle=True)
        return folder / "a.npy", lambda loaded: loaded[0]
    if name == "npz":
        np.savez(folder / "a.npz", x=array, y=np.ones(2))
        return folder / "a.npz", find_in
    (folder / "a.pkl").write_bytes(pickle.dumps(value))
    return folder / "a.pkl", lambda loaded: loaded


@pytest.mark.parametrize("name", ["npy", "npz", "pkl"])
@pytest.mark.parametrize("is_path", [True, False])
def test_numpy_loads_objects_that_are_data_and_refuses_others(name, is_path, models, tmp_path):
    path, find = arrays(tmp_path, name, {"boxes": np.ones((2, 4)), "meter": models.Meter()})
    with legacy():
        loaded = find(np.load(path if is_path else io.BytesIO(path.read_bytes())))
    assert loaded["boxes"].tolist() == [[1.0] * 4] * 2
    assert loaded["meter"].average == 3.0
    path, find = arrays(tmp_path, name, Call(models.function))
    assert "models_of_script.function" in refused(lambda: find(np.load(path)))
    assert models.ran == []
    with legacy(), pytest.raises(ValueError, match="allow_pickle"):
        find(np.load(path, allow_pickle=False))


def test_a_library_that_loads_is_treated_as_the_script(models):
    names = {"torch": torch}
    library = importlib.util.find_spec("numpy").origin
    exec(compile("def load(file): return torch.load(file)", library, "exec"), names)
    assert "models_of_script.function" in refused(lambda: names["load"](saved(Call(models.function))))
