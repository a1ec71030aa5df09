"""The registry as a table: for people, for --json, and for the documentation."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect

from flockstep import registry
from flockstep.costs import cluster_reading
from flockstep.costs.reference import MODELS, reference
from flockstep.errors import ConfigurationError, UnknownName
from flockstep.expression import Component, fields_of, to_text
from flockstep.report import words
from flockstep.topologies.base import Topology
from flockstep.topologies.facts import stated

DESCRIBED = ("cluster", "model")
"""What a plan takes besides components: descriptions that are built in."""


def nouns() -> list[str]:
    """Everything that there is a list of."""
    return [*registry.nouns(), *DESCRIBED]


def listing(noun: str) -> list[dict[str, str]]:
    """One row for each component of `noun`: how to write it, with its defaults, and its docstring's first line.

    Raises:
        UnknownName: there is no list of that.
    """
    if noun not in nouns():
        raise UnknownName.among("noun", noun, nouns())
    if noun in DESCRIBED:
        return _clusters() if noun == "cluster" else _models()
    rows = []
    for name in registry.names(noun):
        kind = registry.load(noun, name)
        arguments = ", ".join(_argument(field) for field in dataclasses.fields(kind) if field.name in fields_of(kind))
        summary = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
        if issubclass(kind, Topology):
            summary += f" {_stated(kind())}"
        rows.append(
            {"noun": noun, "name": name, "write": f"{name}({arguments})" if arguments else name, "summary": summary}
        )
    rows += [
        {"noun": noun, "name": name, "write": name, "summary": f"short for {text}"}
        for name, text in registry.aliases(noun).items()
    ]
    return rows


def singular(noun: str) -> str:
    """The noun of which this is the plural; itself where it is none."""
    known = nouns()
    ones = [
        noun.removesuffix(end) + instead for end, instead in (("ies", "y"), ("es", ""), ("s", "")) if noun.endswith(end)
    ]
    return next((one for one in [noun, *ones] if one in known), noun)


def _clusters() -> list[dict[str, str]]:
    """A row for each cluster that is built in."""
    rows = []
    for name in cluster_reading.names():
        shape = cluster_reading.load_cluster(name)
        size = f"{shape.workers} workers on {shape.nodes} machine{'s' if shape.nodes > 1 else ''}"
        wire = shape.slowest
        link = f"{8e-6 * wire.bandwidth:,.0f} Mbit/s and {words.seconds(wire.latency)}"
        summary = f"{shape.about.removesuffix('.')}: {size}; the slowest link has {link}."
        rows.append({"noun": "cluster", "name": name, "write": name, "summary": summary})
    return rows


def _models() -> list[dict[str, str]]:
    """A row for each reference model."""
    rows = []
    for name, known in MODELS.items():
        shape = reference(name)
        layers = sum(1 for layer in shape.layers if layer.parameters)
        summary = f"{shape.parameters:,} parameters in {layers} layers that have any. {known.source}."
        rows.append({"noun": "model", "name": name, "write": name, "summary": summary})
    return rows


def _stated(topology: Topology) -> str:
    """What holds of a topology, on as many workers as it takes."""
    for n in (8, 4):
        with contextlib.suppress(ConfigurationError):
            return f"On {n} workers: {stated(topology, n)}."
    return ""


def _argument(field: dataclasses.Field[object]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"{field.name}={to_text(field.default_factory())}"  # type: ignore[arg-type]
    if isinstance(field.default, Component):
        return f"{field.name}={to_text(field.default)}"
    return field.name if field.default is dataclasses.MISSING else f"{field.name}={field.default!r}"
