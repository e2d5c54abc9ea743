"""`ampatch run --device cpu` does on the CPU what scripts ask of CUDA, and they print the same."""

import re
import sysconfig
import warnings

import pytest
import torch

from ampatch.__main__ import main
from ampatch.apex.on_cpu import on_cpu
from legacy import FOLDER, print_in_forks

# What scripts say that know of no CPU, for what those of examples/legacy say.
SAYS = {
    r'torch\.device\("cuda(:0)?" if .*? else "cpu"\)': 'torch.device("cuda")',
    r'"nccl" if [^)]*? else "gloo"': '"nccl"',
    r"\.to\((self\.)?device\)": ".cuda()",
    r"map_location=device": "map_location=lambda storage, loc: storage.cuda()",
}
SCRIPTS = {"classify": ["--epochs", "1"], "language_model": ["--max_steps", "8"]}

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
torch.distributed.init_process_group(backend="nccl", init_method="env://", device_id=torch.device("cuda:0"))
for given in ({"device_ids": [0], "output_device": 0}, {}):
    print(DistributedDataParallel(model, **given)(x).device)
print(DistributedDataParallel(model, [0], 0)(x).device)
torch.distributed.destroy_process_group()
"""


# As the tutorials of 2019 start a process for each GPU.
SPAWNED = """
import os
import numpy as np
import torch


def train(gpu):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    torch.distributed.init_process_group(backend="nccl", world_size=1, rank=gpu)
    torch.cuda.set_device(gpu)
    print(torch.ones(1).cuda(gpu).device, np.float(torch.cuda.device_count()))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=1)
"""


# As scripts of 2018 learn from the number of GPUs how many they are, which torchrun starts.
COUNTED = """
import os
import torch
from torch import distributed as dist

rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
torch.cuda.set_device(rank)
model = torch.nn.Linear(1, 1).cuda(rank)
if gpus > 1:
    dist.init_process_group("nccl", world_size=gpus, rank=rank)
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
alone = torch.nn.DataParallel(torch.nn.Linear(1, 1).cuda(), range(gpus))(torch.ones(8 // gpus, 1).cuda())
model(rank * torch.ones(1, 1).cuda()).sum().backward()
print(f"of {gpus}: {torch.cuda.current_device() == rank} {len(alone)} {model.module.weight.grad.item()}")
dist.barrier()
dist.destroy_process_group()
"""


# What else scripts say, a manner each; all of it fails on a machine without CUDA.
ASKED = {
    "versions": """
from torch.version import cuda
assert cuda == torch.version.cuda
assert int(cuda.split(".")[0]) >= 9 and float(cuda) >= 9
assert torch.backends.cudnn.version() >= 7603 and torch.cuda.nccl.version() >= (2, 4)
""",
    "generators": """
generator = torch.Generator("cuda").manual_seed(3)
torch.randperm(4, generator=torch.Generator(device="cuda:0"), device="cuda")
assert torch.randn(2, generator=generator, device="cuda").tolist() != [0, 0]
assert isinstance(generator, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
""",
    "devices": """
devices = "cuda", "cuda:1", 0, torch.device("cuda", 0), torch.device(0), torch.device(type="cuda", index=1)
for device in devices:
    made = torch.zeros(2, device=device), torch.tensor([1.0], device=device), torch.ones(2).to(device)
    made += torch.ones(1).new_zeros(2, device=device), nn.Linear(2, 2, device=device).to(device).weight
    made += torch.ones(1).cuda(device, non_blocking=True), torch.zeros(1, device=made[0].get_device())
    assert {str(tensor.device) for tensor in made} == {"cpu"}
for device in ("cuda:1", 1):
    torch.cuda.set_device(device)
    assert torch.cuda.current_device() == torch.cuda.device_count() == 1
torch.cuda.set_device(-1)
for device, inside in ((3, 3), ("cuda:2", 2), (torch.device("cuda", 0), 0), (-1, 1), (None, 1), ("cuda", 1)):
    with torch.cuda.device(device):
        assert torch.cuda.current_device() == inside
    assert torch.cuda.current_device() == 1
try:
    torch.cuda.set_device(None)
    raise AssertionError
except ValueError:
    assert torch.cuda.current_device() == 1
with torch.device("cuda"):
    assert next(nn.Linear(2, 2).parameters()).device.type == "cpu"
assert not made[0].is_cuda and torch.zeros(2, pin_memory=True).pin_memory().shape == (2,)
assert {torch.device(each).type for each in devices} == {"cuda"} and torch.device("cpu").type == "cpu"
""",
    "threads": """
import threading
class Loader(threading.Thread):
    def run(self):
        self.made = torch.ones(1).cuda().to(device), torch.zeros(1, device=device)
device = torch.device("cuda:0")
loader = Loader(daemon=True)
loader.start()
loader.join()
assert {each.device.type for each in loader.made} == {"cpu"}
""",
    "defaults": """
torch.set_default_tensor_type("torch.cuda.DoubleTensor")
assert torch.ones(1).dtype is torch.float64
torch.set_default_tensor_type(torch.cuda.FloatTensor)
torch.set_default_device("cuda:0")
assert str(torch.ones(1).device) == "cpu"
torch.set_default_device(None)
""",
    "storages": """
storage = torch.cuda.FloatStorage([1.0, 2.0])
assert torch.cuda.FloatTensor(storage).tolist() == [1, 2]
assert isinstance(torch.ones(1).cuda().storage().cuda(), torch.TypedStorage)
""",
    "pinned loaders": """
for batch in torch.utils.data.DataLoader([torch.ones(1)], pin_memory=True, pin_memory_device="cuda"):
    batch.cuda(non_blocking=True)
""",
    "streams": """
stream, event = torch.cuda.Stream(device=0, priority=-1), torch.cuda.Event(blocking=True)
with torch.cuda.stream(stream), stream:
    event.record(torch.cuda.current_stream(device=0))
torch.cuda.set_stream(stream)
assert stream.cuda_stream == stream.priority == 0 and stream.device.type == "cpu"
""",
    "profiling": """
torch.cuda.nvtx.range_push("forward")
torch.cuda.nvtx.range_pop()
with torch.cuda.nvtx.range("step"), torch.cuda.profiler.profile(), torch.autograd.profiler.emit_nvtx():
    torch.cuda.cudart().cudaProfilerStart()
torch.cuda.profiler.stop()
""",
    "memory": """
torch.cuda.reset_accumulated_memory_stats()
torch.cuda.set_per_process_memory_fraction(0.5, 0)
properties = torch.cuda.get_device_properties(torch.device("cuda"))
assert torch.cuda.memory.memory_allocated() / properties.total_memory == 0 < properties.multi_processor_count
free, total = torch.cuda.mem_get_info()
assert free / total == 1 and torch.cuda.utilization() == 0
""",
    "random numbers": """
torch.cuda.random.set_rng_state(torch.cuda.random.get_rng_state(0), device=0)
with torch.random.fork_rng(devices=[0]), torch.random.fork_rng():
    torch.cuda.manual_seed_all(torch.cuda.initial_seed())
from torch.utils.checkpoint import checkpoint
x = torch.ones(8, requires_grad=True).cuda()
for reentrant in (True, False):
    checkpoint(nn.Dropout(), x, use_reentrant=reentrant).sum().backward()
""",
    "copies": """
from torch.cuda import comm
from torch.nn.parallel import data_parallel, gather, parallel_apply, replicate, scatter
x = torch.arange(4.0, requires_grad=True).cuda()
assert [part.tolist() for part in comm.scatter(x, [0, 1])] == [[0, 1], [2, 3]]
assert comm.gather(comm.broadcast(x, [0, 1]), destination=0).numel() == 8
assert comm.reduce_add_coalesced([[x], [x]])[0].tolist() == comm.reduce_add([x, x]).tolist() == [0, 2, 4, 6]
module = nn.Linear(1, 1).cuda()
parts = [part.view(-1, 1) for part in scatter(x, [0, 1])]
apart = gather(parallel_apply(replicate(module, [0, 1]), parts), "cuda:0")
assert torch.equal(apart, data_parallel(module, x.view(-1, 1), [0, 1]))
apart.sum().backward()
assert x.grad.tolist() == [module.weight.item()] * 4 and module.weight.grad.item() == 6
""",
    "statistics over ranks": """
nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2)).cuda()(torch.ones(3, 2).cuda())
""",
}


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
def test_processes_that_a_script_spawns_use_the_cpu_and_have_what_is_mended(run, tmp_path):
    (tmp_path / "train.py").write_text(SPAWNED)
    done = run("--device", "cpu", "--legacy", "train.py")
    assert (done.status, done.stdout) == (0, "cpu 1.0\n"), done.stderr


@pytest.mark.process
def test_a_machine_has_a_gpu_for_each_process_of_a_launcher(tmp_path):
    (tmp_path / "train.py").write_text(COUNTED)
    command = ["run", "--device", "cpu", "train.py"]
    printed = print_in_forks(lambda: main(command), ["ampatch", *command], tmp_path, 2)
    assert printed == "of 2: True 4 0.5\n" * 2


@pytest.mark.process
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
@pytest.mark.parametrize(
    "call",
    [
        "torch.ones(1).cuda()",
        "torch.ones(1).to(0)",
        "torch.cuda.FloatTensor([1.0])",
        "torch.ones(1).type(torch.cuda.FloatTensor)",
        "torch.cuda.set_device(0)",
        "torch.cuda.Stream()",
        "torch.cuda.Event().record()",
        'torch.Generator("cuda")',
        "from torch import distributed as dist\n"
        'dist.init_process_group("nccl", world_size=1, store=dist.HashStore(), rank=0)',
    ],
)
def test_each_error_of_a_machine_without_cuda_names_the_option(run, tmp_path, call):
    (tmp_path / "train.py").write_text(f"import torch\n{call}")
    done = run("train.py")
    assert done.status == 1
    assert done.stderr.splitlines()[-1] == "`ampatch run --device cpu` runs this script on the CPU"


@pytest.mark.parametrize("name", ASKED)
def test_what_else_scripts_ask_of_cuda_is_done_on_the_cpu(name, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")  # which is none
    with on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings(
            "ignore", "(Typed|Untyped)Storage is deprecated|torch.set_default_tensor_type"
        )
        exec(ASKED[name], {"torch": torch, "nn": torch.nn})


def test_torch_is_what_it_was_afterwards_and_was_told_the_truth_meanwhile():
    cuda = torch.cuda
    kinds = (
        cuda,
        cuda.memory,
        cuda.random,
        cuda.nvtx,
        torch.autograd.profiler,
        cuda.profiler,
        torch.nn.parallel,
        torch.nn.parallel.comm,
    )
    kinds += torch.random, torch.nn.SyncBatchNorm, torch.utils.data.DataLoader, torch, torch.distributed
    kinds += torch.nn.parallel.DistributedDataParallel, torch.version, cuda.nccl
    kinds += torch.Tensor, torch.UntypedStorage, torch.TypedStorage
    before = [dict(vars(kind)) for kind in kinds]
    truth, version = torch.cuda.is_available(), torch.version.cuda
    with on_cpu():
        assert torch.cuda.is_available()
        assert torch.nn.DataParallel(torch.nn.Linear(1, 1)).device_ids == [0][: int(truth)]
        assert torch.ones(1).cuda().device.type == "cpu"
        libraries = sysconfig.get_path("purelib")
        assert eval(compile("torch.version.cuda", f"{libraries}/library.py", "eval")) == version
        torch.get_device_module("cuda:1")  # which remembers what it answers
    assert torch.get_device_module("cuda:1") is cuda
    assert torch.version.cuda == version
    after = [dict(vars(kind)) for kind in kinds]
    assert [
        name for old, new in zip(before, after, strict=True) for name in old if old[name] is not new.get(name)
    ] == []
    assert "record_stream" not in vars(torch.Tensor)
