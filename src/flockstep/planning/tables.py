"""The tables of a plan, which the terminal and the HTML page show."""

from __future__ import annotations

import math

from flockstep.planning.advice import Advice
from flockstep.planning.criteria import NEVER, departures
from flockstep.planning.criteria import criteria as criteria_of
from flockstep.planning.hybrid import HybridAdvice
from flockstep.planning.search import Found, Race
from flockstep.planning.step_prediction import StepPrediction
from flockstep.planning.trials import Trial
from flockstep.planning.words import exposed, many, ranged, short
from flockstep.report.formatting import NONE, number, seconds, share, size
from flockstep.report.terminal import TableColumn as Column
from flockstep.report.terminal import TextTable

FOREMOST = 6
"""Number of strategies, and of split models, that a plan shows, unless everything is asked for."""
MATTERS = 5
"""Largest rank of the columns that the table of a plan shows, unless everything is asked for."""
LITTLE = 1e-3
"""Speed-up below which the table shows only an upper limit of the speed-up."""

PREDICTIONS = (
    Column("strategy", text=True),
    Column(
        "speed-up",
        note="speed-up: speed relative to one worker: measured in trials (<: the trial ended before its goal), "
        "otherwise predicted from the samples per second and the number of samples that a formula assumes.",
    ),
    Column("samples/s", rank=2, note="samples/s: samples per second of all workers together."),
    Column(
        "step",
        rank=3,
        note="step: time between two gradients of a worker; ± is two standard errors of the rehearsal's mean, also of "
        "samples/s.",
    ),
    Column(
        "computes",
        rank=4,
        note="computes: share of a step spent computing; the rest of the step is communication and waiting.",
    ),
    Column("sends", rank=5, note="sends: bytes that a worker sends per step."),
    Column("server", rank=8, note="server: bytes per step through the busiest server."),
    Column(
        "staleness",
        rank=7,
        note="staleness: mean number of updates applied between reading the parameters and applying the gradient.",
    ),
    Column("max", rank=9, note="max: largest staleness in the rehearsal."),
    Column(
        "memory",
        rank=6,
        note="memory: bytes on a worker for parameters, gradients, optimizer, strategy, and the activations of a batch "
        "if the layers are known.",
    ),
)
CRITERIA = (
    Column("strategy", text=True),
    Column("technique", text=True, note="The columns are those of table 2 of Langer et al. (2020), for this job."),
    Column("similar data", note="similar data: whether the data of the workers must be similar."),
    Column("learning rate", note="learning rate: the best learning rate, relative to that of one worker."),
    Column("staleness"),
    Column("hyper-parameters", note="hyper-parameters: number of hyper-parameters that the strategy adds."),
    Column(
        "waits for slowest",
        note="waits for slowest: share of the slowest worker's delay by which all workers are delayed (over 100 %: "
        "also in later steps).",
    ),
    Column("deaths survived"),
    Column("reproducible", note="reproducible: how hard it is to reproduce a result exactly."),
    Column("differences", note="differences: number of differences from training on one worker."),
)
TRIALS = (
    Column("strategy", text=True, cell=lambda one: short(one.strategy)),
    Column("time", cell=lambda one: NONE if one.best is None else outcome(one.best)),
    Column("range", rank=1, cell=lambda one: _range(one)),
    Column("learning rate", cell=lambda one: one.refused or "" if one.best is None else f"{one.best.lr:.3g}"),
    Column("steps", rank=4, cell=lambda one: "" if one.best is None else number(one.best.steps)),
    Column("sends", rank=3, cell=lambda one: "" if one.best is None else size(one.best.sent_bytes)),
    Column("trials", rank=2, cell=lambda one: str(len(one.trials))),
)


def predictions(advice: Advice, everything: bool = True) -> TextTable:
    """Return the table of strategies, highest speed-up first; unless `everything` is set, only the best that meet the
    requirements, the recommended one and one worker.
    """
    out, ranked = {name for name, _ in advice.excluded}, advice.ranked
    always = {advice.outlook.alone.name, *([] if advice.choice is None else [advice.choice.name])}
    best = [one.name for one in ranked if one.name not in out][:FOREMOST]
    shown = [one for one in ranked if everything or one.name in {*best, *always}]
    kept = [place for place, one in enumerate(PREDICTIONS) if everything or one.rank <= MATTERS]
    styles = {row: "dim" for row, one in enumerate(shown) if one.name in out}
    styles |= {row: "bold" for row, one in enumerate(shown) if one is advice.choice}
    rest, columns = len(ranked) - len(shown), many(len(PREDICTIONS) - len(kept), "more column")
    left = f"{many(rest, 'more strategy', 'more strategies')}, {columns}" if rest else columns
    notes = (
        f"Left out: {left}, further reasons, strategies that are ruled out, and effects that the figures do not "
        "include; --all shows everything."
    )
    rows = [prediction_cells(advice, one) for one in shown]
    return TextTable(
        [PREDICTIONS[place] for place in kept],
        [[row[place] for place in kept] for row in rows],
        "Predictions",
        styles=styles,
        notes=() if everything else (notes,),
    )


