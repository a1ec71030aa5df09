"""The resolved configuration of a run: every setting needed to repeat it."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import shlex
import tomllib
from dataclasses import dataclass, field
from typing import Literal, get_args

import msgspec
import tomli_w

from flockstep.errors import ConfigurationError, UnknownName, require
from flockstep.nodes import BadGradientAction, BadGradients

Kind = Literal["train", "simulate", "launch"]
ClockKind = Literal["real", "virtual"]
OutputRanks = Literal["all", "rank0", "none"]

_OPTIONS = (
    "workers",
    "seed",
    "transport",
    "result",
    "steps",
    "epochs",
    "batch",
    "lr",
    "schedule",
    "split",
    "partition",
    "network",
    "compute",
    "evaluate_every",
    "target",
    "threads",
    "heartbeat",
    "link_timeout",
    "step_timeout",
    "checkpoint_every",
    "keep",
    "min_workers",
    "max_workers",
    "max_gradient_norm",
)
_LAUNCH_OPTIONS = (
    *(
        "workers",
        "seed",
        "threads",
        "transport",
        "heartbeat",
        "link_timeout",
        "step_timeout",
        "checkpoint_every",
        "keep",
    ),
    *("min_workers", "max_workers", "max_gradient_norm", "target", "output", "rank_output"),
)
"""Settings of `flockstep launch`. A launched script chooses the other settings itself."""
LONGEST_HEARTBEAT = 3600
"""Largest allowed heartbeat timeout, in seconds."""


SPLIT = "split"
"""Key, among the versions in a record, of a sentence about layers that the parts of a split model compute otherwise."""
MOST_WORKERS = 100_000
"""Largest number of workers of a run; readers of records make a row for each worker."""
KEEP = 2
"""Default number of checkpoints of a run that are kept."""


@dataclass(frozen=True)
class CheckpointInterval:
    """Interval between two checkpoints: a number of steps of each worker, or a number of seconds."""

    steps: int = 0
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> CheckpointInterval:
        """Return the interval that a text such as "500" (steps), "5min" or "30s" describes.

        Raises:
            ConfigurationError: the text is not an interval.
        """
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(s|min|h)|([0-9]+)", text.strip())
        if found is not None and found[3] is not None and int(found[3]) > 0:
            return cls(steps=int(found[3]))
        if found is not None and found[1] is not None and float(found[1]) > 0:
            return cls(seconds=float(found[1]) * {"s": 1, "min": 60, "h": 3600}[found[2]])
        raise ConfigurationError(
            f"checkpoint_every must be a number of steps or a time > 0, got {text!r}; use for example 500 or 5min"
        )

    def due(self, steps: int, seconds: float) -> bool:
        """Return whether a checkpoint is due, if the last checkpoint was taken `steps` steps or `seconds`
        seconds ago.
        """
        return steps >= self.steps if self.steps else seconds >= self.seconds


@dataclass(frozen=True)
class MetricTarget:
    """A value of a metric that runs are to reach, written as `accuracy=0.95`, or as `0.95` for the runs' own metric."""

    value: float
    metric: str | None = None

    @classmethod
    def parse(cls, text: str | float) -> MetricTarget:
        """Return the target that a text describes.

        Raises:
            ConfigurationError: the text has no finite number.
        """
        name, _, value = str(text).rpartition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigurationError(
                f"target must be a number, or a metric and a number, got {text!r}; write it like 0.95 or accuracy=0.95"
            )
        return cls(number, name.strip() or None)

    def __str__(self) -> str:
        return _word(self.value) if self.metric is None else f"{self.metric}={_word(self.value)}"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The configuration of one run. Components are stored as text (`ps(consistency=ssp(3))`).

    A setting of None stands for the job's default, unless its description says otherwise.
    """

    kind: Kind
    """Kind of the run: `train` for real processes and real seconds, `launch` for a user's script on real processes,
    `simulate` for virtual seconds.
    """
    job: str
    """A workload's expression, or the path of a Python file with a `job()` function."""
    strategy: str
    workers: int
    strategy_given: bool | None = None
    """True if `flockstep launch --strategy` gave the strategy, which replaces the one that the script names; None
    otherwise.
    """
    system: str | None = None
    """Name by which the strategy was given: a system, or an alias such as `asgd`; None for an expression."""
    seed: int = 0
    transport: str | None = None
    result: str | None = None
    """Policy that selects the model that the run returns, such as `server`, `mean` or `rank0`."""
    steps: int | None = None
    """Number of local steps per worker; takes precedence over `epochs`."""
    epochs: float | None = None
    batch: int | None = None
    """Number of samples per worker and step."""
    lr: float | None = None
    """Learning rate that replaces the learning rate of the job's optimizer."""
    schedule: str | None = None
    """Schedule by which learning rate and batch size change over the steps, as factors on `lr` and `batch`."""
    split: str = "iid"
    partition: str | None = None
    """How each replica of the model is split over workers; None if every worker holds the whole model."""
    network: str | None = None
    compute: str | None = None
    cluster: str | None = None
    """Name of the cluster from which network and compute model were derived; None if the user gave network and compute
    model.
    """
    faults: tuple[str, ...] = ()
    """Faults that are injected into the run; in a real run, only wrong gradients."""
    on_bad_gradient: BadGradientAction = "stop"
    """What happens to a gradient that is not finite or too large: `stop`, `skip` or `quarantine`."""
    max_gradient_norm: float | None = None
    """Largest Euclidean norm of a gradient; None for no limit."""
    strikes: int = 3
    """Number of refused gradients after which `on_bad_gradient="quarantine"` removes a worker."""
    evaluate_every: float | None = None
    metric: str | None = None
    """Name of the metric that measures the run in tables and reports: the job's, or the one that a target of a script
    names; None for the first that a script records.
    """
    higher_is_better: bool = True
    target: float | None = None
    """Value of the metric at which the time to target ends."""
    until_target: bool = False
    """Whether the run ends at the first evaluation that reaches the target."""
    threads: int | None = None
    """Threads of the numerical libraries in each process."""
    heartbeat: float | None = None
    """Seconds without an answer after which a node counts as lost."""
    link_timeout: float | None = None
    """Seconds for which the connection between two hosts may be interrupted before a node counts as lost; None stands
    for 60.
    """
    step_timeout: float | None = None
    """Seconds a worker may take for one step, or for joining the run, before the run ends; None for no limit."""
    checkpoint_every: str | None = None
    """Interval of the checkpoints: a number of steps, or minutes such as "5min"; None for a checkpoint only at a
    signal.
    """
    min_workers: int | None = None
    """Smallest number of workers with which the run continues when workers leave or are lost; None if workers may not
    leave.
    """
    max_workers: int | None = None
    """Maximum number of workers to which the run may grow as workers join; None if workers may not join."""
    keep: int | None = None
    """Number of complete checkpoints that are kept; None stands for `KEEP`."""
    arguments: tuple[str, ...] = ()
    """Arguments of a launched script."""
    module: bool | None = None
    """True if `job` is the name of a module, as with python -m; None for a script."""
    output: OutputRanks | None = None
    """Ranks of a launched script whose output is shown; None for all ranks."""
    prefix: bool | None = None
    """True if each line of a launched script's output begins with the rank of its worker; None if not."""
    rank_output: str | None = None
    """Folder for the output of each rank of a launched script; None if no files are written."""
    shared: bool | None = None
    """True if all users of the host may read the record; None if only its owner may."""
    imports: tuple[str, ...] = ()
    """Python files that register custom components; they are executed before anything else."""
    versions: dict[str, str] = field(default_factory=dict)
    """Package → version that the run used, and other facts about how it computed; `same_run` does not compare them."""
    facts: dict[str, str] = field(default_factory=dict)
    """Values that must be equal when the run is repeated, for example a hash of the data."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigurationError(f"kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}; choose one")
        require(self.workers >= 1, "workers", ">= 1", self.workers, "use 1 for plain training")
        most = f"<= {MOST_WORKERS}"
        require(self.workers <= MOST_WORKERS, "workers", most, self.workers, "a run has no more rows in its record")
        require(self.seed >= 0, "seed", ">= 0", self.seed, "use any whole number >= 0")
        require(self.threads is None or self.threads >= 1, "threads", ">= 1", self.threads, "1 is usual")
        if self.heartbeat is not None and not 1 <= self.heartbeat <= LONGEST_HEARTBEAT:
            raise ConfigurationError(
                f"heartbeat must be >= 1 s and <= {LONGEST_HEARTBEAT} s, got {self.heartbeat:g}; 5 is usual"
            )

        if self.link_timeout is not None and not 0 <= self.link_timeout < math.inf:
            raise ConfigurationError(
                f"link_timeout must be >= 0 s and finite, got {self.link_timeout:g}; 60 is usual, with 0 a node is "
                "lost as soon as its connection breaks"
            )
        _ = self.bad_gradients  # refuses what is invalid
        if self.step_timeout is not None and not self.step_timeout > 0:
            raise ConfigurationError(
                f"step_timeout must be > 0 s, got {self.step_timeout:g}; leave it out for no limit"
            )

        require(self.keep is None or self.keep >= 1, "keep", ">= 1", self.keep, "2 is usual")
        if self.checkpoint_every is not None:
            CheckpointInterval.parse(self.checkpoint_every)
        for name, bound in (("min_workers", self.min_workers), ("max_workers", self.max_workers)):
            require(bound is None or bound >= 1, name, ">= 1", bound, f"use for example {self.workers}")

    @property
    def checkpoint_interval(self) -> CheckpointInterval | None:
        """Interval between two checkpoints; None if a checkpoint is taken only at a signal."""
        return None if self.checkpoint_every is None else CheckpointInterval.parse(self.checkpoint_every)

    @property
    def bad_gradients(self) -> BadGradients:
        """What happens to a gradient that is not finite or too large: `stop`, `skip` or `quarantine`."""
        return BadGradients(self.on_bad_gradient, self.max_gradient_norm, self.strikes)

    @property
    def clock(self) -> ClockKind:
        """`real` if the record's seconds were measured, `virtual` if they were modeled."""
        return "virtual" if self.kind == "simulate" else "real"

    @property
    def title(self) -> str:
        """Name of the strategy in tables and reports: the name by which it was given if there is one, otherwise the
        expression.
        """
        return self.system or self.strategy

    @property
    def command(self) -> str:
        """The shell command that repeats this run."""
        options = ["--strategy", self.title] if self.strategy_given else []
        for name in _LAUNCH_OPTIONS if self.kind == "launch" else _OPTIONS:
            value = None if name == "epochs" and self.steps is not None else getattr(self, name)
            if name == "target" and value is not None and self.kind == "launch":
                value = str(MetricTarget(value, self.metric))
            if value is not None:
                options += [f"--{name.replace('_', '-')}", _word(value)]
        for name, usual in (("on_bad_gradient", "stop"), ("strikes", 3)):
            if getattr(self, name) != usual:
                options += [f"--{name.replace('_', '-')}", str(getattr(self, name))]
        for name in ("until_target", "prefix", "shared"):
            if getattr(self, name):
                options.append(f"--{name.replace('_', '-')}")
        for fault in self.faults:
            options += ["--fault", fault]
        for file in self.imports:
            options += ["--import", file]
        if self.kind == "launch":
            script = [*(["-m"] if self.module else []), self.job, *self.arguments]
            return shlex.join(["flockstep", "launch", *options, *script])
        return shlex.join(["flockstep", self.kind, self.job, "--strategy", self.title, *options])

    def to_toml(self) -> str:
        """Return this configuration as a TOML document; settings that are None or empty are left out."""
        data = {key: value for key, value in dataclasses.asdict(self).items() if value not in (None, {}, ())}
        return tomli_w.dumps(data)

    def with_files_of(self, other: RunConfig) -> RunConfig:
        """Return this configuration with the job and the imported files of `other`, under the names that the files
        have on its host.
        """
        return dataclasses.replace(self, job=other.job, imports=other.imports)

    @property
    def digest(self) -> str:
        """SHA-256 of the configuration as a TOML document, in hexadecimal digits."""
        return hashlib.sha256(self.to_toml().encode()).hexdigest()

    @classmethod
    def from_toml(cls, text: str, where: str = "config.toml") -> RunConfig:
        """Read a configuration that `to_toml` wrote.

        Args:
            text: the TOML document.
            where: name of the document in error messages.

        Raises:
            ConfigurationError: `text` is not TOML, or a value is missing or has the wrong type.
            UnknownName: a setting does not exist; the message names the nearest setting.
        """
        try:
            data = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
            raise ConfigurationError(
                f"{where} is not a TOML document: {error}; repeat the run to write a new file"
            ) from None
        data.pop("park", None)  # records of earlier versions have it
        known = [f.name for f in dataclasses.fields(cls)]
        for key in data:
            if key not in known:
                raise UnknownName.among(f"setting in {where}", key, known)
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"{where} does not describe a run: {error}; correct this value") from None


def same_run(a: RunConfig, b: RunConfig) -> bool:
    """Return whether both configurations describe the same run: all settings except `versions` and `shared` are
    equal.
    """
    return dataclasses.replace(a, versions={}, shared=None) == dataclasses.replace(b, versions={}, shared=None)


def _word(value: str | float) -> str:
    """Format a value as one command-line word.

    A whole float is written without its fraction, as integer options require.
    """
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
