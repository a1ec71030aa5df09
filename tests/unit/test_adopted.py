"""A process that another launcher has started, as its agent sees it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from flockstep.launchers.adopter import Adopted
from flockstep.launchers.children import ENDED
from flockstep.links.control import LocalFrames
from flockstep.runtime.adoption import Introduction
from support.processes import PATIENCE, wait_until


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs descriptors of processes")
def test_a_killed_process_has_ended_though_a_child_holds_its_connection() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        one = Adopted(LocalFrames(ours, 600.0), Introduction(0, 1, process.pid, "1"))  # `theirs` stays open
        assert one.exit_code() is None
        process.kill()
        wait_until(lambda: one.exit_code() is not None, PATIENCE, "its end is seen")
        assert one.exit_code() == ENDED
        assert not one.connection.ended
