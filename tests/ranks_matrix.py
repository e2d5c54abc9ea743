"""Every way to train on several ranks, at each level: they must take the same steps as one process.

`python tests/ranks_matrix.py 200` runs all cases on four gloo ranks and prints what fails; a test runs a few
steps of some. A case trains a small net while an inf appears on some rank. Checked are, bit for bit over the
ranks, weights, scales and skipped steps; against what must happen, scales and skipped steps; and within the
rounding of the level, weights against one process with the joined batch and float32 without ampatch.
"""

import contextlib
import functools
import itertools
import random
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import ampatch as amp
import ranks as started
from ranks import Ranks, gather

WRAPPERS = ["DDP", "FSDP2", "HSDP", "TP", "TP+FSDP2"]
LEVELS = ["O1", "O2", "O4", "O5"]
KINDS = ["fused", "foreach", "plain"]
RANKS, BATCH, LR = 4, 8, 0.02
SCALE = amp.DynamicLossScale(init_scale=2.0**8, growth_interval=3, max_scale=2.0**10)

# Ranks round products of half numbers in another order than one process does: some units of the half type in
# each update, of at most 0.02.
TOLERANCE = {"O1": 2e-3, "O2": 2e-3, "O4": 1e-2, "O5": 1e-2}


@dataclass(frozen=True)
class Case:
    wrapper: str
    level: str
    kind: str
    accumulates: bool
    optimizer: str = "SGD"
    steps: int = 4

    def __str__(self):
        micro = "accumulated" if self.accumulates else "each"
        return f"{self.wrapper}-{self.level}-{self.optimizer}-{self.kind}-{micro}"

    def overflows(self):
        """The steps that overflow, and on which rank."""
        dice = random.Random(f"{self.steps}")
        return {step: dice.randrange(RANKS) for step in range(self.steps) if dice.random() < 0.25} | {1: 2}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


@functools.cache
def mesh(*sizes):
    names = ("dp", "tp")[2 - len(sizes) :] if sizes != (RANKS,) else ("dp",)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names if len(sizes) == 2 else ("all",))


def parallelize(model, device_mesh, kind):
    """Splits the linear layers. The norm stays plain where torch's optimizer takes lists of both kinds."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if kind != "plain":
        split = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
        parallelize_module(model, device_mesh, split)
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(),
        }
    parallelize_module(model, device_mesh, plan)


def shard(case, model):
    """Shards a model as the case wants; returns in how many parts batches are split, and which is ours."""
    rank = dist.get_rank()
    if case.wrapper == "DDP":
        return RANKS, rank
    if case.wrapper == "TP":
        parallelize(model, mesh(RANKS), case.kind)
        return 1, 0
    if case.wrapper == "TP+FSDP2":
        parallelize(model, mesh(2, 2)["tp"], case.kind)
        fully_shard(model, mesh=mesh(2, 2)["dp"])
        return 2, rank // 2
    fully_shard(model.up, mesh=(own := mesh(2, 2) if case.wrapper == "HSDP" else mesh(RANKS)))
    fully_shard(model, mesh=own)
    return RANKS, rank


def make_batch(step, parts=1, part=0):
    generator = torch.Generator().manual_seed(step)
    size = BATCH // parts
    x, y = (torch.randn(BATCH, 4, 4, generator=generator) for _ in range(2))
    return x[part * size : (part + 1) * size], y[part * size : (part + 1) * size]


def make_optimizer(case, params):
    flags = {"fused": case.kind == "fused", "foreach": case.kind == "foreach"}
    if case.optimizer == "SGD":
        return torch.optim.SGD(params, lr=LR, momentum=0.9, **flags)
    return torch.optim.AdamW(params, lr=LR, eps=1.0, **flags)  # so that the size of gradients counts


def find_loss(model, batch, micro, count):
    x, y = (values[micro::count] for values in batch)
    return (model(x).float() - y).pow(2).mean() / count


def unsynchronized(model, is_last):
    """What holds gradients back while they accumulate."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    return model.no_sync() if hasattr(model, "no_sync") and not is_last else contextlib.nullcontext()


def plant_inf(model, rank):
    """Writes an inf where one rank alone sees it."""
    grads = [param.grad for param in model.parameters() if isinstance(param.grad, DTensor)]
    with torch.no_grad():
        local = next(grad.to_local() for grad in reversed(grads) if grad.to_local().numel())
        if rank == dist.get_rank():
            local.view(-1)[0] = float("inf")


