"""Word embeddings: skip-grams with negative samples, and gradients that are sparse."""

import re
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flockstep

WORDS, WINDOW, NEGATIVE = 300, 2, 5

text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="ascii", errors="ignore")
words = re.findall(r"[a-z]+", text.lower())[:6000]
number = {word: at for at, (word, _) in enumerate(Counter(words).most_common(WORDS))}
codes = [number[word] for word in words if word in number]
pairs = [(codes[at], codes[at + by]) for at in range(len(codes) - WINDOW) for by in range(1, WINDOW + 1)]
data = TensorDataset(torch.tensor(pairs))


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Embedding(WORDS, 16, sparse=True), nn.Embedding(WORDS, 16, sparse=True)

    def forward(self, centers, others):
        return (self.inner(centers)[:, None] * self.outer(others)).sum(-1)


def loss_of(model, pairs):
    others = torch.cat([pairs[:, 1:], torch.randint(WORDS, (len(pairs), NEGATIVE))], dim=1)
    scores = model(pairs[:, 0], others)
    return -(functional.logsigmoid(scores[:, 0]) + functional.logsigmoid(-scores[:, 1:]).sum(1)).mean()


torch.manual_seed(flockstep.rank())
loader = flockstep.shard(DataLoader(data, batch_size=64, shuffle=True))
model = SkipGram()
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
optimizer = flockstep.distribute(model, optimizer, sys.argv[1])

for (batch,) in loader:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()
optimizer.finish()

with torch.no_grad():
    print(float(loss_of(model, data.tensors[0])))
