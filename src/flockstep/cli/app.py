"""The commands of flockstep and their options; other modules implement the commands."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import re
import signal
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.exceptions import TyperException

from flockstep import __version__
from flockstep.cli import listing
from flockstep.cli import options as o
from flockstep.cli.calibrate import calibrate
from flockstep.cli.coordinate import coordinate
from flockstep.cli.help_text import App
from flockstep.cli.manifest import manifest
from flockstep.cli.plan import plan
from flockstep.cli.plug_ins import LAB, CommandGroup
from flockstep.errors import SHOWS_TRACEBACK, ConfigurationError, FlockstepError, Interrupted, UnknownName, printable
from flockstep.simulation import USUAL_COMPUTE, USUAL_NETWORK
from flockstep.system import ENDING, HANGUP

if TYPE_CHECKING:
    from flockstep.records.config import Kind

NAME = "flockstep"
PARTS = ("codec", "collective", "consistency", "feedback", "topology")
"""Components that are arguments of strategies, and for which no command has an option."""
INTERRUPTED = 130
"""Exit code of a command that a signal has ended: 130."""
RUN, LOOK_UP, PLAN, HERE, EVIDENCE, HELP = (
    "Train and compare", "Look up", "Before a run", "This machine", "Evidence (needs flockstep-lab)", "Help",
)  # fmt: skip
"""Headings of the groups of commands in `--help`."""

app = App(
    cls=CommandGroup,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train one neural network on many workers, with the coordination strategy of your choice.",
)


def run(arguments: list[str]) -> int:
    """Run a command; return its exit code: 2 for bad input, 1 for a run that failed, 130 when interrupted."""
    ours, scripts = _divided(arguments)
    rest = [argument for argument in ours if argument != "--debug"] + scripts
    said: dict[str, Any] = {"debug": "--debug" in ours, "arguments": rest, "stopped": "interrupted"}
    interrupt = functools.partial(_interrupt, said)
    for one in ENDING:
        if signal.getsignal(one) == signal.SIG_DFL:  # nohup has SIGHUP ignored
            signal.signal(one, interrupt)
    if isinstance(sys.stdout, io.TextIOWrapper):  # an encoding such as latin-1 lacks characters of help and tables
        sys.stdout.reconfigure(errors="replace")
    try:
        code: int | None = app(rest, prog_name=NAME, standalone_mode=False, obj=said)
        if code == INTERRUPTED:  # typer's way of saying that a KeyboardInterrupt came through
            raise Interrupted(said["stopped"])
        print(end="", flush=True)  # what fails here would otherwise fail after the exit code is settled
        return code or 0
    except FlockstepError as error:
        return _say(error, INTERRUPTED if isinstance(error, Interrupted) else error.exit_code, said["debug"])
    except typer.Exit as error:
        return error.exit_code
    except TyperException as error:
        return _say(_unknown_option(error) or _missing(error) or _no_number(error) or error, 2, said["debug"])
    except (KeyboardInterrupt, typer.Abort) as error:
        return _say(
            Interrupted(str(error) or "interrupted"),
            INTERRUPTED,
            said["debug"] and isinstance(error, KeyboardInterrupt),
        )
    except OSError as error:  # a folder that cannot be written to, a full disk
        return _say(error, 1, said["debug"])


def _divided(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments in which --debug is looked for here; those of `launch`, which tells a script's own from its own."""
    at = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), 0)
    return (arguments[:at], arguments[at:]) if arguments[at : at + 1] == ["launch"] else (arguments, [])


