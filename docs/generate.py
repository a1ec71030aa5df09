"""Rewrites the tables in README.md and docs/**/*.md that stand between `<!-- generated: NAME -->` and `<!-- end -->`.

Everything in them comes from the registry, from the classes' traits and docstrings, from a run in virtual time of each
strategy, and from rows that a benchmark has written; nothing is kept by hand.

    python docs/generate.py            rewrite what is not up to date
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import itertools
import json
import math
import re
import shlex
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from flockstep import registry
from flockstep.cli.app import app
from flockstep.cli.commands import commands_of
from flockstep.cli.listing import listing
from flockstep.codecs.base import Codec
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.expression import Component, fields_of, to_text
from flockstep.options import options_of_kind
from flockstep.records import config, events, summary
from flockstep.strategies.base import Optimization, Scheduling, Strategy, Traits
from flockstep.systems.catalog import System, systems
from flockstep.testing.strategies import Sent, run_strategy
from flockstep_lab import failure_matrix
from flockstep_lab.claims.base import Claim
from flockstep_lab.cli.reproduce import known as known_claims

sys.path.insert(0, str(Path(__file__).parent))
import proofs
import scenarios

ROOT = Path(__file__).parents[1]
ATTACKERS = ROOT / "benchmarks" / "attackers.json"
SLOW_LINKS = ROOT / "benchmarks" / "slow_links.json"
PERFORMANCE = ROOT / "benchmarks" / "performance.json"
WORKERS, STEPS = 4, 100
"""The run that the traffic column is taken from."""
OPTIMIZATIONS, SCHEDULINGS = typing.get_args(Optimization), typing.get_args(Scheduling)
WORDS = {"central": "gradients or updates, for one model", "decentral": "models, of replicas that differ"}
_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages(root: Path = ROOT) -> list[Path]:
    """The files that may hold generated parts."""
    return [root / "README.md", *sorted((root / "docs").glob("**/*.md"))]


def rewritten(text: str) -> str:
    """`text` with every generated part made anew.

    Raises:
        KeyError: nothing is generated under a name in it.
    """
    return _PART.sub(lambda found: f"{found[1]}{PARTS[found[2]]()}\n{found[3]}", text)


def outdated(root: Path = ROOT) -> list[Path]:
    """The pages whose generated parts are not what they would be now."""
    return [path for path in pages(root) if rewritten(path.read_text("utf-8")) != path.read_text("utf-8")]


def main() -> None:
    """Rewrite what is not up to date, and say which pages those were."""
    for path in outdated():
        path.write_text(rewritten(path.read_text("utf-8")), "utf-8")
        sys.stdout.write(f"rewritten: {path.relative_to(ROOT)}\n")


def strategies() -> str:
    """One row for each strategy, and for each of its variants that promises something else."""
    heading = ("strategy", "delivery", "what travels", "models a step", "deaths survived", "clips", "after")
    return table(heading, [row for name in registry.names("strategy") for row in _strategy_rows(name)])


def families() -> str:
    """The strategies by their place in the taxonomy, shortly."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in registry.names("strategy"):
        cell = registry.load("strategy", name)().taxonomy_entry
        if cell is not None:
            found.setdefault((cell.optimization, cell.scheduling), []).append(_code(name))
    order = sorted(found.items(), key=lambda item: (OPTIMIZATIONS.index(item[0][0]), SCHEDULINGS.index(item[0][1])))
    rows = [(WORDS[optimization], scheduling, ", ".join(names)) for (optimization, scheduling), names in order]
    return table(("what is exchanged", "scheduling", "strategies"), rows)


def _strategy_rows(name: str) -> Iterator[tuple[str, ...]]:
    kind = registry.load("strategy", name)
    write = next(row["write"] for row in listing("strategy") if row["name"] == name)
    promised: list[tuple[object, ...]] = []
    for strategy, what in [(kind(), kind), *_variants(kind)]:
        traits = strategy.traits
        promise = (traits.delivery, _deaths(traits))
        if promise in promised:
            continue
        text = _code(to_text(strategy) if promised else write)
        promised.append(promise)
        yield text, traits.delivery, *_traffic(strategy), _deaths(traits), _clips(strategy), _sources(what)


