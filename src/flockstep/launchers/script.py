"""Runs a user's script, unchanged, on several workers."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, FlockstepError
from flockstep.frameworks.job import import_components, train_instead
from flockstep.launchers.checkpoints import Checkpointer, require_resumable
from flockstep.launchers.children import (
    KERNELS,
    Child,
    Script,
    drain_all,
    fork_script,
    refuse_program,
    start_fork_server,
    unbuffered,
)
from flockstep.launchers.completion import finished, first_error, keep_newest, newest_model
from flockstep.launchers.entry import start_server
from flockstep.launchers.gathering import HEARTBEAT, Gathering, named_content, settings_of
from flockstep.launchers.host_settings import MODULE
from flockstep.launchers.hosts import OtherHosts
from flockstep.launchers.join_requests import JoinRequests
from flockstep.launchers.newcomers import Newcomers
from flockstep.launchers.node_changes import Members
from flockstep.launchers.open_files import require_cores, require_open_files
from flockstep.launchers.output import SHOWN, Output, Sink, to_terminal
from flockstep.launchers.peers import Outcome, RunPeer
from flockstep.launchers.resizing import config_of, moved, require_limits, resized_script
from flockstep.launchers.script_entry import MODULE_ENTRY, ScriptProgram, script_main
from flockstep.launchers.segment import NodesChanged, back_to, continue_record, pause_notes
from flockstep.launchers.supervisor import RunOfScript, Starters, Supervisor
from flockstep.launchers.threads import JAX_THREADS
from flockstep.links.kinds import Transport
from flockstep.messages import Address
from flockstep.records import owner
from flockstep.records.checkpoints import Checkpoint, newest
from flockstep.records.config import KEEP, RunConfig
from flockstep.records.folder import EventWriter, RunFolder
from flockstep.records.summary import Summary
from flockstep.runtime.loop import require_for_scripts
from flockstep.runtime.member import NodeSpec, folder_of_call
from flockstep.runtime.place import SECRET
from flockstep.runtime.setup import JOB_FILE, canonical, check, digest, require_unchanged

AS_THE_SCRIPT_SAYS = "as the script says"
"""Placeholder for the strategy in the configuration of a launched run, until the script has named its strategy."""
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
    show: Callable[[dict[Address, RunPeer]], None] = lambda nodes: None,
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
    config = dataclasses.replace(config, versions={**config.versions, JOB_FILE: _digest_of(script, arguments)})
    config = output.kept_in(config)
    if gathering is not None:
        config = gathering.over(config)
    require_cores(len(_ranks_here(config, gathering)), config.heartbeat or HEARTBEAT)
    require_open_files(config.workers)
    require_limits(config)
    _require_unchanging(config, gathering)
    output.require_folder(_ranks_here(config, gathering), config.workers, overwrite)
    record = RunFolder(folder)
    with contextlib.ExitStack() as stack:
        hosts = OtherHosts() if gathering is None else gathering.hosts(config, settings, stack)
        stack.enter_context(record.created(config, overwrite))
        _ChangingRun(script, arguments, record, gathering, hosts, show).run(config, output)
    return record.read_summary()


def _require_unchanging(config: RunConfig, gathering: Gathering | None) -> None:
    """Raise `ConfigurationError` if workers may leave the run of a script, or join it, and the run is on several
    hosts.
    """
    if gathering is not None and (config.min_workers, config.max_workers) != (None, None):
        raise ConfigurationError(
            "the number of a script's workers changes during the run only if all processes are on one machine, got "
            "several hosts; leave out --min-workers and --max-workers"
        )


@dataclass(frozen=True)
class _ChangingRun:
    """The run of a script whose workers may change, with all that stays the same when the workers change."""

    script: Path
    arguments: Sequence[str]
    record: RunFolder
    gathering: Gathering | None
    """The hosts of the run, of which this one coordinates; None: all processes are on this machine."""
    hosts: OtherHosts
    show: Callable[[dict[Address, RunPeer]], None]

    def run(self, config: RunConfig, output: Output, resumed: Checkpoint | None = None) -> None:
        """Run the script, and begin the script again from a checkpoint whenever workers leave or join.

        Args:
            config: the configuration with which the script begins.
            output: how the scripts' output is handled until the workers change.
            resumed: the checkpoint from which the script begins; None: the script begins anew.
        """
        left: NodesChanged | None = None
        while True:
            start = ScriptStarter(self.script, self.arguments, config, output, self.gathering)
            checkpoints = _checkpointer(config, self.record, self.hosts, resumed)
            try:
                supervise(start, config, self.record, self.hosts, start.close, self.show, checkpoints, left)
                return
            except NodesChanged as change:
                left = change
            finally:
                start.close()
            config, resumed = _continued(self.record, config, newest(self.record.path), left.workers, left)
            output = Output.of(config, output.show)


def _continued(
    record: RunFolder,
    config: RunConfig,
    checkpoint: Checkpoint,
    workers: int | None,
    left: NodesChanged | None = None,
) -> tuple[RunConfig, Checkpoint]:
    """Prepare a record, whose folder this process owns, for the continuation of the run of a script.

    Args:
        record: the run's folder.
        config: the configuration with which the checkpoint was written.
        checkpoint: the checkpoint from which the run continues.
        workers: number of workers from now on; None: as many as the checkpoint holds.
        left: how the workers have changed during the run; None: the run had stopped.

    Returns:
        The configuration and the checkpoint with which the run continues.
    """
    change, workers = None, workers or len(checkpoint.manifest.steps)
    if workers != config.workers or checkpoint.manifest.lost:
        change = resized_script(checkpoint, config, workers, () if left is None else left.gone)
        require_open_files(workers)
        config = change.config
    return config, continue_record(record, config, checkpoint, change, left)


def resume_script(
    folder: Path,
    sink: Sink = to_terminal,
    show: Callable[[dict[Address, RunPeer]], None] = lambda nodes: None,
    workers: int | None = None,
    gathering: Gathering | None = None,
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

    Raises:
        ConfigurationError: the folder holds no run that can continue; nothing was started.
        CompositionError: the script's strategy has no rule for another number of workers; nothing was started.
        RunError: the run failed; the record is complete up to the failure.
    """
    record = RunFolder(folder)
    config = _unnamed(record.read_config())
    if config.versions.get(JOB_FILE) is None:
        raise ConfigurationError(
            f"{folder} holds a run that flockstep launch did not start from a script, so it cannot be resumed; repeat "
            "the run"
        )
    if not record.unfinished:
        raise ConfigurationError(f"{folder} holds a run that has ended; start another run in another folder")
    script, arguments = program_of(config)
    require_script(script)
    checkpoint = newest(record.path)
    config = config_of(record, checkpoint, config)
    if gathering is not None and workers not in (None, config.workers):
        raise ConfigurationError(
            f"a script on several hosts must be resumed with as many workers as it had, got -n {workers} in place of "
            f"{config.workers}; leave out -n"
        )
    _require_unchanging(config, gathering)
    require_resumable(checkpoint, None, config.workers, config.digest)
    require_unchanged(config, _digest_of(script, arguments))
    import_components(config.imports)
    require_open_files(config.workers)
    with owner.owned(record.path), contextlib.ExitStack() as stack:
        config, checkpoint = _continued(record, config, checkpoint, workers)
        hosts, settings = OtherHosts(), _settings(config, script, arguments)
        if gathering is not None:
            config = moved(record, config, gathering)
            hosts = gathering.hosts(config, settings, stack, resumes=True)
        changing = _ChangingRun(script, arguments, record, gathering, hosts, show)
        changing.run(config, Output.of(config, sink), checkpoint)
    return record.read_summary()


