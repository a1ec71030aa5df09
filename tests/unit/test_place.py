"""The place of a process as torchrun, mpirun and srun tell it; tests/end_to_end/test_launchers.py asks real ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flockstep
from flockstep.errors import ConfigurationError
from flockstep.runtime.adoption import folder_of
from flockstep.runtime.place import PORTS, Place, host_names, place_from, port_of, tasks_per_node
from support.launch_variables import OPENMPI, SRUN, TORCHRUN
from support.matrix import each

LAUNCHERS = {"torchrun": TORCHRUN, "mpirun": OPENMPI, "srun": SRUN}


def test_torchrun_tells_the_place_and_the_coordinators_host() -> None:
    run = "none node0:42547 0"
    assert place_from(TORCHRUN) == Place(1, 4, 1, 2, 0, 2, f"node0:{port_of(run)}", "torchrun", run)
    again = place_from({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert again is not None
    assert again.run != run, "after a restart, processes of the former run may still be there"


def test_mpirun_tells_neither_the_number_of_hosts_nor_the_coordinators() -> None:
    assert place_from(OPENMPI) == Place(1, 4, 1, 3, None, None, None, "mpirun", "prterun-node0-28356@1")
    alone = place_from({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "3"})
    assert alone is not None
    assert (alone.node_rank, alone.nodes, alone.coordinator) == (0, 1, None)


def test_srun_tells_the_place_and_the_coordinators_host() -> None:
    assert place_from(SRUN) == Place(1, 4, 1, 3, 0, 2, f"d0:{port_of('17.0')}", "srun", "17.0")


def test_workers_of_one_host_need_no_coordinator() -> None:
    one = {"GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "4"}
    here = {**SRUN, "SLURM_STEP_NODELIST": "d0", "SLURM_STEP_TASKS_PER_NODE": "4"}
    for place in (place_from({**TORCHRUN, **one}), place_from(here)):
        assert place is not None
        assert (place.all_here, place.coordinator) == (True, None)


def test_the_users_coordinator_comes_first() -> None:
    def check(environment: dict[str, str], given: str) -> None:
        place = place_from({**environment, "FLOCKSTEP_COORDINATOR": given})
        assert place is not None
        assert place.coordinator == given

    each(check, [(one, given) for one in LAUNCHERS.values() for given in ("a.b-c:1", "10.0.0.1:65535", "[fd00::1]:7")])


@pytest.mark.parametrize("given", ["", "node0", "node0:", ":7", "node0:0", "node0:65536", "fd00::1:7", "a b:7", "a:7x"])
def test_a_coordinator_that_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(ConfigurationError, match=r"FLOCKSTEP_COORDINATOR must be HOST:PORT, got .*write node0:29400"):
        place_from({**SRUN, "FLOCKSTEP_COORDINATOR": given})


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (0, r"1 of 2 processes of this host did not join within 0\.5 s; .*give these functions a longer timeout"),
        (1, r"rank 1 has waited 0\.5 s for the process with local rank 0 of this host"),
    ],
)
def test_a_script_says_how_long_it_waits_for_the_other_processes(rank: int, said: str, tmp_path: Path) -> None:
    place = dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), "2")
    place |= dict.fromkeys(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), str(rank))
    place |= {"PMIX_NAMESPACE": str(tmp_path)}
    script = [sys.executable, "-c", "import flockstep; flockstep.join(timeout=0.5)"]
    done = subprocess.run(
        script, check=False, capture_output=True, text=True, env={**os.environ, **place}, cwd=tmp_path
    )
    assert done.returncode
    assert re.search(said, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_a_timeout_of_no_time_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="timeout must be > 0 s, got 0; 600 is the default"):
        flockstep.join(timeout=0)


def test_an_address_of_ipv6_stands_in_brackets() -> None:
    place = place_from({**TORCHRUN, "MASTER_ADDR": "fd00::1"})
    assert place is not None
    assert place.coordinator == f"[fd00::1]:{port_of(place.run)}"


def test_one_process_is_alone() -> None:
    alone = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "1", "RANK": "0"}
    each(
        lambda environment: _is_none(environment),
        [
            {},
            alone,
            {**SRUN, **alone},  # srun has started torchrun, which decides
            {"OMPI_COMM_WORLD_SIZE": "1"},
            {"PMI_SIZE": "1"},
            {"WORLD_SIZE": "1"},
            {"SLURM_STEP_NUM_TASKS": "1"},
            {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # the script of sbatch, which runs once
        ],
    )


def _is_none(environment: dict[str, str]) -> None:
    assert place_from(environment) is None


def test_the_launcher_that_srun_has_started_decides() -> None:
    for own in (TORCHRUN, OPENMPI):
        assert place_from({**SRUN, **own}) == place_from(own)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_variable_is_needed(launcher: str) -> None:
    given = LAUNCHERS[launcher]
    size = {"torchrun": "WORLD_SIZE", "mpirun": "OMPI_COMM_WORLD_SIZE", "srun": "SLURM_STEP_NUM_TASKS"}[launcher]
    for name in given.keys() - {size, "TORCHELASTIC_RUN_ID"}:
        advice = f"let {launcher} start the script again, or unset {size} to train in one process"
        said = f"^{launcher} set {size}=4, but not {name}, [^;]*; {advice}$"
        with pytest.raises(ConfigurationError, match=said):
            place_from({one: value for one, value in given.items() if one != name})


@pytest.mark.parametrize(
    ("launcher", "wrong", "said"),
    [
        ("torchrun", {"RANK": "4"}, "RANK=4 contradicts WORLD_SIZE=4, which allows at most 3"),
        ("torchrun", {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 contradicts LOCAL_WORLD_SIZE=2, which allows at most 1"),
        ("torchrun", {"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 contradicts WORLD_SIZE=4"),
        ("torchrun", {"GROUP_RANK": "2"}, "GROUP_RANK=2 contradicts GROUP_WORLD_SIZE=2"),
        ("torchrun", {"WORLD_SIZE": "0"}, "WORLD_SIZE must be a number >= 1, got 0"),
        ("torchrun", {"RANK": "-1"}, "RANK must be a number >= 0, got -1"),
        ("mpirun", {"OMPI_COMM_WORLD_RANK": "one"}, "OMPI_COMM_WORLD_RANK must be a number >= 0, got one"),
        ("srun", {"SLURM_LOCALID": "3"}, "SLURM_LOCALID=3 contradicts SLURM_STEP_TASKS_PER_NODE=3,1"),
        ("srun", {"SLURM_NODEID": "1"}, "SLURM_LOCALID=1 contradicts"),
        ("srun", {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, "must have one number for each host"),
        ("srun", {"SLURM_STEP_TASKS_PER_NODE": "2,1"}, "their sum must be SLURM_STEP_NUM_TASKS=4"),
        ("srun", {"SLURM_STEP_TASKS_PER_NODE": "3;1"}, "'3;1' is not a list of task counts"),
        ("srun", {"SLURM_STEP_NODELIST": "d[0-1"}, r"'d\[0-1' is not a list of hosts"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(launcher: str, wrong: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        place_from({**LAUNCHERS[launcher], **wrong})


def test_unknown_launchers_are_refused() -> None:
    for name in ("MV2_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"):
        with pytest.raises(ConfigurationError, match=rf"started 4 processes \({name}=4\).*or unset {name}"):
            place_from({name: "4"})


def test_ports_lie_in_their_range_and_are_spread_over_it() -> None:
    found = {port_of(f"{job}.0") for job in range(2000)}
    assert found <= set(PORTS)
    assert len(found) > 1600


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("d[0-1]", ["d0", "d1"]),
        ("a1,b[01-03,7]-ib,c", ["a1", "b01-ib", "b02-ib", "b03-ib", "b7-ib", "c"]),
        ("r[1-2]n[9-10]", ["r1n9", "r1n10", "r2n9", "r2n10"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
    ],
)
def test_names_of_hosts(text: str, names: list[str]) -> None:
    assert list(host_names(text)) == names


def test_no_names_of_hosts() -> None:
    for text in ("", ",", "a,", "a b", "d[0-1", "d]", "d[]", "d[a-b]", "d[1-2-3]", "d[-1]", "d[1,]"):
        with pytest.raises(ValueError, match="is not a list of"):
            list(host_names(text))


def test_numbers_of_tasks() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("4") == [4]
    for text in ("", "2(x)", "2x3", "2,", "a"):
        with pytest.raises(ValueError, match="is not a list of task counts"):
            tasks_per_node(text)


def test_the_agents_of_two_nodes_on_one_host_have_different_folders() -> None:
    """As when both nodes of `torchrun --nnodes 2` are tried on one host; the coordinator's port is that of both."""
    both = [place for node in ("0", "1") if (place := place_from({**TORCHRUN, "GROUP_RANK": node})) is not None]
    assert len({folder_of(place) for place in both}) == 2
    assert len({place.coordinator for place in both}) == 1
