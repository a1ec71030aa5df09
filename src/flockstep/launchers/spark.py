"""Runs on Spark: each task of a barrier stage trains one worker on the rows of its own partition, and the driver
coordinates.

Rows do not leave their executor. A first job counts the rows of every partition, so that every worker knows the total
number of rows; then a barrier stage starts all workers at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, RunError, UnknownName
from flockstep.launchers.meeting import TIMEOUT, Meeting
from flockstep.launchers.tasks import TaskGathering, TaskSpec, run_task
from flockstep.launchers.wait_monitor import on_stderr
from flockstep.runtime.setup import load_job
from flockstep.workloads.base import require_module
from flockstep.workloads.own_data import OwnData, digest_of, write_samples

GRACE = 10.0
"""Seconds that the stage has to end by itself after the run."""
UNEVEN = 1.1
"""Ratio of the largest to the smallest partition above which a warning is printed."""


@dataclass(frozen=True)
class Columns:
    """The columns of a row that hold the inputs and the target."""

    x: tuple[str, ...]
    """Names of columns of numbers, or the name of one column of arrays or vectors; empty for rows that are pairs (x,
    y).
    """
    y: str = ""
    """Name of the target's column."""

    def arrays(self, rows: Iterable[Any]) -> tuple[FlatArray, FlatArray]:
        """Return the inputs and targets of the rows; the first axis counts rows.

        Raises:
            ConfigurationError: a value is missing or is not a number, or the shapes differ.
        """
        inputs, targets = [], []
        for row in rows:
            inputs.append(self._input(row))
            targets.append(_value(row[self.y] if self.x else row[1]))
        return _stacked(inputs, "inputs"), _stacked(targets, "targets")

    def _input(self, row: Any) -> Any:
        if len(self.x) > 1:
            return [row[name] for name in self.x]
        return _value(row[self.x[0]] if self.x else row[0])


@dataclass(frozen=True)
class PartitionFacts:
    """Facts about a partition of the rows: number of rows, digest of their contents, and shapes of inputs and
    targets.
    """

    rows: int
    digest: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    """Shapes of one input and of one target."""
    error: str = ""


@contextlib.contextmanager
def spark_stage(
    rows: Any, x: str | Sequence[str], y: str, test: Any, job: str, seed: int, timeout: float = TIMEOUT
) -> Iterator[tuple[TaskGathering, OwnData]]:
    """Context manager that yields a barrier stage over the partitions of `rows`, not yet started, and the test set.

    Args:
        rows: a DataFrame, or an RDD of pairs (x, y).
        x: columns of the inputs in a DataFrame.
        y: column of the target in a DataFrame.
        test: rows of the same kind for evaluations, which the driver collects; None for the test set of the job.
        job: the job, for its test set.
        seed: the run's seed.
        timeout: seconds to wait for all tasks.

    Raises:
        ConfigurationError: the rows cannot be used.
        MissingDependency: pyspark is not installed.
    """
    require_module("pyspark", "spark", "a run on Spark")
    rdd, columns = _as_rdd(rows, x, y)
    with ExitStack() as stack:
        if not rdd.is_cached:
            rdd.cache()
            stack.callback(rdd.unpersist)
        partitions = tuple(rdd.mapPartitions(partial(_counted, columns)).collect())
        _require_alike(partitions)
        host = rdd.context.getConf().get("spark.driver.host")
        meeting = Meeting(host, 0, secrets.token_bytes(32), timeout)
        sizes = tuple(one.rows for one in partitions)
        digests = " ".join(one.digest for one in partitions)
        own = OwnData("", sizes, {"rows": " ".join(map(str, sizes)), "rows_digest": digests})
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flockstep-test-")))
        if test is None:
            data = load_job(job, seed).data()
            write_samples(folder, np.asarray(data.test_x), np.asarray(data.test_y))
        else:
            write_samples(folder, *columns.arrays(_as_rdd(test, x, y)[0].collect()))
        gathering = TaskGathering(meeting, len(partitions), starter=partial(_start, rdd, columns, own))
        yield gathering, dataclasses.replace(own, folder=str(folder))


def _start(
    rows: Any, columns: Columns, own: OwnData, specs: Sequence[TaskSpec], stack: ExitStack
) -> Callable[[], str | None]:
    """Submit the stage, in a thread that waits for it.

    Raises:
        ConfigurationError: the cluster cannot run one task for each partition at the same time.
    """
    context = rows.context
    _require_slots(context, len(specs))
    work = partial(_work, specs[0], columns, own)
    errors: list[str] = []
    group = f"flockstep-{secrets.token_hex(4)}"

    def submit() -> None:
        context.setJobGroup(group, "flockstep workers", interruptOnCancel=True)
        try:
            rows.barrier().mapPartitions(work).collect()
        except Exception as error:  # noqa: BLE001 - of Spark, py4j, or what the task raised
            errors.append(f"the Spark stage failed: {_in_short(error)}")

    thread = threading.Thread(target=submit, name="flockstep-spark", daemon=True)
    thread.start()
    stack.callback(_end, context, group, thread)
    return lambda: errors[0] if errors else None


