"""Runs on Slurm: within an allocation, a command coordinates its run and starts the agent of every host with srun.

Within an allocation (of salloc, sbatch or srun) `slurm_allocation` provides the hosts. Elsewhere `submitted` lets
sbatch submit a job that runs the same flockstep command, shows its output, and returns its exit code.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flockstep.errors import ConfigurationError, Interrupted, RunError, in_short
from flockstep.launchers.commands import AGENT, by_command
from flockstep.launchers.meeting import TIMEOUT, Meeting, address_towards
from flockstep.launchers.output import ERR, OUT, SHOWN, Output, to_terminal
from flockstep.launchers.signals import undisturbed
from flockstep.launchers.tasks import TaskGathering
from flockstep.launchers.wait_monitor import on_stderr
from flockstep.records.scratch import private_folder
from flockstep.runtime.place import SECRET, host_names

JOB, HOSTS = "SLURM_JOB_ID", "SLURM_JOB_NODELIST"
"""Names of the environment variables of an allocation. JOB: number of the job. HOSTS: list of the job's hosts."""
SEPARATE = 120
"""Exit code of a job whose host does not find the folder for the job's output."""
SCRIPT = """#!/bin/sh
cd {here} && test -d {folder} || exit {separate}
exec > {folder}/out 2> {folder}/err
exec {command}
"""
"""Template of the job's shell script; its output goes to files in a folder that only this user may enter."""
GOING = (
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "STOPPED",
    "SIGNALING",
    "STAGE_OUT",
    "RESIZING",
)
"""Names of Slurm's states of jobs that have not yet ended."""
FORGOTTEN = "FORGOTTEN"
"""Name that stands for the state of a job that Slurm no longer lists."""
ENDED = {
    "CANCELLED": "was canceled",
    "TIMEOUT": "reached its time limit; allow more time with --slurm-options --time=HOURS:MINUTES:SECONDS",
    "DEADLINE": "reached its deadline",
    "NODE_FAIL": "lost a host",
    "BOOT_FAIL": "had a host that failed to start",
    "OUT_OF_MEMORY": "used more memory than its limit; allow more memory with --slurm-options --mem=SIZE",
    "PREEMPTED": "was preempted by another job",
}
"""Name of Slurm's state of a job that has ended → text for the user about the end."""
POLL = 0.25
"""Seconds between two checks for new output of a job."""
OFTEN, SELDOM = 0.5, 10.0
"""Minimum and maximum time in seconds between two queries to Slurm about a job.

Between these limits, the time is a twentieth of the time since the submission.
"""
GRACE = 30.0
"""Seconds that a canceled run has to complete its record before Slurm ends the job."""


def in_allocation(environment: Mapping[str, str]) -> bool:
    """Return whether a process with this environment belongs to an allocation."""
    return JOB in environment and HOSTS in environment