def prediction_cells(advice: Advice, found: StepPrediction) -> tuple[str, ...]:
    """Return the table row of a prediction; a trial that ended before its goal tells only a limit of the speed-up."""
    most, speedup = found.staleness_most, advice.speedups[found.name]
    return (
        short(found.name),
        f"< {number(speedup)}" if found.name in advice.limits else _speedup(speedup),
        number(found.samples_per_second),
        ranged(found),
        share(found.utilization),
        size(found.sent_bytes),
        size(found.server_bytes) if found.server_bytes else NONE,
        _late(advice, found),
        NONE if most is None else str(most),
        size(found.memory),
    )


def _speedup(speedup: float) -> str:
    return f"< {LITTLE:g}" if speedup < LITTLE else number(speedup)


def _late(advice: Advice, found: StepPrediction) -> str:
    versions = advice.outlook.late(found)
    return NONE if versions is None else number(versions, 2) if versions < NEVER else "unbounded"


def criteria(advice: Advice) -> TextTable:
    """Return the table of Langer et al. (2020) for the strategies of a plan."""
    rows, ranked, site = [], advice.ranked, advice.outlook.site
    for found in ranked:
        row = criteria_of(found, site)
        rows.append((
            short(found.name),
            row.technique,
            "needed" if row.balanced_data else "not needed",
            {"likely": "near one worker's"}.get(row.learning_rate, row.learning_rate),
            _late(advice, found),
            str(row.hyper_parameters),
            exposed(row.exposure),
            f"{row.survives:,}",
            row.reproducible,
            str(len(departures(found, site))),
        ))  # fmt: skip
    chosen = {row: "bold" for row, one in enumerate(ranked) if one is advice.choice}
    return TextTable(CRITERIA, rows, "Criteria", styles=chosen)


def trials(race: Race, everything: bool) -> TextTable:
    """Return the table of the tried strategies, fastest first; unless `everything` is set, without those that missed
    the goal.
    """
    reached = [one for one in race.found if one.seconds is not None]
    shown = reached if reached and not everything else race.found
    ranked = sorted(shown, key=lambda one: (one.seconds is None, one.seconds or 0.0))
    goal = "" if race.goal is None else f" of {race.goal:.3g}"
    title = f"Trials: virtual time until the goal{goal} at the best learning rate, with real gradients"
    return TextTable.of(TRIALS, ranked, title=title)


def _range(one: Found) -> str:
    low, high = (seconds(end) if math.isfinite(end) else NONE for end in one.range)
    return f"{low} to {high}" if len(one.at_best_rate) > 1 else NONE


def outcome(trial: Trial) -> str:
    """Return the outcome of a trial as text: its time to target, 'diverged', or the time within which it missed the
    target.
    """
    if trial.seconds_to_target is not None:
        return seconds(trial.seconds_to_target)
    return "diverged" if trial.end == "diverged" else f"not in {seconds(trial.seconds)}"


def splits(found: HybridAdvice, everything: bool) -> TextTable:
    """Return the table of split models, highest speed-up first."""
    columns = (
        Column("partition", text=True, cell=lambda one: str(one.partition)),
        Column("strategy", text=True, cell=lambda one: short(str(one.strategy)) if one.replicas > 1 else "none"),
        Column("speed-up", cell=lambda one: _speedup(found.speedup(one))),
        Column("samples/s", rank=2, cell=lambda one: number(one.samples_per_second)),
        Column("step", rank=4, cell=lambda one: seconds(one.seconds)),
        Column("computes", rank=5, cell=lambda one: share(one.utilization)),
        Column("sends", rank=6, cell=lambda one: size(one.sent_bytes)),
        Column("memory", rank=1, cell=lambda one: size(one.memory)),
        Column("replicas", rank=3, cell=lambda one: str(one.replicas)),
    )
    shown = found.splits if everything else found.splits[:FOREMOST]
    rest = len(found.splits) - len(shown)
    notes = [f"{rest} more combinations of partition and strategy; --all shows them."] if rest else []
    chosen = {row: "bold" for row, one in enumerate(shown) if one is found.choice}
    return TextTable.of(columns, shown, title="Split replicas", styles=chosen, notes=notes)