def _deaths(traits: Traits) -> str:
    """How many deaths of workers a strategy survives, in words."""
    if traits.survives is True:
        return "any number" if traits.least == 1 else f"while {traits.least} are left"
    return str(int(traits.survives)) if traits.survives else "none"


def _clips(strategy: Strategy) -> str:
    """What `flockstep.clip_grad_norm_` clips in a script's own loop."""
    traits = strategy.traits
    if traits.needs_job:
        return "–"
    combined = "combined, on the server" if traits.server_optimizer else "combined"
    return {"own": "own", "combined": combined, "none": "refused"}[traits.clips]


def _variants(kind: type[Strategy]) -> Iterator[tuple[Strategy, type]]:
    """The strategy with each value of each hyper-parameter that has a list of values; and the class to cite."""
    for name, hint in fields_of(kind).items():
        if typing.get_origin(hint) is Literal:
            for value in typing.get_args(hint):
                with contextlib.suppress(CompositionError, ConfigurationError):  # it needs another one to go with it
                    yield kind(**{name: value}), kind
        elif isinstance(hint, type) and issubclass(hint, Component) and hint.noun == "consistency":
            for part in (registry.load(hint.noun, other) for other in registry.names(hint.noun)):
                with contextlib.suppress(CompositionError):
                    yield kind(**{name: part()}), part


def _traffic(strategy: Strategy) -> tuple[str, str]:
    """The messages of a run that carry arrays, and how many models they come to for each worker and step."""
    run = run_strategy(strategy, WORKERS, STEPS)
    sent = [entry for entry in run.simulation.log if isinstance(entry, Sent) and entry.message.payload_bytes]
    kinds: dict[str, None] = {}
    for entry in sent:
        message = entry.message
        to = "the server" if entry.to < 0 else "a peer"
        tag = _code(message.tag.partition("/")[0])  # without its channel
        kinds[f"reply to {tag}" if message.reply_to else f"{tag} to {to}"] = None
    models = sum(entry.message.payload_bytes for entry in sent) / (WORKERS * STEPS * run.result.nbytes)
    return ", ".join(kinds), f"{models:.2f}"


def _sources(kind: type) -> str:
    """The first brackets of a docstring: whom it follows."""
    summary_of = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
    found = re.search(r"\(([^()]+)\)", summary_of)
    return found[1] if found else ""


def failures() -> str:
    """The failure and consistency matrix."""
    heading = (
        "strategy",
        "delivery",
        "replicas equal",
        "dead worker",
        "dead server",
        "lost message",
        "slow worker",
        "why",
    )
    return table(heading, [tuple(_failure_cells(row)) for row in failure_matrix.rows()])


def _failure_cells(row: failure_matrix.FailureRow) -> Iterator[str]:
    lost = row.lost if isinstance(row.lost, str) else "; ".join(f"{_code(k)}: {v}" for k, v in row.lost.items())
    yield from (_code(row.strategy), row.delivery, row.equal, row.dead, row.server, lost, row.slow, row.why)


def fault_scenarios() -> str:
    """The faults that a run should survive, with the tests that hold them."""
    heading = ("fault", "what happens", "bound", "measured", "tests")
    return table(heading, [scenario.cells for scenario in scenarios.scenarios()])


def components(noun: str) -> Callable[[], str]:
    """The table of one noun: how to write each, and what it is."""

    def rows() -> str:
        return table(("write", "what it is"), [(_code(row["write"]), row["summary"]) for row in listing(noun)])

    return rows


def commands() -> str:
    """The command line: what each command takes and does."""
    rows = []
    for name, command in commands_of(app):
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        words = [f"{p.name}".upper() if p.required else f"[{p.name}]".upper() for p in arguments]
        rows.append((_code(" ".join(["flockstep", name, *words])), " ".join((command.help or "").split())))
    return table(("command", "does"), rows)


