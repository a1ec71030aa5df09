"""`flockstep chaos`: disrupts real runs at random, and prints a line for each disruption and the goodput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from click.exceptions import Exit
from rich.table import Table

from flockstep.cli import options as o
from flockstep.cli import show
from flockstep.errors import ConfigurationError
from flockstep.experiments.options import JOB, RecordOptions
from flockstep.expression import to_text
from flockstep.frameworks.job import import_components
from flockstep.options import BadGradientAction, BadGradientOptions, CommonOptions, Opt, Workers, options_of
from flockstep.strategies.base import Strategy
from flockstep_lab.chaos.base import Disruption, Setting
from flockstep_lab.chaos.campaign import ChaosTrial, Goodput, campaign


@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
    """Options of a campaign of random faults."""

    job: Annotated[str, JOB]
    strategy: Annotated[
        tuple[str, ...],
        Opt("Strategy to disrupt; repeat the option for several.", names=("--strategy", "-s"), nouns=("strategy",)),
    ]
    workers: Workers = 4
    minutes: Annotated[float, Opt("Time budget in minutes, shared by the runs of all strategies.")] = 5.0
    seed: Annotated[int, options_of(CommonOptions)["seed"][0]] = 0
    steps: Annotated[int | None, Opt("Local steps per worker (default: enough for a few seconds of training).")] = None
    heartbeat: Annotated[float, Opt("Seconds without an answer after which a node counts as lost.")] = 2.0
    on_bad_gradient: Annotated[BadGradientAction, options_of(BadGradientOptions)["on_bad_gradient"][0]] = "stop"
    disruption: Annotated[
        tuple[str, ...],
        Opt(
            "Disruption to cause once, instead of random disruptions; flockstep list disruptions shows all.",
            nouns=("disruption",),
        ),
    ] = ()
    imports: o.Imports = ()
    out: Annotated[Path | None, options_of(RecordOptions)["out"][0]] = None


def chaos(options: ChaosOptions, as_json: o.Json = False) -> None:
    """Kill, stop and slow processes of real runs at random, resume the runs, and check invariants of their records."""
    import_components(options.imports)
    place, steps, minutes = o.folder(options.out, f"chaos-{options.job}"), options.steps, options.minutes
    if not minutes > 0:
        raise ConfigurationError(f"minutes must be > 0, got {minutes:g}; use 5")
    if place.exists() and any(place.iterdir()):
        raise ConfigurationError(f"{place} is not empty; choose another folder with --out")
    common = options.seed, options.heartbeat, options.on_bad_gradient, options.imports
    settings = [
        Setting(options.job, Strategy.parse(text), options.workers, steps or 0, *common) for text in options.strategy
    ]
    for setting in settings:
        setting.strategy.check(options.workers)
    given = [Disruption.parse(text) for text in options.disruption]
    trials, goodputs = list[ChaosTrial](), list[Goodput]()
    with show.status() as say:
        for found in campaign(settings, minutes, place, steps, given, say):
            if isinstance(found, Goodput):
                goodputs.append(found)
                continue
            trials.append(found)
            if not as_json:
                print(line(found), flush=True)
    failed = [one for one in trials if one.broken]
    if as_json:
        shares = [{"strategy": one.strategy, "runs": one.runs, "steps_per_second": one.disturbed,
                   "baseline_steps_per_second": one.baseline, "share": one.share} for one in goodputs]  # fmt: skip
        show.json({"trials": [one.document() for one in trials], "goodput": shares, "failed": len(failed)})
    else:
        show.page().print(table(goodputs))
        print(f"{len(trials)} disrupted runs; runs that violated an invariant: {len(failed)}")
    if failed:
        raise Exit(1)


def line(found: ChaosTrial) -> str:
    """Describe a disrupted run in one line of text, with further lines for violated invariants and the command that
    repeats the run.
    """
    fired = "fired" if found.fired else "NOT FIRED"
    text = (
        f"{found.number:3d}  {found.setting.strategy!s}  {to_text(found.disruption)}  {fired}  {found.ended}  "
        f"{found.seconds:.1f} s  {'BROKEN' if found.broken else 'ok'}"
    )
    if not found.broken:
        return text
    return "\n".join(
        [
            text,
            *(f"     {one}" for one in found.broken),
            f"     record: {found.folder}",
            f"     repeat: {found.command}",
        ]
    )


def table(goodputs: Sequence[Goodput]) -> Table:
    """Return the terminal table of the useful steps per second (goodput) of each strategy."""
    shown = Table("strategy", "disruptions", "useful steps/s", "without", "goodput")
    for one in goodputs:
        shown.add_row(one.strategy, str(one.runs), f"{one.disturbed:.1f}", f"{one.baseline:.1f}", f"{one.share:.0%}")
    return shown


app = chaos
