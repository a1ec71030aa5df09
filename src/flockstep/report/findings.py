"""Writes the findings of a comparison as sentences: which run was fastest, why, and what is uncertain."""

from __future__ import annotations

from collections.abc import Sequence

from flockstep.records.summary import Summary, trained_apart
from flockstep.report import formatting
from flockstep.report.ranking import labels, places, reference, tied, unranked

Run = tuple[str, Summary]
"""A run with its label."""


def findings(ranked: Sequence[Summary], seeds: int = 1) -> list[str]:
    """Return the findings as plain sentences, not escaped for HTML, most important first.

    `ranked` is in order of rank; each summary is the median of `seeds` runs.
    """
    usable = [(label, run) for label, run in zip(labels(ranked), ranked, strict=True) if run.useful]
    if not usable:
        return ["No run ended without an error, so there is nothing to compare."]
    hits = sorted((one for one in usable if one[1].seconds_to_target is not None), key=lambda one: _hit(one[1]))
    found = []
    if (why := unranked(ranked)) is not None:
        found.append(why)
    else:
        found += [*over_one_worker(ranked, seeds), _first(usable, hits, seeds)]
        if len(hits) > 1:
            found += _why(hits[0], hits[-1])
    found += [f"In {label}, {sentence}." for label, run in usable for sentence in run.refusals]
    if lost := [label for label, run in usable if run.lost]:
        found.append(f"Nodes were lost during {formatting.listed(lost)}; a list below names these nodes.")
    return [*found, *_caveats([run for _, run in usable], seeds)]


def goal_of(summary: Summary) -> str | None:
    """Return the target with its metric, such as "accuracy 0.95"; None if the run has no target, or no metric."""
    return None if summary.target is None or summary.metric is None else f"{summary.metric} {summary.target:g}"


def _first(usable: Sequence[Run], hits: Sequence[Run], seeds: int) -> str:
    """Which run was first, and how far the second was behind it."""
    label, best = usable[0]
    if best.target is None:
        return (
            f"There is no target, so runs are ranked by their final {best.metric}: {label} ended with the best value, "
            f"{formatting.metric(best.final_metric)}."
        )
    if not hits:
        return (
            f"No run reached {goal_of(best)}. {label} is ranked first, with a final {best.metric} of "
            f"{formatting.metric(best.final_metric)}."
        )
    label, fastest = hits[0]
    text = f"{label} reached {goal_of(best)} first, after {_clock(fastest)}."
    if len(hits) > 1:
        second, run = hits[1]
        text += f" {second} followed after {_clock(run)}, "
        if "=" in places([fastest, run])[0]:
            why = "evaluations are too far apart" if seeds == 1 else "ranges of their seeds overlap too much"
            text += f"which is a tie: the {why} to tell which run was first."
        else:
            text += f"{formatting.times(_ratio(_hit(run), _hit(fastest)))} as long."
    if missed := [(name, run) for name, run in usable if run.seconds_to_target is None]:
        who = formatting.listed([f"{name} (best {formatting.metric(run.best_metric)})" for name, run in missed])
        text += f" {who} never reached it."
    return text


def _why(fast: Run, slow: Run) -> list[str]:
    """Say whether fewer samples or more samples per second made the faster run faster: time to target is samples to
    target ÷ samples per second. Nothing for scripts, whose samples are not known.
    """
    (fast_label, fastest), (slow_label, slowest) = fast, slow
    if fastest.samples_to_target is None or slowest.samples_to_target is None:
        return []
    samples = _ratio(fastest.samples_to_target, slowest.samples_to_target)
    speed = _ratio(fastest.samples_to_target * _hit(slowest), _hit(fastest) * slowest.samples_to_target)
    took = formatting.share(_ratio(_hit(fastest), _hit(slowest)))
    head = (
        f"The slowest run that reached the target, {slow_label}, took {_clock(slowest)}; {fast_label} took {took} of "
        "that time: "
    )
    pace = f"processed {formatting.times(speed)} as many samples a second"
    if samples > 1.03:
        return [f"{head}it needed {formatting.times(samples)} the samples, but it {pace}."]
    if samples < 0.97:
        return [f"{head}it needed only {formatting.times(samples)} the samples, and it {pace}."]
    return [f"{head}both needed about as many samples, and it {pace}."]


