"""What holds for every test: it leaves torch as it found it, and no session behind."""

import functools
import gc
import os
import re
import signal
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
import torch.distributed as dist

import ampatch as amp
from ampatch.patching import bound_names
from ampatch.session.session import SESSION
from ampatch.testing import TorchSnapshot
from helpers import import_float8

sys.path.append(str(Path(__file__).parents[1]))  # the benchmarks are run from a clone, and are not installed

pytest_plugins = ["ampatch.testing.plugin", "cuda_graphs"]

# A run is repeated by the next one, and a slow machine is no failure.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")

# What tests leave is small, and those that ask what is dropped collect it themselves.
gc.set_threshold(100_000, 50, 50)

# The tensors of tests are tiny. On busy cores the threads that share one wait 10 ms for each other, in the
# processes that tests start as well.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests break losses all the time; those of post-mortems name a folder.
os.environ.setdefault("AMPATCH_POST_MORTEM", "0")

# The default, said aloud: torch warns at the first sparse tensor of a process that leaves it unsaid.
torch.sparse.check_sparse_tensor_invariants.disable()

# What a shell starts in the background ignores Ctrl-C, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def past_is_out_of_sight():
    """Takes what is there by now out of the garbage collector's sight: torch alone has a million objects.

    Before each file, since what compiles leaves as many: a collection that goes through all takes 60 ms.
    """
    TorchSnapshot.take()  # which imports more of torch the first time
    gc.collect()
    gc.freeze()


@pytest.fixture
def emulated(request, monkeypatch):
    """Emulates float8, for which there is no arithmetic on a CPU; skips O6 where torchao is not."""
    if "O6" in getattr(request.node, "callspec", request).__dict__.get("params", {}).values():
        import_float8()
    monkeypatch.setenv("AMPATCH_FLOAT8_EMULATE", "1")


def installed_packages():
    """The names of the installed packages that are loaded."""
    files = ((name, str(getattr(module, "__file__", None))) for name, module in sys.modules.items())
    return {name.partition(".")[0] for name, file in files if "site-packages" in file}


@pytest.fixture(autouse=True, scope="module")
def other_tests_are_not_loaded(request):
    """Hides the other files of tests, since a session looks for bound functions in all that is loaded.

    Of the packages that they have loaded, and of torch.distributions, it sees what this file names: to
    look into all of them, from scipy to transformers, takes longer than most tests.
    """
    others = {name for name in sys.modules if name.startswith("test_")} - {request.module.__name__}
    words = set(re.findall(r"\w+", Path(request.module.__file__).read_text()))
    with pytest.MonkeyPatch.context() as patch:
        for name in others:
            patch.delitem(sys.modules, name)
        foreign = installed_packages() - words
        patch.setattr(bound_names, "_LEFT_ALONE", bound_names._LEFT_ALONE | foreign)
        if "distributions" not in words:
            patch.setattr(bound_names, "_SEARCHED_IN_TORCH", "nothing.")
        yield


@pytest.fixture(scope="module")
def snapshots():
    """Torch as a file's tests find it; the last one counts, taken after a test that left torch changed."""
    return [TorchSnapshot.take()]


@pytest.fixture(autouse=True)
def torch_as_it_was(snapshots):
    """Compares torch's namespaces with what they were before the test, by identity."""
    check = snapshots[-1].check
    yield check
    try:
        check()
    except AssertionError:
        snapshots.append(TorchSnapshot.take())
        raise


@pytest.fixture
def check_torch(torch_as_it_was):
    """A function that fails if torch is changed now, before anything is undone."""
    return torch_as_it_was


@pytest.fixture(autouse=True)
def main_as_it_was(torch_as_it_was, monkeypatch):
    """Puts back `__main__`, which a script that a test ran stays: a spawned process imports it once more."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


@pytest.fixture(autouse=True)
def no_session_left(torch_as_it_was, monkeypatch):
    """Closes what the test opened and forgets what it registered, so that none depends on another."""
    registered = dict(SESSION.torch_patch._registrations)
    monkeypatch.setattr(SESSION.torch_patch, "_registrations", registered)
    yield
    amp.uninitialize()


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Beside a GPU's, torch.manual_seed seeds what is not there: it notes a traceback for later, in 0.7 ms.
SEED = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def fixed_seed():
    SEED(0)


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", help="run every case of what is marked process or exhaustive"
    )


def pytest_configure(config):
    """Has xdist hand out files in the order of collection: else it starts with those of the most tests."""
    config.option.loadscopereorder = False


def is_whole(config):
    """Whether the long tests run as well: with `--all`, and when tests are chosen by `-k`, `-m` or name."""
    chosen = config.option.keyword or config.option.markexpr or any("::" in arg for arg in config.args)
    return config.option.all or bool(chosen)


def pytest_ignore_collect(collection_path):
    """Leaves helpers to those that import them: doctest would, to look for examples."""
    is_helper = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return is_helper or None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collects tests without the garbage collector: all of it stays, and is a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_report_header(config):
    return (
        None if is_whole(config) else "the short suite: --all also runs what is marked process or exhaustive"
    )


def find_long(items):
    """Yields what the short suite leaves out: all cases of a marked test but `keep`, evenly spread."""
    tests = {}
    for item in items:
        mark = item.get_closest_marker("process") or item.get_closest_marker("exhaustive")
        if mark:
            tests.setdefault(item.nodeid.partition("[")[0], (mark, []))[1].append(item)
    for mark, cases in tests.values():
        keep = mark.kwargs.get("keep", int(mark.name == "exhaustive"))
        kept = {int((index + 0.5) * len(cases) / keep) for index in range(keep)}
        yield from (case for index, case in enumerate(cases) if index not in kept)


def pytest_collection_modifyitems(config, items):
    """Leaves out the long tests unless asked for, and skips those marked `cuda` where there is no GPU.

    Files that start processes come first: what takes minutes must not be what one process does at the end.
    """
    if not is_whole(config):
        left_out = set(find_long(items))
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    slow = {item.path for item in items if item.get_closest_marker("process")}
    items.sort(key=lambda item: item.path not in slow)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(
                pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is False")
            )


@pytest.fixture
def without_gpu(monkeypatch):
    """Hides a GPU that there may be."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def doctor_in_forks(monkeypatch):
    """Has the doctor run scripts in forks of this process, which has torch already."""
    from ampatch.doctor.campaign import Campaign
    from faults import fork_child

    monkeypatch.setattr(Campaign, "__init__", functools.partialmethod(Campaign.__init__, launch=fork_child))


@pytest.fixture(scope="session")
def processes():
    """Fresh processes that have torch already."""
    from fresh import fresh_processes

    with fresh_processes() as started:
        yield started