def _as_rdd(rows: Any, x: str | Sequence[str], y: str) -> tuple[Any, Columns]:
    """The rows as an RDD, and where a row has its values."""
    if not hasattr(rows, "columns"):
        if not hasattr(rows, "mapPartitions"):
            raise ConfigurationError(f"rows must be a DataFrame or an RDD of pairs (x, y), got {type(rows).__name__}")
        return rows, Columns(())
    names = (x,) if isinstance(x, str) else tuple(x)
    for name in (*names, y):
        if name not in rows.columns:
            raise UnknownName.among("column of the DataFrame", name, rows.columns)
    try:
        return rows.select(*dict.fromkeys((*names, y))).rdd, Columns(names, y)
    except Exception as error:
        if "NOT_IMPLEMENTED" not in str(error) and "JVM_ATTRIBUTE_NOT_SUPPORTED" not in str(error):
            raise
        raise ConfigurationError(
            "flockstep cannot run tasks on the partitions of a Spark Connect DataFrame; use a session without remote()"
        ) from None


def _counted(columns: Columns, rows: Iterable[Any]) -> list[PartitionFacts]:
    """What the driver needs to know of a partition; runs in a task."""
    try:
        x, y = columns.arrays(rows)
    except ConfigurationError as error:
        return [PartitionFacts(0, "", ((), ()), str(error))]
    return [PartitionFacts(len(x), digest_of(x, y), (x.shape[1:], y.shape[1:]))]


def _work(spec: TaskSpec, columns: Columns, own: OwnData, rows: Iterable[Any]) -> list[None]:
    """Train on a partition; runs in a task of the barrier stage.

    Raises:
        RunError: the run failed, or the rows are others than those that were counted.
    """
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    rank = context.partitionId()
    x, y = columns.arrays(rows)
    if digest_of(x, y) != own.facts["rows_digest"].split()[rank]:
        raise RunError(
            f"partition {rank} returned different rows than when its rows were counted; sort the rows within each "
            "partition, or cache them"
        )
    places = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")  # Spark removes what a killed task leaves there
    with tempfile.TemporaryDirectory(prefix="flockstep-rows-", dir=places[0] or None) as folder:
        write_samples(Path(folder), x, y)
        del x, y
        run_task(dataclasses.replace(spec, node=rank), dataclasses.replace(own, folder=folder))
    return []


def _value(value: Any) -> Any:
    """A value of a row as numpy can read it; vectors of pyspark.ml have a method for that."""
    return value.toArray() if hasattr(value, "toArray") else value


def _stacked(values: Sequence[Any], what: str) -> FlatArray:
    """The values as one array.

    Raises:
        ConfigurationError: they are not numbers of one shape.
    """
    try:
        array = np.array(values)
    except ValueError:
        raise ConfigurationError(
            f"the {what} must have the same shape in all rows, got different shapes; pad the values, or leave out rows"
        ) from None
    if values and (array.dtype.kind not in "biuf" or not np.isfinite(array).all()):
        raise ConfigurationError(
            f"the {what} must be finite numbers in every row; leave out rows with missing values (dropna)"
        )
    return array


def _require_alike(partitions: Sequence[PartitionFacts]) -> None:
    """Raise `ConfigurationError` unless every partition has rows of the same shape; warn of uneven sizes."""
    for rank, one in enumerate(partitions):
        if one.error:
            raise ConfigurationError(f"partition {rank}: {one.error}")
        if not one.rows:
            raise ConfigurationError(
                f"partition {rank} of {len(partitions)} has no rows for its worker; use "
                f"repartition({len(partitions)}), or coalesce() to fewer partitions"
            )
        if one.shapes != partitions[0].shapes:
            raise ConfigurationError(
                f"partition {rank} has inputs and targets of the shapes {one.shapes}, but partition 0 has "
                f"{partitions[0].shapes}; give every row the same shape"
            )
    sizes = [one.rows for one in partitions]
    if max(sizes) > UNEVEN * min(sizes):
        on_stderr(
            f"partitions have {min(sizes)} to {max(sizes)} rows, and every worker takes the same number of batches, "
            "so the rows of small partitions are used more often; repartition() makes partitions equal in size"
        )


def _require_slots(context: Any, partitions: int) -> None:
    """Raise `ConfigurationError` if the cluster cannot run all tasks at once; Spark would wait for minutes."""
    java = context._jsc.sc()
    slots = java.maxNumConcurrentTasks(java.resourceProfileManager().defaultResourceProfile())
    if slots < partitions:
        raise ConfigurationError(
            f"{partitions} partitions need {partitions} tasks at the same time, but the cluster runs only {slots}; "
            f"use coalesce({slots}), or more executors"
        )


def _in_short(error: BaseException) -> str:
    """The sentence of the error that a task raised, or the first line of another error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ours = [line.partition(": ")[2] for line in lines if line.startswith("flockstep.errors.")]
    return ours[-1] if ours else (lines or [type(error).__name__])[0]


def _end(context: Any, group: str, thread: threading.Thread) -> None:
    """Wait for the stage, and cancel what is left of it."""
    thread.join(GRACE)
    if thread.is_alive():
        context.cancelJobGroup(group)
        thread.join(GRACE)
