"""Which hyper-parameters of a strategy and its parts are worth searching, and between which values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from flockstep.codecs.adaptive_threshold import AdaptiveThreshold
from flockstep.codecs.dct import Dct
from flockstep.codecs.dgc import Dgc
from flockstep.codecs.power import PowerSgd as PowerCodec
from flockstep.codecs.qsgd import Qsgd
from flockstep.codecs.random_subset import RandomK
from flockstep.codecs.threshold import Threshold
from flockstep.codecs.top import TopK
from flockstep.expression import Component, fields_of
from flockstep.strategies.codistillation import Codistillation
from flockstep.strategies.consistency.bounded_delay import BoundedDelay
from flockstep.strategies.consistency.cached_stale_synchronous import CachedStaleSynchronous
from flockstep.strategies.consistency.eager_stale_synchronous import EagerStaleSynchronous
from flockstep.strategies.consistency.first_of import BackupWorkers, KBatchSync, KSync
from flockstep.strategies.consistency.k_async import KAsync, KBatchAsync
from flockstep.strategies.consistency.softsync import SoftSync
from flockstep.strategies.consistency.stale_synchronous import StaleSynchronous
from flockstep.strategies.consistency.value_bound import ValueBound
from flockstep.strategies.deepspark import AdaptiveElasticAveraging
from flockstep.strategies.demo import Demo
from flockstep.strategies.downpour import Downpour
from flockstep.strategies.eamsgd import ElasticMomentum
from flockstep.strategies.easgd_sync import SynchronousElasticAveraging
from flockstep.strategies.elastic_averaging import ElasticAveraging
from flockstep.strategies.epoch_server import EpochServer
from flockstep.strategies.gossip import Gossip
from flockstep.strategies.gradient_coding import GradientCoding
from flockstep.strategies.gradient_push import GradientPush
from flockstep.strategies.hierarchical import Hierarchical
from flockstep.strategies.local_sgd import LocalSGD
from flockstep.strategies.majority_vote import MajorityVote
from flockstep.strategies.mpca import PenalisedAveraging
from flockstep.strategies.outer.adam import OuterAdam
from flockstep.strategies.outer.nesterov import Nesterov
from flockstep.strategies.overlap_local_sgd import OverlapLocalSGD
from flockstep.strategies.partial_broadcast import PartialBroadcast
from flockstep.strategies.periods.adaptive import Adaptive
from flockstep.strategies.periods.fixed import Fixed
from flockstep.strategies.periods.post_local import PostLocal
from flockstep.strategies.power_sgd import PowerSgd
from flockstep.strategies.rules.negative_momentum import NegativeMomentum
from flockstep.strategies.sparta import Sparta
from flockstep.strategies.streaming_diloco import StreamingDiloco
from flockstep.strategies.tree_easgd import TreeElasticAveraging

C = TypeVar("C", bound=Component)
WORKERS = math.inf
"""As an upper end: the number of workers."""
FACTOR = 8.0
"""Learning rates are looked for between the job's own over this and times this."""


@dataclass(frozen=True)
class Range:
    """A hyper-parameter by the name of its field, and the values to look at, both ends included."""

    name: str
    low: float
    high: float
    whole: bool = True
    log: bool = True


PERIOD = Range("period", 1, 128)
ALPHA = Range("alpha", 0.005, 0.5, whole=False)
MOMENTUM = Range("momentum", 0.0, 0.95, whole=False, log=False)
STALENESS = Range("s", 0, 16, log=False)
RATIO = Range("ratio", 0.001, 0.25, whole=False)
OF_K = Range("k", 1, WORKERS, log=False)
RANK = Range("rank", 1, 8)

