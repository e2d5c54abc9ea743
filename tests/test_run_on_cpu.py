"""`ampatch run --device cpu` does on the CPU what scripts ask of CUDA, and they print the same."""

import re

import pytest
import torch

from ampatch.apex.on_cpu import on_cpu
from legacy import FOLDER

# What scripts say that know of no CPU, for what those of examples/legacy say.
SAYS = {
    r'torch\.device\("cuda(:0)?" if .*? else "cpu"\)': 'torch.device("cuda")',
    r'"nccl" if [^)]*? else "gloo"': '"nccl"',
    r"\.to\((self\.)?device\)": ".cuda()",
    r"map_location=device": "map_location=lambda storage, loc: storage.cuda()",
}
SCRIPTS = {
    "adversarial": ["--epochs", "1"],
    "classify": ["--epochs", "1"],
    "dcgan": ["--niter", "1"],
    "language_model": ["--max_steps", "20"],
    "segment": ["--epochs", "1"],
}

# A name of torch.cuda each, as prefetchers, samplers, checkpoints and launchers use them.
CUDA = """
import os
import torch
from torch.nn.parallel import DistributedDataParallel

assert torch.cuda.is_available() and torch.cuda.device_count() == 1
torch.cuda.set_device(0)
model = torch.nn.Linear(3, 3).cuda().to("cuda:0").to(0).to(torch.device("cuda"))
x = torch.ones(2, 3, device="cuda").pin_memory().cuda(0, non_blocking=True).to(0)
assert x.type("torch.cuda.HalfTensor").dtype is x.type(torch.cuda.HalfTensor).dtype is torch.float16
assert torch.cuda.LongTensor([3]).tolist() == [3]
stream = torch.cuda.Stream()
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
start.record()
with torch.cuda.stream(stream), torch.cuda.device(0):
    y = torch.nn.DataParallel(model).cuda()(x)
torch.cuda.current_stream().wait_stream(stream)
y.record_stream(torch.cuda.current_stream())
end.record()
torch.cuda.synchronize()
assert start.elapsed_time(end) > 0 and torch.cuda.max_memory_allocated() == 0
assert not isinstance(0, torch.cuda.device) and torch.cuda.memory_summary() == ""
assert torch.cuda.memory_stats(0)["allocated_bytes.all.peak"] == 0
torch.save(model.state_dict(), "model.pt")
for place in (None, "cuda", torch.device("cuda:0"), {"cuda:0": "cuda:1"}, lambda s, loc: s.cuda(0)):
    model.load_state_dict(torch.load("model.pt", map_location=place))
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
torch.distributed.init_process_group(backend="nccl", init_method="env://")
for given in ({"device_ids": [0], "output_device": 0}, {}):
    print(DistributedDataParallel(model, **given)(x).device)
print(DistributedDataParallel(model, [0], 0)(x).device)
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def run(processes, tmp_path):
    """Runs `ampatch run` in a process of its own, and returns how it ended."""

    def run_script(*arguments):
        words = [*map(str, arguments)]
        return processes.run(f"sys.exit(ampatch.__main__.main({['run', *words]!r}))", tmp_path)

    return run_script


@pytest.mark.process
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_says_cuda_prints_what_it_does_on_the_cpu(run, tmp_path, name):
    source = (FOLDER / f"{name}.py").read_text()
    expected = run("--opt-level", "O4", FOLDER / f"{name}.py", *SCRIPTS[name])
    for pattern, cuda in SAYS.items():
        source = re.sub(pattern, cuda, source)
    assert "cuda()" in source
    (tmp_path / "train.py").write_text(source)
    done = run("--device", "cpu", "--opt-level", "O4", "train.py", *SCRIPTS[name])
    assert (done.status, done.stdout) == (0, expected.stdout), done.stderr


@pytest.mark.process
def test_what_scripts_ask_of_cuda_is_done_on_the_cpu(run, tmp_path):
    (tmp_path / "train.py").write_text(CUDA)
    done = run("--device", "cpu", "train.py")
    assert (done.status, done.stdout) == (0, "cpu\n" * 3), done.stderr


@pytest.mark.process
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_the_error_of_a_machine_without_cuda_names_the_option(run, tmp_path):
    (tmp_path / "train.py").write_text("import torch\ntorch.ones(1).cuda()")
    done = run("train.py")
    assert done.status == 1
    assert done.stderr.splitlines()[-1] == "`ampatch run --device cpu` runs this script on the CPU"


def test_torch_is_what_it_was_afterwards_and_was_told_the_truth_meanwhile():
    kinds = torch.cuda, torch, torch.distributed, torch.nn.parallel.DistributedDataParallel
    kinds += torch.Tensor, torch.UntypedStorage, torch.TypedStorage
    before = [dict(vars(kind)) for kind in kinds]
    truth = torch.cuda.is_available()
    with on_cpu():
        assert torch.cuda.is_available()
        assert torch.nn.DataParallel(torch.nn.Linear(1, 1)).device_ids == [0][: int(truth)]
        assert torch.ones(1).cuda().device.type == "cpu"
    after = [dict(vars(kind)) for kind in kinds]
    assert [
        name for old, new in zip(before, after, strict=True) for name in old if old[name] is not new.get(name)
    ] == []
    assert "record_stream" not in vars(torch.Tensor)
