"""The commands that run something, and those that look at recorded runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
from click.exceptions import Exit

from flockstep.cli import options as o
from flockstep.errors import ConfigurationError, printable
from flockstep.experiments.folders import folder
from flockstep.experiments.options import (
    ON_PROCESSES,
    STRATEGY,
    CompareOptions,
    RecordOptions,
    SimulateOptions,
    TrainOptions,
    configured,
)
from flockstep.options import (
    Arg,
    BadGradientOptions,
    CheckpointOptions,
    CommonOptions,
    Opt,
    ProcessOptions,
    ScriptOptions,
    options_of,
)

if TYPE_CHECKING:
    from flockstep.records.flight import FlightEvent

SHOWN = 12
"""Number of last events that are shown for each process."""
Count = partial(Opt, names=("--workers", "-n"), least=1, advice="use 1 for one worker")


@dataclass(frozen=True)
class LaunchedScript:
    """A script to launch."""

    script: Annotated[Path, Arg("A Python script that calls flockstep.distribute.")]


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(
    RecordOptions, ScriptOptions, CheckpointOptions, ProcessOptions, BadGradientOptions, CommonOptions, LaunchedScript
):
    """Options of a launched script."""

    strategy: str | None = replace(
        STRATEGY,
        help="How the workers coordinate, in place of the strategy that the script names in every call of "
        "distribute (default: the script's own).",
    ).default()


def train(
    context: click.Context,
    options: TrainOptions,
    where: o.HostOptions,
    resumes: o.Resumes = False,
    as_json: o.Json = False,
) -> None:
    """Train for real, in processes on this machine or on several."""
    from flockstep.cli import runs
    from flockstep.launchers.train import train_for
    from flockstep.runtime.setup import check, prepare

    config = configured("train", options)
    place = folder(options.out, f"{options.job}-{options.strategy}")
    if where.on == "slurm":
        check(config)  # before it waits for its turn
    with o.gathered(context, where, config, place) as (gathering, config):
        if gathering is not None and not gathering.coordinates:
            train_for(gathering, config)
            return
        begun = o.begun_before(context, prepare(config)[2], place) if resumes else None
        runs.run_one(config, place, options.overwrite, as_json, gathering, begun)


def resume(
    context: click.Context,
    folder: o.RunFolderArgument,
    where: o.HostOptions,
    workers: Annotated[
        int | None, Count("Number of workers with which the run continues (default: the number that the run had).")
    ] = None,
    replica_size: Annotated[
        int | None,
        Opt(
            "Number of processes that hold each replica of a script's model from now on (default: the number that the "
            "run had).",
            least=1,
            advice="use a number that divides the number of workers",
        ),
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Continue a run of flockstep train or flockstep launch that has stopped, from its newest checkpoint."""
    from flockstep.cli.runs import resume_one
    from flockstep.launchers.output import Output, to_terminal
    from flockstep.records.folder import RunFolder

    config = RunFolder(folder).read_config()
    asked = replace(config, workers=workers or config.workers, replica_size=replica_size or config.replica_size)
    with o.gathered(context, where, asked, folder, output=Output.of(config, to_terminal)) as (gathering, _):
        if gathering is not None and not gathering.coordinates:
            raise ConfigurationError(
                f"flockstep resume runs on the host with --node-rank 0, got {gathering.node}; on the other hosts "
                f"repeat the command with which the run was started: {config.command}"
            )
        resume_one(folder, as_json, workers, gathering, replica_size)


def join(
    context: click.Context,
    run: Annotated[
        str,
        Arg("Folder of the run on this machine, or the address of the run's coordinator, as host:port.", metavar="RUN"),
    ],
    workers: Annotated[int, Count("Number of workers to add.")] = 1,
    job: Annotated[
        str | None, Opt("Path of the job's file on this host (default: the path at the coordinator).")
    ] = None,
    imports: o.Imports = (),
    secret_file: o.SecretFile = None,
    timeout: o.MeetTimeout = 600.0,
    host_address: o.HostAddress = "",
) -> None:
    """Add workers to a run in progress: on this machine or, for a run of flockstep train, on another host."""
    if Path(run).exists() or ":" not in run:
        from flockstep.launchers.join_requests import ask
        from flockstep.records.folder import RunFolder

        o.refuse(
            context,
            ("job", "imports", "secret_file", "timeout", "host_address"),
            f"applies only to a run on another host, and {run} is a folder of this machine; leave the option out, or "
            "give the address of the run's coordinator, such as 10.0.0.1:29400",
        )
        print(ask(RunFolder(Path(run)), workers))
        return
    from flockstep.launchers.joining_host import join_run
    from flockstep.launchers.meeting import meeting_at, read_secret

    meeting = meeting_at(run, read_secret(secret_file), timeout, host_address)
    join_run(meeting, workers, job, imports)


