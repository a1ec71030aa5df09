"""Takes the checkpoints of a run: all nodes stop, no message is in transit, and each node writes its state.

Each worker stops at its next step boundary, so workers may stop at different steps. If the other workers then wait for
a stopped worker, as they do in a sum over all workers, the stopped worker continues for one step. Scripts whose workers
proceed in step stop at the same step, because after a change of the workers all of them continue from one place. All
nodes have stopped and no message is in transit when two consecutive rounds of queries find every node stopped,
unchanged counts of messages, and equal numbers of sent and received messages (Friedemann Mattern, Algorithms for
distributed termination detection, 1987).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec

from flockstep import __version__
from flockstep.errors import CompositionError, ConfigurationError, RunError
from flockstep.launchers.hosts import OtherHosts
from flockstep.launchers.peers import RunPeers
from flockstep.launchers.wait_monitor import joined_and, on_stderr
from flockstep.messages import Address, Fields, node_name
from flockstep.nodes import Cluster
from flockstep.records import checkpoints as disk
from flockstep.records.access import make_folder
from flockstep.records.checkpoints import Checkpoint, Manifest, Pending, Shard
from flockstep.records.config import CheckpointInterval, RunConfig
from flockstep.records.failpoints import reach
from flockstep.records.snapshots import Snapshot
from flockstep.runtime.checkpoints import CHECKPOINT, ENDED, STOPPED
from flockstep.runtime.resizing import require_resizable, require_script_resizable
from flockstep.strategies.base import Strategy

MOST_RELEASES = 200
"""Maximum number of times that stopped workers continue for one step, because other workers wait for them, before the
checkpoint is abandoned.
"""
CALLED = 2
"""Number of steps of every worker after which a script that takes part in checkpoints has called
`flockstep.checkpoint`, also if it does so at the end of the body of its loop.
"""
Stage = Literal["idle", "stopping", "copying", "writing"]


class Checkpointer:
    """Takes the checkpoints of one run, on request and at the interval that the user has set."""

    def __init__(
        self,
        record: Path,
        every: CheckpointInterval | None = None,
        keep: int = 2,
        resumed: Checkpoint | None = None,
        pending: Callable[[], list[Snapshot]] = list,
        config: str = "",
        scripts: bool = False,
        hosts: OtherHosts | None = None,
    ):
        """`every`: None for a checkpoint only at a signal; `pending` returns the snapshots that are not evaluated;
        `config` is the SHA-256 of the run's configuration. `scripts`: the workers run scripts, which take part once
        they have called `flockstep.checkpoint`. `hosts`: the other hosts, from which the states of their nodes are
        fetched.
        """
        self._hosts = hosts or OtherHosts()
        self.resumed = resumed
        self.newest: Manifest | None = None if resumed is None else resumed.manifest
        """The newest complete checkpoint."""
        self.notes: list[str] = []
        """Sentences about checkpoints that could not be written, for the record."""
        self.why_not = ""
        """Why there is no checkpoint of the end, if there is none."""
        self.deals = False
        """Whether a script was in the middle of a pass over data that were dealt to the workers."""
        self._record, self._every, self._keep, self._pending = record, every, keep, pending
        self._config, self._scripts = config, scripts
        self._offered: set[Address] = set()
        """Workers whose scripts have called `flockstep.checkpoint`."""
        self._peers = RunPeers(0, 0.0)
        self._strategy: Strategy
        self._cluster: Cluster
        self._parts = 1
        self._phase: Stage = "idle"
        self._over = True
        self._lost: dict[Address, int] = {}
        """Workers that were lost, without which the checkpoints are taken, with their numbers of steps."""
        self._staying = False
        """Whether the nodes stay stopped when they have copied their states, because the run is about to end."""
        self._cutting = False
        """Whether the nodes stay stopped because the run is about to continue with other workers."""
        self._again = False
        """Whether another checkpoint follows the one that is being written."""
        self._wave = 0
        self._answers: dict[Address, Fields] = {}
        self._before: dict[Address, Fields] = {}
        self._folder = Path()
        self._released = 0
        self._linked: Future[tuple[Pending, ...]]
        """The snapshots that are not evaluated; a thread computes the hashes of their files."""
        self._seconds: dict[Address, float] = {}
        self._written: dict[Address, Shard | str | None] = {}
        self._step = 0 if resumed is None else min(resumed.manifest.steps.values(), default=0)
        self._since = time.monotonic()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being taken."""
        return self._phase != "idle"

    @property
    def unused(self) -> bool:
        """Whether no checkpoints are taken in this run of a script, because neither an option nor the script asks for
        them.
        """
        return self._scripts and not self._offered and self._every is None and self.resumed is None

    @property
    def at_intervals(self) -> bool:
        """Whether the user has set an interval, so that the run ends where the first checkpoint cannot be taken."""
        return self._every is not None

    @property
    def stopping(self) -> bool:
        """Whether some nodes must still stop for a checkpoint."""
        return self._phase == "stopping"

    def begin(self, peers: RunPeers, strategy: Strategy, cluster: Cluster, parts: int = 1) -> None:
        """Start the wait for the first checkpoint, because all nodes are ready and the run begins; `parts`: number of
        workers that hold a replica together.
        """
        self._peers, self._strategy, self._cluster, self._parts = peers, strategy, cluster, parts
        self._over = not (strategy.traits.restarts and strategy.traits.checkpoints)
        if self._over:
            self.why_not = f"a run with {strategy} has no checkpoints"
        self._since = time.monotonic()

    def follow(self, former: Checkpointer) -> None:
        """Continue from the checkpoints that were taken before the workers changed, if the run has to go back."""
        self.newest = former.newest

    def look(self, step: int) -> None:
        """Start a checkpoint if the interval since the previous one has passed; `step`: steps of the slowest worker.

        Raises:
            RunError: the scripts have taken steps without a call of `flockstep.checkpoint`, so that no checkpoint can
                be taken.
        """
        if self.busy or self._over or self._every is None:
            return
        if self._every.due(step - self._step, time.monotonic() - self._since):
            if self.missing and step < CALLED:
                return
            if self.missing:
                raise RunError(
                    f"no checkpoint can be taken at step {step}, because {self.missing}; call it at the top of the "
                    "loop over batches, or leave out --checkpoint-every, --min-workers and --max-workers"
                )
            self._step = step - step % self._every.steps if self._every.steps else step
            self._begin()

    def stop(self) -> bool:
        """Take a last checkpoint, because the run is about to end; return whether a checkpoint is now in progress."""
        self._staying = True
        self._again = self._phase == "writing"  # the nodes have gone on since
        if self.missing and not self._over:
            self.why_not = self.missing
        elif not self.busy and not self._over:
            self._begin()
        return self.busy

    def cut(self) -> None:
        """Take a checkpoint and leave the nodes stopped, because the run continues with other workers."""
        if not self._cutting:
            self._cutting = True
            self.stop()

    @property
    def is_cut(self) -> bool | None:
        """Whether the checkpoint that `cut` has begun is complete and the nodes have stopped; None while it is in
        progress.
        """
        return None if self.busy else self._cutting and not self.why_not and not self._over

    def hear(self, address: Address, note: Fields) -> None:
        """Handle a node's answer to an instruction about the checkpoint."""
        match note["did"]:
            case "offer":
                self._offered.add(address)
                if self._every is not None:
                    require_checkpoints(self._strategy)
            case "count" if int(note["wave"]) == self._wave and self._phase == "stopping":
                self._answers[address] = note
                if len(self._answers) == len(self._peers.links):
                    self._count()
            case "copy" | "write" | "skip" | "fail" if note["folder"] != self._folder.name:
                pass  # of a checkpoint that was given up
            case "copy" if self._phase == "copying":
                self._seconds[address] = float(note["seconds"])
                if len(self._seconds) == len(self._peers.links):
                    self._phase = "writing"
                    reach("states.copied")
                    self._let_go(hold=self._staying)
                    self._finish()
            case "write":
                self.deals |= bool(note["deals"])
                node = self._cluster.logical(address)
                facts = int(note["step"]), int(note["nbytes"]), str(note["sha256"])
                shard = Shard(node, disk.shard_file(node), *facts)
                if self._hosts.has(address):
                    # The node has written on its own host. The file may arrive when another checkpoint is being taken.
                    folder = self._folder

                    def arrived(why: str) -> None:
                        if folder == self._folder and self.busy:
                            self._note(address, why or shard)

                    self._hosts.fetch(address, shard, folder, arrived)
                else:
                    self._note(address, shard)
            case "skip":
                self._note(address, None)
            case "fail":
                self._note(address, str(note["why"]))

    def lose(self, address: Address, step: int | None) -> None:
        """A node is lost after `step` steps, and its part of the state with it: later checkpoints are of the nodes that
        live, and one that is in progress begins again. If the run cannot continue with fewer workers, which a `step` of
        None says, no more checkpoints are taken.
        """
        require = require_script_resizable if self._scripts else require_resizable
        fewer = not self._over and address >= 0 and step is not None and (self._hosts.here or not self._scripts)
        with contextlib.suppress(CompositionError):
            if fewer and step is not None:
                require(self._strategy)
                self._lost[address] = step
                if self.busy:
                    self._drop()
                    self._begin()
                return
        if not self._over and self._every is not None:
            self._say(f"no more checkpoints are taken, because {node_name(address)} was lost")
        if not self._over:
            self.why_not = f"{node_name(address)} was lost"
        self._over = True
        self._give_up()

    def interrupt(self, why: str) -> None:
        """Abandon the checkpoint in progress, because the nodes of the run change; later checkpoints are taken as
        before.
        """
        if self.busy:
            self.why_not = why
            self._give_up()

    def end(self, failed: bool = False) -> None:
        """Abandon an incomplete checkpoint, because the run has ended; `failed` says that the run ended with an error,
        which the user has to see first.
        """
        if not failed and self._every is not None and self.missing and self._peers.links:
            self._say(f"no checkpoint was taken, because {self.missing}")
        self._over, self._staying = True, True
        self._give_up()

    def resume_snapshots(self, folder: Path, evaluated: set[float]) -> list[Snapshot]:
        """Copy the snapshots that were not yet evaluated at the checkpoint to `folder`, and return them.

        `evaluated` holds the times, in seconds, of the evaluations in the record.
        """
        if self.resumed is None:
            return []
        found = []
        for item in self.resumed.manifest.unevaluated(evaluated):
            make_folder(folder)
            place = shutil.copyfile(self.resumed.folder / item.path, folder / item.path)
            found.append(msgspec.structs.replace(item, path=str(place)))
        return found

    def _begin(self) -> None:
        self._since, self.why_not, self.deals = time.monotonic(), "", False
        try:
            self._folder = disk.new_folder(self._record, self._folder if self._folder.name else None)
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        self._released = 0
        self._phase, self._before, self._written, self._seconds = "stopping", {}, {}, {}
        reach("checkpoint.begun")
        self._tell_all({"do": "stop", "after": 0})
        self._ask()

    def _ask(self) -> None:
        self._wave, self._answers = self._wave + 1, {}
        self._tell_all({"do": "count", "wave": self._wave})

    def _count(self) -> None:
        """All nodes have answered a wave: copy their states, let some go on by a step, or ask again."""
        now: dict[Address, Fields] = {address: {**note, "wave": 0} for address, note in self._answers.items()}
        if any(note["state"] == ENDED for note in now.values()):
            self._over, self.why_not = True, "a worker had taken its last step"  # the run is about to end
            self._give_up()
            return
        steps = {rank: int(note["step"]) for rank, note in now.items() if rank >= 0}
        stopped = {rank: step for rank, step in steps.items() if now[rank]["state"] == STOPPED}
        # What the processes of a replica send each other is not counted: while no worker has stopped, one computes.
        in_flight = sum(int(one["sent"]) - int(one["received"]) for one in now.values())
        still = bool(stopped) and now == self._before and in_flight == 0
        self._before = now
        if self._scripts and self._strategy.traits.in_step and (self._cutting or not self._staying):
            # All workers stop at the same step; at the end of a run there is no time for this, and no need.
            furthest = max(steps.values())
            if behind := [rank for rank, step in stopped.items() if step < furthest]:
                self._let_on(behind, furthest)
                return
        if still and all(note["state"] == STOPPED for note in now.values()):
            self._copy()
            return
        if still and self._released == MOST_RELEASES:
            waiting = ", ".join(node_name(address) for address, note in now.items() if note["state"] != STOPPED)
            self.why_not = f"{waiting} did not reach a point where a program can stop"
            self._say(f"no checkpoints are taken, because {self.why_not}")
            self._over = True
            self._give_up()
            return
        if still:
            # Workers wait for stopped workers: those that are furthest behind go on by a step.
            self._released += 1
            least = min(stopped.values())
            self._let_on([rank for rank, step in stopped.items() if step == least], least + 1)
            return
        self._ask()

    def _let_on(self, ranks: Iterable[int], after: int) -> None:
        """Let stopped workers go on until they have taken `after` steps, and with each the others of its replica, which
        wait for each other within a step.
        """
        replicas = {rank // self._parts for rank in ranks}
        for rank, link in self._peers.links.items():
            if rank >= 0 and rank // self._parts in replicas:
                link.tell(CHECKPOINT, {"do": "stop", "after": after})
        self._ask()

    def _copy(self) -> None:
        """All nodes have stopped: keep the snapshots that are not evaluated, and let the nodes copy their states."""
        latest: dict[str, Snapshot] = {}
        try:
            for item in self._pending():
                there, here = Path(item.path), self._folder / Path(item.path).name
                here.unlink(missing_ok=True)
                if not there.exists():  # it was evaluated just now
                    continue
                try:
                    os.link(there, here)
                except OSError:  # of another file system
                    with contextlib.suppress(FileNotFoundError):
                        shutil.copyfile(there, here)
                if here.exists():
                    latest[here.name] = msgspec.structs.replace(item, path=here.name)
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        self._phase = "copying"
        thread = ThreadPoolExecutor(1, "flockstep-checkpoint")
        self._linked = thread.submit(disk.keep_pending, self._folder, tuple(latest.values()))
        thread.shutdown(wait=False)
        for address, link in self._peers.links.items():
            folder = self._folder.name if self._hosts.has(address) else str(self._folder)
            link.tell(CHECKPOINT, {"do": "copy", "folder": folder, "wait": int(self._staying)})

    def _note(self, address: Address, how: Shard | str | None) -> None:
        """Note what became of a node's state; None: another process of the same server writes it."""
        self._written[address] = how
        self._finish()

    def _finish(self) -> None:
        """Complete the checkpoint once all nodes have written their states."""
        if self._phase != "writing" or len(self._written) < len(self._peers.links):
            return
        shards = [one for one in self._written.values() if isinstance(one, Shard)]
        reasons = {one for one in self._written.values() if isinstance(one, str)}
        manifest = None
        try:
            if not reasons:
                manifest = Manifest(
                    disk.FORMAT,
                    __version__,
                    str(self._strategy),
                    self._cluster.workers,
                    self._config,
                    max(self._seconds.values()),
                    tuple(sorted(shards, key=lambda shard: shard.node)),
                    self._linked.result(),
                    self._lost,
                    self._parts if self._scripts else 1,
                )
                disk.write_manifest(self._folder, manifest)
        except OSError as error:
            reasons = {error.strerror or str(error)}
        if manifest is None or reasons:
            self._fail("; ".join(sorted(reasons)))
            return
        self.newest, self._phase = manifest, "idle"
        disk.prune(self._record, self._keep)
        reach("checkpoint.complete")
        if self._again and not self._over:
            self._again = False
            self._begin()

    def _give_up(self) -> None:
        """Let the nodes go on without a checkpoint."""
        if self._cutting:
            self._staying = self._cutting = False
        if self.busy:
            self._drop()
            self._let_go()

    def _drop(self) -> None:
        self._phase = "idle"
        disk.remove(self._folder)

    def _let_go(self, hold: bool = False) -> None:
        """Let the nodes go on; scripts do so even if the run is about to change or end, because they complete their
        states, and with `hold` wait then.
        """
        if not self._staying or self._scripts:
            self._tell_all({"do": "go on", "hold": int(hold)})

    @property
    def missing(self) -> str:
        """Why no checkpoint can be taken yet: a script has not called `flockstep.checkpoint`; empty if all have."""
        late = [rank for rank in sorted(self._peers.links) if rank >= 0 and rank not in self._offered]
        if not late or not self._scripts:
            return ""
        scripts, have = ("script of worker", "has") if len(late) == 1 else ("scripts of workers", "have")
        return f"the {scripts} {joined_and(map(str, late))} {have} not called flockstep.checkpoint"

    def _fail(self, why: str) -> None:
        self.why_not = why
        self._say(f"no checkpoint was written, and the previous checkpoint is kept: {why}")
        self._give_up()

    def _say(self, text: str) -> None:
        on_stderr(text)
        if text not in self.notes:
            self.notes.append(text)

    def _tell_all(self, note: Fields) -> None:
        for link in self._peers.links.values():
            link.tell(CHECKPOINT, note)


def require_checkpoints(strategy: Strategy) -> None:
    """Raise `CompositionError` if a run with this strategy has no checkpoints, because its state cannot be saved during
    the run.
    """
    if not strategy.traits.restarts:
        raise CompositionError(
            f"a run with {strategy} has no checkpoints, because no single node holds its state; leave out "
            "--checkpoint-every, or use another strategy"
        )
    if not strategy.traits.checkpoints:
        raise CompositionError(
            f"a run with {strategy} has no checkpoints, because not all of its nodes can stop between two steps; leave "
            "out --checkpoint-every, or use another strategy"
        )


def require_one_machine(config: RunConfig) -> None:
    """Raise `ConfigurationError` if a run on several hosts asks for checkpoints of a split model, which one machine
    alone can take.
    """
    if config.partition is not None and config.checkpoint_every is not None:
        raise ConfigurationError(
            f"checkpoints of a split model need all processes on one machine, got {config.partition} and several "
            "hosts; leave out --checkpoint-every"
        )


def require_resumable(checkpoint: Checkpoint, strategy: Strategy | None, workers: int, config: str) -> None:
    """Check that a run with this configuration, whose SHA-256 is `config`, can continue from a checkpoint.

    `strategy` is None if a script chooses the strategy when it runs.

    Raises:
        ConfigurationError: the checkpoint has another version, strategy, number of workers or configuration.
    """
    manifest, where = checkpoint.manifest, checkpoint.folder
    if manifest.version != __version__:
        raise ConfigurationError(
            f"{where} was written by flockstep {manifest.version}, but this is flockstep {__version__}; resume with "
            f"flockstep {manifest.version}"
        )
    if strategy is not None and manifest.strategy != str(strategy):
        raise ConfigurationError(
            f"{where} was written by a run of {manifest.strategy}, but the run's config.toml names {strategy}; "
            "restore config.toml"
        )
    if manifest.workers != workers:
        raise ConfigurationError(
            f"{where} holds the state of {manifest.workers} workers, the run's config.toml says {workers}; restore "
            f"config.toml, and resume with -n {workers} for {workers} workers"
        )
    if manifest.config != config:
        raise ConfigurationError(
            f"config.toml is not the configuration with which {where} was written: it was changed since, or another "
            "build of flockstep wrote it; restore config.toml, resume with that build, or start another run"
        )
