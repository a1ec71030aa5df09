"""OpenSSH between hosts of this machine: a server on each, which lets in one key, and a client's configuration."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support.hosts import Host
from support.processes import PATIENCE, content, wait_until

TOOLS = ("sshd", "ssh", "ssh-keygen")
SERVER = """
HostKey {key}
AuthorizedKeysFile {authorized}
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PidFile none
MaxStartups 100
"""
"""StrictModes would refuse keys below /tmp, into which other users may write."""
CLIENT = """
Host *
    IdentityFile {key}
    IdentitiesOnly yes
    UserKnownHostsFile {known}
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    BatchMode yes
"""


def serve(folder: Path, hosts: Sequence[Host]) -> Path:
    """Let an sshd listen on port 22 of each host; return the path of a client's configuration file."""
    folder.mkdir(parents=True, exist_ok=True)
    user = _key(folder / "user")
    known = [f"{host.name},{host.address} {_key(folder / host.name)}" for host in hosts]
    (folder / "authorized").write_text(f"{user}\n")
    (folder / "known").write_text("".join(f"{line}\n" for line in known))
    (folder / "config").write_text(CLIENT.format(key=folder / "user", known=folder / "known"))
    path = shutil.which("sshd")
    assert path is not None
    for host in hosts:
        settings, log = folder / f"{host.name}.conf", folder / f"{host.name}.log"
        settings.write_text(SERVER.format(key=folder / host.name, authorized=folder / "authorized"))
        host.run("mkdir", "-p", "-m", "755", "/run/sshd")
        host.daemon(log, path, "-D", "-e", "-f", str(settings))
        wait_until(lambda: b"Server listening on" in content(log), PATIENCE, f"sshd of {host.name}")  # noqa: B023
    return folder / "config"


def _key(path: Path) -> str:
    """Make a key without a passphrase at `path`; the public key."""
    make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(make, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return path.with_suffix(".pub").read_text().strip()
