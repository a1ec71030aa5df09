"""Functions for single runs, on real processes or in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flockstep.experiments.arguments import cluster_of, listed, usual
from flockstep.experiments.folders import folder
from flockstep.nodes import BadGradientAction
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.records.summary import Summary
from flockstep.simulation import USUAL_COMPUTE, USUAL_NETWORK

if TYPE_CHECKING:
    from flockstep.arrays.schema import FlatArray, Schema
    from flockstep.costs.cluster import ClusterShape
    from flockstep.launchers.gathering import Gathering
    from flockstep.launchers.node_progress import NodeProgress
    from flockstep.launchers.output import Sink
    from flockstep.messages import Address
    from flockstep.records.events import Event
    from flockstep.strategies.base import Strategy

Watch = Callable[[int, int, float], None]
"""Type of functions that are called with the progress of a simulation: the steps done by all workers, the total number
of steps, and the virtual seconds.
"""


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

    def __str__(self) -> str:
        from flockstep.experiments.texts import ranked_text

        return ranked_text([self.summary])

    def _repr_html_(self) -> str:
        """Return the table of the run for a cell of a notebook."""
        from flockstep.experiments.texts import ranked_html

        error = [] if self.summary.error is None else [self.summary.error]
        return ranked_html([self.summary], 1, [*error, *self.summary.notes, f"record: {self.folder}"])


def run(
    job: str | Path,
    strategy: str | Strategy,
    *,
    workers: int = 4,
    seed: int = 0,
    epochs: float | None = None,
    steps: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    schedule: str | None = None,
    split: str = "iid",
    partition: str | None = None,
    target: float | None = None,
    evaluate_every: int | None = None,
    result: str | None = None,
    faults: Sequence[str] = (),
    on_bad_gradient: BadGradientAction = "stop",
    max_gradient_norm: float | None = None,
    strikes: int = 3,
    transport: str = "shared_memory",
    heartbeat: float = 5.0,
    link_timeout: float = 60.0,
    step_timeout: float | None = None,
    threads: int = 1,
    imports: Sequence[str] = (),
    checkpoint_every: str | int | None = None,
    keep: int | None = None,
    min_workers: int | None = None,
    max_workers: int | None = None,
    out: Path | str | None = None,
    overwrite: bool = False,
    shared: bool = False,
) -> RunResult:
    """Train on processes of this machine, as `flockstep train` does.

    A script must guard the call with `if __name__ == "__main__":`, because the processes import the script again. In a
    notebook, a custom strategy must be in a Python file that `imports` names.

    Args:
        job: a built-in workload, or the path of a Python file with a function `job()`.
        strategy: an expression or a strategy object.
        workers: number of worker processes.
        seed: seed of data order, initial parameters and random draws.
        epochs: passes over the training data; None for the job's value.
        steps: local steps per worker; takes precedence over `epochs`.
        batch: samples per worker and step; None for the job's value. lr: learning rate; None for the job's value.
        schedule: schedule of learning rate and batch size.
        split: how the data is split over the workers.
        partition: how each replica is split over workers, such as "pipeline(4, schedule=1f1b, microbatches=8)"; None if
            every worker holds the whole model.
        target: value of the metric to reach, for the time to target; None for the job's value.
        evaluate_every: steps per worker between two evaluations.
        result: policy that selects the resulting model.
        faults: injected faults of gradients, such as "flips_sign(1)".
        on_bad_gradient: treatment of a gradient that is too large or not finite: "stop" ends the run, "skip" puts zeros
            in its place, "quarantine" also removes the worker after `strikes` bad gradients.
        max_gradient_norm: largest Euclidean norm of a gradient; None for no limit.
        strikes: number of bad gradients of one worker until its quarantine.
        transport: transport of the messages between the processes.
        heartbeat: seconds without an answer after which a node counts as lost.
        link_timeout: seconds for which the TCP connection to another host may be interrupted before its nodes count as
            lost.
        step_timeout: seconds a worker may take for one step before the run ends; None for no limit.
        threads: threads of the numerical libraries in each process.
        imports: Python files that register custom components.
        checkpoint_every: steps (500), or the time ("5min"), between two checkpoints; None for a checkpoint only if a
            signal stops the run.
        keep: number of checkpoints that are kept; None for 2.
        min_workers: smallest number of workers with which the run continues; None if no worker may leave. max_workers:
            largest number of workers with which the run continues; None if no worker may join.
        out: folder of the record; None for a new folder in runs/.
        overwrite: replace the run that the folder holds.
        shared: let all users of this host read the record; False lets only its owner.

    Returns:
        The finished run.

    Raises:
        ConfigurationError: an argument is invalid; nothing was started.
        RunError: the run failed; the record is complete up to the failure.
    """
    config = RunConfig(
        kind="train", job=str(job), strategy=str(strategy), workers=workers, seed=seed, epochs=epochs, steps=steps,
        batch=batch, lr=lr, schedule=schedule, split=split, partition=partition, target=target,
        evaluate_every=evaluate_every, result=result, faults=listed("faults", faults), on_bad_gradient=on_bad_gradient,
        max_gradient_norm=max_gradient_norm, strikes=strikes, transport=transport, heartbeat=heartbeat,
        link_timeout=link_timeout, step_timeout=step_timeout, threads=threads,
        imports=listed("imports", imports),
        checkpoint_every=None if checkpoint_every is None else str(checkpoint_every), keep=keep,
        min_workers=min_workers,
        max_workers=max_workers,
        shared=shared or None,
    )  # fmt: skip
    return carry_out(config, folder(out, f"{job}-{strategy}"), overwrite)


def resume(out: Path | str, workers: int | None = None) -> RunResult:
    """Continue a stopped run from its newest checkpoint, as `flockstep resume` does.

    A run of `flockstep launch` is resumed if its script calls `flockstep.checkpoint`.

    Args:
        out: folder of the record.
        workers: number of workers with which the run continues; None for the number that it had.

    Returns:
        The finished run.

    Raises:
        ConfigurationError: the folder holds no run that can continue; nothing was started.
        CompositionError: the strategy has no rule for another number of workers; nothing was started.
        RunError: the run failed again; the record is complete up to the failure.
    """
    from flockstep.launchers import script, train

    if RunFolder(Path(out)).read_config().kind == "launch":
        script.resume_script(Path(out), workers=workers)
    else:
        train.resume(Path(out), workers=workers)
    return RunResult.read(Path(out))


def simulate(
    job: str | Path,
    strategy: str | Strategy,
    *,
    workers: int = 16,
    network: str | None = None,
    compute: str | None = None,
    cluster: str | Path | None = None,
    faults: Sequence[str] = (),
    seed: int = 0,
    epochs: float | None = None,
    steps: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    schedule: str | None = None,
    split: str = "iid",
    partition: str | None = None,
    target: float | None = None,
    until_target: bool = False,
    evaluate_every: int | None = None,
    result: str | None = None,
    on_bad_gradient: BadGradientAction = "stop",
    max_gradient_norm: float | None = None,
    strikes: int = 3,
    threads: int = 1,
    imports: Sequence[str] = (),
    out: Path | str | None = None,
    overwrite: bool = False,
    shared: bool = False,
    watch: Watch | None = None,
) -> RunResult:
    """Train in virtual time, as `flockstep simulate` does: gradients are computed, seconds are modeled.

    Arguments not listed here are as in `run`.

    Args:
        job: a built-in workload, or the path of a Python file with a function `job()`.
        strategy: an expression or a strategy object.
        workers: number of simulated workers.
        network: network between the nodes; None for "1gbit".
        compute: compute model of the gradients; None for "lognormal(0.01)".
        cluster: links and times of a cluster, in place of `network` and `compute`: a name in `flockstep list clusters`,
            "here" if this machine was calibrated, or the path of a TOML file.
        faults: injected faults, such as "dies(1, 0.5)".
        partition: how each replica is split over workers, such as "pipeline(4, schedule=1f1b, microbatches=8)"; None if
            every worker holds the whole model.
        until_target: end the run at the first evaluation that reaches the target.
        watch: function that is called from time to time with the progress.

    Returns:
        The finished run.

    Raises:
        ConfigurationError: an argument is invalid; nothing was started.
        RunError: the run failed; the record is complete up to the failure.
    """
    shape = cluster_of(cluster, network, compute, listed("imports", imports))
    config = RunConfig(
        kind="simulate", job=str(job), strategy=str(strategy), workers=workers, network=usual(network, USUAL_NETWORK),
        compute=usual(compute, USUAL_COMPUTE), faults=listed("faults", faults), seed=seed, epochs=epochs, steps=steps,
        batch=batch, lr=lr, schedule=schedule, split=split, partition=partition, target=target,
        until_target=until_target, evaluate_every=evaluate_every, result=result, on_bad_gradient=on_bad_gradient,
        max_gradient_norm=max_gradient_norm, strikes=strikes, threads=threads, imports=listed("imports", imports),
        shared=shared or None,
    )  # fmt: skip
    return carry_out(on_cluster(config, shape), folder(out, f"{job}-{strategy}"), overwrite, watch=watch)


def on_cluster(config: RunConfig, shape: ClusterShape | None) -> RunConfig:
    """Return the configuration of a simulation, changed to the links and times of a cluster; unchanged if `shape` is
    None.

    Raises:
        ConfigurationError: the cluster cannot have the configured number of workers.
    """
    if shape is None:
        return config
    from flockstep.planning.step_prediction import on_cluster as modeled

    return modeled(config, shape)


def carry_out(
    config: RunConfig,
    folder: Path,
    overwrite: bool = False,
    watch: Watch | None = None,
    standings: Callable[[dict[Address, NodeProgress], int], Any] | None = None,
    gathering: Gathering | None = None,
    say: Sink | None = None,
) -> RunResult:
    """Train, simulate or launch with a configuration, and record the run. The output of a launched script is hidden;
    if the script fails, the end of its standard error is shown.

    Args:
        config: the run's configuration; its `kind` selects real processes or virtual time.
        folder: folder of the record.
        overwrite: replace the run that the folder holds.
        watch: function that is called from time to time with the progress of a simulation.
        standings: function that is called from time to time with the state of every node of a real run, and the steps
            of each worker.
        gathering: the hosts of a real run, which this host coordinates; None if all processes are on this machine.
        say: shows the output of a script that fails; None for this process's standard error.

    Raises:
        ConfigurationError: the configuration is invalid; nothing was started.
        RunError: the run failed; the record is complete up to the failure.
    """
    tell = standings or (lambda nodes, steps: None)
    if config.kind == "simulate":
        from flockstep.launchers import simulate as virtual

        virtual.simulate(config, folder, watch or (lambda done, every, t: None), overwrite)
    elif config.kind == "launch":
        from flockstep.launchers import script
        from flockstep.launchers.output import Output, to_terminal

        output = Output("none", show=say or to_terminal)
        program, words = script.program_of(config)
        script.launch(program, words, config, folder, output, overwrite, lambda nodes: tell(nodes, 0), gathering)
    else:
        from flockstep.launchers import train as real

        real.train(config, folder, tell, overwrite, gathering)
    return RunResult.read(folder)
