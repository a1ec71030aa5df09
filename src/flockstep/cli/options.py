"""The options that several commands share, and the run configuration that follows from them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from flockstep import registry
from flockstep.errors import ConfigurationError
from flockstep.experiments.folders import folder as folder

if TYPE_CHECKING:
    from flockstep.costs.cluster import ClusterShape
    from flockstep.launchers.continuing import Continuation
    from flockstep.launchers.gathering import Gathering
    from flockstep.launchers.output import Output
    from flockstep.records.config import Kind, RunConfig

training_option, process_option, host_option, virtual_option, output_option = (
    functools.partial(typer.Option, rich_help_panel=heading)
    for heading in ("Training", "Processes", "Several hosts", "Virtual time", "Output")
)
"""Options of each group in `--help`."""
KEYWORD = inspect.Parameter.KEYWORD_ONLY


def completed(*nouns: str) -> Callable[[str], list[str]]:
    """Return a function for tab completion that offers the names of all components of the given kinds, short names
    included.
    """

    def complete(incomplete: str) -> list[str]:
        known = [
            name for noun in nouns for name in (*registry.names(noun), *registry.aliases(noun), *registry.catalog(noun))
        ]
        return [name for name in known if name.startswith(incomplete)]

    return complete


JobArgument = Annotated[
    str,
    typer.Argument(
        help="A built-in workload (see `flockstep list workloads`) or a Python file with a job() function.",
        autocompletion=completed("workload"),
    ),
]
ComparedArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB|SCRIPT",
        help="A built-in workload (see `flockstep list workloads`), a Python file with a job() function, or a training "
        "script, which is launched with each strategy in place of the one that it names.",
        autocompletion=completed("workload"),
    ),
]
STRATEGY = completed("strategy")
StrategyText = Annotated[
    str,
    typer.Option(
        "--strategy",
        "-s",
        help="How the workers coordinate, e.g. 'ps(consistency=ssp(3))'; see `flockstep list strategies`.",
        autocompletion=STRATEGY,
    ),
]
ScriptStrategy = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        "-s",
        help="How the workers coordinate, in place of the strategy that the script names in every call of distribute "
        "(default: the script's own).",
        autocompletion=STRATEGY,
    ),
]
Workers = Annotated[int, typer.Option("--workers", "-n", help="Number of workers.")]
Seed = Annotated[int, typer.Option(help="Seed of initial weights, sampling and every random choice.")]
ScriptSeed = Annotated[
    int,
    typer.Option(help="Seed of the random choices of strategies and codecs; a script seeds its own model and data."),
]
Epochs = Annotated[
    float | None,
    training_option(help="Number of passes of all workers together over the training data (default: the job's)."),
]
Steps = Annotated[int | None, training_option(help="Number of local steps per worker, instead of --epochs.")]
Batch = Annotated[int | None, training_option(help="Number of samples per worker and step (default: the job's).")]
Lr = Annotated[float | None, training_option(help="Learning rate (default: the job's).")]
LrGrid = Annotated[
    str | None,
    training_option(help="Learning rates, such as 0.03,0.1,0.3; each strategy is ranked at its best learning rate."),
]
Seeds = Annotated[
    int,
    training_option(
        help="Number of runs per strategy, with consecutive seeds from --seed on; the ranking compares medians."
    ),
]
ScheduleText = Annotated[
    str | None,
    training_option(
        help="How the learning rate or the batch changes: goyal, cosine, batch_increase, ….",
        autocompletion=completed("schedule"),
    ),
]
SplitText = Annotated[
    str,
    training_option(
        help="How data is split over workers: iid, by-label, dirichlet(alpha).", autocompletion=completed("split")
    ),
]
PartitionText = Annotated[
    str | None,
    training_option(
        help="How each replica is split over workers: none, pipeline(4, schedule=1f1b, microbatches=8).",
        autocompletion=completed("partition"),
    ),
]
Target = Annotated[
    str | None,
    training_option(
        help="Value of the metric to which the time to target refers: 0.95, or accuracy=0.95 (default: the job's)."
    ),
]
UntilTarget = Annotated[
    bool,
    virtual_option("--until-target", help="Stop at the first evaluation that reaches the target (virtual time only)."),
]
EvaluateEvery = Annotated[
    int | None,
    training_option(help="Number of steps per worker between evaluations (default: 40 evaluations per run)."),
]
Result = Annotated[str | None, training_option(help="Model that the run returns: server, mean, rank0, best, ensemble.")]
TransportText = Annotated[
    str,
    process_option(
        help="How processes exchange messages: shared_memory, ipc, tcp or namespaces(…).",
        autocompletion=completed("transport"),
    ),
]
Heartbeat = Annotated[float, process_option(help="Seconds of silence after which a process counts as lost.")]
LinkTimeout = Annotated[
    float,
    process_option(
        help="Seconds for which the connection between two hosts may be interrupted before a process counts as lost."
    ),
]
StepTimeout = Annotated[
    float | None,
    process_option(
        help="Seconds a step, or joining the run, may take before the run ends with an error (default: no limit)."
    ),
]
OnBadGradient = Annotated[
    str,
    training_option(
        help="What happens to a gradient that is not finite or too large: stop the run, skip the gradient, or "
        "quarantine the worker."
    ),
]
MaxGradientNorm = Annotated[
    float | None,
    training_option(
        help="Largest norm of a gradient, or of its slice on a shard; a gradient with a larger norm counts as bad "
        "(default: no limit)."
    ),
]
Strikes = Annotated[int, training_option(help="Number of bad gradients after which a worker is quarantined.")]
SecretFile = Annotated[
    Path | None,
    host_option(help="File with the secret of the run, the same on every host (default: from FLOCKSTEP_SECRET)."),
]
MeetTimeout = Annotated[float, host_option(help="Seconds within which all hosts must have joined.")]
HostAddress = Annotated[
    str,
    host_option(
        help="Address of this host to which the other hosts connect (default: the address from which this host "
        "reaches the coordinator)."
    ),
]
On = Annotated[
    Literal["local", "slurm", "ray"],
    host_option(
        help="Where the processes run. local: on this machine and the hosts of --nodes; slurm: in a new Slurm job "
        "or in the allocation of this shell; ray: on a Ray cluster."
    ),
]


@dataclass(frozen=True)
class HostOptions:
    """The options about hosts, of a command whose processes may run on several hosts; `with_hosts` adds them to a
    command.
    """

    on: On = "local"
    cpus_per_worker: Annotated[
        float, host_option(help="Number of cores that each worker reserves (only with --on slurm or ray).")
    ] = 1.0
    gpus_per_worker: Annotated[
        float, host_option(help="Number of GPUs that each worker reserves (only with --on slurm or ray).")
    ] = 0.0
    hosts: Annotated[
        str | None,
        host_option(
            help="Hosts that ssh reaches without a password, each with its number of workers, such as a:4,b:4."
        ),
    ] = None
    ssh: Annotated[str, host_option(help="The ssh command with its options (only with --hosts).")] = "ssh"
    remote_python: Annotated[
        str | None,
        host_option(
            help="Path of Python on the hosts (only with --hosts or --on slurm; default: the path on this machine)."
        ),
    ] = None
    slurm_options: Annotated[
        str,
        host_option(
            help="Additional options for sbatch, such as '--partition=gpu --time=1:00:00' (only with --on slurm)."
        ),
    ] = ""
    nodes: Annotated[
        int | None,
        host_option(
            help="Number of hosts; run the same command on each host, with a different --node-rank (default: only "
            "this host)."
        ),
    ] = None
    node_rank: Annotated[
        int | None, host_option(help="Rank of this host; the host with rank 0 coordinates the run.")
    ] = None
    coordinator: Annotated[
        str | None, host_option(help="Address at which the host of rank 0 listens, as host:port or [IPv6]:port.")
    ] = None
    separate_coordinator: Annotated[
        bool,
        host_option(
            "--separate-coordinator",
            help="The run is coordinated by flockstep coordinate at --coordinator, not by the host of rank 0.",
        ),
    ] = False
    secret_file: SecretFile = None
    timeout: MeetTimeout = 600.0
    host_address: HostAddress = ""


HERE = HostOptions()
"""Values of the options about hosts for a command that runs all processes on this host."""


def with_hosts(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator that replaces the argument `where` of a command with the options of `HostOptions`."""
    own, kinds = inspect.signature(command, eval_str=True), get_type_hints(HostOptions, include_extras=True)
    shared = {
        field.name: inspect.Parameter(field.name, KEYWORD, default=field.default, annotation=kinds[field.name])
        for field in dataclasses.fields(HostOptions)
    }

    @functools.wraps(command)
    def wrapped(**options: Any) -> None:
        where = HostOptions(**{name: options.pop(name) for name in shared})
        command(**options, where=where)

    listed = list(own.parameters.values())
    at = list(own.parameters).index("where")
    listed[at : at + 1] = shared.values()
    wrapped.__signature__ = own.replace(parameters=[one.replace(kind=KEYWORD) for one in listed])  # type: ignore[attr-defined]
    return wrapped


