"""Replicas tied to a centre. b = (m + header) / B, h = header / B.

Asynchronous: every τ steps a worker asks and is answered, 2L + h + b; what it gives back travels while it computes:
(τ T_c + 2L + h + b) / τ while the card is free. Synchronous: the centre's answer comes while the worker computes.
"""

from __future__ import annotations

from flockstep.costs import order_statistics, queues
from flockstep.costs.collecting import Collecting
from flockstep.costs.forms import form
from flockstep.costs.setting import Setting, StepCost, step
from flockstep.strategies.eamsgd import ElasticMomentum
from flockstep.strategies.easgd_sync import SynchronousElasticAveraging
from flockstep.strategies.elastic_averaging import ElasticAveraging


@form.register
def _(strategy: ElasticAveraging, setting: Setting) -> StepCost:
    period, n = strategy.period, setting.workers
    periods = queues.visits(setting, period, 0.0, setting.nbytes, setting.nbytes)
    seconds = sum(periods) / n / period
    notes = ["random times: from a recurrence over the arrivals at the server's card"]
    if order_statistics.certain(setting.compute):
        notes = []
    nbytes = n * setting.nbytes / period
    return step(
        setting,
        seconds + (1 + 2 / period) * setting.updating(setting.elements),
        setting.nbytes / period,
        2 / period,
        copies=3.0 if isinstance(strategy, ElasticMomentum) else 2.0,
        used=queues.rates(periods),
        servers=(nbytes, nbytes),
        notes=notes,
    )


@form.register
def _(strategy: SynchronousElasticAveraging, setting: Setting) -> StepCost:
    period, n, nbytes = strategy.period, setting.workers, float(setting.nbytes)
    serving = setting.reducing(n * setting.elements)
    turn = Collecting(setting, nbytes, nbytes, gradients=period, by_rank=True, serving=serving, ahead=True).round()
    notes = [] if order_statistics.certain(setting.compute) else ["messages of one exchange do not meet the next one's"]
    return step(
        setting,
        turn.seconds / period + setting.updating(setting.elements),
        nbytes / period,
        1 / period,
        copies=2.0,
        servers=(n * nbytes / period, n * nbytes / period),
        notes=notes,
    )
