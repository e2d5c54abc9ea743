"""Trains on digits in several processes, with apex's DistributedDataParallel and SyncBatchNorm.

torchrun --nproc-per-node 2 -m ampatch run examples/legacy/distributed.py --opt-level O1 --sync_bn
"""

import argparse
import os

import apex
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from apex import amp
from apex.parallel import DistributedDataParallel as DDP
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", default=5, type=int)
parser.add_argument("-b", "--batch-size", default=32, type=int, help="batch size per process")
parser.add_argument("--lr", default=0.05, type=float, help="for a total batch of 64, scaled linearly")
parser.add_argument("--seed", default=0, type=int)
parser.add_argument("--opt-level", default="O1", type=str)
parser.add_argument("--keep-batchnorm-fp32", default=None, type=str)
parser.add_argument("--loss-scale", default=None, type=str)
parser.add_argument("--sync_bn", action="store_true", help="use apex's synchronized BatchNorm")
parser.add_argument("--save", default="", type=str)
# torch.distributed.launch passed this argument; launchers since then set the variable.
parser.add_argument("--local_rank", default=os.getenv("LOCAL_RANK", 0), type=int)
args = parser.parse_args()

args.distributed = "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1
args.world_size, args.rank = 1, 0
cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(args.local_rank)
device = torch.device("cuda" if cuda else "cpu")
if args.distributed:
    dist.init_process_group(backend="nccl" if cuda else "gloo", init_method="env://")
    args.world_size, args.rank = dist.get_world_size(), dist.get_rank()
args.lr = args.lr * float(args.batch_size * args.world_size) / 64.0


def print_once(*values):
    if args.rank == 0:
        print(*values, flush=True)


def reduce_tensor(tensor):
    rt = tensor.clone()
    if args.distributed:
        dist.all_reduce(rt, op=dist.ReduceOp.SUM)
        rt /= args.world_size
    return rt


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


def train(model, optimizer, loader):
    model.train()
    losses = []
    for images, target in loader:
        images, target = images.to(device), target.to(device)
        loss = F.cross_entropy(model(images), target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(reduce_tensor(loss.detach()).item())
    return sum(losses) / len(losses)


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        hits = [model(images.to(device)).argmax(1) == target.to(device) for images, target in loader]
    return reduce_tensor(torch.cat(hits).float().mean()).item() * 100


def main():
    print_once(f"opt_level = {args.opt_level}, {args.world_size} processes")
    torch.manual_seed(args.seed)
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
    dataset = TensorDataset(images, torch.from_numpy(labels).long())
    train_set, val_set = Subset(dataset, range(1280)), Subset(dataset, range(1297, 1797))
    ranks = {"num_replicas": args.world_size, "rank": args.rank}
    train_sampler = DistributedSampler(train_set, seed=args.seed, **ranks)
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler)
    val_loader = DataLoader(val_set, 250, sampler=DistributedSampler(val_set, shuffle=False, **ranks))

    model = build_model()
    if args.sync_bn:
        print_once("using apex synced BN")
        model = apex.parallel.convert_syncbn_model(model)
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    # After amp.initialize. The gradients are averaged in one go when the backward pass is done.
    if args.distributed:
        model = DDP(model, delay_allreduce=True)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        loss = train(model, optimizer, train_loader)
        print_once(f"epoch {epoch} loss {loss:.7f} Prec@1 {evaluate(model, val_loader):.2f}")
    weights = torch.cat([p.detach().double().flatten() for p in amp.master_params(optimizer)])
    print(f"rank {args.rank}: sum of weights {weights.sum().item():.17g}", flush=True)
    print_once(f"Final Prec@1 {evaluate(model, val_loader):.2f} loss {loss:.5f}")
    if args.save and args.rank == 0:
        net = model.module if args.distributed else model
        torch.save({"model": net.state_dict(), "amp": amp.state_dict()}, args.save)
    if args.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
