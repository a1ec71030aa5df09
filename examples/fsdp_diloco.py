"""Train a small GPT whose replicas are sharded by FSDP2, and exchange models every 20 steps (DiLoCo):
flockstep launch -n 4 --replica-size 2 fsdp_diloco.py [--large].
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import flockstep

parser = argparse.ArgumentParser()
parser.add_argument("--large", action="store_true", help="about 32 million parameters")
parser.add_argument("--steps", type=int, default=60)
given = parser.parse_args()
width, layers, heads, context, batch = (512, 10, 8, 128, 8) if given.large else (64, 2, 4, 32, 8)


class GPT(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        block = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, heads, 4 * width, **block) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(codes.shape[1])
        hidden = self.bytes(codes) + self.places(torch.arange(codes.shape[1]))
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden.flatten(0, 1))


torch.manual_seed(0)
sources = sorted(Path(nn.__file__).parent.glob("modules/*.py"))
text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, sources))), dtype=torch.uint8).long()
windows = text[: len(text) // (context + 1) * (context + 1)].view(-1, context + 1)
loader = torch.utils.data.DataLoader(windows, batch, shuffle=True, drop_last=True)

model = GPT()
mesh = flockstep.replica().mesh(("shard",))
for layer in model.blocks:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = flockstep.distribute(model, optimizer, "local_sgd(period=20, outer_optimizer=nesterov)")

step = 0
while step < given.steps:
    for codes in flockstep.shard(loader, among="shard"):
        step += 1
        loss = nn.functional.cross_entropy(model(codes[:, :-1]), codes[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if flockstep.is_main() and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f} nats per byte", flush=True)
        if step == given.steps:
            break
optimizer.finish()
