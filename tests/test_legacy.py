"""What scripts of earlier years say that breaks today: `ampatch check` finds it, `run --legacy` fixes it."""

import argparse
import collections
import dataclasses
import importlib.machinery
import importlib.util
import linecache
import os
import random
import re
import sys
import textwrap
import time
import types
import warnings
from importlib import metadata

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import ampatch as amp
from ampatch.__main__ import main
from ampatch.apex.changes import ProgramChanges
from ampatch.apex.checking import check_file
from ampatch.apex.legacy import open_legacy as legacy
from ampatch.apex.legacy import patterns, removed, rows
from ampatch.apex.legacy.names import Places
from ampatch.apex.legacy.patterns import find_cause
from ampatch.apex.legacy.rows import BREAKS, CLAMP, MASK, NAMES, PATTERNS
from ampatch.apex.on_cpu import on_cpu
from ampatch.apex.script import compile_source

# Of each way in which something is mended one thing: names and modules, the source, tensors, options, CUDA.
OLD = """
import argparse
import numpy as np
import torch
from torch._six import container_abcs, inf, string_classes
from helper import to_gpu

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
x = to_gpu(torch.ones(6, 4))
print(parser.parse_args().local_rank, (1 - (x > 0)).sum().item(), np.float(inf))
print(isinstance([], container_abcs.Sequence), isinstance("", string_classes))
torch.save(torch.nn.Linear(4, 2).cuda(), "model.pt")
print(type(torch.load("model.pt", map_location=lambda s, l: s.cuda())).__name__)
"""
SAID = "2 0 inf\nTrue True\nLinear\n"
SCHEDULER = """import torch
from torch.optim.lr_scheduler import StepLR
optimizer = torch.optim.SGD([torch.ones(1)], 1)
scheduler = StepLR(optimizer, 1"""
HERE = "  # here"
# What a row of the table is about, where importing its name says it not.
SNIPPETS = {
    "torch._six": "from torch._six import inf",
    "torch.gesv": "import torch\ntorch.gesv(torch.eye(2), torch.eye(2))",
    "torch.rfft": "import torch\ntorch.rfft(torch.ones(2, 2), 1)",
    "torch.irfft": "import torch\ntorch.irfft(torch.ones(2, 2), 1)",
    "torch.symeig": "import torch\ntorch.symeig(torch.eye(2))",
    "torch.eig": "import torch\ntorch.eig(torch.eye(2))",
    "torch.solve": "import torch\ntorch.solve(torch.eye(2), torch.eye(2))",
    "torch.lstsq": "import torch\ntorch.lstsq(torch.eye(2), torch.eye(2))",
    "torch.qr": "import torch\nq, r = torch.qr(torch.eye(2).qr()[0], some=False)",
    "torch.cholesky": "import torch\ntorch.cholesky(4 * torch.eye(2).cholesky(), True)",
    "cgi": "from cgi import escape",
    "torch.matrix_rank": "import torch\nassert torch.matrix_rank(torch.eye(2)) == 2",
    "torch.distributed.launch": (
        "import torch.distributed\nimport importlib\n"
        "try: importlib.import_module('torch.distributed.launch').main([])  # here\nexcept SystemExit: pass"
    ),
    "torch.cuda.amp.GradScaler": "import torch\ntorch.cuda.amp.GradScaler()",
    "torch.cuda.amp.autocast": "import torch\nwith torch.cuda.amp.autocast(): pass",
    "async=": "import torch\ntorch.ones(1).to('cpu', async=True)",
    "loss.data[0]": "import torch\nloss = torch.ones(3).sum()\nassert loss.data[0] == 3",
    "iterator.next()": (
        "from torch.utils.data import DataLoader\nbatches = iter(DataLoader([5]))\nbatches.next()"
    ),
    "correct[:k].view(-1)": (
        "import torch\ncorrect = torch.ones(5, 4).t().eq(0)\ncorrect[:2].view(-1).float()"
    ),
    "-mask": "import torch\nmask = torch.ones(3) > 2\n-mask",
    "numpy.ndarray.tostring": "import numpy as np\nassert np.ones(3).tostring() == np.ones(3).tobytes()",
    "numpy.ndarray.ptp": "import numpy as np\nassert np.eye(2, 3).ptp(axis=1).tolist() == [1, 1]",
    "numpy.ndarray.itemset": "import numpy as np\nnp.ones((2, 2)).itemset((0, 1), 5)",
    "numpy.ndarray.newbyteorder": "import numpy\nassert numpy.ones(1, '>i4').newbyteorder()[0] == 2**24",
    "numpy.array(rows of several lengths)": (
        "import numpy as np\nassert [*map(len, np.array([[1, 2], [3]]))] == [2, 1]"
    ),
    "numpy.array(copy=False)": "import numpy as np\nassert np.array([1], copy=False).tolist() == [1]",
    "numpy.load(...)": (
        "import io\nimport numpy as np\nfile = io.BytesIO()\nnp.save(file, np.array({'a': 1}, object))\n"
        "file.seek(0)\nassert np.load(file).item() == {'a': 1}"
    ),
    "PIL.ImageDraw.ImageDraw.textsize": (
        "from PIL import Image, ImageDraw\nImageDraw.Draw(Image.new('L', (9, 9))).textsize('a')"
    ),
    "PIL.ImageFont.FreeTypeFont.getsize": (
        "from PIL import ImageFont\nImageFont.load_default(10).getsize('a')"
    ),
    "matplotlib.backends.backend_agg.FigureCanvasAgg.tostring_rgb": (
        "from matplotlib.backends.backend_agg import FigureCanvasAgg\nfrom matplotlib.figure import Figure\n"
        "canvas = FigureCanvasAgg(Figure((1, 1), 20))\ncanvas.draw()\n"
        "assert canvas.tostring_rgb() == bytes([255]) * 1200"
    ),
    'prop_cycle.by_key()["color"]': (
        "from matplotlib import pyplot\ncycle = pyplot.rcParams['axes.prop_cycle']\n"
        "assert int(cycle.by_key()['color'][0][1:], 16) == 0x1F77B4"
    ),
    "threading.Thread.isAlive": "import threading\nthreading.Thread().isAlive()",
    "torch.ifft": "import torch\ntorch.ifft(torch.ones(2, 2), 1)",
    "librosa.filters.mel(sr, n_fft)": "import librosa\nlibrosa.filters.mel(16000, 512)",
    "random.sample(set(...), k)": "import random\nids = set(range(9))\nrandom.sample(ids, 3)",
    "1 - mask": "import torch\nmask = torch.ones(3) > 2\nassert (1 - mask).sum() == 3",
    "~x.byte()": "import torch\nx = torch.tensor([1, 0])\nassert (~x.byte()).tolist() == [0, 1]",
    "masked_fill(x.byte(), ...)": "import torch\nx = torch.ones(3)\nx.masked_fill((x > 0).byte(), 2)",
    "torch.load(...)": (
        "import io, torch\nfile = io.BytesIO()\ntorch.save(torch.nn.Linear(1, 1), file)\n"
        "file.seek(0)\ntorch.load(file)"
    ),
    "numpy.fromstring(bytes)": (
        "import numpy as np\nassert np.fromstring(b'ab', dtype=np.uint8).tolist() == [97, 98]"
    ),
    "numpy.histogram(normed=)": (
        "import numpy as np\nassert np.histogram([1, 2, 2], 2, normed=True)[0].sum() == 2"
    ),
    "json.load(encoding=)": (
        "import io, json\nassert json.load(io.StringIO('[1]'), encoding='utf-8') == [1]"
    ),
    "make_grid(range=)": (
        "import torch\nfrom torchvision.utils import make_grid\n"
        "assert make_grid(torch.ones(1, 3, 2, 2), normalize=True, range=(-1, 3)).mean() == 0.5"
    ),
    "rotate(resample=, fillcolor=)": (
        "from torchvision import transforms\nassert transforms.RandomAffine(0, fillcolor=7).fill == 7"
    ),
    "config.pretrained_config_archive_map": (
        "class Config: pass\nnames = Config.pretrained_config_archive_map.keys()"
    ),
    "an Optimizer without super().__init__": (
        "from torch.optim import SGD, Optimizer\nimport torch\nclass Around(Optimizer):  # here\n"
        "    def __init__(self, inner): self.param_groups, self.state = inner.param_groups, inner.state\n"
        "optimizer = Around(SGD([torch.ones(1)], 1))\noptimizer.zero_grad()\noptimizer.state_dict()"
    ),
    "lr_scheduler(verbose=)": f"{SCHEDULER}, verbose=True)",
    "Adam(betas=(0, 0.9))": "import torch\ntorch.optim.AdamW([torch.ones(1)], 1e-3, betas=(0, 0.9))",
    "Sampler.__init__(data)": (
        "from torch.utils.data.sampler import Sampler\nclass Balanced(Sampler):\n"
        "    def __init__(self, data):\n        super(Balanced, self).__init__(data)  # here\nBalanced([1])"
    ),
    "type(x) == Variable": (
        "import torch\nfrom torch.autograd import Variable\nassert type(Variable(torch.ones(1))) == Variable"
    ),
    "q *= n of x.chunk(k)": (
        "import torch\nx = torch.ones(4, requires_grad=True)\nq, k = (x + 0).chunk(2)\nq *= 2  # here\n"
        "(q.sum() + k.sum()).backward()\nassert x.grad.tolist() == [2, 2, 1, 1]"
    ),
    "out[:, 0::2] = value": (
        "import torch\nout = torch.nn.Embedding(2, 2).weight\nout[:, 0] = torch.ones(2)  # here\n"
        "out.detach_()\nassert out[:, 0].tolist() == [1, 1] and not out.requires_grad"
    ),
    "torch.full(size, 1)": (
        "import torch\nreal = 1\nlabel = torch.full((2,), real)  # here\n"
        "torch.nn.BCEWithLogitsLoss()(torch.ones(2), label)"
    ),
    "ids.clamp_(0, size)": (
        "import torch\nids, size = torch.tensor([1.5, 5]).long(), torch.tensor(3.0)\nids.clamp_(0, size - 1)"
    ),
    "ids / n": "import torch\nids = torch.tensor([2])\ntorch.ones(3)[ids / 2]",
    "--local_rank": (
        "import argparse, sys\nsys.argv[1:] = ['--local-rank=2']\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--local_rank', type=int)  # here\nparser.parse_args()"
    ),
    "MASTER_PORT=80000": (  # of 65536, 16 bits say any port that is free
        "import os, torch.distributed as dist\nos.environ['MASTER_ADDR'] = 'localhost'\n"
        "os.environ['MASTER_PORT'] = '65536'  # here\n"
        "dist.init_process_group('gloo', rank=0, world_size=1)\ndist.destroy_process_group()"
    ),
    "torch.fft(...)": "from torch import fft, ones\nfft(ones(2, 2), 1)",
    "torch.stft(...)": "import torch\ntorch.stft(torch.ones(16), 4, window=torch.ones(4))",
    "torch.onnx.export(...)": (
        "import torch\ntorch.onnx.export(torch.nn.Linear(1, 1), torch.ones(1), 'model.onnx')"
    ),
    "retain_variables=": (
        "import torch\nloss = torch.ones(1, requires_grad=True).sum()\nloss.backward(retain_variables=True)"
    ),
    "a Function without @staticmethod": (
        "import torch\nclass F(torch.autograd.Function):  # here\n"
        "    def forward(self, x): return x\nF()(torch.ones(1))"
    ),
    "yaml.load(file)": "import yaml\nyaml.load('a: 1')",
    "volatile=": "import torch\ntorch.autograd.Variable(torch.ones(1), volatile=True)",
    "scheduler.step() before training": (
        f"{SCHEDULER})\nfor epoch in range(2):  # here\n    scheduler.step()\n    optimizer.step()"
    ),
    "pretrained=": "from torchvision.models import resnet18\nresnet18(pretrained=False)",
    "CUDA": "import torch\ntorch.nn.Linear(1, 1).cuda()",
}


