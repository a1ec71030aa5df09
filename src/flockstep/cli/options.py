"""The options about hosts, and what the commands do with them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click
from click.exceptions import Exit

from flockstep.errors import ConfigurationError
from flockstep.experiments.folders import folder as folder
from flockstep.options import CommonOptions, Opt, options_of

if TYPE_CHECKING:
    from flockstep.launchers.continuing import Continuation
    from flockstep.launchers.gathering import Gathering
    from flockstep.launchers.output import Output
    from flockstep.records.config import RunConfig

_host = partial(Opt, panel="Several hosts")
Imports = Annotated[tuple[str, ...], options_of(CommonOptions)["imports"][0]]
Json = Annotated[
    bool, Opt(help="Print one JSON document on standard output, and progress on standard error.", names=("--json",))
]
Resumes = Annotated[
    bool,
    Opt(
        help="Continue the run of this command in the folder of --out from its newest checkpoint, if the run has "
        "begun: use this for commands that systemd, Slurm or a shell may restart.",
        names=("--resume",),
        panel="Output",
    ),
]
SecretFile = Annotated[
    Path | None, _host(help="File with the secret of the run, the same on every host (default: from FLOCKSTEP_SECRET).")
]
MeetTimeout = Annotated[float, _host(help="Seconds within which all hosts must have joined.")]
HostAddress = Annotated[
    str,
    _host(
        help="Address of this host to which the other hosts connect (default: the address from which this host "
        "reaches the coordinator)."
    ),
]
On = Annotated[
    Literal["local", "slurm", "ray"],
    _host(
        help="Where the processes run. local: on this machine and the hosts of --nodes; slurm: in a new Slurm job "
        "or in the allocation of this shell; ray: on a Ray cluster."
    ),
]


@dataclass(frozen=True)
class HostOptions:
    """The options about hosts, of a command whose processes may run on several hosts."""

    on: On = "local"
    cpus_per_worker: Annotated[
        float, _host(help="Number of cores that each worker reserves (only with --on slurm or ray).")
    ] = 1.0
    gpus_per_worker: Annotated[
        float, _host(help="Number of GPUs that each worker reserves (only with --on slurm or ray).")
    ] = 0.0
    hosts: Annotated[
        str | None,
        _host(help="Hosts that ssh reaches without a password, each with its number of workers, such as a:4,b:4."),
    ] = None
    ssh: Annotated[str, _host(help="The ssh command with its options (only with --hosts).")] = "ssh"
    remote_python: Annotated[
        str | None,
        _host(help="Path of Python on the hosts (only with --hosts or --on slurm; default: the path on this machine)."),
    ] = None
    slurm_options: Annotated[
        str,
        _host(help="Additional options for sbatch, such as '--partition=gpu --time=1:00:00' (only with --on slurm)."),
    ] = ""
    nodes: Annotated[
        int | None,
        _host(
            help="Number of hosts; run the same command on each host, with a different --node-rank (default: only "
            "this host)."
        ),
    ] = None
    node_rank: Annotated[int | None, _host(help="Rank of this host; the host with rank 0 coordinates the run.")] = None
    coordinator: Annotated[
        str | None, _host(help="Address at which the host of rank 0 listens, as host:port or [IPv6]:port.")
    ] = None
    separate_coordinator: Annotated[
        bool, _host(help="The run is coordinated by flockstep coordinate at --coordinator, not by the host of rank 0.")
    ] = False
    secret_file: SecretFile = None
    timeout: MeetTimeout = 600.0
    host_address: HostAddress = ""


BY_HAND = ("node_rank", "coordinator", "separate_coordinator", "secret_file")
"""Options about hosts for runs in which the user starts the command on every host."""
FOR_SUBMISSION = ("cpus_per_worker", "gpus_per_worker", "slurm_options")
"""Options that take effect on the host from which a Slurm job is submitted."""


@contextlib.contextmanager
def gathered(
    context: click.Context,
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
    context: click.Context, where: HostOptions, workers: int, arguments: Sequence[str], output: Output
) -> contextlib.AbstractContextManager[Gathering]:
    """Context manager: nodes of a Ray cluster."""
    from flockstep.launchers.ray import ray_cluster

    reserved = where.cpus_per_worker, where.gpus_per_worker
    return ray_cluster(workers, where.nodes, *reserved, where.timeout, arguments, output)


def _on_slurm(
    context: click.Context, where: HostOptions, workers: int, arguments: Sequence[str], output: Output
) -> contextlib.AbstractContextManager[Gathering]:
    """Context manager: the hosts of the allocation of this process."""
    from flockstep.launchers.slurm import slurm_allocation

    refuse(context, FOR_SUBMISSION, "applies when a job is submitted, and this command runs inside a job; leave it out")
    python = where.remote_python or sys.executable
    return slurm_allocation(workers, where.nodes, python, where.timeout, where.host_address, arguments, output)


def leave_to_slurm(
    context: click.Context, where: HostOptions, workers: int, place: Path, script: Sequence[str] = ()
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
    raise Exit(submitted([*own, *script], place, workers, nodes, *reserved, python))


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
    context: click.Context, where: HostOptions, arguments: Sequence[str], output: Output | None
) -> Iterator[Gathering]:
    """Context manager: the hosts of --hosts."""
    refuse(
        context, ("on", "nodes", *BY_HAND, *FOR_SUBMISSION), "cannot be combined with --hosts; leave one of them out"
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


def refuse_by_hand(context: click.Context, where: HostOptions) -> None:
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


def _by_hand(context: click.Context, where: HostOptions) -> Gathering | None:
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
    context: click.Context, config: RunConfig, place: Path, gathering: Gathering | None, as_json: bool
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


def over_hosts(context: click.Context, config: RunConfig, gathering: Gathering) -> RunConfig:
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


def refuse(context: click.Context, names: Iterable[str], why: str) -> None:
    """Refuse the parameters in `names` that the command line gives.

    Raises:
        ConfigurationError: such an option is given; the message is the option, its value and `why`.
    """
    for option, value in given_options(context, names):
        raise ConfigurationError(f"{option} {value} {why}")


def given_options(context: click.Context, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield (option, value), such as ("--node-rank", 1), for every parameter in `names` that the command line gives. If
    the value is a list, its first element is yielded.
    """
    options = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            value = context.params[name]
            yield options[name], value[0] if isinstance(value, (list, tuple)) else value
