"""`flockstep calibrate`: writes this machine, or the machines of a recorded run, as a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flockstep.cli import options as o
from flockstep.cli import show
from flockstep.errors import ConfigurationError

if TYPE_CHECKING:
    from flockstep.planning.calibrate import Calibration

Gradients = Annotated[int, typer.Option(help="Gradients to time per worker, alone and with all workers at once.")]
_MEASURING = ("workers", "job", "transport", "threads", "gradients", "rounds", "codec")


def calibrate(
    context: typer.Context,
    workers: o.Workers = 4,
    job: Annotated[str, typer.Option(help="The job whose gradients are computed.")] = "digits",
    transport: o.TransportText = "shared_memory",
    threads: o.Threads = 1,
    gradients: Gradients = 30,
    rounds: Annotated[int, typer.Option(help="Round trips of messages between every pair of workers.")] = 20,
    codec: Annotated[list[str] | None, typer.Option(help="A codec to measure; repeatable (default: half).")] = None,
    records: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Fit the record of a run instead; repeatable, for several runs of one job."),
    ] = None,
    latency: Annotated[str | None, typer.Option(help="With --from: the latency, if known, such as 100us.")] = None,
    bandwidth: Annotated[str | None, typer.Option(help="With --from: the bandwidth, if known, such as 1gbit.")] = None,
    imports: o.Imports = None,
    out: Annotated[Path | None, typer.Option(help="The file to write (default: standard output).")] = None,
    keep: Annotated[bool, typer.Option(help="Save the measured cluster for plans that name no cluster.")] = True,
    as_json: o.Json = False,
) -> None:
    """Measure this machine, or fit the record of a run, and write a cluster file for `flockstep plan`."""
    if out is not None and out.suffix != ".toml":
        raise ConfigurationError(f"--out must be a .toml file, got {str(out)!r}; give it that ending")
    if records:
        _refuse(context, _MEASURING)
        found = _fitted(records, latency, bandwidth, tuple(imports or ()))
    else:
        _refuse(context, ("latency", "bandwidth", "imports"))
        found = _measured(job, workers, transport, threads, gradients, rounds, codec)
        if keep:
            show.console.print(
                f"saved as the cluster here: {_kept(found)}", markup=False, highlight=False, soft_wrap=True
            )
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


def _refuse(context: typer.Context, names: tuple[str, ...]) -> None:
    """Refuse options that were given although they mean nothing here."""
    for option, value in o.given_options(context, names):
        means = "is for measuring, not for --from" if names == _MEASURING else "is for --from"
        raise ConfigurationError(f"{option} {value} {means}; leave it out")
