"""Which strategy to take: Table 2 of Langer et al. (2020) with the plan's own figures, and what the user needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flockstep.errors import UnknownName
from flockstep.planning.criteria import approximates, drops, is_central, is_synchronous
from flockstep.planning.plan import Outlook, combines
from flockstep.planning.prospect import Prospect
from flockstep.planning.search import Found
from flockstep.report import words

NEEDS = {
    "unbalanced": "the workers' data differ, as if sorted by label",
    "reproducible": "the same run again has to give the same result",
    "elastic": "workers come and go",
    "private": "data may not leave the machines that hold them",
    "slow-links": "links are slower at times than the cluster's description says",
}
"""What can be asked for, and what it means."""
DROPS = "drops part of what it means to send, and nothing feeds it back: accuracy is lost (feedback=residual keeps it)"
"""Why something is not advised, whatever is needed."""
SLOWER = 4.0
"""How many times slower links are taken to be at times under slow-links."""


@dataclass(frozen=True)
class Advice:
    """A recommendation in plain words."""

    choice: Prospect
    runner_up: Prospect | None
    sentences: tuple[str, ...]
    """What to do."""
    reasons: tuple[str, ...]
    changes: tuple[str, ...]
    """What would change the advice."""
    excluded: tuple[tuple[str, str], ...]
    """Strategies that the needs rule out, and why."""
    needs: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "choice": self.choice.name,
            "runner_up": None if self.runner_up is None else self.runner_up.name,
            "sentences": list(self.sentences),
            "reasons": list(self.reasons),
            "changes": list(self.changes),
            "excluded": [{"name": name, "why": why} for name, why in self.excluded],
            "needs": list(self.needs),
        }


def advise(outlook: Outlook, needs: tuple[str, ...] = (), found: Sequence[Found] = ()) -> Advice:
    """The strategy that is worth most among those that meet the needs; first those that trials `found` to be quick.

    Raises:
        UnknownName: a need that is not known.
    """
    for need in needs:
        if need not in NEEDS:
            raise UnknownName.among("need", need, list(NEEDS))
    needs = tuple(dict.fromkeys((*needs, *(["elastic"] if outlook.site.cluster.comes_and_goes else []))))
    left, excluded = list[Prospect](), list[tuple[str, str]]()
    for one in outlook.prospects:
        why = unfit(one, outlook, needs)
        if why is None:
            left.append(one)
        else:
            excluded.append((one.name, why))
    if not left:  # nothing meets every need: one worker is at least possible
        left = [outlook.alone]
    times = {one.strategy: one.seconds for one in found if one.seconds is not None}
    ranked = sorted(left, key=lambda one: (times.get(one.name, math.inf), -value(one, outlook, needs)))
    choice, second = ranked[0], ranked[1] if len(ranked) > 1 else None
    return Advice(
        choice,
        second,
        _sentences(outlook, choice),
        (*_tried(choice, second, found), *_reasons(outlook, choice, second, needs)),
        _changes(outlook, choice, second),
        tuple(excluded),
        needs,
    )


def _tried(choice: Prospect, second: Prospect | None, found: Sequence[Found]) -> tuple[str, ...]:
    """What trials say of the choice and of the runner-up."""
    known = {one.strategy: one.best for one in found}
    said = []
    for one in (choice, second):
        best = None if one is None else known.get(one.name)
        if one is not None and best is not None and best.seconds_to_target is not None:
            how = f"{best.strategy}, learning rate {best.lr:g}"
            said.append(
                f"In trials {one.name} reached the target of {best.target:g} after "
                f"{words.seconds(best.seconds_to_target)} ({how})."
            )
    return tuple(said)


def value(found: Prospect, outlook: Outlook, needs: tuple[str, ...]) -> float:
    """Samples a second in terms of plain training's; with slow links, as if what waits took so much longer."""
    rate = found.samples_per_second
    if "slow-links" in needs and found.strategy is not None:
        rate /= found.utilisation + SLOWER * (1 - found.utilisation)
    return rate / outlook.need(found)


def unfit(found: Prospect, outlook: Outlook, needs: tuple[str, ...]) -> str | None:
    """Why a strategy does not meet the needs, or cannot run; None if it does."""
    memory = outlook.site.cluster.memory
    if memory is not None and found.memory > memory:
        return f"needs {words.size(found.memory)} on a worker, which has {words.size(memory)}"
    if found.strategy is None:
        return "the data are on other machines" if "private" in needs else None
    cell, traits = found.strategy.cell, found.strategy.traits
    if not combines(found) or "ensemble" in traits.results:
        return "trains a model on every worker, not one"
    if ("unbalanced" in needs or "private" in needs) and not (is_central(cell) and is_synchronous(cell, traits)):
        return "needs data that are alike on all workers (R_LBD)"
    if "reproducible" in needs and not is_synchronous(cell, traits):
        return "the order of updates differs from run to run (ERB)"
    if "elastic" in needs and not traits.survives:
        return "stops when a worker is gone (RSOI)"
    if drops(found):
        return DROPS
    return None