Threads = Annotated[int, process_option(help="Number of threads of the numerical libraries in each process.")]
ScriptThreads = Annotated[
    int | None,
    process_option(
        help="Number of threads of the numerical libraries in each process (default: OMP_NUM_THREADS or 1)."
    ),
]
Ranks = Annotated[
    Literal["all", "rank0", "none"], output_option(help="Ranks whose output is shown: all, rank0 or none.")
]
Prefix = Annotated[
    bool, output_option("--prefix", help="Begin each line of the script's output with the rank of its worker.")
]
RankOutputFolder = Annotated[
    Path | None, output_option(help="Folder for the output of each rank, in files rank-0.out, rank-0.err, ….")
]
NetworkText = Annotated[
    str,
    virtual_option(
        help="Network between the nodes: 100mbit, 1gbit, 10gbit, link(…), switch(…), two_tier(…).",
        autocompletion=completed("network"),
    ),
]
ComputeText = Annotated[
    str,
    virtual_option(
        help="Distribution of the seconds per gradient: lognormal(0.01, sigma=0.5), exponential(0.05), "
        "constant(0.01), …; `flockstep calibrate` measures the distribution of a machine.",
        autocompletion=completed("compute"),
    ),
]
ClusterText = Annotated[
    str | None,
    virtual_option(
        help="Cluster that replaces --network and --compute, with links, gradient times, and the time that nodes "
        "spend on messages and steps: the name here (saved by flockstep calibrate), another name, or a TOML "
        "file."
    ),
]
Faults = Annotated[
    list[str] | None,
    training_option(
        "--fault", help="Faults to inject: 'dies(1, at=0.5)', 'slows(2, 10)', 'flips_sign(3)', …; repeatable."
    ),
]
Imports = Annotated[
    list[str] | None,
    typer.Option("--import", help="Python file that registers components; repeat the option for several."),
]
Out = Annotated[Path | None, output_option(help="Folder for the record (default: a new folder in runs/).")]
CheckpointEvery = Annotated[
    str | None,
    output_option(
        metavar="STEPS|TIME",
        help="Interval between checkpoints, in steps (500) or in time (5min); flockstep resume continues from the "
        "newest checkpoint.",
    ),
]
Keep = Annotated[int | None, output_option(help="Number of checkpoints to keep (default: 2).")]
MinWorkers = Annotated[
    int | None,
    process_option(
        min=1,
        help="Smallest number of workers with which the run continues: a worker that gets SIGTERM leaves, and if a "
        "worker is lost the other workers go back to the newest checkpoint (in a run of flockstep launch, also "
        "after SIGTERM).",
    ),
]
MaxWorkers = Annotated[
    int | None,
    process_option(
        min=1, help="Largest number of workers with which the run continues when flockstep join adds workers."
    ),
]
Resumes = Annotated[
    bool,
    output_option(
        "--resume",
        help="Continue the run of this command in the folder of --out from its newest checkpoint, if the run has "
        "begun: use this for commands that systemd, Slurm or a shell may restart.",
    ),
]
SharedRecord = Annotated[
    bool | None, output_option("--shared", help="Let all users of this host read the record (default: only its owner).")
]
Overwrite = Annotated[bool, output_option("--overwrite", help="Replace the run in the folder of --out.")]
Json = Annotated[
    bool, output_option("--json", help="Print one JSON document on standard output, and progress on standard error.")
]


