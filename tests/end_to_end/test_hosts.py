"""Runs over several hosts, each a network namespace, started by hand: memory within a host, TCP between hosts."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flockstep.chaos.base import Failpoint
from flockstep.chaos.failpoint import signalled, write_failpoint
from flockstep.records.events import ClockEvent, EvaluationEvent, StepEvent
from flockstep.records.folder import RunFolder
from flockstep.strategies.overlap_trial import TRIED
from support.hosts import PORT, SECRET, Ended, Host, network, on_all
from support.matrix import few
from support.processes import COMMAND, PATIENCE, RealRun, wait_until
from support.scripts import NUMPY

EXAMPLES = Path(__file__).parents[2] / "examples"
JOB = "softmax(features=20000, train=64, test=16)"
STEPS = 20
ESTABLISHED, CLOSE_WAIT = "01", "08"  # in /proc/net/tcp


@pytest.fixture
def two() -> Iterator[list[Host]]:
    with network(2) as hosts:
        yield hosts


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def require(ended: list[Ended], *codes: int) -> None:
    assert [one.code for one in ended] == list(codes), "\n".join(one.err for one in ended)


def test_memory_within_a_host_and_tcp_between_hosts(two: list[Host], tmp_path: Path) -> None:
    arguments = ["train", JOB, "-s", "all_reduce(ring)", "-n", "4", "--steps", str(STEPS), "--seed", "1"]
    arguments += ["--evaluate-every", str(STEPS)]
    ended = on_all(two, *arguments, first=["--out", tmp_path / "run"])
    require(ended, 0, 0)
    assert ended[1].err == ended[1].out == ""
    run = summary(tmp_path / "run")
    payload = [worker["sent_bytes"] for worker in run["per_worker"]]
    between, within = [host.sent("eth0") for host in two], [host.sent("lo") for host in two]
    assert between[0] >= payload[1], "worker 1 sends to worker 2, on the other host"
    assert between[1] >= payload[3], "worker 3 sends to worker 0, on the other host"
    assert within[0] < payload[0] / 10, "what worker 0 sends to worker 1 lies in memory"
    assert within[1] < payload[2] / 10, "what worker 2 sends to worker 3 lies in memory"
    alone = RealRun([*arguments, "--transport", "shared_memory"], tmp_path / "alone").end()
    assert alone.summary is not None
    assert alone.summary["hashes"] == run["hashes"]
    assert not any(host.processes() for host in two)


def test_times_of_hosts_whose_clocks_differ_are_comparable(two: list[Host], tmp_path: Path) -> None:
    """The record has one clock: no worker ends a step before the others have ended the step before."""
    two[1].ahead = 1000
    if subprocess.run(two[1].command("true"), check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no time namespaces")
    arguments = ["train", JOB, "-s", "all_reduce", "-n", "2", "--steps", str(STEPS), "--evaluate-every", str(STEPS)]
    require(on_all(two, *arguments, first=["--out", tmp_path / "run"]), 0, 0)
    events = RunFolder(tmp_path / "run").read_events()
    clocks = {event.node: event for event in events if isinstance(event, ClockEvent)}
    errors = [clocks[rank].uncertainty_seconds for rank in range(2)]
    assert abs(clocks[0].offset_seconds) <= errors[0] < 500
    assert abs(clocks[1].offset_seconds + 1000) <= errors[1] < 500
    steps = {(event.rank, event.step): event.seconds for event in events if isinstance(event, StepEvent)}
    assert len(steps) == 2 * STEPS
    for (rank, step), seconds in steps.items():
        assert seconds + sum(errors) >= steps.get((1 - rank, step - 1), 0.0)


@pytest.mark.full
def test_the_default_all_reduce_sends_the_model_once_between_two_hosts(two: list[Host], tmp_path: Path) -> None:
    """2(h-1)/h of the model leaves each host in every step: once for h = 2, where a ring of 4 sends it 1.5 times."""
    arguments = ["train", JOB, "-s", "all_reduce", "-n", "4", "--steps", str(STEPS), "--seed", "1"]
    require(on_all(two, *arguments, "--evaluate-every", str(STEPS), first=["--out", tmp_path / "run"]), 0, 0)
    model = 4 * (20000 * 10 + 10)
    for host in two:  # and headers, rank 0's first model, and the snapshots of two workers
        assert STEPS * model <= host.sent("eth0") < 1.05 * STEPS * model + 4 * model
    assert len(set(summary(tmp_path / "run")["hashes"].values())) == 1


OVERLAPPED = """
import hashlib
import torch
from torch import nn
import flockstep

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(400, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 10))

