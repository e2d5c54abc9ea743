"""Stops in the middle of a training run, resumes in fresh objects, and compares bit by bit.

python examples/resume.py --opt-level O5
"""

import argparse
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import ampatch as amp

STEPS = 100
IMAGES, LABELS = (torch.tensor(array) for array in load_digits(return_X_y=True))


def main():
    """Trains without a stop, then with one, and says whether the two agree."""
    parser = argparse.ArgumentParser(description="Resumes a run bit by bit.")
    parser.add_argument("--opt-level", default="O2", help="O0 to O5 (default: %(default)s)")
    level = parser.parse_args().opt_level

    model, optimizer = build(level, seed=0)
    losses = train(model, optimizer, range(STEPS))
    weights, scalers = model.state_dict(), amp.state_dict()
    amp.uninitialize()

    with tempfile.TemporaryFile() as file:
        model, optimizer = build(level, seed=0)
        first_losses = train(model, optimizer, range(STEPS // 2))
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
        torch.save(states, file)
        amp.uninitialize()

        model, optimizer = build(level, seed=1)  # other weights: all must come from the file
        file.seek(0)
        states = torch.load(file)
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
        amp.load_state_dict(states["amp"])
        last_losses = train(model, optimizer, range(STEPS // 2, STEPS))

    resumed = model.state_dict()
    print(f"loss: {losses[0]:.4f} at first, {losses[-1]:.4f} after {STEPS} steps")
    print(f"losses bit-equal: {first_losses + last_losses == losses}")
    print(f"weights bit-equal: {all(torch.equal(weights[name], resumed[name]) for name in weights)}")
    print(f"loss scalers equal: {amp.state_dict() == scalers}")


def build(level, seed):
    torch.set_num_threads(1)  # the net is tiny: threads would wait for each other
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)


def train(model, optimizer, steps):
    """Makes the steps with these numbers, and returns their losses."""
    losses = []
    for step in steps:
        batch = torch.randperm(len(IMAGES), generator=torch.Generator().manual_seed(step))[:64]
        loss = F.cross_entropy(model(IMAGES[batch].float() / 16), LABELS[batch])
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
