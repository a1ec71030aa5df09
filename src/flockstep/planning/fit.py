"""Fits a cluster's description (compute model, latency and bandwidth) to the records of runs.

The steps of a record give the durations of gradients. The rest of a step's time is messages and waiting, which depend
on the strategy: this rest is rehearsed in virtual time with the recorded gradient times, and latency and bandwidth are
chosen so that the rehearsals take as long as the runs.

A step of one strategy at one model size takes t = f(L, 1/B) for the latency L and the bandwidth B, one equation with
two unknowns. Latency and bandwidth can be separated only by records in which bytes and messages have different weights;
with one record, latency or bandwidth must be given. Real runs are rehearsed on links that messages share, as TCP
connections do (`fair_link`); simulated runs, on the network of the simulation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.costs.cluster import ClusterLink, ClusterShape, MachineGroup
from flockstep.errors import ConfigurationError
from flockstep.links.kinds import Transport
from flockstep.nodes import Cluster, Hosts
from flockstep.planning.calibrate import Calibration, fit_law, rounded
from flockstep.planning.job_profile import JobProfile, identity
from flockstep.planning.record_imports import trusted
from flockstep.planning.recorded import PARTS, RecordedTime, shortest, steps_by_worker, usable_config
from flockstep.planning.rehearsal import LEFT_OUT, Conditions, rehearse
from flockstep.records.config import RunConfig
from flockstep.records.events import Event, HostsEvent, StepEvent
from flockstep.records.folder import RunFolder
from flockstep.runtime.setup import prepare
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.fair import FairLink
from flockstep.simulation.handling import Overheads
from flockstep.simulation.network import Fabric, Ideal, Link, Network
from flockstep.simulation.tiers import Tiers
from flockstep.strategies.base import Strategy

ALIKE = 1.1
"""Largest ratio between the median gradient times of workers that count as equally fast."""
LONGEST = 400
"""Largest number of steps of each record that a fit reads and rehearses."""
SPANS = 5
"""Number of spans into which the steps of a run are divided, so that the median over spans ignores outliers."""
POOR = 0.2
"""Relative error of the step time above which a fit counts as poor."""
SHORT, LONG = 1e-7, 1e2
"""Bounds of the latencies that a fit considers, in seconds."""
SLOW, FAST = 1e2, 1e12
"""Bounds of the bandwidths that a fit considers, in bytes per second."""
TELLING = 0.05
"""Smallest relative change of the step time between records with which a fit can determine both latency and
bandwidth.
"""
ROUNDS, STEP, CLOSE = 20, 0.02, 1e-3
"""Parameters of the least-squares fit on a logarithmic scale: number of iterations (ROUNDS), step for numerical
derivatives (STEP), and tolerance (CLOSE).
"""
SEARCH = 40
"""Largest number of iterations of the search for one unknown, latency or bandwidth."""
NOTHING = 0.01
"""Share of the step time below which the network's part of a step is ignored."""


