"""The commands that look at layers of models, at layouts of parameters, and at this installation."""

from __future__ import annotations

from typing import Annotated

from click.exceptions import Exit

from flockstep.cli import options as o
from flockstep.errors import Interrupted
from flockstep.options import Arg, Opt


def layers(
    what: Annotated[
        str, Arg(help="A job, a Python file with model() and inputs(), or a reference model such as vgg-a.")
    ],
    batch: Annotated[int, Opt(names=("--batch", "-b"), help="Number of samples per worker and step.")] = 32,
    workers: Annotated[
        int, Opt(names=("--workers", "-n"), help="Number of workers over which the data, or one layer, is split.")
    ] = 16,
    everything: Annotated[
        bool, Opt(names=("--all",), help="Show every layer (default: a long table omits layers without parameters).")
    ] = False,
    as_json: o.Json = False,
) -> None:
    """Show a model's layers: parameters, work, depth, and the bytes sent under data parallelism and if the layer is
    split.
    """
    from flockstep.cli.layers import show_layers

    show_layers(what, batch, workers, as_json, everything)


def layouts(
    what: Annotated[
        tuple[str, ...], Arg(help="Jobs, Python files or reference models (default: vgg-a, resnet-152 and googlenet).")
    ] = (),
    workers: Annotated[int, Opt(names=("--workers", "-n"), help="Workers.")] = 16,
    bandwidth: Annotated[str, Opt(help="Bandwidth of every worker's link, such as 1gbit.")] = "10gbit",
    as_json: o.Json = False,
) -> None:
    """Show the smallest delay of a step for eight layouts of the parameters, such as naive server, tree and ring."""
    from flockstep.cli.layouts import show_layouts

    show_layouts(what, workers, bandwidth, as_json)


def doctor(as_json: o.Json = False) -> None:
    """Test the installation: try every transport, launcher and extra, and say what to install."""
    from flockstep.cli import show
    from flockstep.doctor import examine

    with show.status() as say:
        report = examine(say=say)
    if as_json:
        show.json(report.document())
    else:
        print(report)
    if report.interrupted is not None:
        raise Interrupted(report.interrupted)
    raise Exit(0 if report.works else 1)