def batch(step, rank):
    return torch.randn(8, 400, generator=torch.Generator().manual_seed(100 * step + rank))

def values(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

model, plain = network(), network()
optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "all_reduce")
handed, hand_over = [], optimizer.loop.hand_over
optimizer.loop.hand_over = lambda: (handed.append(1), hand_over())
for step in range({steps}):
    optimizer.zero_grad()
    model(batch(step, flockstep.rank())).square().mean().backward()
    optimizer.step()
optimizer.finish()
if flockstep.rank() == 0:
    steps = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range({steps}):
        steps.zero_grad()
        for rank in range(4):
            (plain(batch(step, rank)).square().mean() / 4).backward()
        steps.step()
    torch.testing.assert_close(values(model), values(plain), rtol=1e-5, atol=1e-6)
print("ended", len(handed), hashlib.sha256(values(model).numpy().tobytes()).hexdigest())
"""


@pytest.mark.full
def test_gradients_of_a_script_cross_once_during_backward(two: list[Host], tmp_path: Path) -> None:
    """The mean is that of one process, with equal bits on all ranks; buckets cross in lanes, once per host and step.

    All ranks choose the same of the two times at which gradients can travel.
    """
    script, steps = tmp_path / "script.py", 30
    script.write_text(OVERLAPPED.format(steps=steps))
    ended = on_all(two, "launch", "-n", "4", script, first=["--out", tmp_path / "run"])
    require(ended, 0, 0)
    lines = {line for one in ended for line in re.findall(r"ended \d+ \w+", one.out)}
    assert len(lines) == 1, "every rank passed on as many parts, and ends with the same bits"
    early = TRIED - 1, steps - TRIED - 1
    assert int(lines.pop().split()[1]) in early, "one of two buckets in every step but the first, unless it came later"
    model = 4 * (400 * 600 + 600 + 600 * 600 + 600 + 600 * 10 + 10)
    for host in two:  # and headers, rank 0's first model, and snapshots of two workers; a ring sends 1.5 times as much
        assert steps * model <= host.sent("eth0") < 1.05 * steps * model + 8 * model


SUMMED = """
import hashlib

start("all_reduce", {"w": (30100,)})
worker, tags = optimizer._worker, set()
send = worker.port.send
worker.port.send = lambda to, message: (tags.add(message.tag), send(to, message))
for step in range(5):
    optimizer.gradients[:] = np.random.default_rng([step, rank]).normal(size=len(params))
    optimizer.step()
optimizer.finish()
print("ended", "+".join(sorted(tags)), hashlib.sha256(params.tobytes()).hexdigest())
"""


def summed_by_numpy() -> str:
    """The bits of a sum within each host and then between the hosts: both additions have one order up to exchange."""
    params, random = np.zeros(30100, np.float32), np.random.default_rng
    for step in range(5):
        a, b, c, d = (random([step, rank]).normal(size=30100).astype(np.float32) for rank in range(4))
        params -= np.float32(0.1) * (((a + b) + (c + d)) / np.float32(4))
    return hashlib.sha256(params.tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("memory", "tags"),
    few([("true", "gather+reduce"), ("false", "gather+inside+outside+reduce")], ("true", "gather+reduce")),
)
def test_sums_in_the_memory_of_a_host_have_the_bits_of_messages(
    two: list[Host], tmp_path: Path, memory: str, tags: str
) -> None:
    """In memory nothing is sent within a host; the bits, and the bytes on record, are equal either way."""
    (tmp_path / "script.py").write_text(NUMPY + SUMMED)
    options = ["--transport", f"tcp(memory={memory})", "-n", "4"]
    ended = on_all(two, "launch", *options, tmp_path / "script.py", first=["--out", tmp_path / "run"])
    require(ended, 0, 0)
    lines = [line for one in ended for line in re.findall(r"ended [\w+]+ \w+", one.out)]
    assert lines == [f"ended {tags} {summed_by_numpy()}"] * 4
    traffic = [worker["sent_bytes"] for worker in summary(tmp_path / "run")["per_worker"]]
    assert traffic == [5 * 4 * 30100 * 3 // 2] * 4, "in each of five steps half a model within the host and one between"


def test_an_own_script_with_servers_on_both_hosts(two: list[Host], tmp_path: Path) -> None:
    """Each script prints its ranks; two shards are held by servers, one on each host."""
    script = tmp_path / "script.py"
    script.write_text(
        NUMPY
        + """