def _checkpointer(
    config: RunConfig, record: RunFolder, hosts: OtherHosts, resumed: Checkpoint | None = None
) -> Checkpointer:
    """Takes the checkpoints of a script's run."""
    path, keep, digest = record.path.resolve(), config.keep or KEEP, _unnamed(config).digest
    return Checkpointer(path, config.checkpoint_interval, keep, resumed, config=digest, scripts=True, hosts=hosts)


def _unnamed(config: RunConfig) -> RunConfig:
    """The configuration before the script has named its strategy; unchanged if the user has given the strategy."""
    return config if config.strategy_given else dataclasses.replace(config, strategy=AS_THE_SCRIPT_SAYS)


def with_strategy(config: RunConfig, text: str) -> RunConfig:
    """Return the configuration of a script's run whose strategy is `text` in place of the one that the script names.

    Raises:
        ConfigurationError: the text is no strategy, or the strategy cannot have so many workers.
        CompositionError: the strategy needs a job.
    """
    given = dataclasses.replace(config, strategy=text, strategy_given=True)
    require_for_scripts(check(given), config.workers)
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
    start = ScriptStarter(script, arguments, config, output, gathering)
    try:
        gathering.serve(config, _settings(config, script, arguments), lambda node_spec, accepted: start(node_spec))
    finally:
        start.close()


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


