"""Runs a user's script, unchanged, on several workers."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path

from flockstep.errors import ConfigurationError, RunError
from flockstep.frameworks.job import import_components, train_instead
from flockstep.launchers import children
from flockstep.launchers.checkpoints import require_checkpoints
from flockstep.launchers.children import (
    KERNELS,
    Child,
    drain_all,
    fork_script,
    refuse_program,
    start_fork_server,
    unbuffered,
)
from flockstep.launchers.continuing import ResizedRun, require_interval, require_limits, resized_script
from flockstep.launchers.executable import Executable, Show
from flockstep.launchers.gathering import HEARTBEAT, Gathering, named_content, settings_of
from flockstep.launchers.host_settings import MODULE
from flockstep.launchers.hosts import OtherHosts
from flockstep.launchers.newcomers import Newcomer, Newcomers
from flockstep.launchers.open_files import require_cores, require_open_files
from flockstep.launchers.output import SHOWN, Output, RankOutput, Sink, to_terminal
from flockstep.launchers.run import SupervisedRun, resume_run
from flockstep.launchers.script_entry import MODULE_ENTRY, ScriptProgram, script_main
from flockstep.launchers.threads import JAX_THREADS
from flockstep.links.kinds import Transport
from flockstep.messages import node_name
from flockstep.records.checkpoints import Checkpoint
from flockstep.records.config import JOB_FILE, RunConfig
from flockstep.records.events import NodeEvent
from flockstep.records.folder import RunFolder
from flockstep.records.summary import Summary
from flockstep.records.tape import segments_of
from flockstep.runtime.loop import require_for_scripts
from flockstep.runtime.member import NodeSpec, folder_of_call
from flockstep.runtime.place import SECRET
from flockstep.runtime.resizing import require_script_resizable
from flockstep.runtime.setup import canonical, check, digest, require_unchanged
from flockstep.strategies.base import Strategy

NO_SCRIPT = {".ipynb", ".json", ".sh", ".toml", ".yaml", ".yml"}
"""Suffixes of files that Python might read as a program although they are none."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that set the number of threads of numerical libraries; without them each process uses every
core. JAX reads `JAX_THREADS` instead.
"""
EARLY = (*THREADS, JAX_THREADS, "PYTHONUNBUFFERED")
"""Environment variables that Python and numerical libraries read when they start, which is in the fork server."""


def launch(
    script: Path,
    arguments: Sequence[str],
    config: RunConfig,
    folder: Path,
    output: Output = SHOWN,
    overwrite: bool = False,
    show: Show = lambda nodes, steps: None,
    gathering: Gathering | None = None,
) -> Summary:
    """Run a user's script on `config.workers` processes, and write the record.

    A program must guard the call, because server processes import the program again:

        if __name__ == "__main__":
            config = RunConfig(kind="launch", job="mine.py", strategy="as the script says", workers=2)
            launch(Path("mine.py"), [], config, Path("runs/mine"))

    Args:
        script: path of the Python script.
        arguments: command-line arguments of the script.
        config: the run's configuration, with `kind="launch"`.
        folder: folder of the record; created if it is missing.
        output: which output of the scripts is shown, how, and where it is written.
        overwrite: replace the run that the folder holds, and the files of the scripts' output.
        show: called from time to time with the state of every node.
        gathering: the hosts of the run, of which this one coordinates; None: all processes are on this machine.

    Returns:
        The summary of the record.

    Raises:
        ConfigurationError: the script does not exist, the workers do not agree on model and strategy, or the scripts'
            output cannot be written where it should be.
        RunError: the run failed; the record is complete up to the failure.
    """
    require_script(script)
    import_components(config.imports)
    settings = _settings(config, script, arguments)
    config = dataclasses.replace(config, versions={**config.versions, JOB_FILE: digest(_file_of(script, arguments))})
    config = output.kept_in(config)
    if gathering is not None:
        config = gathering.over(config)
    require_cores(len(_ranks_here(config, gathering)), config.heartbeat or HEARTBEAT)
    require_open_files(config.workers)
    require_limits(config)
    _require_unchanging(config, gathering)
    output.require_folder(_ranks_here(config, gathering), config.workers, overwrite)
    record = RunFolder(folder)
    with ExitStack() as stack:
        hosts = OtherHosts() if gathering is None else gathering.hosts(config, settings, stack)
        stack.enter_context(record.created(config, overwrite))
        SupervisedRun(record, ScriptExecutable(script, arguments, output, gathering), show, hosts).run(config)
    return record.read_summary()


def _require_unchanging(config: RunConfig, gathering: Gathering | None) -> None:
    """Raise `ConfigurationError` if workers may leave the run of a script, or join it, and the run is on several
    hosts; or if several processes hold a replica in a run that needs whole replicas.
    """
    if config.processes_of_replica > 1:
        given = {
            "--max-gradient-norm": config.max_gradient_norm,
            f"--on-bad-gradient {config.on_bad_gradient}": config.on_bad_gradient != "stop" or None,
        }
        for name, value in given.items():
            if value is not None:
                raise ConfigurationError(
                    f"replicas of {config.replica_size} processes do not work with {name} yet; leave out {name}, or "
                    "--replica-size"
                )
    chosen = (config.checkpoint_every, config.min_workers, config.max_workers)
    if config.replayable and (gathering is not None or chosen != (None, None, None)):
        raise ConfigurationError(
            "the run of a script is replayed only if it is on one host, takes no checkpoints and keeps its workers; "
            "leave out --replayable, or --checkpoint-every, --min-workers, --max-workers and other hosts"
        )
    if gathering is not None and (config.min_workers, config.max_workers) != (None, None):
        raise ConfigurationError(
            "the number of a script's workers changes during the run only if all processes are on one machine, got "
            "several hosts; leave out --min-workers and --max-workers"
        )


def resume_script(
    folder: Path,
    sink: Sink = to_terminal,
    show: Show = lambda nodes, steps: None,
    workers: int | None = None,
    gathering: Gathering | None = None,
    replica_size: int | None = None,
) -> Summary:
    """Continue the run of a script from its newest complete checkpoint, with the same arguments and configuration.

    Events that were recorded after the checkpoint are dropped. The output of the same ranks is shown as before, and
    appended to their files.

    Args:
        folder: folder of the record.
        sink: shows the scripts' output.
        show: see `launch`.
        workers: number of workers with which the run continues; None for the number that it had.
        gathering: the hosts of the run from now on; None: all processes are on this machine.
        replica_size: number of processes that hold each replica from now on; None for the number that the run had.

    Raises:
        ConfigurationError: the folder holds no run that can continue; nothing was started.
        CompositionError: the script's strategy has no rule for another number of workers; nothing was started.
        RunError: the run failed; the record is complete up to the failure.
    """
    record = RunFolder(folder)
    config = record.read_config()
    if config.versions.get(JOB_FILE) is None:
        raise ConfigurationError(
            f"{folder} holds a run that flockstep launch did not start from a script, so it cannot be resumed; repeat "
            "the run"
        )
    script, arguments = program_of(config)
    require_script(script)
    if gathering is not None and (workers, replica_size) not in ((None, None), (config.workers, None)):
        raise ConfigurationError(
            f"a script on several hosts must be resumed with the {config.workers} workers, and the replicas of "
            f"{config.processes_of_replica}, that it had; leave out -n and --replica-size"
        )
    _require_unchanging(config, gathering)
    executable = ScriptExecutable(script, arguments, Output.of(config, sink), gathering, replica_size)
    return resume_run(record, executable, show, workers, gathering, _settings(config, script, arguments))


def repeat_script(folder: Path, place: Path, sink: Sink = to_terminal, show: Show = lambda nodes, steps: None) -> int:
    """Repeat the run of a script that was recorded with `replayable`: every process computes its gradients again, and
    receives messages in the order of the run; return the number of nodes. `place`: folder for the record of the
    repetition.

    Raises:
        ConfigurationError: the run cannot be repeated, or the script has changed; nothing was started.
        RunError: the repetition differs from the run; the error names the first difference.
    """
    before = RunFolder(folder).read_config()
    script, arguments = program_of(before)
    require_script(script)
    require_unchanged(before, digest(_file_of(script, arguments)))
    import_components(before.imports)
    segments, recorded = segments_of(folder), RunFolder(folder)
    if not segments:
        raise ConfigurationError(f"{folder} does not hold what a replay needs; record the run with --replayable")
    if len(segments) > 1 or recorded.unfinished or recorded.read_summary().status != "finished":
        raise ConfigurationError(
            f"the script's run in {folder} was stopped or resumed, which is not repeated yet; name a run that went "
            "from its start to its end"
        )
    config = dataclasses.replace(before, replayable=False)
    executable = ScriptExecutable(script, arguments, Output.of(config, sink), None, repeats=folder)
    record = RunFolder(place)
    with record.created(config, overwrite=False):
        SupervisedRun(record, executable, show, OtherHosts()).run(config)
    now, then = (
        {event.node: event.hash for event in one.read_events() if isinstance(event, NodeEvent)}
        for one in (record, RunFolder(folder))
    )
    if other := [node_name(node) for node in now if now[node] != then.get(node)]:
        raise RunError(f"the replay differs from the run: {', '.join(other)} ended with other parameters")
    return len(now)


def with_strategy(config: RunConfig, text: str) -> RunConfig:
    """Return the configuration of a script's run whose strategy is `text` in place of the one that the script names.

    Raises:
        ConfigurationError: the text is no strategy, or the strategy cannot have so many workers.
        CompositionError: the strategy needs a job.
    """
    given = dataclasses.replace(config, strategy=text, strategy_given=True)
    require_for_scripts(check(given), config.workers // config.processes_of_replica)
    named = canonical(given)
    return dataclasses.replace(given, strategy=named.strategy, system=named.system)


def launch_for(
    gathering: Gathering,
    script: Path,
    arguments: Sequence[str],
    config: RunConfig,
    output: Output = SHOWN,
    overwrite: bool = False,
) -> None:
    """Start and watch this host's scripts of a run that another host coordinates.

    Args:
        overwrite: replace the files of the scripts' output.

    Raises:
        ConfigurationError: the script does not exist, or the coordinator refused, or cannot be reached.
        RunError: the run failed.
    """
    require_script(script)
    output.require_folder(_ranks_here(config, gathering), config.workers, overwrite)
    ScriptExecutable(script, arguments, output, gathering).serve(
        config, _settings(config, script, arguments), gathering
    )


def program_of(config: RunConfig) -> tuple[Path, list[str]]:
    """Return the script of a run and the script's arguments; a module is run by a script whose first argument is the
    module's name.

    Raises:
        ConfigurationError: there is no such module in this folder or on Python's path.
    """
    if config.module:
        return script_of_module(config.job), [config.job, *config.arguments]
    return Path(config.job), list(config.arguments)


def script_of_module(name: str) -> Path:
    """Return the script that runs a module, as `python -m` does; its first argument names the module.

    Raises:
        ConfigurationError: there is no such module in this folder or on Python's path.
    """
    _file_of_module(name)
    return MODULE_ENTRY


def _file_of_module(name: str) -> str:
    """The file that `python -m` runs: the module's, or `__main__.py` of a package."""
    places: Sequence[str] | None = [os.getcwd(), *sys.path]  # noqa: PTH109 - what python -m adds
    for part in accumulate(name.split("."), "{}.{}".format):
        found = None if places is None else PathFinder.find_spec(part, places)
        if found is None:
            raise ConfigurationError(f"there is no module {part}; give its name as with python -m, without .py")
        places = found.submodule_search_locations
    inside = next(filter(Path.is_file, (Path(place) / "__main__.py" for place in places or ())), None)
    return str(inside or (found.origin if found is not None else name))


