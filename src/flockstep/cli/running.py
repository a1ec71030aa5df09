"""The commands that run something, and those that look at recorded runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import click
from click.exceptions import Exit

from flockstep.cli import options as o
from flockstep.errors import ConfigurationError
from flockstep.experiments.options import (
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

RunFolderArgument = Annotated[Path, Arg(help="Folder of the run.", metavar="RUN")]
Count = partial(Opt, names=("--workers", "-n"), least=1, advice="use 1 for one worker")


@dataclass(frozen=True)
class LaunchedScript:
    """A script to launch."""

    script: Annotated[Path, Arg(help="A Python script that calls flockstep.distribute.")]


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(
    RecordOptions, ScriptOptions, CheckpointOptions, ProcessOptions, BadGradientOptions, CommonOptions, LaunchedScript
):
    """Options of a launched script."""

    strategy: Annotated[
        str | None,
        replace(
            STRATEGY,
            help="How the workers coordinate, in place of the strategy that the script names in every call of "
            "distribute (default: the script's own).",
        ),
    ] = None


def train(
    context: click.Context,
    options: TrainOptions,
    where: o.HostOptions,
    resumes: o.Resumes = False,
    as_json: o.Json = False,
) -> None:
    """Train for real, in processes on this machine or on several."""
    from flockstep.cli.runs import run_one
    from flockstep.drivers.setup import check, prepare

    config = configured("train", options, str(options.job), str(options.strategy))
    place, overwrite = o.folder(options.out, f"{options.job}-{options.strategy}"), options.overwrite
    if where.on == "slurm":
        check(config)  # before it waits for its turn
    o.leave_to_slurm(context, where, options.workers, place)
    with o.gathered(context, where, options.workers) as gathering:
        if gathering is not None:
            config = o.over_hosts(context, config, gathering)
        if gathering is not None and not gathering.coordinates:
            from flockstep.launchers.train import train_for

            train_for(gathering, config)
            return
        if resumes:
            found = o.continued(context, prepare(config)[2], place, gathering, as_json)
            if found.resumes:
                return
            overwrite |= found.overwrites
        run_one(config, place, as_json, options.target is not None, overwrite, gathering)


def resume(
    context: click.Context,
    folder: RunFolderArgument,
    where: o.HostOptions,
    workers: Annotated[
        int | None, Count(help="Number of workers with which the run continues (default: the number that the run had).")
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Continue a run of flockstep train or flockstep launch that has stopped, from its newest checkpoint."""
    from flockstep.cli.runs import resume_one
    from flockstep.launchers.output import Output, to_terminal
    from flockstep.launchers.script import program_of
    from flockstep.records.folder import RunFolder

    config = RunFolder(folder).read_config()
    many = config.workers if workers is None else workers
    o.leave_to_slurm(context, where, many, folder)
    with o.gathered(context, where, many, program_of(config)[1], Output.of(config, to_terminal)) as gathering:
        if gathering is not None and not gathering.coordinates:
            raise ConfigurationError(
                f"flockstep resume runs on the host with --node-rank 0, got {gathering.node}; on the other hosts "
                f"repeat the command with which the run was started: {config.command}"
            )
        resume_one(folder, as_json, workers, gathering)


def join(
    context: click.Context,
    run: Annotated[
        str,
        Arg(
            metavar="RUN",
            help="Folder of the run on this machine, or the address of the run's coordinator, as host:port.",
        ),
    ],
    workers: Annotated[int, Count(help="Number of workers to add.")] = 1,
    job: Annotated[
        str | None, Opt(help="Path of the job's file on this host (default: the path at the coordinator).")
    ] = None,
    imports: o.Imports = (),
    secret_file: o.SecretFile = None,
    timeout: o.MeetTimeout = 600.0,
    host_address: o.HostAddress = "",
) -> None:
    """Add workers to a run in progress: on this machine or, for a run of flockstep train, on another host."""
    from flockstep.launchers.join_requests import ask
    from flockstep.records.folder import RunFolder

    if Path(run).exists() or ":" not in run:
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
    from flockstep.cli.runs import run_one
    from flockstep.experiments.single import simulated

    place = o.folder(options.out, f"{options.job}-{options.strategy}")
    run_one(simulated(options), place, as_json, options.target is not None, options.overwrite)


