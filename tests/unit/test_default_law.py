import dataclasses
from pathlib import Path

import msgspec

from flockstep.launchers.simulate import simulate
from flockstep.records import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.report.table import table


def test_a_simulation_that_names_no_law_varies_and_says_which_law_it_used(tmp_path: Path) -> None:
    config = RunConfig(kind="simulate", job="softmax", strategy="asgd", workers=4, steps=40)
    usual = simulate(config, tmp_path / "usual")
    still = simulate(dataclasses.replace(config, compute="constant(0.01)"), tmp_path / "still")
    settled = still.staleness_counts[3] / sum(still.staleness_counts.values())
    assert settled > 0.9  # n-1: equal durations make workers take turns
    assert max(usual.staleness_counts.values()) / sum(usual.staleness_counts.values()) < 0.7
    assert usual.compute == RunFolder(tmp_path / "usual").read_config().compute == "lognormal(mean=0.01)"
    assert "VIRTUAL seconds: a gradient takes lognormal(mean=0.01)" in str(table([usual]).title)
    assert "real seconds" in str(table([msgspec.structs.replace(usual, clock="real")]).title)
