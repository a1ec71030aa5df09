"""The file of a sealed job, or of a result that goes back: sections, a signature, and encryption at rest.

A file is `MAGIC`, the length of the header, the header in JSON, and the payload. The payload is another header, which
lists the sections, and the sections one after the other. The outer header has the SHA-256 of the payload and, if
somebody signed the file, an Ed25519 key and a signature of this hash. An encrypted payload is the whole file again,
under a key of X25519 and AES-GCM. Reading takes no more memory than the file has bytes, a few times.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from flockstep.errors import ConfigurationError
from flockstep.records.access import write_whole

T = TypeVar("T")

MAGIC = b"flockstep sealed 1\n"
MOST_BYTES = 16 << 30
"""Largest size in bytes of a file that is read."""
LENGTH = 8
"""Bytes of the length of a header."""
SIGNED, ENCRYPTED, SIGNING, READING = b"signed ", b"encrypted ", b"sign", b"read"
"""What keys and signatures are for, so that none is valid for another purpose."""
ANYONE = "anyone"
"""Word in place of a file of trusted keys: a job is read whoever has signed it, or nobody."""
NONCE = 12
PUBLIC = 128
"""Hexadecimal digits of a public key."""


class Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The header of a file. Bytes are hexadecimal digits."""

    sha256: str
    signer: str = ""
    signature: str = ""
    shared: str = ""
    """Public key of one use, with which the payload was encrypted; empty for a payload that is not encrypted."""


class Sections(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sections of a payload, in order: name → bytes."""

    sizes: dict[str, int]


@dataclass(frozen=True)
class KeyPair:
    """The private key of one party, from which its keys to sign and to decrypt are derived."""

    secret: bytes = field(repr=False)

    @classmethod
    def read(cls, file: Path | str) -> KeyPair:
        """Read a private key that `flockstep secret` wrote; refuse a file that others may read."""
        path = Path(file)
        try:
            text = path.read_text("ascii").strip()
            if len(text) == PUBLIC:
                raise ConfigurationError(
                    f"the key in {path} must be a private one, got a public key; give the file of flockstep secret"
                )
            if path.stat().st_mode & 0o077:
                raise ConfigurationError(
                    f"other users can read the key in {path}; restrict access to yourself: chmod 600 {path}"
                )
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"cannot read the key in {path}: {error}; make a key with: flockstep secret"
            ) from None
        return cls(_digits(text, 32, f"the private key in {path}", "make a key with: flockstep secret > FILE"))

    def _derived(self, purpose: bytes) -> bytes:
        return hashlib.sha256(b"flockstep sealed key " + purpose + self.secret).digest()

    @property
    def public(self) -> str:
        """The public key: 128 hexadecimal digits, of which the first half checks signatures and the other encrypts."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        signing = Ed25519PrivateKey.from_private_bytes(self._derived(SIGNING)).public_key()
        reading = X25519PrivateKey.from_private_bytes(self._derived(READING)).public_key()
        return (signing.public_bytes_raw() + reading.public_bytes_raw()).hex()

    def signed(self, digest: str) -> str:
        """Return the signature of a payload's hash."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self._derived(SIGNING)).sign(SIGNED + digest.encode()).hex()

    def opened(self, shared: bytes, data: bytes) -> bytes:
        """Return the file that was encrypted to this key."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        own = X25519PrivateKey.from_private_bytes(self._derived(READING))
        try:
            key = own.exchange(X25519PublicKey.from_public_bytes(shared))
            return AESGCM(_key(key, shared)).decrypt(data[:NONCE], data[NONCE:], None)
        except (InvalidTag, ValueError):
            raise ConfigurationError(
                "the file is encrypted to another key, or damaged; give the key to which it was encrypted with --key"
            ) from None


def _key(exchanged: bytes, shared: bytes) -> bytes:
    return hashlib.sha256(ENCRYPTED + exchanged + shared).digest()


def _digits(text: str, size: int, what: str, way_out: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != size:
        raise ConfigurationError(f"{what} must be {2 * size} hexadecimal digits, got {len(text)} characters; {way_out}")
    return found


def public_keys(file: Path | str) -> list[str]:
    """Return the public keys in a file, one on each line."""
    path = Path(file)
    try:
        lines = path.read_text("ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the public key in {path}: {error}; ask its owner for the file") from None
    for line in lines:
        _digits(line, 64, f"a public key in {path}", "write it with: flockstep public-key KEY > FILE")
    return lines


def public_key(file: Path | str) -> str:
    """Return the only public key in a file."""
    keys = public_keys(file)
    if len(keys) != 1:
        raise ConfigurationError(
            f"{file} must hold one public key, got {len(keys)}; write one with: flockstep public-key KEY"
        )
    return keys[0]


def pack(sections: Mapping[str, bytes], sign: KeyPair | None = None, encrypt_to: str | None = None) -> bytes:
    """Return the bytes of a file with `sections`, signed by one key and encrypted to another, a public key."""
    payload = _framed(Sections({name: len(data) for name, data in sections.items()}), *sections.values())
    digest = hashlib.sha256(payload).hexdigest()
    signer, signature = ("", "") if sign is None else (sign.public[:64], sign.signed(digest))
    whole = MAGIC + _framed(Outer(digest, signer, signature), payload)
    if encrypt_to is None:
        return whole
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    once, nonce = X25519PrivateKey.generate(), secrets.token_bytes(NONCE)
    shared = once.public_key().public_bytes_raw()
    exchanged = once.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(encrypt_to)[32:]))
    data = nonce + AESGCM(_key(exchanged, shared)).encrypt(nonce, whole, None)
    return MAGIC + _framed(Outer(hashlib.sha256(data).hexdigest(), shared=shared.hex()), data)


