"""The meeting of the hosts of a run: the coordinator's address, and the secret that admits a host."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import socket
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from flockstep.errors import ConfigurationError, require
from flockstep.links.addresses import bound, tcp_address
from flockstep.runtime.place import SECRET

SHORTEST = 16
"""Minimum number of characters of a secret."""
SCRYPT = {"n": 1 << 16, "r": 8, "p": 1, "maxmem": 1 << 27}
"""Cost of a guess at a secret that a human has chosen: 64 MiB of memory, and about 0.2 s."""
EVERY = ("::", "0.0.0.0")  # noqa: S104 - only who knows the secret is let in
"""Wildcard addresses: a process that listens on one of them, such as 0.0.0.0, listens on all addresses of its host."""
TIMEOUT = 600.0
"""Default time in seconds within which all hosts must have joined."""
WAIT_LONGER = "raise --timeout, or the timeout of flockstep.distribute in a script that torchrun or mpirun starts"
"""Advice to a user when the wait for other hosts has timed out."""


@dataclass(frozen=True)
class Meeting:
    """The address, the secret and the timeout with which a host finds the other hosts of its run."""

    host: str
    """Name or address of the coordinator's host."""
    port: int
    secret: bytes = field(repr=False)
    timeout: float = TIMEOUT
    """Seconds to wait for the coordinator, or for the other hosts."""
    own: str = ""
    """Address of this host to which other hosts connect; if empty, the address from which this host connects to the
    coordinator.
    """

    @property
    def where(self) -> str:
        """Address of the coordinator, written as a user writes it."""
        host = socket.gethostname() if self.host in EVERY else self.host
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def _looked_up(self) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigurationError(
                f"the coordinator's host {self.host!r} does not resolve: {error.strerror}; use a name that this "
                "machine knows, or an address"
            ) from None
        return [(family, (str(address[0]), int(address[1]))) for family, _, _, _, address in found]

    def address(self) -> str:
        """Return the address on which the coordinator's host listens.

        Raises:
            ConfigurationError: the name does not resolve, or is the name of this machine and resolves to a loopback
                address.
        """
        _, (address, _) = self._looked_up()[0]
        ours = self.host.partition(".")[0] == socket.gethostname().partition(".")[0]
        if ours and ip_address(address.partition("%")[0]).is_loopback:  # as Debian's /etc/hosts has it
            raise ConfigurationError(
                f"the coordinator's host name {self.host} stands for the address {address} on that host itself, and "
                f"other hosts cannot reach this address; give every host --coordinator ADDRESS:{self.port}, or set "
                "FLOCKSTEP_COORDINATOR to it"
            )
        return address

    def addresses(self) -> list[str]:
        """Return the addresses at which an agent may find the coordinator, as tcp://HOST:PORT.

        Raises:
            ConfigurationError: the coordinator's name does not resolve, or `own` is not an address of this host.
        """
        found = self._looked_up()
        if self.own:
            try:
                with socket.socket(found[0][0]) as probe:
                    probe.bind((self.own, 0))
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    raise ConfigurationError(
                        f"--host-address must be an address of this host, got {self.own}; leave it out, or give one "
                        "of this host's addresses"
                    ) from None
        return list(dict.fromkeys(tcp_address(*address) for _, address in found))

    def listen(self, heartbeat: float) -> socket.socket:
        """Listen for the agents of the other hosts, whose connections fail within `heartbeat` seconds (at least 2 s)
        after a host has gone.

        Raises:
            ConfigurationError: the address is in use, or belongs to another machine.
        """
        try:
            return bound(*self._looked_up()[0], heartbeat)
        except OSError as error:
            raise ConfigurationError(
                f"the coordinator cannot listen at {self.where}: {error.strerror}; --coordinator must be an address of "
                "the host with node rank 0, with a free port, or add --separate-coordinator where flockstep coordinate "
                "runs"
            ) from None


def meeting_at(coordinator: str, secret: bytes, timeout: float = TIMEOUT, own: str = "") -> Meeting:
    """Return the meeting whose coordinator listens at `coordinator`, written as "host:port", "address:port" or
    "[IPv6]:port".

    Raises:
        ConfigurationError: the text has none of these forms.
    """
    host, _, port = coordinator.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16 or (":" in host and "[" not in coordinator):
        raise ConfigurationError(
            f"--coordinator must be a host and a port, got {coordinator!r}; write it like 10.0.0.1:29400, "
            "node0.example:29400 or [fd00::1]:29400"
        )
    require(timeout > 0, "--timeout", "> 0 s", f"{timeout:g}", f"{TIMEOUT:g} is the default")
    return Meeting(host, int(port), secret, timeout, own)


def address_towards(host: str) -> str:
    """Return the address of this host from which another host is reached.

    Raises:
        ConfigurationError: the other host's name does not resolve, or there is no route.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # nothing is sent: the system only chooses the route
            return str(probe.getsockname()[0])
    except socket.gaierror as error:
        raise ConfigurationError(
            f"the host name {host!r} does not resolve on this machine: {error.strerror}; correct the name, or give the "
            "host's IP address"
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"the host {host!r} cannot be reached from here: {error.strerror}; set --host-address to an address of "
            "this machine that can connect to that host"
        ) from None


def read_secret(file: Path | None) -> bytes:
    """Return the secret of a run, from a file or from the environment variable FLOCKSTEP_SECRET.

    Raises:
        ConfigurationError: there is no secret, or it is too short, or others may read the file.
    """
    how = "make a secret with: flockstep secret"
    if file is not None:
        try:
            if file.stat().st_mode & 0o077:
                raise ConfigurationError(
                    f"other users can read the secret in {file}; restrict access to yourself: chmod 600 {file}"
                )
            text = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot read the secret in {file}: {error}; {how}") from None
    else:
        text = os.environ.get(SECRET, "").strip()
        if not text:
            raise ConfigurationError(
                f"a run over several hosts needs a secret, got none; set {SECRET} or give --secret-file on every "
                f"host, the same on all; {how}"
            )
    if len(text) < SHORTEST:
        raise ConfigurationError(f"the secret must have at least {SHORTEST} characters, got {len(text)}; {how}")
    return _stretched(text)


@functools.cache
def _stretched(text: str) -> bytes:
    """The key of a secret. All hosts derive the same key, so that the salt is fixed."""
    return hashlib.scrypt(text.encode(), salt=b"flockstep, the secret of a run", dklen=32, **SCRYPT)
