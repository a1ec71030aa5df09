"""`flockstep manifest`: writes Kubernetes objects that run a command in pods."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flockstep.cli import options as o
from flockstep.cli import show
from flockstep.cli.coordinate import understood
from flockstep.errors import ConfigurationError


def manifest(
    context: typer.Context,
    command: Annotated[
        list[str],
        typer.Argument(
            help="Command of the run, written as for one host: flockstep manifest --image IMAGE launch -n 4 train.py."
        ),
    ],
    image: Annotated[
        str, typer.Option(help="Container image that contains flockstep and everything the command needs.")
    ],
    nodes: Annotated[int, typer.Option(help="Number of pods; each pod is one host of the run.")] = 2,
    name: Annotated[str, typer.Option(help="Name of the Kubernetes Job, Service and Secret.")] = "flockstep",
    port: Annotated[int, typer.Option(help="Port on which pod 0 listens as the coordinator.")] = 29400,
    cpu: Annotated[str | None, typer.Option(help="CPU cores of each pod, such as 4 or 500m.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each pod, such as 8Gi.")] = None,
    gpus: Annotated[int, typer.Option(help="Number of GPUs of each pod.")] = 0,
    claim: Annotated[
        str | None,
        typer.Option(
            help="PersistentVolumeClaim (ReadWriteMany) for the record (default: the record is deleted with pod 0)."
        ),
    ] = None,
    secret: Annotated[
        str | None,
        typer.Option(
            help="Existing Secret that holds the run's secret under the key secret (default: the manifest contains a "
            "new Secret)."
        ),
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Print a manifest for `kubectl apply -f -`: an indexed Job whose pods are the hosts of a run."""
    from flockstep.launchers.kubernetes import Pods, require_trains
    from flockstep.launchers.kubernetes import manifest as objects_of

    require_trains(command)
    pods = Pods(image, nodes, name, port, cpu, memory, gpus, claim, secret)
    _require_understood(context, command, pods.nodes)
    objects = objects_of(pods, command)
    if as_json:
        show.json(objects)
    else:
        print(json.dumps(objects, indent=2))


def _require_understood(context: typer.Context, words: list[str], nodes: int) -> None:
    """Parse the command here, rather than in every pod.

    Raises:
        ConfigurationError: the command says which host it is for, or there are fewer workers than pods.
    """
    inner = understood(context, words, "gets its value in each pod from the manifest", allowed=("timeout",))
    if (workers := inner.params["workers"]) < nodes:
        raise ConfigurationError(
            f"a run in {nodes} pods needs at least {nodes} workers, got {workers}; raise -n, the number of workers of "
            "all pods"
        )
