"""`flockstep list`: a summary of all kinds of components, one kind, or one component, as text, JSON or
documentation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flockstep import registry
from flockstep.cli import show as output
from flockstep.errors import ConfigurationError, UnknownName

if TYPE_CHECKING:
    from flockstep.topologies.base import Topology

ABOUT = {
    "strategy": "when workers exchange data, with which workers, and which data",
    "consistency": "which reads and pushes a parameter server admits, and when",
    "server_update": "how a parameter server applies an update",
    "aggregation": "what takes the place of the mean of several workers' vectors",
    "outer_optimizer": "how the mean of the replicas becomes the next model",
    "synchronization_schedule": "after how many local steps replicas synchronize",
    "selector": "which part of the model is sent",
    "filter": "which updates are left out of a push",
    "schedule": "how the learning rate and the batch change over the steps",
    "partition": "how one replica of the model is split over workers",
    "pipeline_schedule": "in which order a stage of a pipeline computes, with which version of the weights",
    "claim": "a published result that `flockstep reproduce` checks",
    "topology": "which workers exchange data with each other",
    "codec": "how an array is encoded for transmission",
    "feedback": "what happens to the part that a codec leaves out",
    "collective": "the algorithm of an all-reduce",
    "transport": "how processes of a real run exchange messages",
    "optimizer": "how a local step changes the parameters",
    "compute": "how many seconds a gradient takes in virtual time",
    "network": "bandwidth and latency of the links in virtual time",
    "fault": "a fault to inject into virtual time",
    "disruption": "what flockstep chaos does to the processes of a real run",
    "split": "how data is divided over workers",
    "tracker": "where `flockstep track` shows the curves of a run",
    "workload": "a built-in job: model, data and loss",
    "cluster": "a cluster of machines and links, for `flockstep plan`",
    "model": "a published network, described layer by layer, for `flockstep plan`",
}
"""Kind of component → text on what such a component decides."""
ROOM_FOR_ARGUMENTS = 100
"""Columns of a terminal below which a list of components shows their names without their arguments."""
DESCRIBED = ("cluster", "model")
"""Kinds of built-in descriptions that a plan accepts, in addition to the kinds of components."""


def nouns() -> list[str]:
    """Names of all kinds of components, and of the kinds of built-in descriptions (models and clusters)."""
    return [*registry.nouns(), *DESCRIBED]


def plural(noun: str) -> str:
    """Return the plural of a kind of component, such as `strategies`, `topologies` or `codecs`."""
    if noun in ("feedback", "compute"):
        return noun
    return f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"


def singular(noun: str) -> str:
    """Return the singular of a kind of component given in the plural; any other word is returned unchanged."""
    return next((one for one in nouns() if noun in (one, plural(one))), noun)


def names(noun: str) -> list[str]:
    """Return the names of the components of a kind, including short names; no component is imported."""
    if noun == "cluster":
        from flockstep.costs import clusters

        return clusters.names()
    if noun == "model":
        from flockstep.costs.reference import MODELS

        return list(MODELS)
    return [*registry.names(noun), *registry.aliases(noun)]


def complete(incomplete: str) -> list[str]:
    """Return the completions of the argument of `flockstep list`."""
    known = [*map(plural, nouns()), *(name for noun in registry.nouns() for name in names(noun))]
    return [name for name in dict.fromkeys(known) if name.startswith(incomplete)]


def summary() -> list[dict[str, Any]]:
    """Return the rows of the summary: for each kind the number of components, the decision that such a component
    makes, and the names.
    """
    return [
        {
            "noun": noun,
            "plural": plural(noun),
            "count": len(found),
            "summary": ABOUT[noun],
            "names": found,
            "custom": [name for name in found if noun not in DESCRIBED and registry.is_custom(noun, name)],
        }
        for noun in nouns()
        for found in [names(noun)]
    ]


def show(what: str | None, everything: bool, as_json: bool) -> None:
    """Print the lists of `flockstep list`: a summary of all kinds, one kind, or one component.

    Raises:
        UnknownName: `what` is neither a kind nor the name of a component.
    """
    found: list[dict[str, Any]]
    tell: Callable[[list[dict[str, Any]]], None]
    noun = None if what is None else singular(what)
    if what is None and not everything:
        found, tell = summary(), _show_summary
    elif noun is None or noun in nouns():
        found, tell = [row for one in (nouns() if noun is None else [noun]) for row in listing(one)], _show_rows
    else:
        found, tell = [described(one, str(what)) for one in nouns() if what in names(one)], _show_described
        found += [_system(one, str(what)) for one in registry.nouns() if what in registry.catalog(one)]
        if not found:
            raise _unknown(str(what))
    if as_json:
        output.json(found)
    else:
        tell(found)


def _unknown(what: str) -> UnknownName:
    known = [name for noun in nouns() for name in (noun, plural(noun), *names(noun))]
    known += [name for noun in registry.nouns() for name in registry.catalog(noun)]
    return UnknownName.among("kind or component", what, known, nouns())


def _show_summary(rows: list[dict[str, Any]]) -> None:
    from flockstep.report.terminal import TableColumn, TextTable

    columns = (TableColumn("kind", text=True), TableColumn("number"), TableColumn("what it decides", text=True))
    cells = [[row["plural"], str(row["count"]), row["summary"] + _and_custom(row["custom"])] for row in rows]
    page = output.page()
    page.print(TextTable(columns, cells))
    page.print(
        "\nflockstep list strategies shows all components of a kind; flockstep list topk shows one component; "
        "--all shows everything."
    )
    page.print("flockstep systems lists the systems of the literature by name.", highlight=False)


def _and_custom(names: list[str]) -> str:
    return f"; custom: {', '.join(names)}" if names else ""


def _show_rows(rows: list[dict[str, Any]]) -> None:
    from flockstep.report.terminal import TableColumn, TextTable

    page = output.page()
    narrow = page.width < ROOM_FOR_ARGUMENTS and any(row["write"] != row["name"] for row in rows)
    headings = {"noun": "kind", "name" if narrow else "write": "write", "summary": "what it is"}
    if len({row["noun"] for row in rows}) == 1:
        del headings["noun"]
    columns = [TableColumn(heading, text=True) for heading in headings.values()]
    left_out = (
        f"Left out to fit {page.width} columns: arguments; flockstep list {rows[0]['name']} shows those of one name."
    )
    notes = [left_out] if narrow else []
    page.print(TextTable(columns, [[row[name] for name in headings] for row in rows], notes=notes))


def _system(noun: str, name: str) -> dict[str, Any]:
    """A system of the literature, whose name is written like a component's."""
    about = f"{name} is a system of the literature; flockstep systems '{name}' describes it."
    return {"noun": noun, "name": name, "write": name, "summary": about, "about": about, "arguments": []}