BY_HAND = ("node_rank", "coordinator", "separate_coordinator", "secret_file")
"""Options about hosts for runs in which the user starts the command on every host."""
FOR_SUBMISSION = ("cpus_per_worker", "gpus_per_worker", "slurm_options")
"""Options that take effect on the host from which a Slurm job is submitted."""
_OF_JOBS = (
    *("faults", "epochs", "steps", "batch", "lr", "lr_grid", "schedule", "split", "partition", "evaluate_every"),
    "result",
)
"""Options of comparisons that a script sets itself."""
_NOT_OF = {
    "train": ("network", "compute", "cluster", "until_target"),
    "simulate": (
        *("transport", "heartbeat", "link_timeout", "step_timeout"),
        *("checkpoint_every", "keep", "min_workers", "max_workers"),
        *(field.name for field in dataclasses.fields(HostOptions)),
    ),
    "launch": ("output", "prefix", "rank_output", "network", "compute", "cluster", "until_target", *_OF_JOBS),
}


def configured(kind: Kind, given: Mapping[str, Any]) -> RunConfig:
    """Return the run configuration that a command's options describe.

    Options that do not apply to the kind of run are left out.
    """
    from flockstep.records.config import MetricTarget, RunConfig

    every, steps = given.get("evaluate_every"), given.get("steps")
    if given.get("target") is not None and every is not None and steps is not None and every >= steps:
        raise ConfigurationError(
            f"--target {given['target']} needs an evaluation before the last step, got --evaluate-every {every} and "
            f"--steps {steps}; lower --evaluate-every, or leave out --target"
        )
    names = {field.name for field in dataclasses.fields(RunConfig)} - {"kind", "cluster", *_NOT_OF[kind]}
    chosen = {name: value for name, value in given.items() if name in names}
    if chosen.get("target") is not None:
        target = MetricTarget.parse(chosen["target"])
        chosen |= {"target": target.value, "metric": target.metric}
    faults = {"faults": tuple(given["faults"] or ())} if "faults" in chosen else {}
    return RunConfig(kind=kind, **{**chosen, "imports": tuple(given.get("imports") or ()), **faults})


