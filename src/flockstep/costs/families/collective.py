"""A step in which everyone takes part in a collective: E max of n gradients + the collective's cost.

With random times that is the most that it takes: see `flockstep.costs.chains`, which tells how much less it is.
"""

from __future__ import annotations

from functools import singledispatch

from flockstep.codecs.base import Codec
from flockstep.codecs.identity import Identity
from flockstep.codecs.low_rank import LowRank
from flockstep.collectives.auto import Auto
from flockstep.collectives.base import Collective
from flockstep.collectives.binomial_tree import BinomialTree
from flockstep.collectives.rabenseifner import Rabenseifner
from flockstep.collectives.recursive_doubling import RecursiveDoubling
from flockstep.collectives.ring import Ring
from flockstep.collectives.sparse import Sparse
from flockstep.costs import order_statistics
from flockstep.costs.chains import Chain, chain_of, gathering, interleaved, known, met
from flockstep.costs.forms import form, no_form
from flockstep.costs.setting import Setting, StepCost, step
from flockstep.errors import ConfigurationError
from flockstep.feedback.base import Feedback
from flockstep.feedback.nothing import NoFeedback
from flockstep.strategies.all_reduce import AllReduce
from flockstep.strategies.bucketed import Bucketed, buckets
from flockstep.strategies.power_sgd import PowerSgd


def seconds_of(collective: Collective, setting: Setting, nbytes: float) -> float:
    """What its all-reduce of so many bytes takes once everyone is there.

    Raises:
        NoForm: it has no cost model.
    """
    if setting.workers == 1:
        return 0.0
    try:
        moving = collective.cost(setting.workers, nbytes, setting.link)
    except (NotImplementedError, ConfigurationError) as error:
        raise no_form(collective, str(error)) from error
    return moving + setting.reducing(nbytes / setting.itemsize * (setting.workers - 1) / setting.workers)


def sent_by(collective: Collective, setting: Setting, elements: int) -> float:
    """Elements that a worker sends, in the mean, for an all-reduce of so many."""
    n = setting.workers
    if n == 1 or isinstance(collective, Ring):
        return 2 * (n - 1) * elements / n
    try:
        return sum(collective.sent_elements(n, elements, rank) for rank in range(n)) / n
    except NotImplementedError as error:
        raise no_form(collective, str(error)) from error


@singledispatch
def messages_of(collective: Collective, workers: int, nbytes: float) -> float | None:
    """Messages that a worker sends for an all-reduce, in the mean; None where that is not known here."""
    return None


@messages_of.register
def _(collective: Ring, workers: int, nbytes: float) -> float | None:
    return 2.0 * (workers - 1)


@messages_of.register
def _(collective: BinomialTree, workers: int, nbytes: float) -> float | None:
    return 2.0 * (workers - 1) / workers


@messages_of.register
def _(collective: RecursiveDoubling, workers: int, nbytes: float) -> float | None:
    return _with_folds(workers, 1)


@messages_of.register
def _(collective: Rabenseifner, workers: int, nbytes: float) -> float | None:
    return _with_folds(workers, 2)


@messages_of.register
def _(collective: Auto, workers: int, nbytes: float) -> float | None:
    return messages_of(collective.choose(workers, round(nbytes)), workers, nbytes)


def _with_folds(workers: int, each: int) -> float:
    power = 1 << (workers.bit_length() - 1)
    return (power * each * (power.bit_length() - 1) + 2 * (workers - power)) / workers


def notes_of(setting: Setting, chain: Chain | None) -> list[str]:
    """What is left out of a meeting."""
    return [] if known(setting, chain) else ["as if the collective began when the last worker is there: at the most"]


@form.register
def _(strategy: AllReduce, setting: Setting) -> StepCost:
    moving, sent, messages, chain = summing(strategy.collective, strategy.codec, strategy.feedback, setting)
    feedback = 1.0 if strategy.feedback.needs_contraction else 0.0
    notes = notes_of(setting, chain)
    if strategy.codec.linear and not isinstance(strategy.codec, Identity):
        notes.append("all bytes of an encoding are taken to be terms of the sum, of which a seed is none")
    return step(
        setting,
        met(setting, moving + setting.updating(setting.elements), chain),
        sent,
        messages,
        copies=feedback + _buffers(strategy.codec, setting),
        staleness=(0.0, 0),
        notes=notes,
    )


