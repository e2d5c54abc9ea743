"""What it costs gloo ranks to agree on found_inf, beside torch's own handler of DTensors.

    python benchmarks/agreement.py [RANKS]

Unscales the gradients of a model under FSDP2 with `torch.amp.GradScaler.unscale_`, which agrees in torch's
DTensor handler, and with a block of `scale_loss`, turn by turn. Times how much of the block is agreement, and
one all_reduce of one number to compare with. Shows the 10th percentile and the median of 300 turns, in
milliseconds, of the slowest rank.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ampatch as amp
from ampatch.steps.scaler import agree_

TURNS, PORT = 300, 29517


def clock(run):
    dist.barrier()
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1000


def serve(rank, ranks):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORT))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=True)
    model(torch.randn(8, 64)).sum().backward()
    grads = [(param, param.grad) for param in model.parameters()]
    loss, found_inf, groups = torch.ones((), requires_grad=True), torch.zeros(()), [mesh.get_group()]
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(loss)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=amp.DynamicLossScale(1.0), verbosity=0)

    def unscale_with_torch():
        scaler.unscale_(optimizer)
        scaler.update()

    def give_grads():
        for param, grad in grads:
            param.grad = grad

    def run_block():
        with amp.scale_loss(loss, optimizer):
            give_grads()

    runs = {"GradScaler": unscale_with_torch, "scale_loss": run_block}
    runs["of it agreeing"] = lambda: agree_(found_inf, groups)
    runs["one all_reduce"] = lambda: dist.all_reduce(found_inf, dist.ReduceOp.MAX)
    times = {name: [] for name in runs}
    for _ in range(TURNS):
        give_grads()
        times["GradScaler"].append(clock(unscale_with_torch))
        optimizer.zero_grad()
        for name in list(runs)[1:]:
            times[name].append(clock(runs[name]))
    for name, found in times.items():
        numbers = torch.tensor([statistics.quantiles(found, n=10)[0], statistics.median(found)])
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        if rank == 0:
            print(f"{name:15} {numbers[0]:6.2f} ms {numbers[1]:6.2f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    count = int(sys.argv[1]) if sys.argv[1:] else 4
    torch.multiprocessing.spawn(serve, (count,), nprocs=count)