@dataclass(frozen=True)
class _Run:
    """The part of a record that the fit uses."""

    config: RunConfig
    task: JobProfile
    compute: RecordedTime
    steps: int
    """Number of steps of each worker that are rehearsed."""
    seconds: float
    """Usual seconds of a step; see `usual_seconds`."""
    hosts: Hosts
    """The workers of each host, on whose machines servers are; empty if the record has no hosts."""
    work: Overheads
    """Costs of nodes besides gradients."""

    @classmethod
    def read(cls, folder: Path, imports: Sequence[str] | None, work: Overheads = Overheads()) -> _Run:  # noqa: B008
        """Read a record. If `imports` is None, the model's schema is that of the record, for which no code is run."""
        record = RunFolder(folder)
        config, events = record.read_config(), record.read_events()
        steps = steps_by_worker(events, config.workers, str(folder))
        length = min(LONGEST, shortest(steps, str(folder)))
        if config.kind == "launch":
            raise ConfigurationError(
                f"{folder} is the record of a script, which does not name the strategy; fit a run of a job"
            )
        if imports is None:
            schema = record.read_result()[1]
        else:
            config = trusted(config, folder, imports)
            schema = prepare(config)[0].schema
        task = JobProfile(config.job, schema.size, tuple((entry.size,) for entry in schema.entries), schema.dtype)
        return cls(
            config, task, RecordedTime(str(folder)), length, usual_seconds(steps, length), hosts_in(events), work
        )

    @property
    def fair(self) -> bool:
        """Whether messages share links, as over TCP or on a fair link in virtual time."""
        if self.config.kind != "simulate":
            return True
        network = Network.parse(self.config.network or "ideal")
        return isinstance(network.cards[0] if isinstance(network, Tiers) else network, FairLink)

    def network(self, latency: float, bandwidth: float, workers: int) -> Network:
        """The network of the run for `workers` workers, with links of that latency and bandwidth; further workers are
        on further hosts like those of the run.
        """
        link = FairLink if self.fair and not math.isinf(bandwidth) else Link
        if self.hosts:  # between workers of one host messages cost their handling only
            machines = tuple(map(len, self.hosts)) * -(-workers // self.config.workers)
            return Tiers(machines, (0,) * len(machines), (Link(FAST),), (link(bandwidth, latency),))
        return Ideal() if math.isinf(bandwidth) and not latency else link(bandwidth, latency)

    def excess(self, latency: float, bandwidth: float) -> float:
        """Logarithm of the ratio of the rehearsed to the recorded time of a step."""
        return math.log(self.takes(latency, bandwidth) / self.seconds)

    def takes(self, latency: float, bandwidth: float) -> float:
        """Seconds of a step over links of that latency and bandwidth."""
        events: list[Event] = []
        workers = self.config.workers
        at = Conditions(self.compute, self.network(latency, bandwidth, workers), self.work, self.config.seed)
        strategy = Strategy.parse(self.config.strategy)
        rehearse(self.task, strategy, workers, at, steps=self.steps, listen=events.append)
        return usual_seconds(steps_by_worker(events, workers), self.steps)


@dataclass(frozen=True)
class RecordedNetwork(Network):
    """The network of the run whose record is in folder `run`.

    For a run in virtual time that is the simulation's network. For a run of a job on real processes, the bandwidth is
    fitted as by `flockstep calibrate --from`, so that a rehearsal with the recorded gradient times takes as long as the
    run. One record does not tell latency from bandwidth: the latency is 0, and the bandwidth includes the time in which
    nodes handle messages of these sizes. The hosts of the run are machines.
    """

    run: str

    def __post_init__(self) -> None:
        config = usable_config(self.run)
        if config.kind == "simulate":
            return
        if config.kind == "launch":
            raise ConfigurationError(
                f"{self.run} is the record of a script, whose messages cannot be rehearsed; use its record for "
                "--compute, and name a network such as 1gbit or the record of a job's run"
            )
        record = RunFolder(self.run)
        if not record.read_summary().sent_bytes_per_worker:
            raise ConfigurationError(
                f"the workers in {self.run} sent no bytes, from which no bandwidth follows; name a network such as "
                "1gbit, or the record of a run that exchanges"
            )
        if not hosts_in(record.read_events()) and Transport.parse(config.transport or "shared_memory").zero_copy:
            raise ConfigurationError(
                f"the workers in {self.run} exchanged arrays through shared memory, from which no bandwidth follows; "
                "simulate with --network ideal, or record the run with --transport tcp"
            )

    def resolved(self, workers: int) -> Network:
        """Return the network of the recorded run for `workers` workers.

        Raises:
            ConfigurationError: with no bandwidth a rehearsal takes as long as the run.
        """
        record = RunFolder(Path(self.run).absolute())
        config = record.read_config()
        if config.kind == "simulate":
            return Network.parse(config.network or "ideal").resolved(workers)
        return _links(record, record.begun)(workers)

    def start(self, cluster: Cluster) -> Fabric:
        """Return the hops of the recorded run's network."""
        return self.resolved(cluster.workers).start(cluster)

    def hosts(self, workers: int) -> Hosts:
        return self.resolved(workers).hosts(workers)


@lru_cache(maxsize=8)
def _links(record: RunFolder, begun: int | None) -> Callable[[int], Network]:
    """Fit the links of a real run, which began at `begun`, and return its network by number of workers."""
    run = _Run.read(record.path, None)
    found = _link([run], None, None, [])
    error = math.expm1(run.excess(*found))
    if abs(error) > POOR:
        raise ConfigurationError(
            f"a step rehearsed with the best bandwidth must be within {POOR:.0%} of a step in {record.path}, got "
            f"{error:+.0%}; name a network such as 1gbit, or the record of a strategy that waits for messages"
        )
    return partial(run.network, *found)


def fit_records(
    folders: Sequence[Path | str],
    latency: float | None = None,
    bandwidth: float | None = None,
    imports: Sequence[str] = (),
    work: Overheads = Overheads(),  # noqa: B008
) -> Calibration:
    """Fit the description of the cluster on which the recorded runs took place.

    Args:
        folders: folders of the records.
        latency: latency of the links in seconds if it is known; None to fit it.
        bandwidth: bandwidth of the links in bytes per second if it is known; None to fit it.
        imports: the Python files that the records may need; no other file is executed.
        work: costs of nodes besides gradients, as far as they are known.

    Raises:
        ConfigurationError: there is no record, a record has no steps, or the records differ in job or number of
            workers.
    """
    if not folders:
        raise ConfigurationError("a fit needs at least one record, got none; name the folder of a run")
    runs = [_Run.read(Path(folder), imports, work) for folder in folders]
    first = runs[0]
    for run in runs[1:]:
        pairs = [(name, getattr(first.config, name), getattr(run.config, name)) for name in ("job", "workers", "batch")]
        for name, one, other in (*pairs, ("hosts", first.hosts, run.hosts)):
            if one != other:
                raise ConfigurationError(
                    f"all records must have the same {name}, got {one} and {other}; fit each record separately"
                )
    notes = [f"fitted by flockstep calibrate to {len(runs)} record(s) of {first.config.job}"]
    notes += [f"{one.config.title}: {one.seconds:.4g} s per step" for one in runs]
    groups, law, why = _machines(runs)
    notes.append(why)
    wires: tuple[ClusterLink, ...] = ()
    if first.config.workers > 1:
        found = _link(runs, latency, bandwidth, notes)
        names = tuple(group.name for group in groups)
        wires = (ClusterLink("inside", names, found[1], found[0], all(run.fair for run in runs)),)
        if several := tuple(group.name for group in groups if group.workers > 1):
            wires = (ClusterLink("node", several, FAST), *wires)
            notes.append("messages within a host are assumed to take only the time of handling them")
        errors = [math.exp(run.excess(*found)) - 1 for run in runs]
        notes.append(
            "with the fitted values a step takes longer than in the records, by "
            f"{', '.join(f'{e:+.1%}' for e in errors)}"
        )
        if max(map(abs, errors)) > POOR:
            notes.append("the fit is poor: something other than latency and bandwidth distinguishes these strategies")
    notes.append(
        "records contain no cores, memory, failures or rates of codecs; gradients are assumed to take as long as in "
        "the run"
    )
    about, job = f"as in the record of {first.config.job}", identity(first.config.job)
    shape = ClusterShape("fitted", groups, wires, law, about=about, job=job, servers_apart=not first.hosts)
    return Calibration(shape, tuple(notes))


def hosts_in(events: Sequence[Event]) -> Hosts:
    """Return the ranks of the workers on each host, for a run over several hosts; empty for other runs.

    Raises:
        ConfigurationError: the workers of a host are not neighbors in rank, as they are on the machines of a cluster.
    """
    hosts = next((event.hosts for event in reversed(events) if isinstance(event, HostsEvent)), ())
    if [rank for host in hosts for rank in host] != list(range(sum(map(len, hosts)))):
        raise ConfigurationError(
            f"the workers of a host must have consecutive ranks, as on the machines of a cluster, got hosts {hosts}; "
            "let the launcher fill one host after the other"
        )
    return hosts


def usual_seconds(steps: Sequence[Sequence[StepEvent]], length: int, parts: Sequence[str] = PARTS) -> float:
    """Return the usual seconds of a step, or of some parts of a step, after the warm-up at the beginning: the mean over
    all workers in each span of steps, and then the median over the spans, so that outliers have no effect.
    """
    spans = np.array_split(np.arange(first_counted(length), length), min(SPANS, length - first_counted(length)))
    means = [
        statistics.fmean(sum(getattr(mine[i], part) for part in parts) for mine in steps for i in span if i < len(mine))
        for span in spans
    ]
    return statistics.median(means)


def first_counted(steps: int) -> int:
    """Return the number of steps at the beginning of a run that a fit ignores, as a rehearsal does."""
    return max(1, int(LEFT_OUT * steps))


def _machines(runs: Sequence[_Run]) -> tuple[tuple[MachineGroup, ...], ComputeModel, str]:
    """Groups of hosts by speed, the compute model at speed 1, and the reason for that model."""
    hosts = runs[0].hosts or tuple((rank,) for rank in range(runs[0].config.workers))
    times: list[list[float]] = []
    for host in hosts:
        rows = [run.compute.rows[rank][: run.steps] for run in runs for rank in host]
        times.append([one for row in rows for one in row[first_counted(len(row)) :] if one > 0])
    if min(map(len, times)) < 2:
        raise ConfigurationError(
            "records must contain gradients that take time, got none; give the records of runs whose gradients take "
            "time"
        )
    medians, sizes = [statistics.median(mine) for mine in times], [len(host) for host in hosts]
    if max(medians) < ALIKE * min(medians) and len(set(sizes)) == 1:
        return (MachineGroup("machines", len(hosts), sizes[0]),), *fit_law([one for mine in times for one in mine])
    usual = statistics.median(medians)
    speeds = [rounded(usual / one) for one in medians]
    kind = "host" if max(sizes) > 1 else "worker"
    groups = tuple(
        MachineGroup(f"{kind}-{number}", workers=size, speed=speed)
        for number, (size, speed) in enumerate(zip(sizes, speeds, strict=True))
    )
    return groups, *fit_law([one * speed for mine, speed in zip(times, speeds, strict=True) for one in mine])


def _link(
    runs: Sequence[_Run], latency: float | None, bandwidth: float | None, notes: list[str]
) -> tuple[float, float]:
    """Fit latency and bandwidth; the seconds and bytes per second that are given are kept."""
    free = [one.takes(0.0, math.inf) for one in runs]
    shares = [1 - base / one.seconds for one, base in zip(runs, free, strict=True)]
    notes.append(f"share of the step time spent on messages: {', '.join(f'{max(share, 0.0):.0%}' for share in shares)}")
    if max(shares) < NOTHING:
        notes.append(
            "the share of messages in the step time is too small to determine latency or bandwidth: links are assumed "
            "to cost nothing"
        )
        return latency or 0.0, bandwidth or FAST
    if latency is None and bandwidth is None:
        found = _both(runs, free)
        if found is not None:
            notes.append(
                "latency and bandwidth were determined separately, from the different numbers of bytes and messages "
                "in the records"
            )
            return found
        latency = 0.0
        notes.append(
            "latency and bandwidth cannot be determined separately from these records: latency is set to 0, and the "
            "bandwidth is an effective bandwidth, correct for messages of these sizes; add the record of a strategy "
            "with other message sizes, or give --latency"
        )

    def misfit(latency: float, bandwidth: float) -> float:
        return statistics.fmean(run.excess(latency, bandwidth) for run in runs)

    if bandwidth is None:
        known = latency or 0.0
        bandwidth = _solve(lambda x: misfit(known, x), FAST, SLOW, notes, "bandwidth")
        notes.append("the bandwidth is an effective bandwidth: it includes the cost of copies and protocols")
        return known, bandwidth
    if latency is None:
        width = bandwidth
        latency = _solve(lambda x: misfit(x, width), SHORT, LONG, notes, "latency")
        notes.append("the latency is an effective latency: it includes the time in which processes handle a message")
    return latency, bandwidth


def _both(runs: Sequence[_Run], free: Sequence[float]) -> tuple[float, float] | None:
    """Fit latency and bandwidth by least squares over logarithms of step times (Levenberg-Marquardt), from the solution
    for steps that are linear in both; None if messages and bytes weigh the same in all records.
    """
    beyond = np.array([max(run.seconds - base, NOTHING * run.seconds) for run, base in zip(runs, free, strict=True)])
    guess = np.array([beyond.mean() / 10, beyond.mean() / max(run.task.nbytes for run in runs)])
    columns = [
        np.array([run.takes(*at) - base for run, base in zip(runs, free, strict=True)])
        for at in ((guess[0], math.inf), (0.0, 1 / guess[1]))
    ]
    weighed = np.stack([column / beyond for column in columns], axis=1)
    sizes = np.linalg.norm(weighed, axis=0)
    if not sizes.min() > 0 or np.linalg.svd(weighed / sizes, compute_uv=False)[-1:] < TELLING or len(runs) < 2:
        return None
    times = np.linalg.lstsq(weighed, np.ones(len(runs)), rcond=None)[0]

    def errors(point: FlatArray) -> FlatArray:
        latency, per_byte = np.exp(point).tolist()
        return np.array([run.excess(latency, 1 / per_byte) for run in runs])

    point, damping = np.log(np.maximum(times, 1e-3 * np.abs(times).max()) * guess), 1e-3
    now = errors(point)
    for _ in range(ROUNDS):
        slopes = np.stack([(errors(point + move) - now) / STEP for move in np.eye(2) * STEP], axis=1)
        normal = slopes.T @ slopes
        move = -np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-12), slopes.T @ now)
        tried = point + np.clip(move, -1, 1)
        further = errors(tried)
        if further @ further < now @ now:
            point, now, damping = tried, further, damping / 10
        else:
            damping *= 10
        if np.abs(move).max() < CLOSE:
            break
    latency, per_byte = np.exp(point).tolist()
    return rounded(latency), rounded(1 / per_byte)


def _solve(misfit: Callable[[float], float], quick: float, slow: float, notes: list[str], what: str) -> float:
    """The zero of `misfit`, which increases from `quick` to `slow`, by false position (Illinois) on a logarithmic
    scale.
    """
    low, high = math.log(quick), math.log(slow)
    below, above = misfit(quick), misfit(slow)
    if abs(below) < NOTHING:
        notes.append(f"the step time hardly depends on the {what}: the best possible value is used")
        return quick
    if below >= 0 or above <= 0:
        least, most = ("shorter", "best") if below >= 0 else ("longer", "worst")
        notes.append(
            f"steps are {least} than in a rehearsal with the {most} {what}: this value is used, and the fit is poor"
        )
        return quick if below >= 0 else slow
    side = 0
    for _ in range(SEARCH):
        middle = (low * above - high * below) / (above - below)
        value = misfit(math.exp(middle))
        if abs(value) < CLOSE**2:
            break
        if value < 0:
            low, below, above = middle, value, above / 2 if side < 0 else above
        else:
            high, above, below = middle, value, below / 2 if side > 0 else below
        side = -1 if value < 0 else 1
    return rounded(math.exp(middle))