@pytest.fixture
def find(tmp_path):
    """Returns what a text holds, as (name, status, lines)."""

    def find_in(text):
        (tmp_path / "train.py").write_text(textwrap.dedent(text))
        findings = check_file(tmp_path / "train.py").findings
        return [(finding.row.name, finding.row.status, finding.lines) for finding in findings]

    return find_in


def snippet(row):
    """Returns lines that say what a row is about, the last of them or the one with the mark."""
    place, _, name = row.name.rpartition(".")
    return SNIPPETS.get(row.name, f"from {place} import {name}" if place else f"import {name}")


def is_due(row):
    """Whether what is installed is of the versions that a row is about."""
    if row.name == "CUDA":
        return not torch.cuda.is_available()
    brings = {"distutils": "setuptools", "torch.onnx.export(...)": "onnxscript"}
    if importlib.util.find_spec(brings.get(row.name, "no_such")):
        return False  # as that brings it back
    if row.since.startswith("torchvision ") or row.name.startswith("transformers.models."):
        pytest.importorskip("torchvision", exc_type=Exception, reason="it is built for another torch")
    package, first, *last = re.findall(r"[\d.]+|[A-Za-z-]+(?= [\d])", row.since.replace("until ", ""))
    if package == "Python":
        return sys.version_info >= version(first)
    if row.name == "torch.onnx.export(...)" and version(torch.__version__) < version(first):
        pytest.importorskip("onnx", reason="an older torch exports with it")
    try:
        return version(first) <= version(metadata.version(package)) < version(*last or ["999"])
    except metadata.PackageNotFoundError:
        pytest.skip(f"there is no {package} here")