def require_new(path: Path, overwrite: bool) -> None:
    """Raise `ConfigurationError` if a file to be written exists, unless it may be replaced."""
    if path.exists() and not overwrite:
        raise ConfigurationError(f"{path} exists; choose another file with --out, or replace it with --overwrite")


def write(
    path: Path, sections: Mapping[str, bytes], sign: KeyPair | None = None, encrypt_to: str | None = None
) -> None:
    """Write a file with `sections`; see `pack`."""
    write_whole(path, pack(sections, sign, encrypt_to))


def read(path: Path | str, names: Sequence[str], trust: str | None, key: Path | str | None = None) -> dict[str, bytes]:
    """Return the sections of a file.

    Args:
        path: the file.
        names: names of the sections that the file may have.
        trust: file of the public keys of which one must have signed the file; "anyone" for no such condition.
        key: file of the private key to which the file was encrypted.

    Raises:
        ConfigurationError: the file is damaged, encrypted to another key, or signed by nobody who is trusted.
    """
    file = Path(path)
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ConfigurationError(f"{file} must have at most {MOST_BYTES} bytes; ask its sender for a smaller file")
        data = file.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}; check the path") from None
    outer, payload = _opened(data, file)
    if outer.shared:
        if key is None:
            raise ConfigurationError(f"{file} is encrypted; give the private key to which it was encrypted with --key")
        shared = _digits(outer.shared, 32, f"the key of one use in {file}", _AGAIN)
        outer, payload = _opened(KeyPair.read(key).opened(shared, payload), file)
    _require_trusted(outer, file, trust)
    head, rest = _unframed(payload, Sections, file)
    if unknown := set(head.sizes) - set(names):
        raise ConfigurationError(
            f"{file} must hold {', '.join(names)}, got {', '.join(sorted(unknown))[:80]}; commands that train take a "
            "file of flockstep seal, and flockstep unseal takes one of flockstep return"
        )
    if sum(head.sizes.values()) != len(rest) or min(head.sizes.values(), default=0) < 0:
        raise ConfigurationError(f"{file} is damaged: its sections do not add up; {_AGAIN}")
    sections, start = dict[str, bytes](), 0
    for name, size in head.sizes.items():
        sections[name] = rest[start : start + size]
        start += size
    return sections


_AGAIN = "ask its sender for the file again"


def decoded(data: bytes, kind: type[T], what: object) -> T:
    """Return the struct that JSON holds; refuse other JSON."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{what} is damaged: {error}; {_AGAIN}") from None


def _framed(head: msgspec.Struct, *data: bytes) -> bytes:
    text = msgspec.json.encode(head)
    return b"".join((len(text).to_bytes(LENGTH, "big"), text, *data))


def _unframed(data: bytes, kind: type[T], file: Path) -> tuple[T, bytes]:
    size = int.from_bytes(data[:LENGTH], "big")
    if size > len(data):
        raise ConfigurationError(f"{file} is damaged: its header is cut off; {_AGAIN}")
    return decoded(data[LENGTH : LENGTH + size], kind, file), data[LENGTH + size :]


def _opened(data: bytes, file: Path) -> tuple[Outer, bytes]:
    """Return the header and the payload of a file, whose hash must be right."""
    if not data.startswith(MAGIC):
        raise ConfigurationError(f"{file} is no sealed file of this version; make one with flockstep seal")
    outer, payload = _unframed(data[len(MAGIC) :], Outer, file)
    if hashlib.sha256(payload).hexdigest() != outer.sha256:
        raise ConfigurationError(f"{file} is damaged: its bytes differ from those written; {_AGAIN}")
    return outer, payload


def _require_trusted(outer: Outer, file: Path, trust: str | None) -> None:
    """Refuse a file whose signature is wrong, or was made by nobody who is trusted."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if outer.signer:
        try:
            public = Ed25519PublicKey.from_public_bytes(_digits(outer.signer, 32, f"the signer of {file}", _AGAIN))
            public.verify(
                _digits(outer.signature, 64, f"the signature of {file}", _AGAIN), SIGNED + outer.sha256.encode()
            )
        except InvalidSignature:
            raise ConfigurationError(f"the signature of {file} is wrong; {_AGAIN}") from None
    if trust == ANYONE:
        return
    trusted = [] if trust is None else [key[:64] for key in public_keys(trust)]
    if outer.signer not in trusted or not outer.signer:
        by = "another key" if outer.signer else "nobody"
        raise ConfigurationError(
            f"{file} must be signed by a key that you trust, got one signed by {by}; give the sender's public key with "
            "--trust FILE, or --trust anyone to run it in spite of that"
        )
