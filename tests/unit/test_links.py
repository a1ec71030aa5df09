"""What a supervisor says to its nodes, over real sockets in one process."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from flockstep.messages import Message
from flockstep.transports.bus import LAUNCHER
from flockstep.transports.links import Control, Line, SupervisorLink
from flockstep.transports.wire import SenderIdentity


def said(folder: Path, note: dict[str, int | float | str]) -> Message:
    """What a node hears of a welcome with that note."""
    line = Line(SenderIdentity("run", 0, "schema", 1 << 10), f"ipc://{folder / 'line'}", 60)
    control = Control(f"ipc://{folder / 'control'}", 60)
    me = SenderIdentity("run", LAUNCHER, "schema", 1 << 10)
    wire = SupervisorLink(control.frames(line.address, 1 << 10), 0, me)
    try:
        wire.send("welcome", note)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            if (message := line.receive()) is not None:
                return message
        raise TimeoutError("nothing was heard")
    finally:
        wire.close()
        control.close()
        line.close(0)


def test_a_welcome_names_where_two_thousand_nodes_listen(tmp_path: Path) -> None:
    where = f"tcp://192.168.100.100:65535 {'0' * 32}@{'0' * 36}/4026531840:/proc/4194304/fd/100"
    peers = msgspec.json.encode(dict.fromkeys(range(2048), where)).decode()
    assert said(tmp_path, {"peers": peers}).note["peers"] == peers
