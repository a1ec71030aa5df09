"""Table 2 of Langer et al. (2020) as criteria that are computed from what a plan predicts.

The paper grades techniques by hand: + to +++, easy to hard. Here every grade follows from a figure of the plan, for the
cluster at hand, so that the same strategy can be graded otherwise elsewhere. Model parallelism is not among them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from flockstep.expression import Component, fields_of
from flockstep.planning.prospect import Pace, Prospect
from flockstep.strategies.base import Cell, Traits
from flockstep.strategies.demo import Demo
from flockstep.strategies.majority_vote import MajorityVote
from flockstep.strategies.power_sgd import PowerSgd
from flockstep.strategies.sparta import Sparta

TOLL = 1.4
"""How many times as many samples a second each departure from plain training has to buy."""
STALE = 4.0
"""Mean staleness above which it counts twice; each doubling counts once more."""
SELDOM = 1 / 16
"""Share of a model that a worker has to send in a step, for its meetings not to count as rare."""

APPROXIMATE = (Demo, MajorityVote, PowerSgd, Sparta)
"""Strategies that send an approximation without having a codec."""


@dataclass(frozen=True)
class Criteria:
    """A strategy's row of Table 2, on this cluster."""

    technique: str
    balanced_data: bool
    """R_LBD: whether the workers' data have to be alike and large."""
    learning_rate: Literal["higher", "likely", "lower"]
    """OptLR: the best one, compared with that of one worker, as the cluster grows."""
    overlap: float | None
    """COCC: versions by which updates are late in the mean; None where there are no versions."""
    hyper_parameters: int
    """CAHP: how many the strategy and its parts add."""
    exposure: float | None
    """RSOI: how much of the slowest worker's delay everyone takes on, 0 to 1; None: not known."""
    survives: bool
    """RSOI: whether the others go on when a worker is gone."""
    reproducible: Literal["easy", "medium", "hard"]
    """ERB: how hard it is to get the same result again."""

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return dataclasses.asdict(self)


def criteria(found: Prospect, pace: Pace | None) -> Criteria:
    """The row of a predicted strategy; of one worker, the trivial one."""
    if found.strategy is None:
        return Criteria("one worker", False, "likely", 0.0, 0, 1.0, False, "easy")
    cell, traits = found.strategy.cell, found.strategy.traits
    central, synchronous = is_central(cell), is_synchronous(cell, traits)
    rate: Literal["higher", "likely", "lower"] = "lower" if not synchronous else "higher" if central else "likely"
    hard: Literal["easy", "medium", "hard"] = (
        "easy" if synchronous else "medium" if cell is not None and cell.scheduling == "bounded async" else "hard"
    )
    return Criteria(
        f"{'central' if central else 'decentral'}, {'synchronous' if synchronous else 'asynchronous'}",
        not (central and synchronous),
        rate,
        found.staleness,
        count(found.strategy),
        None if pace is None else pace.exposure,
        traits.survives,
        hard,
    )


def is_central(cell: Cell | None) -> bool:
    """Whether one model is optimised, with everybody's gradients."""
    return cell is not None and cell.optimisation == "central"


def is_synchronous(cell: Cell | None, traits: Traits) -> bool:
    """Whether the same updates happen in the same order in every run."""
    return cell.scheduling == "sync" if cell is not None else traits.completeness == 1


def count(part: Component) -> int:
    """Hyper-parameters of a component and of its parts."""
    values = [getattr(part, name) for name in fields_of(type(part))]
    return sum(1 if not isinstance(value, Component) else count(value) for value in values)


def departures(found: Prospect, nbytes: float, transit: float = 0.0) -> tuple[str, ...]:
    """In what a strategy departs from plain training on one worker, so that its samples may be worth less.

    `nbytes`: of the model, which takes `transit` seconds to another worker: where a strategy has no versions, updates
    count as late by the gradients that are computed meanwhile. How much less samples are worth is not known before a
    run, and not guessed: each departure counts alike.
    """
    if found.strategy is None:
        return ()
    cell, traits = found.strategy.cell, found.strategy.traits
    said = [f"{found.workers} times the batch"]
    if not found.lossless or _approximates(found):
        said.append("what is sent is an approximation")
    if not is_synchronous(cell, traits):
        late = found.staleness
        if late is None:
            late = transit / max(found.seconds, 1e-12)
        said.append(f"updates are late by {late:.2g} versions in the mean")
        limit = STALE
        while late > limit:
            said.append(f"that is more than {limit:.0f}")
            limit *= 2
    if not is_central(cell):
        said.append("workers have models of their own")
    if traits.completeness == 4:
        said.append("not everyone hears of every update")
    if found.sent < SELDOM * nbytes and found.lossless and not _approximates(found):
        said.append("workers seldom hear of each other")
    return tuple(said)


def _approximates(found: Prospect) -> bool:
    """Whether the strategy itself compresses, without a codec."""
    return isinstance(found.strategy, APPROXIMATE)


def worth(samples_per_second: float, said: tuple[str, ...]) -> float:
    """Samples a second after the toll of its departures: what strategies are compared by."""
    return samples_per_second / TOLL ** len(said)
