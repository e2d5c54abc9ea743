"""Trains on handwritten digits on several ranks, and goes on from its last checkpoint when it starts again.

torchrun --nproc-per-node 2 examples/distributed.py --wrapper fsdp --opt-level O5 --checkpoints runs/digits
ampatch sweep --nproc-per-node 2 examples/distributed.py
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ampatch as amp

BATCH_SIZE = 64  # of all ranks together


def main():
    """Trains, evaluates, and says the accuracy on rank 0."""
    options = parse_options()
    device = join_ranks()
    images, labels = load_images(device)
    torch.manual_seed(0)
    model = build_model().to(device)
    if options.wrapper == "fsdp":  # before the optimizer: it replaces the parameters
        for layer in [*model, model]:
            fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002, eps=1e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level=options.opt_level)
    if options.wrapper == "ddp":
        model = DistributedDataParallel(model)
    begin = load_checkpoint(options.checkpoints, model, optimizer)
    for epoch in range(begin, options.epochs):
        train_epoch(model, optimizer, images[:1297], labels[:1297], epoch)
        save_checkpoint(options.checkpoints, model, optimizer, epoch)
    accuracy = evaluate(model, images[1297:], labels[1297:])
    if dist.get_rank() == 0:
        print(f"{accuracy:.2%} of 500 test digits are right, after epochs {begin} to {options.epochs - 1}")
        amp.report(accuracy=accuracy)
    dist.barrier()  # or gloo of torch 2.13 may be in the midst of the last backward's results, and hang
    dist.destroy_process_group()


def parse_options():
    parser = argparse.ArgumentParser(description="Trains on handwritten digits on several ranks.")
    parser.add_argument("--opt-level", default="O4", help="O0 to O5 (default: %(default)s)")
    parser.add_argument("--wrapper", default="ddp", choices=["ddp", "fsdp"])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--checkpoints", type=Path, help="a folder that all ranks see (default: none)")
    return parser.parse_args()


def join_ranks():
    """Makes the process group, and returns the device of this rank."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def load_images(device):
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    return images.float().to(device) / 16, labels.to(device)


def build_model():
    return nn.Sequential(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU()),
        nn.Sequential(nn.Linear(128, 128), nn.ReLU()),
        nn.Linear(128, 10),
    )


def train_epoch(model, optimizer, images, labels, epoch):
    """Makes the steps of an epoch, in an order that is the same on any number of ranks."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(BATCH_SIZE)[:-1]:
        own = batch[dist.get_rank() :: dist.get_world_size()]
        loss = F.cross_entropy(model(images[own]), labels[own])
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model, images, labels):
    return (model(images).argmax(1) == labels).float().mean().item()


def get_states(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "amp": amp.state_dict()}


def save_checkpoint(folder, model, optimizer, epoch):
    if folder is not None:
        save(get_states(model, optimizer), checkpoint_id=folder / str(epoch))


def load_checkpoint(folder, model, optimizer):
    """Takes over the last checkpoint that is whole, if there is one; returns the epoch to begin with."""
    whole = () if folder is None else folder.glob("*/.metadata")  # which is written last
    last = max((int(path.parent.name) for path in whole), default=None)
    if folder is None or last is None:
        return 0
    states = get_states(model, optimizer)
    load(states, checkpoint_id=folder / str(last))
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    amp.load_state_dict(states["amp"])
    return last + 1


if __name__ == "__main__":
    main()
