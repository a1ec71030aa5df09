"""`flockstep calibrate`: measures this machine, or the machines of a recorded run, and writes a cluster file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from flockstep.cli import options as o
from flockstep.cli import show
from flockstep.errors import ConfigurationError
from flockstep.options import MeasureOptions, Opt, options_of

if TYPE_CHECKING:
    from flockstep.planning.calibrate import Calibration


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Options of a model that is fitted to a run's record."""

    records: tuple[Path, ...] | None = Opt(
        "Fit the cluster to the record of a run instead of measuring this machine; repeat the option for "
        "several runs of one job.",
        names=("--from",),
    ).default()
    latency: str | None = Opt("Latency of the links, if known, such as 100us; only with --from.").default()
    bandwidth: str | None = Opt("Bandwidth of the links, if known, such as 1gbit; only with --from.").default()
    imports: o.Imports = ()


def calibrate(
    context: click.Context,
    measuring: MeasureOptions,
    fitting: FitOptions,
    out: Annotated[Path | None, Opt("File to write the cluster to (default: standard output).")] = None,
    keep: Annotated[
        bool,
        Opt("Save the measured cluster as the default cluster of flockstep plan.", names=("--keep/--no-keep",)),
    ] = True,
    as_json: o.Json = False,
) -> None:
    """Measure this machine, or fit a model to a run's record, and write a cluster file for `flockstep plan`."""
    from flockstep.costs.cluster_file import calibration

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
        from flockstep.planning.calibrate import calibrate as measure

        with show.status() as say:
            found = measure(measuring, say)
    if keep and not fitting.records:
        here = calibration()
        _write(here, found)
        show.note(f"saved as the cluster 'here', the default of flockstep plan: {here}")
    if out is not None:
        _write(out, found)
    if as_json:
        show.json({"cluster": found.to_toml(), "notes": list(found.notes), "file": None if out is None else str(out)})
    elif out is None:
        print(found.to_toml(), end="")
    else:
        print(*found.notes, f"cluster: {out}", sep="\n")


def _write(file: Path, found: Calibration) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(found.to_toml(), encoding="utf-8")


def _fitted(given: FitOptions) -> Calibration:
    from flockstep.planning.fit import fit_records
    from flockstep.simulation.units import bandwidth, duration, with_unit

    known = given.latency, given.bandwidth
    return fit_records(
        list(given.records or ()),
        None if known[0] is None else duration(with_unit(known[0], "--latency", "100us"), "--latency"),
        None if known[1] is None else bandwidth(with_unit(known[1], "--bandwidth", "1gbit"), "--bandwidth"),
        given.imports,
    )