def _sentences(outlook: Outlook, choice: Prospect) -> tuple[str, ...]:
    single, cluster = outlook.alone, outlook.site.cluster.name
    rate = f"{words.number(choice.samples_per_second)} samples a second"
    if choice.strategy is None:
        said = [f"Stay on one worker: {rate}."]
        rivals = [one for one in outlook.prospects if one.strategy is not None and combines(one)]
        if rivals:
            best = rivals[0]
            more = best.samples_per_second / single.samples_per_second
            said.append(
                f"The most that {outlook.workers} workers of {cluster} get through is "
                f"{words.number(best.samples_per_second)}, with {best.name}, or {words.times(more)} as many, "
                f"but {words.number(outlook.need(best))} of those are taken to do the work of one of plain training."
            )
        return tuple(said)
    more = choice.samples_per_second / single.samples_per_second
    said = [
        f"Take {choice.name} on {choice.workers} workers: {rate}, {words.times(more)} what one worker gets through."
    ]
    compressed = [one for one in outlook.prospects if approximates(one) and not drops(one)]
    if not approximates(choice) and compressed:
        best = compressed[0]
        ratio = best.samples_per_second / choice.samples_per_second
        said.append(f"Do not compress: the fastest that does, {best.name}, gets through {words.times(ratio)} as many.")
    return tuple(said)


def _ahead(outlook: Outlook, found: Prospect) -> float:
    """How many times as quickly as one worker it is taken to advance."""
    return outlook.worth(found) / outlook.alone.samples_per_second


def _reasons(outlook: Outlook, choice: Prospect, second: Prospect | None, needs: tuple[str, ...]) -> tuple[str, ...]:
    latency, bandwidth = outlook.site.link
    said = []
    if bandwidth < float("inf"):
        takes = outlook.task.nbytes / bandwidth
        said.append(
            f"The model has {words.size(outlook.task.nbytes)}, which the slowest link passes in "
            f"{words.seconds(takes + latency)}; a gradient takes "
            f"{words.seconds(outlook.alone.seconds)} on the fastest worker."
        )
    if choice.strategy is not None:
        row = outlook.criteria(choice)
        said.append(
            f"A step takes {words.seconds(choice.seconds)}, of which a worker computes "
            f"{words.share(choice.utilisation)}; it sends {words.size(choice.sent)} "
            f"({'closed form' if choice.source == 'form' else 'rehearsed'})."
        )
        exposure = "" if row.exposure is None else f", everyone waits for {row.exposure:.0%} of the slowest one's delay"
        late = "" if row.overlap is None else f"updates are {row.overlap:.2g} versions late, "
        said.append(
            f"By Table 2 it is {row.technique}: the learning rate {_RATES[row.learning_rate]}, {late}"
            f"{row.hyper_parameters} more hyper-parameters{exposure}, the same result "
            f"again is {row.reproducible} to get."
        )
    departs = outlook.departures(choice)
    if departs:
        said.append(
            f"It departs from plain training: {', '.join(departs)}. {words.number(outlook.need(choice))} of its "
            f"samples are taken to do the work of one, so that it advances {words.times(_ahead(outlook, choice))} as "
            "one worker."
        )
    said += [f"It counts that {NEEDS[need]}." for need in needs]
    if second is not None:
        said.append(
            f"The runner-up is {second.name} with {words.number(second.samples_per_second)} samples a second and "
            f"{words.number(outlook.need(second))} of them to one of plain training."
        )
    return tuple(said)


_RATES = {"higher": "may grow with the workers", "likely": "is likely another", "lower": "has to be lower"}


def _changes(outlook: Outlook, choice: Prospect, second: Prospect | None) -> tuple[str, ...]:
    """Crossovers that begin or end the choice's reign, and how far the runner-up is behind."""
    said = []
    for one in outlook.crossovers:
        if choice.name not in (one.below, one.above):
            continue
        other, side = (one.above, "above") if one.below == choice.name else (one.below, "below")
        said.append(f"{side} {quantity(one.quantity, one.value)} it would be {other}")
    if second is not None:
        ahead = outlook.worth(choice) / max(outlook.worth(second), 1e-300)
        if outlook.need(second) > outlook.need(choice) and second.samples_per_second > choice.samples_per_second:
            said.append(
                f"if lateness, approximation and models apart cost this job nothing, {second.name} would be better: it "
                f"gets through {words.times(second.samples_per_second / choice.samples_per_second)} as many samples"
            )
        elif ahead > 0:
            said.append(f"{second.name} would have to become {words.number(ahead)} times as fast")
    said.append("measured accuracy: run flockstep compare with these two")
    return tuple(said)


def quantity(name: str, value: float) -> str:
    """A value of what a crossover varies, in words."""
    if name == "bandwidth":
        return f"{words.number(value * 8e-6)} Mbit/s"
    if name == "parameters":
        return f"{words.number(value)} parameters"
    return f"{words.share(value)} of steps beginning a slow spell"
