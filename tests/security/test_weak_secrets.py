"""What a stranger learns of a run's secret, and what a guess at a secret that a human has chosen costs."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from flockstep.cli.app import app
from flockstep.errors import ProtocolError
from flockstep.launchers.meeting import read_secret
from flockstep.links.handshake import HELLO, PROOF, Handshake

SECRET = b"0123456789abcdef" * 2


def test_a_stranger_who_connects_gets_nothing_that_depends_on_the_secret() -> None:
    """Else a list of likely secrets could be tried without the node."""
    accepting = Handshake(SECRET, connects=False, encrypts=True)
    accepting.feed(Handshake(b"a guess", connects=True, encrypts=True).out)
    assert len(accepting.out) == HELLO
    with pytest.raises(ProtocolError, match="does not know the secret"):
        accepting.feed(bytes(PROOF))
    assert accepting.out == bytes(PROOF)


@pytest.mark.parametrize("purpose", ["run worker 1", "another worker 0", ""])
def test_a_proof_for_another_run_or_another_node_is_refused(purpose: str) -> None:
    connecting = Handshake(SECRET, connects=True, encrypts=True, purpose=purpose)
    accepting = Handshake(SECRET, connects=False, encrypts=True, purpose="run worker 0")
    accepting.feed(connecting.out)
    connecting.feed(accepting.out)
    with pytest.raises(ProtocolError, match="does not know the secret"):
        accepting.feed(connecting.out)


def test_a_guess_at_a_secret_costs_what_scrypt_costs_and_a_process_pays_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text("correct horse battery\n")
    plain, calls = hashlib.scrypt, list[object]()
    monkeypatch.setattr(hashlib, "scrypt", lambda *given, **named: calls.append(named) or plain(*given, **named))
    found = {read_secret(file) for _ in range(3)}
    stretched = Scrypt(b"flockstep, the secret of a run", 32, n=1 << 16, r=8, p=1).derive(b"correct horse battery")
    assert found == {stretched}
    assert len(calls) == 1


def test_flockstep_secret_prints_a_new_secret_each_time(tmp_path: Path) -> None:
    printed = [CliRunner().invoke(app, ["secret"]).stdout for _ in range(2)]
    assert printed[0] != printed[1]
    for text in printed:
        assert len(bytes.fromhex(text.strip())) == 32