start("ps(consistency=ssp(3), shards=2)")
steps(50)
optimizer.finish()
print("distance", abs(params - 1.5).max())
print(*(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")))
"""
    )
    ended = on_all(two, "launch", "-n", "4", script, first=["--out", tmp_path / "run"])
    require(ended, 0, 0)
    for rank, one in enumerate(ended):
        found = [float(text) for text in re.findall(r"distance ([0-9.]+)", one.out)]
        assert len(found) == 2
        assert max(found) < 0.5, "without the other workers' gradients a parameter is a rank"
        places = sorted(re.findall(r"^\d \d \d \d$", one.out, re.MULTILINE))
        assert places == [f"{2 * rank + i} {i} 4 2" for i in (0, 1)]
    run = summary(tmp_path / "run")
    assert run["status"] == "finished"
    assert len(run["per_worker"]) == 4
    assert not any(host.processes() for host in two)


@pytest.mark.full
def test_workers_of_two_hosts_with_data_of_their_own(two: list[Host], tmp_path: Path) -> None:
    """The loop of docs/how-to/loops.md: 4, 5, 7 and 8 batches; each epoch ends on all workers after 8 steps."""
    page = (EXAMPLES.parent / "docs" / "how-to" / "loops.md").read_text()
    (loop,) = (
        text for text in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if "100 + 50" in text
    )
    script, folder = tmp_path / "script.py", tmp_path / "said"
    said = "print(optimizer.loop.steps, [p.tolist() for p in model.parameters()])"
    script.write_text(f"import torch\nfrom torch import nn\nimport flockstep\n{loop}{said}\n")
    own = ["--output", "none", "--rank-output", folder]
    require(on_all(two, "launch", "-n", "4", *own, script, first=["--out", tmp_path / "run"]), 0, 0)
    lines = [(folder / f"rank-{rank}.out").read_text() for rank in range(4)]
    assert lines[0].startswith("24 [[[")
    assert lines == lines[:1] * 4
    assert [worker["steps"] for worker in summary(tmp_path / "run")["per_worker"]] == [24] * 4


def commands_of_the_page(*titles: str) -> list[str]:
    """What follows "flockstep" in the blocks with these titles."""
    page = (EXAMPLES.parent / "docs" / "how-to" / "several-hosts.md").read_text()
    found = dict(re.findall(r"^```sh title=\"(.*)\"\nflockstep (.*)$", page, re.MULTILINE))
    return [found[title] for title in titles]


@pytest.mark.full
def test_the_commands_of_the_page(two: list[Host], tmp_path: Path) -> None:
    """As they stand in docs/how-to/several-hosts.md, in a folder with the example."""
    found = commands_of_the_page("first host", "second host")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "own_loop.py").write_text((EXAMPLES / "own_loop.py").read_text())
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o600)
    started = [host.start(*shlex.split(words), within=tmp_path) for host, words in zip(two, found, strict=True)]
    ended = [Ended.of(process) for process in started]
    require(ended, 0, 0)
    assert all(len(re.findall("test accuracy 0.[89]", one.out)) == 2 for one in ended)


def test_an_evaluation_that_fails_after_the_run_fails_on_all_hosts(two: list[Host], tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "import dataclasses\nfrom flockstep.workloads.base import Workload\n"
        "def metric(outputs, targets):\n    raise ArithmeticError('no such metric')\n"
        "def job():\n    return dataclasses.replace(Workload.parse('softmax').job(0), metric=metric)\n"
    )
    arguments = ["train", job, "-s", "all_reduce", "-n", "2", "--steps", "3", "--heartbeat", "30"]
    ended = on_all(two, *arguments, first=["--out", tmp_path / "run"])
    require(ended, 1, 1)
    assert "flockstep: the evaluation raised ArithmeticError: no such metric" in ended[0].err
    assert "flockstep: the run has ended: the evaluation raised ArithmeticError: no such metric" in ended[1].err


@pytest.mark.full
def test_a_process_group_within_a_host_is_refused_over_several(two: list[Host], tmp_path: Path) -> None:
    arguments = ["train", "softmax", "-s", "all_reduce(collective=torch_distributed)", "-n", "2", "--heartbeat", "30"]
    ended = on_all(two, *arguments, first=["--out", tmp_path / "run"])
    require(ended, 2, 2)
    for one in ended:
        assert "torch_distributed(backend=gloo) makes a group only within one host, but the workers are on 2" in one.err


def start_two(two: list[Host], tmp_path: Path, *arguments: str) -> list[Any]:
    """A long run on two hosts, of which the first step is done."""
    where = ["--nodes", "2", "--coordinator", f"{two[0].address}:{PORT}", "--heartbeat", "5"]
    command = ["train", "softmax", "-n", "4", "--steps", "1000000", *where, *arguments]  # the last --steps counts
    processes = [two[1].start(*command, "--node-rank", "1")]
    processes.insert(0, two[0].start(*command, "--node-rank", "0", "--out", tmp_path / "run"))
    events = tmp_path / "run" / "events"

    def stepping() -> bool:
        return len(list(events.glob("*"))) >= 4 and all(file.stat().st_size for file in events.glob("*worker*"))

    wait_until(lambda: stepping() or any(one.poll() is not None for one in processes), PATIENCE, "all take steps")
    assert stepping(), [Ended.of(process) for process in processes]
    return processes


def test_a_host_that_vanishes_ends_the_run_with_a_sentence(two: list[Host], tmp_path: Path) -> None:
    """Its cable is cut: nothing says so but the silence."""
    processes = start_two(two, tmp_path, "-s", "all_reduce", "--link-timeout", "2")
    two[1].cut()
    ended = [Ended.of(process) for process in processes]
    require(ended, 1, 1)
    lost = r"is lost: no answer for 5 s, and no new connection for [0-9.]+ s \(the link timeout is 2 s\)"
    assert re.search(rf"node 1 \(.*\) {lost}", ended[0].err)
    assert re.search(r"flockstep: worker [23] was lost with its host", ended[0].err)
    away = r"has not answered for 5 s, and the link was down for [0-9.]+ s, longer than the link timeout of 2 s"
    assert re.search(away, ended[1].err)
    assert summary(tmp_path / "run")["status"] == "failed"
    assert not any(host.processes() for host in two)


@pytest.mark.parametrize("seconds", [8, pytest.param(60, marks=pytest.mark.full)])
def test_a_cable_that_is_out_for_a_while_changes_no_bit(two: list[Host], tmp_path: Path, seconds: int) -> None:
    """The cable is out for longer than the heartbeat, while all workers take steps."""
    arguments = ["-s", "all_reduce(ring)", "--steps", "1000", "--seed", "1", "--link-timeout", "90"]
    processes = start_two(two, tmp_path, *arguments)
    two[1].cut()
    mend = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > mend, PATIENCE, "the cable is put in again")
    assert all(process.poll() is None for process in processes), "the cut came before the end"
    two[1].mend()
    ended = [Ended.of(process) for process in processes]
    require(ended, 0, 0)
    assert re.search(r"node 1 \(.*\) is connected again after [0-9.]+ s \(no answer for 5 s\)", ended[0].err)
    assert re.search(r"worker \d is connected to worker \d again after", ended[0].err + ended[1].err)
    command = ["train", "softmax", "-n", "4", *arguments[:-2]]
    alone = RealRun([*command, "--transport", "shared_memory"], tmp_path / "alone").end()
    assert alone.summary is not None
    assert alone.summary["hashes"] == summary(tmp_path / "run")["hashes"]


@pytest.mark.full
def test_the_side_of_the_coordinator_goes_on_and_the_other_side_ends(two: list[Host], tmp_path: Path) -> None:
    """Gossip needs no particular worker; the cable stays out."""
    processes = start_two(two, tmp_path, "-s", "gossip", "--link-timeout", "2")
    two[1].cut()
    away = Ended.of(processes[1])
    assert away.code == 1, away.err
    assert re.search(r"and the link was down for [0-9.]+ s, longer than the link timeout of 2 s", away.err)
    assert not two[1].processes()
    files = [tmp_path / "run" / "events" / f"worker-{rank}.jsonl" for rank in (0, 1)]
    wait_until(lambda: all(file.read_bytes().count(b'"type":"lost"') == 2 for file in files), PATIENCE, "both are lost")
    before = [file.stat().st_size for file in files]
    wait_until(
        lambda: all(file.stat().st_size > size for file, size in zip(files, before, strict=True)),
        PATIENCE,
        "the workers beside the coordinator take further steps",
    )
    processes[0].send_signal(signal.SIGINT)
    Ended.of(processes[0])
    assert summary(tmp_path / "run")["status"] == "interrupted"


@pytest.mark.full
def test_the_backup_of_a_server_is_on_another_host_and_takes_its_place(two: list[Host], tmp_path: Path) -> None:
    """The server of the second half of the model is killed on the second host."""
    arguments = ["train", "softmax", "-n", "4", "--steps", "600", "--seed", "1"]
    kill = ["--import", write_failpoint(tmp_path, Failpoint("server-1", "update.applied", 400))]
    ended = on_all(two, *arguments, "-s", "ps(bsp, shards=2, replicas=1)", *kill, first=["--out", tmp_path / "run"])
    require(ended, 0, 0)
    assert signalled(tmp_path) is not None, "the server was not killed"
    assert "server 1 was killed by SIGKILL; server 3, its backup, continues in its place" in ended[0].err
    alone = RealRun([*arguments, "-s", "ps(bsp, shards=2)"], tmp_path / "alone").end()
    assert alone.summary is not None
    workers = {f"worker {rank}" for rank in range(4)}
    hashes = [{who: one["hashes"][who] for who in workers} for one in (alone.summary, summary(tmp_path / "run"))]
    assert hashes[0] == hashes[1]
    assert not any(host.processes() for host in two)


@pytest.mark.full
def test_a_host_that_vanishes_with_a_server_and_workers_leaves_the_others_training(
    two: list[Host], tmp_path: Path
) -> None:
    """Server 1 and two workers are on the second host, whose cable is cut; server 3 is the backup of server 1."""
    processes = start_two(two, tmp_path, "-s", "ps(ssp(3), shards=2, replicas=1)", "--link-timeout", "2")
    two[1].cut()
    away = Ended.of(processes[1])
    assert away.code == 1, away.err
    wait_until(lambda: promoted(tmp_path / "run", 3), PATIENCE, "the backup continues, with a push")
    files = [tmp_path / "run" / "events" / f"worker-{rank}.jsonl" for rank in (0, 1)]
    before = [file.stat().st_size for file in files]
    wait_until(
        lambda: all(file.stat().st_size > size for file, size in zip(files, before, strict=True)),
        PATIENCE,
        "the workers beside the coordinator take further steps",
    )
    processes[0].send_signal(signal.SIGINT)
    ended = Ended.of(processes[0])
    assert summary(tmp_path / "run")["status"] == "interrupted"
    assert re.search(r"server 1 was lost with its host.*; server 3, its backup, continues in its place", ended.err)


def promoted(record: Path, index: int) -> bool:
    """Whether a backup has written that it took the place of its server."""
    return b'"type":"promoted"' in (record / "events" / f"server-{index}.jsonl").read_bytes()


@pytest.mark.full
def test_ctrl_c_on_any_host_ends_all(two: list[Host], tmp_path: Path) -> None:
    processes = start_two(two, tmp_path, "-s", "gossip")
    processes[1].send_signal(signal.SIGINT)
    ended = [Ended.of(process) for process in processes]
    assert all(one.code for one in ended)
    assert "on node 1" in ended[0].err
    assert summary(tmp_path / "run")["status"] == "interrupted"
    assert not any(host.processes() for host in two)


@pytest.mark.full
def test_a_killed_agent_takes_its_workers_along(two: list[Host], tmp_path: Path) -> None:
    processes = start_two(two, tmp_path, "-s", "all_reduce")
    os.kill(processes[1].pid, signal.SIGKILL)
    ended = [Ended.of(process) for process in processes]
    require(ended, 1, -signal.SIGKILL)
    assert "was lost with its host" in ended[0].err
    wait_until(lambda: not any(host.processes() for host in two), PATIENCE, "the workers of the host end")


def refused(two: list[Host], tmp_path: Path, second: list[str], **environment: str) -> tuple[str, str]:
    """What both ends print where the second host may not join; the coordinator is stopped then."""
    script = tmp_path / "script.py"
    if not script.exists():
        script.write_text("import flockstep\n")
    where = ["--coordinator", f"{two[0].address}:{PORT}"]
    first = two[0].start(
        "launch", "--nodes", "2", "--node-rank", "0", *where, "-n", "4", "--out", tmp_path / "run", script
    )
    other = Ended.of(two[1].start("launch", *where, *second, **environment))
    assert other.code == 2
    wait_until(lambda: not connections(first.pid), PATIENCE, "the coordinator has closed the connection")
    first.send_signal(signal.SIGINT)
    return Ended.of(first).err, other.err


def connections(pid: int) -> list[str]:
    """Lines of the connections to the coordinator's port in the network of a process."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    return [line[1] for line in lines if line[1].endswith(f":{PORT:04X}") and line[3] in (ESTABLISHED, CLOSE_WAIT)]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (
            ["--nodes", "3", "--node-rank", "1", "-n", "4"],
            "started for 3 hosts and 4 workers, the coordinator for 2",
        ),
        (
            ["--nodes", "2", "--node-rank", "1", "-n", "6"],
            "started for 2 hosts and 6 workers, the coordinator for 2",
        ),
        pytest.param(
            ["--nodes", "2", "--node-rank", "1", "-n", "4", "--seed", "7"],
            "seed is 7 on that host and 0 at the coordinator",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_host_that_was_started_differently_is_refused_at_both_ends(
    two: list[Host], tmp_path: Path, second: list[str], said: str
) -> None:
    for err in refused(two, tmp_path, [*second, str(tmp_path / "script.py")]):
        assert said in err


@pytest.mark.full
def test_another_script_is_refused_at_both_ends(two: list[Host], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "script.py"
    other.write_text("import flockstep  # in another version\n")
    for err in refused(two, tmp_path, ["--nodes", "2", "--node-rank", "1", "-n", "4", str(other)]):
        assert re.search(r"job is script.py \(SHA-256 \w+\) on that host and script.py \(SHA-256 \w+\) at", err)


def test_a_wrong_secret_is_refused_at_both_ends(two: list[Host], tmp_path: Path) -> None:
    second = ["--nodes", "2", "--node-rank", "1", "-n", "4", str(tmp_path / "script.py")]
    here, there = refused(two, tmp_path, second, FLOCKSTEP_SECRET=SECRET.upper())
    assert "does not know the secret" in here
    assert "give every host the same secret" in there


@pytest.mark.full
def test_who_has_come_already_or_is_missing_is_told(two: list[Host], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import flockstep\n")
    where = ["--nodes", "3", "--coordinator", f"{two[0].address}:{PORT}", "-n", "3", script]
    first = two[0].start("launch", "--node-rank", "0", "--timeout", "30", "--out", tmp_path / "run", *where)
    second = two[1].start("launch", "--node-rank", "1", *where)
    wait_until(lambda: second.poll() is not None or joined(two[1]), PATIENCE, "node 1 has joined")
    twice = Ended.of(two[1].start("launch", "--node-rank", "1", *where))
    assert twice.code == 2
    assert "has joined already; give every host a different --node-rank" in twice.err
    first.send_signal(signal.SIGINT)
    assert Ended.of(first).code
    assert Ended.of(second).code


def joined(host: Host) -> bool:
    """Whether a connection of the host to the coordinator is established."""
    table = subprocess.run(host.command("cat", "/proc/net/tcp"), check=True, capture_output=True, text=True).stdout
    return any(line.split()[3] == "01" for line in table.splitlines()[1:])


def test_a_coordinator_that_never_comes_and_hosts_that_never_come(two: list[Host], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import flockstep\n")
    where = ["--nodes", "2", "--coordinator", f"{two[0].address}:{PORT}", "-n", "2", "--timeout", "1", script]
    own = ["--node-rank", "1", "--json", "--out", tmp_path / "other"]
    alone = Ended.of(two[1].start("launch", *own, *where))
    assert alone.code == 2
    for option in ("--json", "--out"):
        assert f"{option} has no effect on node 1: the coordinator writes the record" in alone.err
    assert f"no coordinator answered at {two[0].address}:{PORT} within 1 s" in alone.err
    first = Ended.of(two[0].start("launch", "--node-rank", "0", "--out", tmp_path / "run", *where))
    assert first.code == 2
    assert "node 1 of 2 did not join within 1 s" in first.err


UNREACHABLE = {
    "no route": (1, ["ip", "route", "del", "10.77.0.0/24"]),
    "a firewall that drops": (0, ["ip", "route", "add", "blackhole", "10.77.0.2"]),
    "a cut cable": (1, ["ip", "link", "set", "eth0", "down"]),
}


@pytest.mark.parametrize("reason", few(list(UNREACHABLE), "no route", "a firewall that drops"))
def test_a_coordinator_that_cannot_be_reached_is_told_on_both_hosts(
    reason: str, two: list[Host], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import flockstep\n")
    on, words = UNREACHABLE[reason]
    two[on].run(*words)
    ended = on_all(two, "launch", "-n", "2", "--timeout", "2", script, first=["--out", tmp_path / "run"])
    assert [one.code for one in ended] == [2, 2]
    assert "node 1 of 2 did not join within 2 s" in ended[0].err
    assert re.search(f"no coordinator answered at {two[0].address}:{PORT} within 2 s.* the route", ended[1].err)
    assert not (tmp_path / "run").exists()
    assert not any(host.processes() for host in two)


FULL = {
    "record": r"cannot use .*/full/run: No space left on device; .* choose another place with --out",
    "shared memory": r"cannot allocate \d+ bytes of shared memory: .*; use a smaller model",
}
"""What is full → what the host says."""


@pytest.mark.parametrize("what", FULL)
def test_a_host_that_is_full_is_told_of_on_both_hosts(what: str, two: list[Host], tmp_path: Path) -> None:
    """Shared memory counts as a file: a limit on the size of files stands for a host without room."""
    out, limited = tmp_path / "run", list[str]()
    if what == "record":
        out = tmp_path / "full" / "run"
        out.parent.mkdir()
        two[0].run("mount", "-t", "tmpfs", "-o", "nr_inodes=1", "tmpfs", str(out.parent))
    else:
        limited = ["prlimit", "--fsize=1000000", *COMMAND]
    where = ["--nodes", "2", "--coordinator", f"{two[0].address}:{PORT}", "--timeout", "10"]
    arguments = ["train", JOB, "-s", "all_reduce", "-n", "4", "--steps", "3", *where]
    processes = [two[1].start(*arguments, "--node-rank", "1", command=limited)]
    processes.insert(0, two[0].start(*arguments, "--node-rank", "0", "--out", out))
    ended = [Ended.of(process) for process in processes]
    assert {one.code for one in ended} <= {1, 2}
    assert re.search(f"^flockstep: .*{FULL[what]}", ended[0].err, re.MULTILINE), ended[0].err
    assert all(one.err.count("flockstep: ") and "Traceback" not in one.err for one in ended)
    assert not any(host.processes() for host in two)


def test_a_firewall_that_blocks_the_workers_alone_is_told_of(two: list[Host], tmp_path: Path) -> None:
    """It drops what comes from the workers' ports of host 0; the coordinator's port is open."""
    rule = ["ip", "rule", "add", "ipproto", "tcp", "sport", "29600-29610", "blackhole"]
    if subprocess.run(two[0].command(*rule), check=False, capture_output=True).returncode:
        pytest.skip("this system has no routing rules by port")
    arguments = ["train", JOB, "-s", "all_reduce", "-n", "4", "--steps", "3"]
    arguments += ["--transport", "tcp(memory=true, ports='29600-29610')"]
    ended = on_all(two, *arguments, first=["--out", tmp_path / "run"])
    require(ended, 1, 1)
    for one in ended:
        assert re.search(r"worker [01] did not answer at tcp://10.77.0.1:2960\d \(\d+ attempts in \d+ s\)", one.err)
        assert "let the firewall pass the workers' ports" in one.err
    assert not (tmp_path / "run").exists(), "the run ended before its first step"
    assert not any(host.processes() for host in two)


def separately(hosts: list[Host], *arguments: str | Path, out: Path) -> list[Ended]:
    """Run a command on all hosts but the first, which coordinates alone; what came of each."""
    coordinator, *others = hosts
    command, *rest = arguments
    place = ["--nodes", str(len(others)), "--port", str(PORT)]
    processes = [coordinator.start("coordinate", *place, command, "--out", out, *rest)]
    for rank, host in enumerate(others):
        own = ["--nodes", str(len(others)), "--node-rank", str(rank), "--coordinator", f"{coordinator.address}:{PORT}"]
        processes.append(host.start(command, *own, "--separate-coordinator", *rest))
    return [Ended.of(process) for process in processes]


def test_a_coordinator_of_its_own_has_the_record_and_no_worker(tmp_path: Path) -> None:
    """With the commands of docs/how-to/several-hosts.md."""
    found = commands_of_the_page("coordinator", "host 0, with workers", "host 1, with workers")
    (tmp_path / "secret").write_text("0123456789abcdef" * 4)
    (tmp_path / "secret").chmod(0o600)
    with network(3) as hosts:
        started = [host.start(*shlex.split(words), within=tmp_path) for host, words in zip(hosts, found, strict=True)]
        require([Ended.of(process) for process in started], 0, 0, 0)
        assert not any(host.processes() for host in hosts)
    (run,) = (tmp_path / "runs").iterdir()
    assert RunFolder(run).read_summary().status == "finished"
    events = RunFolder(run).read_events()
    assert {event.rank for event in events if isinstance(event, StepEvent)} == {0, 1, 2, 3}
    assert any(isinstance(event, EvaluationEvent) for event in events), "the coordinator evaluates"


@pytest.mark.full
def test_servers_are_on_the_hosts_of_workers_where_the_coordinator_is_of_its_own(tmp_path: Path) -> None:
    arguments = ["train", "softmax", "-s", "ps(shards=2)", "-n", "2", "--steps", str(STEPS), "--seed", "1"]
    arguments += ["--heartbeat", "60"]
    with network(3) as hosts:
        require(separately(hosts, *arguments, out=tmp_path / "run"), 0, 0, 0)
        assert hosts[0].sent("lo") == 0, "no worker and no server is on the coordinator's host"
    alone = RealRun(arguments, tmp_path / "alone").end()
    assert alone.summary is not None
    assert alone.summary["hashes"] == summary(tmp_path / "run")["hashes"]


@pytest.mark.full
def test_what_a_separate_coordinator_ends_with(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import flockstep\nflockstep.join()\nraise SystemExit(flockstep.rank())\n")
    with network(3) as hosts:
        failed = separately(hosts, "launch", "-n", "2", script, out=tmp_path / "run")
        require(failed, 1, 1, 1)
        assert "worker 1 exited with code 1" in failed[0].err
        where = ["--nodes", "2", "--node-rank", "0", "--coordinator", f"{hosts[0].address}:{PORT}"]
        refused = Ended.of(hosts[1].start("launch", *where, "-n", "2", script))
        assert refused.code == 2
        assert "with a free port" in refused.err
        assert "or add --separate-coordinator" in refused.err
        for words, said in (
            (["simulate", "softmax"], "write launch or train"),
            (["train", "softmax", "-s", "bsp", "--nodes", "2"], "as for one host, without --nodes"),
            (["train", "softmax", "-s", "bsp", "--ssh", "ssh -v"], "as for one host, without --ssh"),
        ):
            refused = Ended.of(hosts[0].start("coordinate", "--nodes", "2", "--port", str(PORT), *words))
            assert refused.code == 2
            assert said in refused.err