def train(case):
    """Trains on every rank; returns weights, the scale after each step, and which were skipped."""
    torch.manual_seed(0)
    model = Net()
    parts, part = shard(case, model)
    optimizer = make_optimizer(case, model.parameters())
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=case.level, loss_scale=SCALE, verbosity=0, alarms=None
    )
    wrapped = DistributedDataParallel(model) if case.wrapper == "DDP" else model
    overflows, scales, skipped, count = case.overflows(), [], [], 1 + case.accumulates
    for step in range(case.steps):
        batch = make_batch(step, parts, part)
        for micro in range(count):
            is_last, rank = micro == count - 1, overflows.get(step)
            with unsynchronized(wrapped, is_last):
                loss = find_loss(wrapped, batch, micro, count)
                if case.wrapper == "DDP" and is_last and rank == dist.get_rank():
                    loss = loss * float("inf")
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                    if case.wrapper != "DDP" and is_last and rank is not None:
                        plant_inf(model, rank)
        optimizer.step()
        scales.append(amp.get_loss_scale())
        skipped.append(amp.step_was_skipped(optimizer))
        optimizer.zero_grad()
    params = amp.master_params(optimizer)
    weights = [one.full_tensor() if isinstance(one, DTensor) else one for one in params]
    amp.uninitialize()
    return [one.detach().clone() for one in weights], scales, skipped


@functools.cache
def train_alone(case, level):
    """Trains one process on joined batches, without the steps that overflow; no level: without ampatch."""
    torch.manual_seed(0)
    model = Net()
    optimizer = make_optimizer(case, model.parameters())
    if level is not None:
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, loss_scale=256.0, verbosity=0, alarms=None
        )
    count = 1 + case.accumulates
    for step in range(case.steps):
        if step in case.overflows():
            continue
        for micro in range(count):
            loss = find_loss(model, make_batch(step), micro, count)
            with contextlib.nullcontext(loss) if level is None else amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [param.detach().clone() for param in amp.master_params(optimizer)]
    amp.uninitialize()
    return weights


def expect_scales(case):
    """The scale after each step, by a loop written from the rules."""
    scale, clean, scales = SCALE.init_scale, 0, []
    # Gradients that wait to be averaged are judged with the last; those of TP alone, block by block.
    blocks = 2 if case.wrapper == "TP" and case.accumulates else 1
    for step in range(case.steps):
        for is_last in [False, True][-blocks:]:
            clean = 0 if is_last and step in case.overflows() else clean + 1
            if clean == 0:
                scale /= 2
            elif clean == SCALE.growth_interval:
                scale, clean = min(scale * 2, SCALE.max_scale), 0
        scales.append(scale)
    return scales


def difference(found, expected):
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def find_faults(case):
    """What is wrong with a case, in words; what every rank runs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        weights, scales, skipped = train(case)
    everywhere = gather((weights, scales, skipped))
    if dist.get_rank():
        return []
    alone = Case("alone", case.level, case.kind, case.accumulates, case.optimizer, case.steps)
    plain = Case("alone", "", "plain", case.accumulates, case.optimizer, case.steps)
    far = difference(weights, train_alone(alone, case.level))
    farther = difference(weights, train_alone(plain, None))
    limit = TOLERANCE[case.level]
    same = [all(map(torch.equal, weights, theirs)) for theirs, _, _ in everywhere]
    checks = {
        "weights differ over ranks": all(same),
        "scales differ over ranks": all(theirs == scales for _, theirs, _ in everywhere),
        "skips differ over ranks": all(theirs == skipped for _, _, theirs in everywhere),
        f"scales {scales}": scales == expect_scales(case),
        f"skips {skipped}": skipped == [step in case.overflows() for step in range(case.steps)],
        f"{far:.2g} from one process": far <= limit,
        f"{farther:.2g} from float32": farther <= limit,
    }
    return [text for text, holds in checks.items() if not holds]


def list_cases(steps, optimizers=("AdamW", "SGD")):
    product = itertools.product(WRAPPERS, LEVELS, KINDS, [False, True], optimizers)
    cases = [Case(*one, steps=steps) for one in product]
    # torch itself has no fused SGD for DTensors (2.13).
    return [one for one in cases if (one.optimizer, one.kind) != ("SGD", "fused") or one.wrapper == "DDP"]


def main():
    """Runs so many steps of the cases whose names contain an argument, or of all."""
    steps, names = int(sys.argv[1]), sys.argv[2:] or [""]
    cases = [one for one in list_cases(steps) if any(name in str(one) for name in names)]
    started.TIMEOUT, failed = 600, 0
    ranks = Ranks(Path(tempfile.mkdtemp()), RANKS)
    for case in cases:
        begin = time.perf_counter()
        try:
            faults = ranks(find_faults, case)[0]
        except AssertionError as error:
            faults = [str(error).strip().splitlines()[-1]]
        failed += bool(faults)
        print(f"{time.perf_counter() - begin:5.1f} s  {case}: {'; '.join(faults) or 'ok'}", flush=True)
    ranks.close()
    print(f"{len(cases)} cases of {steps} steps, {failed} failed")


if __name__ == "__main__":
    main()
