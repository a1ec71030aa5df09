"""`flockstep calibrate`: measures this machine, or the machines of a recorded run, and writes a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flockstep.cli import options as o
from flockstep.cli import show
from flockstep.errors import ConfigurationError

if TYPE_CHECKING:
    from flockstep.planning.calibrate import Calibration

_MEASURING = ("workers", "job", "transport", "threads", "gradients", "rounds", "codec")


def calibrate(
    context: typer.Context,
    workers: o.Workers = 4,
    job: Annotated[str, typer.Option(help="Job whose gradients are timed.")] = "digits",
    transport: o.TransportText = "shared_memory",
    threads: o.Threads = 1,
    gradients: Annotated[
        int,
        typer.Option(
            help="Number of gradients to time per worker, first on one worker alone and then on all workers at once."
        ),
    ] = 30,
    rounds: Annotated[int, typer.Option(help="Number of round trips of a message between every pair of workers.")] = 20,
    codec: Annotated[
        list[str] | None, typer.Option(help="Codec to measure; repeat the option for several (default: half).")
    ] = None,
    records: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            help="Fit the cluster to the record of a run instead of measuring this machine; repeat the option for "
            "several runs of one job.",
        ),
    ] = None,
    latency: Annotated[
        str | None, typer.Option(help="Latency of the links, if known, such as 100us; only with --from.")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Bandwidth of the links, if known, such as 1gbit; only with --from.")
    ] = None,
    imports: o.Imports = None,
    out: Annotated[Path | None, typer.Option(help="File to write the cluster to (default: standard output).")] = None,
    keep: Annotated[
        bool, typer.Option(help="Save the measured cluster as the default cluster of flockstep plan.")
    ] = True,
    as_json: o.Json = False,
) -> None:
    """Measure this machine, or fit a model to a run's record, and write a cluster file for `flockstep plan`."""
    if out is not None and out.suffix != ".toml":
        raise ConfigurationError(f"--out must be a .toml file, got {str(out)!r}; end the name in .toml")
    if records:
        o.refuse(context, _MEASURING, "is only for measuring this machine and has no effect with --from; leave it out")
        found = _fitted(records, latency, bandwidth, tuple(imports or ()))
    else:
        given = ("latency", "bandwidth", "imports")
        o.refuse(context, given, "is only for --from; leave it out, or add --from with a run")
        found = _measured(job, workers, transport, threads, gradients, rounds, codec)
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
    from flockstep.costs.cluster_reading import calibration

    file = calibration()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(found.to_toml(), encoding="utf-8")
    return file


def _fitted(records: list[Path], latency: str | None, bandwidth: str | None, imports: tuple[str, ...]) -> Calibration:
    from flockstep.planning.fit import fit_records
    from flockstep.simulation import units

    return fit_records(
        records,
        None if latency is None else units.duration(units.with_unit(latency, "--latency", "100us"), "--latency"),
        None
        if bandwidth is None
        else units.bandwidth(units.with_unit(bandwidth, "--bandwidth", "1gbit"), "--bandwidth"),
        imports,
    )


def _measured(
    job: str, workers: int, transport: str, threads: int, gradients: int, rounds: int, codec: list[str] | None
) -> Calibration:
    from flockstep.planning.calibrate import calibrate as measure
    from flockstep.planning.rates import CODECS

    with show.status() as say:
        return measure(
            job,
            workers,
            transport=transport,
            threads=threads,
            gradients=gradients,
            rounds=rounds,
            codecs=CODECS if codec is None else codec,
            say=say,
        )