def simulate(options: SimulateOptions, as_json: o.Json = False) -> None:
    """Train in virtual time: real gradients, modeled seconds."""
    from flockstep.cli import runs
    from flockstep.experiments.single import simulated

    place = folder(options.out, f"{options.job}-{options.strategy}")
    runs.run_one(simulated(options), place, options.overwrite, as_json)


def compare(context: click.Context, options: CompareOptions, where: o.HostOptions, as_json: o.Json = False) -> None:
    """Run several strategies on a job or a script, print a ranked table, and write one self-contained report.html."""
    from flockstep.cli import runs, show
    from flockstep.experiments.comparison import PlannedRun, carry_out_all, grid_of
    from flockstep.launchers.output import Output
    from flockstep.records.summary import Summary
    from flockstep.report import formatting

    grid = grid_of(options)
    if grid.base.kind == "simulate":
        o.refuse(context, options_of(o.HostOptions), ON_PROCESSES)
    alone = where.on == "local" and where.hosts is None
    o.refuse(
        context,
        (*o.BY_HAND, *(("nodes", "timeout", "host_address") if alone else ())),
        "is for hosts that you start yourself, and the processes on such hosts end with one run, but a comparison has "
        "several runs; use --hosts a:4,b:4, --on slurm or --on ray, which start the hosts of each run",
    )
    place = folder(options.out, f"compare-{options.job}")
    if where.on == "slurm":
        grid.groups(place)  # what is invalid is told before it waits for its turn
    began, ran = time.monotonic(), 0

    with o.gathered(context, where, grid.base, place, output=Output("none")) as (gathering, config):
        if gathering is not None:
            grid = replace(grid, base=gathering.over(config))

        def execute(run: PlannedRun, title: str, rest: int, overwrite: bool) -> Summary:
            nonlocal ran
            if ran and rest:
                title += f", {rest} more in about {formatting.seconds((time.monotonic() - began) / ran * rest)}"
            ran += 1
            # one worker alone needs no other host
            hosts = gathering if run.config.workers == grid.base.workers else None
            return runs.run(run.config, run.folder, title, overwrite, hosts)

        found = carry_out_all(grid, place, execute, show.note, lambda found: runs.conclude_comparison(found, as_json))
    raise Exit(1 if found.failures else 0)


def launch(
    context: click.Context,
    options: LaunchOptions,
    where: o.HostOptions,
    resumes: o.Resumes = False,
    debug: Annotated[bool, Opt("Show the traceback if an error occurs.")] = False,
    as_json: o.Json = False,
) -> None:
    """Run your own script, which calls flockstep.distribute or flockstep.join, on several workers."""
    from flockstep.cli import runs
    from flockstep.launchers import script as scripts
    from flockstep.launchers.executable import AS_THE_SCRIPT_SAYS
    from flockstep.launchers.output import Output

    context.obj["debug"] |= debug
    config = configured("launch", options, str(options.script), AS_THE_SCRIPT_SAYS)
    config = replace(config, output=None, prefix=None, rank_output=None)
    if options.strategy is not None:
        config = scripts.with_strategy(config, options.strategy)
    outputs = None if options.rank_output is None else Path(options.rank_output)
    shown = Output(options.output or "all", bool(options.prefix), outputs)
    script, words = scripts.program_of(config)
    place = folder(options.out, f"launch-{options.script if options.module else options.script.stem}")
    if where.on == "slurm":
        scripts.require_script(script)  # before it waits for its turn
    last = [config.job, *config.arguments]
    with o.gathered(context, where, config, place, script=last, output=shown) as (gathering, config):
        if gathering is not None and not gathering.coordinates:
            scripts.launch_for(gathering, script, words, config, shown, options.overwrite)
            return
        begun = o.begun_before(context, shown.kept_in(config), place) if resumes else None
        runs.run_one(config, place, options.overwrite, as_json, gathering, begun, shown)


