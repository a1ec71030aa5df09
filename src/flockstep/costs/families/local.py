"""Local steps and meetings: (E max of τ gradients + T_comm) / τ; in the background, the longer of the two.

Constant times: T_c + T_comm/τ, a utilisation of τ T_c / (τ T_c + T_comm).
"""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch

import numpy as np

from flockstep.costs import order_statistics, rounds
from flockstep.costs.chains import chain_of, met
from flockstep.costs.families.collective import messages_of, notes_of, seconds_of, sent_by, summing
from flockstep.costs.forms import form, no_form
from flockstep.costs.setting import Setting, StepCost, step
from flockstep.strategies.local_sgd import LocalSGD
from flockstep.strategies.outer.adam import OuterAdam
from flockstep.strategies.outer.average import Average
from flockstep.strategies.outer.base import Outer
from flockstep.strategies.overlap_local_sgd import OverlapLocalSGD
from flockstep.strategies.periods.base import Period
from flockstep.strategies.periods.fixed import Fixed
from flockstep.strategies.periods.post_local import PostLocal
from flockstep.strategies.periods.scheduled import Scheduled
from flockstep.strategies.streaming_diloco import StreamingDiloco


@singledispatch
def period_of(rhythm: Period) -> int:
    """Local steps between two meetings, in the long run."""
    raise no_form(rhythm, "when workers meet depends on the loss")


@period_of.register
def _(rhythm: Fixed) -> int:
    return rhythm.period


@period_of.register
def _(rhythm: PostLocal) -> int:
    return rhythm.period


@period_of.register
def _(rhythm: Scheduled) -> int:
    return rhythm.periods[-1]


@singledispatch
def outer_copies(outer: Outer) -> float:
    """Copies of the model that an outer optimiser keeps: what replicas began from, and a momentum."""
    return 2.0


@outer_copies.register
def _(outer: Average) -> float:
    return 0.0


@outer_copies.register
def _(outer: OuterAdam) -> float:
    return 3.0


@form.register
def _(strategy: LocalSGD, setting: Setting) -> StepCost:
    period, n = period_of(strategy.rhythm), setting.workers
    moving = seconds_of(strategy.collective, setting, setting.nbytes)
    chain = chain_of(strategy.collective, n, setting.nbytes) if n > 1 else None
    meeting = met(setting, moving + period * setting.updating(setting.elements), chain, period)
    messages = messages_of(strategy.collective, n, setting.nbytes)
    notes = notes_of(setting, chain)
    if not isinstance(strategy.rhythm, Fixed):
        notes.append(f"in the long run, when workers meet every {period} steps; before, they meet more often")
    return step(
        setting,
        meeting / period,
        sent_by(strategy.collective, setting, setting.elements) * setting.itemsize / period,
        None if messages is None else messages / period,
        copies=outer_copies(strategy.outer) + 1 / n,
        staleness=(0.0, 0),
        notes=notes,
    )


@form.register
def _(strategy: OverlapLocalSGD, setting: Setting) -> StepCost:
    period, n = strategy.period, setting.workers
    moving = seconds_of(strategy.collective, setting, setting.nbytes)
    behind: list[np.ndarray] = []

    def turn(workers: rounds.Workers) -> None:
        at = workers.compute(period)
        if behind:  # the mean that was begun at the last meeting
            at = np.maximum(at, behind[-1].max() + moving)
        behind.append(at)
        workers.at = at

    messages = messages_of(strategy.collective, n, setting.nbytes)
    certain = order_statistics.certain(setting.compute)
    return step(
        setting,
        rounds.settled(setting, turn, period) / period + setting.updating(setting.elements),
        sent_by(strategy.collective, setting, setting.elements) * setting.itemsize / period,
        None if messages is None else messages / period,
        copies=3.0 if strategy.beta else 2.0,
        staleness=(None, None),
        notes=[] if certain else ["random times: as if the collective began when the last worker is there"],
    )


@form.register
def _(strategy: StreamingDiloco, setting: Setting) -> StepCost:
    period, overlap = strategy.period, strategy.overlap
    parts = setting.parts(strategy.fragments)
    moved = [_fragment(strategy, setting, part) for part in parts]
    due = [(strategy.offset(i) or period, i) for i in range(strategy.fragments)]
    begun: dict[int, float] = {}

    def turn(workers: rounds.Workers) -> None:
        for number in range(1, period + 1):
            at = workers.compute()
            for when, i in due:
                merged = (when + overlap - 1) % period + 1
                if overlap and number == merged and i in begun:
                    at = np.maximum(at, begun.pop(i))
                if number == when:
                    begun[i] = float(at.max()) + moved[i][0]
                    if not overlap:
                        at = np.maximum(at, begun.pop(i))
            workers.at = at

    seconds = rounds.settled(setting, turn, period, width=period) / period
    counts = [messages for _, _, messages in moved]
    feedback = 1.0 if strategy.feedback.needs_contraction else 0.0
    notes = ["fragments that travel at the same time do not slow each other down"]
    if not order_statistics.certain(setting.compute):
        notes.append("random times: as if the collective began when the last worker is there")
    return step(
        setting,
        seconds + setting.updating(setting.elements),
        sum(sent for _, sent, _ in moved) / period,
        None if None in counts else sum(count or 0.0 for count in counts) / period,
        copies=outer_copies(strategy.outer) + 1.0 + feedback,
        notes=notes,
    )


def _fragment(strategy: StreamingDiloco, setting: Setting, part: slice) -> tuple[float, float, float | None]:
    """Seconds, bytes and messages of a fragment's mean."""
    shapes = setting.shapes(part)
    smaller = replace(setting, elements=part.stop - part.start, tensors=shapes)
    seconds, sent, messages, _ = summing(strategy.collective, strategy.codec, strategy.feedback, smaller)
    return seconds, sent, messages
