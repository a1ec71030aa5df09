"""Gradient coding: everyone computes s + 1 gradients a step, and the first n - s workers make it.

Constant times: (s+1) T_c + 2L + (n - s + 1) b, where stragglers' gradients come in behind.
"""

from __future__ import annotations

from dataclasses import replace

from flockstep.costs.collecting import Collecting
from flockstep.costs.forms import form
from flockstep.costs.setting import Setting, StepCost, step
from flockstep.strategies.gradient_coding import GradientCoding


@form.register
def _(strategy: GradientCoding, setting: Setting) -> StepCost:
    n, s, nbytes = setting.workers, min(strategy.s, setting.workers - 1), float(setting.nbytes)
    serving = setting.reducing((n - s) * setting.elements) + setting.updating(setting.elements)
    turn = Collecting(
        setting,
        nbytes,
        nbytes,
        needed=n - s,
        gradients=s + 1,
        by_rank=True,
        serving=serving,
        extra=setting.reducing((s + 1) * setting.elements),
    ).round()
    cost = step(
        setting,
        turn.seconds,
        nbytes * turn.pushing,
        turn.pushing,
        copies=2.0,
        slots=0,
        computes=s + 1.0,
        servers=(n * nbytes, n * nbytes * turn.pushing),
        staleness=(0.0, 0),
        notes=["late workers' messages take no time on the server's card"] if s else [],
    )
    return replace(cost, utilisation=min(1.0, turn.computing / turn.seconds)) if turn.seconds else cost
