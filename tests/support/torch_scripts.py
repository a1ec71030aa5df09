"""A PyTorch script with dropout, momentum, a schedule, batch norm and shuffled samples."""

from __future__ import annotations

from pathlib import Path

SCRIPT = """
import random, sys, time
from pathlib import Path
import numpy as np
import torch
from torch import nn
import flockstep

HERE = Path(__file__).parent
STRATEGY, EPOCHS = sys.argv[1], int(sys.argv[2])
rank = flockstep.rank()

def samples(seed=1):
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(160, 6, generator=stream), torch.randn(160, 2, generator=stream)

torch.manual_seed(7 + rank)
random.seed(8 + rank)
np.random.seed(9 + rank)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples()), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 2))
inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = flockstep.distribute(model, inner, STRATEGY, buffers="local")
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
saved = flockstep.resumed() or {"epoch": 0, "batch": 0}
print("begins at epoch", saved["epoch"], flush=True)
if "scheduler" in saved:
    scheduler.load_state_dict(saved["scheduler"])
steps = 0
for epoch in range(saved["epoch"], EPOCHS):
    for batch, (x, y) in enumerate(flockstep.shard(loader, epoch)):
        if (epoch, batch) < (saved["epoch"], saved["batch"]):
            continue
        flockstep.checkpoint({"epoch": epoch, "batch": batch, "scheduler": scheduler.state_dict()})
        if not (HERE / "go").exists():
            time.sleep(0.03)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x + random.random() + np.random.random()), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        steps += 1
        (HERE / f"count-{rank}").write_text(str(steps))
optimizer.finish()
momenta = [state["momentum_buffer"] for state in inner.state.values() if state]
torch.save([*model.state_dict().values(), *momenta], HERE / f"end-{rank}")
(HERE / f"steps-{rank}").write_text(str(steps))
"""
"""Arguments: strategy, and epochs of 10 steps; a step takes at least 30 ms until the file `go` is there."""


def write_script(folder: Path) -> str:
    """Write the script to a folder; return its path."""
    (folder / "script.py").write_text(SCRIPT)
    return str(folder / "script.py")


SCHEDULES = ("none", "step", "epoch", "warm-up")
"""Schedules of the learning rate that `write_scheduled_script` knows."""
SCHEDULED = """
import sys, time
from pathlib import Path
import torch
from torch.optim import lr_scheduler
import flockstep

HERE = Path(__file__).parent
STRATEGY, SCHEDULE, STEPS = sys.argv[1], sys.argv[2], int(sys.argv[3])
rank = flockstep.rank()
torch.manual_seed(rank)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
optimizer = flockstep.distribute(model, optimizer, STRATEGY)
factor = {
    "none": lambda step: 1.0,
    "step": lambda step: 0.99**step,
    "epoch": lambda step: 0.9 ** (step // 10),
    "warm-up": lambda step: (step + 1) / STEPS,
}[SCHEDULE]
scheduler = lr_scheduler.LambdaLR(optimizer, factor)
saved = flockstep.resumed() or {"step": 0}
if "scheduler" in saved:
    scheduler.load_state_dict(saved["scheduler"])
for step in range(saved["step"], STEPS):
    flockstep.checkpoint({"step": step, "scheduler": scheduler.state_dict()})
    assert optimizer.param_groups[0]["lr"] == 0.1 * factor(step), f"the learning rate of step {step} is another"
    (HERE / f"at-{rank}").write_text(str(step))
    if not (HERE / "go").exists():
        time.sleep(0.005 + 0.005 * rank)
    elif step == int((HERE / "go").read_text()):
        break
    x = torch.randn(8, 4)
    optimizer.zero_grad()
    (model(x) - x[:, :3]).square().mean().backward()
    optimizer.step()
    scheduler.step()
optimizer.finish()
"""
"""Arguments: strategy, schedule and largest number of steps. Ranks step at different speeds and write their step to the
file `at-RANK` until the file `go` names the step at which all ranks end.
"""


def write_scheduled_script(folder: Path) -> str:
    """Write the script with a schedule to a folder; return its path."""
    (folder / "scheduled.py").write_text(SCHEDULED)
    return str(folder / "scheduled.py")


def end_scheduled_script(folder: Path) -> None:
    """Let all ranks of the script with a schedule end at one step, which none of them has reached."""
    last = max(int(file.read_text() or 0) for file in folder.glob("at-*")) + 100
    (folder / "half").write_text(str(last))
    (folder / "half").rename(folder / "go")