def example(name: str) -> Callable[[], str]:
    """A program of examples/, as a block with the file's name."""

    def block() -> str:
        return f'```python title="{name}"\n{(ROOT / "examples" / name).read_text("utf-8")}```'

    return block


def home() -> str:
    """The first screen of README.md, for the site: its text up to the end of the section on installing."""
    text = (ROOT / "README.md").read_text("utf-8")
    found = re.search(r"\A.*?^## Install.*?(?=^## )", text, re.MULTILINE | re.DOTALL)
    assert found is not None, "README.md has no section called Install"
    return without_far_links(found[0].strip().replace("](docs/", "](").replace('="docs/', '="'))


def limits() -> str:
    """What README.md says about what flockstep does not do."""
    found = re.search(r"^## Limits\n.*?(?=^## |\Z)", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None, "README.md has no section called Limits"
    return found[0].strip().replace("](docs/", "](")


def slow_links() -> str:
    """Seconds until the target over slow links: the rows that benchmarks/slow_links.py has kept."""
    reached = "how many of 3 learning rates reached the target: advised strategy, DDP"
    heading = ("job", "links", "advised strategy", "its seconds", "DDP's seconds", "times faster", reached)
    return table(heading, [tuple(_slow_cells(row)) for row in json.loads(SLOW_LINKS.read_text("utf-8"))])


def _slow_cells(row: dict[str, Any]) -> Iterator[str]:
    ours, theirs = row["flockstep"], row["ddp"]
    yield f"`{row['job']}`"
    yield row["link"].replace("mbit", " Mbit/s")
    yield row["advised"] if " " in row["advised"] else f"`{row['advised']}`"
    yield from ("not reached" if seconds is None else f"{seconds:.{int(seconds < 10)}f}" for seconds in (ours, theirs))
    yield "–" if ours is None or theirs is None else f"{theirs / ours:.1f}"
    yield ", ".join(str(sum(time is not None for time in rates.values())) for rates in row["rates"])


def performance() -> str:
    """What flockstep costs beside others: the rows that benchmarks/all.py has kept."""
    found = json.loads(PERFORMANCE.read_text("utf-8"))
    machine = ", ".join(f"{name} {text}" for name, text in found["machine"].items())
    rows = [tuple(row) for part in found["rows"].values() for row in part]
    return f"{machine}\n\n{table(('work', 'beside', 'flockstep'), rows)}"


def attackers() -> str:
    """Accuracy of each aggregation under attack, and its cost: the rows that benchmarks/attackers.py has kept."""
    rows = json.loads(ATTACKERS.read_text("utf-8"))
    attacks = list(rows[0]["accuracy"])
    heading = ("rule", "cost", *("no attacker" if attack == "none, 0" else attack for attack in attacks))
    return table(
        heading,
        [(_code(row["rule"]), f"{row['cost']:g}", *(f"{row['accuracy'][a]:.0f}" for a in attacks)) for row in rows],
    )


def without_far_links(text: str) -> str:
    """`text` without links to headings that it does not have, other than those to the limits."""
    return re.sub(r"\[([^]]*)\]\(#(?!limits)[^)]*\)", r"\1", text)


def difference() -> str:
    """What `flockstep.distribute` changes in a script: the difference of the two examples, as `diff -u` has it."""
    names = [f"examples/{name}.py" for name in ("one_process", "own_loop")]
    command = ["diff", "-u", *(word for name in names for word in ("--label", name)), *names]
    found = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603
    return f"```diff\n{found.stdout}```"


def event_fields() -> str:
    """Every event with its fields."""
    parts = []
    for kind in typing.get_args(events.Event):
        fields = ", ".join(f"{_code(field.name)} {_type(field.type)}" for field in msgspec.structs.fields(kind))
        text = " ".join((inspect.getdoc(kind) or "").split())
        parts.append((_code(str(kind.__struct_config__.tag)), text, fields))
    return table(("`type`", "what happened", "fields"), parts)


def summary_fields() -> str:
    """Every field of a summary."""
    return _fields_of_class(summary.Summary, {f.name: f.type for f in msgspec.structs.fields(summary.Summary)})


def worker_fields() -> str:
    """Every field of a worker's totals."""
    kind = summary.WorkerTotals
    return _fields_of_class(kind, {f.name: f.type for f in msgspec.structs.fields(kind)})


def config_fields() -> str:
    """Every setting in config.toml."""
    kind = config.RunConfig
    hints = typing.get_type_hints(kind)
    said = {name: option.help for name, option in options_of_kind("all")}
    for one in (config.RunSubject, kind):
        said |= attribute_docstrings(one)
    rows = [(_code(f.name), _type(hints[f.name]), said[f.name]) for f in dataclasses.fields(kind)]
    return table(("field", "type", "meaning"), rows)


def _fields_of_class(kind: type, types: dict[str, Any]) -> str:
    said = attribute_docstrings(kind)
    return table(
        ("field", "type", "meaning"), [(_code(name), _type(t), said.get(name, "")) for name, t in types.items()]
    )


def attribute_docstrings(kind: type) -> dict[str, str]:
    """Field → the string that stands below it in the class, or below its assignment in `__init__`."""
    body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(kind)).body[0]).body
    made = [one.body for one in body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    found = {}
    for field, after in itertools.chain(itertools.pairwise(body), *map(itertools.pairwise, made)):
        if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
            continue
        if isinstance(field, ast.AnnAssign | ast.Assign):
            target = field.target if isinstance(field, ast.AnnAssign) else field.targets[0]
            found[ast.unparse(target).removeprefix("self.")] = " ".join(str(after.value.value).split())
    return found


def _type(hint: Any) -> str:
    """A type as a reader of JSON or TOML knows it."""
    if hint is type(None):
        return "null"
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(_code, typing.get_args(hint)))
    if typing.get_origin(hint) in (list, tuple, dict):
        return "dict" if typing.get_origin(hint) is dict else "list"
    options = typing.get_args(hint) or ()
    name: str = hint.__name__ if not options else " or ".join(map(_type, options))
    return name


