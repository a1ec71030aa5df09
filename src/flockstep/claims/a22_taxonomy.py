"""The survey's table of systems follows from compositions that run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flockstep.claims.base import Claim, Row, Say, Verdict
from flockstep.errors import FlockstepError
from flockstep.systems.catalogue import NOT_YET, System, system
from flockstep.systems.published import COLUMNS, differences, table_1
from flockstep.testing.strategies import run_strategy

WORKERS, STEPS = 4, 12


@dataclass(frozen=True)
class Taxonomy(Claim):
    """Every row of the survey's table 1, derived from a composition that has just run."""

    statement: ClassVar[str] = (
        "The systems of table 1 are compositions of one set of parts, and their rows follow from it"
    )
    source: ClassVar[str] = "Langer, He, Rahayu & Xue 2020, table 1"
    setting: ClassVar[str] = "every mode of every system runs on 4 workers in virtual time; its row is derived from it"
    tolerance: ClassVar[str] = "all columns of all 17 rows as printed"

    def check(self, say: Say) -> Verdict:
        """Run, derive, compare."""
        rows, missing = [], []
        for printed in table_1():
            known = system(printed.system)
            wrong = differences(known.row(), printed)
            failed = _failed(known)
            ours = "; ".join(f"{column}: {here}" for column, (here, _) in wrong.items()) or failed or "as printed"
            row = ", ".join(str(getattr(printed, column)) for column in COLUMNS)
            rows.append(Row(printed.system, row, ours, not (wrong or failed)))
            missing += [printed.system] if NOT_YET in known.row().values() else []
            say(f"{printed.system}: {ours}")
        reason = (
            f"{', '.join(missing)} only split the model over machines, which is {NOT_YET} possible" if missing else ""
        )
        return Verdict(tuple(rows), reason, {"rows derived": float(sum(row.holds for row in rows))})


def _failed(known: System) -> str:
    """What went wrong when its modes ran; nothing if they did."""
    for mode in known.modes:
        try:
            run_strategy(mode.strategy, WORKERS, STEPS)
        except FlockstepError as error:
            return f"{mode.strategy} fails: {error}"
    return ""