@contextlib.contextmanager
def gathered(
    context: typer.Context,
    where: HostOptions,
    workers: int,
    arguments: Sequence[str] = (),
    output: Output | None = None,
) -> Iterator[Gathering | None]:
    """Context manager that joins a run over several hosts and yields this process's part in the run; None if all
    processes are on this host.

    Args:
        context: the command.
        where: the command's options about hosts.
        workers: number of workers.
        arguments: arguments of a launched script.
        output: which of the scripts' output is shown, and how.

    Raises:
        ConfigurationError: options are missing, or do not go together.
    """
    if (coordinating := context.obj.get("gathering")) is not None:  # of flockstep coordinate
        yield coordinating
        return
    if where.hosts is not None:
        with _by_ssh(context, where, arguments, output) as found:
            yield found
        return
    refuse(context, ("ssh",), "is for hosts that ssh reaches; add --hosts")
    if where.on != "slurm":
        refuse(context, ("remote_python",), "is for hosts that ssh reaches; add --hosts")
        refuse(context, ("slurm_options",), "is for a Slurm job; add --on slurm")
    if where.on == "local":
        for option, value in given_options(context, FOR_SUBMISSION):
            raise ConfigurationError(f"{option} {value:g} is for a cluster; add --on slurm or --on ray")
        yield _by_hand(context, where)
        return
    others = (*BY_HAND, *(("host_address",) if where.on == "ray" else ()))
    refuse(context, others, f"is for hosts that you start yourself; leave it out with --on {where.on}")
    from flockstep.launchers.output import SHOWN

    on = _on_slurm if where.on == "slurm" else _on_ray
    with on(context, where, workers, arguments, output or SHOWN) as found:
        yield found


def _on_ray(
    context: typer.Context, where: HostOptions, workers: int, arguments: Sequence[str], output: Output
) -> contextlib.AbstractContextManager[Gathering]:
    """Context manager: nodes of a Ray cluster."""
    from flockstep.launchers.ray import ray_cluster

    reserved = where.cpus_per_worker, where.gpus_per_worker
    return ray_cluster(workers, where.nodes, *reserved, where.timeout, arguments, output)


def _on_slurm(
    context: typer.Context, where: HostOptions, workers: int, arguments: Sequence[str], output: Output
) -> contextlib.AbstractContextManager[Gathering]:
    """Context manager: the hosts of the allocation of this process."""
    from flockstep.launchers.slurm import slurm_allocation

    refuse(context, FOR_SUBMISSION, "applies when a job is submitted, and this command runs inside a job; leave it out")
    python = where.remote_python or sys.executable
    return slurm_allocation(workers, where.nodes, python, where.timeout, where.host_address, arguments, output)


