"""A GPT of characters in the style of nanoGPT: autocast, gradient accumulation, clipping, warm-up and cosine decay."""

import math
import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import flockstep

BATCH, BLOCK, WIDTH, HEADS, LAYERS = 8, 32, 32, 4, 2
ACCUMULATE, STEPS, WARM_UP, RATE, CLIP = 2, 40, 5, 1e-2, 1.0

text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="ascii", errors="ignore")
symbols = sorted(set(text))
data = torch.tensor([symbols.index(one) for one in text])
train, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def draw(source):
    starts = torch.randint(len(source) - BLOCK - 1, (BATCH,)).tolist()
    x = torch.stack([source[at : at + BLOCK] for at in starts])
    return x, torch.stack([source[at + 1 : at + BLOCK + 1] for at in starts])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        heads = [part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.attention(self.first(x)).chunk(3, 2)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(len(symbols), WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(symbols), bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, x, y):
        hidden = self.token(x) + self.position(torch.arange(x.shape[1]))
        return functional.cross_entropy(self.head(self.norm(self.blocks(hidden))).flatten(0, 1), y.flatten())


torch.manual_seed(1337 + flockstep.rank())
model = GPT()
decayed = [p for p in model.parameters() if p.dim() > 1]
groups = [{"params": decayed}, {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
optimizer = flockstep.distribute(model, optimizer, sys.argv[1])

for step in range(STEPS):
    rate = RATE * min((step + 1) / WARM_UP, 0.55 + 0.45 * math.cos(math.pi * step / STEPS))
    for group in optimizer.param_groups:
        group["lr"] = rate
    for _ in range(ACCUMULATE):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(*draw(train)) / ACCUMULATE
        loss.backward()
    flockstep.clip_grad_norm_(optimizer, CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
optimizer.finish()

with torch.no_grad():
    print(float(sum(model(*draw(held_out)) for _ in range(8)) / 8))
