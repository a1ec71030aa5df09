"""Plans as a function, which predicts time and bytes of every strategy on a cluster, and recommends a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flockstep.costs.cluster_file import load_cluster, memory_bytes, usual_cluster
from flockstep.errors import ConfigurationError, Interrupted
from flockstep.experiments.folders import folder
from flockstep.experiments.options import PlanOptions, listed, takes
from flockstep.frameworks.job import import_components
from flockstep.launchers.threads import limit_threads
from flockstep.options import options_of
from flockstep.planning import tables
from flockstep.planning.advice import Advice, Recommendation, advise, asked, require_known, unfit
from flockstep.planning.hybrid import HybridAdvice, advise_hybrid, parse_partitions
from flockstep.planning.job_profile import task_of
from flockstep.planning.plan import Outlook
from flockstep.planning.plan import plan as predict
from flockstep.planning.search import Race, can_be_tried, promising
from flockstep.planning.trial_store import TrialStore, trial_settings
from flockstep.planning.trials import LEFT_OUT, TrialContext, goal_of
from flockstep.planning.words import many, short
from flockstep.report.progress import ProgressCallback, silent
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.report.page import Page
    from flockstep.report.terminal import TextTable

REASONS = 4
"""Number of reasons that a plan gives, unless everything is asked for."""


@dataclass(frozen=True)
class PlanResult:
    """The result of a plan: predictions for a job on a cluster, and advice based on them. `print` shows the advice."""

    outlook: Outlook
    """The predictions for all strategies."""
    advice: Advice
    """The recommendation for whole replicas, its reasons, and the conditions under which it would change."""
    hybrid: HybridAdvice | None = None
    """The choice between whole and split replicas; None if the plan covers only whole replicas."""
    trials: Race | None = None
    """The trials that measured the job; None if a formula assumes how many samples each strategy needs."""
    notes: tuple[str, ...] = ()
    """Sentences about the trials."""
    interrupted: str | None = None
    """Sentence to print at the end if the user interrupted the trials; None otherwise."""

    @property
    def choice(self) -> str | None:
        """The recommended strategy as an expression; None if no strategy meets the requirements."""
        return None if self.advice.choice is None else self.advice.choice.name

    @property
    def recommendation(self) -> Advice | Recommendation:
        """The advice on whole replicas, or, if the plan covers split models, on both."""
        return self.advice if self.hybrid is None else self.hybrid.together

    @property
    def title(self) -> str:
        """The job, the number of workers and the cluster, as text."""
        return f"{self.outlook.task.name} on {many(self.outlook.workers, 'worker')} of {self.outlook.site.cluster.name}"

    def tables(self, everything: bool = True) -> list[TextTable]:
        """Return the tables of split models, predictions and trials; `everything` adds rows and the criteria."""
        found = [tables.predictions(self.advice, everything)]
        if self.hybrid is not None and self.hybrid.splits:
            found.insert(0, tables.splits(self.hybrid, everything))
        if self.trials is not None and self.trials.found:
            found.append(tables.trials(self.trials, everything))
        return [*found, tables.criteria(self.advice)] if everything else found

    def lists(self, everything: bool = True) -> list[tuple[str, Sequence[str]]]:
        """Return the lists of sentences with their headings; unless `everything` is set, the most important ones."""
        advice, outlook = self.recommendation, self.outlook
        found: list[tuple[str, Sequence[str]]] = [
            ("why", advice.reasons if everything else advice.reasons[:REASONS]),
            ("what would change this recommendation", advice.changes),
            ("trials", self.notes),
        ]
        if self.hybrid is not None and (everything or not self.hybrid.splits):
            said = " ".join(advice.sentences)
            refused = [f"{short(name)}: {why}" for name, why in self.hybrid.refused if why not in said]
            found.append(("split models that were refused", refused))
        if everything:
            ruled_out = [
                f"{', '.join(short(name) for name, why in self.advice.excluded if why == reason)}: {reason}"
                for reason in dict.fromkeys(why for _, why in self.advice.excluded)
            ]
            unplanned = [why if why.startswith(name) else f"{short(name)}: {why}" for name, why in outlook.refused]
            unknown = [*outlook.left_out, *(LEFT_OUT if self.trials is not None else ()), *unplanned]
            found += [("ruled out", ruled_out), ("what these figures do not include", unknown)]
        return [(heading, sentences) for heading, sentences in found if sentences]

    def document(self) -> dict[str, Any]:
        """Return the plan as plain data, for JSON. Strategies are in the order of the table."""
        document = self.outlook.document()
        rows = {one["name"]: one for one in document["strategies"]}
        document["strategies"] = [
            {**rows[one.name], "speedup": self.advice.speedups[one.name], "limit": one.name in self.advice.limits}
            for one in self.advice.ranked
        ]
        document["advice"] = self.advice.document()
        if self.trials is not None or self.notes:
            found = () if self.trials is None else self.trials.found
            document["trials"] = {
                "target": None if self.trials is None else self.trials.goal,
                "found": [one.document() for one in found],
                "interrupted": self.interrupted is not None,
                "notes": list(self.notes),
                "left_out": list(LEFT_OUT),
            }
        return document if self.hybrid is None else {**document, "hybrid": self.hybrid.document()}

    def page(self) -> Page:
        """Return the HTML page of the plan, with all tables and lists."""
        from flockstep.report.page import Page

        sentences = list(self.recommendation.sentences)
        if self.hybrid is not None and self.hybrid.command is not None:
            sentences.append(f"The command is: {self.hybrid.command}")
        return Page(
            brand="flockstep plan",
            title=self.title,
            footer="Predictions, not measurements. MB = 1,000,000 bytes.",
            sentences=sentences,
            lists=[(heading[0].upper() + heading[1:], said) for heading, said in self.lists()],
            tables=self.tables(),
        )

    def write(self, path: Path | str) -> Path:
        """Write the plan as one HTML file, and return the path of the file."""
        return self.page().write(path)

    def __str__(self) -> str:
        advice = self.recommendation
        command = [] if self.hybrid is None or self.hybrid.command is None else [self.hybrid.command]
        return "\n".join([*advice.sentences, *command, *(f"- {reason}" for reason in advice.reasons)])


@takes(PlanOptions)
def plan(options: PlanOptions) -> PlanResult:
    """Predict the cost of every strategy on a cluster, and recommend a strategy, as `flockstep plan` does.

    The call sets the thread limits of the numerical libraries to 1.

    Returns:
        The predictions and the advice.

    Raises:
        ConfigurationError: a job, cluster, requirement or strategy does not exist.
        Interrupted: the user interrupted the plan.
    """
    result = planned(options)
    if result.interrupted is not None:
        raise Interrupted(result.interrupted)
    return result


def planned(options: PlanOptions, say: ProgressCallback = silent) -> PlanResult:
    """Return the plan that `options` ask for, also if the user interrupts the trials."""
    requirements, chosen = listed("require", options.require), listed("strategies", options.strategies)
    require_known(requirements)
    options_of(PlanOptions)["hours"][0].check("hours", options.hours)
    for name in ("target", "keep"):
        if (value := getattr(options, name)) is not None and not options.simulate:
            raise ConfigurationError(
                f"--{name} {value} has an effect on trials to a target only; add --simulate (in Python, simulate=True)"
            )
    files = listed("imports", options.imports)
    import_components(files)
    partitions = parse_partitions(listed("partitions", options.partitions))
    memory = None if options.memory is None else memory_bytes(options.memory)
    hybrid, strategies = options.hybrid or bool(partitions) or memory is not None, list(map(Strategy.parse, chosen))
    shape = load_cluster(usual_cluster() if options.cluster is None else options.cluster)
    if memory is not None:
        shape = shape.with_memory(memory)
    say(f"reading {options.what}")
    task = task_of(str(options.what), options.batch, sealed=options)
    limit_threads(1)  # a rehearsal's products of small matrices only wait for other threads
    length = None if options.hours is None else 3600 * options.hours
    outlook = predict(task, shape, options.workers, strategies=chosen, length=length, say=say)
    if chosen and len(outlook.predictions) == 1:
        why = "; ".join(f"{name}: {reason}" for name, reason in outlook.refused)
        raise ConfigurationError(f"none of the strategies can be planned on {shape.name}: {why}")
    race, notes, interrupted = None, tuple[str, ...](), None
    if options.budget > 0 and (options.simulate or (can_be_tried(outlook) and not hybrid)):
        race, notes, interrupted = _tried(outlook, requirements, options, say)
    advice = advise(outlook, requirements, *(() if race is None else (race.found, race.asked)))
    split = None
    if hybrid and interrupted is None:
        try:
            split = advise_hybrid(advice, partitions, strategies, files, say)
        except KeyboardInterrupt as stop:
            raise Interrupted(
                f"{str(stop) or 'interrupted'}; the plan of split models was not finished; leave out --hybrid, "
                "--partition and --memory for a plan of whole replicas"
            ) from None
    return PlanResult(advice.outlook, advice, split, race, notes, interrupted)


def _tried(
    outlook: Outlook, requirements: tuple[str, ...], options: PlanOptions, say: ProgressCallback
) -> tuple[Race | None, tuple[str, ...], str | None]:
    """Try the strategies that meet the requirements, or all that the user names. Return the trials, sentences about
    them, and what to say at the end if the user interrupted them.
    """
    context, race, target, kept, place = TrialContext(outlook.site), None, None, TrialStore(), None
    split = options.split or ("by-label" if "unbalanced" in requirements else "iid")
    if options.simulate:
        place = folder(options.keep, f"plan-{outlook.task.name}-{outlook.site.cluster.name}")
    try:
        if place is not None:  # trials to the job's target are saved, those to the first loss are not
            target = goal_of(context.job(options.seed), options.target)
            kept = TrialStore(trial_settings(context, outlook.workers, target, options.seed, split), place)
        whole = asked(outlook, requirements)
        out = () if options.strategies else (one.name for one in outlook.predictions if unfit(one, outlook, whole))
        candidates = promising(outlook, options.top, out)
        race = Race(outlook, candidates, target, options.budget, options.seed, split, context, kept)
        race.run(say)
    except ConfigurationError as error:
        if options.simulate:
            raise
        return None, (f"no trial was run, so a formula assumes the number of samples: {error}",), None
    except KeyboardInterrupt:
        done = "no trial had begun" if race is None else "finished trials were saved"
        again = f"; {done}: repeat the command with --keep {place} to continue" if place is not None else ""
        return race, () if race is None else race.notes(), f"interrupted{again}"
    return race, race.notes(), None