def leave_to_slurm(
    context: typer.Context, where: HostOptions, workers: int, place: Path, script: Sequence[str] = ()
) -> None:
    """Run this command in a Slurm job of its own, and exit with the job's exit code, if --on slurm is given outside an
    allocation.

    Args:
        context: the command.
        where: the command's options about hosts.
        workers: number of workers.
        place: folder of the run's record.
        script: a launched script and its arguments, which are the last words of the command.

    Raises:
        ConfigurationError: options do not go together, or Slurm refuses the job.
        RunError: Slurm has ended the job.
    """
    from flockstep.launchers.slurm import in_allocation, submitted

    if where.on != "slurm" or where.hosts is not None or in_allocation(os.environ):
        return
    for option, value in given_options(context, ("ssh", "host_address", *BY_HAND)):
        raise ConfigurationError(f"{option} {value} cannot be combined with --on slurm; leave {option} out")
    words = context.obj["arguments"]
    own = _without(FOR_SUBMISSION, words[: len(words) - len(script)])
    nodes = 1 if where.nodes is None else where.nodes
    reserved = where.cpus_per_worker, where.gpus_per_worker, where.slurm_options
    python = where.remote_python or sys.executable
    raise typer.Exit(submitted([*own, *script], place, workers, nodes, *reserved, python))


def _without(names: Iterable[str], words: Sequence[str]) -> list[str]:
    """The words of a command without options of these names, and their values."""
    options = [f"--{name.replace('_', '-')}" for name in names]
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in options:
            next(rest)
        elif word.partition("=")[0] not in options:
            kept.append(word)
    return kept


@contextlib.contextmanager
def _by_ssh(
    context: typer.Context, where: HostOptions, arguments: Sequence[str], output: Output | None
) -> Iterator[Gathering]:
    """Context manager: the hosts of --hosts."""
    refuse(
        context,
        ("on", "nodes", *BY_HAND, *FOR_SUBMISSION),
        "cannot be combined with --hosts; leave one of them out",
    )
    from flockstep.launchers.output import SHOWN
    from flockstep.launchers.ssh import ssh_hosts

    assert where.hosts is not None
    python = where.remote_python or sys.executable
    reached = where.timeout, where.host_address
    with ssh_hosts(where.hosts, where.ssh, python, *reached, arguments, output or SHOWN) as found:
        for _, value in given_options(context, ("workers",)):
            if value != sum(found.shares):
                raise ConfigurationError(
                    f"-n must be {sum(found.shares)}, the number of workers in --hosts {where.hosts}, got {value}; "
                    "leave -n out"
                )
        yield found


def refuse_by_hand(context: typer.Context, where: HostOptions) -> None:
    """Refuse the options for hosts that the user starts by hand, because the processes of such hosts end after one run.

    Raises:
        ConfigurationError: such an option is given.
    """
    alone = where.on == "local" and where.hosts is None
    refuse(
        context,
        (*BY_HAND, *(("nodes", "timeout", "host_address") if alone else ())),
        "is for hosts that you start yourself, and the processes on such hosts end with one run, but a comparison has "
        "several runs; use --hosts a:4,b:4, --on slurm or --on ray, which start the hosts of each run",
    )


def _by_hand(context: typer.Context, where: HostOptions) -> Gathering | None:
    """This host's part in a run over several; None without --nodes.

    Raises:
        ConfigurationError: options are missing, or do not go together.
    """
    grows = context.params.get("max_workers") is not None
    if where.nodes is None and where.coordinator is not None and grows:
        where = dataclasses.replace(where, nodes=1, node_rank=where.node_rank or 0)
    if where.nodes is None:
        refuse(context, (*BY_HAND, "timeout", "host_address"), "is for several hosts; add --nodes")
        return None
    from flockstep.launchers.gathering import Gathering
    from flockstep.launchers.meeting import meeting_at, read_secret

    if where.node_rank is None or where.coordinator is None:
        missing = "--node-rank" if where.node_rank is None else "--coordinator"
        raise ConfigurationError(
            f"a run over {where.nodes} hosts needs {missing}; for example: --nodes 2 --node-rank 0 --coordinator "
            "10.0.0.1:29400 on the first host"
        )
    meeting = meeting_at(where.coordinator, read_secret(where.secret_file), where.timeout, where.host_address)
    return Gathering(meeting, where.nodes, where.node_rank, where.separate_coordinator, grows)


