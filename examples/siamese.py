"""Pairs of handwritten digits, whose distance has an infinite derivative when a digit meets itself.

ampatch doctor examples/siamese.py
python examples/siamese.py --fixed
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import ampatch as amp


class Embedding(nn.Module):
    """Puts images of the same digit near each other."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, images):
        """Takes (batch, 64) and returns (batch, 16)."""
        return self.layers(images)


def distance(first, second, eps):
    """Returns the Euclidean distances of two batches."""
    return ((first - second).float().pow(2).sum(-1) + eps).sqrt()


def main():
    """Trains, and says the losses and how many steps were skipped."""
    parser = argparse.ArgumentParser(description="Trains a siamese network on handwritten digits.")
    parser.add_argument("--opt-level", default="O2")
    parser.add_argument("--fixed", action="store_true", help="add an eps under the root")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the net is tiny: threads would wait for each other
    torch.manual_seed(0)
    images, labels = (torch.tensor(array)[:400] for array in load_digits(return_X_y=True))
    images = images.float() / 16
    model = Embedding()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = amp.initialize(model, optimizer, opt_level=options.opt_level)
    losses, skipped = [], 0
    for _ in range(40):
        first, second = torch.randint(len(images), (2, 128))  # now and then an image meets itself
        apart = distance(model(images[first]), model(images[second]), 1e-6 if options.fixed else 0)
        same = labels[first] == labels[second]
        loss = torch.where(same, apart, F.relu(2 - apart)).pow(2).mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        skipped += amp.step_was_skipped(optimizer)
    print(f"loss: {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
    print(f"{skipped} of {len(losses)} steps were skipped")


if __name__ == "__main__":
    main()