def _digest_of(script: Path, arguments: Sequence[str]) -> str:
    """Hash of the file that is run: the script, or the module that its first argument names."""
    return digest(Path(_file_of_module(arguments[0])) if script == MODULE_ENTRY else script)


def _settings(config: RunConfig, script: Path, arguments: Sequence[str]) -> dict[str, str]:
    """Settings that must be equal on all hosts."""
    module = {MODULE: named_content(_file_of_module(arguments[0]))} if script == MODULE_ENTRY else {}
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
    return range(config.workers) if gathering is None else gathering.ranks(config.workers)


class ScriptStarter:
    """Starts a script as each worker of this host."""

    def __init__(
        self, script: Path, arguments: Sequence[str], config: RunConfig, output: Output, gathering: Gathering | None
    ):
        """`gathering`: this host's part in a run over several.

        Raises:
            ConfigurationError: a file for the output cannot be created.
        """
        self._ranks = _ranks_here(config, gathering)
        self._sinks = output.sinks(self._ranks, config.workers)
        self._scripts: dict[int, Script] = {}
        threads = config.threads or (None if _threads_chosen() else 1)
        environment = common_environment(config.threads, config.workers, len(self._ranks))
        self._program = ScriptProgram(script, tuple(arguments), unbuffered(environment), threads)
        early = {name: text for name, text in self._program.environment.items() if name in EARLY}
        start_fork_server(_preload(script, arguments, config.transport), early)

    def __call__(self, node_spec: NodeSpec) -> Child:
        """Start the script as the worker that `node_spec` describes, and return its process."""
        rank = node_spec.address
        place = {"RANK": str(rank), "LOCAL_RANK": str(self._ranks.index(rank))}
        program = dataclasses.replace(self._program, environment={**self._program.environment, **place})
        script = self._scripts[rank] = fork_script(script_main, (node_spec, program), self._sinks[rank])
        return script

    def close(self) -> None:
        """Pass on the rest of the output of scripts that have ended."""
        drain_all(list(self._scripts.values()))
        for rank, sink in self._sinks.items():  # a run that failed early has started fewer scripts
            sink.close(failed=rank in self._scripts and bool(self._scripts[rank].exit_code()))


def _preload(script: Path, arguments: Sequence[str], transport: str | None) -> list[str]:
    """Modules that the fork server imports once for all workers of a script.

    PyTorch takes seconds to import; a text that does not contain its name hardly needs it, and JAX or NumPy alone
    should not wait for it.
    """
    file = Path(_file_of_module(arguments[0])) if script == MODULE_ENTRY else script
    torch = ["flockstep.runtime.torch_loop"] if b"torch" in file.read_bytes() else []
    kernels = [KERNELS] if Transport.parse(transport or "shared_memory").zero_copy else []
    return [script_main.__module__, *kernels, *torch]


def supervise(
    start: Callable[[NodeSpec], Child],
    config: RunConfig,
    record: RunFolder,
    hosts: OtherHosts,
    ended: Callable[[], None] = lambda: None,
    show: Callable[[dict[Address, RunPeer]], None] = lambda standings: None,
    checkpoints: Checkpointer | None = None,
    left: NodesChanged | None = None,
) -> None:
    """Supervise a run of scripts as the coordinator, and complete the record.

    Args:
        start: starts a worker of this host.
        hosts: the other hosts.
        ended: called when all processes have ended, before the record is completed.
        show: called from time to time with the state of every node, by address.
        checkpoints: takes the checkpoints of the script's first call to `distribute`.
        left: the change of the workers after which the scripts begin again; None: the run begins.

    Raises:
        NodesChanged: the run continues with other workers.
        RunError: the run failed, or a part of its record was lost.
    """
    run = _ScriptRun(start, config, record, hosts, show, checkpoints, left)
    with contextlib.ExitStack() as stack:
        supervisor = run.supervisor(run.path)
        stack.callback(supervisor.forget)
        supervisor.run(result_of)
        ended()
        outcome, error = supervisor.outcome, supervisor.outcome.error
        if checkpoints is not None and checkpoints.resumed is not None:
            record.note(checkpoints.resumed.manifest.seconds, pause_notes(left, supervisor))
        outcome.warnings += [] if checkpoints is None else checkpoints.notes
        outcome.warnings += run.notes
        if error is not None and supervisor.failed_later:
            outcome.warnings.append(f"the script failed in a later call of distribute: {error}")
            outcome.error = None
        if outcome.change is not None and error is None:
            error = outcome.error = NodesChanged(outcome.change, supervisor)
        conclude(record, config, outcome)
        if error is not None:
            raise error


