"""`flockstep list` and `flockstep systems`: components, and systems of the literature, as text or JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from flockstep import registry
from flockstep.cli import options as o
from flockstep.errors import ConfigurationError, UnknownName, printable
from flockstep.options import Arg, Opt

if TYPE_CHECKING:
    from rich.text import Text

    from flockstep.report.terminal import TextTable

ABOUT = {
    "strategy": "when workers exchange data, with which workers, and which data",
    "consistency": "which reads and pushes a parameter server admits, and when",
    "server_update": "how a parameter server applies an update",
    "aggregation": "what takes the place of the mean of several workers' vectors",
    "outer_optimizer": "how the mean of the replicas becomes the next model",
    "synchronization_schedule": "after how many local steps replicas synchronize",
    "selector": "which part of the model is sent",
    "client_sampling": "which clients take part in a round",
    "privacy": "what the model may tell of a single client",
    "drift": "how local steps are corrected where the data of clients differ",
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
SEE_ALSO = """
flockstep list strategies shows all components of a kind; flockstep list topk shows one component; \
--all shows everything.
flockstep systems lists the systems of the literature by name."""
DESCRIBED = ("cluster", "model")
"""Kinds of built-in descriptions that a plan accepts, in addition to the kinds of components."""


SYSTEM_COLUMNS = {"system": 0, "parallelism": 4, "optimization": 3, "scheduling": 2, "exchange": 0, "topology": 1}
"""Column of the table of systems → rank; a narrow terminal leaves out the columns of the highest rank first."""


def nouns() -> list[str]:
    """Names of all kinds of components, and of the kinds of built-in descriptions (models and clusters)."""
    return [*registry.nouns(), *DESCRIBED]


def plural(noun: str) -> str:
    """Return the plural of a kind of component, such as `strategies`, `topologies` or `codecs`."""
    if noun in ("feedback", "compute"):
        return noun
    return f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"


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


def list_components(
    what: Annotated[
        str | None,
        Arg(
            "A kind, such as strategies, codecs or clusters, or a component, such as topk (default: a summary).",
            complete=complete,
        ),
    ] = None,
    everything: Annotated[bool, Opt("Show every component of every kind.", names=("--all",))] = False,
    imports: o.Imports = (),
    as_json: o.Json = False,
) -> None:
    """List the components: a summary of all kinds, all components of one kind, or one component with its arguments."""
    from flockstep.cli import show

    if imports:
        from flockstep.frameworks.job import import_components

        import_components(imports)
    noun = next((one for one in nouns() if what in (one, plural(one))), what)
    if what is None and not everything:
        from flockstep.report.terminal import TableColumn, TextTable

        kinds = summary()
        custom = {row["noun"]: f"; custom: {', '.join(row['custom'])}" for row in kinds if row["custom"]}
        columns = (
            TableColumn("kind", text=True, cell=lambda row: row["plural"]),
            TableColumn("number", cell=lambda row: str(row["count"])),
            TableColumn("what it decides", text=True, cell=lambda row: row["summary"] + custom.get(row["noun"], "")),
        )
        show.result(as_json, kinds, TextTable.of(columns, kinds), SEE_ALSO)
        return
    if noun is None or noun in nouns():
        rows = [row for one in (nouns() if noun is None else [noun]) for row in listing(one)]
        show.result(as_json, rows, _table_of_rows(rows, show.page().width))
        return
    found = [described(one, noun) for one in nouns() if noun in names(one)]
    about = f"{noun} is a system of the literature; flockstep systems '{noun}' describes it."
    found += [
        {"noun": one, "name": noun, "write": noun, "summary": about, "about": about, "arguments": []}
        for one in registry.nouns()
        if noun in registry.catalog(one)
    ]
    if not found:
        known = [name for one in nouns() for name in (one, plural(one), *names(one))]
        known += [name for one in registry.nouns() for name in registry.catalog(one)]
        raise UnknownName.among("kind or component", noun, known, nouns())
    width = show.page().width
    show.result(as_json, found, *(part for one in found for part in _parts_of_description(one, width)))


def summary() -> list[dict[str, Any]]:
    """Return a row for each kind: the number and the names of its components, and what such a component decides."""
    rows = []
    for noun in nouns():
        found = names(noun)
        custom = [name for name in found if noun not in DESCRIBED and registry.is_custom(noun, name)]
        row = {"noun": noun, "plural": plural(noun), "count": len(found), "summary": ABOUT[noun], "names": found}
        rows.append({**row, "custom": custom})
    return rows


def _table_of_rows(rows: list[dict[str, Any]], width: int) -> TextTable:
    from flockstep.report.terminal import TableColumn, TextTable

    narrow = width < ROOM_FOR_ARGUMENTS and any(row["write"] != row["name"] for row in rows)
    headings = {"noun": "kind", "name" if narrow else "write": "write", "summary": "what it is"}
    if len({row["noun"] for row in rows}) == 1:
        del headings["noun"]
    left_out = f"Left out to fit {width} columns: arguments; flockstep list {rows[0]['name']} shows those of one name."
    cells = [[row[name] for name in headings] for row in rows]
    columns = [TableColumn(heading, text=True) for heading in headings.values()]
    return TextTable(columns, cells, notes=[left_out] if narrow else [])


def _parts_of_description(one: dict[str, Any], width: int) -> Iterator[Text | str]:
    from rich.text import Text

    from flockstep.report.formatting import lines

    yield Text(printable("\n".join(lines(f"{one['write']}  ({one['noun']})", width))), style="bold")
    for paragraph in one["about"].split("\n\n"):  # the lines of a docstring end where its source file ends them
        listed = any(line.startswith((" ", "-")) for line in paragraph.split("\n"))
        text = paragraph if listed else paragraph.replace("\n", " ")
        yield "\n".join(lines(text, width)) + "\n"
    for argument in one["arguments"]:
        default = "" if argument["default"] is None else f" = {argument['default']}"
        yield f"  {argument['name']}: {argument['type']}{default}"
    yield ""


def described(noun: str, name: str) -> dict[str, Any]:
    """Describe one component in detail: its expression, its docstring, and its arguments."""
    row = next(row for row in listing(noun) if row["name"] == name)
    if noun in DESCRIBED or name not in registry.names(noun):
        return {**row, "about": row["summary"], "arguments": []}
    kind = registry.load(noun, name)
    return {**row, "about": inspect.getdoc(kind) or "", "arguments": _arguments(kind)}


def listing(noun: str) -> list[dict[str, str]]:
    """Return a row for each component of a kind: its expression with defaults, and its docstring's first line."""
    if noun not in nouns():
        raise UnknownName.among("kind", noun, nouns())
    if noun in DESCRIBED:
        rows = [(name, name, _cluster(name) if noun == "cluster" else _model(name)) for name in names(noun)]
        return [{"noun": noun, "name": name, "write": text, "summary": about} for name, text, about in rows]
    from flockstep.topologies.base import Topology
    from flockstep.topologies.facts import stated

    rows = []
    for name in registry.names(noun):
        kind = registry.load(noun, name)
        defaults = {one["name"]: one["default"] for one in _arguments(kind)}
        arguments = ", ".join(key if value is None else f"{key}={value}" for key, value in defaults.items())
        about = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
        if registry.is_custom(noun, name):
            about = f"Custom: {about or kind.__qualname__}"
        for n in (8, 4) if issubclass(kind, Topology) else ():
            # as many workers as the topology accepts
            with contextlib.suppress(ConfigurationError):
                about += f" On {n} workers: {stated(kind(), n)}."
                break
        rows.append((name, f"{name}({arguments})" if arguments else name, about))
    rows += [(name, name, f"short for {text}") for name, text in registry.aliases(noun).items()]
    return [{"noun": noun, "name": name, "write": text, "summary": about} for name, text, about in rows]