def continued(
    context: typer.Context, config: RunConfig, place: Path, gathering: Gathering | None, as_json: bool
) -> Continuation:
    """If the folder of a command's run has a checkpoint, continue the run and print the outcome.

    Args:
        context: the command.
        config: the run's configuration with all defaults filled in.
        place: folder of the record.
        gathering: the hosts of the run; None: all processes are on this host.
        as_json: print the outcome as JSON.

    Raises:
        ConfigurationError: --out is missing, or the folder holds another run, or one that has ended.
    """
    from flockstep.cli.runs import resume_one
    from flockstep.launchers.continuing import continuation

    if not any(given_options(context, ("out",))):
        raise ConfigurationError("--resume needs the folder of the run; add --out")
    named = any(given_options(context, ("transport",)))
    found = continuation(config if named else dataclasses.replace(config, transport=None), place)
    if found.resumes:
        resume_one(place, as_json, None, gathering)
    return found


def over_hosts(context: typer.Context, config: RunConfig, gathering: Gathering) -> RunConfig:
    """Return the configuration of a run over several hosts, whose default transport is one that connects hosts. On a
    host other than the coordinator, this function reports the given options that have no effect on that host.
    """
    from flockstep.launchers.wait_monitor import on_stderr

    for option, _ in given_options(context, ("out", "as_json")) if not gathering.coordinates else ():
        on_stderr(
            f"{option} has no effect on the host with --node-rank {gathering.node}: the coordinator writes the "
            "record and prints the outcome"
        )
    return config if list(given_options(context, ("transport",))) else dataclasses.replace(config, transport=None)


def cluster_of(cluster: str | None, imports: Iterable[str] | None, context: typer.Context) -> ClusterShape | None:
    """Return the cluster that --cluster names; None if the option is not given.

    Raises:
        ConfigurationError: there is no such cluster, or --network or --compute is given too.
    """
    from flockstep.experiments import arguments

    if cluster is not None:
        both = f"and --cluster {cluster} both describe the cluster; give only one of them"
        refuse(context, ("network", "compute"), both)
    return arguments.cluster_of(cluster, None, None, tuple(imports or ()))


def refuse_idle(kind: Kind, context: typer.Context) -> None:
    """Refuse options that the user gave although they do not apply to the kind of run."""
    from flockstep.experiments.comparison import FOR_JOBS

    if kind == "launch":
        refuse(context, _OF_JOBS, f"{FOR_JOBS}; pass it to the script after --, as in -- --lr 0.1")
    else:
        refuse(context, ("arguments",), "is for scripts; leave it out")
    why = "is for real processes only; leave out either this option or --simulate"
    idle = "has an effect in virtual time only; add --simulate, which needs a job"
    refuse(context, _NOT_OF[kind], why if kind == "simulate" else idle)


def refuse(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Refuse the parameters in `names` that the command line gives.

    Raises:
        ConfigurationError: such an option is given; the message is the option, its value and `why`.
    """
    for option, value in given_options(context, names):
        raise ConfigurationError(f"{option} {value} {why}")


def given_options(context: typer.Context, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield (option, value), such as ("--node-rank", 1), for every parameter in `names` that the command line gives. If
    the value is a list, its first element is yielded.
    """
    options = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            value = context.params[name]
            yield options[name], value[0] if isinstance(value, list) else value


def rates(grid: str | None, lr: float | None) -> tuple[float, ...]:
    """Return the learning rates of the grid that the option gives; empty if no grid is given.

    Raises:
        ConfigurationError: a rate is not a number above 0 or occurs twice, or --lr is given too.
    """
    if grid is None:
        return ()
    if lr is not None:
        raise ConfigurationError(f"--lr {lr:g} and --lr-grid {grid} contradict each other; give one of them")
    try:
        found = tuple(float(word) for word in grid.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < rate < math.inf for rate in found) or len(set(found)) < len(found):
        raise ConfigurationError(f"--lr-grid must be different numbers > 0, got {grid}; write 0.03,0.1,0.3")
    return found
