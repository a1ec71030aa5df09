"""The place of a process among the processes that torchrun, mpirun or srun has started, from its environment."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flockstep.errors import ConfigurationError

COORDINATOR = "FLOCKSTEP_COORDINATOR"
"""Environment variable with the coordinator's HOST:PORT, for launchers that provide no host or an unsuitable host."""
SECRET = "FLOCKSTEP_SECRET"  # noqa: S105 - the name of a variable
"""Environment variable that holds the secret of a run over several hosts."""
PORTS = range(20000, 30000)
"""Ports of coordinators. A run uses the port at index CRC-32(`Place.run`) modulo 10,000, so that all hosts compute the
same port. The ports are below those that operating systems assign to outgoing connections.
"""
PROXY = "hydra_pmi_proxy"
"""Name of the process that starts the ranks of a host under MPICH's mpirun."""

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Place:
    """The place of a process among the processes that a launcher has started."""

    rank: int
    workers: int
    local_rank: int
    """Number of this process among the processes of its host, from 0; the numbers need not follow the order of the
    ranks.
    """
    local_workers: int
    node_rank: int | None
    """Number of this host, from 0; None if the launcher does not provide the number."""
    nodes: int | None
    """Number of hosts; None if the launcher does not provide the number."""
    coordinator: str | None
    """HOST:PORT of the coordinator; None if all workers are on this host, or if the launcher provides no host."""
    by: str
    """Name of the launcher that started the process: torchrun, mpirun or srun."""
    run: str
    """Text that is equal in all processes of the run on this host, and different in the processes of other runs."""

    @property
    def all_here(self) -> bool:
        """Whether all workers of the run are on this host."""
        return self.local_workers == self.workers


def place_from(environment: Environment) -> Place | None:
    """Return the place of the process with these environment variables; None if no launcher has started several
    processes.

    If several launchers have left variables, torchrun comes before mpirun, and mpirun before srun, which often starts
    torchrun or mpirun.

    Raises:
        ConfigurationError: the variables of the launcher contradict each other or are incomplete, or the launcher is
            none of the three.
    """
    for size, mark, by, read in _LAUNCHERS:
        if size in environment and mark in environment:
            its = _Variables(environment, size, by)
            if its.workers == 1:
                return None
            place, own = read(its), environment.get(COORDINATOR)
            return place if own is None else replace(place, coordinator=_checked(own))
    return None


def port_of(run: str) -> int:
    """Return the coordinator's port in a run; see `PORTS`."""
    return PORTS[zlib.crc32(run.encode()) % len(PORTS)]


def host_names(text: str) -> Iterator[str]:
    """Return the names of hosts from Slurm's short form, such as a1,b[01-03,7]-ib.

    Raises:
        ValueError: the text is not a list of hosts.
    """
    entries = re.findall(r"(?:[^,\[\]\s]|\[[0-9,-]+\])+", text)
    if not entries or ",".join(entries) != text:
        raise ValueError(f"{text!r} is not a list of hosts")
    for entry in entries:
        pieces = re.split(r"\[(.*?)\]", entry)  # at odd positions: numbers
        choices = [_numbers(piece) if at % 2 else [piece] for at, piece in enumerate(pieces)]
        yield from map("".join, itertools.product(*choices))


def _numbers(text: str) -> list[str]:
    """The numbers of 01-03,7 with their leading zeros: 01, 02, 03, 7."""
    found: list[str] = []
    for entry in text.split(","):
        first, _, last = entry.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ValueError(f"{text!r} is not a list of numbers")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return found


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each host from Slurm's short form: 2(x3),1 means 2, 2, 2, 1.

    Raises:
        ValueError: the text is not a list of numbers.
    """
    counts: list[int] = []
    for entry in text.split(","):
        found = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", entry)
        if found is None:
            raise ValueError(f"{text!r} is not a list of task counts")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


class _Variables:
    """The variables of one launcher, and the sentences in which they are refused."""

    def __init__(self, environment: Environment, size: str, by: str):
        """`size` is the variable with the number of processes."""
        self._environment = environment
        self.size, self.by = size, by
        self.workers = self.number(size, 1)

    def error(self, reason: str) -> ConfigurationError:
        """The error for variables of which `reason` says what is wrong."""
        return ConfigurationError(
            f"{reason}; let {self.by} start the script again, or unset {self.size} to train in one process"
        )

    def shown(self, name: str) -> str:
        """A variable as a shell would set it."""
        return f"{name}={self._environment.get(name, '')}"

    def text(self, name: str) -> str:
        """A variable that the launcher always sets."""
        if not (found := self._environment.get(name, "")):
            raise self.error(f"{self.by} set {self.shown(self.size)}, but not {name}, which it sets in every process")
        return found

    def number(self, name: str, least: int = 0, most: int | None = None, limit: str = "") -> int:
        """A number from `least` to `most`, the latter according to the variable `limit`."""
        text = self.text(name)
        if not (text.isascii() and text.isdecimal()) or int(text) < least:
            raise self.error(f"{name} must be a number >= {least}, got {text}")
        if most is not None and int(text) > most:
            raise self.error(f"{self.shown(name)} contradicts {self.shown(limit)}, which allows at most {most}")
        return int(text)

    def place(self, rank: str, local_rank: str, local_size: str) -> Place:
        """The place as three variables tell it, without a coordinator and the run's name."""
        local_workers = self.number(local_size, 1, self.workers, self.size)
        return Place(
            rank=self.number(rank, 0, self.workers - 1, self.size),
            workers=self.workers,
            local_rank=self.number(local_rank, 0, local_workers - 1, local_size),
            local_workers=local_workers,
            node_rank=0 if local_workers == self.workers else None,
            nodes=1 if local_workers == self.workers else None,
            coordinator=None,
            by=self.by,
            run="",
        )


