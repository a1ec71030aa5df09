"""torchrun, mpirun, srun and ssh themselves, on hosts in namespaces: what each tells the processes that it starts, and
runs of scripts that they have started.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flockstep.records.events import StepEvent
from flockstep.records.folder import RunFolder
from flockstep.runtime.place import host_names, port_of
from support import slurm, ssh
from support.hosts import TOOLS, Host, connected, lacking
from support.jobs import go_on, paced
from support.matrix import few
from support.processes import COMMAND, PATIENCE, SOURCE, content, wait_until
from support.scripts import REPLICAS, of_replicas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

SCRIPT = f"""
import json, os, socket, sys
from dataclasses import asdict
from pathlib import Path
sys.path.insert(0, {str(SOURCE)!r})
from flockstep.runtime.place import place_from

place, host = place_from(os.environ), socket.gethostname()
file = Path(sys.argv[1]) / f"{{host}}-{{os.getpid()}}.json"
file.write_text(json.dumps(dict(asdict(place), host=host)))
"""
ROOT = ("env", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
NAMES = ("home", "d0", "d1")


TRAINING = f"""
import os, signal, sys
sys.path.insert(0, {str(SOURCE)!r})
import numpy as np
import flockstep
from flockstep.arrays.schema import Schema
from flockstep.runtime.loop import Loop
from flockstep.runtime.plan import LocalOptimizer
from flockstep.optimizers.sgd import SGD
from flockstep.strategies.base import Strategy

strategy, dies = sys.argv[1], sys.argv[2:]
params, gradient, target = np.zeros(20, np.float32), np.zeros(20, np.float32), np.arange(20, dtype=np.float32)
arguments = Schema.of({{"w": (20,)}}), Strategy.parse(strategy), LocalOptimizer(SGD(lr=0.1), params), SGD(lr=0.1)
loop = Loop(params, gradient, *arguments)
random = np.random.default_rng(flockstep.rank())
for step in range(60):
    if dies == [str(flockstep.rank()), str(step)]:
        os.kill(os.getpid(), signal.SIGKILL)
    loop.gradients[:] = params - target + 0.01 * random.normal(size=20).astype(np.float32)
    loop.step()
loop.finish()
print(f"rank {{flockstep.rank()}} of {{flockstep.workers()}} learned {{np.abs(params - target).max() < 0.1}}")
"""
"""Trains 20 numbers; with a rank and a step, that worker kills itself there."""
SECRET = "a secret of these tests alone"


def need(*tools: str) -> None:
    missing = [tool for tool in tools if not shutil.which(tool)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def beside(tool: str) -> str:
    """A command that a package has installed for this Python."""
    path = Path(sys.executable).parent / tool
    if not path.exists():
        pytest.skip(f"not installed for this Python: {tool}")
    return str(path)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, ...]]:
    """A host from which runs are started, and two others."""
    if reason := lacking(TOOLS):
        pytest.skip(reason)
    with connected(tmp_path_factory.mktemp("hosts"), *NAMES) as found:
        yield found


@pytest.fixture(scope="module")
def ssh_config(hosts: tuple[Host, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration with which `ssh` reaches the other hosts."""
    need(*ssh.TOOLS)
    return ssh.serve(tmp_path_factory.mktemp("ssh"), hosts[1:])


@pytest.fixture(scope="module")
def srun(hosts: tuple[Host, ...], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command `srun` for a cluster of the other hosts."""
    need(*slurm.TOOLS)
    return ["env", f"SLURM_CONF={slurm.start(tmp_path_factory.mktemp('slurm'), hosts)}", "srun"]


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    """Command of a script that writes its place, and the folder into which it does."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "places").mkdir()
    return [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "places")]


