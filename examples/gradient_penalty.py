"""Penalizes the gradient of the loss by the input, which takes a second derivative.

python examples/gradient_penalty.py --opt-level O5
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import ampatch as amp

EPOCHS = 20


def main():
    """Trains with the penalty and without it, and compares the input gradients on test digits."""
    parser = argparse.ArgumentParser(description="Trains with a gradient penalty.")
    parser.add_argument("--opt-level", default="O4", help="O0 to O5 (default: %(default)s)")
    level = parser.parse_args().opt_level

    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    for weight in (0.0, 0.2):
        model = train(images[:1297], labels[:1297], weight, level)
        gradient = input_gradient(model, images[1297:], labels[1297:])
        norm = gradient.square().sum(1).mean().sqrt().item()
        with torch.no_grad():
            accuracy = (model(images[1297:]).argmax(1) == labels[1297:]).float().mean().item()
        print(f"penalty {weight}: input gradient {norm:.2f} (root mean square), accuracy {accuracy:.2%}")
        amp.uninitialize()


def train(images, labels, weight, level):
    torch.set_num_threads(1)  # the net is tiny: threads would wait for each other
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(32):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            if weight:
                gradient = input_gradient(model, images[batch], labels[batch], create_graph=True)
                loss = loss + weight * gradient.square().sum(1).mean()
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    return model


def input_gradient(model, images, labels, create_graph=False):
    """Returns the gradient of each image's loss by its pixels, outside any block: unscaled.

    The losses are summed. Their mean would divide each gradient by the batch size, and what is
    small is lost in float16.
    """
    images = images.clone().requires_grad_()
    loss = F.cross_entropy(model(images), labels, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, images, create_graph=create_graph)
    return gradient


if __name__ == "__main__":
    main()
