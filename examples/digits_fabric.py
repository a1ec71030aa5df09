"""Train a small network on handwritten digits in a loop with Fabric: flockstep launch -n 2 digits_fabric.py."""

import torch
from lightning_fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flockstep.lightning import FlockstepFabricStrategy

fabric = Fabric(strategy=FlockstepFabricStrategy("local_sgd(period=8)"), accelerator="cpu")
fabric.launch()
fabric.seed_everything(0)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
train = TensorDataset(images[:1437], labels[:1437])
loader = fabric.setup_dataloaders(DataLoader(train, batch_size=32, shuffle=True))

for _ in range(15):
    for x, y in loader:
        fabric.backward(nn.functional.cross_entropy(model(x), y))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

optimizer.finish()
accuracy = (model(images[1437:]).argmax(1) == labels[1437:]).float().mean().item()
fabric.print(f"test accuracy {accuracy:.3f}")
