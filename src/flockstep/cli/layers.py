"""`flockstep layers` and `flockstep layouts`: layers of models, and the delay of a step by layout of the parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from flockstep import registry
from flockstep.cli import options as o
from flockstep.errors import UnknownName
from flockstep.options import Arg, Opt

if TYPE_CHECKING:
    from flockstep.costs.layers import ModelShape

PUBLISHED = ("vgg-a", "resnet-152", "googlenet")
"""Names of the models in the published figure of layouts."""


def shape_named(what: str) -> ModelShape:
    """Return the layers of the workload, reference model or Python file that is named on the command line.

    Raises:
        ConfigurationError: there is no such model, or the model cannot be run.
    """
    from flockstep.costs.reference import MODELS, reference
    from flockstep.frameworks.layers import file_shape, job_shape
    from flockstep.workloads.base import Workload

    if what.endswith(".py"):
        return file_shape(what)
    if what in MODELS:
        return reference(what)
    known = registry.names("workload")
    if "(" not in what and what not in known and what not in registry.aliases("workload"):
        raise UnknownName.among("workload or reference model", what, [*known, *MODELS])
    return job_shape(Workload.parse(what).job(0))


def layers(
    what: Annotated[str, Arg("A job, a Python file with model() and inputs(), or a reference model such as vgg-a.")],
    batch: Annotated[int, Opt("Number of samples per worker and step.", names=("--batch", "-b"))] = 32,
    workers: Annotated[
        int, Opt("Number of workers over which the data, or one layer, is split.", names=("--workers", "-n"))
    ] = 16,
    everything: Annotated[
        bool, Opt("Show every layer (default: a long table omits layers without parameters).", names=("--all",))
    ] = False,
    as_json: o.Json = False,
) -> None:
    """Show a model's layers: parameters, work, depth, and the bytes sent under data parallelism and if the layer is
    split.
    """
    from flockstep.cli import show
    from flockstep.report import layers as report

    model = shape_named(what)
    table = report.table(model, batch, workers, everything)
    show.result(as_json, report.document(model, batch, workers), table, *report.sentences(model, batch, workers))


def layouts(
    what: Annotated[
        tuple[str, ...], Arg("Jobs, Python files or reference models (default: vgg-a, resnet-152 and googlenet).")
    ] = (),
    workers: Annotated[int, Opt("Workers.", names=("--workers", "-n"))] = 16,
    bandwidth: Annotated[str, Opt("Bandwidth of every worker's link, such as 1gbit.")] = "10gbit",
    as_json: o.Json = False,
) -> None:
    """Show the smallest delay of a step for eight layouts of the parameters, such as naive server, tree and ring."""
    from flockstep.cli import show
    from flockstep.report.layouts import Delays
    from flockstep.simulation import units

    rate = units.bandwidth(units.with_unit(bandwidth, "--bandwidth", "1gbit"), "--bandwidth")
    delays = Delays(tuple(shape_named(name) for name in what or PUBLISHED), workers, rate)
    show.result(as_json, delays.document(), delays.table(), *delays.sentences())