def _unknown_option(error: TyperException) -> UnknownName | None:
    """The error for an option that the command does not have; None if `error` has another reason."""
    name, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if not hasattr(error, "possibilities") or name is None or context is None:
        return None
    known = [option for parameter in context.command.params for option in parameter.opts if option.startswith("-")]
    if context.command.name == "train" and name in ("--network", "--compute", "--cluster"):
        return UnknownName(f"{name} has an effect in virtual time only; leave it out, or use flockstep simulate")
    if (noun := name.removeprefix("--")) in PARTS:
        return UnknownName(
            f"{context.command_path} has no option {name}, because a {noun} is an argument of the strategy; write it "
            f"there, as in all_reduce(codec=half); flockstep list {noun} shows all"
        )
    command = f"flockstep help {context.command_path.partition(' ')[2]}"
    return UnknownName.among(f"option of {context.command_path}", name, known, command=command)


def _missing(error: TyperException) -> ConfigurationError | None:
    """The error for an argument or an option that is required; None if `error` has another reason."""
    parameter, context = getattr(error, "param", None), getattr(error, "ctx", None)
    if type(error).__name__ != "MissingParameter" or parameter is None or context is None:
        return None
    if parameter.name == "strategy":
        from flockstep.strategies.base import missing_strategy

        return missing_strategy(context.command_path, " after -s")
    name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.name.upper()
    what = f"{parameter.help[:1].lower()}{parameter.help[1:]}".removesuffix(".")
    return ConfigurationError(f"{context.command_path} needs {name}: {what}")


def _no_number(error: TyperException) -> ConfigurationError | None:
    """The error for an option's value that is not a number; None if `error` has another reason."""
    parameter, details = getattr(error, "param", None), getattr(error.__cause__, "errors", None)
    if parameter is None or details is None:
        return None
    found = details()[0]
    kinds = {"float_parsing": ("a number", "0.1"), "int_parsing": ("a whole number", "4")}
    if found["type"] not in kinds:
        return None
    wanted, example = kinds[found["type"]]
    if re.fullmatch(r"[0-9.]{1,9}[eE]\+?[0-9]", str(found["input"])):
        example = f"{float(found['input']):.0f}"
    return ConfigurationError(f"{parameter.opts[0]} must be {wanted}, got {found['input']!r}; write it like {example}")


def _interrupt(said: dict[str, Any], signum: int, frame: FrameType | None) -> None:
    why = " because the terminal has closed" if signum == HANGUP else ""
    said["stopped"] = f"stopped by {signal.Signals(signum).name}{why}"  # typer drops the text of the exception
    raise KeyboardInterrupt(said["stopped"])


def _say(error: Exception, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    text = error.format_message() if isinstance(error, TyperException) else str(error)
    text = text.replace(SHOWS_TRACEBACK, "") if debug else text
    if isinstance(error, OSError) and error.filename is None and _output_is_stuck():
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way = (
            "free space on its disk, or send the output to another place"
            if full
            else "send the output to another place"
        )
        text = f"cannot write to standard output: {error.strerror}; {way}"
    elif isinstance(error, OSError) and error.strerror:
        where = "" if error.filename is None else f" {error.filename}"
        text = f"cannot use{where}: {error.strerror}; solve this problem, or choose another place with --out"
    with contextlib.suppress(OSError):  # of a terminal that is gone
        print(f"flockstep: {printable(text)}", file=sys.stderr)
    return code


def _output_is_stuck() -> bool:
    """Whether standard output does not take what was printed; then that is dropped, for nobody can be given it."""
    try:
        print(end="", flush=True)
        sys.stdout.buffer.write(b"")  # under PYTHONUNBUFFERED nothing was left for the line above
    except OSError:
        with contextlib.suppress(OSError), Path(os.devnull).open("wb") as nowhere:  # not again when Python exits
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return True
    return False


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            help="Show the traceback if an error occurs. Also after a command, and for launch before the script.",
        ),
    ] = False,
) -> None:
    if version:
        show_version()
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(rich_help_panel=RUN)
@o.with_hosts
def train(
    context: typer.Context,
    job: o.JobArgument,
    strategy: o.StrategyText,
    workers: o.Workers = 4,
    seed: o.Seed = 0,
    epochs: o.Epochs = None,
    steps: o.Steps = None,
    batch: o.Batch = None,
    lr: o.Lr = None,
    schedule: o.ScheduleText = None,
    split: o.SplitText = "iid",
    partition: o.PartitionText = None,
    target: o.Target = None,
    evaluate_every: o.EvaluateEvery = None,
    faults: o.Faults = None,
    on_bad_gradient: o.OnBadGradient = "stop",
    max_gradient_norm: o.MaxGradientNorm = None,
    strikes: o.Strikes = 3,
    result: o.Result = None,
    transport: o.TransportText = "shared_memory",
    heartbeat: o.Heartbeat = 5.0,
    link_timeout: o.LinkTimeout = 60.0,
    step_timeout: o.StepTimeout = None,
    threads: o.Threads = 1,
    imports: o.Imports = None,
    where: o.HostOptions = o.HERE,
    checkpoint_every: o.CheckpointEvery = None,
    keep: o.Keep = None,
    min_workers: o.MinWorkers = None,
    max_workers: o.MaxWorkers = None,
    out: o.Out = None,
    resumes: o.Resumes = False,
    overwrite: o.Overwrite = False,
    shared: o.SharedRecord = None,
    as_json: o.Json = False,
) -> None:
    """Train for real, in processes on this machine or on several."""
    from flockstep.cli.runs import run_one
    from flockstep.drivers.setup import check, prepare

    config = o.configured("train", locals())
    place = o.folder(out, f"{job}-{strategy}")
    if where.on == "slurm":
        check(config)  # before it waits for its turn
    o.leave_to_slurm(context, where, workers, place)
    with o.gathered(context, where, workers) as gathering:
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
        run_one(config, place, as_json, target is not None, overwrite, gathering)


