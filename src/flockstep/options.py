"""The options of runs, each declared once: the command line, the Python functions, `RunConfig`, the command that
repeats a run, and the reference read these fields.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache, partial
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_type_hints

from flockstep.errors import ConfigurationError, require

BadGradientAction = Literal["stop", "skip", "quarantine"]
OutputRanks = Literal["all", "rank0", "none"]
LONGEST_HEARTBEAT = 3600
"""Largest allowed heartbeat timeout, in seconds."""
COORDINATOR_PORT = 29400
"""Default port at which the first pod of a run coordinates."""
MOST_WORKERS = 100_000
"""Largest number of workers of a run; readers of records make a row for each worker."""


@dataclass(frozen=True)
class Opt:
    """What is known about an option or an argument: of a field of a structure, or of a parameter of a command, which it
    annotates. A field with a default is written `steps: int = Opt("…").default(20)`.
    """

    help: str
    _: KW_ONLY
    names: tuple[str, ...] = ()
    """Names on the command line; empty for the field's name with hyphens. A switch that can be turned off has the name
    `--yes/--no`.
    """
    panel: str = "Options"
    """Heading in `--help`."""
    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    unit: str = ""
    advice: str = ""
    """A valid value, at the end of the error for a value out of range."""
    usual: object = None
    """Value in the record if the field is None."""
    shown: str = ""
    """The default in words, for `--help`."""
    metavar: str | None = None
    nouns: tuple[str, ...] = ()
    """Kinds of components whose names complete the value."""
    complete: Any = None
    """Function that returns the words that complete a word."""
    separated: bool = False
    """Whether the values of a list stand in one word, with commas between them."""
    positional: bool = False
    python: bool = False
    """Whether the field is an argument of Python functions only."""

    def default(self, value: object = None) -> Any:
        """Return a field of a structure with this option and with a default."""
        return dataclasses.field(default=value, metadata={Opt: self})

    def written(self, field: str) -> str:
        """Return the name of the field on the command line."""
        usual = field if self.positional else f"--{field.replace('_', '-')}"
        return self.names[0] if self.names else usual

    def check(self, name: str, value: object) -> None:
        """Raise `ConfigurationError` if a number is out of range."""
        if not isinstance(value, (int, float)) or self.least == self.above:
            return
        if self.least <= value <= self.most and value > self.above and value < math.inf:
            return
        low = f">= {self.least:g}" if self.above == -math.inf else f"> {self.above:g}"
        rule = f"{f'<= {self.most:g}' if value > self.most else low} {self.unit}".strip()
        rule = "finite" if value == math.inf else rule
        raise ConfigurationError(f"{name} must be {rule}, got {value}; {self.advice}")


Arg = partial(Opt, positional=True)
_training, _processes, _virtual, _output, _sealed = (
    partial(Opt, panel=heading) for heading in ("Training", "Processes", "Virtual time", "Output", "Sealed jobs")
)

Workers = Annotated[
    int,
    Opt("Number of workers.", names=("--workers", "-n"), least=1, most=MOST_WORKERS, advice="use 1 for plain training"),
]
_threads = partial(
    _processes, help="Number of threads of the numerical libraries in each process.", least=1, advice="1 is usual"
)
Target = Annotated[
    float | str | None,
    _training("Value of the metric to which the time to target refers: 0.95, or accuracy=0.95 (default: the job's)."),
]


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options of every run."""

    workers: Workers = 4
    seed: int = Opt(
        "Seed of initial weights, sampling and every random choice. A script seeds its own model and data.",
        least=0,
        advice="use any whole number >= 0",
    ).default(0)
    threads: int | None = _threads(shown="OMP_NUM_THREADS or 1").default()
    imports: Sequence[str] = Opt(
        "Python file that registers components; repeat the option for several.", names=("--import",)
    ).default(())
    shared: bool | None = _output("Let all users of this host read the record (default: only its owner).").default()
    target: Target = None


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(CommonOptions):
    """Options of every job; a script chooses these values itself."""

    threads: int | None = _threads().default(1)

    epochs: float | None = _training(
        "Number of passes of all workers together over the training data (default: the job's)."
    ).default()
    steps: int | None = _training("Number of local steps per worker, instead of --epochs.").default()
    batch: int | None = _training("Number of samples per worker and step (default: the job's).").default()
    lr: float | None = _training("Learning rate (default: the job's).").default()
    schedule: str | None = _training(
        "How the learning rate or the batch changes: goyal, cosine, batch_increase, ….", nouns=("schedule",)
    ).default()
    evaluate_every: float | None = _training(
        "Number of steps per worker between evaluations (default: 40 evaluations per run)."
    ).default()
    result: str | None = _training("Model that the run returns: server, mean, rank0, best, ensemble.").default()


