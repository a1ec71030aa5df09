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

from flockstep.errors import ConfigurationError, UnknownName
from flockstep.nodes import BadGradients
from flockstep.options import (
    BadGradientOptions,
    CheckpointOptions,
    DistributionOptions,
    ProcessOptions,
    ScriptOptions,
    SealedOptions,
    TrainingOptions,
    VirtualTimeOptions,
    options_of_kind,
)
from flockstep.partitions.base import Partition

Kind = Literal["train", "simulate", "launch"]
ClockKind = Literal["real", "virtual"]

JOB_FILE, DATA = "job_file", "data"
"""Keys, among the versions in a record, of the digest of the job's file, and of sentences about the job's data."""
SPLIT = "split"
"""Key, among the versions in a record, of a sentence about layers that the parts of a split model compute otherwise."""
KEEP = 2
"""Default number of checkpoints of a run that are kept."""


@dataclass(frozen=True)
class CheckpointInterval:
    """Interval between two checkpoints: a number of steps of each worker, or a number of seconds."""

    steps: int = 0
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> CheckpointInterval:
        """Return the interval that a text such as "500" (steps), "5min" or "30s" describes."""
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(s|min|h)|([0-9]+)", text.strip())
        if found is not None and found[3] is not None and int(found[3]) > 0:
            return cls(steps=int(found[3]))
        if found is not None and found[1] is not None and float(found[1]) > 0:
            return cls(seconds=float(found[1]) * {"s": 1, "min": 60, "h": 3600}[found[2]])
        raise ConfigurationError(
            f"checkpoint_every must be a number of steps or a time > 0, got {text!r}; use for example 500 or 5min"
        )

    def due(self, steps: int, seconds: float) -> bool:
        """Return whether a checkpoint is due `steps` steps and `seconds` seconds after the last checkpoint."""
        return steps >= self.steps if self.steps else seconds >= self.seconds


@dataclass(frozen=True)
class MetricTarget:
    """A value of a metric that runs are to reach, written as `accuracy=0.95`, or as `0.95` for the runs' own metric."""

    value: float
    metric: str | None = None

    @classmethod
    def parse(cls, text: str | float) -> MetricTarget:
        """Return the target that a text describes; refuse a text without a finite number."""
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
class RunSubject:
    """What is run."""

    kind: Kind
    """Kind of the run: `train` for real processes and real seconds, `launch` for a user's script on real processes,
    `simulate` for virtual seconds.
    """
    job: str
    """A workload's expression, or the path of a Python file with a `job()` function."""
    strategy: str
    """Strategy, as an expression."""
    system: str | None = None
    """Name by which the strategy was given: a system, or an alias such as `asgd`; None for an expression."""
    strategy_given: bool | None = None
    """True if `flockstep launch --strategy` gave the strategy, which replaces the one that the script names; None
    otherwise.
    """


@dataclass(frozen=True, kw_only=True)
class RunConfig(
    ScriptOptions,
    VirtualTimeOptions,
    CheckpointOptions,
    ProcessOptions,
    BadGradientOptions,
    DistributionOptions,
    SealedOptions,
    TrainingOptions,
    RunSubject,
):
    """The configuration of one run: its options, and what was found out when it began. Components are stored as text
    (`ps(consistency=ssp(3))`).

    A setting of None stands for the job's default, or does not apply to the kind of run.
    """

    workers: int
    threads: int | None = None
    imports: tuple[str, ...] = ()
    target: float | None = None
    faults: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    checkpoint_every: str | None = None
    rank_output: str | None = None
    cluster: str | None = None
    """Name of the cluster from which network and compute model were derived; None if the user gave network and compute
    model.
    """
    metric: str | None = None
    """Name of the metric that measures the run in tables and reports: the job's, or the one that a target of a script
    names; None for the first that a script records.
    """
    higher_is_better: bool = True
    """Whether larger values of the metric are better."""
    versions: dict[str, str] = field(default_factory=dict)
    """Package → version that the run used, and other facts about how it computed; `same_run` does not compare them."""
    facts: dict[str, str] = field(default_factory=dict)
    """Values that must be equal when the run is repeated, for example a hash of the data."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigurationError(f"kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}; choose one")
        for name, option in options_of_kind("all"):
            option.check(name, getattr(self, name))
        _ = self.bad_gradients  # refuses what is invalid
        if self.checkpoint_every is not None:
            CheckpointInterval.parse(self.checkpoint_every)
        if self.workers % self.processes_of_replica:
            raise ConfigurationError(
                f"the number of workers must be a multiple of --replica-size, got {self.workers} workers and replicas "
                f"of {self.replica_size} processes; use -n {self.processes_of_replica}, or a multiple of it"
            )

    @property
    def processes_of_replica(self) -> int:
        """Number of processes of a script that hold one replica of the model together."""
        return self.replica_size or 1

    @property
    def processes_together(self) -> int:
        """Number of workers with consecutive ranks that must run on one host."""
        if self.partition is not None:
            return Partition.parse(self.partition).together
        return 1 if self.replica_over_hosts else self.processes_of_replica

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
        """Name of the strategy in tables and reports: the name by which it was given, otherwise the expression."""
        return self.system or self.strategy

    @property
    def command(self) -> str:
        """The shell command that repeats this run."""
        options = ["--strategy", self.title] if self.strategy_given else []
        for name, option in options_of_kind(self.kind):
            value = None if name == "epochs" and self.steps is not None else getattr(self, name)
            if name == "target" and value is not None and self.kind == "launch":
                value = str(MetricTarget(value, self.metric))
            if option.positional or name == "module" or value is None or value is False or value == _USUAL.get(name):
                continue
            word = option.written(name)
            for one in value if isinstance(value, tuple) else (value,):
                options += [word] if one is True else [word, _word(one)]
        if self.kind == "launch":
            script = [*(["-m"] if self.module else []), self.job, *self.arguments]
            return shlex.join(["flockstep", "launch", *options, *script])
        return shlex.join(["flockstep", self.kind, self.job, "--strategy", self.title, *options])

    def to_toml(self) -> str:
        """Return this configuration as a TOML document; settings that are None or empty are left out."""
        data = {key: value for key, value in dataclasses.asdict(self).items() if value not in (None, {}, ())}
        return tomli_w.dumps(data)

    def with_files_of(self, other: RunConfig) -> RunConfig:
        """Return this configuration with the files of `other`, under the names that they have on its host."""
        return dataclasses.replace(self, job=other.job, imports=other.imports)

    @property
    def digest(self) -> str:
        """SHA-256 of the configuration as a TOML document, in hexadecimal digits."""
        return hashlib.sha256(self.to_toml().encode()).hexdigest()

    @classmethod
    def from_toml(cls, text: str, where: str = "config.toml") -> RunConfig:
        """Read a configuration that `to_toml` wrote; `where` names the document in error messages."""
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


_USUAL = {"on_bad_gradient": "stop", "strikes": 3}
"""Values that the command which repeats a run leaves out."""


def same_run(a: RunConfig, b: RunConfig) -> bool:
    """Return whether two configurations describe the same run: all settings but `versions` and `shared` are equal."""
    return dataclasses.replace(a, versions={}, shared=None) == dataclasses.replace(b, versions={}, shared=None)


def _word(value: str | float) -> str:
    """Format a value as a command-line word; a whole float loses its fraction, as integer options require."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
