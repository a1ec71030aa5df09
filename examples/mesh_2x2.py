"""Train a classifier of digits whose layers are split over two processes of each replica (tensor parallelism), and
sharded over two such pairs (FSDP2):
flockstep launch -n 8 --replica-size 4 mesh_2x2.py.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import flockstep

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
given = parser.parse_args()


class Block(nn.Module):
    """Two layers beside a connection that skips them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
loader = DataLoader(TensorDataset(images[:1437], labels[:1437]), batch_size=32, shuffle=True, drop_last=True)

replica = flockstep.replica()
mesh = replica.mesh(("dp", "tp"), (2, 2) if replica.size == 4 else (replica.size, 1))
blocks = [Block(64) for _ in range(2)]
model = nn.Sequential(*blocks, nn.Linear(64, 10))
for block in blocks:
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
optimizer = flockstep.distribute(model, optimizer, "local_sgd(period=8)")

for _ in range(given.epochs):
    for x, y in flockstep.shard(loader, among="dp"):  # both processes along "tp" read the same batch
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        flockstep.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()

optimizer.finish()
accuracy = (model(images[1437:]).argmax(1) == labels[1437:]).float().mean().item()
if flockstep.is_main():
    print(f"test accuracy {accuracy:.3f}")
