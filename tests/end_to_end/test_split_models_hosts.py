"""Split models on two hosts: the bits of one host, and a model that is too large for the memory of one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flockstep
from flockstep.records.folder import RunFolder
from support import split_jobs
from support.hosts import PORT, Ended, Host, network, on_all
from support.matrix import few
from support.processes import COMMAND


@pytest.fixture
def two() -> Iterator[list[Host]]:
    with network(2) as hosts:
        yield hosts


def require(ended: list[Ended], *codes: int) -> None:
    assert [one.code for one in ended] == list(codes), "\n".join(one.err for one in ended)


@pytest.mark.parametrize(
    ("strategy", "partition", "workers", "transport"),
    few(
        [
            ("local_sgd", "pipeline(2, 1f1b, 4)", 2, "tcp(memory=true)"),  # activations between the hosts
            ("local_sgd", "pipeline(4, 1f1b, 4)", 4, "tcp(memory=true)"),
            ("ps(bsp)", "pipeline(2, 1f1b, 3)", 4, "tcp(memory=true, encrypt=false)"),
        ],
        ("local_sgd", "pipeline(2, 1f1b, 4)", 2, "tcp(memory=true)"),
    ),
)
def test_stages_on_two_hosts(
    two: list[Host], tmp_path: Path, strategy: str, partition: str, workers: int, transport: str
) -> None:
    arguments = ["train", split_jobs.__file__, "-s", strategy, "--partition", partition]
    arguments += ["-n", str(workers), "--steps", "6"]
    ended = on_all(two, *arguments, "--transport", transport, first=["--out", tmp_path / "real"], torch=True)
    require(ended, 0, 0)
    given = {"partition": partition, "workers": workers, "steps": 6}
    virtual = flockstep.simulate(split_jobs.__file__, strategy, out=tmp_path / "virtual", **given).summary
    real = RunFolder(tmp_path / "real").read_summary()
    assert real.hashes == virtual.hashes
    assert [one.sent_bytes for one in real.per_worker] == [one.sent_bytes for one in virtual.per_worker]


LARGE = """
import torch
from torch import nn
from flockstep import Data, Job

def model():
    return nn.Sequential(*(nn.Linear({width}, {width}) for _ in range(16)))

def loss(outputs, targets):
    return (outputs - targets).square().mean()

def job():
    x = torch.zeros(16, {width})
    data = lambda: Data(x, x, x, x)
    return Job(model, data, "adam(lr=0.001)", loss, metric=lambda a, b: float(loss(a, b)), batch=4, name="large")
"""
MEGABYTES = 700
"""Memory that a process on the second host may have, of which Python and torch need the smaller part."""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of processes")
@pytest.mark.parametrize(
    ("options", "fits"),
    [
        (["-n", "4", "--partition", "pipeline(4)"], True),
        (["-n", "2"], False),
    ],
)
def test_a_model_too_large_for_one_process_trains_split(
    two: list[Host], tmp_path: Path, options: list[str], fits: bool
) -> None:
    """The parameters have 164 MB; with gradients, optimizer state and copies they do not fit, but a quarter does."""
    (tmp_path / "large.py").write_text(LARGE.format(width=1600))
    arguments = ["train", str(tmp_path / "large.py"), "-s", "all_reduce", *options, "--steps", "2"]
    where = ["--nodes", "2", "--coordinator", f"{two[0].address}:{PORT}"]
    limited = ["sh", "-c", f'ulimit -d {1000 * MEGABYTES}; exec "$@"', "sh", *COMMAND]
    other = two[1].start(*arguments, *where, "--node-rank", "1", command=limited)
    first = two[0].start(*arguments, *where, "--node-rank", "0", "--out", tmp_path / "run")
    ended = [Ended.of(first), Ended.of(other)]
    if fits:
        require(ended, 0, 0)
        assert RunFolder(tmp_path / "run").read_summary().status == "finished"
        return
    assert ended[0].code != 0
    sentence = ended[0].err.strip().splitlines()[-1]
    expected = "worker 1 ran out of memory (ulimit allows it 717 MB); split the model over more workers, for example"
    assert expected in sentence, ended[0].err
