"""Claim: synchronous runs with the same seed end with the same bits; asynchronous runs do so only in virtual time."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from flockstep.experiments.single import carry_out
from flockstep.records.config import Kind, RunConfig
from flockstep.records.folder import RunFolder
from flockstep.runtime.node_metrics import fingerprint
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict

SYNCHRONOUS = ("all_reduce", "ps(consistency=bsp)", "local_sgd(period=5)")
ASYNCHRONOUS = ("asgd", "gossip", "easgd")


@dataclass(frozen=True)
class Reproducible(Claim):
    """Claim: synchronous runs repeat bit for bit; asynchronous runs repeat bit for bit only in virtual time."""

    attempts: int = 5
    statement = (
        "A synchronous run repeats bit for bit with the same seed; an asynchronous run repeats bit for bit only in "
        "virtual time"
    )
    source = "Langer et al. 2020, table 2, column ERB (easy for synchronous, hard for asynchronous)"
    setting = "softmax regression, 4 workers, one seed; real processes, and virtual time"
    tolerance = (
        "number of different hashes of the final parameters: one for synchronous runs and for runs in virtual time; "
        "more than one for asynchronous runs on real processes"
    )

    def check(self, say: Say) -> Verdict:
        """Repeat each run with the same seed, and count the different hashes of the final parameters."""
        rows = []
        for strategy in (*SYNCHRONOUS, *ASYNCHRONOUS):
            real = self._hashes(strategy, "train")
            virtual = self._hashes(strategy, "simulate")
            say(
                f"{strategy}: {len(real)} different results of {self.attempts} real runs, {len(virtual)} different "
                "results of runs in virtual time"
            )
            alike = strategy in SYNCHRONOUS
            wanted = "1" if alike else "> 1"
            rows.append(
                ClaimRow(
                    f"{strategy}, real processes: number of different results",
                    wanted,
                    len(real),
                    (len(real) == 1) == alike,
                )
            )
            rows.append(
                ClaimRow(f"{strategy}, virtual time: number of different results", "1", len(virtual), len(virtual) == 1)
            )
        return Verdict(tuple(rows))

    def _hashes(self, strategy: str, kind: Kind) -> set[str]:
        found = set()
        for _ in range(self.attempts):
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch) / "run"
                compute = "lognormal(0.01, 1)" if kind == "simulate" else None
                config = RunConfig(kind=kind, job="softmax", strategy=strategy, workers=4, steps=200, compute=compute)
                carry_out(config, folder)
                found.add(fingerprint(RunFolder(folder).read_result()[0]))
        return found
