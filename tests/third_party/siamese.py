"""A siamese network: both images of a pair pass through the same weights, and a contrastive loss compares them."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

import flockstep


class Pairs(Dataset):
    """Digit i with another one, which is of the same class if i is even."""

    def __init__(self):
        digits = load_digits()
        self.images, self.labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
        self.of_class = [torch.nonzero(self.labels == label).flatten() for label in range(10)]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, at):
        label = int(self.labels[at])
        there = self.of_class[label if at % 2 == 0 else (label + 1 + at % 9) % 10]
        return self.images[at], self.images[there[(7 * at) % len(there)]], float(at % 2 == 0)


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, one, other):
        return (self.branch(one) - self.branch(other)).norm(dim=1)


def loss_of(distance, same):
    return (same * distance**2 + (1 - same) * torch.relu(2 - distance) ** 2).mean()


torch.manual_seed(0)
loader = flockstep.shard(DataLoader(Pairs(), batch_size=32, shuffle=True))
model = Siamese()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
optimizer = flockstep.distribute(model, optimizer, sys.argv[1])

for _ in range(5):
    for one, other, same in loader:
        optimizer.zero_grad()
        loss_of(model(one, other), same).backward()
        optimizer.step()
optimizer.finish()

with torch.no_grad():
    one, other, same = next(iter(DataLoader(Pairs(), batch_size=2000)))
    print(float(loss_of(model(one, other), same)))