def _show_described(found: list[dict[str, Any]]) -> None:
    from rich.markup import escape

    from flockstep.report.formatting import lines

    page = output.page()
    for one in found:
        head = lines(f"{one['write']}  ({one['noun']})", page.width)
        page.print("\n".join(f"[bold]{escape(line)}[/bold]" for line in head), highlight=False)
        for paragraph in one["about"].split("\n\n"):  # the lines of a docstring end where its source file ends them
            listed = any(line.startswith((" ", "-")) for line in paragraph.split("\n"))
            text = paragraph if listed else paragraph.replace("\n", " ")
            page.print(escape("\n".join(lines(text, page.width))) + "\n", highlight=False)
        for argument in one["arguments"]:
            default = "" if argument["default"] is None else f" = {argument['default']}"
            page.print(escape(f"  {argument['name']}: {argument['type']}{default}"), highlight=False)
        page.print()


def described(noun: str, name: str) -> dict[str, Any]:
    """Describe one component in detail: how to write it in an expression, its docstring, and its arguments with types
    and defaults.
    """
    row = next(row for row in listing(noun) if row["name"] == name)
    if name not in (registry.names(noun) if noun not in DESCRIBED else ()):
        return {**row, "about": row["summary"], "arguments": []}
    from flockstep.expression import fields_of

    kind = registry.load(noun, name)
    types = fields_of(kind)
    arguments = [
        {"name": field.name, "type": _type(types[field.name]), "default": _default(field)}
        for field in dataclasses.fields(kind)
        if field.name in types
    ]
    return {**row, "about": inspect.getdoc(kind) or "", "arguments": arguments}


