"""Linear attention on handwritten digits, whose sums over positions overflow in float16.

ampatch doctor examples/linear_attention.py
python examples/linear_attention.py --fixed
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import ampatch as amp

WIDTH = 32


class LinearAttention(nn.Module):
    """Attention without softmax: q (k' v) / q (sum of k), in time linear in the number of positions."""

    def __init__(self, fixed):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.fixed = fixed

    def forward(self, x):
        """Takes and returns (batch, positions, WIDTH)."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = F.relu(q) + 1e-2, F.relu(k) + 1e-2
        if self.fixed:  # the result is the same, and the sums are means of numbers below 1
            q, k = q / q.amax((1, 2), keepdim=True), k / k.amax((1, 2), keepdim=True) / k.shape[1]
        total = q @ k.sum(1, keepdim=True).transpose(1, 2)
        return q @ (k.transpose(1, 2) @ v) / total


class Net(nn.Module):
    """The 64 pixels of an image attend to each other."""

    def __init__(self, fixed):
        super().__init__()
        self.pixels, self.places = nn.Linear(1, WIDTH), nn.Parameter(torch.randn(64, WIDTH))
        self.attention = LinearAttention(fixed)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images):
        """Takes (batch, 64) and returns the scores of ten classes."""
        x = self.pixels(images.unsqueeze(-1)) + self.places
        return self.head(F.relu(x + self.attention(x)).mean(1))


def main():
    """Trains, and says the first and the last loss."""
    parser = argparse.ArgumentParser(description="Trains linear attention on handwritten digits.")
    parser.add_argument("--opt-level", default="O2")
    parser.add_argument("--fixed", action="store_true", help="divide before the sums")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the net is tiny: threads would wait for each other
    torch.manual_seed(0)
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = images.float() * 4  # not normalized: 0 to 64
    model = Net(options.fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=options.opt_level)
    losses = []
    for batch in torch.randperm(len(images)).split(64)[:24]:
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        losses.append(loss.item())
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    print(f"loss: {losses[0]:.2f} at first, {losses[-1]:.2f} at last")


if __name__ == "__main__":
    main()