def places(script: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Host → the places of its processes, by rank; those of the last start."""
    found = [json.loads(file.read_text()) for file in Path(script[-1]).iterdir()]
    for file in Path(script[-1]).iterdir():
        file.unlink()
    found.sort(key=lambda one: one["rank"])
    return {host: [one for one in found if one["host"] == host] for host in dict.fromkeys(one["host"] for one in found)}


def check(found: dict[str, list[dict[str, Any]]], by: str, expected: dict[str, int], numbered: bool = True) -> str:
    """The places are those of so many workers on each host; return the run's name on the first host."""
    everyone = [place for those in found.values() for place in those]
    workers = sum(expected.values())
    assert {host: len(those) for host, those in found.items()} == expected
    assert sorted(place["rank"] for place in everyone) == list(range(workers))
    assert {(place["workers"], place["by"]) for place in everyone} == {(workers, by)}
    for count, those in zip(expected.values(), found.values(), strict=True):
        assert sorted(place["local_rank"] for place in those) == list(range(count))
        assert {place["local_workers"] for place in those} == {count}
        assert len({(place["node_rank"], place["nodes"], place["run"]) for place in those}) == 1
    heads = [those[0] for those in found.values()]
    if numbered:
        assert {place["nodes"] for place in heads} == {len(expected)}
        assert sorted(place["node_rank"] for place in heads) == list(range(len(expected)))
        first = next(place for place in heads if place["node_rank"] == 0)
        assert {place["run"] for place in everyone} == {first["run"]}
        where = f"{first['host']}:{port_of(first['run'])}" if len(expected) > 1 else None
        assert {place["coordinator"] for place in everyone} == {where}
    else:
        assert {(place["node_rank"], place["nodes"], place["coordinator"]) for place in heads} == {(None, None, None)}
    return str(heads[0]["run"])


def together(commands: Sequence[Sequence[str]]) -> str:
    """Carry out the commands at the same time; each must succeed. Return what they printed."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(command, **pipes) for command in commands]  # type: ignore[call-overload]
    said = ""
    try:
        for one in started:
            said += one.communicate(timeout=PATIENCE)[0]
            assert one.returncode == 0, said
        return said
    finally:
        for one in started:
            one.kill()
            one.communicate()


def test_srun_on_two_hosts(hosts: tuple[Host, ...], srun: list[str], script: list[str]) -> None:
    runs = []
    for _ in range(2):
        hosts[0].run(*srun, "-N2", "-n3", *script)
        runs.append(check(places(script), "srun", {"d0": 2, "d1": 1}))
    assert runs[0] != runs[1]


@pytest.mark.full
def test_srun_in_other_distributions(hosts: tuple[Host, ...], srun: list[str], script: list[str]) -> None:
    hosts[0].run(*srun, "-N1", "-n3", *script)
    check(places(script), "srun", {"d0": 3})
    hosts[0].run(*srun, "-N2", "-n5", "--distribution=cyclic", *script)
    found = places(script)
    check(found, "srun", {"d0": len(found["d0"]), "d1": len(found["d1"])})
    assert found["d1"][0]["rank"] == 1
    hosts[0].run(*srun, "-w", "d1", "-n2", *script)
    check(places(script), "srun", {"d1": 2})


def test_names_of_hosts_are_those_of_slurm(hosts: tuple[Host, ...], srun: list[str]) -> None:
    for text in ("d[0-1]", "a1,b[01-03,7],c", "r[1-2]n[9-10]", "n[08-11],m"):
        shown = hosts[0].run(*srun[:-1], "scontrol", "show", "hostnames", text)
        assert list(host_names(text)) == shown.split()


def test_mpirun_on_one_host(hosts: tuple[Host, ...], script: list[str]) -> None:
    mpirun = beside("mpirun")
    found = []
    for _ in range(2):
        hosts[1].run(*ROOT, mpirun, "--oversubscribe", "-n", "3", *script)
        found.append(check(places(script), "mpirun", {"d0": 3}))
    assert found[0] != found[1]


def test_mpirun_on_two_hosts(hosts: tuple[Host, ...], ssh_config: Path, script: list[str]) -> None:
    agent = ("--prtemca", "plm_ssh_agent", f"ssh -F {ssh_config}")
    hosts[0].run(*ROOT, beside("mpirun"), *agent, "--host", "d0:2,d1:1", "-n", "3", *script)
    check(places(script), "mpirun", {"d0": 2, "d1": 1}, numbered=False)


def test_mpirun_of_mpich(hosts: tuple[Host, ...], ssh_config: Path, script: list[str], tmp_path: Path) -> None:
    need("mpirun.mpich")
    found = []
    for wrapped in ([], ["sh", "-c", '"$@"; true', "sh"]):
        hosts[1].run("mpirun.mpich", "-n", "2", *wrapped, *script)
        found.append(check(places(script), "mpirun", {"d0": 2}))
    assert found[0] != found[1]
    agent = tmp_path / "agent"
    agent.write_text(f'#!/bin/sh\nexec ssh -F {ssh_config} "$@"\n')
    agent.chmod(0o755)
    by_ssh = ("-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", "d0:2,d1:1")
    hosts[0].run("mpirun.mpich", *by_ssh, "-n", "3", *script)
    check(places(script), "mpirun", {"d0": 2, "d1": 1}, numbered=False)


@pytest.mark.full
def test_torchrun_on_one_host(hosts: tuple[Host, ...], script: list[str]) -> None:
    hosts[1].run(beside("torchrun"), "--standalone", "--nproc-per-node", "2", *script[1:])
    check(places(script), "torchrun", {"d0": 2})


@pytest.mark.full
def test_torchrun_on_two_hosts(hosts: tuple[Host, ...], script: list[str]) -> None:
    """The meeting point is the second host; the coordinator is that of node rank 0, whichever this is."""
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "d1:29411", "--rdzv-id", "one")
    words = (beside("torchrun"), "--nnodes", "2", *meet)
    counts = zip(hosts[1:], ("2", "1"), strict=True)
    together([host.command(*words, "--nproc-per-node", count, *script[1:]) for host, count in counts])
    check(dict(sorted(places(script).items())), "torchrun", {"d0": 2, "d1": 1})


def test_mpirun_that_srun_has_started(hosts: tuple[Host, ...], srun: list[str], script: list[str]) -> None:
    hosts[0].run(*srun, "-n1", *ROOT, beside("mpirun"), "--oversubscribe", "-n", "2", *script)
    check(places(script), "mpirun", {"d0": 2})


class Trial:
    """A script that is started by a launcher, in a folder of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.scratch = Path(tempfile.mkdtemp(prefix="fs-", dir="/tmp"))  # short: a socket's path may not be long
        (folder / "train.py").write_text(TRAINING)
        self.variables = {"TMPDIR": str(self.scratch), "FLOCKSTEP_SECRET": SECRET}

    def words(self, launcher: Sequence[str], *arguments: str, python: bool = True, module: bool = False) -> list[str]:
        """The command of a launcher that starts the script, as a file or as a module."""
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        interpreter = [sys.executable] if python else []
        script = ["-m", "train"] if module else ["train.py"]
        return ["env", "-C", str(self.folder), *variables, *launcher, *interpreter, *script, *arguments]

    def summary(self, workers: int) -> dict[str, Any]:
        """The summary of the only record, which must be whole and hold the events of every worker."""
        (record,) = (path for path in (self.folder / "runs").iterdir() if not path.name.startswith("."))
        found: dict[str, Any] = json.loads((record / "summary.json").read_text())
        stepped = {event.rank for event in RunFolder(record).read_events() if isinstance(event, StepEvent)}
        assert stepped == set(range(workers)) or found["status"] == "failed"
        return found


@pytest.fixture
def trial(tmp_path: Path, hosts: tuple[Host, ...]) -> Iterator[Trial]:
    """A script to be started; at the end nothing of it may be left on any host."""
    before = [host.processes() for host in hosts]
    one = Trial(tmp_path)
    try:
        yield one
        after = [host.processes() for host in hosts]
        wait_until(lambda: [host.processes() for host in hosts] == before, PATIENCE, f"{after} is left of {before}")
        theirs = ("ompi.", "prte", "torchelastic_", "torchinductor_")
        assert [path.name for path in one.scratch.iterdir() if not path.name.startswith(theirs)] == []
    finally:
        shutil.rmtree(one.scratch, ignore_errors=True)


def learned(out: str, workers: int) -> None:
    """Every worker says that it has learned."""
    assert sorted(re.findall("rank .* learned .*", out)) == [
        f"rank {rank} of {workers} learned True" for rank in range(workers)
    ]


def test_a_run_under_mpirun_is_that_of_flockstep_launch(hosts: tuple[Host, ...], trial: Trial) -> None:
    launcher = [*ROOT, beside("mpirun"), "--oversubscribe", "-n", "3"]
    learned(hosts[1].run(*trial.words(launcher, "ps")), 3)
    found = trial.summary(3)
    assert (found["status"], found["workers"]) == ("finished", 3)
    shutil.rmtree(trial.folder / "runs")
    learned(hosts[1].run(*trial.words([*COMMAND, "launch", "-n", "3"], "ps", python=False)), 3)
    assert trial.summary(3)["hashes"] == found["hashes"]


def test_a_run_under_srun_on_two_hosts(hosts: tuple[Host, ...], srun: list[str], trial: Trial) -> None:
    learned(hosts[0].run(*trial.words([*srun, "-N2", "-n3"], "ps(shards=2)")), 3)
    assert trial.summary(3)["status"] == "finished"


@pytest.mark.parametrize("launcher", few(["mpirun", "torchrun"], "torchrun"))
def test_replicas_of_two_processes(hosts: tuple[Host, ...], trial: Trial, launcher: str) -> None:
    """The script says how many processes hold a replica, because these launchers do not know."""
    (trial.folder / "train.py").write_text(REPLICAS)
    words = {"mpirun": [*ROOT, "mpirun", "--oversubscribe", "-n"], "torchrun": ["torchrun", "--nproc-per-node"]}[
        launcher
    ]
    words[words.index(launcher)] = beside(launcher)
    of_replicas(hosts[1].run(*trial.words([*words, "4"], "2", python=launcher == "mpirun")), 4, 2)
    assert trial.summary(4)["status"] == "finished"


@pytest.mark.full
def test_replicas_of_two_processes_under_srun(hosts: tuple[Host, ...], srun: list[str], trial: Trial) -> None:
    (trial.folder / "train.py").write_text(REPLICAS)
    code, said = hosts[0].ended(*trial.words([*srun, "-N2", "-n4", "--ntasks-per-node=2"], "2"))
    assert code == 0, said
    of_replicas(said, 4, 2)
    assert "flockstep: replicas of 2 processes: 0 on node 0 (d0), 1 on node 1 (d1)\n" in said, said
    code, said = hosts[0].ended(*trial.words([*srun, "-N2", "-n4", "--distribution=cyclic"], "2"))
    assert code != 0
    refused = "replica 0 of 2 processes has processes on node 0 (d0) and node 1 (d1); give each host a multiple of 2"
    assert f"flockstep: the processes of one replica must run on one host, but {refused}" in said, said
    assert "Traceback" not in said


def by_ssh(ssh_config: Path, hosts: str, *more: str) -> list[str]:
    """The command that launches on hosts which ssh reaches."""
    return [*COMMAND, "launch", "--hosts", hosts, "--ssh", f"ssh -F {ssh_config}", *more]


@pytest.mark.parametrize("module", few([False, True], False))
def test_a_run_on_two_hosts_by_ssh(hosts: tuple[Host, ...], ssh_config: Path, trial: Trial, module: bool) -> None:
    command = trial.words(by_ssh(ssh_config, "d0:2,d1"), "ps(shards=2)", python=False, module=module)
    learned(hosts[0].run(*command), 3)
    found = trial.summary(3)
    assert (found["status"], found["workers"]) == ("finished", 3)
    assert "secret" not in (trial.folder / "runs").rglob("config.toml").__next__().read_text()


@pytest.mark.full
def test_a_killed_worker_ends_a_run_by_ssh(hosts: tuple[Host, ...], ssh_config: Path, trial: Trial) -> None:
    command = trial.words(by_ssh(ssh_config, "d0:2,d1:2"), "all_reduce", "3", "20", python=False)
    code, said = hosts[0].ended(*command)
    assert code == 1
    assert re.search(r"flockstep: worker 3 was killed by SIGKILL at about step", said), said
    assert trial.summary(4)["status"] == "failed"


@pytest.mark.parametrize(
    ("where", "more", "said"),
    [
        ("d0:2,nowhere:1", (), "ssh nowhere ended with exit code 255 before the run began: .*; try: ssh nowhere true"),
        (
            "d0",
            ("--remote-python", "/no/python"),
            "ssh d0 ended with exit code 12[67] before the run .*/no/python",
        ),
        ("d0:x", (), "--hosts must list hosts, each with its number of workers, got 'd0:x'"),
        ("d0:1,d0:1", (), "--hosts must name every host once"),
        ("d0:2", ("-n", "3"), "-n must be 2, the number of workers in --hosts d0:2, got 3; leave -n out"),
        ("d0:2", ("--nodes", "2"), "--nodes 2 cannot be combined with --hosts; leave one of them out"),
    ],
)
def test_hosts_that_ssh_cannot_use(
    hosts: tuple[Host, ...], ssh_config: Path, trial: Trial, where: str, more: tuple[str, ...], said: str
) -> None:
    code, out = hosts[0].ended(*trial.words(by_ssh(ssh_config, where, *more), "all_reduce", python=False))
    assert code in (1, 2)
    assert re.search(said, out), out


@pytest.mark.full
def test_a_run_under_mpirun_on_two_hosts(hosts: tuple[Host, ...], ssh_config: Path, trial: Trial) -> None:
    passed = [
        word for name in ("FLOCKSTEP_SECRET", "TMPDIR", "FLOCKSTEP_COORDINATOR=d0:21077") for word in ("-x", name)
    ]
    agent = ("--prtemca", "plm_ssh_agent", f"ssh -F {ssh_config}")
    launcher = [*ROOT, beside("mpirun"), *agent, *passed, "--host", "d0:2,d1:2", "-n", "4"]
    learned(hosts[0].run(*trial.words(launcher, "local_sgd")), 4)
    assert trial.summary(4)["status"] == "finished"


@pytest.mark.full
@pytest.mark.parametrize("nodes", [(1, 2), (1, 1)], ids=["two hosts", "one host"])
def test_a_run_under_torchrun_with_two_nodes(hosts: tuple[Host, ...], trial: Trial, nodes: tuple[int, int]) -> None:
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "d1:29412", "--rdzv-id", "run")
    words = (beside("torchrun"), "--nnodes", "2", *meet, "--nproc-per-node", "2")
    out = together([hosts[node].command(*trial.words(words, "all_reduce", python=False)) for node in nodes])
    learned(out, 4)
    assert trial.summary(4)["status"] == "finished"


