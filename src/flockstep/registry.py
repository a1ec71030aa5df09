"""The registry of components: a table of nouns, names and implementations, with one line for each component. A
component is imported when it is first needed.

Command-line choices, documentation tables and conformance tests are all generated from this table.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import keyword
import sys
from typing import Any

from flockstep.errors import ConfigurationError, UnknownName

_TABLE: dict[str, dict[str, str]] = {
    "strategy": {
        "all_reduce": "flockstep.strategies.all_reduce:AllReduce",
        "ps": "flockstep.strategies.parameter_server:ParameterServer",
        "local_sgd": "flockstep.strategies.local_sgd:LocalSGD",
        "overlap_local_sgd": "flockstep.strategies.overlap_local_sgd:OverlapLocalSGD",
        "streaming_diloco": "flockstep.strategies.streaming_diloco:StreamingDiloco",
        "noloco": "flockstep.strategies.noloco:NoLoCo",
        "sparta": "flockstep.strategies.sparta:Sparta",
        "easgd": "flockstep.strategies.elastic_averaging:ElasticAveraging",
        "easgd_sync": "flockstep.strategies.easgd_sync:SynchronousElasticAveraging",
        "eamsgd": "flockstep.strategies.eamsgd:ElasticMomentum",
        "tree_easgd": "flockstep.strategies.tree_easgd:TreeElasticAveraging",
        "deepspark": "flockstep.strategies.deepspark:AdaptiveElasticAveraging",
        "mpca": "flockstep.strategies.mpca:PenalizedAveraging",
        "gossip": "flockstep.strategies.gossip:Gossip",
        "dpsgd": "flockstep.strategies.neighbor_averaging:NeighborAveraging",
        "adpsgd": "flockstep.strategies.pairwise:PairwiseAveraging",
        "sgp": "flockstep.strategies.gradient_push:GradientPush",
        "broadcast": "flockstep.strategies.broadcast:Broadcast",
        "codistillation": "flockstep.strategies.codistillation:Codistillation",
        "sandblaster": "flockstep.strategies.sandblaster:Sandblaster",
        "tree_server": "flockstep.strategies.tree_server:TreeServer",
        "bucketed": "flockstep.strategies.bucketed:Bucketed",
        "fused": "flockstep.strategies.fused:Fused",
        "ensemble": "flockstep.strategies.ensemble:Ensemble",
        "hogwild": "flockstep.strategies.hogwild:Hogwild",
        "gradient_coding": "flockstep.strategies.gradient_coding:GradientCoding",
        "partial": "flockstep.strategies.partial_broadcast:PartialBroadcast",
        "epoch_server": "flockstep.strategies.epoch_server:EpochServer",
        "downpour": "flockstep.strategies.downpour:Downpour",
        "powersgd": "flockstep.strategies.power_sgd:PowerSgd",
        "decoupled_momentum": "flockstep.strategies.decoupled_momentum:DecoupledMomentum",
        "majority_vote": "flockstep.strategies.majority_vote:MajorityVote",
        "two_way": "flockstep.strategies.two_way:TwoWay",
        "scatter_reduce": "flockstep.strategies.scatter_reduce:ScatterReduce",
        "slice_servers": "flockstep.strategies.slice_servers:SliceServers",
        "hierarchical": "flockstep.strategies.hierarchical:Hierarchical",
        "sufficient_factors": "flockstep.strategies.sufficient_factors:SufficientFactors",
        "factor_server": "flockstep.strategies.sufficient_factors_server:FactorServer",
        "federated": "flockstep.strategies.federated:Federated",
        "fedbuff": "flockstep.strategies.fedbuff:FedBuff",
        "fedasync": "flockstep.strategies.fedasync:FedAsync",
    },
    "client_sampling": {
        "uniform": "flockstep.strategies.client_samplings.uniform:Uniform",
        "proportional": "flockstep.strategies.client_samplings.proportional:Proportional",
        "power_of_choice": "flockstep.strategies.client_samplings.power_of_choice:PowerOfChoice",
        "oort": "flockstep.strategies.client_samplings.oort:Oort",
        "poisson": "flockstep.strategies.client_samplings.poisson:Poisson",
    },
    "privacy": {
        "exposed": "flockstep.strategies.privacy.exposed:Exposed",
        "dp": "flockstep.strategies.privacy.dp:DifferentialPrivacy",
    },
    "drift": {
        "uncorrected": "flockstep.strategies.drifts.uncorrected:Uncorrected",
        "prox": "flockstep.strategies.drifts.prox:Prox",
        "scaffold": "flockstep.strategies.drifts.scaffold:Scaffold",
        "nova": "flockstep.strategies.drifts.nova:Nova",
        "dyn": "flockstep.strategies.drifts.dyn:Dyn",
    },
    "consistency": {
        "bsp": "flockstep.strategies.consistency.bulk_synchronous:BulkSynchronous",
        "ssp": "flockstep.strategies.consistency.stale_synchronous:StaleSynchronous",
        "cached_ssp": "flockstep.strategies.consistency.stale_synchronous:CachedStaleSynchronous",
        "essp": "flockstep.strategies.consistency.stale_synchronous:EagerStaleSynchronous",
        "bounded_delay": "flockstep.strategies.consistency.bounded_delay:BoundedDelay",
        "value_bound": "flockstep.strategies.consistency.value_bound:ValueBound",
        "backup": "flockstep.strategies.consistency.first_of:BackupWorkers",
        "k_sync": "flockstep.strategies.consistency.first_of:KSync",
        "k_batch_sync": "flockstep.strategies.consistency.first_of:KBatchSync",
        "k_async": "flockstep.strategies.consistency.k_async:KAsync",
        "k_batch_async": "flockstep.strategies.consistency.k_async:KBatchAsync",
        "softsync": "flockstep.strategies.consistency.softsync:SoftSync",
        "asynchronous": "flockstep.strategies.consistency.asynchronous:Asynchronous",
    },
    "server_update": {
        "plain": "flockstep.strategies.server_updates.plain:Plain",
        "staleness_scaled": "flockstep.strategies.server_updates.staleness_scaled:StalenessScaled",
        "delay_compensated": "flockstep.strategies.server_updates.delay_compensated:DelayCompensated",
        "momentum_corrected": "flockstep.strategies.server_updates.momentum_corrected:MomentumCorrected",
        "negative_momentum": "flockstep.strategies.server_updates.negative_momentum:NegativeMomentum",
        "with_optimizer": "flockstep.strategies.server_updates.with_optimizer:WithOptimizer",
        "proximal": "flockstep.strategies.server_updates.proximal:Proximal",
    },
    "aggregation": {
        "mean": "flockstep.strategies.aggregations.mean:Mean",
        "median": "flockstep.strategies.aggregations.median:Median",
        "trimmed_mean": "flockstep.strategies.aggregations.trimmed_mean:TrimmedMean",
        "krum": "flockstep.strategies.aggregations.krum:Krum",
        "multi_krum": "flockstep.strategies.aggregations.multi_krum:MultiKrum",
        "geometric_median": "flockstep.strategies.aggregations.geometric_median:GeometricMedian",
        "centered_clipping": "flockstep.strategies.aggregations.centered_clipping:CenteredClipping",
    },
    "outer_optimizer": {
        "average": "flockstep.strategies.outer_optimizers.average:Average",
        "nesterov": "flockstep.strategies.outer_optimizers.nesterov:Nesterov",
        "adam": "flockstep.strategies.outer_optimizers.adam:OuterAdam",
        "yogi": "flockstep.strategies.outer_optimizers.adam:OuterYogi",
        "adagrad": "flockstep.strategies.outer_optimizers.adam:OuterAdagrad",
        "bmuf": "flockstep.strategies.outer_optimizers.bmuf:Bmuf",
        "slowmo": "flockstep.strategies.outer_optimizers.slowmo:SlowMo",
    },
    "synchronization_schedule": {
        "fixed": "flockstep.strategies.synchronization_schedules.fixed:Fixed",
        "post_local": "flockstep.strategies.synchronization_schedules.post_local:PostLocal",
        "scheduled": "flockstep.strategies.synchronization_schedules.scheduled:Scheduled",
        "adaptive": "flockstep.strategies.synchronization_schedules.adaptive:Adaptive",
    },
    "selector": {
        "random": "flockstep.strategies.selectors.random:RandomSelector",
        "shuffled": "flockstep.strategies.selectors.shuffled:Shuffled",
        "partitioned": "flockstep.strategies.selectors.partitioned:Partitioned",
    },
    "filter": {
        "significantly_modified": "flockstep.strategies.filters.significantly_modified:SignificantlyModified",
        "random_skip": "flockstep.strategies.filters.random_skip:RandomSkip",
        "support": "flockstep.strategies.filters.support:Support",
        "kkt": "flockstep.strategies.filters.kkt:Kkt",
        "key_caching": "flockstep.strategies.filters.key_caching:KeyCaching",
    },
    "schedule": {
        "constant": "flockstep.schedules.constant:Constant",
        "step_decay": "flockstep.schedules.step_decay:StepDecay",
        "linear_warmup": "flockstep.schedules.linear_warmup:LinearWarmup",
        "goyal": "flockstep.schedules.goyal:Goyal",
        "cosine": "flockstep.schedules.cosine:Cosine",
        "batch_increase": "flockstep.schedules.batch_increase:BatchIncrease",
    },
    "partition": {
        "none": "flockstep.partitions.base:Unsplit",
        "pipeline": "flockstep.partitions.pipeline:Pipeline",
        "tensor": "flockstep.partitions.tensor:TensorParallel",
        "sharded": "flockstep.partitions.sharded:Sharded",
        "grid": "flockstep.partitions.grid:SpatialGrid",
    },
    "pipeline_schedule": {
        "gpipe": "flockstep.partitions.pipeline_schedules:GPipe",
        "1f1b": "flockstep.partitions.pipeline_schedules:OneForwardOneBackward",
        "interleaved": "flockstep.partitions.pipeline_schedules:Interleaved",
        "zb_h1": "flockstep.partitions.pipeline_schedules:ZeroBubbleH1",
        "pipedream": "flockstep.partitions.pipeline_schedules:PipeDream",
        "pipedream_2bw": "flockstep.partitions.pipeline_schedules:PipeDream2BW",
        "ddg": "flockstep.partitions.pipeline_schedules:DelayedGradients",
    },
    "topology": {
        "ring": "flockstep.topologies.ring:RingGraph",
        "complete": "flockstep.topologies.complete:CompleteGraph",
        "star": "flockstep.topologies.star:StarGraph",
        "torus": "flockstep.topologies.torus:TorusGraph",
        "exponential": "flockstep.topologies.exponential:ExponentialGraph",
        "directed_exponential": "flockstep.topologies.directed_exponential:DirectedExponentialGraph",
        "one_peer_exponential": "flockstep.topologies.one_peer_exponential:OnePeerExponentialGraph",
        "random_regular": "flockstep.topologies.random_regular:RandomRegularGraph",
        "tree": "flockstep.topologies.tree:TreeGraph",
        "hierarchical": "flockstep.topologies.hierarchical:HierarchicalGraph",
        "graph": "flockstep.topologies.weighted:WeightedGraph",
    },
    "codec": {
        "identity": "flockstep.codecs.identity:Identity",
        "half": "flockstep.codecs.half:Half",
        "bfloat16": "flockstep.codecs.bfloat16:Bfloat16",
        "int8": "flockstep.codecs.int8:Int8",
        "fp8": "flockstep.codecs.microscaling:Fp8",
        "fp4": "flockstep.codecs.microscaling:Fp4",
        "one_bit": "flockstep.codecs.one_bit:OneBit",
        "sign": "flockstep.codecs.sign:Sign",
        "terngrad": "flockstep.codecs.terngrad:TernGrad",
        "qsgd": "flockstep.codecs.qsgd:Qsgd",
        "natural": "flockstep.codecs.natural:Natural",
        "binned": "flockstep.codecs.binned:Binned",
        "topk": "flockstep.codecs.top:TopK",
        "random_k": "flockstep.codecs.random_subset:RandomK",
        "threshold": "flockstep.codecs.threshold:Threshold",
        "adaptive_threshold": "flockstep.codecs.adaptive_threshold:AdaptiveThreshold",
        "dgc": "flockstep.codecs.dgc:Dgc",
        "adacomp": "flockstep.codecs.ada_comp:AdaComp",
        "by_size": "flockstep.codecs.by_size:BySize",
        "powersgd": "flockstep.codecs.power:PowerSgdCodec",
        "dct": "flockstep.codecs.dct:Dct",
    },
    "feedback": {
        "none": "flockstep.feedback.nothing:NoFeedback",
        "residual": "flockstep.feedback.residual:Residual",
        "momentum": "flockstep.feedback.momentum:Momentum",
    },
    "collective": {
        "ring": "flockstep.collectives.ring:Ring",
        "recursive_doubling": "flockstep.collectives.recursive_doubling:RecursiveDoubling",
        "rabenseifner": "flockstep.collectives.rabenseifner:Rabenseifner",
        "binomial_tree": "flockstep.collectives.binomial_tree:BinomialTree",
        "pipelined": "flockstep.collectives.pipelined:Pipelined",
        "double_tree": "flockstep.collectives.double_tree:DoubleTree",
        "by_host": "flockstep.collectives.by_host:ByHost",
        "hierarchical": "flockstep.collectives.hierarchical:HierarchicalCollective",
        "sparse": "flockstep.collectives.sparse:Sparse",
        "auto": "flockstep.collectives.auto:Auto",
        "torch_distributed": "flockstep.collectives.torch_distributed:TorchDistributed",
    },
    "transport": {
        "shared_memory": "flockstep.links.kinds:InSharedMemory",
        "ipc": "flockstep.links.kinds:Ipc",
        "tcp": "flockstep.links.kinds:Tcp",
    },
    "optimizer": {
        "sgd": "flockstep.optimizers.sgd:SGD",
        "adam": "flockstep.optimizers.adam:Adam",
        "adamw": "flockstep.optimizers.adam:AdamW",
        "adagrad": "flockstep.optimizers.adagrad:Adagrad",
        "lars": "flockstep.optimizers.lars:LARS",
        "lamb": "flockstep.optimizers.lamb:LAMB",
        "clipped": "flockstep.optimizers.clipped:Clipped",
        "torch": "flockstep.frameworks.torch_groups:TorchOptimizer",
    },
    "compute": {
        "constant": "flockstep.simulation.compute:ConstantTime",
        "normal": "flockstep.simulation.compute:Normal",
        "exponential": "flockstep.simulation.compute:Exponential",
        "lognormal": "flockstep.simulation.compute:Lognormal",
        "pareto": "flockstep.simulation.compute:Pareto",
        "empirical": "flockstep.simulation.compute:Empirical",
        "speeds": "flockstep.simulation.compute:Speeds",
        "slow_spells": "flockstep.simulation.compute:SlowSpells",
        "longer": "flockstep.simulation.handling:Longer",
        "shared_cores": "flockstep.simulation.compute:SharedCores",
        "record": "flockstep.planning.recorded:RecordedTime",
    },
    "network": {
        "ideal": "flockstep.simulation.network:Ideal",
        "link": "flockstep.simulation.network:Link",
        "handled": "flockstep.simulation.handling:Handled",
        "fair_link": "flockstep.simulation.fair:FairLink",
        "switch": "flockstep.simulation.network:Switch",
        "two_tier": "flockstep.simulation.network:TwoTier",
        "tiers": "flockstep.simulation.tiers:Tiers",
        "record": "flockstep.planning.fit:RecordedNetwork",
    },
    "fault": {
        "dies": "flockstep.simulation.faults:Dies",
        "drops": "flockstep.simulation.faults:Drops",
        "narrows": "flockstep.simulation.faults:Narrows",
        "slows": "flockstep.simulation.faults:Slows",
        "flips_sign": "flockstep.simulation.attacks:FlipsSign",
        "enlarges": "flockstep.simulation.attacks:Enlarges",
        "little_is_enough": "flockstep.simulation.attacks:LittleIsEnough",
        "miscomputes": "flockstep.simulation.attacks:Miscomputes",
    },
    "split": {
        "iid": "flockstep.workloads.split:Iid",
        "by_label": "flockstep.workloads.split:ByLabel",
        "dirichlet": "flockstep.workloads.split:Dirichlet",
    },
    "tracker": {
        "tensorboard": "flockstep.trackers.libraries:TensorBoard",
        "mlflow": "flockstep.trackers.libraries:MLflow",
        "wandb": "flockstep.trackers.libraries:WeightsAndBiases",
        "trackio": "flockstep.trackers.libraries:Trackio",
    },
    "workload": {
        "digits": "flockstep.workloads.digits:Digits",
        "mnist1d": "flockstep.workloads.mnist1d:Mnist1D",
        "charlm": "flockstep.workloads.charlm:CharLM",
        "tabular": "flockstep.workloads.tabular:Tabular",
        "quadratic": "flockstep.workloads.quadratic:Quadratic",
        "softmax": "flockstep.workloads.softmax:Softmax",
    },
}

_ALIASES: dict[str, dict[str, str]] = {
    "strategy": {
        "bsp": "ps(consistency=bsp)",
        "asgd": "ps(consistency=asynchronous)",
        "gosgd": "gossip",
        "one_bit_sgd": "two_way(codec=one_bit, feedback=residual)",
        "diloco": "local_sgd(period=500, outer_optimizer=nesterov)",
        "sparseloco": "streaming_diloco(period=30, fragments=1, overlap=0, "
        "outer_optimizer=nesterov(lr=1.0, momentum=0), "
        "codec=by_size(large=topk(ratio=0.015625, bucket=4096, values=binned), limit=0), "
        "feedback=residual(decay=0.95))",
    },
    "collective": {
        "ssar_doubling": "sparse(algorithm='ssar_doubling')",
        "ssar_split": "sparse(algorithm='ssar_split')",
        "dsar": "sparse(algorithm='dsar')",
    },
    "network": {
        "100mbit": "link(bandwidth='100mbit', latency=0.0005)",
        "1gbit": "link(bandwidth='1gbit', latency=0.0002)",
        "10gbit": "link(bandwidth='10gbit', latency=0.00005)",
        "100gbit": "link(bandwidth='100gbit', latency=0.000005)",
    },
    "split": {"by-label": "by_label"},
    "codec": {"float16": "half", "fp16": "half", "bf16": "bfloat16"},
}

_FURTHER = {
    "network": "write link('10mbit', '1ms') for any other bandwidth",
    "compute": "write constant(0.05) for gradients that take 0.05 s",
    "workload": "a custom job is a Python file with a function job()",
}
"""Noun → how values are written for which no name stands in a table."""

_CATALOGS = {"strategy": "flockstep.systems.catalog"}
"""Noun → module with further names: `names()`, and `expression(name)` for the expression of a name."""

_loaded: dict[tuple[str, str], Any] = {}
_names: dict[type, str] = {}
_custom: set[tuple[str, str]] = set()


@functools.cache
def _add_installed() -> None:
    """Add the tables of other installed distributions: the entry points of the group `flockstep.components`."""
    from importlib.metadata import entry_points  # here, since most processes need built-in components only

    for found in entry_points(group="flockstep.components"):
        for noun, table in found.load().items():
            _TABLE.setdefault(noun, {}).update(table)


def nouns() -> list[str]:
    """Return the nouns of the registry, that is, the kinds of components."""
    _add_installed()
    return list(_TABLE)


def names(noun: str) -> list[str]:
    """Return the names of the components that are registered under `noun`, in the order of registration."""
    _add_installed()
    return list(_table(noun))


def aliases(noun: str) -> dict[str, str]:
    """Return a mapping from each short name of `noun` to the expression for which the name stands."""
    return dict(_ALIASES.get(noun, {}))


def alias(noun: str, name: str) -> str | None:
    """Return the expression for which a short name stands; None if there is no such short name."""
    short = _ALIASES.get(noun, {}).get(name)
    if short is None and noun in _CATALOGS and name not in _TABLE[noun] and "(" not in name:
        found: str | None = importlib.import_module(_CATALOGS[noun]).expression(name)
        return found
    return short


def short_name(noun: str, expression: str) -> str:
    """Return the short name that stands for `expression`; `expression` itself if there is no such short name, or if it
    is a registered name.
    """
    if expression in _table(noun):
        return expression
    return next((name for name, text in _ALIASES.get(noun, {}).items() if text == expression), expression)


def catalog(noun: str) -> list[str]:
    """Return the names of the published systems whose compositions may be used where a `noun` is expected."""
    return list(importlib.import_module(_CATALOGS[noun]).names()) if noun in _CATALOGS else []


def register(noun: str, name: str, target: type) -> None:
    """Register a custom class as the component `name` of the given noun.

    Raises:
        ConfigurationError: the name is taken by another class, or is not an identifier; or `target` is not a frozen
            dataclass that defines every method of the noun.
    """
    table = _table(noun)
    if not inspect.isclass(target):
        kind = type(target).__name__
        raise ConfigurationError(f"register takes a class, got an object of {kind}; write {kind} without parentheses")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigurationError(f"a {noun}'s name must be an identifier, got {name!r}; use letters, digits and _")
    place = f"{target.__module__}:{target.__qualname__}"
    taken = _ALIASES.get(noun, {}).get(name) or table.get(name, place)
    if taken != place and not _same_source(taken, target):
        raise ConfigurationError(f"the {noun} name {name!r} is already used by {taken}; choose another name")
    _require_component(noun, target)
    table[name] = place
    _loaded[noun, name] = target
    _names[target] = name
    if not place.startswith("flockstep."):
        _custom.add((noun, name))


def _same_source(place: str, target: type) -> bool:
    """Whether `place` is the class `target` of the same file, which was imported under another name."""
    module, _, name = place.partition(":")
    files = [getattr(sys.modules.get(one), "__file__", None) for one in (module, target.__module__)]
    return name == target.__qualname__ and files[0] is not None and files[0] == files[1]


def _require_component(noun: str, target: type) -> None:
    """Raise `ConfigurationError` unless the objects of the class `target` can be components of the noun."""
    is_a = getattr(target, "noun", noun)
    if is_a != noun:
        raise ConfigurationError(f"{target.__name__} is a {is_a}, got the noun {noun!r}; write {is_a!r}")
    missing = ", ".join(sorted(getattr(target, "__abstractmethods__", ())))
    if missing:
        raise ConfigurationError(f"{target.__name__} must define {missing} to be a {noun}; add what is missing")
    settings: Any = vars(target).get("__dataclass_params__")
    if settings is None or not settings.frozen:
        raise ConfigurationError(
            f"{target.__name__} must be a frozen dataclass; write @dataclass(frozen=True) above the class"
        )


def load(noun: str, name: str) -> Any:
    """Return the class that is registered as the component `name` of the given noun.

    Raises:
        UnknownName: the name does not exist; the message has the nearest registered name.
    """
    table = _table(noun)
    if name not in table:
        _add_installed()
    if name not in table:
        others = [other for other in _TABLE if other != noun and name in _TABLE[other]]
        if others:
            raise UnknownName(
                f"{name!r} is a {others[0]}, not a {noun}; flockstep list {noun} shows all components of the kind "
                f"{noun}"
            )
        short = alias(noun, name)
        if short is not None:
            raise ConfigurationError(
                f"{name} stands for {short} and takes no arguments; write this expression with your arguments"
            )
        raise unknown(noun, name)
    key = noun, name
    if key not in _loaded:
        module, _, attribute = table[name].partition(":")
        _loaded[key] = getattr(importlib.import_module(module), attribute)
        _names[_loaded[key]] = name
    return _loaded[key]


def unknown(noun: str, name: str) -> UnknownName:
    """Return the error for a name that no component of `noun` has, with the nearest registered name."""
    known = [*_table(noun), *_ALIASES.get(noun, {}), *catalog(noun)]
    further = _FURTHER.get(noun, "")
    error = UnknownName.among(noun, name, known, command=f"flockstep list {noun}", further=further)
    if further or "did you mean" in str(error):
        return error
    return UnknownName(f"{error}; a custom {noun} needs --import FILE, where FILE registers it")


def is_custom(noun: str, name: str) -> bool:
    """Return whether code outside flockstep registered `name`."""
    return (noun, name) in _custom


def name_of(kind: type) -> str:
    """Return the name under which the class `kind` is registered, or the name of the class if it is not registered."""
    if kind not in _names:
        if not kind.__module__.startswith("flockstep."):
            _add_installed()
        place = f"{kind.__module__}:{kind.__qualname__}"
        for table in _TABLE.values():
            for name, target in table.items():
                if target == place:
                    _names[kind] = name
    return _names.get(kind, kind.__name__)


def _table(noun: str) -> dict[str, str]:
    if noun not in _TABLE:
        _add_installed()
    if noun not in _TABLE:
        raise UnknownName.among("noun", noun, _TABLE)
    return _TABLE[noun]