RANGES: Mapping[type[Component], tuple[Range, ...]] = {
    LocalSGD: (PERIOD,),
    Fixed: (PERIOD,),
    PostLocal: (PERIOD,),
    Adaptive: (Range("first", 2, 128),),
    OverlapLocalSGD: (PERIOD, Range("alpha", 0.1, 1.0, whole=False, log=False)),
    StreamingDiloco: (Range("period", 8, 256), Range("alpha", 0.1, 1.0, whole=False, log=False)),
    Sparta: (Range("p", 0.001, 0.3, whole=False),),
    ElasticAveraging: (PERIOD, ALPHA),
    SynchronousElasticAveraging: (PERIOD, ALPHA),
    ElasticMomentum: (PERIOD, ALPHA, MOMENTUM),
    AdaptiveElasticAveraging: (PERIOD, Range("alpha", 0.02, 0.5, whole=False)),
    TreeElasticAveraging: (Range("up", 1, 64), Range("down", 1, 64)),
    PenalisedAveraging: (Range("rho", 0.05, 5.0, whole=False),),
    Gossip: (Range("p", 0.01, 1.0, whole=False),),
    GradientPush: (Range("tau", 0, 4, log=False),),
    Codistillation: (PERIOD, Range("weight", 0.1, 4.0, whole=False)),
    GradientCoding: (Range("s", 1, WORKERS, log=False),),
    PartialBroadcast: (Range("share", 0.05, 1.0, whole=False),),
    EpochServer: (Range("share", 0.25, 1.0, whole=False, log=False), Range("length", 2, 64)),
    Downpour: (Range("n_push", 1, 32), Range("n_fetch", 1, 32)),
    PowerSgd: (RANK,),
    Demo: (Range("k", 1, 64),),
    MajorityVote: (MOMENTUM,),
    Hierarchical: (Range("group", 2, WORKERS),),
    StaleSynchronous: (STALENESS,),
    CachedStaleSynchronous: (STALENESS,),
    EagerStaleSynchronous: (STALENESS,),
    BoundedDelay: (Range("tau", 0, 16, log=False),),
    ValueBound: (Range("delta", 0.01, 1.0, whole=False),),
    BackupWorkers: (Range("b", 0, WORKERS, log=False),),
    KSync: (OF_K,),
    KBatchSync: (OF_K,),
    KAsync: (OF_K,),
    KBatchAsync: (OF_K,),
    SoftSync: (Range("n", 1, WORKERS),),
    Qsgd: (Range("levels", 1, 64),),
    TopK: (RATIO,),
    RandomK: (RATIO,),
    AdaptiveThreshold: (RATIO,),
    Dgc: (RATIO,),
    Threshold: (Range("t", 1e-5, 0.1, whole=False),),
    PowerCodec: (RANK,),
    Dct: (Range("k", 1, 64),),
    Nesterov: (Range("lr", 0.1, 1.5, whole=False), MOMENTUM),
    OuterAdam: (Range("lr", 0.01, 1.0, whole=False),),
    NegativeMomentum: (Range("momentum", -0.9, 0.0, whole=False, log=False),),
}
"""What is searched; a component that is not here is left as it is written, and so is a field that holds no number."""


@dataclass(frozen=True)
class Knob:
    """A hyper-parameter of one strategy: where it is, what it is now, between which values it is looked for."""

    path: tuple[str, ...]
    value: float
    low: float
    high: float
    whole: bool
    log: bool

    @property
    def name(self) -> str:
        """As in `consistency.s`."""
        return ".".join(self.path)


def knobs(part: Component, workers: int, path: tuple[str, ...] = ()) -> Iterator[Knob]:
    """Those of a component and of its parts, of the outermost first; ranges are widened to hold what is written."""
    for one in RANGES.get(type(part), ()):
        value = getattr(part, one.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        high = workers if one.high == WORKERS else one.high
        ends = min(one.low, value), max(high, value)
        yield Knob((*path, one.name), value, *ends, one.whole, one.log and ends[0] > 0)
    for name in fields_of(type(part)):
        value = getattr(part, name)
        if isinstance(value, Component):
            yield from knobs(value, workers, (*path, name))


def learning_rate(lr: float) -> Knob:
    """That of the job's optimiser."""
    return Knob(("lr",), lr, lr / FACTOR, lr * FACTOR, whole=False, log=True)


def changed(part: C, path: tuple[str, ...], value: Any) -> C:
    """The component with another value at `path`.

    Raises:
        ConfigurationError: the value is not allowed there.
    """
    name, *rest = path
    inner = changed(getattr(part, name), tuple(rest), value) if rest else value
    return dataclasses.replace(part, **{name: inner})  # type: ignore[type-var]
