"""A language model of words with an LSTM whose hidden state is carried from one batch to the next."""

import re
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import flockstep

COLUMNS, LENGTH, WORDS = 16, 12, 200

text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="ascii", errors="ignore")
words = re.findall(r"\w+|[^\w\s]", text)[:9000]
number = {word: at for at, (word, _) in enumerate(Counter(words).most_common(WORDS - 1), 1)}
codes = torch.tensor([number.get(word, 0) for word in words])
corpus = codes[: len(codes) // COLUMNS * COLUMNS].view(COLUMNS, -1).t().contiguous()
corpus = corpus[:, flockstep.rank() :: flockstep.workers()]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.out = nn.Embedding(WORDS, 32), nn.LSTM(32, 32), nn.Linear(32, WORDS)

    def forward(self, x, state):
        hidden, state = self.lstm(self.embed(x), state)
        return self.out(hidden), state


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = flockstep.distribute(model, optimizer, sys.argv[1])


def epoch(train):
    state, total, count = None, 0.0, 0
    for at in range(0, len(corpus) - LENGTH - 1, LENGTH):
        x, y = corpus[at : at + LENGTH], corpus[at + 1 : at + LENGTH + 1]
        state = None if state is None else tuple(part.detach() for part in state)
        scores, state = model(x, state)
        loss = functional.cross_entropy(scores.flatten(0, 1), y.flatten())
        if train:
            optimizer.zero_grad()
            loss.backward()
            flockstep.clip_grad_norm_(optimizer, 0.25)
            optimizer.step()
        total, count = total + float(loss.detach()), count + 1
    return total / count


for _ in range(2):
    epoch(train=True)
optimizer.finish()
print(epoch(train=False))
