"""A variational autoencoder of digits."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import flockstep


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = (
            nn.Sequential(nn.Linear(64, 64), nn.ReLU()),
            nn.Sequential(nn.Linear(8, 64), nn.ReLU()),
        )
        self.mean, self.spread, self.out = nn.Linear(64, 8), nn.Linear(64, 8), nn.Linear(64, 64)

    def forward(self, x):
        hidden = self.encode(x)
        mean, spread = self.mean(hidden), self.spread(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * spread)
        return self.out(self.decode(z)), mean, spread


def loss_of(x, logits, mean, spread):
    divergence = -0.5 * torch.sum(1 + spread - mean**2 - spread.exp())
    return (functional.binary_cross_entropy_with_logits(logits, x, reduction="sum") + divergence) / len(x)


torch.manual_seed(flockstep.rank())
images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
loader = flockstep.shard(DataLoader(images, batch_size=32, shuffle=True))
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = flockstep.distribute(model, optimizer, sys.argv[1])

for _ in range(4):
    for x in loader:
        optimizer.zero_grad()
        loss_of(x, *model(x)).backward()
        optimizer.step()
optimizer.finish()

with torch.no_grad():
    print(float(loss_of(images, *model(images))))
