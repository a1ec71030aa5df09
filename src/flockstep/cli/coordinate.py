"""The commands of a run whose hosts are started elsewhere: `flockstep coordinate` and `flockstep manifest`."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Annotated, Any

import click

from flockstep.cli import options as o
from flockstep.cli import show
from flockstep.errors import ConfigurationError
from flockstep.options import Arg, Opt, PodOptions


def coordinate(
    context: click.Context,
    command: Annotated[
        tuple[str, ...],
        Arg("Command of the run, written as for one host: train JOB -s … -n 4, or launch -n 4 train.py."),
    ],
    nodes: Annotated[int, Opt("Number of hosts that run workers.")],
    port: Annotated[int, Opt("Port on which the hosts reach the coordinator.")],
    host_address: Annotated[str, Opt("Address to listen on (default: all addresses of this machine).")] = "",
    secret_file: o.SecretFile = None,
    timeout: o.MeetTimeout = 600.0,
) -> None:
    """Coordinate a run whose workers other hosts start with --separate-coordinator; the record is kept on this host."""
    from flockstep.launchers.gathering import Gathering
    from flockstep.launchers.kubernetes import require_trains
    from flockstep.launchers.meeting import EVERY, meeting_at, read_secret

    require_trains(list(command))
    inner = _understood(
        context, list(command), "is an option about hosts, and flockstep coordinate needs a command for one host"
    )
    host = host_address or EVERY[not socket.has_dualstack_ipv6()]
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    meeting = meeting_at(where, read_secret(secret_file), timeout)
    context.obj["gathering"] = Gathering(meeting, nodes)
    with inner:
        inner.command.invoke(inner)


def manifest(
    context: click.Context,
    command: Annotated[
        tuple[str, ...],
        Arg("Command of the run, written as for one host: flockstep manifest --image IMAGE launch -n 4 train.py."),
    ],
    pods: PodOptions,
    as_json: o.Json = False,
) -> None:
    """Print a manifest for `kubectl apply -f -`: an indexed Job whose pods are the hosts of a run."""
    from flockstep.launchers.kubernetes import Pods, require_trains
    from flockstep.launchers.kubernetes import manifest as objects_of

    words = list(command)
    require_trains(words)
    # the command is parsed here, rather than in every pod
    inner = _understood(context, words, "gets its value in each pod from the manifest", allowed=("timeout",))
    if (workers := inner.params["workers"]) < pods.nodes:
        raise ConfigurationError(
            f"a run in {pods.nodes} pods needs at least {pods.nodes} workers, got {workers}; raise -n, the "
            "number of workers of all pods"
        )
    objects = objects_of(Pods(**asdict(pods)), words)
    if as_json:
        show.json(objects)
    else:
        print(json.dumps(objects, indent=2))


def _understood(context: click.Context, words: list[str], why: str, allowed: Sequence[str] = ()) -> Any:
    """Return the context of a command; options about hosts that are not `allowed` are refused with `why`."""
    root = context.find_root()
    group = root.command
    assert isinstance(group, click.Group)
    _, command, rest = group.resolve_command(root, words)
    assert command is not None
    inner: Any = command.make_context(words[0], list(rest), parent=root)
    for option, _ in o.given_options(inner, [one.name for one in fields(o.HostOptions) if one.name not in allowed]):
        raise ConfigurationError(f"{option} {why}; leave it out of the command")
    return inner