def compare(context: click.Context, options: CompareOptions, where: o.HostOptions, as_json: o.Json = False) -> None:
    """Run several strategies on a job or a script, print a ranked table, and write one self-contained report.html."""
    from flockstep.cli.compare import compare_all
    from flockstep.experiments.comparison import grid_of
    from flockstep.experiments.options import ON_PROCESSES
    from flockstep.launchers.output import Output

    grid = grid_of(options)
    if grid.base.kind == "simulate":
        o.refuse(context, options_of(o.HostOptions), ON_PROCESSES)
    o.refuse_by_hand(context, where)
    place = o.folder(options.out, f"compare-{options.job}")
    if where.on == "slurm":
        grid.groups(place)  # what is invalid is told before it waits for its turn
    o.leave_to_slurm(context, where, options.workers, place)
    with o.gathered(context, where, options.workers, options.arguments, Output("none")) as gathering:
        if gathering is not None:
            grid = replace(grid, base=gathering.over(o.over_hosts(context, grid.base, gathering)))
        code = compare_all(grid, place, as_json, gathering)
    raise Exit(code)


def launch(
    context: click.Context,
    options: LaunchOptions,
    where: o.HostOptions,
    resumes: o.Resumes = False,
    debug: Annotated[bool, Opt(help="Show the traceback if an error occurs.")] = False,
    as_json: o.Json = False,
) -> None:
    """Run your own script, which calls flockstep.distribute or flockstep.join, on several workers."""
    from flockstep.cli.runs import launch_one
    from flockstep.launchers.output import Output
    from flockstep.launchers.script import require_script, script_of_module, with_strategy

    context.obj["debug"] |= debug
    script, words, overwrite = options.script, list(options.arguments), options.overwrite
    config = configured("launch", options, str(script), "as the script says")
    config = replace(config, output=None, prefix=None, rank_output=None)
    if options.strategy is not None:
        config = with_strategy(config, options.strategy)
    folder = None if options.rank_output is None else Path(options.rank_output)
    shown = Output(options.output or "all", bool(options.prefix), folder)
    command, name = [str(script), *words], f"launch-{script.stem}"
    if options.module:
        name, words = f"launch-{script}", command
        script = script_of_module(str(script))
    place = o.folder(options.out, name)
    if where.on == "slurm":
        require_script(script)  # before it waits for its turn
    o.leave_to_slurm(context, where, options.workers, place, command)
    with o.gathered(context, where, options.workers, words, shown) as gathering:
        if gathering is not None:
            config = o.over_hosts(context, config, gathering)
        if gathering is not None and not gathering.coordinates:
            from flockstep.launchers.script import launch_for

            launch_for(gathering, script, words, config, shown, overwrite)
            return
        if resumes:
            found = o.continued(context, shown.kept_in(config), place, gathering, as_json)
            if found.resumes:
                return
            overwrite |= found.overwrites
        launch_one(script, words, config, place, as_json, shown, overwrite, gathering)


def secret() -> None:
    """Print a new secret for a run over several hosts: 256 random bits, written as 64 hexadecimal digits."""
    from secrets import token_hex

    print(token_hex(32))


def report(
    folders: Annotated[tuple[Path, ...], Arg(help="Folders of runs, or the folder of a comparison.")],
    out: Annotated[Path, Opt(help="HTML file to write the report to.")] = Path("report.html"),
    cluster: Annotated[
        str | None,
        Opt(
            names=("--cluster", "-c"),
            help="Also show predictions for this cluster: a name such as lab-1gbit, or a file written by "
            "flockstep calibrate.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        Opt(
            help="Value of a metric to which the times to target refer, such as 0.95 or accuracy=0.95 (default: the "
            "runs' own target)."
        ),
    ] = None,
    imports: o.Imports = (),
) -> None:
    """Write an HTML report of recorded runs."""
    from flockstep.cli.compare import report as draw
    from flockstep.records.config import MetricTarget

    print(draw(folders, out, cluster, imports, None if target is None else MetricTarget.parse(target)))


def flight(folder: RunFolderArgument, as_json: o.Json = False) -> None:
    """Show what the processes of a run last did before a fault: messages, waits and steps."""
    from flockstep.cli.flight import show_flight

    show_flight(folder, as_json)


def track(
    folder: Annotated[Path, Arg(help="Folder of a run; the run may still be in progress on this host.")],
    to: Annotated[
        str, Opt(help="Tracker that receives the curves; flockstep list trackers shows all trackers.")
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
