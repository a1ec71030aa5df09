"""What the workers of a run execute, as the loop over the segments of a run sees it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flockstep.errors import ConfigurationError
from flockstep.launchers.children import Child
from flockstep.launchers.continuing import ResizedRun
from flockstep.launchers.entry import start_server
from flockstep.launchers.evaluation import SnapshotHandler
from flockstep.launchers.host_messages import ServerSpec
from flockstep.launchers.newcomers import Newcomers
from flockstep.launchers.peers import RunPeer
from flockstep.launchers.wait_monitor import JOINS_SCRIPT
from flockstep.messages import Address
from flockstep.partitions.base import Partition
from flockstep.partitions.split_facts import SplitFacts
from flockstep.records.checkpoints import Checkpoint
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.runtime.member import NodeSpec
from flockstep.split.stages import SplitModel
from flockstep.strategies.base import ResultPolicy, Strategy

AS_THE_SCRIPT_SAYS = "as the script says"
"""Placeholder for the strategy in the configuration of a launched run, until the script has named its strategy."""
Show = Callable[[dict[Address, RunPeer], int], None]
"""Function that is called from time to time with the state of every node, by address, and with the steps of each
worker; 0 steps if their number is not known.
"""


@dataclass(frozen=True, eq=False)
class InitialParts:
    """The initial values of each part of a model, in a file without a name, so that no process holds them in memory."""

    partition: Partition
    facts: SplitFacts
    sizes: tuple[int, ...]
    """Number of elements of the parameters of each part."""
    values: tuple[npt.NDArray[np.uint8], ...]
    """For each part, the bytes that `ModelPart.values` returns."""
    parameter_bytes: tuple[int, ...]
    """Number of bytes that the parameters take at the beginning of each part's values."""

    @classmethod
    def of(cls, split: SplitModel) -> InitialParts:
        """Write the values of all parts of a model to the file.

        Raises:
            ConfigurationError: the disk is full.
        """
        try:
            with tempfile.TemporaryFile() as file:
                for part in split.parts:
                    file.write(part.values().data)
                file.flush()
                whole = np.asarray(np.memmap(file, np.uint8, "r"))
        except OSError as error:
            raise ConfigurationError(
                f"the initial values of the parts could not be written to {tempfile.gettempdir()}: {error.strerror}; "
                "free some space there, or set TMPDIR to another folder"
            ) from None
        stops = np.cumsum([part.held_bytes for part in split.parts])[:-1]
        lengths = tuple(part.schema.nbytes for part in split.parts)
        return cls(split.partition, split.facts, split.sizes, tuple(np.split(whole, stops)), lengths)

    @property
    def delayed(self) -> bool:
        """Whether micro-batches are in flight at the end of every step, as in a pipeline without flushes."""
        return self.partition.delays is not None

    def of_node(self, address: Address, servers: int) -> npt.NDArray[np.uint8]:
        """Return the initial values for a node; `servers` is the number of servers of each part, which hold only
        parameters.
        """
        if address >= 0:
            return self.values[address % len(self.sizes)]
        part = (-1 - address) // servers
        return self.values[part][: self.parameter_bytes[part]]


class Executable:
    """What the workers of a run execute: a declared job or a script. Processes are started once it is prepared."""

    joins = JOINS_SCRIPT
    """What a worker does before it joins, after "it is still"."""
    script = False
    """Whether a process may go on after the run, must exit with code 0, and may call `distribute` again."""
    checkpoints = True
    """Whether the run can take checkpoints."""
    unjoined = ""
    """Clause about a process that ends without joining the run."""
    steps = 0
    """Number of steps of each worker; 0 if it is not known."""
    every = 0
    """Number of steps of each worker between two snapshots of a server; 0 for none."""
    policy: ResultPolicy | None = None
    """Which model is the result; None: what the strategy's traits name first."""
    replica_size: int | None = None
    """Number of processes that hold each replica of a script from now on; None: as many as before."""
    parts: InitialParts | None = None
    """The parts of a split model; None if every worker holds a whole replica."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """Sentences to be added to the record."""

    def follows(self, call: int) -> str:
        """Return the folder of the tapes that call number `call` of `distribute` repeats; empty if it repeats none."""
        return ""

    def part_name(self, part: int) -> str:
        """Return the name of a part of a split model, for a sentence."""
        return f"part {part}" if self.parts is None else self.parts.partition.part_name(part)

    def prepare_again(self, config: RunConfig, begins: bool) -> Strategy | None:
        """Prepare to continue a run with the configuration of its checkpoint; return the run's strategy, or None if
        only its script names it. `begins`: whether this process has not trained in this run before.

        Raises:
            ConfigurationError: the file that is run has changed.
        """
        raise NotImplementedError

    def resized(
        self, checkpoint: Checkpoint, config: RunConfig, asked: RunConfig, gone: Collection[int], record: RunFolder
    ) -> ResizedRun:
        """Prepare to continue from a checkpoint with the number of workers, and of the processes of each replica, of
        `asked`; workers `gone` have left.

        Raises:
            CompositionError: the strategy has no rule for another number of workers.
        """
        raise NotImplementedError

    def without_stop(self, config: RunConfig, workers: int) -> RunConfig:
        """Return the configuration of the run with another number of workers, which go on with the step in hand."""
        return replace(config, workers=workers)

    def require_possible(self, strategy: Strategy, repeats: bool) -> None:
        """Check that workers may leave or join the run, if the user wants that, under the strategy that the first
        process has declared; `repeats`: see `Hello`.

        Raises:
            CompositionError: the strategy does not allow it.
            ConfigurationError: it needs checkpoints.
        """

    def begin(self, config: RunConfig) -> None:
        """Prepare to start workers with this configuration."""

    def go_on(self, config: RunConfig, remaining: Mapping[int, int]) -> None:
        """Prepare to start workers beside those whose processes go on; `remaining`: new rank → former rank of these."""
        raise NotImplementedError

    def start(self, node_spec: NodeSpec) -> Child | None:
        """Start a process of this host as the worker that `node_spec` describes; return None if something else does."""
        raise NotImplementedError

    def adopt(self, rank: int, child: Child) -> Child:
        """Take over a process that was started before its worker joined, and return it."""
        return child

    def start_server(self, node_spec: NodeSpec, server: ServerSpec) -> Child | None:
        """Start a server in a process of this host; return None if something else starts it."""
        return start_server(node_spec, server)

    def end(self) -> None:
        """All processes have ended, or the run continues with another configuration."""

    def evaluation(self, record: Path) -> SnapshotHandler:
        """Return what handles the snapshots of the run in this folder."""
        return SnapshotHandler()

    def newcomers(self) -> Newcomers:
        """Return the processes in which workers that join start in advance."""
        return Newcomers()