@app.command(rich_help_panel=RUN)
@o.with_hosts
def resume(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-n",
            min=1,
            help="Number of workers with which the run continues (default: the number that the run had).",
        ),
    ] = None,
    where: o.HostOptions = o.HERE,
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


@app.command(rich_help_panel=RUN)
def join(
    context: typer.Context,
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Folder of the run on this machine, or the address of the run's coordinator, as host:port.",
        ),
    ],
    workers: Annotated[int, typer.Option("--workers", "-n", min=1, help="Number of workers to add.")] = 1,
    job: Annotated[
        str | None, typer.Option(help="Path of the job's file on this host (default: the path at the coordinator).")
    ] = None,
    imports: o.Imports = None,
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
    join_run(meeting, workers, job, imports or ())


@app.command(rich_help_panel=RUN)
def simulate(
    context: typer.Context,
    job: o.JobArgument,
    strategy: o.StrategyText,
    workers: o.Workers = 16,
    network: o.NetworkText = USUAL_NETWORK,
    compute: o.ComputeText = USUAL_COMPUTE,
    cluster: o.ClusterText = None,
    faults: o.Faults = None,
    seed: o.Seed = 0,
    epochs: o.Epochs = None,
    steps: o.Steps = None,
    batch: o.Batch = None,
    lr: o.Lr = None,
    schedule: o.ScheduleText = None,
    split: o.SplitText = "iid",
    partition: o.PartitionText = None,
    target: o.Target = None,
    until_target: o.UntilTarget = False,
    evaluate_every: o.EvaluateEvery = None,
    on_bad_gradient: o.OnBadGradient = "stop",
    max_gradient_norm: o.MaxGradientNorm = None,
    strikes: o.Strikes = 3,
    result: o.Result = None,
    threads: o.Threads = 1,
    imports: o.Imports = None,
    out: o.Out = None,
    overwrite: o.Overwrite = False,
    shared: o.SharedRecord = None,
    as_json: o.Json = False,
) -> None:
    """Train in virtual time: real gradients, modeled seconds."""
    from flockstep.cli.runs import run_one
    from flockstep.experiments.single import on_cluster

    config = on_cluster(o.configured("simulate", locals()), o.cluster_of(cluster, imports, context))
    run_one(config, o.folder(out, f"{job}-{strategy}"), as_json, target is not None, overwrite)


