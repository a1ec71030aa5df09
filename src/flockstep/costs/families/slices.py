"""Workers that serve a slice each: gradients are scattered, slices gathered.

With b = (m/n + header) / B, constant times and pieces of one size: T_c + 2 (L + (n-1) b) where everyone begins with
another receiver. What is gathered goes to all in order of rank, so that the first ones' cards are asked for first.
"""

from __future__ import annotations

import numpy as np

from flockstep.codecs.base import Codec
from flockstep.costs import order_statistics, rounds
from flockstep.costs.forms import form
from flockstep.costs.setting import Setting, StepCost, step
from flockstep.feedback.base import Feedback
from flockstep.strategies.majority_vote import MajorityVote
from flockstep.strategies.scatter_reduce import ScatterReduce
from flockstep.strategies.two_way import TwoWay


def scattered(setting: Setting, up: float, down: float, extra: float) -> float:
    """Seconds of a step whose pieces have these payloads; `extra`: work that overlaps with nothing."""
    n = setting.workers
    if n == 1:
        return setting.mean_compute + extra
    cards, there, back = rounds.Cards(setting), rounds.rotated(n), rounds.ascending(n)
    longest: list[float] = []

    def turn(workers: rounds.Workers) -> None:
        done = workers.compute()
        longest.append(float((done - workers.at).max()))
        reduced = np.maximum(done, cards.exchange(done, there, setting.busy(up))) + extra
        workers.at = np.maximum(reduced, cards.exchange(reduced, back, setting.busy(down)))

    found = rounds.settled(setting, turn, width=n)
    return found + rounds.bias(setting, n, 1, longest)


def _cost(setting: Setting, up: list[int], down: list[int], extra: float, copies: float, slots: float) -> StepCost:
    """Worker i sends slice j's piece to worker j, and its own slice to everyone."""
    n = setting.workers
    sent = (n - 1) / n * float(sum(up) + sum(down))
    uneven = max(up) != min(up) or max(down) != min(down)
    notes = ["pieces are taken to be all of the largest one's size"] if uneven else []
    seconds = scattered(setting, float(max(up)), float(max(down)), extra)
    if not order_statistics.certain(setting.compute):
        notes.append("random times: messages of one step do not meet those of another")
    return step(setting, seconds, sent, 2.0 * (n - 1), copies=copies, slots=slots, staleness=(0.0, 0), notes=notes)


def _encoded(setting: Setting, codec: Codec, feedback: Feedback) -> list[int]:
    return [setting.encoded(codec, feedback, part) for part in setting.parts(setting.workers)]


def _plain(setting: Setting) -> list[int]:
    return [(part.stop - part.start) * setting.itemsize for part in setting.parts(setting.workers)]


@form.register
def _(strategy: ScatterReduce, setting: Setting) -> StepCost:
    n, slice_size = setting.workers, setting.elements / setting.workers
    extra = setting.coding(strategy.codec, setting.elements) + setting.updating(slice_size)
    extra += setting.reducing((n - 1) * slice_size)
    kept = 1.0 if strategy.feedback.needs_contraction else 0.0
    up = _encoded(setting, strategy.codec, strategy.feedback)
    return _cost(setting, up, _plain(setting), extra, 1.0 + kept, setting.slots / n)


@form.register
def _(strategy: TwoWay, setting: Setting) -> StepCost:
    n = setting.workers
    codes = _encoded(setting, strategy.codec, strategy.feedback)
    extra = setting.coding(strategy.codec, (1 + 1 / n) * setting.elements, 2.0) + setting.updating(setting.elements)
    kept = 1 + 1 / n if strategy.feedback.needs_contraction else 0.0
    return _cost(setting, codes, codes, extra, 1.0 + kept, setting.slots)


@form.register
def _(strategy: MajorityVote, setting: Setting) -> StepCost:
    votes = [(part.stop - part.start + 7) // 8 for part in setting.parts(setting.workers)]
    extra = setting.updating(setting.elements)
    return _cost(setting, votes, votes, extra, 1.0 + bool(strategy.momentum), setting.slots)
