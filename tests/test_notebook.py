"""In a notebook: scripts run twice, cells are interrupted, modules reloaded, results shown."""

import textwrap

import pytest

pytestmark = pytest.mark.process
SHELL = """
import os, sys
os.environ["IPYTHONDIR"] = os.path.abspath("profile")
from IPython.core.interactiveshell import InteractiveShell
shell, raised = InteractiveShell.instance(colors="nocolor"), []
shell.showtraceback = lambda *args, **kwargs: raised.append(sys.exc_info()[1])
def cell(code):
    "Runs code; returns what it raised."
    raised.clear()
    shell.run_cell(code)
    return raised[0] if raised else None
def value(code):
    return shell.ev(code)
"""


@pytest.fixture
def notebook(processes, tmp_path):
    """Runs code in a process of its own, which has a shell of IPython; returns what it printed, by line."""

    def run(code, **files):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        first = "import IPython.core.interactiveshell"
        done = processes.run(SHELL + textwrap.dedent(code), tmp_path, first)
        assert done.status == 0, done.stderr
        return done.stdout.splitlines()

    return run


INTERRUPTED = """
import signal
import torch
from torch import nn
from torch.nn import functional as F
import ampatch as amp

stop = None

def reach(place):
    global stop
    if stop == place:
        stop = None
        signal.raise_signal(signal.SIGINT)

class Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        reach("backward")
        return grad

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        x = Place.apply(self.first(x))
        reach("forward")
        return self.last(x.relu())

def start(level):
    global model, optimizer, x, y, losses
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, losses = torch.randn(32, 8), []
    y = x[:, :3].argmax(1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, diagnose=level == "O4")
    optimizer.register_step_pre_hook(lambda *_: reach("step"))

def train(steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float(), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            reach("block")
            scaled_loss.backward()
            reach("end of block")
        reach("between")
        optimizer.step()
        losses.append(loss.item())
"""


@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
def test_a_cell_that_is_interrupted_goes_on_where_it_was(notebook, level):
    code = f"""
    cell("from net import *; import net, torch.nn.functional as F; linear = F.linear; import ampatch")
    def follow(*places):
        cell("net.start({level!r})")
        cell("net.train()")
        for place in places:
            cell(f"net.stop = {{place!r}}")
            assert isinstance(cell("net.train(1)"), KeyboardInterrupt), place
        assert cell("net.train()") is None
        found = value("net.losses"), value("net.model.last.bias").tolist()
        assert cell("ampatch.uninitialize()") is None
        assert value("F.linear is linear and ampatch.observers() == ()")
        return found
    expected = follow()
    for place in ("forward", "backward", "block", "end of block", "between", "step"):
        assert follow(place) == expected, place
        assert follow(place, place) == expected, place
    print("done")
    """
    assert notebook(code, net=INTERRUPTED)[-1] == "done"


MODULE = """
import ampatch as amp
from torch import nn
from torch.nn.functional import linear

@amp.float_function
def precise(x):
    return x * VERSION

class Net(nn.Linear):
    def forward(self, x):
        return linear(x, self.weight) * VERSION
"""


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_module_that_autoreload_reloads_keeps_its_casts(notebook, level):
    code = f"""
    text = open("net.py").read()
    def write(version):
        open("net.py", "w").write(text.replace("VERSION", str(version)))
        os.utime("net.py", (version * 10**9,) * 2)
    write(1)
    for line in ("%load_ext autoreload", "%autoreload 2", "import torch, net, ampatch as amp"):
        assert cell(line) is None
    cell("x, original = torch.ones(2, 2), net.linear; torch.manual_seed(0); model = net.Net(2, 2)")
    cell("amp.initialize(model, opt_level={level!r}, verbosity=0)")
    cell("before = model(x), net.precise(x.half())")
    write(2)
    cell("after = model(x), net.precise(x.half())")
    assert [it.dtype for it in value("after")] == [it.dtype for it in value("before")]
    assert value("torch.equal(after[0], 2 * before[0]) and torch.equal(after[1], 2 * before[1])")
    cell("amp.uninitialize()")
    assert value("net.linear is original and torch.nn.functional.linear is original")
    write(3)
    assert value("model(x).dtype is net.precise(x).dtype is torch.float32")
    print("done")
    """
    assert notebook(code, net=MODULE)[-1] == "done"
