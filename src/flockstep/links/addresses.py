"""Addresses of a bus, ipc://PATH and tcp://HOST:PORT: names, interfaces, and sockets that listen or connect."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
import struct
import sys
from pathlib import Path

from flockstep.errors import ConfigurationError
from flockstep.links.shared_heap import NODES

_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_SIOCGIFADDR = 0x8915
ANY_PORT = "*"
"""Text in place of a port number, which lets the system choose any free port."""


def tcp_address(host: str, port: str | int) -> str:
    """Return the tcp:// address of a port on a numeric host, such as tcp://127.0.0.1:5000 or tcp://[::1]:5000."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def host_of(address: str) -> str:
    """Return the host of tcp://HOST:PORT, a numeric address; empty for ipc://PATH."""
    kind, _, place = address.partition("://")
    return "" if kind == "ipc" else place.rpartition(":")[0].strip("[]")


def is_numeric(host: str) -> bool:
    """Return whether a host is an IPv4 or IPv6 address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether a numeric host is a loopback address of this machine, such as 127.0.0.1 and ::1."""
    return ipaddress.ip_address(host).is_loopback


def ports_of(text: str) -> range:
    """Return the range of ports that a text names: `29500-29600` includes both ends, `29500` is one port, and
    `ANY_PORT` gives 0.

    Raises:
        ConfigurationError: the text is neither, or a port is not within 1 to 65535.
    """
    if text == ANY_PORT:
        return range(1)
    found = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text)
    ports = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
    if not ports or ports[0] < 1 or ports[-1] > 65535:
        raise ConfigurationError(
            f"ports must be a port or a range of ports from 1 to 65535, lower port first, got {text!r}; write them "
            f"like ports='29500-29600'"
        )
    return ports


def resolved(host: str) -> str:
    """Return the numeric address of a host: an IPv4 or IPv6 address unchanged, a name by the system's resolver.

    Raises:
        ConfigurationError: the name does not resolve, or the address is not one that peers can connect to.
    """
    address = ipaddress.ip_address(host if is_numeric(host) else _looked_up(host))
    if address.is_unspecified:
        raise ConfigurationError(
            f"host must be an address to which other nodes can connect, got {address}, which means every interface; "
            "use an address of this machine, or interface=NAME"
        )
    if address.is_link_local and address.version == 6:
        raise ConfigurationError(
            f"host must be an address to which other nodes can connect, got {address}, which is valid on one link "
            "only; use a global or private address of this machine"
        )
    return str(address)


def _looked_up(name: str) -> str:
    try:
        flags = socket.AI_ADDRCONFIG  # no IPv6 address where no interface has one
        answers = socket.getaddrinfo(name or "\0", None, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, ValueError) as error:  # ValueError: the encoding of names refuses it
        why = getattr(error, "strerror", None) or "it is not a host name"
        raise ConfigurationError(
            f"host {name!r} does not resolve: {why}; use an address of this machine, such as 127.0.0.1, or "
            f"interface=NAME"
        ) from None
    return str(answers[0][4][0])


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface such as eth0; its IPv6 address if it has no IPv4 address.

    Raises:
        ConfigurationError: there is no such interface, or the interface has no address that peers can connect to.
    """
    if sys.platform != "linux":
        raise ConfigurationError(f"interface={name} needs Linux, got {sys.platform}; use host=ADDRESS")
    names = [one for _, one in socket.if_nameindex()]
    if name not in names:
        raise ConfigurationError(
            f"interface must be one of the interfaces of this machine, {', '.join(names)}, got {name!r}"
        )
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("16s24x", name.encode()))
        return socket.inet_ntoa(answer[20:24])
    with contextlib.suppress(OSError):  # it has no IPv4 address
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            digits, *_, interface = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if interface == name and not address.is_link_local:
                return str(address)
    raise ConfigurationError(f"interface {name} has no address to which other nodes can connect; use host=ADDRESS")


def listening(address: str, heartbeat: float) -> tuple[socket.socket, str]:
    """Return a socket that listens at ipc://PATH or tcp://HOST:PORTS (see `ports_of`), and the socket's address.

    Raises: ConfigurationError: this process cannot listen at the address.
    """
    host, _, place = host_of(address), *address.partition("://")[1:]
    for port in ports_of(address.rpartition(":")[2]) if host else (0,):
        try:
            sock = bound(_family(host), (host, port), heartbeat) if host else bound(socket.AF_UNIX, place, heartbeat)
        except OSError as error:
            if host and error.errno == errno.EADDRINUSE:
                continue
            way_out = (
                "use an address of this machine, such as 127.0.0.1"
                if host
                else "set TMPDIR to a folder with a short path, or use --transport tcp"
            )
            raise ConfigurationError(f"cannot listen on {address}: {error.strerror or error}; {way_out}") from None
        return sock, tcp_address(host, sock.getsockname()[1]) if host else address
    raise ConfigurationError(
        f"cannot listen on {address}: no free port is left; give a range with a port for each node, such as "
        f"ports='29500-29600', or leave ports out"
    )


def bound(family: socket.AddressFamily, place: str | tuple[str, int], heartbeat: float) -> socket.socket:
    """Return a non-blocking socket that listens at a place; connections that it accepts fail within `heartbeat` seconds
    (at least 2 s) after the other host has gone.

    Raises:
        OSError: the place is in use, or belongs to another machine.
    """
    sock = socket.socket(family)
    try:
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier run may linger
            keep_alive(sock, heartbeat)
        sock.bind(place)
        sock.listen(NODES)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def connecting(address: str, heartbeat: float, own: str = "") -> socket.socket:
    """Return a non-blocking socket that is connecting to ipc://PATH or tcp://HOST:PORT, from the address `own` of this
    host if one is given; once connected, the socket becomes writable.

    Raises:
        OSError: the connection failed at once.
    """
    host, _, place = host_of(address), *address.partition("://")[1:]
    sock = socket.socket(_family(host) if host else socket.AF_UNIX)
    try:
        sock.setblocking(False)
        if host:
            keep_alive(sock, heartbeat)
        if own:
            sock.bind((own, 0))
        with contextlib.suppress(*[BlockingIOError] if host else []):  # a Unix socket does not connect later
            sock.connect((host, int(place.rpartition(":")[2])) if host else place)
    except BaseException:
        sock.close()
        raise
    return sock


def keep_alive(sock: socket.socket, heartbeat: float) -> None:
    """Set the options of a TCP connection so that it fails within `heartbeat` seconds (at least 2 s) after the other
    host has gone.

    Small messages are sent at once. Connections that a listening socket accepts inherit these options.
    """
    idle, between = max(1, int(heartbeat / 2)), max(1, int(heartbeat / 8))
    probes = max(1, min(3, int((heartbeat - idle) / between)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, idle), (socket.TCP_KEEPINTVL, between), (socket.TCP_KEEPCNT, probes)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
