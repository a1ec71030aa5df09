"""The first bytes of a connection: both ends prove that they know the secret of the run, and agree on keys.

Each end sends a hello, first the end that connects; then the end that connects sends a proof, and the other end answers
a valid proof with its own, so that a stranger who connects gets nothing from which the secret can be guessed. A hello
names the protocol and has 32 random bytes, which are the public key of an X25519 exchange if the link is encrypted. A
proof is an HMAC under a key that is derived from the secret, the exchange, both hellos, and the purpose of the
connection: the run, and the node that accepts it. So a recorded session cannot be replayed or led to another node, the
proof of one end is not valid for the other end, and an attacker who learns the secret later cannot decrypt a recorded
session. Until a valid proof has arrived, the bytes from the other end are bounded by `Handshake.due`; the accepting end
creates no key before it has received a hello of this protocol.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flockstep.errors import ProtocolError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

PLAIN, ENCRYPTED = b"flockstep2p", b"flockstep2e"
"""First bytes of a hello, for links without (PLAIN) and with (ENCRYPTED) encryption; they name the version of the
handshake.
"""
SHARE = 32
"""Number of random bytes of a hello, which is also the length of a public key."""
PROOF = 32
"""Length of a handshake's proof in bytes."""
PATIENCE = 20.0
"""Shortest time limit in seconds of a handshake; the first packets over a new network link may be lost and sent again
late.
"""
HEARTBEATS = 4
"""Time limit of a handshake, in heartbeat timeouts, if that is longer than `PATIENCE`. Users set long timeouts on busy
machines.
"""
HELLO = len(PLAIN) + SHARE
"""Length of a handshake's hello in bytes."""


def time_for_proof(heartbeat: float) -> float:
    """Return the seconds within which both ends of a connection must prove that they know the run's secret."""
    return max(PATIENCE, HEARTBEATS * heartbeat)


@dataclass(frozen=True)
class LinkKeys:
    """Keys of an encrypted link, 32 bytes each."""

    sending: bytes = field(repr=False)
    receiving: bytes = field(repr=False)


class Handshake:
    """One end of a handshake, without its socket.

    Send `out`, pass the next `due` bytes from the other end to `feed`, and repeat until `due` is 0.
    """

    def __init__(self, secret: bytes, connects: bool, encrypts: bool, purpose: str = ""):
        """`connects`: this end has opened the connection; `purpose`: text on which both ends must agree."""
        self._secret, self._purpose = secret, purpose.encode()
        self._connects = connects
        self._name = ENCRYPTED if encrypts else PLAIN
        self._private: X25519PrivateKey | None = None
        self._key = self._hellos = b""
        self._hello = self._name + self._share() if connects else b""
        self.out = self._hello
        """Bytes to send now."""
        self.due = HELLO
        """Number of bytes of the other end that `feed` expects next; 0 once both ends are proved."""

    def require_protocol(self, arrived: bytes) -> None:
        """Check that the bytes received from the other end are the beginning of a hello.

        Raises: ProtocolError: the bytes are not the beginning of a hello of this protocol.
        """
        began = arrived[: len(self._name)]
        if not self._key and not self._name.startswith(began):
            raise ProtocolError(
                f"a connection began with {began!r} instead of {self._name!r}, so it does not come from this run"
            )

    def feed(self, arrived: bytes) -> None:
        """Process the next `due` bytes from the other end.

        Raises:
            ProtocolError: the other end speaks another protocol, or does not know the secret.
        """
        if not self._key:
            self._agree(arrived)
            self.out = self._proof(True) if self._connects else self._hello
            self.due = PROOF
            return
        proved = hmac.compare_digest(arrived, self._proof(not self._connects))
        if not self._connects:
            self.out = self._proof(False) if proved else bytes(PROOF)  # the other end sees that it was refused
        if not proved:
            raise ProtocolError("the process at the other end of a connection does not know the secret of this run")
        self.due = 0

    @property
    def begun(self) -> bool:
        """Whether the other end has sent a hello."""
        return bool(self._key)

    def keys(self) -> LinkKeys | None:
        """Keys of the encrypted link after the handshake; None if the link is not encrypted."""
        if self._private is None:
            return None
        return LinkKeys(*(self._derived(b"key", connects) for connects in (self._connects, not self._connects)))

    def _share(self) -> bytes:
        """The random bytes of a hello."""
        if self._name == PLAIN:
            return secrets.token_bytes(SHARE)
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._private = X25519PrivateKey.generate()
        return self._private.public_key().public_bytes_raw()

    def _agree(self, other: bytes) -> None:
        self.require_protocol(other)
        self._hello = self._hello or self._name + self._share()
        shared = b""
        if self._private is not None:
            from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

            try:
                shared = self._private.exchange(X25519PublicKey.from_public_bytes(other[len(self._name) :]))
            except ValueError as error:  # a point of small order
                raise ProtocolError(
                    f"the process at the other end of a connection sent a bad public key: {error}"
                ) from None
        self._hellos = self._hello + other if self._connects else other + self._hello
        self._key = hmac.digest(self._secret, hashlib.sha256(self._hellos + self._purpose).digest() + shared, "sha256")

    def _proof(self, connects: bool) -> bytes:
        return self._derived(b"proof", connects)

    def _derived(self, use: bytes, connects: bool) -> bytes:
        """A value for one `use` at one end, which only who knows the secret can compute."""
        return hmac.digest(
            self._key, use + (b" of the end that connects" if connects else b" of the other end"), "sha256"
        )
