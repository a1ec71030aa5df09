"""`flockstep calibrate`: measures this machine, or the machines of a recorded run, and writes a cluster file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from flockstep.cli import options as o
from flockstep.cli import show
from flockstep.errors import ConfigurationError
from flockstep.options import Opt, ProcessOptions, TrainingOptions, Workers, options_of

if TYPE_CHECKING:
    from flockstep.planning.calibrate import Calibration


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Options of a measurement of this machine."""

    workers: Workers = 4
    job: Annotated[str, Opt(help="Job whose gradients are timed.")] = "digits"
    transport: Annotated[str, options_of(ProcessOptions)["transport"][0]] = "shared_memory"
    threads: Annotated[int, options_of(TrainingOptions)["threads"][0]] = 1
    gradients: Annotated[
        int,
        Opt(help="Number of gradients to time per worker, first on one worker alone and then on all workers at once."),
    ] = 30
    rounds: Annotated[int, Opt(help="Number of round trips of a message between every pair of workers.")] = 20
    codec: Annotated[
        tuple[str, ...] | None, Opt(help="Codec to measure; repeat the option for several (default: half).")
    ] = None


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Options of a model that is fitted to a run's record."""

    records: Annotated[
        tuple[Path, ...] | None,
        Opt(
            names=("--from",),
            help="Fit the cluster to the record of a run instead of measuring this machine; repeat the option for "
            "several runs of one job.",
        ),
    ] = None
    latency: Annotated[str | None, Opt(help="Latency of the links, if known, such as 100us; only with --from.")] = None
    bandwidth: Annotated[str | None, Opt(help="Bandwidth of the links, if known, such as 1gbit; only with --from.")] = (
        None
    )
    imports: o.Imports = ()


def calibrate(
    context: click.Context,
    measuring: MeasureOptions,
    fitting: FitOptions,
    out: Annotated[Path | None, Opt(help="File to write the cluster to (default: standard output).")] = None,
    keep: Annotated[
        bool,
        Opt(names=("--keep/--no-keep",), help="Save the measured cluster as the default cluster of flockstep plan."),
    ] = True,
    as_json: o.Json = False,
) -> None:
    """Measure this machine, or fit a model to a run's record, and write a cluster file for `flockstep plan`."""
    if out is not None and out.suffix != ".toml":
        raise ConfigurationError(f"--out must be a .toml file, got {str(out)!r}; end the name in .toml")
    if fitting.records:
        o.refuse(
            context,
            options_of(MeasureOptions),
            "is only for measuring this machine and has no effect with --from; leave it out",
        )
        found = _fitted(fitting)
    else:
        o.refuse(context, options_of(FitOptions), "is only for --from; leave it out, or add --from with a run")
        found = _measured(measuring)
        if keep:
            show.note(f"saved as the cluster 'here', the default of flockstep plan: {_kept(found)}")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(found.to_toml(), encoding="utf-8")
    if as_json:
        show.json({"cluster": found.to_toml(), "notes": list(found.notes), "file": None if out is None else str(out)})
    elif out is None:
        print(found.to_toml(), end="")
    else:
        for note in found.notes:
            print(note)
        print(f"cluster: {out}")


def _kept(found: Calibration) -> Path:
    """The file in the user's cache where plans find what was measured."""
    from flockstep.costs.cluster_file import calibration

    file = calibration()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(found.to_toml(), encoding="utf-8")
    return file


def _fitted(given: FitOptions) -> Calibration:
    from flockstep.planning.fit import fit_records
    from flockstep.simulation import units

    latency, bandwidth = given.latency, given.bandwidth
    return fit_records(
        list(given.records or ()),
        None if latency is None else units.duration(units.with_unit(latency, "--latency", "100us"), "--latency"),
        None
        if bandwidth is None
        else units.bandwidth(units.with_unit(bandwidth, "--bandwidth", "1gbit"), "--bandwidth"),
        given.imports,
    )


def _measured(given: MeasureOptions) -> Calibration:
    from flockstep.planning.calibrate import calibrate as measure
    from flockstep.planning.rates import CODECS

    with show.status() as say:
        return measure(
            given.job,
            given.workers,
            transport=given.transport,
            threads=given.threads,
            gradients=given.gradients,
            rounds=given.rounds,
            codecs=CODECS if given.codec is None else given.codec,
            say=say,
        )
