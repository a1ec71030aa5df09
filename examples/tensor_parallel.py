"""Train a classifier of digits whose layers are split over the two processes of each replica:
flockstep launch -n 4 --replica-size 2 tensor_parallel.py.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import flockstep

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=15)
given = parser.parse_args()

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
loader = DataLoader(TensorDataset(images[:1437], labels[:1437]), batch_size=32, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
mesh = flockstep.replica().mesh(("tensor",))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
loss_fn = nn.CrossEntropyLoss()
optimizer = flockstep.distribute(model, optimizer, "local_sgd(period=8)")

for _ in range(given.epochs):
    for x, y in flockstep.shard(loader):  # both processes of a replica read the same batch
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

optimizer.finish()
accuracy = (model(images[1437:]).argmax(1) == labels[1437:]).float().mean().item()
if flockstep.is_main():
    print(f"test accuracy {accuracy:.3f}")