@app.command(rich_help_panel=RUN)
@o.with_hosts
def compare(
    context: typer.Context,
    job: o.ComparedArgument,
    strategy: Annotated[
        list[str],
        typer.Option(
            "--strategy", "-s", help="Strategy to compare; repeat the option for several.", autocompletion=o.STRATEGY
        ),
    ],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments for a script, after --.")] = None,
    workers: o.Workers = 4,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Run in virtual time instead of on real processes.")
    ] = False,
    network: o.NetworkText = USUAL_NETWORK,
    compute: o.ComputeText = USUAL_COMPUTE,
    cluster: o.ClusterText = None,
    faults: o.Faults = None,
    seed: o.Seed = 0,
    seeds: o.Seeds = 1,
    reference: Annotated[
        bool,
        typer.Option(
            "--reference/--no-reference",
            help="Train one worker alone too, with as many samples: what are the other workers worth?",
        ),
    ] = True,
    epochs: o.Epochs = None,
    steps: o.Steps = None,
    batch: o.Batch = None,
    lr: o.Lr = None,
    lr_grid: o.LrGrid = None,
    schedule: o.ScheduleText = None,
    split: o.SplitText = "iid",
    partition: o.PartitionText = None,
    target: o.Target = None,
    until_target: o.UntilTarget = False,
    evaluate_every: o.EvaluateEvery = None,
    result: o.Result = None,
    transport: o.TransportText = "shared_memory",
    heartbeat: o.Heartbeat = 5.0,
    link_timeout: o.LinkTimeout = 60.0,
    step_timeout: o.StepTimeout = None,
    threads: o.Threads = 1,
    imports: o.Imports = None,
    where: o.HostOptions = o.HERE,
    out: o.Out = None,
    shared: o.SharedRecord = None,
    as_json: o.Json = False,
) -> None:
    """Run several strategies on a job or a script, print a ranked table, and write one self-contained report.html."""
    from flockstep.cli.compare import compare_all
    from flockstep.experiments.comparison import Grid, kind_of
    from flockstep.launchers.output import Output

    kind: Kind = kind_of(job, simulate)
    o.refuse_idle(kind, context)
    o.refuse_by_hand(context, where)
    base = o.configured(kind, {**locals(), "strategy": "", "arguments": tuple(arguments or ())})
    shape = o.cluster_of(cluster, imports, context)
    grid = Grid(base, tuple(strategy), o.rates(lr_grid, lr), seeds, shape, reference)
    place = o.folder(out, f"compare-{job}")
    if where.on == "slurm":
        grid.groups(place)  # what is invalid is told before it waits for its turn
    o.leave_to_slurm(context, where, workers, place)
    with o.gathered(context, where, workers, arguments or (), Output("none")) as gathering:
        if gathering is not None:
            grid = replace(grid, base=gathering.over(o.over_hosts(context, base, gathering)))
        code = compare_all(grid, place, as_json, gathering)
    raise typer.Exit(code)


