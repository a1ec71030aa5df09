"""A Ray cluster of two nodes on this machine, in a process of its own, which is told apart by its TMPDIR."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from support.processes import PATIENCE, RealRun, content, wait_until

RIG = """
import os, signal, sys
place = sys.argv[4]
os.environ.update(RAY_TMPDIR=os.environ["TMPDIR"], RAY_USAGE_STATS_ENABLED="0", PYTHONWARNINGS="ignore")
from ray.cluster_utils import Cluster
alike = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=alike)
second = cluster.add_node(**alike)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
with open(place, "w") as file:
    file.write(cluster.address)
if signal.sigwait({signal.SIGUSR1, signal.SIGTERM}) == signal.SIGUSR1:
    cluster.remove_node(second, allow_graceful=False)
    signal.sigwait({signal.SIGTERM})
cluster.shutdown()
sys.exit(0)
"""


class RayCluster:
    """Two nodes with two cores each; the first is the head."""

    def __init__(self, folder: Path):
        place = folder / "address"
        self.rig = RealRun(["rig", str(place)], folder / "none", before=RIG, afresh=True)
        RealRun.started.remove(self.rig)  # it outlives a test
        try:
            wait_until(lambda: content(place) or not self.rig.going(), PATIENCE, "a Ray cluster")
            self.address = content(place).decode()
            assert self.address, self.rig.err
        except BaseException:
            self.rig.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """What a program finds the cluster by."""
        return {"RAY_ADDRESS": self.address, "RAY_TMPDIR": str(self.rig.scratch), "PYTHONWARNINGS": "ignore"}

    def workers(self) -> dict[str, int]:
        """Node of a run → its process."""
        return self.rig.working()

    def agents(self) -> set[int]:
        """Processes of actors that are agents, and what these have started."""
        ours = (b"RayAgent", b"multiprocessing.forkserver", b"multiprocessing.resource_tracker")
        return {pid for pid in self.rig.processes() if any(word in content(f"/proc/{pid}/cmdline") for word in ours)}

    def lose_second_node(self) -> None:
        """Kill the second node's raylet, as a machine that fails does."""
        os.kill(self.rig.main.pid, signal.SIGUSR1)

    def close(self) -> None:
        """End the cluster."""
        if self.rig.going():
            os.kill(self.rig.main.pid, signal.SIGTERM)
            wait_until(lambda: not self.rig.going(), PATIENCE, "the end of the Ray cluster")
        self.rig.close()
