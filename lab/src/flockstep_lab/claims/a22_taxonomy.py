"""Claim: the survey's table of systems follows from compositions of components that run."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.errors import FlockstepError
from flockstep.partitions.base import Partition
from flockstep.records.config import RunConfig
from flockstep.runtime.setup import prepare
from flockstep.runtime.virtual_split import SplitSimulation
from flockstep.simulation.compute import ConstantTime
from flockstep.simulation.network import Ideal
from flockstep.systems.catalog import Mode, System, system
from flockstep.testing.strategies import run_strategy
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict
from flockstep_lab.claims.survey_table import COLUMNS, differences, table_1

WORKERS, STEPS = 4, 12


@dataclass(frozen=True)
class Taxonomy(Claim):
    """Claim: every row of the survey's table 1 can be derived from a composition that runs."""

    statement = (
        "The systems of table 1 can be composed from one set of components, and their rows follow from the composition"
    )
    source = "Langer, He, Rahayu & Xue 2020, table 1"
    setting = (
        "every mode of every system runs on 4 workers in virtual time; systems that split the model train two "
        "replicas of a network on the digits (COTS HPC: one replica); the row of each system is derived from its "
        "composition"
    )
    tolerance = "all columns of all 17 rows are equal to the printed table"

    def check(self, say: Say) -> Verdict:
        """Run the composition of every system, derive the system's row from the composition, and compare the row with
        the table.
        """
        rows = []
        for printed in table_1():
            known = system(printed.system)
            wrong, failed = differences(known.row(), printed), _failed(known)
            said = [*(f"{column}: {here}" for column, (here, _) in wrong.items()), failed]
            ours = "; ".join(filter(None, said)) or "as printed"
            row = ", ".join(str(getattr(printed, column)) for column in COLUMNS)
            rows.append(ClaimRow(printed.system, row, ours, not (wrong or failed)))
            say(f"{printed.system}: {ours}")
        derived = float(sum(row.holds for row in rows))
        return Verdict(tuple(rows), "", {"rows derived": derived})


def _run_split(mode: Mode) -> None:
    """Run a mode that splits the model, on the digits."""
    config = RunConfig(
        kind="simulate",
        job="digits(batch=8)",
        strategy=mode.runs,
        partition=mode.partition,
        workers=WORKERS if mode.strategy else Partition.parse(mode.partition).parts,
        steps=STEPS,
    )
    _, plan, _ = prepare(config)
    assert plan.split is not None
    SplitSimulation(plan.split, plan, ConstantTime(0.01), Ideal(), lambda event: None).run()


def _failed(known: System) -> str:
    """The error of the first mode that failed; empty if all modes ran."""
    for mode in known.modes:
        try:
            if mode.partition == "none":
                run_strategy(mode.runs, WORKERS, STEPS)
            else:
                _run_split(mode)
        except FlockstepError as error:
            return f"{mode.runs} with partition {mode.partition} fails: {error}"
    return ""
