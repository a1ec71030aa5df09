"""A generative adversarial network of digits: two models, each with its optimizer."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import flockstep

torch.manual_seed(flockstep.rank())
images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
loader = flockstep.shard(DataLoader(images, batch_size=32, shuffle=True))
generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=3e-3, betas=(0.5, 0.999))
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=3e-3, betas=(0.5, 0.999))
of_generator = flockstep.distribute(generator, of_generator, sys.argv[1])
of_discriminator = flockstep.distribute(discriminator, of_discriminator, sys.argv[1])


def loss_of(scores, real):
    return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


for _ in range(5):
    for x in loader:
        fake = generator(torch.randn(len(x), 16))
        of_discriminator.zero_grad()
        scores = discriminator(torch.cat([x, fake.detach()]))
        (loss_of(scores[: len(x)], True) + loss_of(scores[len(x) :], False)).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        loss_of(discriminator(fake), True).backward()
        of_generator.step()
of_generator.finish()
of_discriminator.finish()

with torch.no_grad():
    print(float((generator(torch.randn(1000, 16)).mean(0) - images.mean(0)).square().mean()))
