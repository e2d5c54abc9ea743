"""Accumulates the gradients of four small batches, clips them, and takes one step.

python examples/accumulation.py --opt-level O5
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import ampatch as amp

MICRO_BATCHES, MICRO_BATCH_SIZE = 4, 16
MAX_NORM = 0.5
EPOCHS = 15


def main():
    """Trains, and says the accuracy and what clipping did."""
    parser = argparse.ArgumentParser(description="Accumulates and clips gradients.")
    parser.add_argument("--opt-level", default="O4", help="O0 to O5 (default: %(default)s)")
    options = parser.parse_args()

    torch.set_num_threads(1)  # the net is tiny: threads would wait for each other
    torch.manual_seed(0)
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=options.opt_level)

    norms = []
    for _ in range(EPOCHS):
        for batch in torch.randperm(1297).split(MICRO_BATCHES * MICRO_BATCH_SIZE):
            norm_before, norm_after = train_step(model, optimizer, images[batch], labels[batch])
            if not amp.step_was_skipped(optimizer):
                norms.append((norm_before, norm_after))
    clipped = sum(before > MAX_NORM for before, _ in norms)
    print(f"gradients were clipped in {clipped} of {len(norms)} steps")
    print(f"largest norm: {max(norms)[0]:.3f} before, {max(after for _, after in norms):.3f} after")

    with torch.no_grad():
        accuracy = (model(images[1297:]).argmax(1) == labels[1297:]).float().mean().item()
    print(f"{accuracy:.2%} of 500 test digits are right")
    amp.report(accuracy=accuracy)


def train_step(model, optimizer, images, labels):
    """Takes one step with the gradient of the whole batch; returns its norm before and after clipping."""
    optimizer.zero_grad()
    for part in torch.arange(len(images)).split(MICRO_BATCH_SIZE):
        # Each part counts by its share of the batch, so that the parts add up to the mean.
        loss = F.cross_entropy(model(images[part]), labels[part]) * len(part) / len(images)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    # Outside the blocks the gradients are unscaled: MAX_NORM means the same at every level.
    norm_before = nn.utils.clip_grad_norm_(amp.master_params(optimizer), MAX_NORM)
    grads = [param.grad for param in amp.master_params(optimizer) if param.grad is not None]
    norm_after = nn.utils.get_total_norm(grads)
    optimizer.step()
    return norm_before.item(), norm_after.item()


if __name__ == "__main__":
    main()
