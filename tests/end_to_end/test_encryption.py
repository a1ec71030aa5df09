"""What whoever taps a link between hosts sees of a run: nothing of the model, unless encryption is turned off."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.hosts import Ended, Host, network, on_all
from support.jobs import undisturbed
from support.matrix import few

JOB = "softmax(features=2000, train=64, test=16)"
ARGUMENTS = ["train", JOB, "-s", "bsp", "--steps", "10", "--seed", "1"]
TAP = """
import select, socket, sys
tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
tap.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE
tap.bind((sys.argv[1], 0))
with open(sys.argv[2], "wb", 0) as file:
    print("taps", flush=True)
    while tap in select.select([tap, sys.stdin], [], [])[0]:
        file.write(tap.recv(1 << 17))
"""


@contextlib.contextmanager
def tapped(host: Host, card: str, file: Path) -> Iterator[None]:
    """Keep all that passes a network card meanwhile."""
    command = host.command(sys.executable, "-c", TAP, card, str(file))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tap:
        assert tap.stdin is not None
        assert tap.stdout is not None
        assert tap.stdout.readline() == b"taps\n"
        yield
        tap.stdin.close()


def seen(model: Path, tapped: Path) -> int:
    """How many pieces of 32 bytes of a model, in which no byte stands for many, were among what was tapped."""
    data, found = np.load(model).view(np.uint8).tobytes(), tapped.read_bytes()
    assert len(found) > len(data), "the tap has seen the run"
    pieces = [data[start : start + 32] for start in range(0, len(data) - 32, 1024)]
    telling = [piece for piece in pieces if len(set(piece)) > 16]
    assert len(telling) > 20
    return sum(piece in found for piece in telling)


@pytest.mark.parametrize("encrypt", ["true", "false"])
@pytest.mark.parametrize("across", few([True, False], True))
def test_a_tap_sees_the_model_only_if_encryption_is_off(across: bool, encrypt: str, tmp_path: Path) -> None:
    """Across a cable between two hosts, and between the processes of one host on an address of its card."""
    transport = f"tcp(encrypt={encrypt})" if across else f"tcp(interface=eth0, encrypt={encrypt})"
    arguments = [*ARGUMENTS, "-n", "2", "--transport", transport]
    with network(2) as hosts:
        with tapped(hosts[0], "eth0" if across else "lo", tmp_path / "tap"):
            if across:
                ended = on_all(hosts, *arguments, first=["--out", tmp_path / "run"])
            else:
                ended = [Ended.of(hosts[0].start(*arguments, "--out", tmp_path / "run"))]
        assert [one.code for one in ended] == [0] * len(ended), "\n".join(one.err for one in ended)
        pieces = seen(tmp_path / "run" / "result.npy", tmp_path / "tap")
        assert (pieces > 10) == (encrypt == "false")
        if encrypt == "true":
            assert pieces == 0
    alone = undisturbed(tmp_path / "alone", JOB, "bsp", 2, 10, seed=1)
    assert alone == json.loads((tmp_path / "run" / "summary.json").read_text())["hashes"]
