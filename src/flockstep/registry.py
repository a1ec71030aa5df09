"""Names → implementations, one line each. Nothing is imported before it is asked for.

Command-line choices, documentation tables and conformance tests are all made from this table.
"""

from __future__ import annotations

import importlib
import keyword
from typing import Any

from flockstep.errors import ConfigurationError, UnknownName

_TABLE: dict[str, dict[str, str]] = {
    "strategy": {
        "all_reduce": "flockstep.strategies.all_reduce:AllReduce",
        "ps": "flockstep.strategies.parameter_server:ParameterServer",
        "local_sgd": "flockstep.strategies.local_sgd:LocalSGD",
        "easgd": "flockstep.strategies.elastic_averaging:ElasticAveraging",
        "gossip": "flockstep.strategies.gossip:Gossip",
        "dpsgd": "flockstep.strategies.neighbour_averaging:NeighbourAveraging",
        "broadcast": "flockstep.strategies.broadcast:Broadcast",
        "partial": "flockstep.strategies.partial_broadcast:PartialBroadcast",
    },
    "consistency": {
        "bsp": "flockstep.strategies.consistency:BulkSynchronous",
        "ssp": "flockstep.strategies.consistency:StaleSynchronous",
        "asynchronous": "flockstep.strategies.consistency:Asynchronous",
    },
    "rule": {
        "plain": "flockstep.strategies.rules.plain:Plain",
    },
    "schedule": {},
    "claim": {},
    "topology": {
        "ring": "flockstep.topologies.ring:RingGraph",
        "complete": "flockstep.topologies.complete:CompleteGraph",
        "star": "flockstep.topologies.star:StarGraph",
        "torus": "flockstep.topologies.torus:TorusGraph",
        "exponential": "flockstep.topologies.exponential:ExponentialGraph",
    },
    "codec": {
        "identity": "flockstep.codecs.identity:Identity",
        "half": "flockstep.codecs.half:Half",
    },
    "feedback": {
        "none": "flockstep.feedback.nothing:NoFeedback",
        "residual": "flockstep.feedback.residual:Residual",
    },
    "collective": {
        "ring": "flockstep.collectives.ring:Ring",
        "recursive_doubling": "flockstep.collectives.recursive_doubling:RecursiveDoubling",
    },
    "transport": {
        "ipc": "flockstep.transports.zeromq:Ipc",
        "tcp": "flockstep.transports.zeromq:Tcp",
    },
    "optimizer": {
        "sgd": "flockstep.optimizers.sgd:SGD",
        "adam": "flockstep.optimizers.adam:Adam",
        "adamw": "flockstep.optimizers.adam:AdamW",
        "adagrad": "flockstep.optimizers.adagrad:Adagrad",
    },
    "compute": {
        "constant": "flockstep.simulation.compute:Constant",
        "normal": "flockstep.simulation.compute:Normal",
        "exponential": "flockstep.simulation.compute:Exponential",
        "lognormal": "flockstep.simulation.compute:Lognormal",
        "pareto": "flockstep.simulation.compute:Pareto",
        "speeds": "flockstep.simulation.compute:Speeds",
        "slow_spells": "flockstep.simulation.compute:SlowSpells",
        "shared_cores": "flockstep.simulation.compute:SharedCores",
    },
    "network": {
        "ideal": "flockstep.simulation.network:Ideal",
        "link": "flockstep.simulation.network:Link",
        "switch": "flockstep.simulation.network:Switch",
        "two_tier": "flockstep.simulation.network:TwoTier",
    },
    "split": {
        "iid": "flockstep.workloads.split:Iid",
        "by_label": "flockstep.workloads.split:ByLabel",
        "dirichlet": "flockstep.workloads.split:Dirichlet",
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
    },
    "network": {
        "100mbit": "link(bandwidth='100mbit', latency=0.0005)",
        "1gbit": "link(bandwidth='1gbit', latency=0.0002)",
        "10gbit": "link(bandwidth='10gbit', latency=0.00005)",
        "100gbit": "link(bandwidth='100gbit', latency=0.000005)",
    },
    "split": {"by-label": "by_label"},
}

_loaded: dict[tuple[str, str], Any] = {}
_names: dict[type, str] = {}


def nouns() -> list[str]:
    """Every kind of component that has a table."""
    return list(_TABLE)


def names(noun: str) -> list[str]:
    """The names registered under `noun`, in the order of registration."""
    return list(_table(noun))


def aliases(noun: str) -> dict[str, str]:
    """Short names of `noun` → the expression that each stands for."""
    return dict(_ALIASES.get(noun, {}))


def alias(noun: str, name: str) -> str | None:
    """The expression that the short name stands for, or None."""
    return _ALIASES.get(noun, {}).get(name)


def register(noun: str, name: str, target: type) -> None:
    """Add an implementation of your own under `name`.

    Raises:
        ConfigurationError: the name is taken by another class, or is no identifier.
    """
    table = _table(noun)
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigurationError(f"a {noun}'s name must be an identifier, got {name!r}; use letters, digits and _")
    place = f"{target.__module__}:{target.__qualname__}"
    taken = _ALIASES.get(noun, {}).get(name) or table.get(name, place)
    if taken != place:
        raise ConfigurationError(f"the {noun} name {name!r} is taken by {taken}; choose another")
    table[name] = place
    _loaded[noun, name] = target
    _names[target] = name


def load(noun: str, name: str) -> Any:
    """The class that is registered as `name`.

    Raises:
        UnknownName: nothing is; the nearest name is in the message.
    """
    table = _table(noun)
    if name not in table:
        others = [other for other in _TABLE if other != noun and name in _TABLE[other]]
        if others:
            raise UnknownName(f"{name!r} is a {others[0]}, not a {noun}; known: {', '.join(table)}")
        raise UnknownName.among(noun, name, [*table, *_ALIASES.get(noun, {})])
    key = noun, name
    if key not in _loaded:
        module, _, attribute = table[name].partition(":")
        _loaded[key] = getattr(importlib.import_module(module), attribute)
        _names[_loaded[key]] = name
    return _loaded[key]


def name_of(kind: type) -> str:
    """The name under which `kind` is registered (its class name if it is not)."""
    if kind not in _names:
        place = f"{kind.__module__}:{kind.__qualname__}"
        for table in _TABLE.values():
            for name, target in table.items():
                if target == place:
                    _names[kind] = name
    return _names.get(kind, kind.__name__)


def _table(noun: str) -> dict[str, str]:
    if noun not in _TABLE:
        raise UnknownName.among("noun", noun, _TABLE)
    return _TABLE[noun]
