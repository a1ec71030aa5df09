"""Where a strategy's form is found: by its class."""

from __future__ import annotations

from functools import singledispatch

from flockstep.costs.setting import Setting, StepCost
from flockstep.errors import ConfigurationError
from flockstep.expression import Component
from flockstep.strategies.base import Strategy


class NoForm(ConfigurationError):
    """A strategy, or a part of it, whose step has no closed form; a rehearsal in virtual time tells what it costs."""


def no_form(what: Component | str, why: str) -> NoForm:
    """The error that says so."""
    return NoForm(f"a step of {what} has no closed form: {why}; rehearse it in virtual time instead")


@singledispatch
def form(strategy: Strategy, setting: Setting) -> StepCost:
    """The cost of a step; each family's file adds its strategies.

    Raises:
        NoForm: there is none.
    """
    raise no_form(strategy, "its messages depend on more than sizes and times")