@app.command(rich_help_panel=RUN, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@o.with_hosts
def launch(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python script that calls flockstep.distribute.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments for the script, also those that look like options of flockstep."),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as with python -m.")] = False,
    strategy: o.ScriptStrategy = None,
    workers: o.Workers = 4,
    transport: o.TransportText = "shared_memory",
    heartbeat: o.Heartbeat = 5.0,
    link_timeout: o.LinkTimeout = 60.0,
    step_timeout: o.StepTimeout = None,
    on_bad_gradient: o.OnBadGradient = "stop",
    max_gradient_norm: o.MaxGradientNorm = None,
    strikes: o.Strikes = 3,
    threads: o.ScriptThreads = None,
    seed: o.ScriptSeed = 0,
    target: o.Target = None,
    imports: o.Imports = None,
    output: o.Ranks = "all",
    prefix: o.Prefix = False,
    rank_output: o.RankOutputFolder = None,
    where: o.HostOptions = o.HERE,
    out: o.Out = None,
    checkpoint_every: o.CheckpointEvery = None,
    keep: o.Keep = None,
    min_workers: o.MinWorkers = None,
    max_workers: o.MaxWorkers = None,
    resumes: o.Resumes = False,
    overwrite: o.Overwrite = False,
    shared: o.SharedRecord = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback if an error occurs.")] = False,
    as_json: o.Json = False,
) -> None:
    """Run your own script, which calls flockstep.distribute or flockstep.join, on several workers."""
    from flockstep.cli.runs import launch_one
    from flockstep.launchers.output import Output
    from flockstep.launchers.script import require_script, script_of_module, with_strategy

    context.obj["debug"] |= debug
    named = {"job": str(script), "strategy": "as the script says"}
    called = {"arguments": tuple(arguments or ()), "module": module or None}
    config = o.configured("launch", {**locals(), **named, **called})
    if strategy is not None:
        config = with_strategy(config, strategy)
    shown = Output(output, prefix, rank_output)
    name, words = f"launch-{script.stem}", [str(script), *(arguments or [])]
    if module:
        name, arguments = f"launch-{script}", words
        script = script_of_module(str(script))
    place = o.folder(out, name)
    if where.on == "slurm":
        require_script(script)  # before it waits for its turn
    o.leave_to_slurm(context, where, workers, place, words)
    with o.gathered(context, where, workers, arguments or [], shown) as gathering:
        if gathering is not None:
            config = o.over_hosts(context, config, gathering)
        if gathering is not None and not gathering.coordinates:
            from flockstep.launchers.script import launch_for

            launch_for(gathering, script, arguments or [], config, shown, overwrite)
            return
        if resumes:
            found = o.continued(context, shown.kept_in(config), place, gathering, as_json)
            if found.resumes:
                return
            overwrite |= found.overwrites
        launch_one(script, arguments or [], config, place, as_json, shown, overwrite, gathering)


app.command(rich_help_panel=RUN, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
    manifest
)
app.command(rich_help_panel=RUN, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
    coordinate
)


@app.command(rich_help_panel=RUN)
def secret() -> None:
    """Print a new secret for a run over several hosts: 256 random bits, written as 64 hexadecimal digits."""
    from secrets import token_hex

    print(token_hex(32))


