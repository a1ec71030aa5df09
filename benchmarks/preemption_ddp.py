"""The job of `preemption.py` under DistributedDataParallel, with checkpoints: preemption_ddp.py FOLDER CHECKPOINTS
EVALUATIONS TARGET STEP.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from preemption_job import paced
from torch.nn.parallel import DistributedDataParallel

TIMEOUT = timedelta(seconds=30)
"""Time after which gloo gives a connection or a sum up, so that torchrun starts the workers again; by default half an
hour, for which some restarts have hung.
"""


def main(folder: Path, checkpoints: int, evaluations: int, target: float, seconds: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, workers = dist.get_rank(), dist.get_world_size()
    digits = paced(seconds)
    data, lr = digits.data(), digits.optimizer.lr
    model = DistributedDataParallel(digits.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    train_x, train_y, test_x, test_y = map(torch.as_tensor, (data.train_x, data.train_y, data.test_x, data.test_y))
    file, step = folder / "state.pt", 0
    if file.exists():
        state = torch.load(file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while True:
        epoch, batch = divmod(step, len(train_x) // (workers * digits.batch))
        order = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(epoch))
        start = (batch * workers + rank) * digits.batch
        index = order[start : start + digits.batch]
        optimizer.zero_grad()
        digits.loss(model(train_x[index]), train_y[index]).backward()
        optimizer.step()
        step += 1
        if rank:
            continue
        (folder / "stepped").write_text(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if step % checkpoints == 0:
            half = folder / "state.half"
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, half)
            half.replace(file)
        if step % evaluations == 0:
            with torch.no_grad():
                accuracy = (model.module(test_x).argmax(1) == test_y).float().mean().item()
            if accuracy >= target:
                (folder / "reached").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:4]), *map(float, sys.argv[4:]))