def _buffers(codec: Codec, setting: Setting) -> float:
    """Copies of the model that messages take: a piece of a sum, or everyone's encodings."""
    if codec.linear:
        return 1.0 / setting.workers
    return setting.workers * setting.encoded(codec) / setting.nbytes


def summing(
    collective: Collective, codec: Codec, feedback: Feedback, setting: Setting
) -> tuple[float, float, float | None, Chain | None]:
    """Seconds, bytes, messages and rounds of the sum of everyone's encodings of the model."""
    n = setting.workers
    if isinstance(codec, Identity) and isinstance(feedback, NoFeedback):
        sent = sent_by(collective, setting, setting.elements) * setting.itemsize
        chain = chain_of(collective, n, setting.nbytes)
        return seconds_of(collective, setting, setting.nbytes), sent, messages_of(collective, n, setting.nbytes), chain
    if isinstance(collective, Sparse):
        raise no_form(collective, "how sums of sparse encodings fill in depends on the gradients")
    nbytes = setting.encoded(codec, feedback)
    if codec.linear:
        coding = setting.coding(codec, setting.elements)
        sent = sent_by(collective, setting, max(1, nbytes // setting.itemsize)) * setting.itemsize
        chain = chain_of(collective, n, nbytes)
        return coding + seconds_of(collective, setting, nbytes), sent, messages_of(collective, n, nbytes), chain
    coding = setting.coding(codec, setting.elements, n)
    chain = gathering(collective, n, nbytes)
    seconds = sum(setting.message(payload) for _, payload in chain)
    return coding + seconds, float((n - 1) * nbytes), float(len(chain)), chain


@form.register
def _(strategy: Bucketed, setting: Setting) -> StepCost:
    parts = buckets(setting.elements, setting.itemsize, strategy)
    slowest = order_statistics.slowest(setting.compute, setting.workers, strategy.accumulate)
    last = slowest / strategy.accumulate
    ready, counts, busy = list[float](), list[int](), list[float]()
    sent, messages = 0.0, list[float | None]()
    for part in parts:
        nbytes = (part.stop - part.start) * setting.itemsize
        share = setting.forward + (1 - setting.forward) * (1 - part.start / setting.elements)
        ready.append(slowest - (1 - share) * last if part.start else slowest)
        counts.append(strategy.collective.rounds(setting.workers) if setting.workers > 1 else 0)
        takes = seconds_of(strategy.collective, setting, nbytes)
        busy.append(takes / counts[-1] - setting.latency if counts[-1] else 0.0)
        sent += sent_by(strategy.collective, setting, part.stop - part.start) * setting.itemsize
        messages.append(messages_of(strategy.collective, setting.workers, nbytes))
    end = interleaved(ready, counts, busy, setting.latency)
    known_counts = [count for count in messages if count is not None]
    notes = notes_of(setting, None)
    if not isinstance(strategy.collective, Ring):
        notes.append("the rounds of a collective are taken to be of one size")
    return step(
        setting,
        (end + setting.updating(setting.elements)) / strategy.accumulate,
        sent / strategy.accumulate,
        sum(known_counts) / strategy.accumulate if len(known_counts) == len(messages) else None,
        copies=1.0 + (1.0 if strategy.accumulate > 1 else 0.0),
        staleness=(0.0, 0),
        notes=notes,
    )


@form.register
def _(strategy: PowerSgd, setting: Setting) -> StepCost:
    layout = LowRank(setting.shapes(), strategy.rank)
    rows = sum(part.stop - part.start for part in layout.lefts)
    columns = sum(part.stop - part.start for part in layout.rights)
    sizes = [rows + layout.dense_size, *([columns] if layout.matrices else [])]
    width = max(4, setting.itemsize)
    collective, n = strategy.collective, setting.workers
    moving = sum(seconds_of(collective, setting, size * width) for size in sizes)
    counts = [messages_of(collective, n, size * width) for size in sizes]
    rounds = [chain_of(collective, n, size * width) for size in sizes]
    chain = tuple(one for part in rounds if part for one in part) if all(rounds) else None
    return step(
        setting,
        met(setting, moving + setting.updating(setting.elements), chain),
        sum(sent_by(collective, setting, size) for size in sizes) * width,
        None if None in counts else sum(count or 0.0 for count in counts),
        copies=(0.0 if isinstance(strategy.feedback, NoFeedback) else 1.0) + 2 * sum(sizes) / setting.elements,
        staleness=(0.0, 0),
        notes=[*notes_of(setting, chain), "matrix products and orthonormalising take no time"],
    )
