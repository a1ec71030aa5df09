"""Functions that run training on the machines of a cluster manager, Ray or Spark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flockstep.experiments.arguments import listed
from flockstep.experiments.folders import folder
from flockstep.experiments.single import RunResult, carry_out
from flockstep.records.config import RunConfig

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame

    from flockstep.strategies.base import Strategy


def on_ray(
    job: str | Path,
    strategy: str | Strategy,
    workers: int = 4,
    *,
    nodes: int | None = None,
    cpus_per_worker: float = 1.0,
    gpus_per_worker: float = 0.0,
    seed: int = 0,
    epochs: float | None = None,
    steps: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    schedule: str | None = None,
    split: str = "iid",
    target: float | None = None,
    evaluate_every: int | None = None,
    result: str | None = None,
    heartbeat: float = 5.0,
    link_timeout: float = 60.0,
    step_timeout: float | None = None,
    threads: int = 1,
    timeout: float = 600.0,
    imports: Sequence[str] = (),
    out: Path | str | None = None,
    overwrite: bool = False,
) -> RunResult:
    """Train on the nodes of a Ray cluster, as `flockstep train --on ray` does.

    This process coordinates and writes the record. The process must be a driver on a node of the cluster. A placement
    group reserves a bundle of cores and GPUs on each node for the workers of that node; if a node is lost, its workers
    are lost. A script must guard the call with `if __name__ == "__main__":`.

    Arguments not listed here are as in `flockstep.run`.

    Args:
        job: a built-in workload, or the path of a Python file with a function `job()`, which is copied to the nodes.
        strategy: an expression or a strategy object.
        workers: number of worker processes on all nodes.
        nodes: number of nodes that share the workers; None for all nodes of the cluster, but at most `workers`.
        cpus_per_worker: cores that each worker reserves.
        gpus_per_worker: GPUs that each worker reserves.
        timeout: seconds to wait for the nodes.

    Returns:
        The finished run.

    Raises:
        ConfigurationError: an argument is invalid, or no cluster has enough free cores and GPUs; nothing was started.
        MissingDependency: Ray is not installed.
        RunError: the run failed; the record is complete up to the failure.
    """
    from flockstep.launchers.ray import ray_cluster

    config = RunConfig(
        kind="train", job=str(job), strategy=str(strategy), workers=workers, seed=seed, epochs=epochs, steps=steps,
        batch=batch, lr=lr, schedule=schedule, split=split, target=target, evaluate_every=evaluate_every,
        result=result, heartbeat=heartbeat, link_timeout=link_timeout, step_timeout=step_timeout,
        threads=threads, imports=listed("imports", imports),
    )  # fmt: skip
    with ray_cluster(workers, nodes, cpus_per_worker, gpus_per_worker, timeout) as gathering:
        return carry_out(config, folder(out, f"{job}-{strategy}"), overwrite, gathering=gathering)


def on_spark(
    rows: DataFrame | RDD[Any],
    job: str | Path,
    strategy: str | Strategy,
    *,
    x: str | Sequence[str] = "features",
    y: str = "label",
    test: DataFrame | RDD[Any] | None = None,
    seed: int = 0,
    epochs: float | None = None,
    steps: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    schedule: str | None = None,
    target: float | None = None,
    evaluate_every: int | None = None,
    result: str | None = None,
    heartbeat: float = 5.0,
    link_timeout: float = 60.0,
    step_timeout: float | None = None,
    threads: int = 1,
    timeout: float = 600.0,
    imports: Sequence[str] = (),
    out: Path | str | None = None,
    overwrite: bool = False,
) -> RunResult:
    """Train on the partitions of a Spark DataFrame or RDD: one worker for each partition, on the partition's rows,
    which stay on their executor.

    The driver coordinates, evaluates and writes the record. The workers are the tasks of a barrier stage, so the
    cluster must be able to run one task for each partition at the same time. The stage ends with its first lost
    executor, under every strategy; a worker process that dies on a living executor is a lost worker.

    Every worker takes the same number of batches from its own partition, in a new random order in each pass, so that
    all workers together make `epochs` passes over all rows. The rows of a small partition are therefore used more often
    than those of a large one. The run depends on the order of the rows within the partitions; the record's facts hold a
    hash of the rows in this order.

    Arguments not listed here are as in `flockstep.run`.

    Args:
        rows: a DataFrame, or an RDD of pairs (x, y) of numbers or arrays.
        job: a built-in workload, or the path of a Python file with a function `job()`, which is copied to the
            executors. Everything but the training data is taken from the job.
        strategy: an expression or a strategy object.
        x: columns of the inputs in a DataFrame: names of columns of numbers, or one column of arrays or vectors.
        y: column of the target in a DataFrame.
        test: rows of the same kind for evaluations, which the driver collects; None for the test set of the job.
        timeout: seconds to wait for all tasks.

    Returns:
        The finished run.

    Raises:
        ConfigurationError: an argument is invalid, a partition is empty, or the cluster has too few slots.
        CompositionError: workers of the strategy compute on samples of other workers.
        MissingDependency: pyspark is not installed.
        RunError: the run failed; the record is complete up to the failure.
    """
    from flockstep.launchers.spark import spark_stage
    from flockstep.launchers.train import train

    with spark_stage(rows, x, y, test, str(job), seed, timeout) as (gathering, held_out):
        config = RunConfig(
            kind="train", job=str(job), strategy=str(strategy), workers=gathering.nodes, seed=seed, epochs=epochs,
            steps=steps, batch=batch, lr=lr, schedule=schedule, target=target, evaluate_every=evaluate_every,
            result=result, heartbeat=heartbeat, link_timeout=link_timeout, step_timeout=step_timeout,
            threads=threads, imports=listed("imports", imports), facts=held_out.facts,
        )  # fmt: skip
        place = folder(out, f"{Path(str(job)).stem}-{strategy}")
        train(config, place, overwrite=overwrite, gathering=gathering, test=held_out)
    return RunResult.read(place)
