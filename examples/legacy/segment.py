"""Finds the pixels of odd and of even digits in noisy pictures, with apex.fp16_utils' FP16_Optimizer.

ampatch run examples/legacy/segment.py --fp16 --dynamic-loss-scale
"""

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp
from apex.fp16_utils import FP16_Optimizer, network_to_half
from sklearn.datasets import load_digits

SIZE, CLASSES = 12, 3


class UNet(nn.Module):
    """A U-Net with one level: half the resolution and back, next to a path at full resolution."""

    def __init__(self, width=8):
        super().__init__()
        self.inc = self.double_conv(1, width)
        self.down = self.double_conv(width, 2 * width)
        self.bottom = nn.Conv2d(2 * width, 2 * width, 5, padding=2)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.outc = nn.Conv2d(2 * width, CLASSES, 1)

    @staticmethod
    def double_conv(inputs, outputs):
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        skip = self.inc(x)
        x = self.down(F.max_pool2d(skip, 2))
        x = self.up(F.relu(self.bottom(x)))
        return self.outc(torch.cat([skip, x], dim=1))


def load_scenes(noise=0.15):
    """Puts each digit somewhere into a noisy picture; 1 marks the ink of even digits, 2 that of odd ones."""
    digits, labels = load_digits(return_X_y=True)
    digits, labels = torch.from_numpy(digits).float().view(-1, 8, 8) / 16, torch.from_numpy(labels)
    generator = torch.Generator().manual_seed(0)
    images = noise * torch.randn(len(digits), SIZE, SIZE, generator=generator)
    masks = torch.zeros(len(digits), SIZE, SIZE, dtype=torch.long)
    corners = torch.randint(SIZE - 8 + 1, (len(digits), 2), generator=generator).tolist()
    for image, mask, digit, label, (y, x) in zip(images, masks, digits, labels, corners, strict=True):
        image[y : y + 8, x : x + 8] += digit
        mask[y : y + 8, x : x + 8] = (digit > 0.4).long() * (1 + label % 2)
    return images[:, None], masks


def dice_loss(output, target, eps=1.0):
    probs = F.softmax(output, dim=1)
    onehot = F.one_hot(target, CLASSES).permute(0, 3, 1, 2).to(probs.dtype)
    overlap = (probs * onehot).sum((0, 2, 3))
    return 1 - ((2 * overlap + eps) / (probs.sum((0, 2, 3)) + onehot.sum((0, 2, 3)) + eps)).mean()


def mean_iou(output, target):
    pred = output.argmax(1)
    both = [((pred == c) & (target == c)).sum().float() for c in range(CLASSES)]
    either = [((pred == c) | (target == c)).sum().float() for c in range(CLASSES)]
    return torch.stack([b / e for b, e in zip(both, either, strict=True)]).mean().item()


def evaluate(model, images, masks):
    model.eval()
    with torch.no_grad():
        output = torch.cat([model(part).float() for part in images.split(125)])
    return mean_iou(output, masks)


def poly_lr_(optimizer, base_lr, done):
    for group in optimizer.param_groups:
        group["lr"] = base_lr * (1 - done) ** 0.9


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=5, type=int)
    parser.add_argument("--batch-size", default=32, type=int)
    parser.add_argument("--lr", default=1e-2, type=float)
    parser.add_argument("--clip", default=1.0, type=float)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--fp16", action="store_true", help="half precision, with FP16_Optimizer")
    parser.add_argument("--static-loss-scale", type=float, default=1.0)
    parser.add_argument("--dynamic-loss-scale", action="store_true", help="instead of the static one")
    parser.add_argument("--opt-level", default=None, help="instead of --fp16: amp")
    parser.add_argument("--save-dir", default="", help="gets a checkpoint after each epoch")
    parser.add_argument("--resume", default="", help="a checkpoint to continue from")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    images, masks = (part.to(device) for part in load_scenes())

    model = UNet().to(device)
    if args.fp16:
        model = network_to_half(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-4 if args.fp16 else 1e-8)
    if args.fp16:
        optimizer = FP16_Optimizer(
            optimizer,
            static_loss_scale=args.static_loss_scale,
            dynamic_loss_scale=args.dynamic_loss_scale,
            dynamic_loss_args={"init_scale": 2.0**16, "scale_window": 500},
        )
    elif args.opt_level:
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)

    start_epoch = 0
    if args.resume:
        saved = torch.load(args.resume, map_location=device)
        start_epoch = saved["epoch"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    print(f"untrained mIoU {evaluate(model, images[1297:], masks[1297:]):.4f}")
    for epoch in range(start_epoch, args.epochs):
        model.train()
        torch.manual_seed(args.seed + epoch)
        batches = torch.randperm(1297).split(args.batch_size)
        for i, index in enumerate(batches):
            poly_lr_(optimizer, args.lr, (epoch + i / len(batches)) / args.epochs)
            output = model(images[index]).float()
            loss = F.cross_entropy(output, masks[index]) + dice_loss(output, masks[index])
            optimizer.zero_grad()
            if args.fp16:
                optimizer.backward(loss)
                optimizer.clip_master_grads(args.clip)
            elif args.opt_level:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip)
            else:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
        scale = f" loss scale {optimizer.loss_scale}" if args.fp16 else ""
        print(f"epoch {epoch} mIoU {evaluate(model, images[1297:], masks[1297:]):.4f}{scale}")
        if args.save_dir:
            saved = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved, os.path.join(args.save_dir, f"epoch_{epoch + 1}.pth"))


if __name__ == "__main__":
    main()
