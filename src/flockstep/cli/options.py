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
from flockstep.options import Arg, CommonOptions, Opt, options_of

if TYPE_CHECKING:
    from flockstep.launchers.continuing import Continuation
    from flockstep.launchers.gathering import Gathering
    from flockstep.launchers.output import Output
    from flockstep.records.config import RunConfig

_host = partial(Opt, panel="Several hosts")
_RESERVED = "that each worker reserves (only with --on slurm or ray)."
Imports = Annotated[tuple[str, ...], options_of(CommonOptions)["imports"][0]]
Json = Annotated[
    bool, Opt("Print one JSON document on standard output, and progress on standard error.", names=("--json",))
]
RunFolderArgument = Annotated[Path, Arg("Folder of the run.", metavar="RUN")]
Resumes = Annotated[
    bool,
    Opt(
        "Continue the run of this command in the folder of --out from its newest checkpoint, if the run has "
        "begun: use this for commands that systemd, Slurm or a shell may restart.",
        names=("--resume",),
        panel="Output",
    ),
]
SecretFile = Annotated[
    Path | None, _host("File with the secret of the run, the same on every host (default: from FLOCKSTEP_SECRET).")
]
MeetTimeout = Annotated[float, _host("Seconds within which all hosts must have joined.")]
HostAddress = Annotated[
    str,
    _host(
        "Address of this host to which the other hosts connect (default: the address from which this host "
        "reaches the coordinator)."
    ),
]


@dataclass(frozen=True)
class HostOptions:
    """The options about hosts, of a command whose processes may run on several hosts."""

    on: Literal["local", "slurm", "ray"] = _host(
        "Where the processes run. local: on this machine and the hosts of --nodes; slurm: in a new Slurm job or in the "
        "allocation of this shell; ray: on a Ray cluster."
    ).default("local")
    cpus_per_worker: float = _host(f"Number of cores {_RESERVED}").default(1.0)
    gpus_per_worker: float = _host(f"Number of GPUs {_RESERVED}").default(0.0)
    hosts: str | None = _host(
        "Hosts that ssh reaches without a password, each with its number of workers, such as a:4,b:4."
    ).default()
    ssh: str = _host("The ssh command with its options (only with --hosts).").default("ssh")
    remote_python: str | None = _host(
        "Path of Python on the hosts (only with --hosts or --on slurm; default: the path on this machine)."
    ).default()
    slurm_options: str = _host(
        "Additional options for sbatch, such as '--partition=gpu --time=1:00:00' (only with --on slurm)."
    ).default("")
    nodes: int | None = _host(
        "Number of hosts; run the same command on each host, with a different --node-rank (default: only this host)."
    ).default()
    node_rank: int | None = _host("Rank of this host; the host with rank 0 coordinates the run.").default()
    coordinator: str | None = _host(
        "Address at which the host of rank 0 listens, as host:port or [IPv6]:port."
    ).default()
    separate_coordinator: bool = _host(
        "The run is coordinated by flockstep coordinate at --coordinator, not by the host of rank 0."
    ).default(False)
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
    config: RunConfig,
    place: Path,
    script: Sequence[str] = (),
    output: Output | None = None,
) -> Iterator[tuple[Gathering | None, RunConfig]]:
    """Context manager that joins a run over several hosts. It yields this process's part in the run, or None if all
    processes are on this host, and the run's configuration, whose default transport is then one that connects hosts.

    With --on slurm outside an allocation, the command is run in a Slurm job of its own, and this process exits with the
    job's exit code. On a host other than the coordinator, options that have no effect there are reported. `script` are
    a launched script and its arguments, if these are the last words of the command.
    """
    with contextlib.ExitStack() as stack:
        gathering: Gathering | None = context.obj.get("gathering")  # of flockstep coordinate
        if gathering is None:
            _refuse_misplaced(context, where)
            if where.on == "slurm" and where.hosts is None:
                from flockstep.launchers.slurm import in_allocation, submitted

                if not in_allocation(os.environ):
                    command, python = context.obj["arguments"], where.remote_python or sys.executable
                    own = _without(FOR_SUBMISSION, command[: len(command) - len(script)])
                    reserved = where.cpus_per_worker, where.gpus_per_worker, where.slurm_options
                    nodes = 1 if where.nodes is None else where.nodes
                    raise Exit(submitted([*own, *script], place, config.workers, nodes, *reserved, python))
            gathering = _hosts(context, where, config, output, stack)
        if gathering is not None:
            from flockstep.launchers.wait_monitor import on_stderr

            for option, _ in given_options(context, ("out", "as_json")) if not gathering.coordinates else ():
                on_stderr(
                    f"{option} has no effect on the host with --node-rank {gathering.node}: the coordinator writes the "
                    "record and prints the outcome"
                )
            config = as_given(context, config)
        yield gathering, config