def listing(noun: str) -> list[dict[str, str]]:
    """Return a row for each component of the kind `noun`: its expression, its defaults, and the first line of its
    docstring.

    Raises:
        UnknownName: there is no kind of component with this name.
    """
    if noun not in nouns():
        raise UnknownName.among("kind", noun, nouns())
    if noun in DESCRIBED:
        return _clusters() if noun == "cluster" else _models()
    from flockstep.expression import fields_of
    from flockstep.topologies.base import Topology

    rows = []
    for name in registry.names(noun):
        kind = registry.load(noun, name)
        arguments = ", ".join(_argument(field) for field in dataclasses.fields(kind) if field.name in fields_of(kind))
        about = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
        if registry.is_custom(noun, name):
            about = f"Custom: {about or kind.__qualname__}"
        if issubclass(kind, Topology):
            about += f" {_stated(kind())}"
        rows.append(
            {"noun": noun, "name": name, "write": f"{name}({arguments})" if arguments else name, "summary": about}
        )
    rows += [
        {"noun": noun, "name": name, "write": name, "summary": f"short for {text}"}
        for name, text in registry.aliases(noun).items()
    ]
    return rows


def _clusters() -> list[dict[str, str]]:
    """A row for each cluster that is built in."""
    from flockstep.costs.cluster_reading import load_cluster
    from flockstep.report import formatting

    rows = []
    for name in names("cluster"):
        shape = load_cluster(name)
        size = f"{shape.workers} workers on {shape.nodes} machine{'s' if shape.nodes > 1 else ''}"
        wire = shape.slowest
        link = f"{8e-6 * wire.bandwidth:,.0f} Mbit/s and {formatting.seconds(wire.latency)}"
        about = f"{shape.about.removesuffix('.')}: {size}; the slowest link has {link}."
        rows.append({"noun": "cluster", "name": name, "write": name, "summary": about})
    return rows


def _models() -> list[dict[str, str]]:
    """A row for each reference model."""
    from flockstep.costs.reference import MODELS, reference

    rows = []
    for name, known in MODELS.items():
        shape = reference(name)
        layers = sum(1 for layer in shape.layers if layer.parameters)
        about = (
            f"{shape.parameters:,} parameters in {layers} layers; layers without parameters are not counted. "
            f"{known.source}."
        )
        rows.append({"noun": "model", "name": name, "write": name, "summary": about})
    return rows


def _stated(topology: Topology) -> str:
    """What holds of a topology, on as many workers as it takes."""
    from flockstep.topologies.facts import stated

    for n in (8, 4):
        with contextlib.suppress(ConfigurationError):
            return f"On {n} workers: {stated(topology, n)}."
    return ""


def _type(hint: Any) -> str:
    """A field's type as people write it."""
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _default(field: dataclasses.Field[object]) -> str | None:
    """A field's default as text; None where it has to be given."""
    from flockstep.expression import Component, to_text

    if field.default_factory is not dataclasses.MISSING:
        return to_text(field.default_factory())  # type: ignore[arg-type]
    if isinstance(field.default, Component):
        return to_text(field.default)
    return None if field.default is dataclasses.MISSING else repr(field.default)


def _argument(field: dataclasses.Field[object]) -> str:
    default = _default(field)
    return field.name if default is None else f"{field.name}={default}"
