"""The trials of `flockstep plan`: runs them within a budget, and prints a table of what they measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flockstep.cli import show
from flockstep.errors import ConfigurationError
from flockstep.planning.advice import asked as all_requirements
from flockstep.planning.advice import unfit
from flockstep.planning.plan import Outlook
from flockstep.planning.plan_text import short
from flockstep.planning.search import Found, Race, left_out, promising
from flockstep.planning.trial_store import TrialStore, trial_settings
from flockstep.planning.trials import Trial, TrialContext, goal_of
from flockstep.report import formatting
from flockstep.report.page import Listing
from flockstep.report.terminal import TableColumn, TextTable

HEADINGS = ("strategy", "time", "range", "learning rate", "steps", "sends", "trials")
RANKS = (0, 0, 1, 0, 4, 3, 2)


@dataclass(frozen=True)
class TrialOptions:
    """Options of `flockstep plan` on trials, which train with the strategies in virtual time."""

    budget: float | None
    top: int | None
    target: float | None
    seed: int
    split: str
    keep: Path | None
    """Folder of trials to the job's target; None for trials to the first loss, which are not saved."""


@dataclass(frozen=True)
class Tried:
    """Results of the trials of `flockstep plan --simulate`, and the reason why the trials ended."""

    found: tuple[Found, ...]
    target: float | None
    """Metric that the trials must reach; None if the user interrupted the search before the target was known."""
    notes: tuple[str, ...]
    interrupted: str | None
    """Sentence to print at the end if the user interrupted the trials; None otherwise."""
    candidates: tuple[str, ...] = ()
    """The strategies that were selected for trials."""


def tried(outlook: Outlook, requirements: tuple[str, ...], named: bool, asked: TrialOptions) -> Tried:
    """Simulate the strategies of the plan that meet the requirements; if the user `named` strategies, all of them.

    Raises:
        ConfigurationError: trials were to reach the target, but the job has no data or no target, or the folder holds
            trials with other settings.
    """
    race = None
    try:
        try:
            race = _race(outlook, requirements, named, asked)
            with show.status() as say:
                race.run(say)
        except ConfigurationError as error:
            if asked.keep is not None:
                raise
            return Tried((), None, (f"no trial was run, so a formula assumes the number of samples: {error}",), None)
    except KeyboardInterrupt:
        done = "finished trials were saved" if race is not None else "no trial had begun"
        again = "" if asked.keep is None else f"; {done}: repeat the command with --keep {asked.keep} to continue"
        interrupted = f"interrupted{again}"
        if race is None:
            return Tried((), asked.target, (), interrupted)
        return Tried(race.found, race.goal, _notes(race, asked), interrupted, race.asked)
    return Tried(race.found, race.goal, _notes(race, asked), None, race.asked)


def _race(outlook: Outlook, requirements: tuple[str, ...], named: bool, asked: TrialOptions) -> Race:
    context, target, kept = TrialContext(outlook.site), None, None
    if asked.keep is not None:
        target = goal_of(context.job(asked.seed), asked.target)
        kept = TrialStore(trial_settings(context, outlook.workers, target, asked.seed, asked.split), asked.keep)
    whole = all_requirements(outlook, requirements)
    excluded = () if named else (one.name for one in outlook.predictions if unfit(one, outlook, whole))
    candidates = promising(outlook, asked.top, excluded)
    return Race(outlook, candidates, target, asked.budget, asked.seed, asked.split, context, kept)


def _notes(race: Race, asked: TrialOptions) -> tuple[str, ...]:
    goal = ""
    if race.goal is not None:
        goal = f" to a {'loss' if asked.keep is None else 'metric'} of {race.goal:.3g}"
    budget = "" if asked.budget is None else f" of a budget of {asked.budget:g} s, which --budget changes"
    said = [f"trials{goal} took {race.spent:.0f} s of CPU time{budget}"]
    if race.out_of_budget:
        again = "" if asked.keep is None else f"; to continue, repeat the command with --keep {asked.keep}"
        said.append(f"the budget was used up before the trials were finished{again}")
    if asked.keep is not None:
        said.append(f"trials are saved in {asked.keep}")
    return tuple(said)


def table(tried: Tried, everything: bool) -> TextTable:
    """Return the terminal table of the tried strategies, fastest first; unless `everything` is set, without those that
    missed the goal.
    """
    columns = [TableColumn(one, one in ("strategy", "with"), rank) for one, rank in zip(HEADINGS, RANKS, strict=True)]
    reached = [one for one in tried.found if everything or one.seconds is not None]
    return TextTable(columns, _rows(replace(tried, found=tuple(reached or tried.found))), _title(tried))


def listing(tried: Tried) -> Listing:
    """Return the table of the simulated strategies for the HTML page."""
    note = f"Time to target: {_title(tried)}. Note: {'; '.join((*tried.notes, *left_out()))}."
    return Listing("Trials", note, HEADINGS, _rows(tried))


def _title(tried: Tried) -> str:
    goal = "" if tried.target is None else f" of {tried.target:.3g}"
    return f"virtual time until the goal{goal} at the best learning rate, in trials with real gradients"


def _rows(tried: Tried) -> list[tuple[str, ...]]:
    ranked = sorted(tried.found, key=lambda one: (one.seconds is None, one.seconds or 0.0))
    return [_cells(one) for one in ranked]


def _cells(one: Found) -> tuple[str, ...]:
    best = one.best
    if best is None:
        return short(one.strategy), formatting.NONE, formatting.NONE, one.refused or "", "", "", "0"
    low, high = (formatting.seconds(end) if math.isfinite(end) else formatting.NONE for end in one.range)
    return (
        short(one.strategy),
        outcome(best),
        f"{low} to {high}" if len(one.at_best_rate) > 1 else formatting.NONE,
        f"{best.lr:.3g}",
        formatting.number(best.steps),
        formatting.size(best.sent_bytes),
        str(len(one.trials)),
    )


def outcome(trial: Trial) -> str:
    """Return the outcome of a trial as text: its time to target, 'diverged', or the time within which it missed the
    target.
    """
    if trial.seconds_to_target is not None:
        return formatting.seconds(trial.seconds_to_target)
    if trial.end == "diverged":
        return "diverged"
    return f"not in {formatting.seconds(trial.seconds)}"


def document(tried: Tried) -> dict[str, Any]:
    """Return the results of the trials as a dictionary, for JSON."""
    return {
        "target": tried.target,
        "found": [one.document() for one in tried.found],
        "interrupted": tried.interrupted is not None,
        "notes": list(tried.notes),
        "left_out": list(left_out()),
    }
