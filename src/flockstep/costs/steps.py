"""The cost of a training step in closed form, for every strategy that has one.

Exact, in virtual time on links, where gradients take constant time, unless the notes of a cost say otherwise. With
random times a barrier costs an order statistic; what has no formula then is a recurrence over rounds on fixed draws.
"""

from __future__ import annotations

from dataclasses import replace

from flockstep.codecs.base import Codec
from flockstep.costs import families
from flockstep.costs.forms import NoForm, form
from flockstep.costs.setting import Rates, Setting, StepCost
from flockstep.strategies.base import Strategy

__all__ = ["FAMILIES", "NoForm", "Rates", "Setting", "StepCost", "has_form", "step_cost"]

FAMILIES = families.ALL
"""The files that hold the forms."""


def step_cost(strategy: Strategy, setting: Setting) -> StepCost:
    """Seconds, bytes, staleness, utilisation and memory of a step.

    Raises:
        NoForm: this strategy has no closed form.
        ConfigurationError: it cannot run on so many workers.
    """
    strategy.check(setting.workers)
    cost = form(strategy, setting)
    if any(isinstance(part, Codec) and not part.exact_size for part in vars(strategy).values()):
        return replace(cost, notes=(*cost.notes, "bytes are the most that an encoding takes; the data decide"))
    return cost


def has_form(strategy: Strategy) -> bool:
    """Whether there is a form for strategies of this class; parts of them may still have none."""
    return form.dispatch(type(strategy)) is not form.dispatch(Strategy)