def _file_of(script: Path, arguments: Sequence[str]) -> Path:
    """The file that is run: the script, or that of the module that the script's first argument names."""
    return Path(_file_of_module(arguments[0])) if script == MODULE_ENTRY else script


def _settings(config: RunConfig, script: Path, arguments: Sequence[str]) -> dict[str, str]:
    """Settings that must be equal on all hosts."""
    module = {MODULE: named_content(str(_file_of(script, arguments)))} if script == MODULE_ENTRY else {}
    return {**settings_of(config, arguments), **module}


def require_script(script: Path) -> None:
    """Check that a script exists and that Python can read it, because otherwise every worker would say so.

    Raises:
        ConfigurationError: there is no such file, or it is not a Python program.
    """
    refuse_program()
    if not script.is_file() and str(script).startswith("-"):
        raise ConfigurationError(
            f"flockstep launch has no option {script}; flockstep help launch shows its options, and options of the "
            "script follow the script's path"
        )
    if not script.is_file():
        what = "is a folder" if script.is_dir() else "does not exist"
        raise ConfigurationError(f"the script must be a Python file, and {script} {what}; give the path of a .py file")
    if script.suffix in NO_SCRIPT:
        raise ConfigurationError(
            f"the script must be a Python file, and {script} is a {script.suffix} file; give the path of a .py file"
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # the script's own processes print them
            compile(script.read_bytes(), script, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise ConfigurationError(
            f"the script {script} cannot run, because of a syntax error in line {error.lineno}: {error.msg}; correct "
            "this line"
        ) from None


def _ranks_here(config: RunConfig, gathering: Gathering | None) -> range:
    """The ranks of this host's workers."""
    return range(config.workers) if gathering is None else gathering.ranks(config)


class ScriptExecutable(Executable):
    """A user's script, which runs as each worker of this host."""

    script = True

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str],
        output: Output,
        gathering: Gathering | None,
        replica_size: int | None = None,
        repeats: Path | None = None,
    ):
        """`gathering`: this host's part in a run over several. `repeats`: record of the run that is repeated."""
        super().__init__()
        self._record = repeats
        self.replica_size = replica_size
        self._script, self._arguments, self._output, self._gathering = script, arguments, output, gathering
        self._sinks: dict[int, RankOutput] = {}
        self._coming: dict[int, RankOutput] = {}
        """Output of the scripts of workers that are about to join, by the rank that they will probably have."""
        self._repeats = False
        """Whether the scripts can take a step again with other workers."""
        self._processes: dict[int, children.Script] = {}

    def follows(self, call: int) -> str:
        return "" if self._record is None else str(segments_of(folder_of_call(self._record, call))[0])

    def prepare_again(self, config: RunConfig, begins: bool) -> None:
        if begins:
            require_unchanged(config, digest(_file_of(self._script, self._arguments)))
            import_components(config.imports)
            require_open_files(config.workers)

    def resized(
        self, checkpoint: Checkpoint, config: RunConfig, asked: RunConfig, gone: Collection[int], record: RunFolder
    ) -> ResizedRun:
        return resized_script(checkpoint, config, asked, gone)

    def require_possible(self, strategy: Strategy, repeats: bool) -> None:
        self._repeats = repeats
        if not repeats:
            require_interval(self._config)
        if (self._config.min_workers, self._config.max_workers) != (None, None):
            require_checkpoints(strategy)
            require_script_resizable(strategy, "leave out --min-workers and --max-workers")

    def begin(self, config: RunConfig) -> None:
        """Create the files for the output, and start the fork server, which imports what all workers import.

        Raises:
            ConfigurationError: a file for the output cannot be created.
        """
        self._config, self._ranks = config, _ranks_here(config, self._gathering)
        self._sinks = self._output.sinks(self._ranks, config.workers)
        self._output = dataclasses.replace(self._output, continues=True)  # when the workers change
        self.unjoined = train_instead(config.job)
        threads = config.threads or (None if _threads_chosen() else 1)
        environment = unbuffered(common_environment(config.threads, config.workers, len(self._ranks)))
        self._program = ScriptProgram(self._script, tuple(self._arguments), environment, threads)
        # PyTorch takes seconds to import, and `torch._dynamo`, which its first optimizer imports, a second more; a text
        # that does not contain its name hardly needs them, and JAX or NumPy alone should not wait for them.
        text = _file_of(self._script, self._arguments).read_bytes()
        torch = ["flockstep.runtime.torch_loop", "torch._dynamo"] if b"torch" in text else []
        kernels = [KERNELS] if Transport.parse(config.transport or "shared_memory").zero_copy else []
        early = {name: value for name, value in environment.items() if name in EARLY}
        start_fork_server([script_main.__module__, *kernels, *torch], early)

    def go_on(self, config: RunConfig, remaining: Mapping[int, int]) -> None:
        self._config, self._ranks = config, range(config.workers)
        for rank in self._sinks.keys() - set(remaining.values()):
            self._close(rank)
        self._sinks = {new: self._sinks[old] for new, old in remaining.items()}
        self._processes = {new: self._processes[old] for new, old in remaining.items()}
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(config.workers))
        self._program = dataclasses.replace(self._program, environment={**self._program.environment, **sizes})

    def start(self, node_spec: NodeSpec) -> Child:
        rank = node_spec.address
        if rank not in self._sinks:
            self._sinks[rank] = self._output.sink(rank)
        process = self._processes[rank] = self._fork(rank, node_spec, None)
        return process

    def _fork(self, rank: int, node_spec: NodeSpec | None, feed: socket.socket | None) -> children.Script:
        sink = self._coming[rank] if node_spec is None else self._sinks[rank]
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank - self._ranks.start)}
        program = dataclasses.replace(self._program, environment={**self._program.environment, **place})
        return fork_script(script_main, (node_spec, program, feed), sink)

    def newcomers(self) -> Newcomers:
        return Newcomers(self._newcomer)

    def _newcomer(self) -> Newcomer | None:
        """Start the script for a worker that will probably have the next rank."""
        if not self._repeats:
            return None
        rank = len(self._sinks) + len(self._coming)
        self._coming[rank] = self._output.sink(rank)
        return Newcomer(partial(self._fork, rank, None), lambda: self._coming.pop(rank).close(failed=True))

    def adopt(self, rank: int, child: Child) -> Child:
        assert isinstance(child, children.Script)
        self._processes[rank] = child
        self._sinks[rank] = self._coming.pop(min(self._coming))
        return child

    def end(self) -> None:
        """Pass on the rest of the output of scripts that have ended."""
        drain_all(list(self._processes.values()))
        for rank in self._sinks:
            self._close(rank)
        self._sinks, self._processes = {}, {}

    def _close(self, rank: int) -> None:
        """Pass on the rest of the output of a script that has ended; a run that failed early has started fewer."""
        process = self._processes.get(rank)
        if process is not None:
            drain_all([process])
        self._sinks[rank].close(failed=process is not None and bool(process.exit_code()))

    def serve(self, config: RunConfig, settings: dict[str, str], gathering: Gathering) -> None:
        """Run the script as this host's workers, until the end, in a run that another host coordinates.

        Raises:
            ConfigurationError: the coordinator refused, or cannot be reached.
            RunError: the run failed.
        """
        self.begin(config)
        try:
            gathering.serve(config, settings, lambda node_spec, accepted: self.start(node_spec))
        finally:
            self.end()


def common_environment(threads: int | None, workers: int, here: int) -> dict[str, str]:
    """Return the environment variables that are equal for all scripts of a host.

    Args:
        threads: threads of each worker's numerical libraries; None keeps the user's variables, or sets one thread if
            the user has set none.
        workers: number of workers.
        here: number of workers on this host.
    """
    limits = {} if threads is None and _threads_chosen() else dict.fromkeys((*THREADS, JAX_THREADS), str(threads or 1))
    jax_threads = {JAX_THREADS: os.environ.get("OMP_NUM_THREADS", "1")}
    sizes = {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(here)}  # as torchrun names them
    environment = {**jax_threads, **os.environ, **limits, **sizes}
    environment.pop(SECRET, None)  # what a script logs of its environment is no way into the run
    return environment


def _threads_chosen() -> bool:
    """Whether the user's environment sets the number of threads of numerical libraries."""
    return any(name in os.environ for name in THREADS)
