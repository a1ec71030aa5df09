"""Scripts that step together end with the parameters that DistributedDataParallel gives them, up to rounding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.processes import RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

HERE = Path(__file__).parent
SAVED = """
import os
import sys
from pathlib import Path
import torch
import flockstep

text, name = {text!r}, {name!r}
if name == "theirs":
    torch.distributed.init_process_group("gloo")
space = {{"__name__": "__main__"}}
exec(compile(text, "script", "exec"), space)
torch.save([p.detach() for p in space["model"].parameters()], Path(__file__).parent / f"{{name}}-{{flockstep.rank()}}")
if name == "theirs":
    torch.distributed.destroy_process_group()
"""
"""A script that runs another one, and saves the parameters with which it ends."""
INSTEAD = {
    "import flockstep\n": "import flockstep\nfrom torch.nn.parallel import DistributedDataParallel\n",
    "optimizer = flockstep.distribute(model, optimizer, sys.argv[1])": "model = DistributedDataParallel(model)",
    "flockstep.clip_grad_norm_(optimizer, CLIP)": "nn.utils.clip_grad_norm_(model.parameters(), CLIP)",
    "optimizer.finish()": "",
    "for _ in range(ACCUMULATE):\n": "for micro in range(ACCUMULATE):\n"
    "        model.require_backward_grad_sync = micro == ACCUMULATE - 1\n",
}
WIDE = {
    "torch.manual_seed(": "torch.set_default_dtype(torch.float64)\ntorch.manual_seed(",
    "dtype=torch.float32": "dtype=torch.float64",
    'with torch.autocast("cpu", torch.bfloat16):': "if True:",
}
"""Changes of a script that computes in float64: Adam divides by the size of a gradient, and so enlarges what rounding
changes if a sum has another order.
"""


def trained(
    name: str, strategy: str, folder: Path, *, ours: str | None = None, workers: int = 2
) -> list[list[torch.Tensor]]:
    """For each worker, all parameters as the script leaves them, or another one in its place, and as DDP does."""
    plain = (HERE / f"{name}.py").read_text()
    for line, other in WIDE.items() if workers > 2 else ():
        plain = plain.replace(line, other)
    theirs = plain
    for line, other in INSTEAD.items():
        theirs = theirs.replace(line, other)
    assert "flockstep.distribute" not in theirs
    assert "flockstep.clip" not in theirs
    for name, text in (("ours", ours or plain), ("theirs", theirs)):
        (folder / f"{name}.py").write_text(SAVED.format(text=text, name=name))
    run = ["launch", "-n", str(workers), str(folder / "ours.py"), strategy]
    ended = RealRun(run, folder / "run", torch=True).end(400)
    assert ended.code == 0, ended.err
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    whole = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # DDP needs torch's compiler
    command = [*torchrun, str(folder / "theirs.py"), strategy]
    done = subprocess.run(command, env=whole, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [
        [torch.cat([p.flatten() for p in torch.load(folder / f"{name}-{rank}")]) for name in ("ours", "theirs")]
        for rank in range(workers)
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "strategy", "workers", "tolerance"),
    [
        ("classifier", "all_reduce", 2, 0.0),
        ("gpt", "all_reduce", 2, 0.0),
        ("classifier", "ps(consistency=bsp)", 2, 1e-5),
        ("classifier", "bucketed(cap=0.004, first=0.002)", 2, 0.0),
        ("classifier", "fused", 2, 0.0),
        ("classifier", "scatter_reduce", 2, 1e-5),
        ("classifier", "all_reduce", 4, 1e-9),
        ("gpt", "all_reduce", 4, 1e-9),
    ],
)
def test_a_script_ends_as_under_ddp(name: str, strategy: str, workers: int, tolerance: float, tmp_path: Path) -> None:
    """With two workers a sum has one order: all_reduce gives the same bits. Servers, and workers that step slices,
    have optimizers of their own. Four workers compute in float64, because their sums have several orders.
    """
    for ours, theirs in trained(name, strategy, tmp_path, workers=workers):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=tolerance)


@pytest.mark.full
def test_clipping_before_the_mean_is_another_result(tmp_path: Path) -> None:
    before, after = next((line, other) for line, other in INSTEAD.items() if "clip" in line)
    ours = (HERE / "gpt.py").read_text().replace(before, after)
    for one, theirs in trained("gpt", "all_reduce", tmp_path, ours=ours):
        assert not torch.allclose(one, theirs, atol=1e-3)
