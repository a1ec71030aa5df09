"""Functions for single runs, on real processes or in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flockstep.errors import ConfigurationError
from flockstep.experiments.folders import folder
from flockstep.experiments.options import (
    CompareOptions,
    SimulateOptions,
    TrainOptions,
    Watch,
    configured,
    listed,
    takes,
)
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.records.summary import Summary

if TYPE_CHECKING:
    from flockstep.arrays.schema import FlatArray, Schema
    from flockstep.costs.cluster import ClusterShape
    from flockstep.launchers.gathering import Gathering
    from flockstep.launchers.output import Output, Sink
    from flockstep.launchers.peers import RunPeer
    from flockstep.messages import Address
    from flockstep.records.events import Event

Standings = Callable[["dict[Address, RunPeer]", int], Any]
"""Function that is called with every node of a real run and the steps of a worker, 0 if not known."""


@dataclass(frozen=True)
class RunResult:
    """The result of a run that has ended, with the folder of its record."""

    folder: Path
    config: RunConfig
    """The configuration of the run, with every setting needed to repeat it."""
    summary: Summary
    """The summary figures of the run."""

    @classmethod
    def read(cls, folder: Path | str) -> RunResult:
        """Read the result of the run that is recorded in `folder`.

        Raises:
            ConfigurationError: the folder holds no run.
        """
        record = RunFolder(folder)
        return cls(record.path, record.read_config(), record.read_summary())

    def events(self) -> list[Event]:
        """Return all events of the run, sorted by time."""
        return RunFolder(self.folder).read_events()

    def parameters(self) -> tuple[FlatArray, Schema]:
        """Return the parameters of the resulting model, flat (K,), or (M, K) for an ensemble, and the schema of their
        tensors.

        Raises:
            ConfigurationError: the run left no result.
        """
        return RunFolder(self.folder).read_result()

    def buffers(self) -> dict[str, FlatArray]:
        """Return the buffers of the resulting model that training changes, such as BatchNorm's running statistics: name
        → array, the mean of the workers' for floating-point numbers. Those of an ensemble have a first axis more.
        """
        return RunFolder(self.folder).read_buffers()

    def __str__(self) -> str:
        from flockstep.report.table import table

        return str(table([self.summary]))

    def _repr_html_(self) -> str:
        """Return the table of the run for a cell of a notebook."""
        from flockstep.report.table import table

        error = [] if self.summary.error is None else [self.summary.error]
        return table([self.summary]).to_html([*error, *self.summary.notes, f"record: {self.folder}"])


@takes(TrainOptions)
def run(options: TrainOptions) -> RunResult:
    """Train on processes of this machine, as `flockstep train` does.

    A script must guard the call with `if __name__ == "__main__":`, because the processes import the script again. In a
    notebook, a custom strategy must be in a Python file that `imports` names.

    Returns:
        The finished run.

    Raises:
        ConfigurationError: an argument is invalid; nothing was started.
        RunError: the run failed; the record is complete up to the failure.
    """
    config = configured("train", options)
    return carry_out(config, folder(options.out, f"{options.job}-{options.strategy}"), options.overwrite)


def resume(out: Path | str, workers: int | None = None, replica_size: int | None = None) -> RunResult:
    """Continue a stopped run from its newest checkpoint, as `flockstep resume` does.

    A run of `flockstep launch` is resumed if its script calls `flockstep.checkpoint`.

    Args:
        out: folder of the record.
        workers: number of workers with which the run continues; None for the number that it had.
        replica_size: number of processes that hold each replica of a script's model from now on; None for the number
            that the run had.

    Returns:
        The finished run.

    Raises:
        ConfigurationError: the folder holds no run that can continue; nothing was started.
        CompositionError: the strategy has no rule for another number of workers; nothing was started.
        RunError: the run failed again; the record is complete up to the failure.
    """
    carry_on(Path(out), workers, replica_size=replica_size)
    return RunResult.read(out)


@takes(SimulateOptions)
def simulate(options: SimulateOptions) -> RunResult:
    """Train in virtual time, as `flockstep simulate` does: gradients are computed, seconds are modeled.

    Returns:
        The finished run.

    Raises:
        ConfigurationError: an argument is invalid; nothing was started.
        RunError: the run failed; the record is complete up to the failure.
    """
    place = folder(options.out, f"{options.job}-{options.strategy}")
    return carry_out(
        simulated(options), place, options.overwrite, watch=options.watch or (lambda done, total, seconds: None)
    )


def simulated(options: SimulateOptions) -> RunConfig:
    """Return the configuration of a simulation, with the links and times of its cluster."""
    return on_cluster(configured("simulate", options), cluster_of(options))


def cluster_of(options: SimulateOptions | CompareOptions) -> ClusterShape | None:
    """Return the cluster of a simulation, if its options name one; a network or compute model beside it is refused."""
    if options.cluster is None:
        return None
    from flockstep.costs.cluster_file import load_cluster
    from flockstep.frameworks.job import import_components

    for name, value in (("network", options.network), ("compute", options.compute)):
        if value is not None:
            raise ConfigurationError(
                f"{name} {value} and cluster {options.cluster} both describe the cluster; give only one of them"
            )
    import_components(listed("imports", options.imports))
    return load_cluster(options.cluster)


def on_cluster(config: RunConfig, shape: ClusterShape | None) -> RunConfig:
    """Return the configuration of a simulation, changed to the links and times of a cluster, if there is one."""
    if shape is None:
        return config
    from flockstep.planning.step_prediction import on_cluster as modeled

    return modeled(config, shape)


def carry_out(
    config: RunConfig,
    folder: Path,
    overwrite: bool = False,
    watch: Watch = lambda done, total, seconds: None,
    standings: Standings = lambda nodes, steps: None,
    gathering: Gathering | None = None,
    output: Output | None = None,
) -> RunResult:
    """Train, simulate or launch with a configuration, and record the run.

    `watch` is called with the progress of a simulation, `standings` with that of a real run. `gathering` are the hosts
    of a real run, which this host coordinates; None if all processes are on this machine. `output` says which output of
    a launched script is shown, and how; by default only the end of its standard error, if the script fails.
    """
    if config.kind == "simulate":
        from flockstep.launchers import simulate as virtual

        virtual.simulate(config, folder, watch, overwrite)
    elif config.kind == "launch":
        from flockstep.launchers import script
        from flockstep.launchers.output import Output

        shown = output or Output("none")
        script.launch(*script.program_of(config), config, folder, shown, overwrite, standings, gathering)
    else:
        from flockstep.launchers import train as real

        real.train(config, folder, standings, overwrite, gathering)
    return RunResult.read(folder)


def carry_on(
    folder: Path,
    workers: int | None = None,
    standings: Standings = lambda nodes, steps: None,
    gathering: Gathering | None = None,
    say: Sink | None = None,
    replica_size: int | None = None,
) -> Summary:
    """Continue a run of either kind from its newest checkpoint; see `resume` and `carry_out`."""
    from flockstep.launchers import script, train
    from flockstep.launchers.output import to_terminal

    if RunFolder(folder).read_config().kind == "launch":
        return script.resume_script(folder, say or to_terminal, standings, workers, gathering, replica_size)
    if replica_size is not None:
        raise ConfigurationError(
            f"only a script's replicas have a number of processes, got --replica-size {replica_size} for a run of "
            "flockstep train; leave it out"
        )
    return train.resume(folder, standings, workers, gathering)
