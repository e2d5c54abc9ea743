"""Classifies handwritten digits with a convolutional network, in the manner of apex's ImageNet example.

ampatch run examples/legacy/classify.py --opt-level O1
ampatch run examples/legacy/classify.py --opt-level O2 --loss-scale 128.0 --keep-batchnorm-fp32 True
ampatch run examples/legacy/classify.py --resume checkpoint.pth.tar
"""

import argparse
import os
import shutil

import torch
import torch.nn as nn
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

try:
    from apex import amp
    from apex.fp16_utils import *  # noqa: F403
    from apex.parallel import DistributedDataParallel as DDP
except ImportError:
    raise ImportError("this script needs apex: https://www.github.com/nvidia/apex") from None

parser = argparse.ArgumentParser(description="Digits training")
parser.add_argument("--epochs", default=6, type=int)
parser.add_argument("--start-epoch", default=0, type=int)
parser.add_argument("-b", "--batch-size", default=64, type=int)
parser.add_argument("--lr", default=0.05, type=float)
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--weight-decay", default=1e-4, type=float)
parser.add_argument("--clip-grad", default=5.0, type=float)
parser.add_argument("--print-freq", default=10, type=int)
parser.add_argument("--resume", default="", type=str)
parser.add_argument("--save-dir", default="", type=str)
parser.add_argument("--seed", default=0, type=int)
parser.add_argument("--local_rank", default=int(os.environ.get("LOCAL_RANK", 0)), type=int)
parser.add_argument("--opt-level", type=str, default="O1")
parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
parser.add_argument("--loss-scale", type=str, default=None)

best_prec1 = 0


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


class ConvNet(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(32)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(32 * 4 * 4, num_classes)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.fc(torch.flatten(x, 1))


def main():
    global best_prec1
    args = parser.parse_args()
    args.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    print(f"opt_level = {args.opt_level}")
    print(f"keep_batchnorm_fp32 = {args.keep_batchnorm_fp32} {type(args.keep_batchnorm_fp32)}")
    print(f"loss_scale = {args.loss_scale} {type(args.loss_scale)}")
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.distributed:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")

    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(labels).long()
    train_loader = DataLoader(TensorDataset(images[:1297], labels[:1297]), args.batch_size, shuffle=True)
    val_loader = DataLoader(TensorDataset(images[1297:], labels[1297:]), 250)

    model = ConvNet().to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    scheduler = optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 5], gamma=0.2)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    if args.distributed:
        model = DDP(model, delay_allreduce=True)

    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        args.start_epoch = checkpoint["epoch"]
        best_prec1 = checkpoint["best_prec1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        amp.load_state_dict(checkpoint["amp"])
        print(f"=> loaded checkpoint '{args.resume}' (epoch {checkpoint['epoch']})")

    for epoch in range(args.start_epoch, args.epochs):
        torch.manual_seed(args.seed + epoch)
        train(train_loader, model, criterion, optimizer, epoch, args, device)
        prec1 = validate(val_loader, model, criterion, device)
        scheduler.step()
        is_best, best_prec1 = prec1 > best_prec1, max(prec1, best_prec1)
        if args.save_dir and args.local_rank == 0:
            state = {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "best_prec1": best_prec1,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "amp": amp.state_dict(),
            }
            save_checkpoint(state, is_best, args.save_dir)
    print(f"Final Prec@1 {prec1:.2f} best {best_prec1:.2f}")


def train(train_loader, model, criterion, optimizer, epoch, args, device):
    losses, top1 = AverageMeter(), AverageMeter()
    model.train()
    for i, (images, target) in enumerate(train_loader):
        images, target = images.to(device), target.to(device)
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        top1.update(accuracy(output, target), images.size(0))

        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip_grad)
        optimizer.step()

        if i % args.print_freq == 0 and args.local_rank == 0:
            print(f"Epoch: [{epoch}][{i}/{len(train_loader)}] Loss {losses.avg:.4f} Prec@1 {top1.avg:.2f}")


def validate(val_loader, model, criterion, device):
    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            images, target = images.to(device), target.to(device)
            output = model(images)
            losses.update(criterion(output, target).item(), images.size(0))
            top1.update(accuracy(output, target), images.size(0))
    print(f" * Prec@1 {top1.avg:.2f} Loss {losses.avg:.4f}")
    return top1.avg


def save_checkpoint(state, is_best, folder):
    filename = os.path.join(folder, "checkpoint.pth.tar")
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, os.path.join(folder, "model_best.pth.tar"))


def accuracy(output, target):
    """Returns how many percent of the predictions are right."""
    _, pred = output.topk(1, 1, True, True)
    return pred.t().eq(target.view(1, -1)).float().mean().item() * 100


if __name__ == "__main__":
    main()
