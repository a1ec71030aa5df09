"""A step with servers: everyone's gradients at the server's card, and its answers.

With b = (m/k + header) / B for each of k shards, constant times T_c, and T_c not below what cards still have to do:
synchronous T_c + 2L + (n+k) b, since answers leave one after the other and so do the next gradients; asynchronous
max(T_c + 2L + (k+1) b, n b). Codecs make b smaller on the way up only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import singledispatch

from flockstep.costs import order_statistics, queues, staleness
from flockstep.costs.bounded import Bound, bounded
from flockstep.costs.collecting import Collecting
from flockstep.costs.forms import form, no_form
from flockstep.costs.setting import Setting, StepCost, step
from flockstep.strategies.access import Asks
from flockstep.strategies.consistency.asynchronous import Asynchronous
from flockstep.strategies.consistency.base import Consistency
from flockstep.strategies.consistency.bounded_delay import BoundedDelay
from flockstep.strategies.consistency.bulk_synchronous import BulkSynchronous
from flockstep.strategies.consistency.first_of import BackupWorkers, KBatchSync, KSync
from flockstep.strategies.consistency.k_async import KAsync, KBatchAsync
from flockstep.strategies.consistency.softsync import SoftSync
from flockstep.strategies.consistency.stale_synchronous import StaleSynchronous
from flockstep.strategies.downpour import Downpour
from flockstep.strategies.parameter_server import ParameterServer
from flockstep.strategies.sufficient_factors_server import FactorServer

QUEUE = "random times: waiting at the server's card is that of a queue with the same mean times"


@form.register
def _(strategy: ParameterServer, setting: Setting) -> StepCost:
    if strategy.filters:
        raise no_form(strategy, "what filters let through depends on the gradients")
    return waits(strategy.consistency, strategy, setting)


@form.register
def _(strategy: FactorServer, setting: Setting) -> StepCost:
    raise no_form(strategy, "which layers travel as factors depends on the model's layers")


@form.register
def _(strategy: Downpour, setting: Setting) -> StepCost:
    if strategy.filters:
        raise no_form(strategy, "what filters let through depends on the gradients")
    if strategy.n_push != strategy.n_fetch or strategy.shards > 1:
        raise no_form(strategy, "pushes and fetches that come at different steps, or to several shards, meet by chance")
    period, n, pushed = strategy.n_push, setting.workers, setting.encoded(strategy.codec)
    coding = setting.coding(strategy.codec, setting.elements) + setting.updating(setting.elements)
    periods = queues.visits(setting, period, pushed, setting.nbytes, 0.0, strategy.overlap)
    seconds = sum(periods) / n / period
    late = staleness.mean_staleness(n, 1) * (2 if strategy.overlap else 1)  # computed on what was fetched before
    return step(
        setting,
        seconds + setting.updating(setting.elements) + coding / period,
        pushed / period,
        1 / period,
        copies=2.0,
        used=queues.rates(periods),
        servers=(n * setting.nbytes / period, n * pushed / period),
        staleness=(late, None),
        notes=[] if order_statistics.certain(setting.compute) else ["random times: from a recurrence over arrivals"],
    )


@singledispatch
def waits(rule: Consistency, strategy: ParameterServer, setting: Setting) -> StepCost:
    """The cost of a step under that rule; rules without a form raise."""
    raise no_form(rule, "who waits depends on values, or on more than clocks")


@waits.register
def _(rule: BulkSynchronous, strategy: ParameterServer, setting: Setting) -> StepCost:
    return _synchronous(strategy, setting, setting.workers)


@waits.register
def _(rule: BackupWorkers, strategy: ParameterServer, setting: Setting) -> StepCost:
    return _synchronous(strategy, setting, rule.needed(setting.workers))


@waits.register
def _(rule: KSync, strategy: ParameterServer, setting: Setting) -> StepCost:
    return _synchronous(strategy, setting, rule.needed(setting.workers))


@waits.register
def _(rule: KBatchSync, strategy: ParameterServer, setting: Setting) -> StepCost:
    raise no_form(rule, "how many gradients a worker begins in a step is random")


@waits.register
def _(rule: Asynchronous, strategy: ParameterServer, setting: Setting) -> StepCost:
    return _free(strategy, setting, 1)


@waits.register
def _(rule: SoftSync, strategy: ParameterServer, setting: Setting) -> StepCost:
    return _free(strategy, setting, setting.workers // rule.n)


@waits.register
def _(rule: KAsync, strategy: ParameterServer, setting: Setting) -> StepCost:
    raise no_form(rule, "workers wait for their own gradient's step, which others bring about")


@waits.register
def _(rule: KBatchAsync, strategy: ParameterServer, setting: Setting) -> StepCost:
    return _free(strategy, setting, rule.k)


@waits.register
def _(rule: StaleSynchronous, strategy: ParameterServer, setting: Setting) -> StepCost:
    if not isinstance(rule.access, Asks):
        raise no_form(rule, "how often a worker asks, or is sent, a copy depends on the others' clocks")
    return _bounded(strategy, setting, Bound(rule.s, held=True), staleness.ssp_bound(setting.workers, rule.s))


@waits.register
def _(rule: BoundedDelay, strategy: ParameterServer, setting: Setting) -> StepCost:
    return _bounded(
        strategy, setting, Bound(rule.tau, held=False), staleness.bounded_delay_bound(setting.workers, rule.tau)
    )


def payloads(strategy: ParameterServer, setting: Setting) -> tuple[list[int], list[int]]:
    """Bytes that a worker pushes to each shard, and that each shard answers with."""
    parts = setting.parts(strategy.shards)
    pushed = [setting.encoded(strategy.codec, strategy.feedback, part) for part in parts]
    return pushed, [(part.stop - part.start) * setting.itemsize for part in parts]


def _work(strategy: ParameterServer, setting: Setting) -> tuple[float, float]:
    """Seconds that a gradient takes a worker to encode, and a shard to decode, which overlaps with nothing."""
    largest = max(part.stop - part.start for part in setting.parts(strategy.shards))
    encode = setting.coding(strategy.codec, setting.elements, 0.0)
    return encode, setting.coding(strategy.codec, largest) - setting.coding(strategy.codec, largest, 0.0)


def _kept(strategy: ParameterServer) -> float:
    """Copies of the model that a worker keeps besides: the message it gets, what feedback remembers."""
    return 1.0 + (1.0 if strategy.feedback.needs_contraction else 0.0)


def _synchronous(strategy: ParameterServer, setting: Setting, needed: int) -> StepCost:
    n = setting.workers
    pushed, pulled = payloads(strategy, setting)
    encode, decode = _work(strategy, setting)
    largest = max(part.stop - part.start for part in setting.parts(strategy.shards))
    serving = needed * decode + (needed - 1) * setting.reducing(largest) + setting.updating(largest)
    turn = Collecting(
        setting, max(pushed), max(pulled), shards=strategy.shards, needed=needed, serving=serving, extra=encode
    ).round()
    notes = ["gradients are decoded and added when all are there, not while they arrive"]
    if needed < n:
        notes.append("late gradients take no time on the server's card")
    cost = step(
        setting,
        turn.seconds,
        sum(pushed) * turn.pushing,
        strategy.shards * turn.pushing,
        copies=_kept(strategy),
        slots=0,
        used=needed / n,
        servers=(n * float(max(pulled)), n * max(pushed) * turn.pushing),
        staleness=(0.0, 0),
        notes=notes,
    )
    return replace(cost, utilisation=min(1.0, turn.computing / turn.seconds)) if needed < n and turn.seconds else cost


def _free(strategy: ParameterServer, setting: Setting, gradients: int) -> StepCost:
    """Nobody waits for anybody, but for the card."""
    pushed, pulled = payloads(strategy, setting)
    encode, decode = _work(strategy, setting)
    largest = max(part.stop - part.start for part in setting.parts(strategy.shards))
    up, down = setting.busy(max(pushed)), setting.busy(max(pulled))
    alone = encode + decode + setting.updating(largest) / gradients
    think = alone + 2 * setting.latency + (strategy.shards - 1) * up
    periods = queues.cycles(setting, think, up + down, max(up, down))
    late = staleness.mean_staleness(setting.workers, gradients)
    notes = [] if order_statistics.certain(setting.compute) else [QUEUE]
    return _asynchronous(strategy, setting, periods, (late, None), notes)


def _asynchronous(
    strategy: ParameterServer,
    setting: Setting,
    periods: list[float],
    late: tuple[float, int | None],
    notes: Sequence[str],
) -> StepCost:
    pushed, pulled = payloads(strategy, setting)
    n, seconds = setting.workers, sum(periods) / setting.workers
    return step(
        setting,
        seconds,
        float(sum(pushed)),
        float(strategy.shards),
        copies=_kept(strategy),
        slots=0,
        used=queues.rates(periods),
        servers=(n * float(max(pulled)), n * float(max(pushed))),
        staleness=late,
        notes=notes,
    )


def _bounded(strategy: ParameterServer, setting: Setting, bound: Bound, most: int) -> StepCost:
    """Workers wait for those that are more than the slack behind, and for the card."""
    if not bound.slack:
        return _synchronous(strategy, setting, setting.workers)
    pushed, pulled = payloads(strategy, setting)
    encode, decode = _work(strategy, setting)
    up, down = setting.busy(max(pushed)), setting.busy(max(pulled))
    seconds, late = bounded(setting, bound, up, down, encode + decode + (strategy.shards - 1) * up)
    notes = [] if strategy.shards == 1 else ["shards decide alike"]
    return _asynchronous(strategy, setting, [seconds] * setting.workers, (late, most), notes)