def slurm_allocation(
    workers: int,
    nodes: int | None,
    python: str = sys.executable,
    timeout: float = TIMEOUT,
    own: str = "",
    arguments: Sequence[str] = (),
    output: Output = SHOWN,
) -> TaskGathering:
    """Return the hosts of the allocation to which this process belongs; the agent of each host is a job step.

    Args:
        workers: number of workers, or of replicas that several workers on one host hold.
        nodes: number of hosts that share the workers; None for all hosts of the allocation, but at most `workers`.
        python: path of Python on the hosts, where flockstep is installed.
        timeout: seconds to wait for the hosts.
        own: address of this host to which the other hosts connect; empty for the address from which the last host is
            reached.
        arguments: arguments of a launched script.
        output: which of the scripts' output is shown, and how.

    Raises:
        ConfigurationError: the allocation has fewer hosts, or srun is not installed, or a host's name does not resolve.
    """
    _require("srun")
    names = tuple(host_names(os.environ[HOSTS]))
    if nodes is not None and not 0 < nodes <= len(names):
        raise ConfigurationError(
            f"--nodes must be at least 1 and at most {len(names)}, the hosts of job {os.environ[JOB]}, got {nodes}"
        )
    names = names[: min(workers, len(names)) if nodes is None else nodes]
    # A step is one task, which may use everything that the job has on the host.
    step = ("srun", "--quiet", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--overlap")
    agent = ("--cpu-bind=none", "--mpi=none", python, *AGENT)
    starter = by_command(names, lambda name: [*step, f"--nodelist={name}", *agent], output.show)
    meeting = Meeting(own or address_towards(names[-1]), 0, secrets.token_bytes(32), timeout)
    return TaskGathering(meeting, len(names), starter=starter, arguments=arguments, output=output)


def submitted(
    command: Sequence[str],
    place: Path,
    workers: int,
    nodes: int = 1,
    cpus: float = 1.0,
    gpus: float = 0.0,
    options: str = "",
    python: str = sys.executable,
) -> int:
    """Run a flockstep command in a new Slurm job, and show its output; return its exit code.

    Args:
        command: the words of the command, without "flockstep".
        place: folder of its record.
        workers: number of workers.
        nodes: number of hosts that share the workers.
        cpus: cores of each worker.
        gpus: GPUs of each worker.
        options: more options for sbatch, as in a shell.
        python: path of Python on the hosts, where flockstep is installed.

    Raises:
        ConfigurationError: sbatch is not installed, Slurm refuses the job, or the job's hosts do not share the folder.
        RunError: Slurm has ended the job, or the job was canceled because its output could not be shown; in this case,
            the output is kept.
        Interrupted: the user has ended the job; its files are removed.
    """
    for tool in ("sbatch", "scontrol", "scancel"):
        _require(tool)
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise ConfigurationError(
            f"--slurm-options must be words as in a shell, got {options!r}: {error}; write it like "
            '"--partition=gpu --time=1:00:00"'
        ) from None
    if not 0 < nodes <= workers:
        raise ConfigurationError(f"--nodes must be >= 1 and <= {workers}, the number of workers (-n), got {nodes}")
    for name, amount, least in (("cpus", cpus, 1), ("gpus", gpus, 0)):
        if amount != int(amount) or amount < least:
            raise ConfigurationError(
                f"--{name}-per-worker must be a whole number >= {least} on Slurm, got {amount:g}; the default is "
                f"{least}"
            )
    share = -(-workers // nodes)  # of the workers, on each host
    wanted = [f"--nodes={nodes}", f"--ntasks-per-node={share}", f"--cpus-per-task={int(cpus)}"]
    wanted += [f"--gpus-per-node={int(gpus) * share}"] * bool(gpus) + words
    parent = place.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    folder = private_folder(parent, ".flockstep-slurm-")
    job, agent = _Job(folder), shlex.join([python, "-u", "-m", "flockstep", *command])
    here, there = shlex.quote(str(Path.cwd())), shlex.quote(str(folder))
    try:
        return job.run(SCRIPT.format(here=here, folder=there, separate=SEPARATE, command=agent), wanted)
    finally:
        if not job.unseen:
            shutil.rmtree(folder, ignore_errors=True)


def _require(tool: str) -> None:
    if shutil.which(tool) is None:
        raise ConfigurationError(
            f"{tool} is not installed here; run the command on a host from which jobs are submitted to Slurm"
        )


@dataclass
class _Job:
    """A job that was submitted."""

    folder: Path
    """Folder of its output."""
    number: str = ""
    """What Slurm calls it; empty before it was submitted."""
    state: dict[str, str] = field(default_factory=lambda: {"JobState": "PENDING"})
    """What Slurm tells of the job: name → value."""
    said: str = ""
    shown: Counter[int] = field(default_factory=Counter)
    """Stream → number of bytes that were shown."""
    unseen: bool = False
    """Whether the files hold output that could not be shown."""
    begun: float = field(default_factory=time.monotonic)

    def run(self, script: str, wanted: Sequence[str]) -> int:
        """Submit the job, and show its output until its end; end the job if the user stops this command. Return its
        exit code.

        Raises:
            ConfigurationError: Slurm refuses the job, or the job does not find the folder.
            RunError: Slurm has ended the job, or the job was canceled because its output could not be shown.
            Interrupted: the user has ended the job.
        """
        try:
            try:
                with undisturbed():  # a job that nobody knows of could not be canceled
                    self._submit(script, wanted)
                self._follow()
            except KeyboardInterrupt as stop:
                if not self.number:  # Slurm has refused it
                    raise
                self._cancel()
                raise Interrupted(f"{str(stop) or 'interrupted'}; job {self.number} has ended") from None
        except Interrupted:
            raise
        except Exception as error:  # of a job whose output cannot be shown here, which is kept
            if not self.number:
                raise
            self.unseen, fate = True, "was canceled"
            try:
                self._cancel()
            except Exception as other:  # noqa: BLE001 - of the same cause, for example no more processes
                fate = f"may still run ({in_short(other)}; scancel {self.number} ends it)"
            raise RunError(
                f"job {self.number} {fate}, because this command could not follow it: {in_short(error)}; its output is "
                f"in {self.folder}"
            ) from error
        return self._exit_code()

    def _submit(self, script: str, wanted: Sequence[str]) -> None:
        """Submit the job.

        Raises:
            ConfigurationError: Slurm refuses it.
        """
        # A job that is started again would find the record of its first attempt.
        usual = ["--parsable", "--job-name=flockstep", "--no-requeue", "--output=/dev/null", "--error=/dev/null"]
        done = _slurm("sbatch", *usual, *wanted, given=script)
        said = [re.sub("^sbatch: (error: |fatal: )?", "", line) for line in done.stderr.splitlines() if line.strip()]
        number = next(iter(re.findall(r"^(\d+)(?:;.*)?$", done.stdout, re.MULTILINE)), "")  # a site may say more
        if done.returncode or not number:
            reason = said[-1] if said else f"sbatch ended with exit code {done.returncode} and printed no job number"
            raise ConfigurationError(f"Slurm did not accept the job: {reason}; see --slurm-options, --nodes and -n")
        self.number = number
        on_stderr(f"submitted job {number}")

    def _follow(self, until: float = float("inf")) -> None:
        """Show output until the job has ended, or until that time."""
        while True:
            self._ask()
            asked = time.monotonic()
            while True:
                if not self.unseen:
                    self._show()
                now = time.monotonic()
                if self.state["JobState"] not in GOING or now > until:
                    return
                if now > asked + min(max(OFTEN, (now - self.begun) / 20), SELDOM):
                    break
                time.sleep(POLL)

    def _show(self) -> None:
        """Show new output. A network file system tells the present size of a file only to those who open it anew."""
        for stream, name in ((OUT, "out"), (ERR, "err")):
            with contextlib.suppress(FileNotFoundError), (self.folder / name).open("rb") as source:
                source.seek(self.shown[stream])
                while data := source.read(1 << 16):
                    to_terminal(stream, data)
                    self.shown[stream] += len(data)

    def _ask(self) -> None:
        """Ask Slurm for the state of the job; if it does not answer, the job keeps its state."""
        done = _slurm("scontrol", "show", "job", "-o", self.number)
        if done.returncode:
            why = done.stderr.strip() or "no reason"
            if "Invalid job id" in why:
                self.state = {"JobState": FORGOTTEN}
                return
            self._say(f"Slurm does not answer: {why.splitlines()[-1]}")
            return
        self.state = dict(re.findall(r"(\w+)=(\S*)", done.stdout))
        state, hosts = self.state["JobState"], self.state.get("NodeList", "")
        if state == "PENDING" and (reason := self.state.get("Reason", "None")) != "None":
            self._say(f"job {self.number} waits: {reason}")
        elif state == "RUNNING":
            self._say(f"job {self.number} runs on {hosts}")

    def _say(self, text: str) -> None:
        if text != self.said:
            self.said = text
            on_stderr(text)

    def _cancel(self) -> None:
        """Let the command complete its record, and see to it that nothing is left of the job."""
        try:
            self._ask()
            # The job's first process is the command; without a signal Slurm would kill its steps as well.
            if (
                self.state["JobState"] == "RUNNING"
                and not _slurm("scancel", "--batch", "--signal=INT", self.number).returncode
            ):
                self._follow(time.monotonic() + GRACE)
        except KeyboardInterrupt:  # a second request to end
            pass
        finally:
            if self.state["JobState"] in GOING:
                _slurm("scancel", self.number)
                self._follow()

    def _exit_code(self) -> int:
        state, host = self.state["JobState"], self.state.get("BatchHost", "its host")
        code, _, signum = self.state.get("ExitCode", "").partition(":")
        if state == FORGOTTEN:
            raise RunError(f"Slurm no longer has information about job {self.number}, so its result is unknown")
        if state in ENDED:
            raise RunError(f"job {self.number} {ENDED[state]}")
        if state not in ("COMPLETED", "FAILED") or not code.isdecimal() or signum != "0":
            raise RunError(f"job {self.number} ended as {state} on {host}, with exit code:signal {code}:{signum}")
        if int(code) == SEPARATE:
            raise ConfigurationError(
                f"the host {host} of job {self.number} cannot see both {Path.cwd()} and {self.folder.parent}; "
                "work in a folder on a file system that all hosts share, and keep the record (--out) there too"
            )
        return int(code)


def _slurm(*command: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Carry out a command of Slurm, which Ctrl-C does not reach; `given`: its standard input."""
    environment = {name: value for name, value in os.environ.items() if name != SECRET}  # Slurm keeps a copy
    return subprocess.run(
        command, input=given, env=environment, check=False, capture_output=True, text=True, start_new_session=True
    )
