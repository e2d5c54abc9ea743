"""What scripts of earlier years say that breaks today: `ampatch check` finds it, `run --legacy` mends it."""

import argparse
import collections
import importlib.machinery
import sys
import textwrap
import time

import numpy as np
import pytest
import torch

from ampatch.__main__ import main
from ampatch.apex.check import check_file
from ampatch.apex.legacy import functions
from ampatch.apex.legacy.mending import legacy

# A script of 2019, with many of its things at once. Each line breaks today.
OLD = """
import argparse, collections, time
import numpy as np
import torch
from torch._six import container_abcs, inf, string_classes
from torch.optim import lr_scheduler
from helper import to_gpu

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
start = time.clock()
model = torch.nn.Linear(4, 2).cuda()
y = torch.ones(1).cuda(async=True)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, verbose=True)
x = to_gpu(torch.ones(6, 4))
loss = model(x).sum()
loss.backward()
optimizer.step()
scheduler.step(loss.data[0])
assert isinstance(loss.data[0], float)
print(args.local_rank, (1 - (x > 0)).sum().item(), x.masked_fill((x > 0).byte(), 3).sum().item())
print(np.float(3), np.product([2, 3]), np.fromstring(b"ab", dtype=np.uint8).tolist())
print(isinstance([], collections.Sequence), isinstance("", string_classes), inf)
print(iter(torch.utils.data.DataLoader([5])).next().item())
values, vectors = torch.symeig(2 * torch.eye(2), eigenvectors=True)
solution, _ = torch.gesv(torch.ones(2, 1), 2 * torch.eye(2))
print(values.tolist(), solution.view(-1).tolist())
correct = torch.ones(5, 4).topk(3, 1)[1].t().eq(0)
print(correct[:2].view(-1).shape[0])
torch.save(model, "model.pt")
print(type(torch.load("model.pt", map_location=lambda s, l: s.cuda())).__name__)
"""
SAID = """2 0 72.0
3.0 6 [97, 98]
True True inf
5
[2.0, 2.0] [0.5, 0.5]
10
Linear
"""
SCHEDULER = "from torch.optim.lr_scheduler import StepLR\ns = StepLR(o, 1)\nfor epoch in epochs:\n"


@pytest.fixture
def find(tmp_path):
    """Returns what a text holds, as (name, status, lines)."""

    def find_in(text):
        (tmp_path / "train.py").write_text(textwrap.dedent(text))
        findings = check_file(tmp_path / "train.py").findings
        return [(finding.row.name, finding.row.status, finding.lines) for finding in findings]

    return find_in


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from torch._six import inf", "torch._six"),
        ("import collections as c\nc.Mapping", "collections.Mapping"),
        ("import numpy as np\nx = np.zeros(3, dtype=np.int)", "numpy.int"),
        ("import torch\ntorch.symeig(x)", "torch.symeig"),
        ("x.to(device, async=True)", "async="),
        ("total += loss.data[0]", "loss.data[0]"),
        ("it = iter(loader)\nit.next()", "iterator.next()"),
        ("x.masked_fill_(mask.byte(), 0)", "masked_fill(x.byte(), ...)"),
        ("p.add_argument('--local_rank', type=int)", "--local_rank"),
        ("from torch import fft\nfft(x, 1)", "torch.fft(...)"),
        ("import torch\ntorch.stft(x, 9)", "torch.stft(...)"),
        ("loss.backward(retain_variables=True)", "retain_variables="),
        (
            "from torch.autograd import Function\nclass F(Function):\n    def forward(self, x): return x",
            "a Function without @staticmethod",
        ),
        ("import yaml\nyaml.load(open('x'))", "yaml.load(file)"),
        ("from PIL import Image\nImage.ANTIALIAS", "PIL.Image.ANTIALIAS"),
        ("from sklearn.externals import joblib", "sklearn.externals.joblib"),
        ("import numpy\nnumpy.fromstring(data, numpy.uint8)", "numpy.fromstring(bytes)"),
    ],
)
def test_what_breaks_is_found_with_its_line(find, text, name):
    last = text.count("\n") + 1
    assert [(found, status) for found, status, lines in find(text) if max(lines) in (last, 2)] == [
        (name, "BREAKS")
    ]


