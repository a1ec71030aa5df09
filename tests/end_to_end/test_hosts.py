"""Runs over several hosts, each a network namespace, started by hand: memory within a host, TCP between hosts."""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flockstep.launchers.script import program_of, script_of_module
from flockstep.records.events import ClockEvent, EvaluationEvent, StepEvent
from flockstep.records.folder import RunFolder
from flockstep.strategies.overlap_trial import TRIED
from support.hosts import PORT, Ended, Host, network, on_all, require, require_idle, summary
from support.jobs import undisturbed
from support.matrix import few
from support.scripts import NUMPY

EXAMPLES = Path(__file__).parents[2] / "examples"
JOB = "softmax(features=20000, train=64, test=16)"
STEPS = 10


@pytest.fixture
def two() -> Iterator[list[Host]]:
    with network(2) as hosts:
        yield hosts


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
    assert undisturbed(tmp_path / "alone", JOB, "all_reduce(ring)", 4, STEPS, seed=1) == run["hashes"]
    require_idle(two)


def test_hosts_meet_and_train_over_ipv6(two: list[Host], tmp_path: Path) -> None:
    """The links have no IPv4 address, so that nothing can pass another way."""
    for number, host in enumerate(two, 1):
        host.run("ip", "address", "flush", "dev", "eth0")
        host.run("ip", "address", "add", f"fd77::{number}/64", "dev", "eth0", "nodad")
        host.address = f"[fd77::{number}]"
    arguments = ["train", JOB, "-s", "ps(shards=2)", "-n", "4", "--steps", str(STEPS), "--seed", "1"]
    require(on_all(two, *arguments, first=["--out", tmp_path / "run"]), 0, 0)
    run = summary(tmp_path / "run")
    assert undisturbed(tmp_path / "alone", JOB, "ps(shards=2)", 4, STEPS, seed=1) == run["hashes"]
    require_idle(two)


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
    require_idle(two)


def test_a_module_on_two_hosts_is_recorded_as_the_module(
    two: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is repeated, or resumed, by what its record says."""
    (tmp_path / "train_it.py").write_text(f"{NUMPY}start()\nsteps(3)\noptimizer.finish()\n")
    monkeypatch.chdir(tmp_path)
    require(on_all(two, "launch", "-n", "2", "-m", "train_it", "--lr", "2", first=["--out", tmp_path / "run"]), 0, 0)
    config = RunFolder(tmp_path / "run").read_config()
    assert program_of(config) == (script_of_module("train_it"), ["train_it", "--lr", "2"])
    assert config.command.endswith(" -m train_it --lr 2")


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
        require_idle(hosts)
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
    alone = undisturbed(tmp_path / "alone", "softmax", "ps(shards=2)", 2, STEPS, seed=1)
    assert alone == summary(tmp_path / "run")["hashes"]


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
            (["train", "softmax", "-s", "bsp", "--nodes", "2"], "--nodes is an option about hosts"),
            (["train", "softmax", "-s", "bsp", "--ssh", "ssh -v"], "--ssh is an option about hosts"),
        ):
            refused = Ended.of(hosts[0].start("coordinate", "--nodes", "2", "--port", str(PORT), *words))
            assert refused.code == 2
            assert said in refused.err
