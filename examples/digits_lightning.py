"""Train a small network on handwritten digits with Lightning's Trainer: flockstep launch -n 2 digits_lightning.py."""

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flockstep.lightning import FlockstepStrategy


class Classifier(pl.LightningModule):
    """A network of two layers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, _):
        """Loss of one mini-batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, _):
        """Accuracy of the common model, over all ranks."""
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        """The optimizer, as without flockstep."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
train, test = TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])
trainer = pl.Trainer(
    strategy=FlockstepStrategy("local_sgd(period=8)"),
    max_epochs=15,
    gradient_clip_val=1.0,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=180))
if trainer.is_global_zero:
    print(f"test accuracy {float(trainer.callback_metrics['accuracy']):.3f}")
