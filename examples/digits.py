"""Trains a multilayer perceptron on real handwritten digits at any opt level.

python examples/digits.py --opt-level O2
ampatch sweep examples/digits.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F

import ampatch as amp

BATCH_SIZE = 128
LEARNING_RATE = 0.1


def main():
    """Trains, evaluates, and says the accuracy."""
    options = parse_options()
    torch.manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_images, test_images, train_labels, test_labels = load_images(device)
    model = build_model(options.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, nesterov=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level=options.opt_level)
    steps = options.epochs * (len(train_images) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for _ in range(options.epochs):
        train_epoch(model, optimizer, schedule, train_images, train_labels)
    accuracy = evaluate(model, test_images, test_labels)
    print(f"{accuracy:.2%} of {len(test_images)} test digits are right")
    amp.report(accuracy=accuracy)


def parse_options():
    parser = argparse.ArgumentParser(description="Trains on handwritten digits.")
    parser.add_argument("--opt-level", default="O1", help="O0 to O5 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024, help="of the hidden layers (default: %(default)s)")
    return parser.parse_args()


def load_images(device):
    """Returns 1297 digits of 64 pixels to train on and 500 to test on; always the same."""
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    parts = train_test_split(images, labels, test_size=500, random_state=0, stratify=labels)
    return [torch.as_tensor(part, device=device) for part in parts]


def build_model(width):
    return nn.Sequential(
        *(nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU()),
        *(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()),
        nn.Linear(width, 10),
    )


def train_epoch(model, optimizer, schedule, images, labels):
    order = torch.randperm(len(images), device=images.device)
    for batch in order[: len(order) // BATCH_SIZE * BATCH_SIZE].split(BATCH_SIZE):
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def evaluate(model, images, labels):
    model.eval()
    return (model(images).argmax(1) == labels).float().mean().item()


if __name__ == "__main__":
    main()