@dataclass
class _ScriptRun:
    """The supervisors and records of the calls of `distribute` in one run of scripts."""

    start: Callable[[NodeSpec], Child]
    config: RunConfig
    record: RunFolder
    hosts: OtherHosts
    show: Callable[[dict[Address, RunPeer]], None]
    checkpoints: Checkpointer | None
    left: NodesChanged | None
    """The change of the workers after which the scripts begin again; None: the run begins."""
    later: list[RunFolder] = field(default_factory=list)
    """Records of the later calls."""

    @property
    def path(self) -> Path:
        """Folder of the record of the first call."""
        return self.record.path.resolve()

    @property
    def notes(self) -> list[str]:
        """Sentence about the later calls, for the record of the first call; none if there are no later calls."""
        if not self.later:
            return []
        where = ", ".join(one.path.name for one in self.later)
        return [
            f"this record describes the script's first call of distribute; the records of later calls are in {where}"
        ]

    def supervisor(
        self, place: Path, within: Supervisor | None = None, ended: Callable[[Outcome], None] = lambda outcome: None
    ) -> Supervisor:
        """The supervisor of a call whose record is in `place`; see `Supervisor` for `within` and `ended`."""
        config, left, hosts = self.config, self.left, self.hosts
        resumed = None if self.checkpoints is None else self.checkpoints.resumed
        back = back_to(config, resumed, left) if hosts.here else None
        if left is None:
            members = Members(JoinRequests(place), Newcomers(), back_to=back)
        else:
            members = Members(left.supervisor.members.requests, Newcomers(), left.joining, left.epoch + 1, back)
        return Supervisor(
            config,
            place,
            Starters(
                lambda spec: hosts.start(spec) if hosts.has(spec.address) else self.start(spec), start_server, hosts
            ),
            RunOfScript(self.begin_call, within, ended, train_instead(config.job)),
            show=self.show,
            checkpoints=self.checkpoints if within is None else None,
            members=members,
        )

    def begin_call(self, first: Supervisor, number: int) -> Supervisor:
        """Create the record and the supervisor of a later call."""
        later, owning = RunFolder(folder_of_call(self.path, number)), contextlib.ExitStack()
        owning.enter_context(later.created(self.config))
        self.later.append(later)

        def conclude_it(outcome: Outcome) -> None:
            with owning, contextlib.suppress(FlockstepError) if outcome.error else contextlib.nullcontext():
                conclude(later, self.config, outcome)

        return self.supervisor(later.path, first, conclude_it)


def conclude(record: RunFolder, config: RunConfig, outcome: Outcome) -> None:
    """Complete the record with the facts that only the supervisor knows.

    Raises:
        RunError: the run failed, or a part of its record was lost.
    """
    owner.check(record.path)
    if outcome.strategy is not None and outcome.strategy.traits.results:
        config = dataclasses.replace(config, strategy=str(outcome.strategy))
        with first_error(outcome):
            record.write_config(config)
    with first_error(outcome), finished(record, config) as notes:
        with EventWriter(record.node_events_file(None)) as events:
            for event in outcome.events:
                events.write(event)
        if outcome.strategy is not None and outcome.strategy.traits.results:
            keep_newest(record, outcome.strategy.traits.results[0], outcome)
        notes += outcome.warnings
        if outcome.error is not None:
            raise outcome.error
        record.check_whole(outcome.nodes)


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


def result_of(outcome: Outcome) -> FlatArray | None:
    """Return the model that the strategy's default result policy selects from the final parameters."""
    if outcome.strategy is None or not outcome.strategy.traits.results:
        return None
    return newest_model(outcome.newest.tick(outcome.lost), outcome.strategy.traits.results[0], outcome)
