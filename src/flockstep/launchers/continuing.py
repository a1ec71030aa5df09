"""Continues a run from its checkpoint: with the same command, on other hosts, or with another number of workers."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path

from flockstep import __version__
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.launchers.gathering import Gathering
from flockstep.launchers.wait_monitor import on_stderr
from flockstep.links.kinds import Tcp, Transport
from flockstep.messages import Address
from flockstep.records import checkpoints as disk
from flockstep.records.checkpoints import FORMAT, Checkpoint, Manifest
from flockstep.records.config import RunConfig, same_run
from flockstep.records.folder import RunFolder
from flockstep.runtime.cut import Cut, read_cut
from flockstep.runtime.part_group import PartGroup
from flockstep.runtime.plan import Plan
from flockstep.runtime.resharding import why_not_resharded
from flockstep.runtime.resizing import (
    faults_after,
    require_resizable,
    require_script_resizable,
    resized_checkpoint,
    resized_scripts,
    script_plan,
)
from flockstep.runtime.setup import BuiltJob, prepare
from flockstep.strategies.base import Strategy


@dataclass(frozen=True)
class Continuation:
    """Whether a command continues the run that its folder holds, or starts a run there."""

    resumes: bool = False
    """Whether the run continues from a checkpoint; otherwise, the run starts from the beginning."""
    overwrites: bool = False
    """Whether the new run replaces the run in the folder, which has no checkpoint."""


def continuation(config: RunConfig, folder: Path) -> Continuation:
    """Return whether a command continues the run in a folder; all defaults of the configuration must be filled in.

    The transport is None if the command does not name one.

    Raises:
        ConfigurationError: the folder holds another run, or a run that has ended.
    """
    record = RunFolder(folder)
    if record.begun is None:
        return Continuation()
    held = record.read_config()
    if config.kind == "launch" and not config.strategy_given:  # the script has named its strategy
        config = replace(config, strategy=held.strategy)
    # The run may have had other numbers of workers before; their configurations are beside the checkpoints.
    files = (record.path / disk.CHECKPOINTS).glob("*.toml")
    before = [RunConfig.from_toml(file.read_text(), str(file)) for file in files]
    if config.kind == "launch":
        before = [replace(one, strategy=config.strategy) for one in before]
    if not any(_same(config, one) for one in (held, *before)):
        # The transport may differ, so that it is named last.
        names = sorted((field.name for field in fields(RunConfig) if field.name != "versions"), key="transport".__eq__)
        name = next(name for name in names if getattr(config, name) != getattr(held, name))
        raise ConfigurationError(
            f"{folder} holds another run: its {name} is {getattr(held, name)}, and this command's is "
            f"{getattr(config, name)}; repeat the command of that run, or choose another folder with --out"
        )
    if not record.unfinished:
        raise ConfigurationError(f"{folder} holds a run that has ended; start another run in another folder")
    if any((one / disk.MANIFEST).exists() for one in disk.folders(record.path)):
        return Continuation(resumes=True)
    on_stderr(f"{folder} holds no complete checkpoint, so the run starts from the beginning")
    return Continuation(overwrites=True)


def _same(command: RunConfig, held: RunConfig) -> bool:
    """Whether two configurations are of one run, whose hosts may have other addresses; a command without a transport
    takes that of the run.
    """
    transport = None if command.transport is None else _anywhere(held)
    return same_run(replace(command, transport=_anywhere(command)), replace(held, transport=transport))


def _anywhere(config: RunConfig) -> str | None:
    """The transport of a configuration, without the address of the host."""
    if config.transport is None:
        return None
    found = Transport.parse(config.transport)
    return str(replace(found, host=Tcp.host) if isinstance(found, Tcp) else found)


def moved(record: RunFolder, config: RunConfig, gathering: Gathering) -> RunConfig:
    """Return the configuration with which a run continues on other hosts, and store the former configuration beside the
    checkpoints.

    Raises:
        ConfigurationError: the configuration names a transport that reaches no other host, or the disk is full.
    """
    again = replace(config, transport=gathering.over(config).transport)
    if again != config:
        keep_configs(record, config, again)
        record.write_config(again)
    return again


def keep_configs(record: RunFolder, *configs: RunConfig) -> None:
    """Store configurations beside the checkpoints that refer to them.

    Raises:
        ConfigurationError: the disk is full.
    """
    try:
        for config in configs:
            disk.keep_config(record.path, config.digest, config.to_toml())
    except OSError as error:
        raise ConfigurationError(
            f"the configuration could not be written to {record.path}: {error.strerror or error}; free some space, "
            "then resume again"
        ) from None


@dataclass(frozen=True)
class ResizedRun:
    """A run that continues with another number of workers: its configuration, its plan, and the states of its nodes."""

    config: RunConfig
    plan: Plan
    before: RunConfig
    """Configuration of the run before the number of workers changed."""
    states: dict[Address, Cut]
    notes: tuple[str, ...]
    """Sentences for the record about the change of the number of workers."""
    parts: int = 1
    """Number of states of each replica."""

    def write(self, record: RunFolder, checkpoint: Checkpoint) -> Checkpoint:
        """Write the new states as the run's newest checkpoint, and the configuration; return the checkpoint.

        `checkpoint` is the checkpoint with the states before the change. A run that is killed during this call can be
        resumed from either checkpoint.

        Raises:
            ConfigurationError: the disk is full.
        """
        keep_configs(record, self.before, self.config)
        try:
            folder = disk.new_folder(record.path)
            shards = [
                disk.write_shard(folder, node, state.before, state.to_arrays()) for node, state in self.states.items()
            ]
            strategy, seconds = str(self.plan.strategy), checkpoint.manifest.seconds
            facts = FORMAT, __version__, strategy, self.config.workers, self.config.digest, seconds
            nodes = tuple(sorted(shards, key=lambda shard: shard.node))
            manifest = Manifest(*facts, nodes, replica_size=self.parts)
            disk.write_manifest(folder, manifest)
        except OSError as error:
            raise ConfigurationError(
                f"the states of {self.config.workers} workers could not be written to {record.path}: "
                f"{error.strerror or error}; free some space, then resume again"
            ) from None
        return Checkpoint(folder, disk.read_manifest(folder))


def resized_run(
    checkpoint: Checkpoint,
    built: BuiltJob,
    plan: Plan,
    config: RunConfig,
    workers: int,
    gone: Collection[int] = (),
    evaluated: Collection[float] = (),
) -> ResizedRun:
    """Prepare a run to continue from a checkpoint with another number of workers; nothing is written.

    Args:
        checkpoint: the checkpoint with the states of the run so far.
        built: the job of the run.
        plan: the plan of the run so far.
        config: the configuration of the run so far.
        workers: the number of workers from now on.
        gone: ranks of the workers that leave; by default those with the highest ranks.
        evaluated: times of the evaluations in the record, in seconds.

    Raises:
        ConfigurationError: the run cannot have this number of workers, or the checkpoint is damaged.
        CompositionError: the strategy has no rule for another number of workers.
    """
    require_resizable(plan.strategy)
    kept = {shard.node: read_cut(checkpoint, shard.node) for shard in checkpoint.manifest.shards}
    manifest = checkpoint.manifest
    order = sorted(manifest.steps, key=lambda rank: (rank in gone, rank))
    faults = faults_after(plan, kept, order, workers)
    now, changed = with_workers(built, replace(config, faults=faults), workers)
    states = resized_checkpoint(built.engine, plan, now, kept, order, manifest.lost.values())
    steps_so_far = f"step {states[0].before} of {now.steps}, counted with {workers} workers"
    notes = [f"{workers} workers continue the run of {config.workers} workers, from {steps_so_far}"]
    if lost := len({one.tick for one in manifest.unevaluated(evaluated)}):
        notes.append(f"evaluations were dropped, because their snapshots are of {config.workers} workers: {lost}")
    return ResizedRun(changed, now, config, states, tuple(notes))


def with_workers(built: BuiltJob, config: RunConfig, workers: int) -> tuple[Plan, RunConfig]:
    """Return the plan and the configuration of a job's run with another number of workers, which together use as many
    samples.
    """
    wanted = replace(config, workers=workers, steps=None)  # refuses what is no number of workers
    assert config.steps is not None
    steps = None if config.schedule else math.ceil(config.workers * config.steps / workers)
    _, plan, again = prepare(replace(wanted, steps=steps), None, built)
    return plan, replace(config, workers=workers, steps=again.steps)


def resized_script(
    checkpoint: Checkpoint, config: RunConfig, asked: RunConfig, gone: Collection[int] = ()
) -> ResizedRun:
    """Prepare the run of a script to continue from a checkpoint with the number of workers, and of processes of each
    replica, of `asked`; see `resized_run`. The states are of the former parts of replicas, of which each process takes
    its elements.

    Raises:
        ConfigurationError: the strategy cannot have this number of workers, or the checkpoint is damaged.
        CompositionError: the strategy has no rule for another number of workers, or its servers hold former parts.
    """
    from flockstep.runtime import torch_keeper  # noqa: F401 - defines the classes of the saved states

    strategy = Strategy.parse(checkpoint.manifest.strategy)
    require_script_resizable(strategy)
    manifest, parts = checkpoint.manifest, checkpoint.manifest.replica_size
    before, replicas = config.workers // config.processes_of_replica, asked.workers // asked.processes_of_replica
    strategy.check(replicas)
    left = {rank // config.processes_of_replica for rank in gone}
    order = sorted({rank // parts for rank in manifest.steps}, key=lambda replica: (replica in left, replica))
    lost = {rank // parts: step for rank, step in manifest.lost.items()}  # equal for all parts, which step together
    states, plans = dict[Address, Cut](), list[Plan]()
    for part in range(parts):
        former, later = (PartGroup(part, parts, strategy.servers_for(n), 0, 0) for n in (before, replicas))
        inside = {shard.node: former.inside(shard.node) for shard in manifest.shards}
        kept = {own: read_cut(checkpoint, node, script=False) for node, own in inside.items() if own is not None}
        rule = kept[order[0]].at_boundary.rule
        plans = [script_plan(strategy, rule, n, config.seed) for n in (before, replicas)]
        found = resized_scripts(plans[0], plans[1], kept, order, lost.values())
        states |= {later.outside(own): state for own, state in found.items()}
    if parts != asked.processes_of_replica:
        why = f"its servers hold the parameters in the parts of {parts} processes" if min(states) < 0 else ""
        if why := why or why_not_resharded(states[0]):
            raise CompositionError(
                f"a script with {strategy} continues with as many processes for each replica as it had, because {why}, "
                f"got {asked.processes_of_replica}; resume with --replica-size {parts}"
            )
    note = (
        f"{_counted(asked)} continue the run of {_counted(config)}, from step {states[0].before}, counted with "
        f"{_counted(asked)}"
    )
    return ResizedRun(asked, plans[1], config, states, (note,), parts)


def _counted(config: RunConfig) -> str:
    """The workers of a run, for a sentence."""
    size = config.processes_of_replica
    return f"{config.workers} workers" + f" in replicas of {size}" * (size > 1)


def require_limits(config: RunConfig) -> None:
    """Check the smallest and the largest number of workers with which a run may continue.

    Raises:
        ConfigurationError: the number of workers is not within these limits.
    """
    least, most = config.min_workers, config.max_workers
    if least is not None and least > config.workers:
        raise ConfigurationError(
            f"min_workers must be <= {config.workers}, the number of workers, got {least}; lower it"
        )
    if most is not None and most < config.workers:
        raise ConfigurationError(
            f"max_workers must be >= {config.workers}, the number of workers, got {most}; raise it"
        )


def require_interval(config: RunConfig) -> None:
    """Check that a run whose workers may be lost takes checkpoints.

    Raises:
        ConfigurationError: checkpoints are off.
    """
    if config.min_workers is not None and config.checkpoint_every is None:
        raise ConfigurationError(
            "min_workers needs checkpoints, from which the run continues when a worker is lost; add for example "
            "--checkpoint-every 100"
        )


def config_of(record: RunFolder, checkpoint: Checkpoint, config: RunConfig) -> RunConfig:
    """Return the configuration with which a checkpoint was written: `config`, unless the number of workers has changed
    since.

    `config` is the configuration in the record, from before or after such a change.
    """
    wanted = checkpoint.manifest.config
    if config.digest == wanted or disk.kept_config(record.path, config.digest) is None:
        return config
    text = disk.kept_config(record.path, wanted)
    return config if text is None else RunConfig.from_toml(text, "the configuration of the checkpoint")
