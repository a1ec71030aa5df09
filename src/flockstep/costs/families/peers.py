"""Peers that tell others and wait for nobody: a step takes as long as its gradient, whatever the network.

Messages that links cannot carry in that time queue without bound; the notes say so.
"""

from __future__ import annotations

from flockstep.costs import queues
from flockstep.costs.forms import form
from flockstep.costs.setting import Setting, StepCost, step
from flockstep.strategies.broadcast import Broadcast
from flockstep.strategies.ensemble import Ensemble
from flockstep.strategies.gossip import Gossip
from flockstep.strategies.partial_broadcast import PartialBroadcast


def _free(setting: Setting, models: float, copies: float, acknowledgements: float = 0.0) -> StepCost:
    """Every step a worker sends so many models, and so many messages without one, in the mean."""
    times = queues.computing(setting)
    seconds = sum(times) / len(times)
    busy = models * setting.busy(setting.nbytes) + acknowledgements * setting.busy(0)
    notes = ["an update takes effect when it arrives, however late that is"] if models else []
    if busy > seconds:
        notes.append(
            f"the links are asked for {busy / seconds:.3g} times what they carry: messages queue without bound, and "
            "updates are ever later"
            if seconds
            else "gradients take no time: messages queue without bound"
        )
    return step(
        setting,
        seconds + setting.updating(setting.elements),
        models * setting.nbytes,
        models + acknowledgements,
        copies=copies,
        used=queues.rates(times),
        notes=notes,
    )


@form.register
def _(strategy: Ensemble, setting: Setting) -> StepCost:
    return _free(setting, 0.0, 0.0)


@form.register
def _(strategy: Gossip, setting: Setting) -> StepCost:
    sends = strategy.p if setting.workers > 1 else 0.0
    return _free(setting, sends, 1.0 + strategy.acknowledged, sends * strategy.acknowledged)


@form.register
def _(strategy: Broadcast, setting: Setting) -> StepCost:
    return _free(setting, setting.workers - 1.0, 4.0)


@form.register
def _(strategy: PartialBroadcast, setting: Setting) -> StepCost:
    owed = setting.workers * 8 / setting.itemsize if strategy.rest == "defer" else 0.0
    return _free(setting, strategy.share * (setting.workers - 1.0), 4.0 + owed)
