"""What holds for every test: it leaves torch as it found it, and no session behind."""

import importlib
import types

import hypothesis
import pytest
import torch

# These change vars(torch) when they are first imported (torch.manual_seed among it), so they come
# before any snapshot.
import torch._dynamo
import torch._inductor
import torch.onnx

import ampatch as amp

# torch.optim deletes the name of its own submodule.
optimizer_module = importlib.import_module("torch.optim.optimizer")

# A run is repeated by the next one, and a slow machine is no failure.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")

# The tensors of tests are tiny. On busy cores the threads that share one wait 10 ms for each other.
torch.set_num_threads(1)

NAMESPACES = (
    torch,
    torch.Tensor,
    torch._VF,
    torch.functional,
    torch.fft,
    torch.linalg,
    torch.special,
    torch.nn,
    torch.nn.functional,
    torch.nn.init,
    torch.nn.Module,
    torch.nn.Parameter,
    torch.nn.modules.module,
    torch.nn.modules.rnn,
    torch.nn.utils,
    torch.autograd,
    torch.optim,
    torch.optim.Optimizer,
    optimizer_module,
    torch.optim.lr_scheduler,
)
HOOK_TABLES = (
    optimizer_module._global_optimizer_pre_hooks,
    optimizer_module._global_optimizer_post_hooks,
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks,
)


# Tiny tensors: threads would only wait for each other, and for long where the cores are busy.
torch.set_num_threads(1)


def read(namespace):
    # Python notes there which warnings a module has shown, and how to copy instances of a class.
    own = ("__warningregistry__", "__slotnames__")
    return {name: value for name, value in vars(namespace).items() if name not in own}


def take_snapshot():
    return [read(namespace) for namespace in NAMESPACES], [list(table.items()) for table in HOOK_TABLES]


def list_differences(before, after):
    """Names of what is not the same object any more; the import of a submodule is no difference."""
    found = []
    for namespace, old, new in zip(NAMESPACES, before[0], after[0], strict=True):
        owner = getattr(namespace, "__name__", repr(namespace))
        for name in old.keys() | new.keys():
            if name in old and name in new and old[name] is new[name]:
                continue
            if name not in old and isinstance(new[name], types.ModuleType):
                continue
            found.append(f"{owner}.{name}")
    return sorted(found) + [
        f"hooks: {new}" for old, new in zip(before[1], after[1], strict=True) if old != new
    ]


@pytest.fixture(autouse=True)
def torch_as_it_was():
    """Compares torch's namespaces with what they were before the test, by identity."""
    before = take_snapshot()

    def check():
        assert list_differences(before, take_snapshot()) == [], "the test left torch changed"

    yield check
    check()


@pytest.fixture
def check_torch(torch_as_it_was):
    """A function that fails if torch is changed now, before anything is undone."""
    return torch_as_it_was


@pytest.fixture(autouse=True)
def no_session_left(torch_as_it_was):
    """Closes what the test opened, so that one failure does not cause others."""
    yield
    amp.uninitialize()


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    """Skips tests marked `cuda` where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(
                pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is False")
            )