def table(heading: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [heading, ("---",) * len(heading), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`"


def proof_table() -> str:
    """Algorithm → the tests that prove it."""
    heading = ("kind", "algorithm", "equals plain numpy", "broken on purpose, it is noticed")
    return table(heading, [(noun, _code(name), *tests) for noun, name, *tests in proofs.rows()])


def systems_table() -> str:
    """Every system's row of the taxonomy, derived from its composition."""
    found = [known.row() for known in systems()]
    return table(tuple(found[0]), [tuple(row.values()) for row in found])


def systems_list() -> str:
    """A section for every system: its rule, its source, its compositions and how to run it."""
    return "\n\n".join(_system_section(known) for known in systems())


def _system_section(known: System) -> str:
    lines = [f"### {known.name}", "", f"{known.algorithm} {known.differs}".strip(), "", f"*{known.citation}*", ""]
    lines += [
        f"* {f'{mode.name}: ' if mode.name else ''}{_code(mode.runs)}"
        + ("" if mode.partition == "none" else f" with `--partition {shlex.quote(mode.partition)}`")
        for mode in known.modes
    ]
    runs = [
        f"{shlex.quote(f'{known.name}: {mode.name}' if index else known.name)}"
        if mode.partition == "none"
        else f"{shlex.quote(mode.runs)} --partition {shlex.quote(mode.partition)}"
        for index, mode in enumerate(known.modes)
    ]
    commands = [f"flockstep simulate digits -s {run} -n 16 --epochs 20" for run in runs]
    return "\n".join([*lines, "", "```sh", *commands, "```"])


def claims() -> str:
    """Every claim that can be tried."""
    rows = []
    for name in known_claims():
        claim = Claim.parse(name)
        rows.append((name, claim.statement, claim.source, claim.tolerance, "yes" if claim.quick else ""))
    return table(("claim", "statement", "source", "asserted", "quick"), rows)


def codec_table() -> str:
    """Every codec: what it is, what it takes on the wire, and what it promises."""
    heading = ("codec", "what it is", "bits an element", "bytes for 1,000", "bytes for 2²⁰", "promises")
    return table(heading, [_codec_cells(name) for name in registry.names("codec")])


def _codec_cells(name: str) -> tuple[str, ...]:
    codec = Codec.parse(name)
    sizes = []
    for shape in ((1000,), (1024, 1024)):
        size = math.prod(shape)
        most = codec.bind_shapes((shape,)).bind_step(0).wire_bytes(size, "float32")
        sizes.append(f"{'' if codec.exact_size else '≤ '}{most:,}")
    bits = 8 * codec.bind_shapes(((1024, 1024),)).bind_step(0).wire_bytes(1 << 20, "float32") / (1 << 20)
    promises = [words for words, holds in _promised(codec) if holds]
    summary_of = (inspect.getdoc(type(codec)) or "").split("\n\n")[0].replace("\n", " ")
    return _code(name), summary_of, f"{'' if codec.exact_size else '≤ '}{bits:.4g}", *sizes, ", ".join(promises)


def _promised(codec: Codec) -> Iterator[tuple[str, bool]]:
    for words in ("lossless", "unbiased", "linear", "contraction", "sparse"):
        yield words, bool(getattr(codec, words))
    yield "one seed for all", codec.shares_seed


def resizing() -> str:
    """The rules by which a run goes on with another number of workers; strategies with equal rules share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in registry.names("strategy"):
        rows.setdefault(_resizing_of(Strategy.parse(name)), []).append(f"`{name}`")
    return table(
        ("strategies", "replicas", "what else is kept"), [(", ".join(names), *row) for row, names in rows.items()]
    )


def _resizing_of(strategy: Strategy) -> tuple[str, str]:
    rule, served = strategy.resizing, strategy.traits.results[0] == "server"
    if not (strategy.traits.checkpoints and strategy.traits.restarts):
        return "refused", "has no checkpoints"
    if rule.refused:
        return "refused", rule.refused
    common = "the parameters of the servers" if served else "the mean of the replicas"
    own = "their own" if served else "their own, moved so that the mean is kept"
    replicas = common if rule.replicas == "common" else f"remaining workers: {own}; new workers: {common}"
    kept = [
        "the servers' optimizer" if strategy.servers else "",
        f"by remaining workers: {_named(rule.own)}" if rule.own else "",
        f"from worker 0, by all: {_named(rule.common)}" if rule.common else "",
        "" if strategy.traits.server_optimizer else _own_optimizer(strategy),
        rule.also,
    ]
    return replicas, "; ".join(filter(None, kept))


def _own_optimizer(strategy: Strategy) -> str:
    new = "like that of worker 0" if strategy.traits.alike else "as at the start"
    return f"each worker's optimizer (of a new worker: {new})"


def _named(fields: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in fields)


PARTS: dict[str, Callable[[], str]] = {
    "strategies": strategies,
    "families": families,
    "proofs": proof_table,
    "systems": systems_table,
    "systems-list": systems_list,
    "claims": claims,
    "codec-sizes": codec_table,
    "failures": failures,
    "fault-scenarios": fault_scenarios,
    "failure-words": lambda: table(("word", "what is observed"), list(failure_matrix.WORDS.items())),
    "commands": commands,
    "difference": difference,
    "one-process": example("one_process.py"),
    "own-loop": example("own_loop.py"),
    "own-job": example("own_job.py"),
    "home": home,
    "limits": limits,
    "resizing": resizing,
    "performance": performance,
    "slow-links": slow_links,
    "attackers": attackers,
    "events": event_fields,
    "summary": summary_fields,
    "workers": worker_fields,
    "config": config_fields,
} | {noun: components(noun) for noun in registry.nouns() if noun != "strategy"}

if __name__ == "__main__":
    main()
