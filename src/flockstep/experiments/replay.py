"""Repeats a recorded run bit for bit, and shows the state of its programs."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self

import msgspec

from flockstep import __version__
from flockstep.errors import ConfigurationError
from flockstep.expression import to_text
from flockstep.frameworks.base import Engine
from flockstep.frameworks.job import import_components, make_engine
from flockstep.launchers.threads import limit_threads
from flockstep.messages import Address, Message, node_name
from flockstep.nodes import Node
from flockstep.records.checkpoints import FORMAT, Manifest, Shard, digest_of, shard_file, write_manifest
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.records.tape import CONFIG, TAPES, read_tape, segments_of
from flockstep.runtime.follower import Agreement, Difference
from flockstep.runtime.member import NodeSpec
from flockstep.runtime.plan import Plan
from flockstep.runtime.process import JobWorker, run_server
from flockstep.runtime.replay import ReplayMember, ReplayStage
from flockstep.runtime.setup import BuiltJob, digest, prepare, require_unchanged, versions


class Replay:
    """A run that is repeated from its record. As a context manager it ends the programs, which wait otherwise.

    `run` lets the programs go on; between two calls, their state can be looked at.
    """

    def __init__(self, folder: Path | str):
        """`folder`: of the record.

        Raises:
            ConfigurationError: the record does not hold what a replay needs, or its job's file has changed.
        """
        self.folder, self.stage = Path(folder), ReplayStage()
        self.config = RunFolder(self.folder).read_config()
        self._segments = segments_of(self.folder)
        if not self._segments:
            raise ConfigurationError(
                f"{self.folder} does not hold what a replay needs; record the run with --replayable: "
                f"{self.config.command} --replayable"
            )
        if self.config.kind != "train":
            raise ConfigurationError(
                f"{self.folder} holds a run of flockstep {self.config.kind}, which is not repeated in one process, so "
                f"that nobody can look at its programs; use flockstep replay {self.folder}"
            )
        specs = [[_spec_on(path) for path in sorted(folder.glob("*.tape"))] for folder in self._segments]
        if not all(specs):
            raise ConfigurationError(f"no worker had begun to train in {self.folder}; name a run that has begun")
        workers = [sum(spec.address >= 0 for spec in those) for those in specs]
        for before, those, after in zip(workers, specs[1:], workers[1:], strict=False):
            if after != before and all(spec.checkpoint for spec in those):
                raise ConfigurationError(
                    f"{self.folder} was continued from a checkpoint with {after} workers in place of {before}, which "
                    "is not replayed; name a run that was resumed with as many workers as before"
                )
        if self.config.job.endswith(".py"):
            if not (job := Path(self.config.job)).exists():
                raise ConfigurationError(f"there is no {job} here; replay the run in the folder where it began")
            require_unchanged(self.config, digest(job))
        import_components(self.config.imports)
        self._scratch = tempfile.TemporaryDirectory(prefix="flockstep-replay-")
        self._threads: list[Thread] = []
        self._member_of = partial(ReplayMember, self.stage)
        self._first: BuiltJob | None = None
        self._begun: dict[Path, set[Address]] = {}
        """Folder of a segment → the nodes whose threads have begun."""

    @property
    def nodes(self) -> Mapping[Address, Node]:
        """The nodes by address: workers from 0, servers from -1 downwards; each has `params`, `state` and `step`."""
        return self.stage.nodes

    @property
    def in_flight(self) -> dict[tuple[Address, Address], list[Message]]:
        """Sender and receiver → messages that were sent and have not entered the receiver's program."""
        newest = list(self.stage.segments.values())[-1:]
        return {pair: list(queue) for flight in newest for pair, queue in flight.items() if queue}

    @property
    def difference(self) -> Difference | None:
        """The first difference from the run; None while there is none."""
        return self.stage.differs

    @property
    def agreements(self) -> Sequence[Agreement]:
        """The evaluated parameters that were equal to those of the run."""
        return self.stage.agreements

    @property
    def messages(self) -> int:
        """Number of messages that have entered programs."""
        return self.stage.messages

    @property
    def gradients(self) -> int:
        """Number of gradients that were equal to those of the run."""
        return self.stage.gradients

    @property
    def surroundings(self) -> list[str]:
        """What differs between this machine and that of the run, in words."""
        now = versions()
        return [
            f"{name} is {now.get(name)}, and was {was}"
            for name, was in self.config.versions.items()
            if name in now and now[name] != was
        ]

    def run(self, until: int | None = None) -> Self:
        """Let the programs go on until each worker has taken `until` steps; None: to their end.

        Raises:
            ConfigurationError: a worker has taken more steps.
        """
        most = max((node.run_step for rank, node in self.nodes.items() if rank >= 0), default=0)
        if until is not None and until < max(most, 1):
            raise ConfigurationError(f"until must be >= {max(most, 1)} steps, got {until}; a replay only goes forward")
        self.stage.continue_until(until)
        with ExitStack() as stack:
            stack.callback(self.close)
            for folder in self._segments:
                self._begin(folder)
                self.stage.run()
                if self.stage.paused and self.difference is None:
                    stack.pop_all()
                    break
                self.stage.end(str(folder))
        return self

    @property
    def failures(self) -> Mapping[Address, str]:
        """Node → why its program has failed, as in the run unless there is a difference."""
        return self.stage.failures

    def close(self) -> None:
        """End all programs, which wait."""
        for folder in self._segments:
            self.stage.end(str(folder))
        for thread in self._threads:
            thread.join()
        self._scratch.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _begin(self, folder: Path) -> None:
        """Begin the threads of a segment's nodes, except those that go on from the segment before."""
        begun = self._begun.setdefault(folder, set())
        config = RunConfig.from_toml((folder / CONFIG).read_text("utf-8"))
        specs = [_spec_on(path) for path in sorted(folder.glob("*.tape"))]
        new = [spec for spec in specs if spec.address not in begun]
        begun |= {spec.address for spec in new}
        self._complete({spec.checkpoint for spec in new} - {""}, [spec.address for spec in specs], config)
        threads = []
        for spec in new:
            built = self._built()
            plan = prepare(config, None, built)[1]
            if self.stage.initial is None:
                self.stage.initial = built.engine.initial()
            play = partial(self._play, self._moved(spec, folder), config, built, plan)
            threads.append(Thread(target=play, name=node_name(spec.address), daemon=True))
        self._threads += threads
        self.stage.begin(threads)

    def _built(self) -> BuiltJob:
        """The job, loaded once, with an engine for one node."""
        if self._first is None:
            self._first = BuiltJob.of(self.config)
            limit_threads(self.config.threads or 1)  # as in the run, because the number of threads changes sums
            return self._first
        job = self._first.job
        return BuiltJob(job, make_engine(job, self.config.seed))

    def _moved(self, spec: NodeSpec, tapes: Path) -> NodeSpec:
        place = self._scratch.name
        checkpoint = str(Path(place) / Path(spec.checkpoint).name) if spec.checkpoint else ""
        return dataclasses.replace(spec, directory=place, checkpoint=checkpoint, tapes=str(tapes), supervisor=0)

    def _complete(self, checkpoints: set[str], nodes: Sequence[Address], config: RunConfig) -> None:
        """Complete the checkpoints from which a segment goes on, which the programs have written before."""
        for name in checkpoints:
            folder = Path(self._scratch.name) / Path(name).name
            files = {node: folder / shard_file(node) for node in nodes}
            shards = tuple(
                Shard(node, file.name, 0, file.stat().st_size, digest_of(file)) for node, file in files.items()
            )
            facts = FORMAT, __version__, config.strategy, config.workers, config.digest
            write_manifest(folder, Manifest(*facts, 0.0, shards))

    def _play(self, spec: NodeSpec, config: RunConfig, built: BuiltJob, plan: Plan) -> None:
        """Run the program of a node; in a thread of its own."""
        with self.stage.playing():
            if spec.address < 0:
                facts = to_text(plan.strategy), to_text(plan.optimizer.on_servers), built.engine.schema
                run_server(spec, -1 - spec.address, *facts, plan.evaluate_every, None, self._member_of)
                return
            worker = JobWorker(self._member_of)
            while not isinstance(ended := worker.run(spec, partial(_given, built.engine, plan)), int):
                assert ended.node_spec is not None
                folder = self.folder / TAPES / Path(ended.node_spec.tapes).name
                self._begun.setdefault(folder, set()).add(ended.node_spec.address)
                spec = self._moved(ended.node_spec, folder)
                config = RunConfig.from_toml(ended.config).with_files_of(config)
                plan = prepare(config, None, built)[1]


def _spec_on(tape: Path) -> NodeSpec:
    """The node specification on a tape, all of whose entries can be read."""
    header, entries = read_tape(tape)
    deque(entries, maxlen=0)
    return msgspec.json.decode(header.spec, type=NodeSpec)


def _given(engine: Engine, plan: Plan) -> tuple[Engine, Plan]:
    return engine, plan