def test_a_killed_worker_ends_a_run_under_srun(hosts: tuple[Host, ...], srun: list[str], trial: Trial) -> None:
    code, said = hosts[0].ended(*trial.words([*srun, "-N2", "-n3"], "ps", "2", "20"))
    assert code != 0
    assert re.search(r"flockstep: worker 2 has ended at about step (20|1?[0-9])\b", said), said
    assert trial.summary(3)["status"] == "failed"
    assert "Traceback" not in said


@pytest.mark.full
def test_others_continue_where_the_strategy_lets_them(hosts: tuple[Host, ...], srun: list[str], trial: Trial) -> None:
    code, said = hosts[0].ended(*trial.words([*srun, "-N2", "-n3"], "asgd", "2", "20"))
    assert code != 0, "srun itself tells that a task was killed"
    learned("\n".join(line for line in said.splitlines() if "rank 2" not in line) + "\nrank 2 of 3 learned True", 3)
    found = trial.summary(3)
    assert found["status"] == "finished"


@pytest.mark.full
def test_a_killed_worker_ends_a_run_under_mpirun(hosts: tuple[Host, ...], trial: Trial) -> None:
    launcher = [*ROOT, beside("mpirun"), "--oversubscribe", "-n", "2"]
    code, said = hosts[1].ended(*trial.words(launcher, "ps", "1", "20"))
    assert code != 0
    assert re.search("flockstep: worker [01] has ended at about step", said), said


