"""The command line: its commands, its errors and its exit codes. Other modules implement the commands."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import click
from click.exceptions import ClickException, Exit, MissingParameter, NoSuchOption
from click.shell_completion import get_completion_class, shell_complete

from flockstep import __version__
from flockstep.cli.commands import CommandEntry, command_of, group_of
from flockstep.cli.options import Json
from flockstep.errors import SHOWS_TRACEBACK, ConfigurationError, FlockstepError, Interrupted, UnknownName, printable
from flockstep.options import Arg, Opt
from flockstep.system import ENDING, HANGUP

NAME = "flockstep"
COMPLETE = "_FLOCKSTEP_COMPLETE"
"""Environment variable with which a shell asks for completions."""
PARTS = ("codec", "collective", "consistency", "feedback", "topology")
"""Components that are arguments of strategies, and for which no command has an option."""
INTERRUPTED = 130
"""Exit code of a command that a signal has ended: 130."""
RUN, LOOK_UP, PLAN, SEALED, HERE, EVIDENCE, HELP = (
    "Train and compare", "Look up", "Before a run", "Sealed jobs", "This machine", "Evidence (needs flockstep-lab)",
    "Help",
)  # fmt: skip
"""Headings of the groups of commands in `--help`."""
LAB = {
    "reproduce": "Reproduce published results: print the published figure, the measured figure, and whether the claim "
    "holds.",
    "chaos": "Kill, stop and slow processes of real runs at random, resume the runs, and check invariants of their "
    "records.",
    "bench": "Measure transports, collectives, codecs and the simulator, and compare each with other implementations.",
}
"""Command of the distribution flockstep-lab, found through its entry points → what the command does."""
_RUNNING = "flockstep.cli.running"
COMMANDS = {
    **{name: CommandEntry(f"{_RUNNING}:{name}", RUN) for name in ("train", "resume", "join", "simulate", "compare")},
    "launch": CommandEntry(f"{_RUNNING}:launch", RUN, rest=True),
    "manifest": CommandEntry("flockstep.cli.coordinate:manifest", RUN, rest=True),
    "coordinate": CommandEntry("flockstep.cli.coordinate:coordinate", RUN, rest=True),
    "secret": CommandEntry(f"{_RUNNING}:secret", RUN),
    "seal": CommandEntry("flockstep.cli.sealing:seal", SEALED),
    "return": CommandEntry("flockstep.cli.sealing:pack_run", SEALED),
    "unseal": CommandEntry("flockstep.cli.sealing:unseal", SEALED),
    "public-key": CommandEntry("flockstep.cli.sealing:public_key", SEALED),
    "list": CommandEntry("flockstep.cli.listing:list_components", LOOK_UP),
    "systems": CommandEntry("flockstep.cli.listing:systems", LOOK_UP),
    "layers": CommandEntry("flockstep.cli.planning:layers", PLAN),
    "layouts": CommandEntry("flockstep.cli.planning:layouts", PLAN),
    "report": CommandEntry(f"{_RUNNING}:report", RUN),
    "flight": CommandEntry(f"{_RUNNING}:flight", RUN),
    **{name: CommandEntry(f"flockstep.cli.replaying:{name}", RUN) for name in ("replay", "why")},
    "track": CommandEntry(f"{_RUNNING}:track", RUN),
    "plan": CommandEntry("flockstep.cli.planning:plan", PLAN),
    "calibrate": CommandEntry("flockstep.cli.planning:calibrate", HERE),
    "doctor": CommandEntry("flockstep.cli.app:doctor", HERE),
    **{name: CommandEntry(panel=EVIDENCE, about=about) for name, about in LAB.items()},
    "help": CommandEntry("flockstep.cli.app:show_help", HELP),
    "version": CommandEntry("flockstep.cli.app:show_version", HELP),
}


def run(arguments: list[str]) -> int:
    """Run a command; return its exit code: 2 for bad input, 1 for a run that failed, 130 when interrupted."""
    # After `launch`, the command itself tells its own --debug from the script's.
    at = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), 0)
    ours = at if arguments[at : at + 1] == ["launch"] else len(arguments)
    rest = [argument for i, argument in enumerate(arguments) if i >= ours or argument != "--debug"]
    said: dict[str, Any] = {"debug": "--debug" in arguments[:ours], "arguments": rest}
    for one in ENDING:
        if signal.getsignal(one) == signal.SIG_DFL:  # nohup has SIGHUP ignored
            signal.signal(one, _interrupt)
    if isinstance(sys.stdout, io.TextIOWrapper):  # an encoding such as latin-1 lacks characters of help and tables
        sys.stdout.reconfigure(errors="replace")
    try:
        if (asked := os.environ.get(COMPLETE)) is not None:
            return shell_complete(app, {}, NAME, COMPLETE, asked)
        with app.make_context(NAME, list(rest), obj=said) as context:
            app.invoke(context)
        print(end="", flush=True)  # what fails here would otherwise fail after the exit code is settled
        return 0
    except FlockstepError as error:
        return _say(error, INTERRUPTED if isinstance(error, Interrupted) else error.exit_code, said["debug"])
    except Exit as error:
        return error.exit_code
    except ClickException as error:
        wrong: Exception = error
        match error:
            case NoSuchOption(option_name=name, ctx=click.Context() as where):
                wrong = _unknown_option(name, where)
            case MissingParameter(param=click.Parameter() as parameter, ctx=click.Context() as where):
                wrong = _missing(parameter, where.command_path)
        return _say(wrong, 2, said["debug"])
    except KeyboardInterrupt as error:
        return _say(Interrupted(str(error) or "interrupted"), INTERRUPTED, said["debug"])
    except BrokenPipeError:  # who read the output wants no more of it
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - Python writes what is left at its end
        return 1
    except OSError as error:  # a folder that cannot be written to, a full disk
        return _say(error, 1, said["debug"])


def _unknown_option(name: str, context: click.Context) -> UnknownName:
    """The error for an option that the command does not have."""
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


def _missing(parameter: click.Parameter, path: str) -> ConfigurationError:
    """The error for an argument or an option that is required."""
    if "--strategy" in parameter.opts:
        from flockstep.strategies.base import missing_strategy

        return missing_strategy(path, " after -s")
    name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.human_readable_name.upper()
    text: str = getattr(parameter, "help", None) or ""
    return ConfigurationError(f"{path} needs {name}: {text[:1].lower()}{text[1:]}".removesuffix("."))


def _interrupt(signum: int, frame: FrameType | None) -> None:
    why = " because the terminal has closed" if signum == HANGUP else ""
    raise KeyboardInterrupt(f"stopped by {signal.Signals(signum).name}{why}")


def _say(error: Exception, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    text = error.format_message() if isinstance(error, ClickException) else str(error)
    text = text.replace(SHOWS_TRACEBACK, "") if debug else text
    if isinstance(error, OSError) and error.filename is None and _output_is_stuck():
        space = "free space on its disk, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        text = f"cannot write to standard output: {error.strerror}; {space}send the output to another place"
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


def root(
    context: click.Context,
    version: Annotated[bool, Opt("Print the version.")] = False,
    debug: Annotated[
        bool, Opt("Show the traceback if an error occurs. Also after a command, and for launch before the script.")
    ] = False,
    install_completion: Annotated[bool, Opt("Set up tab completion in the shell of $SHELL.")] = False,
    show_completion: Annotated[bool, Opt("Print the shell code of tab completion.")] = False,
) -> None:
    """Train one neural network on many workers, with the coordination strategy of your choice."""
    if version:
        show_version()
    elif install_completion or show_completion:
        _complete(install_completion)
    elif context.invoked_subcommand is None:
        print(context.get_help())
    else:
        return
    raise Exit


def _complete(install: bool) -> None:
    """Print the code that completes words in the user's shell, or write it to the file that the shell reads."""
    shell = Path(os.environ.get("SHELL", "")).name
    files = {"bash": ".bashrc", "zsh": ".zshrc", "fish": ".config/fish/completions/flockstep.fish"}
    kind = get_completion_class(shell)
    if kind is None or shell not in files:
        raise ConfigurationError(
            f"SHELL must be bash, zsh or fish, got {shell!r}; set it, as in SHELL=bash flockstep …"
        )
    code = kind(app, {}, NAME, COMPLETE).source()
    if not install:
        print(code)
        return
    file = Path.home() / files[shell]
    file.parent.mkdir(parents=True, exist_ok=True)
    before = file.read_text("utf-8") if shell != "fish" and file.exists() else ""
    if code not in before:
        file.write_text(f"{before}\n{code}", "utf-8")
    print(f"{shell} completion is in {file}; it takes effect in a new shell")


def doctor(
    full: Annotated[bool, Opt("Also try every transport, launcher and extra that is installed.")] = False,
    as_json: Json = False,
) -> None:
    """Test the installation: try the core, and say what to install."""
    from flockstep.cli import show
    from flockstep.doctor import examine

    with show.status() as say:
        report = examine(say=say, full=full)
    if as_json:
        show.json(report.document())
    else:
        print(report)
    if report.interrupted is not None:
        raise Interrupted(report.interrupted)
    raise Exit(0 if report.works else 1)


def show_help(
    command: Annotated[tuple[str, ...], Arg("Command to explain, such as train or bench codecs.")] = (),
) -> None:
    """Show what a command does, and its options."""
    with app.make_context(NAME, [*command, "--help"]) as context:
        app.invoke(context)


def show_version() -> None:
    """Print the version of flockstep."""
    print(f"{NAME} {__version__}")


app = group_of(COMMANDS, command_of(root, NAME), invoke_without_command=True)
