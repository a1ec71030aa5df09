"""Clusters of equal machines."""

from __future__ import annotations

from flockstep.costs.cluster import ClusterShape
from flockstep.costs.cluster_file import read_cluster


def equal_machines(
    bandwidth: str = "1gbit", compute: str = "constant(0.01)", count: int = 4, more: str = "", latency: str = "50us"
) -> ClusterShape:
    """Machines on one switch; `more` are further lines of a cluster file about each of them."""
    text = f'compute = "{compute}"\n[nodes.machines]\ncount = {count}\n{more}\n[[links]]\ninside = "machines"\n'
    return read_cluster(text + f'bandwidth = "{bandwidth}"\nlatency = "{latency}"\n', name="test")
