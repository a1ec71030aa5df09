"""torchrun, mpirun, srun and ssh themselves, on hosts in namespaces: what each tells the processes that it starts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flockstep.drivers.place import host_names, port_of
from support import slurm, ssh
from support.named_hosts import TOOLS, Host, connected, lacking
from support.processes import PATIENCE, SOURCE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

SCRIPT = f"""
import json, os, socket, sys
from dataclasses import asdict
from pathlib import Path
sys.path.insert(0, {str(SOURCE)!r})
from flockstep.drivers.place import place_from

place, host = place_from(os.environ), socket.gethostname()
file = Path(sys.argv[1]) / f"{{host}}-{{os.getpid()}}.json"
file.write_text(json.dumps(dict(asdict(place), host=host)))
"""
ROOT = ("env", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
NAMES = ("home", "d0", "d1")


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


def together(commands: Sequence[Sequence[str]]) -> None:
    """Carry out the commands at the same time; each must succeed."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(command, **pipes) for command in commands]  # type: ignore[call-overload]
    try:
        for one in started:
            said, _ = one.communicate(timeout=PATIENCE)
            assert one.returncode == 0, said
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
