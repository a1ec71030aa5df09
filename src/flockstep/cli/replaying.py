"""`flockstep replay` and `flockstep why`: repeat a recorded run, and find what changed its model."""

from __future__ import annotations

import code
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from click.exceptions import Exit

from flockstep.cli import options as o
from flockstep.errors import ConfigurationError
from flockstep.messages import node_name
from flockstep.options import Opt

if TYPE_CHECKING:
    from flockstep.experiments.replay import Replay

SHOWN = 20
"""Number of changes that `flockstep why` prints."""


def replay(
    folder: o.RunFolderArgument,
    until: Annotated[
        int | None,
        Opt("Number of steps after which each worker waits, so that its state can be looked at.", least=1),
    ] = None,
    rank: Annotated[int | None, Opt("Show only this worker.")] = None,
    as_json: o.Json = False,
) -> None:
    """Repeat a run that was recorded with --replayable, bit for bit, and compare it with the record."""
    from flockstep.cli import show
    from flockstep.experiments.replay import Replay
    from flockstep.records.folder import RunFolder
    from flockstep.report.terminal import TableColumn, TextTable

    began = time.monotonic()
    if RunFolder(folder).read_config().kind == "launch":
        if until is not None or rank is not None:
            raise ConfigurationError(
                f"{folder} holds the run of a script, whose programs run in processes of their own, so that nobody can "
                "look at them; leave out --until and --rank"
            )
        _repeat(folder, as_json)
        return
    with Replay(folder) as found:
        if rank is not None and not 0 <= rank < found.config.workers:
            raise ConfigurationError(f"rank must be >= 0 and < {found.config.workers}, got {rank}; name a worker")
        found.run(until)
        nodes = [one for one in map(_of(found), sorted(found.nodes)) if rank in (None, one["node"])]
        document = {
            "folder": str(folder),
            "equal": found.difference is None,
            "difference": None if found.difference is None else asdict(found.difference),
            "surroundings": found.surroundings,
            "messages": found.messages,
            "gradients": found.gradients,
            "seconds": time.monotonic() - began,
            "run_seconds": RunFolder(folder).read_summary().seconds,
            "nodes": nodes,
        }
        table = TextTable(
            [TableColumn(name) for name in ("node", "step", "evaluations equal", "digest", "messages in flight to it")],
            [[node_name(one["node"]), *map(str, list(one.values())[1:])] for one in nodes],
        )
        show.result(as_json, document, table)
        if not as_json and until is not None and sys.stdin.isatty():
            code.interact("replay.nodes[0].params, replay.in_flight, replay.run(until=…)", local={"replay": found})
    for text in [*_verdict(found, until), *(found.surroundings if found.difference is not None else [])]:
        show.note(f"flockstep: {text}")
    if found.difference is not None:
        raise Exit(1)


def _repeat(folder: Path, as_json: bool) -> None:
    """Repeat the run of a script."""
    from flockstep.cli import show
    from flockstep.launchers.script import repeat_script

    with tempfile.TemporaryDirectory(prefix="flockstep-replay-") as place, show.beside_scripts() as (standings, sink):
        nodes = repeat_script(folder, Path(place) / "run", sink, standings)
    if as_json:
        show.json({"folder": str(folder), "equal": True, "nodes": nodes})
    show.note(f"flockstep: the run was repeated to its end: all {nodes} nodes ended with the parameters of the run")


def _of(found: Replay) -> Any:
    """Function that returns what is shown of a node."""

    def shown(node: int) -> dict[str, Any]:
        equal = [one for one in found.agreements if one.node == node]
        waiting = sum(len(messages) for (_, to), messages in found.in_flight.items() if to == node)
        step = found.nodes[node].run_step
        digest = equal[-1].digest if equal else "-"
        return {"node": node, "step": step, "evaluations": len(equal), "digest": digest, "in_flight": waiting}

    return shown


def _verdict(found: Replay, until: int | None) -> list[str]:
    if found.difference is not None:
        return [f"the replay differs from the run, first here: {found.difference}"]
    end = "as far as its workers came" if until is None else f"until a worker had taken {until} steps"
    if not found.gradients:
        return ["the run was repeated, and nothing was compared, because it had no gradient"]
    equal = f"all {found.gradients} gradients, and the parameters at all {len(found.agreements)} evaluations of a node"
    return [f"the run was repeated {end}; equal were {equal}"]


def why(
    folder: o.RunFolderArgument,
    step: Annotated[float, Opt("Mean number of steps of the workers at the evaluation to explain.")],
    metric: Annotated[str, Opt("Figure of the evaluations to show: loss, divergence, or the job's metric.")] = "loss",
    as_json: o.Json = False,
) -> None:
    """Name the updates that entered the model between two evaluations of a run, the largest first."""
    from flockstep.cli import show
    from flockstep.experiments.influence import explain
    from flockstep.records.folder import RunFolder
    from flockstep.report.terminal import TableColumn, TextTable

    figures_of = {"loss": "loss", "divergence": "divergence", RunFolder(folder).read_config().metric: "metric"}
    if (figure := figures_of.get(metric)) is None:
        known = ", ".join(name for name in figures_of if name is not None)
        raise ConfigurationError(f"metric must be one of {known}, got {metric!r}; choose one")
    found = explain(folder, step)
    figures = [getattr(found.before, figure), getattr(found.after, figure)]
    rows = [
        [
            node_name(one.node),
            str(one.step) if one.node >= 0 else "",
            ", ".join("all others" if source is None else node_name(source) for source in one.sources)
            or ("own step" if one.node >= 0 else ""),
            "" if one.staleness is None else str(one.staleness),
            f"{one.norm:.4g}",
        ]
        for one in found.influences[:SHOWN]
    ]
    document = {
        "folder": str(folder),
        "metric": metric,
        "steps": [found.before.step, found.after.step],
        "values": figures,
        "influences": [asdict(one) for one in found.influences],
    }
    columns = [TableColumn(name) for name in ("changed", "step", "by updates of", "staleness", "norm")]
    show.result(as_json, document, TextTable(columns, rows))
    if not as_json:
        print(
            f"{metric} {figures[0]:.6g} at step {found.before.step:g}, {figures[1]:.6g} at step {found.after.step:g}; "
            f"the {len(rows)} largest of {len(found.influences)} changes between them"
        )
