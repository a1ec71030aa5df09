"""`flockstep join HOST:PORT`: adds workers of this host to a run in progress that another host coordinates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from flockstep.errors import ConfigurationError, require
from flockstep.launchers.children import KERNELS, Child, fork, refuse_program
from flockstep.launchers.entry import worker_main
from flockstep.launchers.gathering import HEARTBEAT, settings_of
from flockstep.launchers.host_agent import HostAgent
from flockstep.launchers.host_messages import Accepted, Join
from flockstep.launchers.host_settings import differing, files_in
from flockstep.launchers.meeting import Meeting
from flockstep.launchers.newcomers import Newcomers, of_job
from flockstep.links.kinds import Transport
from flockstep.records.config import RunConfig
from flockstep.runtime.member import NodeSpec


def join_run(meeting: Meeting, workers: int, job: str | None = None, imports: Sequence[str] = ()) -> None:
    """Add workers of this host to a run in progress; return when the run has ended, or continues without them.

    Args:
        meeting: where the run's coordinator listens, and the secret of the run.
        workers: number of workers to add.
        job: path of the job's file on this host; None for the coordinator's path. imports: paths of the files with
            custom components on this host; empty for the coordinator's paths.

    Raises:
        ConfigurationError: the coordinator refused, or cannot be reached.
        RunError: the workers could not build the job, or the run failed.
    """
    refuse_program()
    require(workers >= 1, "the number of workers that join", ">= 1", workers, "use -n 1")
    host = _JoiningHost(job, tuple(imports))
    join = Join(0, 0, workers, ranks=(), settings={}, joining=workers)
    HostAgent(meeting, join, host.start_worker, HEARTBEAT, newcomers=partial(host.invite, workers)).run()


class _JoiningHost:
    """Starts the workers of this host."""

    def __init__(self, job: str | None, imports: tuple[str, ...]):
        self._job, self._imports = job, imports
        self._newcomers = Newcomers()

    def invite(self, workers: int, accepted: Accepted) -> Newcomers:
        """Start the processes of the workers, which build the job while the others train.

        Raises:
            ConfigurationError: the files of this host are not those of the run.
        """
        config = self._named_here(accepted)
        wrong = differing(files_in(accepted.settings), files_in(settings_of(config)))
        if wrong is not None:
            raise ConfigurationError(
                f"this host cannot join: {wrong}; join with the files of the run, named by --job and --import"
            )
        kernels = Transport.parse(config.transport or "tcp").zero_copy
        self._newcomers = Newcomers(partial(of_job, config, kernels))
        self._newcomers.invite(workers)
        return self._newcomers

    def start_worker(self, node_spec: NodeSpec, accepted: Accepted) -> Child:
        """Let a process that has built the job take part; otherwise start one."""
        config = self._named_here(accepted)
        if (newcomer := self._newcomers.next()) is not None:
            return newcomer.begin(node_spec, config)
        return fork(worker_main, (node_spec, config.threads or 1, config.to_toml()), [KERNELS])

    def _named_here(self, accepted: Accepted) -> RunConfig:
        """The run's configuration with the files as they are called on this host."""
        config = RunConfig.from_toml(accepted.config, "the coordinator's configuration")
        return dataclasses.replace(config, job=self._job or config.job, imports=self._imports or config.imports)
