"""Keys of a sender or a customer of sealed jobs."""

from __future__ import annotations

import secrets
from pathlib import Path

from flockstep.sealed.archive import KeyPair


def key(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a private key and its public key; return both paths."""
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    private.write_text(secrets.token_hex(32))
    private.chmod(0o600)
    public.write_text(KeyPair.read(private).public + "\n")
    return private, public