def _torchrun(its: _Variables) -> Place:
    place = its.place("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    nodes = its.number("GROUP_WORLD_SIZE", 1, its.workers, its.size)
    node = its.number("GROUP_RANK", 0, nodes - 1, "GROUP_WORLD_SIZE")
    host, port = its.text("MASTER_ADDR"), its.text("MASTER_PORT")
    run = f"{its.text('TORCHELASTIC_RUN_ID')} {host}:{port} {its.text('TORCHELASTIC_RESTART_COUNT')}"
    return _met(replace(place, node_rank=node, nodes=nodes, run=run), host)


def _openmpi(its: _Variables) -> Place:
    place = its.place("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return replace(place, run=its.text("PMIX_NAMESPACE"))


def _hydra(its: _Variables) -> Place:
    place = its.place("PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    proxy = _ancestor(PROXY)
    if proxy is None:
        raise its.error(
            f"mpirun set {its.shown(its.size)}, but {PROXY}, the process from which it starts programs, is not running"
        )
    return replace(place, run=f"{PROXY} {proxy}")


def _srun(its: _Variables) -> Place:
    names, tasks = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
    listed, counted = its.text(names), its.text(tasks)  # outside of try: what `text` raises is a ValueError, too
    try:
        hosts, counts = list(host_names(listed)), tasks_per_node(counted)
    except ValueError as error:
        raise its.error(f"srun set {its.shown(names)} and {its.shown(tasks)}: {error}") from None
    if len(hosts) != len(counts) or sum(counts) != its.workers:
        raise its.error(
            f"{its.shown(tasks)} must have one number for each host of {its.shown(names)}, and their sum must be "
            f"{its.shown(its.size)}"
        )
    node = its.number("SLURM_NODEID", 0, len(hosts) - 1, names)
    local = its.number("SLURM_LOCALID", 0, counts[node] - 1, tasks)
    rank = its.number("SLURM_PROCID", 0, its.workers - 1, its.size)
    run = f"{its.text('SLURM_JOB_ID')}.{its.text('SLURM_STEP_ID')}"
    return _met(Place(rank, its.workers, local, counts[node], node, len(hosts), None, its.by, run), hosts[0])


def _unknown(its: _Variables) -> Place:
    raise ConfigurationError(
        f"{its.by} started {its.workers} processes ({its.shown(its.size)}), but flockstep cannot connect processes "
        f"that {its.by} starts, so each would train alone on all data; start the script with flockstep launch -n "
        f"{its.workers} SCRIPT, torchrun, Open MPI, MPICH or srun, or unset {its.size} to train in one process"
    )


_LAUNCHERS: tuple[tuple[str, str, str, Callable[[_Variables], Place]], ...] = (
    ("WORLD_SIZE", "TORCHELASTIC_RUN_ID", "torchrun", _torchrun),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "mpirun", _openmpi),
    ("PMI_SIZE", "MPI_LOCALNRANKS", "mpirun", _hydra),
    ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_TASKS", "srun", _srun),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "mpirun", _unknown),
    ("PMI_SIZE", "PMI_SIZE", "mpirun", _unknown),
    ("WORLD_SIZE", "WORLD_SIZE", "another launcher", _unknown),
)
"""Variable with the number of processes, variable that tells the launcher, the launcher, and the function that reads
the launcher's variables.
"""


def _met(place: Place, host: str) -> Place:
    """The place with a coordinator on `host`, unless all workers are on this host."""
    if place.all_here:
        return place
    shown = f"[{host}]" if ":" in host else host
    return replace(place, coordinator=f"{shown}:{port_of(place.run)}")


def _checked(coordinator: str) -> str:
    found = re.fullmatch(r"(?:[^\s:\[\]]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", coordinator)
    if found is None or not 0 < int(found[1]) < 1 << 16:
        raise ConfigurationError(
            f"{COORDINATOR} must be HOST:PORT, got {coordinator!r}; write node0:29400, or [fd00::1]:29400"
        )
    return coordinator


def _ancestor(name: str) -> int | None:
    """Process id of the nearest process called `name` among those that this one descends from; None if none is."""
    process = "self"
    while process != "0":
        try:
            number, _, rest = Path("/proc", process, "stat").read_text().partition(" (")
        except OSError:
            return None
        called, _, fields = rest.rpartition(") ")
        if called == name:
            return int(number)
        process = fields.split()[1]
    return None