@dataclass(frozen=True, kw_only=True)
class DistributionOptions:
    """Options about which worker has which part of the data and of the model."""

    split: str = _training(
        "How data is split over workers: iid, by-label, dirichlet(alpha).", nouns=("split",)
    ).default("iid")
    partition: str | None = _training(
        "How each replica is split over workers: none, pipeline(4, schedule=1f1b, microbatches=8), sharded(2), "
        "tensor(2), grid(2, 2).",
        nouns=("partition",),
    ).default()
    faults: Sequence[str] = _training(
        "Faults to inject: 'dies(1, at=0.5)', 'slows(2, 10)', 'flips_sign(3)', …; repeatable. Runs on real "
        "processes take only faults of gradients.",
        names=("--fault",),
    ).default(())


@dataclass(frozen=True, kw_only=True)
class SealedOptions:
    """Options of a job that `flockstep seal` wrote."""

    data: str | None = _sealed(
        "Folder with the data on which a sealed job is trained: train_x.npy, train_y.npy, test_x.npy and test_y.npy, "
        "or train and test as .parquet, as .txt, or as folders of images.",
        metavar="FOLDER",
    ).default()
    trust: str | None = _sealed(
        "File with the public keys whose sealed jobs are run, one on each line; anyone runs a job whoever has signed "
        "it, or nobody.",
        metavar="FILE",
    ).default()
    key: str | None = _sealed("File with the private key to which a sealed job is encrypted.", metavar="FILE").default()

    def words(self) -> tuple[str, ...]:
        """Return these options as words of a command."""
        given = {option.written(name): getattr(self, name) for name, (option, *_) in options_of(SealedOptions).items()}
        return tuple(word for name, value in given.items() if value is not None for word in (name, value))


@dataclass(frozen=True, kw_only=True)
class BadGradientOptions:
    """Options about gradients that are not finite or too large."""

    on_bad_gradient: BadGradientAction = _training(
        "What happens to a gradient that is not finite or too large: stop the run, skip the gradient, or "
        "quarantine the worker."
    ).default("stop")
    max_gradient_norm: float | None = _training(
        "Largest norm of a gradient, or of its slice on a shard; a gradient with a larger norm counts as bad "
        "(default: no limit)."
    ).default()
    strikes: int = _training("Number of bad gradients after which a worker is quarantined.").default(3)