def secret() -> None:
    """Print a new secret for a run over several hosts: 256 random bits, written as 64 hexadecimal digits."""
    from secrets import token_hex

    print(token_hex(32))


def flight(folder: o.RunFolderArgument, as_json: o.Json = False) -> None:
    """Show what the processes of a run last did before a fault: messages, waits and steps."""
    import msgspec

    from flockstep.cli import show
    from flockstep.records.flight import last_heard
    from flockstep.records.folder import RunFolder

    record = RunFolder(folder).read()
    lost = []
    for loss in record.summary.lost:
        lost += [f"{loss.seconds:.3f} s: {loss.reason}"]
        lost += [f"  {sentence}" for sentence in last_heard(record.flight, loss)]
    if as_json:
        flights = {name: msgspec.to_builtins(events) for name, events in record.flight.items()}
        show.json({"folder": str(folder), "lost": lost, "flight": flights})
        return
    if not record.flight:
        raise ConfigurationError(
            f"{folder} holds no flight recorder, because no fault occurred in this run; name another run"
        )
    for name, events in record.flight.items():
        lost.append(f"{name}: the last {min(SHOWN, len(events))} of {len(events)} events")
        lost += [f"  {_in_words(event)}" for event in events[-SHOWN:]]
    print(*map(printable, lost), sep="\n")


def _in_words(event: FlightEvent) -> str:
    """Describe an event in one line of text."""
    from flockstep.messages import node_name

    peer = "" if event.peer is None else node_name(event.peer)
    size = f", {event.nbytes} bytes" if event.nbytes else ""
    what = {
        "send": f"sent {event.tag} to {peer}",
        "receive": f"received {event.tag} from {peer or 'the launcher'}",
        "wait": f"began to wait for {event.tag}",
        "step": "finished a step",
    }[event.kind]
    return f"{event.seconds:.6f} s, step {event.step}: {what}{size}"


def report(
    folders: Annotated[tuple[Path, ...], Arg("Folders of runs, or the folder of a comparison.")],
    out: Annotated[Path, Opt("HTML file to write the report to.")] = Path("report.html"),
    cluster: Annotated[
        str | None,
        Opt(
            "Also show predictions for this cluster: a name such as lab-1gbit, or a file written by "
            "flockstep calibrate.",
            names=("--cluster", "-c"),
        ),
    ] = None,
    target: Annotated[
        str | None,
        Opt(
            "Value of a metric to which the times to target refer, such as 0.95 or accuracy=0.95 (default: the "
            "runs' own target)."
        ),
    ] = None,
    imports: o.Imports = (),
) -> None:
    """Write an HTML report of recorded runs."""
    from flockstep.costs.cluster_file import load_cluster
    from flockstep.experiments.comparison import runs_in
    from flockstep.planning.check import for_report
    from flockstep.records.config import MetricTarget
    from flockstep.records.folder import RunFolder
    from flockstep.report.html import write_report

    goal = None if target is None else MetricTarget.parse(target)
    found = [run for given in folders for run in runs_in(given)]
    predictions = for_report(found, None if cluster is None else load_cluster(cluster), imports)
    print(write_report([RunFolder(one).read() for one in found], out, predictions=predictions, target=goal))


def track(
    folder: Annotated[Path, Arg("Folder of a run; the run may still be in progress on this host.")],
    to: Annotated[
        str, Opt("Tracker that receives the curves; flockstep list trackers shows all trackers.")
    ] = "tensorboard",
    imports: o.Imports = (),
) -> None:
    """Copy a run's curves into an experiment tracker, and follow the run until it ends."""
    from flockstep.cli import show
    from flockstep.frameworks.job import import_components
    from flockstep.trackers.base import ExperimentTracker
    from flockstep.trackers.track import track as copy

    import_components(imports)
    tracker = ExperimentTracker.parse(to)
    with show.status() as say:
        points = copy(folder, tracker, say)
    show.note(f"copied {points} points of {folder} to {tracker.place}")
