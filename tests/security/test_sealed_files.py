"""Sealed files: signatures, encryption, keys, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from flockstep.cli.app import run
from flockstep.errors import ConfigurationError
from flockstep.sealed import archive
from flockstep.sealed.archive import KeyPair
from support.keys import key

SECTIONS = {"manifest": b"{}", "tensors": b"\0" * 64}


def test_a_file_is_read_where_its_signer_is_trusted(tmp_path: Path) -> None:
    private, public = key(tmp_path, "sender")
    _, other = key(tmp_path, "other")
    both = tmp_path / "both.pub"
    both.write_text(other.read_text() + public.read_text())
    file = tmp_path / "model.sealed"
    archive.write(file, SECTIONS, KeyPair.read(private))
    for trust in (public, both, archive.ANYONE):
        assert archive.read(file, tuple(SECTIONS), str(trust)) == SECTIONS
    for trust in (other, None):
        with pytest.raises(
            ConfigurationError, match=r"must be signed by a key that you trust, got one signed by another key"
        ):
            archive.read(file, tuple(SECTIONS), trust and str(trust))


def test_a_file_that_nobody_signed_is_refused_unless_told_otherwise(tmp_path: Path) -> None:
    _, public = key(tmp_path, "sender")
    file = tmp_path / "model.sealed"
    archive.write(file, SECTIONS)
    with pytest.raises(ConfigurationError, match="got one signed by nobody; give the sender's public key"):
        archive.read(file, tuple(SECTIONS), str(public))
    assert archive.read(file, tuple(SECTIONS), archive.ANYONE) == SECTIONS


def altered(data: bytes) -> bytes:
    """Another payload with a hash that is right, and the signature of the first."""
    start = len(archive.MAGIC) + archive.LENGTH
    size = int.from_bytes(data[len(archive.MAGIC) : start], "big")
    outer = archive.decoded(data[start : start + size], archive.Outer, "it")
    other = archive.pack(SECTIONS | {"tensors": b"\1" * 64})
    size = int.from_bytes(other[len(archive.MAGIC) : start], "big")
    new = archive.decoded(other[start : start + size], archive.Outer, "it")
    head = archive.msgspec.json.encode(archive.msgspec.structs.replace(outer, sha256=new.sha256))
    return archive.MAGIC + len(head).to_bytes(archive.LENGTH, "big") + head + other[start + size :]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (altered, "the signature of .* is wrong"),
        (lambda data: data[:-1] + b"\x07", "its bytes differ from those written"),
        (lambda data: data[:-10], "its bytes differ from those written"),
        (lambda data: data[:20], "is damaged"),
        (lambda data: pickle.dumps(SECTIONS), "is no sealed file of this version"),
        (lambda data: archive.MAGIC + b"\xff" * 8 + data, "its header is cut off"),
    ],
    ids=["another payload", "a changed byte", "cut off", "a header alone", "pickle", "a long header"],
)
def test_changed_files_are_refused(change: Callable[[bytes], bytes], said: str, tmp_path: Path) -> None:
    private, public = key(tmp_path, "sender")
    file = tmp_path / "model.sealed"
    archive.write(file, SECTIONS, KeyPair.read(private))
    file.write_bytes(change(file.read_bytes()))
    for trust in (str(public), archive.ANYONE):
        with pytest.raises(ConfigurationError, match=said):
            archive.read(file, tuple(SECTIONS), trust)


def test_an_encrypted_file_is_read_with_the_key_alone(tmp_path: Path) -> None:
    sender, public = key(tmp_path, "sender")
    customer, address = key(tmp_path, "customer")
    file = tmp_path / "model.sealed"
    archive.write(
        file, {"manifest": b"a secret name", "tensors": b""}, KeyPair.read(sender), archive.public_key(address)
    )
    assert b"secret name" not in file.read_bytes()
    names = ("manifest", "tensors")
    assert archive.read(file, names, str(public), customer)["manifest"] == b"a secret name"
    with pytest.raises(ConfigurationError, match="is encrypted; give the private key"):
        archive.read(file, names, str(public))
    with pytest.raises(ConfigurationError, match="is encrypted to another key, or damaged"):
        archive.read(file, names, str(public), sender)
    with pytest.raises(ConfigurationError, match="must be signed by a key that you trust"):
        archive.read(file, names, str(address), customer)


def test_keys_are_private_and_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    private, public = key(tmp_path, "sender")
    assert run(["public-key", str(private)]) == 0
    assert capsys.readouterr().out == public.read_text()
    private.chmod(0o644)
    with pytest.raises(ConfigurationError, match="other users can read the key"):
        KeyPair.read(private)
    with pytest.raises(ConfigurationError, match="must be a private one, got a public key"):
        KeyPair.read(public)
    private.chmod(0o600)
    private.write_text("abc")
    with pytest.raises(ConfigurationError, match="must be 64 hexadecimal digits, got 3 characters"):
        KeyPair.read(private)
    public.write_text("")
    with pytest.raises(ConfigurationError, match="must hold one public key, got 0"):
        archive.public_key(public)


def test_files_of_secret_that_the_command_makes_are_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["secret"]) == 0
    file = tmp_path / "own.key"
    file.write_text(capsys.readouterr().out)
    file.chmod(0o600)
    assert len(KeyPair.read(file).public) == 128