@dataclass(frozen=True, kw_only=True)
class TimeoutOptions:
    """Options about processes that do not answer."""

    heartbeat: float | None = _processes(
        "Seconds of silence after which a process counts as lost.",
        least=1,
        most=LONGEST_HEARTBEAT,
        unit="s",
        advice="5 is usual",
        usual=5.0,
    ).default()
    link_timeout: float | None = _processes(
        "Seconds for which the connection between two hosts may be interrupted before a process counts as lost.",
        least=0,
        unit="s",
        advice="60 is usual, with 0 a node is lost as soon as its connection breaks",
        usual=60.0,
    ).default()
    step_timeout: float | None = _processes(
        "Seconds a step, or joining the run, may take before the run ends with an error (default: no limit).",
        above=0,
        unit="s",
        advice="leave it out for no limit",
    ).default()


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(TimeoutOptions):
    """Options about processes, and about how they exchange messages."""

    transport: str | None = _processes(
        "How processes exchange messages: shared_memory, ipc, tcp or namespaces(…).",
        nouns=("transport",),
        usual="shared_memory",
    ).default()
    replayable: bool = _output(
        "Record the order in which messages enter each worker and server, so that flockstep replay repeats the run "
        "bit for bit."
    ).default(False)


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Options about checkpoints, and about runs whose number of workers changes."""

    checkpoint_every: str | int | None = _output(
        "Interval between checkpoints, in steps (500) or in time (5min); flockstep resume continues from the "
        "newest checkpoint (default: a checkpoint only if a signal stops the run).",
        metavar="STEPS|TIME",
    ).default()
    keep: int | None = _output("Number of checkpoints to keep (default: 2).", least=1, advice="2 is usual").default()
    min_workers: int | None = _processes(
        "Smallest number of workers with which the run continues: a worker that gets SIGTERM leaves, and if a "
        "worker is lost the other workers go on with the step or round in hand under strategies such as all_reduce "
        "and local_sgd, without checkpoints, and otherwise go back to the newest checkpoint.",
        least=1,
        advice="use for example 2",
    ).default()
    max_workers: int | None = _processes(
        "Largest number of workers with which the run continues when flockstep join adds workers.",
        least=1,
        advice="use for example 8",
    ).default()


@dataclass(frozen=True, kw_only=True)
class VirtualTimeOptions:
    """Options about modeled seconds."""

    network: str | None = _virtual(
        "Network between the nodes: a name (100mbit, 1gbit, 10gbit, 100gbit) or a bandwidth and a latency, as in "
        "\"link('10mbit', '1ms')\"; see `flockstep list networks`.",
        nouns=("network",),
        usual="1gbit",
    ).default()
    compute: str | None = _virtual(
        "Distribution of the seconds per gradient: lognormal(0.01, sigma=0.5), exponential(0.05), "
        "constant(0.01), …; `flockstep calibrate` measures the distribution of a machine.",
        nouns=("compute",),
        usual="lognormal(mean=0.01)",
    ).default()
    until_target: bool = _virtual("Stop at the first evaluation that reaches the target (virtual time only).").default(
        False
    )


@dataclass(frozen=True, kw_only=True)
class ScriptArguments:
    """The arguments of a script."""

    arguments: Sequence[str] = Arg("Arguments for the script.").default(())


@dataclass(frozen=True, kw_only=True)
class ScriptOptions(ScriptArguments):
    """Options of a launched script."""

    module: bool | None = Opt("SCRIPT is the name of a module, as with python -m.", names=("-m",)).default()
    replica_size: int | None = _processes(
        "Number of processes that hold one replica of the model together, as with FSDP2 or tensor parallelism; a "
        "strategy coordinates the replicas (default: 1).",
        least=1,
        advice="use a number that divides the number of workers",
    ).default()
    replica_over_hosts: bool | None = _processes(
        "Let the processes of one replica run on several hosts (default: all processes of a replica run on one host)."
    ).default()
    output: OutputRanks | None = _output("Ranks whose output is shown: all, rank0 or none.", shown="all").default()
    prefix: bool | None = _output("Begin each line of the script's output with the rank of its worker.").default()
    rank_output: Path | str | None = _output(
        "Folder for the output of each rank, in files rank-0.out, rank-0.err, …."
    ).default()


_of_jobs: tuple[type, ...] = (TrainingOptions, DistributionOptions, BadGradientOptions, SealedOptions)
_of_processes: tuple[type, ...] = (ProcessOptions, CheckpointOptions)
GROUPS: Mapping[str, tuple[type, ...]] = {
    "train": (*_of_jobs, *_of_processes),
    "simulate": (*_of_jobs, VirtualTimeOptions),
    "launch": (CommonOptions, BadGradientOptions, *_of_processes, ScriptOptions),
    "all": (*_of_jobs, *_of_processes, VirtualTimeOptions, ScriptOptions),
}
"""Kind of run → the options that it has."""


@cache
def options_of(structure: type) -> dict[str, tuple[Opt, Any, dataclasses.Field[Any]]]:
    """Return the options of a structure: name of the field → the option, its type, and the field."""
    hints, plain = get_type_hints(structure, include_extras=True), get_type_hints(structure)
    return {
        field.name: (option, plain[field.name], field)
        for field in dataclasses.fields(structure)
        for option in (field.metadata.get(Opt), *getattr(hints[field.name], "__metadata__", ()))
        if isinstance(option, Opt)
    }


@cache
def options_of_kind(kind: str) -> tuple[tuple[str, Opt], ...]:
    """Return the names and the options of the settings that runs of a kind have; of every kind for "all"."""
    return tuple((name, found[0]) for group in GROUPS[kind] for name, found in options_of(group).items())


def require_numbers(options: Any) -> None:
    """Raise `ConfigurationError` if a field of a structure of options takes a number and holds something else."""
    structure: type = type(options)
    for name, (_, hint, _) in options_of(structure).items():
        kinds, value = set(get_args(hint)) if isinstance(hint, UnionType) else {hint}, getattr(options, name)
        if not kinds <= {int, float, NoneType} or (value is None and NoneType in kinds):
            continue
        whole = int in kinds
        if not isinstance(value, Integral if whole else Real):
            what, example = ("a whole number", 4) if whole else ("a number", 0.1)
            raise ConfigurationError(f"{name} must be {what}, got {value!r}; write it like {name}={example}")


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(SealedOptions):
    """Options of a measurement of this machine."""

    workers: Workers = 4
    job: str = Opt("Job whose gradients are timed.").default("digits")
    transport: str = options_of(ProcessOptions)["transport"][0].default("shared_memory")
    threads: int = options_of(TrainingOptions)["threads"][0].default(1)
    gradients: int = Opt(
        "Number of gradients to time per worker, first on one worker alone and then on all workers at once."
    ).default(30)
    rounds: int = Opt("Number of round trips of a message between every pair of workers.").default(20)
    codec: tuple[str, ...] | None = Opt("Codec to measure; repeat the option for several (default: half).").default()


@dataclass(frozen=True)
class PodOptions:
    """Options about the pods of a run on Kubernetes."""

    image: Annotated[str, Opt("Container image that contains flockstep and everything the command needs.")]
    nodes: int = Opt("Number of pods; each pod is one host of the run.").default(2)
    name: str = Opt("Name of the Kubernetes Job, Service and Secret.").default("flockstep")
    port: int = Opt("Port on which pod 0 listens as the coordinator.").default(COORDINATOR_PORT)
    cpu: str | None = Opt("CPU cores of each pod, such as 4 or 500m.").default()
    memory: str | None = Opt("Memory of each pod, such as 8Gi.").default()
    gpus: int = Opt("Number of GPUs of each pod.").default(0)
    claim: str | None = Opt(
        "PersistentVolumeClaim (ReadWriteMany) for the record (default: the record is deleted with pod 0)."
    ).default()
    secret: str | None = Opt(
        "Existing Secret that holds the run's secret under the key secret (default: the manifest contains a "
        "new Secret)."
    ).default()


SEALED = ".sealed"
"""Suffix of the files that `flockstep seal` writes."""
_contract = partial(Opt, panel="Demands on the data")


@dataclass(frozen=True)
class SealedSubject:
    """The job that is sealed."""

    job: Annotated[
        str | Path,
        Arg("A built-in workload, or a Python file with a job() function.", nouns=("workload",)),
    ]


@dataclass(frozen=True, kw_only=True)
class SealOptions(SealedSubject):
    """How a job is sealed."""

    out: Path | str = Opt("File to write; its name ends with .sealed.").default("model.sealed")
    overwrite: bool = Opt("Replace the file of --out if it exists.").default(False)
    seed: int = Opt(
        "Seed from which the initial weights are drawn.", least=0, advice="use any whole number >= 0"
    ).default(0)
    rename: bool = Opt(
        "Replace the names of the job, its metric, parameters and buffers by numbers. The file OUT.names keeps them: "
        "do not send it."
    ).default(False)
    schedule: str | None = Opt(
        "How the learning rate or the batch changes unless the run says otherwise.", nouns=("schedule",)
    ).default()
    binary: bool = Opt(
        "Compile the job to libraries for the platform of this machine, so that no list of operators travels; this "
        "takes a C++ compiler and a minute or two."
    ).default(False)
    sign: Path | str | None = Opt(
        "File with your private key, which flockstep secret wrote; the job is signed with it.", metavar="KEY"
    ).default()
    encrypt_to: Path | str | None = Opt(
        "File with the public key of the receiver, to whom alone the file is readable.", metavar="KEY"
    ).default()
    columns: Sequence[str] = _contract(
        "Column of a Parquet file that holds inputs; repeat the option for several.", names=("--column",)
    ).default(("x",))
    label: str = _contract("Column of a Parquet file that holds targets.").default("y")
    classes: int | None = _contract(
        "Number of classes (default: the highest label of your data, plus 1).", least=1, advice="use for example 10"
    ).default()
    x_range: Sequence[float] = _contract(
        "Lowest and highest value of the inputs, as in 0,1 (default: the range of your data; for floating-point "
        "numbers three times as wide).",
        separated=True,
    ).default(())

    def __post_init__(self) -> None:
        require(
            str(self.out).endswith(SEALED), "out", f"a name that ends with {SEALED}", self.out, f"write model{SEALED}"
        )
        require(len(self.x_range) in (0, 2), "x_range", "two numbers", self.x_range, "write it like 0,1")