@pytest.mark.full
def test_what_a_run_over_hosts_needs(hosts: tuple[Host, ...], srun: list[str], ssh_config: Path, trial: Trial) -> None:
    trial.variables["FLOCKSTEP_SECRET"] = ""
    code, said = hosts[0].ended(*trial.words([*srun, "-N2", "-n2"], "all_reduce"))
    assert code != 0
    assert said.count("flockstep: a run over several hosts needs a secret, got none; set FLOCKSTEP_SECRET") == 2, said
    assert "Traceback" not in said
    assert not (trial.folder / "runs").exists()
    agent = ("--prtemca", "plm_ssh_agent", f"ssh -F {ssh_config}")
    launcher = [*ROOT, beside("mpirun"), *agent, "-x", "TMPDIR", "--host", "d0:1,d1:1", "-n", "2"]
    code, said = hosts[0].ended(*trial.words(launcher, "all_reduce"))
    assert code != 0
    assert "flockstep: mpirun does not tell which host runs rank 0; pass FLOCKSTEP_COORDINATOR" in said


def on_slurm(srun: list[str], *more: str, command: str = "launch") -> list[str]:
    """The command that submits a job to the cluster of `srun`."""
    return [*srun[:-1], *COMMAND, command, "--on", "slurm", *more]


def canceled(host: Host, words: list[str], ready: Callable[[], bool]) -> str:
    """Start a command, press Ctrl-C when it is `ready`; return standard error. Its exit code must be 130."""
    process = subprocess.Popen(host.command(*words), stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: ready() or process.poll() is not None, PATIENCE, "a command that can be canceled")
        (inner,) = content(f"/proc/{process.pid}/task/{process.pid}/children").split()
        os.kill(int(inner), signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, said
    return said


def test_a_job_of_slurm_on_two_hosts(hosts: tuple[Host, ...], srun: list[str], trial: Trial) -> None:
    command = on_slurm(srun, "--nodes", "2", "-n", "3", "--json", "--slurm-options", "--comment 'a b'")
    said = hosts[0].run(*trial.words(command, "ps(shards=2)", python=False))
    learned(said, 3)
    assert json.loads(said.splitlines()[-1])["status"] == "finished"
    assert trial.summary(3)["workers"] == 3
    assert [path.name for path in (trial.folder / "runs").iterdir() if path.name.startswith(".")] == []


@pytest.mark.full
def test_a_job_that_fails_ends_with_the_exit_code_of_its_command(
    hosts: tuple[Host, ...], srun: list[str], trial: Trial
) -> None:
    code, said = hosts[0].ended(*trial.words(on_slurm(srun, "-n", "2"), "all_reduce", "1", "20", python=False))
    assert code == 1, said
    assert re.search(r"flockstep: worker 1 was killed by SIGKILL at about step", said), said
    assert trial.summary(2)["status"] == "failed"


@pytest.mark.full
def test_a_canceled_job_leaves_a_whole_record_and_nothing_else(
    hosts: tuple[Host, ...], srun: list[str], trial: Trial
) -> None:
    options = ("--nodes", "2", "-n", "2", "-s", "gossip", "--steps", "1000000", "--out", "runs/one")
    words = trial.words(on_slurm(srun, "softmax", *options, command="train"), python=False)[:-1]
    stepped = trial.folder / "runs" / "one" / "events" / "worker-1.jsonl"
    said = canceled(hosts[0], words, lambda: b'"step"' in content(stepped))
    assert re.search(r"flockstep: job \d+ runs on d\[0-1\]\n", said), said
    assert re.search(r"flockstep: interrupted; job \d+ has ended\n$", said), said
    assert trial.summary(2)["status"] == "interrupted"


def test_a_job_that_waits_is_canceled_and_slurm_does_not_know_the_secret(
    hosts: tuple[Host, ...], srun: list[str], trial: Trial
) -> None:
    """Slurm keeps the script and the environment of a job where its administrators can read them."""
    settings = Path(srun[1].partition("=")[2])
    kept: list[bytes] = []

    def waits() -> bool:
        files = [content(path) for path in (settings.parent / "state").glob("hash.*/job.*/*")]
        ours = str(trial.folder).encode(), str(trial.scratch).encode()  # in its script, in its environment
        kept[:] = [data for data in files if any(path in data for path in ours)]
        return len(kept) == 2

    command = on_slurm(srun, "-n", "2", "--slurm-options=--hold")
    said = canceled(hosts[0], trial.words(command, "ps", python=False), waits)
    assert re.search(r"flockstep: job \d+ waits: JobHeldUser\n", said), said
    assert not any(SECRET.encode() in data for data in kept)
    assert list((trial.folder / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("more", "code", "expected"),
    [
        (("--slurm-options", "--partition=none"), 2, "Slurm did not accept the job: .*[Ii]nvalid partition name"),
        (("--slurm-options", "'"), 2, "--slurm-options must be words as in a shell, got "),
        (("--nodes", "3"), 2, "--nodes must be >= 1 and <= 2, the number of workers"),
        (("--cpus-per-worker", "0.5"), 2, "--cpus-per-worker must be a whole number >= 1 on Slurm, got 0.5"),
        (("--coordinator", "d0:29400"), 2, "--coordinator d0:29400 cannot be combined with --on slurm"),
        (("--out", "/run/one"), 2, "the host d[01] of job .* cannot see both .* and /run; work in a folder"),
        (("--remote-python", "/no/python"), 127, "/no/python: not found"),
    ],
)
@pytest.mark.full
def test_jobs_that_cannot_run(
    hosts: tuple[Host, ...], srun: list[str], trial: Trial, more: tuple[str, ...], code: int, expected: str
) -> None:
    (trial.folder / "runs").mkdir()
    ended, said = hosts[0].ended(*trial.words(on_slurm(srun, "-n", "2", *more), "ps", python=False))
    assert ended == code, said
    assert re.search(expected, said), said
    assert list((trial.folder / "runs").iterdir()) == []


@pytest.mark.full
def test_a_job_whose_output_cannot_be_read_is_canceled_and_its_output_kept(
    hosts: tuple[Host, ...], srun: list[str], trial: Trial
) -> None:
    options = ("-n", "2", "-s", "gossip", "--steps", "1000000", "--out", "runs/one")
    words = trial.words(on_slurm(srun, "softmax", *options, command="train"), python=False)[:-1]
    process = subprocess.Popen(hosts[0].command(*words), stderr=subprocess.PIPE, text=True)
    try:
        stepped = trial.folder / "runs" / "one" / "events" / "worker-1.jsonl"
        wait_until(lambda: b'"step"' in content(stepped) or process.poll() is not None, PATIENCE, "a job that trains")
        (folder,) = (trial.folder / "runs").glob(".flockstep-slurm-*")
        (folder / "out").rename(folder / "moved")
        (folder / "out").mkdir()  # a file that cannot be read; the job goes on
        _, said = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1, said
    assert re.search(r"job \d+ was canceled, because .*: IsADirectoryError: .*; its output is in (\S+)", said), said
    assert {path.name for path in folder.iterdir()} == {"out", "moved", "err"}
    assert hosts[0].run(*srun[:-1], "squeue", "--noheader").split() == []
    assert trial.summary(2)["status"] == "interrupted"


@pytest.mark.full
def test_a_job_that_somebody_else_cancels_says_so(hosts: tuple[Host, ...], srun: list[str], trial: Trial) -> None:
    command = trial.words(on_slurm(srun, "-n", "2", "--slurm-options=--hold --job-name=theirs"), "ps", python=False)
    process = subprocess.Popen(hosts[0].command(*command), stderr=subprocess.PIPE, text=True)
    try:
        listed = [*srun[:-1], "squeue", "--noheader", "--name=theirs", "--format=%i"]
        wait_until(lambda: hosts[0].run(*listed).strip().isdecimal(), PATIENCE, "the job")
        hosts[0].run(*srun[:-1], "scancel", "--name=theirs")
        _, said = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1, said
    assert re.search(r"flockstep: job \d+ was canceled\n$", said), said


@pytest.mark.full
@pytest.mark.parametrize(
    ("option", "harm", "expected"),
    [
        ("--comment=none", "update nodename=d1 state=down reason=test", "lost a host"),
        ("--time=1", "", "reached its time limit; allow more time with --slurm-options"),
    ],
    ids=["a lost host", "the time limit"],
)
def test_a_job_that_slurm_ends_says_why(
    hosts: tuple[Host, ...], srun: list[str], trial: Trial, option: str, harm: str, expected: str
) -> None:
    options = ("--nodes", "2", "-n", "2", "-s", "all_reduce", "--steps", "100000000", "--out", "runs/one")
    words = (*options, "--evaluate-every", "100000000", "--slurm-options", option)
    command = trial.words(on_slurm(srun, "softmax", *words, command="train"), python=False)[:-1]
    process = subprocess.Popen(hosts[0].command(*command), stderr=subprocess.PIPE, text=True)
    try:
        stepped = trial.folder / "runs" / "one" / "events" / "worker-1.jsonl"
        wait_until(lambda: b'"step"' in content(stepped), PATIENCE, "a step of worker 1")
        if harm:
            hosts[0].run(*srun[:-1], "scontrol", *harm.split())
        _, said = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1, said
    assert re.search(rf"flockstep: job \d+ {expected}", said.splitlines()[-1]), said
    assert trial.summary(2)["status"] in ("failed", "interrupted"), "the record is complete"
    idle = [*srun[:-1], "sinfo", "--noheader", "--format=%T %D"]
    wait_until(lambda: hosts[0].run(*idle).split() == ["idle", "2"], PATIENCE, "both hosts, for the next test")


@pytest.mark.full
def test_a_job_that_slurm_starts_again_continues(hosts: tuple[Host, ...], srun: list[str], trial: Trial) -> None:
    """The batch script of the page on resuming, on two hosts; Slurm ends the job and starts the job again."""
    record = trial.folder / "runs" / "one"
    train = ["train", paced(trial.folder, slow_after=40), "-s", "all_reduce", "-n", "2", "--steps", "120"]
    train += ["--checkpoint-every", "10", "--out", str(record), "--resume", "--on", "slurm"]
    batch = ["--requeue", "--parsable", "--nodes=2", "--ntasks=2", "--output=out", "--open-mode=append"]
    command = [*srun[:-1], "sbatch", *batch, f"--wrap=exec {shlex.join([*COMMAND, *train])}"]
    job = hosts[0].run(*trial.words(command, python=False)[:-1]).strip()
    said = trial.folder / "out"
    wait_until(lambda: any(record.glob("checkpoints/*/manifest.json")), PATIENCE, f"a checkpoint: {content(said)!r}")
    hosts[0].run(*srun[:-1], "scontrol", "requeue", job)
    state = [*srun[:-1], "squeue", "--noheader", f"--jobs={job}", "--format=%T"]
    wait_until(lambda: hosts[0].run(*state).strip() == "PENDING", PATIENCE, f"a job that waits: {content(said)!r}")
    go_on(trial.folder)
    hosts[0].run(*srun[:-1], "scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_until(lambda: b'"finished"' in content(record / "summary.json"), PATIENCE, f"the end: {content(said)!r}")
    assert trial.summary(2)["notes"][0].startswith("resumed from step ")
    steps = [event.step for event in RunFolder(record).read_events() if isinstance(event, StepEvent) and not event.rank]
    assert steps == list(range(1, 121))
    wait_until(lambda: not hosts[0].run(*state).strip(), PATIENCE, "the end of the job")


@pytest.mark.full
def test_a_comparison_in_one_allocation(hosts: tuple[Host, ...], srun: list[str], trial: Trial) -> None:
    """Every run starts the agents of its hosts; repeated, it keeps what has finished."""
    words = ("softmax", "-s", "all_reduce(ring)", "-s", "local_sgd", "-n", "2", "--steps", "20", "--out", "runs/both")
    command = trial.words(on_slurm(srun, "--nodes", "2", *words, command="compare"), python=False)[:-1]
    assert "report: runs/both/report.html" in hosts[0].run(*command)
    records = [RunFolder(file.parent) for file in (trial.folder / "runs" / "both").glob("*/config.toml")]
    assert [record.read_summary().status for record in records] == ["finished"] * 2
    for record in records:
        assert {event.rank for event in record.read_events() if isinstance(event, StepEvent)} == {0, 1}
    code, said = hosts[0].ended(*command)
    assert (code, said.count("kept from before")) == (0, 2), said


DOCTOR = """
from flockstep.doctor import examine, usual
for one in examine(test for test in usual() if test.name in ("srun", "sbatch")).tried:
    print(one.name, one.status, one.detail)
"""


@pytest.mark.full
def test_doctor_tries_slurm(hosts: tuple[Host, ...], srun: list[str], trial: Trial) -> None:
    said = hosts[0].run(*trial.words([*srun[:-1], sys.executable, "-c", DOCTOR], python=False)[:-1])
    assert said.splitlines() == ["srun works 2 processes know their ranks", "sbatch works would accept a job"]
