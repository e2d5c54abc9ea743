"""Trains a classifier against adversarial examples, made while training by one signed step.

ampatch run examples/legacy/adversarial.py --opt-level O2 --loss-scale 128 --master-weights
"""

import argparse

import apex.amp as amp
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", default=64, type=int)
    parser.add_argument("--epochs", default=8, type=int)
    parser.add_argument("--lr-max", default=0.2, type=float)
    parser.add_argument("--epsilon", default=2, type=int, help="in steps of grey, of which there are 16")
    parser.add_argument("--alpha", default=2.5, type=float)
    parser.add_argument("--attack", default="fgsm", choices=["none", "fgsm"])
    parser.add_argument("--early-stop", action="store_true", help="Stop when robust accuracy falls")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument(
        "--opt-level", default="O2", type=str, choices=["O0", "O1", "O2", "O4", "O5"], help="O0 is FP32"
    )
    parser.add_argument("--loss-scale", default="1.0", type=str, help='a number or "dynamic"')
    parser.add_argument("--master-weights", action="store_true", help="FP32 copies of the weights, at O2")
    return parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32)
        self.linear = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.linear(x.flatten(1))


def clamp(x, lower, upper):
    return torch.max(torch.min(x, upper), lower)


def attack_pgd(model, X, y, epsilon, alpha, steps, opt):
    """Looks for the worst images within epsilon of X."""
    delta = torch.zeros_like(X).uniform_(-1, 1) * epsilon
    delta.data = clamp(delta, 0.0 - X, 1.0 - X)
    delta.requires_grad = True
    for _ in range(steps):
        loss = F.cross_entropy(model(X + delta), y)
        with amp.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
        grad = delta.grad.detach()
        stepped = torch.max(torch.min(delta + alpha * torch.sign(grad), epsilon), -epsilon)
        delta.data = clamp(stepped, 0.0 - X, 1.0 - X).detach()
        delta.grad.zero_()
    return delta.detach()


def evaluate(model, X, y, epsilon, opt):
    model.eval()
    delta = attack_pgd(model, X, y, epsilon, epsilon / 4, 10, opt)
    opt.zero_grad()  # the attack left gradients behind
    with torch.no_grad():
        clean = (model(X).max(1)[1] == y).float().mean().item()
        robust = (model(X + delta).max(1)[1] == y).float().mean().item()
    return clean * 100, robust * 100


def main():
    args = get_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    X, y = load_digits(return_X_y=True)
    X = torch.from_numpy(X).float().view(-1, 1, 8, 8).to(device) / 16
    y = torch.from_numpy(y).to(device)
    epsilon = torch.tensor(args.epsilon / 16.0, device=device)
    alpha = torch.tensor(args.alpha / 16.0, device=device)

    model = Net().to(device)
    model.train()
    opt = torch.optim.SGD(model.parameters(), lr=args.lr_max, momentum=0.9, weight_decay=5e-4)
    amp_args = {"opt_level": args.opt_level, "loss_scale": args.loss_scale, "verbosity": False}
    if args.opt_level == "O2":
        amp_args["master_weights"] = args.master_weights
    model, opt = amp.initialize(model, opt, **amp_args)
    half = args.epochs * 21 / 2
    scheduler = torch.optim.lr_scheduler.CyclicLR(
        opt,
        base_lr=0,
        max_lr=args.lr_max,
        step_size_up=half,
        step_size_down=half,
        cycle_momentum=False,
    )

    for epoch in range(args.epochs):
        model.train()
        train_loss = 0.0
        for index in torch.randperm(1297).split(args.batch_size):
            images, target = X[index], y[index]
            if args.attack == "fgsm":
                delta = torch.empty_like(images).uniform_(-1, 1) * epsilon
                delta.requires_grad = True
                loss = F.cross_entropy(model(images + delta), target)
                with amp.scale_loss(loss, opt) as scaled_loss:
                    grad = torch.autograd.grad(scaled_loss, delta)[0].detach()
                delta = torch.max(torch.min(delta.data + alpha * torch.sign(grad), epsilon), -epsilon)
                images = clamp(images + delta, torch.zeros_like(images), torch.ones_like(images))
            loss = F.cross_entropy(model(images), target)
            opt.zero_grad()
            with amp.scale_loss(loss, opt) as scaled_loss:
                scaled_loss.backward()
            opt.step()
            scheduler.step()
            train_loss += loss.item() * len(index)
        print(f"{epoch} \t lr {scheduler.get_last_lr()[0]:.4f} \t loss {train_loss / 1297:.4f}")
    clean, robust = evaluate(model, X[1297:], y[1297:], epsilon, opt)
    print(f"Test Acc {clean:.2f} PGD Acc {robust:.2f}")


if __name__ == "__main__":
    main()
