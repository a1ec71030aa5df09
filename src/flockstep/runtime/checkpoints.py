"""A node's part in a checkpoint: the node stops at the top of its program's loop, copies its state, and writes the
copy.

The supervisor asks all nodes to stop, and then queries, in rounds, how many messages they have sent and received. A
worker stops at the next point at which its program could restart; a server can restart whenever it waits for any
message. Once all nodes have stopped and no message is in transit, every node copies its state and continues, while a
thread writes the copy.

The state of a script's worker is copied inside `optimizer.step()`. The script completes the copy at its next call of
`flockstep.checkpoint` with its state at this call: random streams, settings of the optimizer that a scheduler changes,
buffers, and the values that the script itself has to restore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from itertools import zip_longest
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError
from flockstep.frameworks.shard_layout import ShardLayout
from flockstep.messages import ANYTHING, Address, Fields
from flockstep.nodes import Worker
from flockstep.optimizers.base import OptimizerState
from flockstep.records.checkpoints import Checkpoint, Manifest, Shard, read_manifest, shard_file, write_shard
from flockstep.records.failpoints import reach
from flockstep.runtime.cut import OF_SCRIPT, Cut, cut_of, read_cut
from flockstep.runtime.member import NodeSpec
from flockstep.runtime.plan import Batches, LocalOptimizer
from flockstep.runtime.resharding import resharded
from flockstep.runtime.runner import Runner
from flockstep.runtime.state import to_arrays, to_bytes

if TYPE_CHECKING:
    from flockstep.runtime.torch_keeper import TorchKeeper

CHECKPOINT = "checkpoint"
"""Tag of the messages about checkpoints that the supervisor and the nodes exchange."""
RUNNING, STOPPED, ENDED = 0, 1, 2
"""State of a node that answers the supervisor. RUNNING: the node waits for a message in the middle of its program.
STOPPED: it has stopped where its program can restart. ENDED: it has taken its last step.
"""
AFTER = 40
"""Number of bits of a step in an instruction."""
Extra = Mapping[str, Any]
SHOWN = 60
"""Largest number of characters of a value in an error message."""


class _Nothing:
    """Stands for a value that one of two collections does not have."""

    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()


def manifest_of(spec: NodeSpec) -> Manifest | None:
    """Return the manifest of the checkpoint from which a node continues; None if its run starts from the beginning."""
    return read_manifest(_folder_of(spec)) if spec.checkpoint else None


def _folder_of(spec: NodeSpec) -> Path:
    return Path(spec.directory) / spec.checkpoint  # an absolute path stays


def load(spec: NodeSpec, address: Address, params: FlatArray, layout: ShardLayout | None = None) -> Cut | None:
    """Return the state from which node `address`, with parameters `params` (K,), continues; None if its run starts from
    the beginning. If other numbers of processes held each replica of a script, its elements are those of `layout`.

    Raises:
        ConfigurationError: the checkpoint is damaged, or belongs to another model.
    """
    if not spec.checkpoint:
        return None
    folder = _folder_of(spec)
    checkpoint = Checkpoint(folder, read_manifest(folder))
    size = checkpoint.manifest.replica_size
    if layout is not None and size != spec.replica_size:
        replica, part = divmod(address, spec.replica_size)
        found = (read_cut(checkpoint, replica * size + (part + number) % size) for number in range(size))
        return msgspec.structs.replace(resharded(found, layout), joins=part >= size)
    kept = read_cut(checkpoint, address)
    if np.shape(kept.params) != params.shape:
        raise ConfigurationError(
            f"{folder} does not hold the state of this model; resume with the job that wrote the checkpoint"
        )
    return kept


class Connection(Protocol):
    """Methods of a node's connection to its run that a checkpoint of the node needs."""

    runner: Runner

    @property
    def address(self) -> Address:
        """Address of this node in the run."""

    @property
    def leads(self) -> bool:
        """Whether this process is the primary of its node, not a backup of a server."""

    @property
    def unsettled(self) -> bool:
        """Whether messages have arrived that this server's backups may not have received."""

    @property
    def directory(self) -> Path:
        """Folder of this node's sockets; if the node is on another host than the coordinator, the node writes its state
        there.
        """

    def now(self) -> float:
        """Return the seconds since the run began."""

    def tell(self, tag: str, note: Fields) -> None:
        """Send a message to the supervisor, after all events so far."""

    def attend_stopped(self) -> None:
        """Wait for the next message to a node that has stopped for a checkpoint, and handle the message."""


