"""`flockstep manifest`: writes Kubernetes objects that run a command in pods."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import click

from flockstep.cli import options as o
from flockstep.cli import show
from flockstep.cli.coordinate import understood
from flockstep.errors import ConfigurationError
from flockstep.options import Arg, PodOptions


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
    inner = understood(context, words, "gets its value in each pod from the manifest", allowed=("timeout",))
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