@pytest.mark.parametrize(
    ("text", "name", "status"),
    [
        ("import torch\ntorch.load('x')", "torch.load(...)", "may break"),
        ("correct[:k].view(-1)", "correct[:k].view(-1)", "may break"),
        ("mask = x.eq(0)\n1 - mask", "1 - mask", "may break"),
        ("Variable(x, volatile=True)", "volatile=", "warns"),
        ("import torch\ntorch.cuda.amp.GradScaler()", "torch.cuda.amp.GradScaler", "warns"),
        (
            f"{SCHEDULER}    s.step()\n    o.step()",
            "scheduler.step() before training",
            "warns",
        ),
        ("model.cuda()", "CUDA", "needs CUDA"),
        ("x.to('cuda:1')", "CUDA", "needs CUDA"),
        ("import torch.distributed as d\nd.init_process_group(backend='nccl')", "CUDA", "needs CUDA"),
    ],
)
def test_what_only_may_break_is_told_apart(find, text, name, status):
    assert [found[:2] for found in find(text)] == [(name, status)]


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    from torch._six import inf\nexcept ImportError:\n    from math import inf",
        "import torch\nif torch.cuda.is_available():\n    model.cuda()",
        "import torch\nd = torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "import torch\ntorch.load('x', weights_only=True)",
        "self.data[0]",
        "def next(self): pass\nprefetcher.next()",
        "import time\ntime.perf_counter()",
        "import numpy as np\nnp.float64, np.bool_",
        f"{SCHEDULER}    o.step()\n    s.step()",
        "for a in self.args: f(*a)",
    ],
)
def test_what_runs_today_is_not_listed(find, text):
    assert find(text) == []


@pytest.mark.parametrize(("text", "status"), [("import time\ntime.clock()", 1), ("model.cuda()", 0)])
def test_the_exit_status_is_1_for_what_breaks_and_0_for_what_needs_cuda(text, status, tmp_path, capsys):
    (tmp_path / "train.py").write_text(text)
    assert main(["check", str(tmp_path / "train.py")]) == status
    said = capsys.readouterr().out
    remedy = (
        "use time.perf_counter; `ampatch run --legacy` mends it" if status else "`ampatch run --device cpu`"
    )
    assert remedy in said


def places():
    kinds = [torch, np, collections, time, argparse._ActionsContainer, torch.optim.lr_scheduler.StepLR]
    return [*kinds, importlib.machinery.SourceFileLoader, torch.utils.data.dataloader._BaseDataLoaderIter]


def test_all_is_what_it_was_afterwards():
    before = [dict(vars(place)) for place in places()]
    with legacy():
        assert np.float is float
        assert time.clock is time.perf_counter
    assert [dict(vars(place)) for place in places()] == before
    assert "torch._six" not in sys.modules


def test_old_functions_compute_what_they_did():
    x = torch.randn(2, 6, dtype=torch.float64)
    whole = torch.view_as_complex(functions.rfft(x, 1))
    assert np.allclose(whole.numpy(), np.fft.rfft(x.numpy()))
    assert torch.allclose(functions.irfft(functions.rfft(x, 2, True), 2, True, signal_sizes=(2, 6)), x)
    assert torch.allclose(functions.irfft(functions.rfft(x, 1, onesided=False), 1, onesided=False), x)
    square = x[:, :2] + 2 * torch.eye(2)
    solution, _ = functions.solve(x, square)
    assert torch.allclose(square @ solution, x)
    symmetric = square + square.T
    values, vectors = functions.symeig(symmetric, eigenvectors=True)
    assert np.allclose(values.numpy(), np.linalg.eigvalsh(symmetric.numpy()))
    assert torch.allclose(symmetric @ vectors, vectors * values)
    assert functions.symeig(symmetric)[1].numel() == 0
    assert functions.in1d([[1, 2], [3, 4]], [2, 3]).tolist() == [False, True, True, False]
    assert functions.getargspec(lambda a, b=2: a).defaults == (2,)


@pytest.mark.process
def test_a_script_of_2019_runs_as_it_is(processes, tmp_path):
    (tmp_path / "train.py").write_text(OLD)
    (tmp_path / "helper.py").write_text("def to_gpu(x):\n    return x.cuda(async=True)\n")
    command = ["run", "--legacy", "--device", "cpu", "train.py", "--local-rank=2"]
    done = processes.run(f"sys.exit(ampatch.__main__.main({command!r}))", tmp_path)
    assert (done.status, done.stdout) == (0, SAID), done.stderr
    assert "model.pt holds more than tensors" in done.stderr
    assert not (tmp_path / "__pycache__").exists(), "plain python must not find what was mended"


@pytest.mark.process
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
@pytest.mark.parametrize(
    "call",
    [
        "torch.ones(1).to(0)",
        "torch.cuda.FloatTensor([1.0])",
        "torch.ones(1).type(torch.cuda.FloatTensor)",
        "torch.cuda.set_device(0)",
        "torch.cuda.Stream()",
        "torch.cuda.Event()",
        'torch.Generator("cuda")',
        'torch.distributed.init_process_group("nccl", "tcp://localhost:0", world_size=1, rank=0)',
    ],
)
def test_each_error_of_a_machine_without_cuda_names_the_option(processes, tmp_path, call):
    (tmp_path / "train.py").write_text(f"import torch\n{call}")
    done = processes.run("sys.exit(ampatch.__main__.main(['run', 'train.py']))", tmp_path)
    assert done.status == 1
    assert done.stderr.splitlines()[-1] == "`ampatch run --device cpu` runs this script on the CPU"