def version(text):
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


@pytest.fixture
def die(tmp_path, monkeypatch):
    """Returns what a script of a row's lines dies of, or what it warns of if the row says that."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])

    def run_snippet(row):
        source = snippet(row)
        (tmp_path / "train.py").write_text(source)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                exec(compile_source(source.encode(), "train.py"), {"__name__": "train"})
            except (Exception, SystemExit) as error:
                return error.with_traceback(error.__traceback__.tb_next)  # of the script, not of this file
        return said[0] if said and row.status == "warns" else None

    return run_snippet


def test_every_pattern_is_one_that_check_shows():
    assert {row for row in vars(rows).values() if isinstance(row, rows.Old)} <= {*PATTERNS}


MENDED = [row for row in (*NAMES, *PATTERNS) if row.is_mended]
every_row = pytest.mark.parametrize("row", [*NAMES, *PATTERNS], ids=lambda row: row.name)


@pytest.mark.exhaustive(keep=60)
@every_row
def test_what_a_row_says_breaks_today_and_is_mended_if_it_says_so(row, die):
    due = is_due(row)
    assert bool(die(row)) == due
    with on_cpu() if row.name == "CUDA" else legacy():
        assert bool(die(row)) == (due and row.name != "CUDA" and not row.is_mended)


@pytest.mark.exhaustive(keep=10)
@pytest.mark.parametrize("row", MENDED, ids=lambda row: row.name)
def test_the_option_is_named_to_a_script_that_dies_of_a_row_and_says_what_it_mended(row, die, caplog):
    if not is_due(row):
        pytest.skip("it does not break here")
    caplog.set_level("WARNING")
    error = die(row)
    if not isinstance(error, SystemExit):  # as argparse has said what is wrong
        assert find_cause(error) == row
    with legacy():
        die(row)
        die(row)
    (said,) = caplog.messages
    assert f"fixes {row.name} in train.py" in said
    assert row.remedy in said


@pytest.mark.exhaustive(keep=60)
@every_row
def test_what_a_row_says_is_found_with_its_line_and_remedy(row, tmp_path, capsys):
    if not is_due(row) and row.name != "CUDA":
        pytest.skip("it does not break here")
    (tmp_path / "train.py").write_text(snippet(row))
    status = main(["check", str(tmp_path / "train.py")])
    lines = snippet(row).splitlines()
    line = next((at for at, text in enumerate(lines, 1) if text.endswith(HERE)), len(lines))
    path, found, remedy, _ = capsys.readouterr().out.splitlines()  # and no other row
    assert (path, found) == (str(tmp_path / "train.py"), f"  {row.name}  {row.status:12}  line {line}")
    assert row.remedy in remedy
    assert ("`ampatch run --legacy` fixes it" in remedy) == row.is_mended
    assert status == (row.status == BREAKS)


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages", "project"])
def test_what_a_package_of_another_environment_says_is_not_told_as_the_scripts(folder, caplog):
    code = compile("import numpy\nnumpy.float", f"/home/me/.local/lib/{folder}/it.py", "exec")
    with legacy():
        exec(code)
    assert bool(caplog.messages) == (folder == "project")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import collections as c\nc.Mapping", "collections.Mapping"),
        ("import numpy as np\nx = np.zeros(3, dtype=np.int)", "numpy.int"),
        ("mask = x.eq(0)\n1 - mask", "1 - mask"),
        ("x = y + 1\nvalues, _ = (x + x.t()).symeig(eigenvectors=True)", "torch.symeig"),
        ("import sys\nrun([sys.executable, '-m', 'torch.distributed.launch'])", "torch.distributed.launch"),
        ("x = y\nx.to('cuda:1')", "CUDA"),
        (
            "from librosa.filters import mel as basis\nbasis(sr, 1024, 80, fmin, fmax)",
            "librosa.filters.mel(sr, n_fft)",
        ),
        ("import librosa\nlibrosa.util.pad_center(window, size)", "librosa.filters.mel(sr, n_fft)"),
        ("import numpy\nx = numpy.array(y, copy=False)", "numpy.array(copy=False)"),
        ("x = y[0]\nlow = x.ptp()", "numpy.ndarray.ptp"),
        ("import argparse\nparser.add_argument('--local-rank', type=int)", "--local_rank"),
        ("import argparse\nparser.add_argument('--gpu', dest='local_rank')", "--local_rank"),
        ("for a in sys.argv:\n    if a.startswith('--local_rank'): rank = a", "--local_rank"),
        ("import sys\nif '--local_rank' in sys.argv: pass", "--local_rank"),
        ("import argparse\nparser.add_argument('-local_rank', type=int)", "--local_rank"),
        ("from absl import flags\nflags.DEFINE_integer('local_rank', 0, '')", "--local_rank"),
        ("import click\nclick.option('--local-rank', type=int)", "--local_rank"),
        ("if torch.cuda.is_available():\n    loss = model.cuda()(x).loss.data[0]", "loss.data[0]"),
        ("import torch.distributed as d\nd.init_process_group(backend='nccl')", "CUDA"),
        ("import torch\nmajor = int(torch.version.cuda.split('.')[0])", "CUDA"),
        ("import torch\nmajor = float(torch.version.cuda)", "CUDA"),
        ("mask = torch.ones(3, 3).triu().byte()[None]\nx.masked_fill(mask, 0)", MASK.name),
        ("mask = torch.zeros(3, dtype=torch.uint8)\nx.masked_scatter_(mask.t(), y)", MASK.name),
        (
            "import torch, numpy; m = numpy.ones(3).astype('uint8')\nx.masked_select(torch.from_numpy(m))",
            MASK.name,
        ),
        (
            "import torch\ntorch.masked_fill(x, make(3), 0)\ndef make(n): return torch.ones(n).byte()",
            MASK.name,
        ),
        (
            "def forward(self, x): self.mask = x.byte()\ndef other(self, x): x.masked_fill_(self.mask, 0)",
            MASK.name,
        ),
        ("def hide(x, mask):\n    return x.masked_fill(mask=mask, value=0)\nhide(x, x.byte())", MASK.name),
        ("mask = (x > 1).byte()\nx[mask] = -float('inf')", MASK.name),
        ("pad = torch.ByteTensor(3)\nx[:, pad] = 0", MASK.name),
        ("row, column = x.long().t()\nrow.clamp_(0, size[2] - 1)", CLAMP.name),
        ("import numpy\nnumpy.fromstring(pixels, numpy.uint8, sep='')", "numpy.fromstring(bytes)"),
        ("import random\nrandom.sample(scores.keys(), 3)", "random.sample(set(...), k)"),
        ("batches = loader.__iter__()\nbatches.next()", "iterator.next()"),
        ("import torch\nx = x.type(torch.cuda.DoubleTensor)", "CUDA"),
        ("import torch\nx = x.type('torch.cuda.HalfTensor')", "CUDA"),
        ("import torch\ntorch.cuda.synchronize()", "CUDA"),
        ("ids = x.long()\ny[ids / 3] = int(ids / 3)", "ids / n"),
    ],
)
def test_other_ways_of_saying_it_are_found(find, text, name):
    assert [(found, lines) for found, _, lines in find(text)] == [(name, (2,))]


def test_no_model_is_imported_to_know_that_a_name_beside_it_is_gone(find, monkeypatch):
    monkeypatch.setattr(patterns, "is_gone", pytest.fail)
    text = "from transformers.models.bert.modeling_bert import gelu"
    assert find(text) == [("transformers.models.bert.modeling_bert.gelu", "BREAKS", (1,))]


@pytest.mark.parametrize(
    "call", ["model.to(device)", "torch.ones(3, device=device)", "torch.load('x', device, weights_only=True)"]
)
def test_a_device_that_has_a_name_is_found_where_it_is_always_a_gpu(find, call):
    gpu = "device = 'cuda'\ntrain(device)\ndef train(device): pass"
    assert find(f"import torch\n{gpu}\n{call}") == [("CUDA", "needs CUDA", (5,))]
    either = "device = 'cuda'\nif not torch.cuda.is_available():\n    device = 'cpu'"
    assert find(f"import torch\n{either}\n{call}") == []


def test_all_windows_that_scipy_moved_are_found(find):
    moved = ("bartlett", "blackman", "flattop", "gaussian", "hamming", "hann", "kaiser", "parzen")
    text = "from scipy import signal\nwindows = [" + ", ".join(f"signal.{name}" for name in moved) + "]"
    assert {found for found, _, _ in find(text)} == {f"scipy.signal.{name}" for name in moved}


@pytest.mark.parametrize(("version", "is_found"), [("0.9.2", False), ("0.10.0", True), ("0.11.0rc1", True)])
def test_librosa_is_asked_for_its_version(version, is_found, find, monkeypatch, caplog):
    monkeypatch.setattr(metadata, "version", {"librosa": version}.__getitem__)
    assert bool(find("import librosa\nlibrosa.filters.mel(sr, 512)")) == is_found
    library = types.ModuleType("librosa.filters")
    exec("def mel(*old, sr=0): return [*old, sr]\nwindow_sumsquare = mel", vars(library))
    monkeypatch.setitem(sys.modules, "librosa.filters", library)
    with legacy():
        assert library.mel(5) == ([5] if is_found else [5, 0])
    assert len(caplog.messages) == is_found


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    from torch._six import inf\nexcept ImportError:\n    from math import inf",
        "import torch\nif torch.cuda.is_available():\n    model.cuda()",
        "import torch\nif device.type != 'cpu':\n    torch.cuda.synchronize()",
        "import torch\nd = torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "import torch\ntorch.load('x', weights_only=True)",
        "self.data[0]",
        "p.add_argument('--local_rank', type=int)\nrank = os.environ.get('LOCAL_RANK')",
        "from scipy.linalg import lapack\nlapack.potrs(x)",
        "def next(self): pass\nprefetcher.next()",
        "import time\ntime.perf_counter()",
        "import librosa\nlibrosa.load(path, sr=16000)",
        "import os, numpy as np\nos.path.getsize(f), np.ptp(x), np.dtype('i4').newbyteorder('>')",
        "import numpy as np\ndt = np.dtype('i4')\ndt.newbyteorder('>')",
        "import xml.etree.ElementTree as ET\nET.tostring(root)",
        "import numpy as np\nnp.float64, np.bool_",
        f"{SCHEDULER})\nfor epoch in range(2):\n    optimizer.step()\n    scheduler.step()",
        "for a in self.args: f(*a)",
        "x = y.byte()\nz.masked_fill(x == 0, 0).masked_fill(~z.gt(1), 0).masked_fill(z.bool(), 0)",
        "def hide(x, mask): return x.masked_fill(mask, 0)",
        "import numpy as np\nx = np.uint8(x)\ndef hide(x, mask): return x.masked_fill(mask, 0)",
        "ids = x.long()\nids.clamp_(0, x.size(1) - 1)\nx.clamp_(0.0, 1.0)\nids.clamp_(max=5)",
        "import torch\nif torch.version.cuda is not None: pass\nprint(torch.version.cuda)",
        "import subprocess\nsubprocess.run([python, script, '--local_rank=0'])",
        "import torch\ntorch.full((2,), 1.0), torch.full((2,), 1, dtype=x.dtype)",
        "def f(out, x):\n    out[0] = x\n    x.detach_()\ndef g(out, x):\n    out.detach_()\n    out[0] = x",
        "import torch\npad = 3\ntorch.full((2,), pad)",
        "mask = x.byte()\nx[mask] = y[mask]\nx[mask > 0] = 1\nx[mask.bool()] = 1\nmask[0] = 1",
        "import numpy as np\nids = np.uint8(x)\ny[ids] = 1",
        "score, id = line.split(',')\nid += 1\nfirst, last = line.split()\nlast += 1",
        "label = int(ids / 1000), (index / 4 / 5).long(), (index / 4).int()",
        "import torch\ntorch.sigmoid(x) / 2, batch_idx / len(loader), er_msid / 3",
        "self.n, part[0] = x.split(2)\nlosses[k] /= 3\nself.n += 1",
        "class Config:\n    def names(cls): return cls.pretrained_config_archive_map",
        "import torch\nisinstance(x, torch.cuda.FloatTensor), torch.cuda.device_count()",
        "from torch.optim import Optimizer\nclass O(Optimizer):\n"
        "    def __init__(self, p):\n        super(O, self).__init__(p, {})\n"
        "class P(Optimizer):\n    def step(self): pass",
        "from torch.optim import Optimizer\nclass Around(Optimizer):\n"
        "    def __init__(self, inner): self.inner = inner\n"
        "    def zero_grad(self): self.inner.zero_grad()\n"
        "    def state_dict(self): return self.inner.state_dict()",
        "import numpy as np\nnp.fromstring('1 2', sep=' '), np.histogram(x, density=True)",
    ],
)
def test_what_runs_today_is_not_listed(find, text):
    assert find(text) == []


def places():
    kinds = [torch, np, collections, time, argparse._ActionsContainer, torch.optim.lr_scheduler.StepLR]
    kinds += torch.optim.Adam, torch.optim.AdamW, torch.utils.data.Sampler, np.ndarray, np.generic
    kinds += warnings, random, random.Random, importlib.machinery.SourceFileLoader, torch.fft, os
    return [*kinds, torch.utils.data.dataloader._BaseDataLoaderIter]


def test_all_is_what_it_was_afterwards():
    before = [dict(vars(place)) for place in places()]
    finders = [*sys.meta_path]
    with legacy():
        assert np.float is float
        assert np.arange(3).ptp() == 2
        assert time.clock is time.perf_counter
    assert [dict(vars(place)) for place in places()] == before
    assert sys.meta_path == finders
    assert "torch._six" not in sys.modules
    assert type(torch.fft) is type(os)


def test_a_module_is_not_imported_under_its_old_name_because_python_looks_at_all_modules():
    with legacy():
        old = sys.modules["numpy.math"]
        old._row = dataclasses.replace(old._row, new="no_such_module:")
        assert not hasattr(old, "__file__")
        with pytest.raises(ModuleNotFoundError):
            old.pi


def test_masks_of_bytes_choose_what_is_set():
    mask, values = torch.tensor([True, False, True]), torch.zeros(3, dtype=torch.uint8)
    x, rows, picture = torch.ones(3), torch.ones(2, 3), torch.tensor([4, 5, 6], dtype=torch.uint8)
    with legacy(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.where(1 - mask, x, -x).tolist() == [-1, 1, -1]
        assert (1 - mask).float()[mask.byte()].tolist() == [0, 0]
        picture.masked_fill_(mask=mask, value=0)
        assert picture.masked_select(mask.byte()).tolist() == [0, 0]
        x[1 - mask] = 5
        rows[0, mask.byte()] = 0
        values[mask] = torch.tensor([7, 8], dtype=torch.uint8)
    assert (x.tolist(), rows.tolist()) == ([1, 5, 1], [[0, 1, 0], [1, 1, 1]])
    assert values.tolist() == [7, 0, 8]
    assert picture.tolist() == [0, 5, 0]


def attend(x, pad, causal):
    torch.manual_seed(0)
    options = {"batch_first": True}
    attention = torch.nn.MultiheadAttention(8, 2, **options)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8, 0.0, **options)
    encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    transformer = torch.nn.Transformer(8, 2, 1, 1, 8, 0.0, **options)
    for _ in range(2):
        yield attention(x, x, x, key_padding_mask=pad)[0]
        yield attention(x, x, x, attn_mask=causal)[0]
        yield attention(x, x, x, pad, attn_mask=causal)[0]
        yield layer(x, src_key_padding_mask=pad)
        yield encoder(x, causal, pad)
        yield transformer(x, x, causal, causal, None, pad, pad, pad)
        attention, layer, encoder, transformer = (
            each.eval() for each in (attention, layer, encoder, transformer)
        )


@pytest.mark.parametrize("level", [None, "O4"])
def test_attention_takes_masks_of_bytes(level):
    x, pad = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False, False, False]])
    causal = torch.ones(3, 3).triu(1).bool()
    with legacy(), warnings.catch_warnings():
        warnings.simplefilter("error")
        if level:
            amp.initialize(torch.nn.Linear(1, 1), opt_level=level, verbosity=0)
        for ours, torchs in zip(attend(x, pad.byte(), causal.byte()), attend(x, pad, causal), strict=True):
            assert torch.equal(ours, torchs)
        amp.uninitialize()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_attention_is_scripted_as_ever():
    attention, x = torch.nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    with legacy():
        scripted = torch.jit.script(attention)
    assert torch.equal(scripted(x, x, x)[0], attention(x, x, x)[0])


BYTES = torch.tensor([1, 0, 1], dtype=torch.uint8)
MASKING = {
    "masked_fill": lambda x: x.masked_fill(BYTES, 0),
    "masked_fill_": lambda x: x.masked_fill_(BYTES, 0),
    "torch.masked_fill": lambda x: torch.masked_fill(x, BYTES, 0),
    "masked_scatter": lambda x: x.masked_scatter(BYTES, x.new_zeros(3)),
    "masked_scatter_": lambda x: x.masked_scatter_(BYTES, x.new_zeros(3)),
    "torch.masked_scatter": lambda x: torch.masked_scatter(x, mask=BYTES, source=x.new_zeros(3)),
    "masked_select": lambda x: x - x.masked_select(BYTES)[0] * BYTES,
    "index_put": lambda x: x.index_put((BYTES,), x.new_zeros(1)),
    "index_put_": lambda x: x.index_put_((BYTES,), x.new_zeros(1)),
}


@pytest.mark.exhaustive(keep=18)
@pytest.mark.parametrize("opt_level", ["O1", "O2", "O4"])
@pytest.mark.parametrize("name", MASKING)
@pytest.mark.parametrize("x", [torch.ones(3), torch.ones(3, dtype=torch.long)], ids=["float", "long"])
def test_masks_of_bytes_choose_what_is_set_while_functions_are_patched(name, opt_level, x):
    model = torch.nn.Linear(1, 1)
    amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level=opt_level, verbosity=0)
    with legacy():
        assert MASKING[name](x.clone()).tolist() == [0, 1, 0]


def test_a_function_that_a_script_registers_takes_what_it_took():
    amp.register_float_function(torch, "stft")
    model = torch.nn.Linear(1, 1)
    amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O4", verbosity=0)
    with legacy():
        assert torch.stft(torch.ones(16), 4, window=torch.ones(4)).shape[-1] == 2


BINARY_LOSSES = {
    "probabilities": lambda x, label: F.binary_cross_entropy(x.float().sigmoid(), label),
    "logits": F.binary_cross_entropy_with_logits,
    "module": lambda x, label: torch.nn.BCEWithLogitsLoss(pos_weight=torch.ones(3))(x, label),
    "named": lambda x, label: torch.binary_cross_entropy_with_logits(input=x, target=label).mean(),
}


@pytest.mark.parametrize("opt_level", [None, "O1", "O4", "O5"])
@pytest.mark.parametrize("loss", BINARY_LOSSES.values(), ids=[*BINARY_LOSSES])
def test_binary_losses_take_labels_that_full_made_integers(loss, opt_level):
    model = torch.nn.Linear(3, 3)
    x = torch.tensor([0.5, -0.5, 2.0], requires_grad=True)
    expected = F.binary_cross_entropy_with_logits(x, torch.ones(3))
    if opt_level:
        amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level=opt_level, verbosity=0)
    with legacy():
        computed = loss(x, torch.full((3,), 1))
        computed.backward()
    torch.testing.assert_close(computed, expected)
    assert x.grad.dtype is torch.float32


def test_what_is_written_into_a_leaf_keeps_no_graph_and_the_leaf_trains():
    weight = torch.zeros(2, 2, requires_grad=True)
    with legacy():
        weight[0] = torch.ones(2)
        weight[1, 1] = 3
        weight.square().sum().backward()
        with pytest.raises(RuntimeError, match="view of a leaf"):  # a gradient would be lost
            weight[0] = torch.ones(2, requires_grad=True)
    assert weight.grad.tolist() == [[2, 2], [0, 6]]


def test_an_error_of_a_binary_loss_that_is_not_about_integers_has_no_such_cause():
    with pytest.raises(ValueError, match="Target size") as raised:
        F.binary_cross_entropy_with_logits(torch.ones(3), torch.ones(2))
    assert find_cause(raised.value) is None


@pytest.mark.parametrize("limit", [2.7, np.float32(2.7), torch.tensor(2.7)], ids=["float", "numpy", "tensor"])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_float_limits_of_integers_in_place_are_cut_as_they_were(limit, kind):
    ids = torch.tensor([0, 1, 2, 3, 9]).to(kind)
    with legacy():
        assert ids.clone().clamp_(0, limit).tolist() == [0, 1, 2, 2, 2]
        assert ids.clone().clamp_(min=1.0, max=limit).tolist() == [1, 1, 2, 2, 2]
        assert ids.clone().clamp_max_(limit).tolist() == [0, 1, 2, 2, 2]
        assert ids.clone().clamp_min_(limit).tolist() == [2, 2, 2, 3, 9]
        assert ids.float().clamp_(0, limit)[-1] == torch.tensor(2.7)


@pytest.mark.parametrize("context", [legacy, on_cpu])
def test_a_warning_of_torch_names_the_line_of_the_script(context):
    torch.set_warn_always(True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with context():
            torch.cross(torch.ones(2, 3), torch.ones(2, 3))
    torch.set_warn_always(False)
    assert [each.filename for each in said] == [__file__]


def test_python_warns_once_of_a_source():
    with legacy(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compile_source(b"x = 1 is 1", "train.py")
    assert [each.filename for each in said] == ["train.py"]


def test_a_package_that_imports_its_part_while_it_is_changed_is_changed_once(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "whole").mkdir()
    for name in ("__init__", "part"):
        (tmp_path / "whole" / f"{name}.py").touch()
    seen = []
    with ProgramChanges() as changes:
        places = Places(changes)
        places.change("whole", lambda _: importlib.import_module("whole.part"))
        places.change("whole.part", seen.append)
        importlib.import_module("whole")
    assert seen == [sys.modules.pop("whole.part")]
    del sys.modules["whole"]


def test_a_warning_of_an_old_name_names_the_line_that_says_it():
    with legacy():
        collections.__getattr__._own = lambda name: warnings.warn(f"{name} is old", UserWarning, 2)
        with pytest.warns(UserWarning, match="ChainMap2 is old") as said:
            collections.ChainMap2
    assert [each.filename for each in said] == [__file__]


@pytest.mark.parametrize("correct_bias", [True, False])
def test_the_adamw_of_transformers_steps_as_it_did(correct_bias):
    weight = torch.tensor([1.0, -2.0], requires_grad=True)
    optimizer = removed.AdamW([weight], 0.1, (0.8, 0.9), 0.01, 0.3, correct_bias)
    w, mean, square = [1.0, -2.0], [0.0, 0.0], [0.0, 0.0]
    for step, grads in enumerate([(0.5, 3.0), (-1.0, 0.25), (2.0, 1.0)], 1):
        weight.grad = torch.tensor(grads)
        optimizer.step()
        size = 0.1 * ((1 - 0.9**step) ** 0.5 / (1 - 0.8**step) if correct_bias else 1)
        for i, grad in enumerate(grads):
            mean[i] = 0.8 * mean[i] + 0.2 * grad
            square[i] = 0.9 * square[i] + 0.1 * grad * grad
            w[i] -= size * mean[i] / (square[i] ** 0.5 + 0.01)
            w[i] -= 0.1 * 0.3 * w[i]
    assert weight.tolist() == pytest.approx(w, rel=1e-6)
    assert set(optimizer.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}


def test_old_functions_compute_what_they_did():
    x = torch.randn(2, 6, dtype=torch.float64)
    whole = torch.view_as_complex(removed.rfft(x, 1))
    assert np.allclose(whole.numpy(), np.fft.rfft(x.numpy()))
    assert torch.allclose(removed.irfft(removed.rfft(x, 2, True), 2, True, signal_sizes=(2, 6)), x)
    assert torch.allclose(removed.irfft(removed.rfft(x, 1, onesided=False), 1, onesided=False), x)
    square = x[:, :2] + 2 * torch.eye(2)
    solution, _ = removed.solve(x, square)
    assert torch.allclose(square @ solution, x)
    orthogonal, upper = removed.qr(x)
    assert torch.allclose(orthogonal @ upper, x)
    assert removed.qr(x.T, some=False)[0].shape == (6, 6)
    squared = square @ square.T
    assert torch.allclose(removed.cholesky(squared), removed.cholesky(squared, True).T)
    assert np.allclose(removed.cholesky(squared).numpy(), np.linalg.cholesky(squared.numpy()))
    assert removed.escape("<'\">&") == "&lt;'\"&gt;&amp;"
    assert removed.escape("<'\">&", quote=True) == "&lt;'&quot;&gt;&amp;"
    symmetric = square + square.T
    values, vectors = removed.symeig(symmetric, eigenvectors=True)
    assert np.allclose(values.numpy(), np.linalg.eigvalsh(symmetric.numpy()))
    assert torch.allclose(symmetric @ vectors, vectors * values)
    assert removed.symeig(symmetric)[1].numel() == 0
    pairs = torch.view_as_real(torch.fft.fft(x))
    assert torch.allclose(removed.ifft(removed.fft(pairs, 1, True), 1, True), pairs)
    assert np.allclose(
        torch.view_as_complex(removed.fft(pairs, 1)).numpy(), np.fft.fft(np.fft.fft(x.numpy()))
    )
    assert removed.linear_assignment(np.array([[4, 1], [2, 3]])).tolist() == [[0, 1], [1, 0]]
    assert removed.in1d([[1, 2], [3, 4]], [2, 3]).tolist() == [False, True, True, False]
    assert removed.getargspec(lambda a, b=2: a).defaults == (2,)


@pytest.mark.process
def test_a_script_of_2019_runs_as_it_is(processes, tmp_path):
    (tmp_path / "train.py").write_text(OLD)
    (tmp_path / "helper.py").write_text("def to_gpu(x):\n    return x.cuda(async=True)\n")
    command = ["run", "--legacy", "--device", "cpu", "train.py", "--local-rank=2"]
    done = processes.run(f"sys.exit(ampatch.__main__.main({command!r}))", tmp_path)
    assert (done.status, done.stdout) == (0, SAID), done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("--legacy fixes ")]
    assert len(said) == 6, done.stderr
    assert "--legacy fixes async= in helper.py; since Python 3.7: use non_blocking=" in said
    assert not (tmp_path / "__pycache__").exists(), "plain python must not find what was mended"


def run_script(text, words, monkeypatch, caplog, **environment):
    """Returns what a rank's script finds in `args`, and what the option has said that it mends."""
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    for name, value in ({"LOCAL_RANK": "1"} | environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(linecache.cache, "train.py", (0, None, text.splitlines(), "train.py"))
    names = {"argparse": argparse, "p": argparse.ArgumentParser(), "os": os, "sys": sys}
    with legacy():
        exec(compile_source(text.encode(), "train.py"), names)
    return names["args"], caplog.messages


def spell(*options):
    """A script that wants its rank by an option, and gets it whenever it asks."""
    text = f"p.add_argument(*{options}, dest='local_rank', type=int, required=True)\nargs = p.parse_args()\n"
    return text + "sys.argv.append('--x')\nassert p.parse_known_args() == (args, ['--x'])"


ADD = "p.add_argument('--local_rank', type=int, default=-1)\n"
REST = "rest = p.parse_known_args()[1]\np = argparse.ArgumentParser()\n" + ADD + "args = p.parse_args(rest)"
REMAINDER = ADD + "p.add_argument('rest', nargs=argparse.REMAINDER)\nargs = p.parse_args()"
OTHERS = "import optparse\np = optparse.OptionParser()\n"
PART = "p = p.add_subparsers().add_parser('train')\n" + ADD


@pytest.mark.parametrize(
    ("text", "words", "rank", "is_mended"),
    [
        (spell("--local_rank"), "", 1, True),
        (spell("--local-rank"), "", 1, True),
        (spell("-r", "--local_rank", "--local-rank"), "", 1, True),
        (spell("--gpu"), "", 1, True),
        (spell("--local_rank"), "--local-rank=3", 3, True),
        (spell("--local-rank"), "--local_rank 3", 3, True),
        (spell("--local_rank"), "--local_rank=3", 3, False),
        (spell("--gpu"), "--gpu 3", 3, False),
        (ADD + "args = p.parse_args(None)", "", 1, True),
        (ADD + "args = p.parse_args(sys.argv[1:])", "", 1, True),
        (ADD + "args = p.parse_args(['--local_rank=5'])", "--x", 5, False),
        (ADD + "args = p.parse_args([])", "--x", -1, False),
        ("p.add_argument('-c')\n" + ADD + "args = p.parse_args(sys.argv[1:] + ['-c', 'x'])", "-c y", 1, True),
        (ADD + "args = p.parse_args(namespace=argparse.Namespace(local_rank=3))", "", 3, False),
        ("p.add_argument('-c')\n" + REST, "-c x", 1, True),
        ("p.add_argument('-c')\n" + REST, "-c x --local-rank=2", 2, True),
        ("g = p\n" + PART + "args = g.parse_args()", "train", 1, True),
        ("g = p\n" + PART + "args = g.parse_args()", "train --local-rank=2", 2, True),
        (
            "p.add_argument('--local_rank', default=os.environ['LOCAL_RANK'])\nargs = p.parse_args()",
            "",
            "1",
            False,
        ),
        (ADD + "args = p.parse_args()\nrank = os.getenv('LOCAL_RANK')", "", 1, False),
        (REMAINDER, "x.py --lr 1", 1, True),
        (
            "p, parser = p.add_mutually_exclusive_group(), p\n"
            + ADD
            + "p.add_argument('--gpu')\nargs = parser.parse_args()",
            "--gpu 0",
            1,
            True,
        ),
    ],
)
def test_a_launchers_rank_is_the_default_of_an_option_however_a_script_spells_it_and_no_more(
    text, words, rank, is_mended, monkeypatch, caplog
):
    args, said = run_script(text, words.split(), monkeypatch, caplog)
    assert (args.local_rank, len(said)) == (rank, is_mended)


@pytest.mark.parametrize(
    ("text", "words", "argv", "is_mended"),
    [
        ("for a in sys.argv:\n    a.startswith('--local_rank=')", "--local-rank=2 x", "_rank=2 x", True),
        ("'--local_rank=1' in sys.argv", "x", "_rank=1 x", True),
        ("sys.argv.index('--local_rank')", "--local_rank 2", "_rank 2", False),
        ("import getopt\ngetopt.getopt(sys.argv[1:], 'x', ['lr=', 'local_rank='])", "-x", "_rank=1 -x", True),
        (OTHERS + "p.add_option('--local_rank')", "--local-rank=2", "_rank=2", True),
        (OTHERS + "p.add_option('--local-rank')", "--local-rank=2", "-rank=2", False),
        (OTHERS + "p.add_option('--local-rank')", "x", "-rank=1 x", True),
    ],
)
def test_a_script_that_looks_for_its_rank_in_its_words_finds_it(
    text, words, argv, is_mended, monkeypatch, caplog
):
    args, said = run_script(f"{text}\nargs = sys.argv[1:]", words.split(), monkeypatch, caplog)
    assert (" ".join(args), len(said)) == ("--local" + argv, is_mended)


@pytest.mark.parametrize("count", [1, 2])
def test_the_first_rank_tells_what_is_mended_for_the_others(count, monkeypatch, caplog):
    text = "p.add_argument('--local_rank', type=int, default=0)\nargs = p.parse_args()"
    args, said = run_script(text, [], monkeypatch, caplog, LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(count))
    assert (args.local_rank, len(said)) == (0, count - 1)


def test_what_a_script_starts_with_its_own_rank_is_left_as_it_is(monkeypatch, caplog):
    args, _ = run_script(REMAINDER, ["x.py", "--local-rank=5", "--local_rank", "6"], monkeypatch, caplog)
    assert args.rest == ["x.py", "--local-rank=5", "--local_rank", "6"]


def test_legacy_says_nothing_of_a_rank_where_no_launcher_sets_one(monkeypatch, caplog):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", default=0)
    with legacy():
        assert parser.parse_args([]).local_rank == 0
        assert argparse.ArgumentParser().parse_known_args(["--local-rank=1"])[1] == ["--local-rank=1"]
    assert caplog.messages == []


@pytest.mark.process
@pytest.mark.parametrize("rank", ["--local-rank=1", "--local_rank=1"])
def test_a_launcher_may_give_us_the_rank_which_is_the_scripts(processes, tmp_path, rank):
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv)")
    done = processes.run(f"sys.exit(ampatch.__main__.main([{rank!r}, 'run', 'train.py', '-x']))", tmp_path)
    assert done.stdout == f"{['train.py', rank, '-x']}\n", done.stderr


