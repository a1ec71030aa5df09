"""Runs whose hosts are reached by ssh: this process coordinates, and starts an agent on each host."""

from __future__ import annotations

import secrets
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from flockstep.errors import ConfigurationError
from flockstep.launchers.commands import AGENT, by_command
from flockstep.launchers.meeting import TIMEOUT, Meeting, address_towards
from flockstep.launchers.output import SHOWN, Output
from flockstep.launchers.tasks import TaskGathering

SSH_FAILED = 255
"""Exit code of ssh if it could not connect."""


def ssh_hosts(
    hosts: str,
    ssh: str = "ssh",
    python: str = sys.executable,
    timeout: float = TIMEOUT,
    own: str = "",
    arguments: Sequence[str] = (),
    output: Output = SHOWN,
) -> TaskGathering:
    """Return hosts which ssh reaches without a password.

    Args:
        hosts: names and numbers of workers, as in "a:4,b:4"; a name alone has one worker.
        ssh: the command, with its options.
        python: path of Python on the hosts, where flockstep is installed.
        timeout: seconds to wait for the hosts.
        own: address of this host to which the other hosts connect; empty for the address from which the first host is
            reached.
        arguments: arguments of a launched script.
        output: which of the scripts' output is shown, and how.

    Raises:
        ConfigurationError: `hosts` does not have this form, or ssh is not installed, or a host's name does not resolve.
    """
    names, shares = _parsed(hosts)
    words = shlex.split(ssh)
    # The agent finds files and modules where this process does.
    agent = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join((python, *AGENT))}"
    starter = by_command(
        names,
        lambda name: [*words, "-T", "-o", "BatchMode=yes", name, agent],
        output.show,
        hint=lambda name, code: f"; try: ssh {name} true" if code == SSH_FAILED else "",
    )
    meeting = Meeting(own or _own_address(words, names[0]), 0, secrets.token_bytes(32), timeout)
    return TaskGathering(meeting, len(names), shares=shares, starter=starter, arguments=arguments, output=output)


def _parsed(hosts: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names of the hosts, and their numbers of workers."""
    names, shares = [], []
    for text in hosts.split(","):
        name, colon, share = text.strip().rpartition(":")
        name, share = (name, share) if colon else (share, "1")
        if not name or name.startswith("-") or not share.isdecimal() or not int(share):
            raise ConfigurationError(
                f"--hosts must list hosts, each with its number of workers, got {hosts!r}; write it like a:4,b:4"
            )
        names.append(name)
        shares.append(int(share))
    if len(set(names)) < len(names):
        raise ConfigurationError(
            f"--hosts must name every host once, got {hosts!r}; give each host all its workers in one entry"
        )
    return tuple(names), tuple(shares)


def _own_address(ssh: Sequence[str], name: str) -> str:
    """The address of this host from which a host is reached.

    Raises:
        ConfigurationError: ssh is not installed, or does not know the host, or its name does not resolve.
    """
    try:
        done = subprocess.run([*ssh, "-G", name], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigurationError(
            f"{ssh[0]} is not installed; install OpenSSH, or start each host by hand with --nodes"
        ) from None
    except subprocess.CalledProcessError as error:
        raise ConfigurationError(f"ssh does not accept the host {name!r}: {error.stderr.strip()}") from None
    settings = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    return address_towards(settings.get("hostname", name))
