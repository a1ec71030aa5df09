"""`flockstep plan --simulate`: shows the progress of trials, saves each trial as it finishes, and prints a table of the
best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flockstep.cli import show
from flockstep.planning.advice import asked as all_requirements
from flockstep.planning.advice import unfit
from flockstep.planning.plan import Outlook
from flockstep.planning.plan_text import short
from flockstep.planning.search import TOP, Found, Search, SearchProgress, most_promising
from flockstep.planning.trial_store import TrialStore, trial_settings
from flockstep.planning.trials import LEFT_OUT, Trial, TrialContext, goal_of
from flockstep.report import formatting
from flockstep.report.page import Listing
from flockstep.report.terminal import TableColumn, TextTable

HEADINGS = ("strategy", "as written", "best found", "with", "steps", "sends", "trials")
RANKS = (0, 2, 0, 0, 4, 3, 1)


@dataclass(frozen=True)
class SearchOptions:
    """Options of `flockstep plan --simulate`, which tries strategies in virtual time."""

    trials: int
    budget: float | None
    top: int | None
    target: float | None
    seed: int
    split: str
    keep: Path


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


def tried(outlook: Outlook, requirements: tuple[str, ...], named: bool, asked: SearchOptions) -> Tried:
    """Simulate the plan's most promising strategies; if the user `named` strategies, all strategies of the plan.

    Raises:
        ConfigurationError: the job has no data or no target, or the folder holds trials with other settings.
    """
    search = None
    try:
        search = _begun(outlook, requirements, named, asked)
        with _progress() as say:
            search.run(say)
    except KeyboardInterrupt:
        done = "finished trials were saved" if search is not None else "no trial had begun"
        interrupted = f"interrupted; {done}: repeat the command with --keep {asked.keep} to continue"
        if search is None:
            return Tried((), asked.target, (), interrupted)
        return _made(search, asked, interrupted)
    return _made(search, asked, None)


def _made(search: Search, asked: SearchOptions, interrupted: str | None) -> Tried:
    candidates = tuple(one.name for one in search.candidates)
    return Tried(search.found(), search.target, _notes(search, asked), interrupted, candidates)


def _begun(outlook: Outlook, requirements: tuple[str, ...], named: bool, asked: SearchOptions) -> Search:
    """A search with what was kept, before its first trial."""
    context = TrialContext(outlook.site)
    target = goal_of(context.job(asked.seed), asked.target)
    whole = all_requirements(outlook, requirements)
    excluded = () if named else (one.name for one in outlook.predictions if unfit(one, outlook, whole))
    top = asked.top if asked.top is not None else len(outlook.predictions) if named else TOP
    kept = TrialStore(trial_settings(context, outlook.workers, target, asked.seed, asked.split), asked.keep)
    return Search(
        outlook,
        most_promising(outlook, top, excluded),
        kept,
        asked.trials,
        asked.budget,
        target,
        asked.seed,
        asked.split,
        context,
    )


def _notes(search: Search, asked: SearchOptions) -> tuple[str, ...]:
    said = [f"trials are saved in {asked.keep}"]
    if search.out_of_budget:
        said.append(
            f"the budget of {asked.budget:g} s was used up after {search.done} of "
            f"{search.trials * len(search.candidates)} trials; to continue, repeat the command with --keep "
            f"{asked.keep}"
        )
    return tuple(said)


def table(tried: Tried) -> TextTable:
    """Return the terminal table of the simulated strategies, shortest time to target first."""
    columns = [TableColumn(one, one in ("strategy", "with"), rank) for one, rank in zip(HEADINGS, RANKS, strict=True)]
    return TextTable(columns, _rows(tried), _title(tried))


def listing(tried: Tried) -> Listing:
    """Return the table of the simulated strategies for the HTML page."""
    note = f"Time to target: {_title(tried)}. Note: {'; '.join((*tried.notes, *left_out()))}."
    return Listing("Trials", note, HEADINGS, _rows(tried))


def _title(tried: Tried) -> str:
    goal = "" if tried.target is None else f" of {tried.target:g}"
    return f"virtual time until the target{goal}, in trials with real gradients"


def _rows(tried: Tried) -> list[tuple[str, ...]]:
    ranked = sorted(tried.found, key=lambda one: (one.seconds is None, one.seconds or 0.0))
    return [_cells(one) for one in ranked]


def _cells(one: Found) -> tuple[str, ...]:
    best = one.best
    if best is None:
        return short(one.strategy), formatting.NONE, formatting.NONE, one.refused or "", "", "", "0"
    return (
        short(one.strategy),
        outcome(one.trials[0]),
        outcome(best),
        _with(one, best),
        formatting.number(best.steps),
        formatting.size(best.sent_bytes),
        str(len(one.trials)),
    )


def _with(one: Found, best: Trial) -> str:
    own = "" if best.strategy == one.strategy else f"{short(best.strategy)}, "
    return f"{own}lr {best.lr:g}"


def outcome(trial: Trial) -> str:
    """Return the outcome of a trial as text: its time to target, 'diverged', or the time within which it missed the
    target.
    """
    if trial.seconds_to_target is not None:
        return formatting.seconds(trial.seconds_to_target)
    if trial.end == "diverged":
        return "diverged"
    return f"not in {formatting.seconds(trial.seconds)}"


def left_out() -> Sequence[str]:
    """Return sentences about the effects that trials do not model."""
    return (*LEFT_OUT, "the best of several trials that share one seed is better than a typical trial")


def document(tried: Tried) -> dict[str, Any]:
    """Return the results of the trials as a dictionary, for JSON."""
    return {
        "target": tried.target,
        "found": [one.document() for one in tried.found],
        "interrupted": tried.interrupted is not None,
        "notes": list(tried.notes),
        "left_out": list(left_out()),
    }


@contextmanager
def _progress() -> Iterator[Callable[[SearchProgress], None]]:
    """A bar over all trials where somebody watches, else a line for each."""
    if not show.console.is_terminal:
        yield _line
        return
    with show.status() as tell:

        def say(step: SearchProgress) -> None:
            if step.trial is not None or int(step.steps) == step.steps:
                tell(_where(step), step.done, step.all_trials)

        yield say


def _where(step: SearchProgress) -> str:
    now = "" if step.trial is not None else f", virtual {formatting.seconds(step.seconds)}"
    return f"{step.strategy}: trial {step.number} of {step.trials}{now}; {_best(step)}"


def _best(step: SearchProgress) -> str:
    if step.best is None:
        return "no trial has reached the target so far"
    return f"best trial so far: {outcome(step.best[1])} with {step.best[0]}"


def _line(step: SearchProgress) -> None:
    if step.trial is None:
        return
    what = f"{step.trial.strategy}, lr {step.trial.lr:g}: {outcome(step.trial)}"
    before = " (kept from before)" if step.again else ""
    where = f"{step.done} of {step.all_trials}: {step.strategy}, trial {step.number} of {step.trials}"
    line = f"{where}: {what}{before}; {_best(step)}"
    show.note(line)