@app.command("list", rich_help_panel=LOOK_UP)
def list_components(
    what: Annotated[
        str | None,
        typer.Argument(
            help="A kind, such as strategies, codecs or clusters, or a component, such as topk (default: a summary).",
            autocompletion=listing.complete,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every component of every kind.")] = False,
    imports: o.Imports = None,
    as_json: o.Json = False,
) -> None:
    """List the components: a summary of all kinds, all components of one kind, or one component with its arguments."""
    if imports:
        from flockstep.frameworks.job import import_components

        import_components(imports)
    listing.show(what, everything, as_json)


@app.command(rich_help_panel=LOOK_UP)
def systems(
    name: Annotated[str | None, typer.Argument(help="Name of one system, to show all its details.")] = None,
    as_json: o.Json = False,
) -> None:
    """List the systems of the literature, each with its place in the taxonomy, derived from its composition."""
    from flockstep.cli.systems import show_systems

    show_systems(name, as_json)


@app.command(rich_help_panel=PLAN)
def layers(
    what: Annotated[
        str, typer.Argument(help="A job, a Python file with model() and inputs(), or a reference model such as vgg-a.")
    ],
    batch: Annotated[int, typer.Option("--batch", "-b", help="Number of samples per worker and step.")] = 32,
    workers: Annotated[
        int, typer.Option("--workers", "-n", help="Number of workers over which the data, or one layer, is split.")
    ] = 16,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every layer (default: a long table omits layers without parameters).")
    ] = False,
    as_json: o.Json = False,
) -> None:
    """Show a model's layers: parameters, work, depth, and the bytes sent under data parallelism and if the layer is
    split.
    """
    from flockstep.cli.layers import show_layers

    show_layers(what, batch, workers, as_json, everything)


@app.command(rich_help_panel=PLAN)
def layouts(
    what: Annotated[
        list[str] | None,
        typer.Argument(help="Jobs, Python files or reference models (default: vgg-a, resnet-152 and googlenet)."),
    ] = None,
    workers: Annotated[int, typer.Option("--workers", "-n", help="Workers.")] = 16,
    bandwidth: Annotated[str, typer.Option(help="Bandwidth of every worker's link, such as 1gbit.")] = "10gbit",
    as_json: o.Json = False,
) -> None:
    """Show the smallest delay of a step for eight layouts of the parameters, such as naive server, tree and ring."""
    from flockstep.cli.layouts import show_layouts

    show_layouts(what or [], workers, bandwidth, as_json)


@app.command(rich_help_panel=RUN)
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs, or the folder of a comparison.")],
    out: Annotated[Path, typer.Option(help="HTML file to write the report to.")] = Path("report.html"),
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            "-c",
            help="Also show predictions for this cluster: a name such as lab-1gbit, or a file written by "
            "flockstep calibrate.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Value of a metric to which the times to target refer, such as 0.95 or accuracy=0.95 (default: the "
            "runs' own target)."
        ),
    ] = None,
    imports: o.Imports = None,
) -> None:
    """Write an HTML report of recorded runs."""
    from flockstep.cli.compare import report as draw
    from flockstep.records.config import MetricTarget

    print(draw(folders, out, cluster, imports or (), None if target is None else MetricTarget.parse(target)))


@app.command(rich_help_panel=RUN)
def flight(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")], as_json: o.Json = False
) -> None:
    """Show what the processes of a run last did before a fault: messages, waits and steps."""
    from flockstep.cli.flight import show_flight

    show_flight(folder, as_json)


@app.command(rich_help_panel=RUN)
def track(
    folder: Annotated[Path, typer.Argument(help="Folder of a run; the run may still be in progress on this host.")],
    to: Annotated[
        str, typer.Option(help="Tracker that receives the curves; flockstep list trackers shows all trackers.")
    ] = "tensorboard",
    imports: o.Imports = None,
) -> None:
    """Copy a run's curves into an experiment tracker, and follow the run until it ends."""
    from flockstep.cli import show
    from flockstep.frameworks.job import import_components
    from flockstep.trackers.base import ExperimentTracker
    from flockstep.trackers.track import track as copy

    import_components(imports or ())
    tracker = ExperimentTracker.parse(to)
    with show.status() as say:
        points = copy(folder, tracker, say)
    show.note(f"copied {points} points of {folder} to {tracker.place}")


app.command(rich_help_panel=PLAN)(plan)
app.command(rich_help_panel=HERE)(calibrate)
for _name, _does in LAB.items():
    app.command(_name, rich_help_panel=EVIDENCE, help=_does)(lambda: None)


@app.command(rich_help_panel=HERE)
def doctor(as_json: o.Json = False) -> None:
    """Test the installation: try every transport, launcher and extra, and say what to install."""
    from flockstep.cli import show
    from flockstep.doctor import examine

    with show.status() as say:
        report = examine(say=say)
    if as_json:
        show.json(report.document())
    else:
        print(report)
    if report.interrupted is not None:
        raise Interrupted(report.interrupted)
    raise typer.Exit(0 if report.works else 1)


@app.command("help", rich_help_panel=HELP)
def show_help(
    command: Annotated[
        list[str] | None, typer.Argument(help="Command to explain, such as train or bench codecs.")
    ] = None,
) -> None:
    """Show what a command does, and its options."""
    app([*(command or []), "--help"], prog_name=NAME, standalone_mode=False)


@app.command("version", rich_help_panel=HELP)
def show_version() -> None:
    """Print the version of flockstep."""
    print(f"{NAME} {__version__}")
