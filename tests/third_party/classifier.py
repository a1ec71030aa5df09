"""An image classifier: a small convolutional network with BatchNorm on digits, SGD, and a learning-rate schedule."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flockstep

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
train, test = TensorDataset(images[:1440], labels[:1440]), (images[1440:], labels[1440:])
loader = flockstep.shard(DataLoader(train, batch_size=32, shuffle=True))

model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1, bias=False),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(16 * 4 * 4, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
optimizer = flockstep.distribute(model, optimizer, sys.argv[1])
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2], gamma=0.1)

for _ in range(3):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    scheduler.step()
optimizer.finish()

model.eval()
with torch.no_grad():
    print(float(functional.cross_entropy(model(test[0]), test[1])))
