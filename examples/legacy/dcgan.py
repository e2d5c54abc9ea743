"""Trains a convolutional GAN on handwritten digits: two networks, two optimizers, three losses.

ampatch run examples/legacy/dcgan.py --opt-level O1
"""

import argparse
import random

import torch
import torch.nn as nn
import torch.optim as optim
from sklearn.datasets import load_digits

try:
    from apex import amp
except ImportError:
    raise ImportError("this script needs apex: https://www.github.com/nvidia/apex") from None

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=64, help="images in a batch")
parser.add_argument("--nz", type=int, default=16, help="length of the noise vector")
parser.add_argument("--ngf", type=int, default=8)
parser.add_argument("--ndf", type=int, default=8)
parser.add_argument("--niter", type=int, default=8, help="epochs")
parser.add_argument("--lr", type=float, default=0.004, help="learning rate")
parser.add_argument("--beta1", type=float, default=0.5, help="beta1 for adam")
parser.add_argument("--netG", default="", help="path to save netG to")
parser.add_argument("--manualSeed", type=int, help="manual seed")
parser.add_argument("--opt-level", default="O1", help='amp opt_level, default="O1"')
opt = parser.parse_args()
print(opt)

if opt.manualSeed is None:
    opt.manualSeed = 2809
print("Random Seed: ", opt.manualSeed)
random.seed(opt.manualSeed)
torch.manual_seed(opt.manualSeed)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        m.weight.data.normal_(0.0, 0.05)
    elif classname.find("BatchNorm") != -1:
        m.weight.data.normal_(1.0, 0.02)
        m.bias.data.fill_(0)


class Generator(nn.Module):
    def __init__(self, nz, ngf):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.Conv2d(ngf, 1, 3, 1, 1),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self, ndf):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 2, 1, 0, bias=False),
        )

    def forward(self, images):
        return self.main(images).view(-1, 1).squeeze(1)


digits, classes = load_digits(return_X_y=True)
dataset = torch.from_numpy(digits).float().view(-1, 1, 8, 8).to(device) / 8 - 1
classes = torch.from_numpy(classes).to(device)

netG = Generator(opt.nz, opt.ngf).to(device)
netG.apply(weights_init)
netD = Discriminator(opt.ndf).to(device)
netD.apply(weights_init)
print(netG, netD)

criterion = nn.BCEWithLogitsLoss()
fixed_noise = torch.randn(500, opt.nz, 1, 1, device=device)
real_label, fake_label = 1.0, 0.0

optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))

[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG], [optimizerD, optimizerG], opt_level=opt.opt_level, num_losses=3
)


def report(when):
    """Prints how far generated digits are from real ones, and how many classes of digits they resemble."""
    netG.eval()
    with torch.no_grad():
        fake = netG(fixed_noise).float()
    netG.train()
    nearest = torch.cdist(fake.flatten(1), dataset.flatten(1)).min(1)
    print(f"{when}: distance {nearest.values.mean():.3f} kinds {len(classes[nearest.indices].unique())}")


report("untrained")
for epoch in range(opt.niter):
    for index in torch.randperm(len(dataset)).split(opt.batchSize):
        # ---- The discriminator learns to tell real images ...
        netD.zero_grad()
        real = dataset[index.to(device)]
        label = torch.full((real.size(0),), real_label, device=device)
        output = netD(real)
        errD_real = criterion(output, label)
        with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
            errD_real_scaled.backward()
        D_x = output.mean().item()

        # ... from generated ones; their gradients add up, and one step takes both.
        noise = torch.randn(real.size(0), opt.nz, 1, 1, device=device)
        fake = netG(noise)
        label.fill_(fake_label)
        output = netD(fake.detach())
        errD_fake = criterion(output, label)
        with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
            errD_fake_scaled.backward()
        D_G_z1 = output.mean().item()
        errD = errD_real + errD_fake
        optimizerD.step()

        # ---- The generator learns to pass for real.
        netG.zero_grad()
        label.fill_(real_label)
        output = netD(fake)
        errG = criterion(output, label)
        with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
            errG_scaled.backward()
        D_G_z2 = output.mean().item()
        optimizerG.step()
    print(
        f"[{epoch}/{opt.niter}] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f} "
        f"D(x): {D_x:.4f} D(G(z)): {D_G_z1:.4f} / {D_G_z2:.4f}"
    )
report("trained")
if opt.netG:
    torch.save(netG.state_dict(), opt.netG)