class NodeCheckpoints:
    """Stops a node at a point where its program can restart, and writes the node's state."""

    def __init__(self, connection: Connection):
        self.stepper: LocalOptimizer | None = None
        self.batches: Batches | None = None
        self.buffers: Callable[[], FlatArray] = lambda: np.empty(0)
        """Returns the buffers of the worker's model; set by the process, like the two above."""
        self.script: ScriptCheckpoints | None = None
        """What a script adds, which completes the copy of the state at its next call of `flockstep.checkpoint`."""
        self._copied: tuple[Path, int, bool, dict[str, FlatArray]] | None = None
        """A copy that is not being written yet: folder, step, whether the supervisor waits for the file, and arrays."""
        self._connection = connection
        self._runner = connection.runner
        self._told = 0
        self._agreed: int | None = None
        """The supervisor's newest instruction to stop or to go on, as its number, `AFTER` bits to the left, plus 1 more
        than the steps after which a worker stops, or 0 to go on; and the newest that a process of the same replica had
        been told at the script's last call of `flockstep.checkpoint`, None if this process holds the replica alone.
        """
        self._wave = 0
        """The wave that is still to be answered; 0: none."""
        self._stopped = False
        self._held = False
        """Whether a script waits at its next call of `flockstep.checkpoint`, because the run changes or ends."""
        self._ended = self._deals = False
        self._thread: Thread | None = None
        self._result: Fields = {}

    def watch(self) -> None:
        """Start to follow the supervisor's requests to stop the node's program."""
        self._runner.node.at_boundary = self._at_boundary

    def hear(self, note: Fields) -> None:
        """Carry out the supervisor's instruction `note["do"]`: stop the program, count messages, copy the state, or go
        on.
        """
        match note["do"]:
            case "stop":
                self._copied, self._held = None, False  # of a checkpoint that was given up
                self._instruct(int(note["after"]) + 1)
            case "count":
                self._wave = int(note["wave"])
            case "copy":
                self._copy(self._place(str(note["folder"])), at_once=bool(note["wait"]))
            case "go on":
                self._wave, self._held = 0, bool(note["hold"])
                self._instruct(0)

    def _instruct(self, stop: int) -> None:
        self._told = ((self._told >> AFTER) + 1) << AFTER | stop

    def agree(self, newest: Callable[[int], int]) -> None:
        """Let all processes of a replica stop after the same step, because they wait for each other within a step, out
        of the supervisor's sight; `newest` returns the largest of a number over these processes.
        """
        self._agreed = newest(self._told)

    @property
    def asked(self) -> bool:
        """Whether this node must still send the supervisor an answer or a result; `idle` sends it."""
        return self._wave > 0 or self._thread is not None

    def idle(self) -> None:
        """Send the supervisor what it has asked for; called when no message has arrived that the node could handle
        first.
        """
        self.report()
        if not self._wave:
            return
        node, wave, self._wave = self._runner.node, self._wave, 0
        others = node.lost | {node.address}  # what a lost node has sent or received, no node counts
        sent = sum(count for to, count in node.sent.items() if to not in others)
        if isinstance(node, Worker):
            at_rest, ended = self._stopped, self._ended or not node.has_steps
        else:
            waits = self._runner.at_rest and self._runner.waiting == ANYTHING
            at_rest, ended = self._stopped or waits, self._ended
        # A worker that has taken its last step may have no point to stop at.
        here = STOPPED if at_rest and not self._connection.unsettled else ENDED if ended else RUNNING
        received = sum(count for source, count in node.mailbox.received().items() if source not in others)
        counts: Fields = {"sent": sent, "received": received} if self._connection.leads else {"sent": 0, "received": 0}
        self._tell({"did": "count", "wave": wave, "state": here, "step": node.step, **counts})

    def report(self, wait: bool = False) -> None:
        """Tell the supervisor whether the state has been written, as soon as the writing thread has ended; with `wait`,
        wait for the thread.
        """
        if self._thread is None or (self._thread.is_alive() and not wait):
            return
        self._thread.join()
        self._thread = None
        self._tell(self._result)

    def close(self) -> None:
        """Wait for the thread that writes the state, and answer a count that arrived just before the node's program
        ended; called when it has ended.
        """
        self._ended = True
        self.drop("the script ended before its next call of flockstep.checkpoint")
        self.report(wait=True)
        self.idle()

    def restore(self, kept: Cut, restore_buffers: Callable[[FlatArray], None], begin: Callable[[], None]) -> None:
        """Set the node's state from a checkpoint, and start its program with `begin`, which continues from there."""
        runner, node = self._runner, self._runner.node
        kept.restore(node, self.stepper)
        if isinstance(node, Worker):
            node.loss = kept.loss
            node.steps = None if node.steps is None else node.steps - kept.before
        if self.stepper is not None:
            self.stepper.lr = kept.lr
        if self.batches is not None:
            self.batches.restore(kept.batches)
        if self._connection.leads:
            runner.metrics.restore(kept.totals)
        if runner.progress is not None and kept.progress is not None:
            runner.progress.seen, runner.progress.total, runner.progress.tick = kept.progress
        if runner.wrong_gradients is not None:
            runner.wrong_gradients.memories = kept.memories
        runner.strikes = kept.strikes
        restore_buffers(kept.buffers)
        if kept.mailbox is None:
            begin()
        else:
            runner.restart_from(begin, lambda: kept.settle(node))

    def _at_boundary(self) -> None:
        node, self._runner.at_rest = self._runner.node, True
        if not isinstance(node, Worker):
            return
        followed = self._told if self._agreed is None else self._agreed
        while 0 < followed % (1 << AFTER) <= node.step + 1 and (self.script is None or self.script.may_stop):
            self._stopped = True
            self._connection.attend_stopped()
            followed = max(followed, self._told)
        self._stopped = self._runner.at_rest = False

    def _place(self, folder: str) -> Path:
        """The folder of a checkpoint; on another host than the coordinator's, the coordinator names no path and fetches
        the files. Files of a checkpoint that was given up are removed.
        """
        if Path(folder).is_absolute():
            return Path(folder)
        file = shard_file(self._connection.address)
        # A folder of this node alone, because the agent removes it with the fetched file, while others still write.
        found = self._connection.directory / f"of-{file}" / folder
        for old in found.parent.glob(f"*/{file}"):
            old.unlink(missing_ok=True)
        found.mkdir(parents=True, exist_ok=True)
        return found

    def _copy(self, folder: Path, at_once: bool) -> None:
        """Copy the node's state, and begin to write it; `at_once`: wait until it is written."""
        node = self._runner.node
        if not self._connection.leads:  # the head of the server's chain has the same state
            self._tell({"did": "copy", "seconds": self._connection.now(), "step": node.step, "folder": folder.name})
            self._tell({"did": "skip", "folder": folder.name})
            return
        reach("state.before_copy")
        self.report(wait=True)  # of a checkpoint that was given up
        self._result, why = {"did": "fail", "why": "", "folder": folder.name}, ""
        try:
            arrays = to_arrays(self.state())
        except ConfigurationError as error:
            why = str(error)
        else:
            self._copied = folder, node.run_step, at_once, arrays
            if self.script is None:
                self.complete({})
        self._tell({"did": "copy", "seconds": self._connection.now(), "step": node.step, "folder": folder.name})
        if why:
            self._tell({"did": "fail", "why": why, "folder": folder.name})
        self.report(wait=at_once)

    @property
    def copied(self) -> bool:
        """Whether a copy of the state waits for the part that the script adds."""
        return self._copied is not None

    def complete(self, more: Mapping[str, FlatArray], deals: bool = False) -> None:
        """Start to write the copy of the state, together with the arrays that a script adds; before a change or the end
        of the run the script then waits, so that no step is lost. `deals`: see `ScriptCheckpoints.checkpoint`.
        """
        assert self._copied is not None
        self._deals = deals
        (folder, step, at_once, arrays), self._copied = self._copied, None
        arrays |= {OF_SCRIPT + name: array for name, array in more.items()}
        self._thread = Thread(target=self._write, args=(folder, step, arrays), name="flockstep-checkpoint")
        self._thread.start()
        if self.script is not None:
            self.report(wait=at_once)
            while self._held:
                self._connection.attend_stopped()

    def drop(self, why: str) -> None:
        """Discard a copy of the state that the script can no longer complete."""
        if self._copied is not None:
            folder, self._copied = self._copied[0], None
            self._tell({"did": "fail", "why": why, "folder": folder.name})

    def offer(self) -> None:
        """Tell the supervisor that the script can take part in checkpoints, because it calls `flockstep.checkpoint`
        after every step.
        """
        self._tell({"did": "offer"})

    def state(self) -> Cut:
        """Return the current state of the node, whose program has stopped where it can restart; the arrays are not
        copied.
        """
        runner, node, progress = self._runner, self._runner.node, self._runner.progress
        return msgspec.structs.replace(
            cut_of(node, self.stepper, self.batches),
            before=node.before,
            lr=0.0 if self.stepper is None else self.stepper.lr,
            loss=node.loss if isinstance(node, Worker) else 0.0,
            buffers=self.buffers(),
            totals=runner.metrics.kept(),
            progress=None if progress is None else (progress.seen, progress.total, progress.tick),
            memories=[] if runner.wrong_gradients is None else runner.wrong_gradients.memories,
            strikes=runner.strikes,
            at_boundary=None if self.script is None else self.script.at_boundary(),
        )

    def _write(self, folder: Path, step: int, arrays: dict[str, FlatArray]) -> None:
        """Write the copy; runs in a thread of its own."""
        address = self._connection.address
        try:
            shard: Shard = write_shard(folder, address, step if address >= 0 else 0, arrays)
        except (OSError, ConfigurationError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._result = {"did": "fail", "why": why, "folder": folder.name}
            return
        facts: Fields = {"step": shard.step, "nbytes": shard.nbytes, "sha256": shard.sha256, "deals": int(self._deals)}
        self._result = {"did": "write", "folder": folder.name, **facts}

    def _tell(self, note: Fields) -> None:
        self._connection.tell(CHECKPOINT, note)


class ScriptCheckpoints:
    """The calls of `flockstep.checkpoint` and `flockstep.resumed` in a worker's script."""

    may_stop = False

    def __init__(self, checkpoints: NodeCheckpoints, keeper: TorchKeeper, kept: Cut | None):
        """`kept`: the state from which the run goes on; None if it begins at its start."""
        self._checkpoints, self._keeper, self._kept = checkpoints, keeper, kept
        self._asked = self._begun = False
        """Whether the script has called `resumed`, and `checkpoint`."""
        self._steps = 0
        """Steps since the last call of `checkpoint`."""
        self._extra: Extra | Callable[[], Extra] = {}
        """What the script gave at its last call of `checkpoint`."""
        self.on_begin: Callable[[], None] = lambda: None
        """Function that the first call of `checkpoint` calls."""
        checkpoints.script = self

    def move(self, checkpoints: NodeCheckpoints) -> None:
        """Go on with another connection to the run, because its workers have changed."""
        self._checkpoints, checkpoints.script = checkpoints, self
        if self._begun:
            checkpoints.offer()

    def place(self) -> dict[str, Any]:
        """Return where the script is, for a worker that joins."""
        return {"between_steps": self._keeper.between_steps(), "extra": dict(_values(self._extra))}

    def join(self, place: dict[str, Any]) -> None:
        """Begin where the script of another worker is."""
        self._keeper.restore_between_steps(place["between_steps"], random=False)
        none = np.empty(0, np.float32)
        self._kept = Cut(
            params=none, step=0, state=None, random={}, optimizer=OptimizerState(), script=place, joins=True
        )

    def at_boundary(self) -> Any:
        """Return the state of the script's optimizer at the point where the worker's program has stopped; arrays are
        not copied.
        """
        return self._keeper.at_boundary()

    def resumed(self) -> dict[str, Any] | None:
        """Return the values that the script passed to `flockstep.checkpoint` when the checkpoint was taken; None in a
        run that was not resumed.
        """
        self._asked = True
        return None if self._kept is None else deepcopy(self._kept.script["extra"])

    def checkpoint(self, extra: Extra | Callable[[], Extra], deals: bool = False) -> None:
        """Add the script's part to the copy of the worker's state, if the previous step made a copy; `deals`: the
        script is in the middle of a pass over data that were dealt to the workers.

        Raises:
            ConfigurationError: see `flockstep.checkpoint`.
        """
        if self._keeper.refusal:
            raise ConfigurationError(self._keeper.refusal)
        self._steps, self._extra = 0, extra
        if self._keeper.newest is not None:
            self._checkpoints.agree(self._keeper.newest)
        if not self._begun:
            self._begin(_values(extra))
        elif self._checkpoints.copied:
            try:
                arrays = to_arrays({"between_steps": self._keeper.between_steps(), "extra": dict(_values(extra))})
            except ConfigurationError as error:
                self._checkpoints.drop(str(error))
            else:
                self._checkpoints.complete(arrays, deals)

    def before_step(self) -> None:
        """Check, at the start of a script's step, that the script calls `checkpoint` as required.

        Raises:
            ConfigurationError: the script has not called `checkpoint` since its last step.
        """
        self._require_begun("the script takes its first step")
        if self._begun and self._steps:
            raise ConfigurationError(
                "flockstep.checkpoint must be called once for every step, got two steps without a call between them; "
                "call it at the top of the body of the loop over batches"
            )
        self._steps += 1

    def before_restart(self) -> None:
        """Check that a script may continue from a model that it has loaded, and discard an incomplete copy of the
        state.

        Raises:
            ConfigurationError: the model of the checkpoint would be lost.
        """
        self._require_begun("optimizer.sync() replaces the model of the checkpoint")
        self._checkpoints.drop("the script has loaded another model since its last step")

    def _require_begun(self, what: str) -> None:
        if self._kept is not None and not self._begun:
            raise ConfigurationError(
                f"in a resumed run the script must call flockstep.checkpoint before {what}; run code for "
                "the first start only if flockstep.resumed() is None"
            )

    def _begin(self, extra: Extra) -> None:
        """The first call: a resumed run is where it was when the checkpoint was taken."""
        if not self._asked:
            raise ConfigurationError(
                "flockstep.checkpoint needs a script that can continue where it stopped; call flockstep.resumed() "
                "before the "
                "loop, and restore the values that it returns"
            )
        now = _encoded(extra)
        if self._kept is not None:
            kept = self._kept.script["extra"]
            before = _encoded(kept)
            if self._kept.mailbox is None:  # another number of workers may count batches in another way
                before = {name: now.get(name, one) for name, one in before.items()}
            for name in [*before, *now]:
                if before.get(name) != now.get(name):
                    part, got, wanted = _difference(extra.get(name, _NOTHING), kept.get(name, _NOTHING))
                    raise ConfigurationError(
                        f"extra[{name!r}]{part} of flockstep.checkpoint must be what it was when the checkpoint was "
                        f"taken, got {got} in place of {wanted}; restore extra[{name!r}] from flockstep.resumed() "
                        "before the loop, or leave it out of extra"
                    )
            self._keeper.restore_between_steps(self._kept.script["between_steps"], random=not self._kept.joins)
            self._kept.script = None
        self._begun = self.may_stop = True
        self._checkpoints.offer()
        self.on_begin()


def _values(extra: Extra | Callable[[], Extra]) -> Extra:
    values: Any = extra() if callable(extra) else extra
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise ConfigurationError(
            f"extra must be a dict of names and values, or a function that returns one, got {type(values).__name__}; "
            'pass for example extra={"epoch": epoch, "batch": batch}'
        )
    return values


def _encoded(extra: Extra) -> dict[str, bytes]:
    """Name → the value as bytes, equal for equal values only."""
    return {name: to_bytes(value, f"extra[{name!r}]") for name, value in extra.items()}


def _difference(now: Any, kept: Any) -> tuple[str, str, str]:
    """Where two values first differ, as the keys that lead there, and what each has there."""
    for key, ours, theirs in _parts(now, kept):
        if ours is _NOTHING or theirs is _NOTHING or to_bytes(ours) != to_bytes(theirs):
            part, got, wanted = _difference(ours, theirs)
            return f"[{key!r}]{part}", got, wanted
    return "", *_shown(repr(now), repr(kept))


def _parts(now: Any, kept: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Key, and the two values, of each part of two dicts, two lists or two tuples."""
    if isinstance(now, Mapping) and isinstance(kept, Mapping):
        for key in dict.fromkeys((*kept, *now)):
            yield key, now.get(key, _NOTHING), kept.get(key, _NOTHING)
    elif type(now) is type(kept) and isinstance(now, list | tuple):
        for index, (ours, theirs) in enumerate(zip_longest(now, kept, fillvalue=_NOTHING)):
            yield index, ours, theirs


def _shown(now: str, kept: str) -> tuple[str, str]:
    """Two different values for an error message: long ones from shortly before their first difference."""
    if now == kept:  # of large arrays, whose middle is left out
        return "other elements", _cut(kept, 0)
    if max(len(now), len(kept)) <= SHOWN:
        return now, kept
    same = next((place for place, pair in enumerate(zip(now, kept, strict=False)) if len(set(pair)) > 1), 0)
    start = max(0, same - SHOWN // 3)
    return _cut(now, start), _cut(kept, start)


def _cut(text: str, start: int) -> str:
    """At most `SHOWN` characters of a text from `start` on."""
    part = text[start : start + SHOWN]
    return "..." * (start > 0) + part + "..." * (start + SHOWN < len(text))