def _caveats(usable: Sequence[Summary], repeated: int) -> list[str]:
    seeds = {run.seed for run in usable}
    found = []
    if repeated > 1:
        found.append(
            f"Figures are medians over {repeated} seeds; curves, bars and counts are those of the run nearest to the "
            "medians."
        )
    elif len(seeds) == 1:
        found.append(
            f"All runs used one seed ({min(seeds)}), so small differences can be due to chance; repeat the runs with "
            "other seeds."
        )
    if usable[0].clock == "virtual":
        found.append(
            "Seconds are virtual: gradients, losses and bytes are real, but times are computed with the compute and "
            "network model above and were not measured."
        )
    return found


def apart(ranked: Sequence[Summary]) -> list[str]:
    """Return sentences about runs in which some workers exchanged no data with the others."""
    return [
        f"{label}: {sentence[:1].lower()}{sentence[1:]}"
        for label, sentence in zip(labels(ranked), map(trained_apart, ranked), strict=True)
        if sentence is not None
    ]


def over_one_worker(ranked: Sequence[Summary], seeds: int = 1) -> list[str]:
    """Say whether several workers were faster than one, if a run of one worker is there and a run hit the target."""
    alone = reference(ranked)
    hits = [(label, run) for label, run in zip(labels(ranked), ranked, strict=True) if run.useful and _hit(run)]
    if alone is None or not hits:
        return []
    goal = goal_of(alone)
    if not (alone.useful and _hit(alone)):
        return [f"One worker alone did not reach {goal} in {formatting.seconds(alone.seconds)}."]
    strategies = [(label, run) for label, run in hits if run.workers > 1]
    if not strategies:
        return [f"One worker alone reached {goal}, after {_clock(alone)}, and no strategy on several workers did."]
    name, best = min(strategies, key=lambda one: _hit(one[1]))
    took = f"{name} reached {goal} after {_clock(best)}, one worker alone after {_clock(alone)}"
    if tied(*sorted((best, alone), key=_hit)):
        why = "the ranges of their seeds overlap" if seeds > 1 else "the evaluations are too far apart to tell"
        return [f"No strategy is known to be faster than one worker: {took}, but {why}."]
    if _hit(best) >= _hit(alone):
        return [f"No strategy was faster than one worker: {took}."]
    paid = formatting.times(_hit(best) * best.workers / _hit(alone))
    return [f"Several workers were faster than one: {took}, with {paid} the worker-seconds."]


def ties(ranked: Sequence[Summary], seeds: int = 1) -> list[str]:
    """Return sentences about how certain the order of the ranked runs is, each of them the median of `seeds` runs."""
    if (why := unranked(ranked)) is not None:
        return [why]
    said = []
    if any("=" in place for place in places(ranked)):
        said.append(
            "=: a tie, because the ranges over the seeds overlap."
            if seeds > 1
            else "=: a tie, because the evaluations are too far apart to tell which run was first."
        )
    if seeds == 1 and len(ranked) > 1 and ranked[0].clock == "real":
        said.append(
            "Each strategy has only one run, so the variation of the seconds is not known; --seeds 5 ranks "
            "medians and shows ranges."
        )
    return said


def _hit(run: Summary) -> float:
    """Seconds in which a run reached the target; 0 if it did not."""
    return run.seconds_to_target or 0.0


def _clock(run: Summary) -> str:
    text = formatting.seconds(run.seconds_to_target)
    return text.replace(" ", " virtual ", 1) if run.clock == "virtual" else text


def _ratio(a: float, b: float) -> float:
    return a / b if b else 1.0
