"""Bilinear pooling of handwritten digits under torch.autocast: a product of features above 1000.

ampatch doctor examples/bilinear_pooling.py
python examples/bilinear_pooling.py --fixed
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

CHANNELS = 16


class BilinearPooling(nn.Module):
    """How the channels of an image go together: their products, summed over positions, at length 1."""

    def __init__(self, fixed):
        super().__init__()
        self.fixed = fixed

    def forward(self, features):
        """Takes (batch, CHANNELS, positions) and returns (batch, CHANNELS * CHANNELS)."""
        if self.fixed:  # lengths are divided out below, so that this changes nothing else
            features = features / features.abs().amax((1, 2), keepdim=True).clamp(min=1)
        products = features @ features.transpose(1, 2)
        return F.normalize(products.flatten(1), dim=-1)


class Net(nn.Module):
    """Convolutions, bilinear pooling, and the scores of ten classes."""

    def __init__(self, fixed):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, CHANNELS, 3, padding=1), nn.ReLU())
        self.pooling = BilinearPooling(fixed)
        self.head = nn.Linear(CHANNELS * CHANNELS, 10)

    def forward(self, images):
        """Takes (batch, 1, 8, 8)."""
        return self.head(16 * self.pooling(self.features(images).flatten(2)))


def main():
    """Trains, and says the first and the last loss."""
    parser = argparse.ArgumentParser(description="Trains bilinear pooling on handwritten digits.")
    parser.add_argument("--fixed", action="store_true", help="divide before the product")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the net is tiny: threads would wait for each other
    torch.manual_seed(0)
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = images.float().view(-1, 1, 8, 8) * 256  # 12 bits a pixel, as X-rays
    model = Net(options.fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for batch in torch.randperm(len(images)).split(64)[:24]:
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
        losses.append(loss.item())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(f"loss: {losses[0]:.2f} at first, {losses[-1]:.2f} at last")


if __name__ == "__main__":
    main()
