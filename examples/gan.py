"""Trains a GAN on digits: two models, two optimizers, three losses with a loss scale each.

python examples/gan.py --opt-level O2
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import ampatch as amp

EPOCHS, BATCH_SIZE, NOISE_SIZE = 40, 64, 16
REAL, FAKE = 1.0, 0.0


def main():
    """Trains, and says how near the generated images are to real ones."""
    parser = argparse.ArgumentParser(description="Trains a GAN on digits.")
    parser.add_argument("--opt-level", default="O4", help="O0 to O5 (default: %(default)s)")
    level = parser.parse_args().opt_level

    torch.set_num_threads(1)  # the net is tiny: threads would wait for each other
    torch.manual_seed(0)
    digits = torch.tensor(load_digits(return_X_y=True)[0]).float() / 8 - 1
    train_digits, test_digits = digits[:1297], digits[1297:]
    generator = nn.Sequential(nn.Linear(NOISE_SIZE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh())
    critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    models = [generator, critic]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5) for model in models]
    models, optimizers = amp.initialize(models, optimizers, opt_level=level, num_losses=3)

    noise = torch.randn(500, NOISE_SIZE)
    print(f"distance to the nearest digit, untrained: {distance(generator(noise), train_digits):.2f}")
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(train_digits)).split(BATCH_SIZE):
            train_step(models, optimizers, train_digits[batch])
    print(f"distance to the nearest digit, trained: {distance(generator(noise), train_digits):.2f}")
    print(f"distance to the nearest digit, real digits: {distance(test_digits, train_digits):.2f}")
    print(f"loss scales: {[amp.get_loss_scale(loss_id) for loss_id in range(3)]}")


def train_step(models, optimizers, digits):
    """Improves the critic by two losses, then the generator by a third."""
    (generator, critic), (generator_optimizer, critic_optimizer) = models, optimizers
    fakes = generator(torch.randn(len(digits), NOISE_SIZE))
    critic_optimizer.zero_grad()
    with amp.scale_loss(judge(critic, digits, REAL), critic_optimizer, loss_id=0) as scaled_loss:
        scaled_loss.backward()
    with amp.scale_loss(judge(critic, fakes.detach(), FAKE), critic_optimizer, loss_id=1) as scaled_loss:
        scaled_loss.backward()
    critic_optimizer.step()

    generator_optimizer.zero_grad()
    # This reaches the critic's parameters too; its next zero_grad() clears what it leaves there.
    with amp.scale_loss(judge(critic, fakes, REAL), generator_optimizer, loss_id=2) as scaled_loss:
        scaled_loss.backward()
    generator_optimizer.step()


def judge(critic, images, truth):
    logits = critic(images)
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, truth))


@torch.no_grad()
def distance(images, digits):
    return torch.cdist(images, digits).min(dim=1).values.mean().item()


if __name__ == "__main__":
    main()