RANK = SNIPPETS["--local_rank"].replace("sys.argv[1:] = ['--local-rank=2']", "")


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import numpy\nnumpy.float(\n3)", "numpy.float, since NumPy 1.24: use float"),
        ("import helper", "async=, since Python 3.7: use non_blocking="),
        (RANK, '--local_rank, since torch 2.0: use int(os.environ["LOCAL_RANK"]), which torchrun sets'),
    ],
)
def test_an_error_that_legacy_would_spare_a_script_names_the_option(processes, tmp_path, text, line):
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "helper.py").write_text("x.cuda(async=True)")
    done = processes.run("sys.exit(ampatch.__main__.main(['run', 'train.py', '--local-rank=1']))", tmp_path)
    assert done.status == (2 if text == RANK else 1)
    assert done.stderr.splitlines()[-1] == f"{line}; `ampatch run --legacy` fixes it"


@pytest.mark.process
def test_a_script_without_the_option_is_to_be_started_by_torchrun(processes, tmp_path):
    (tmp_path / "train.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()")
    command = ["--local-rank=1", "run", "--legacy", "train.py"]
    done = processes.run(f"sys.exit(ampatch.__main__.main({command!r}))", tmp_path)
    assert done.status == 2
    assert "start it by torchrun" in done.stderr.splitlines()[-1]