def _cluster(name: str) -> str:
    from flockstep.costs.cluster_file import load_cluster
    from flockstep.report import formatting

    shape = load_cluster(name)
    size = f"{shape.workers} workers on {shape.nodes} machine{'s' if shape.nodes > 1 else ''}"
    wire = shape.slowest
    link = f"{8e-6 * wire.bandwidth:,.0f} Mbit/s and {formatting.seconds(wire.latency)}"
    return f"{shape.about.removesuffix('.')}: {size}; the slowest link has {link}."


def _model(name: str) -> str:
    from flockstep.costs.reference import MODELS, reference

    shape = reference(name)
    layers = sum(1 for layer in shape.layers if layer.parameters)
    counted = f"{shape.parameters:,} parameters in {layers} layers; layers without parameters are not counted."
    return f"{counted} {MODELS[name].source}."


def _arguments(kind: Any) -> list[dict[str, Any]]:
    """Name, type and default of each argument of a component; the default is None if the argument has to be given."""
    from flockstep.expression import Component, fields_of, to_text

    types, found = fields_of(kind), list[dict[str, Any]]()
    for field in dataclasses.fields(kind):
        if field.name in types:
            hint, default = types[field.name], field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            text = to_text(default) if isinstance(default, Component) else repr(default)
            shown = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            given = None if default is dataclasses.MISSING else text
            found.append({"name": field.name, "type": shown, "default": given})
    return found


def systems(
    name: Annotated[str | None, Arg("Name of one system, to show all its details.")] = None,
    as_json: o.Json = False,
) -> None:
    """List the systems of the literature, each with its place in the taxonomy, derived from its composition."""
    from rich.markup import escape

    from flockstep.cli import show
    from flockstep.report.terminal import TableColumn, TextTable
    from flockstep.strategies.base import Strategy
    from flockstep.systems import catalog

    if name is None:
        rows = [known.row() for known in catalog.systems()]
        columns = [TableColumn(heading, text=True, rank=rank) for heading, rank in SYSTEM_COLUMNS.items()]
        show.result(as_json, rows, TextTable(columns, [[row[one] for one in SYSTEM_COLUMNS] for row in rows]))
        return
    known = catalog.system(name)
    modes = [(mode, Strategy.parse(mode.runs)) for mode in known.modes]
    found: dict[str, Any] = {
        **known.row(),
        **{name: getattr(known, name) for name in ("citation", "algorithm", "differs")},
        "modes": [
            {"mode": m.name, "strategy": str(s), "partition": m.partition, "delivery": s.traits.delivery}
            for m, s in modes
        ],
    }
    if as_json:
        show.json(found)
        return
    page = show.page()
    page.print(f"[bold]{escape(found['system'])}[/]")
    lines = [(label, found[label]) for label in ("citation", "algorithm", "differs", *list(SYSTEM_COLUMNS)[1:])]
    for mode in found["modes"]:
        split = "" if mode["partition"] == "none" else f", --partition '{mode['partition']}'"
        lines.append((mode["mode"] or "composition", mode["strategy"] + split))
    for label, text in lines:
        if text:
            page.print(f"  {label:13} {escape(text)}", soft_wrap=True, highlight=False)
    if found["modes"]:
        run = f"-s '{found['system']}' -n 4"
        if (first := found["modes"][0])["partition"] != "none":
            run = f"-s '{first['strategy']}' --partition '{first['partition']}' -n 4"
        page.print(f"  {'run it':13} flockstep simulate digits {escape(run)}", highlight=False)
