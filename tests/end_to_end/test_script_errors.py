"""What a user of `flockstep launch` sees of errors before a script takes part in the run, and after its end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.processes import RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

MODEL = """
import torch, flockstep
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def run(tmp_path: Path, body: str, workers: int = 2, afresh: bool = False):
    script = tmp_path / "script.py"
    script.write_text(body)
    words = ["launch", "-n", str(workers), str(script)]
    started = RealRun(words, tmp_path / "run", torch="torch" in body, afresh=afresh)
    try:
        return started.end()
    finally:
        started.close()


def test_a_wrong_strategy_is_one_sentence(tmp_path):
    done = run(tmp_path, MODEL + "flockstep.distribute(model, optimizer, 'bucketedd')", workers=1)
    assert done.code == 2, done.err
    assert "no strategy is called 'bucketedd'; did you mean 'bucketed'?" in done.err
    assert "Traceback" not in done.err
    assert "exited with code" not in done.err


def test_a_program_that_launches_itself_without_end_is_one_sentence(tmp_path):
    """As a worker does that imports a program without a main guard."""
    done = run(tmp_path, "import flockstep\ndef train():\n    pass\nflockstep.launch(train)\n")
    assert done.code == 2, done.err
    assert done.err.startswith(
        "flockstep: every process of a run, or of a pool, imports the program that starts the run"
    )
    assert done.err.count("\n") == 1


def test_a_branch_for_ddp_is_one_sentence(tmp_path):
    """As most scripts have it: with RANK set they open a process group, before flockstep.distribute. Here they ask for
    the group's address only, because tests run without the part of torch that a group imports.
    """
    branch = "import os\nif 'RANK' in os.environ:\n    next(torch.distributed.rendezvous('env://'))\n"
    done = run(tmp_path, MODEL + branch + "flockstep.distribute(model, optimizer, 'all_reduce').finish()", afresh=True)
    assert done.code == 2, done.err
    assert "leave out this branch and the DistributedDataParallel wrapper" in done.err
    assert "Traceback" not in done.err
    assert done.err.count("init_process_group") == 1


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            MODEL + "o = flockstep.distribute(model, optimizer, 'local_sgd'); o.finish(); o.step()",
            marks=pytest.mark.full,
        ),
        "import flockstep\nwith flockstep.join() as comm:\n    comm.barrier()\ncomm.barrier()",
    ],
    ids=["distribute", "join"],
)
def test_an_error_after_the_end_is_shown(tmp_path, body):
    done = run(tmp_path, body)
    assert done.code != 0
    assert "ConfigurationError: " in done.err + done.out


def test_a_script_whose_data_shard_refuses_ends_with_a_sentence(tmp_path):
    body = MODEL + "optimizer = flockstep.distribute(model, optimizer, 'all_reduce')\nlist(flockstep.shard([1]))"
    done = run(tmp_path, body)
    assert done.code == 2, done.err
    assert "the epoch has only 1; use at most 1 workers" in done.err