def _hosts(
    context: click.Context,
    where: HostOptions,
    config: RunConfig,
    output: Output | None,
    stack: contextlib.ExitStack,
) -> Gathering | None:
    """The hosts that the options select, until `stack` ends; None if all processes are on this host."""
    from flockstep.launchers.output import SHOWN

    words: list[str] = []
    if config.kind == "launch":
        from flockstep.launchers.script import program_of

        words = program_of(config)[1]
    shown, reached = output or SHOWN, (where.timeout, where.host_address)
    python = where.remote_python or sys.executable
    if where.hosts is not None:
        from flockstep.launchers.ssh import ssh_hosts

        hosts = ssh_hosts(where.hosts, where.ssh, python, *reached, words, shown)
        total = sum(hosts.shares)
        if dict(given_options(context, ("workers",))) and config.workers != total:
            raise ConfigurationError(
                f"-n must be {total}, the number of workers in --hosts {where.hosts}, got {config.workers}; leave -n "
                "out"
            )
        return hosts
    if where.on == "slurm":
        from flockstep.launchers.slurm import slurm_allocation

        return slurm_allocation(
            config.workers // config.processes_together, where.nodes, python, *reached, words, shown
        )
    if where.on == "ray":
        from flockstep.launchers.ray import ray_cluster

        reserved = where.cpus_per_worker, where.gpus_per_worker, where.timeout
        return stack.enter_context(
            ray_cluster(config.workers // config.processes_together, where.nodes, *reserved, words, shown)
        )
    nodes, rank, grows = where.nodes, where.node_rank, config.max_workers is not None
    if nodes is None and where.coordinator is not None and grows:
        nodes, rank = 1, rank or 0
    if nodes is None:
        return None
    from flockstep.launchers.gathering import Gathering
    from flockstep.launchers.meeting import meeting_at, read_secret

    if rank is None or where.coordinator is None:
        missing = "--node-rank" if rank is None else "--coordinator"
        raise ConfigurationError(
            f"a run over {nodes} hosts needs {missing}; for example: --nodes 2 --node-rank 0 --coordinator "
            "10.0.0.1:29400 on the first host"
        )
    meeting = meeting_at(where.coordinator, read_secret(where.secret_file), *reached)
    return Gathering(meeting, nodes, rank, where.separate_coordinator, grows)


def _refuse_misplaced(context: click.Context, where: HostOptions) -> None:
    """Refuse options that have no effect on the kind of hosts that the other options select."""
    alone, inside = where.hosts is None, False
    if alone and where.on == "slurm":
        from flockstep.launchers.slurm import in_allocation

        inside = in_allocation(os.environ)
    local, slurm, ray = (alone and where.on == name for name in ("local", "slurm", "ray"))
    why_not_hosts = "cannot be combined with --hosts; leave one of them out"
    by_hand = where.nodes is not None or (where.coordinator is not None and context.params.get("max_workers"))
    for applies, names, why in (
        (not alone, ("on", "nodes", *BY_HAND, *FOR_SUBMISSION), why_not_hosts),
        (slurm and not inside, ("ssh", "host_address", *BY_HAND), "cannot be combined with --on slurm; leave it out"),
        (alone, ("ssh",), "is for hosts that ssh reaches; add --hosts"),
        (local or ray, ("remote_python",), "is for hosts that ssh reaches; add --hosts"),
        (local or ray, ("slurm_options",), "is for a Slurm job; add --on slurm"),
        (local, FOR_SUBMISSION, "is for a cluster; add --on slurm or --on ray"),
        (slurm or ray, BY_HAND, f"is for hosts that you start yourself; leave it out with --on {where.on}"),
        (ray, ("host_address",), "is for hosts that you start yourself; leave it out with --on ray"),
        (inside, FOR_SUBMISSION, "applies when a job is submitted, and this command runs inside a job; leave it out"),
        (local and not by_hand, (*BY_HAND, "timeout", "host_address"), "is for several hosts; add --nodes"),
    ):  # fmt: skip
        if applies:
            refuse(context, names, why)


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


def as_given(context: click.Context, config: RunConfig) -> RunConfig:
    """Return the configuration without a transport, if the command line names none."""
    named = any(given_options(context, ("transport",)))
    return config if named else dataclasses.replace(config, transport=None)


def begun_before(context: click.Context, config: RunConfig, place: Path) -> Continuation:
    """Return whether a command with --resume continues the run that its folder holds; `config` has all defaults."""
    from flockstep.launchers.continuing import continuation

    if not any(given_options(context, ("out",))):
        raise ConfigurationError("--resume needs the folder of the run; add --out")
    return continuation(as_given(context, config), place)


def refuse(context: click.Context, names: Iterable[str], why: str) -> None:
    """Refuse the parameters in `names` that the command line gives: the error is the option, its value and `why`."""
    for option, value in given_options(context, names):
        raise ConfigurationError(f"{option} {value} {why}")


def given_options(context: click.Context, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield (option, value or first value), such as ("--node-rank", 1), for parameters that are given."""
    options = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            value = context.params[name]
            yield options[name], value[0] if isinstance(value, (list, tuple)) else value
