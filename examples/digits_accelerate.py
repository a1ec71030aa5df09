"""Train a small network on handwritten digits in a loop with Accelerate: flockstep launch -n 2 digits_accelerate.py."""

import torch
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flockstep.accelerate import FlockstepAccelerator

accelerator = FlockstepAccelerator("local_sgd(period=8)", cpu=True)
set_seed(0)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
loader = DataLoader(TensorDataset(images[:1437], labels[:1437]), batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for _ in range(15):
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

accelerator.finish()
accuracy = (model(images[1437:]).argmax(1) == labels[1437:]).float().mean().item()
accelerator.print(f"test accuracy {accuracy:.3f}")
