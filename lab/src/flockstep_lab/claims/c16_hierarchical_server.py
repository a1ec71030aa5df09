"""Claim: leaf servers reduce the traffic of the root server and increase the staleness of gradients."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.messages import MASTER
from flockstep.records.events import UpdateEvent
from flockstep.testing.strategies import SimulatedRun, run_strategy
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict

WORKERS = 16
GROUPS = (2, 4, 8)
STEPS = 100
NETWORK = "1gbit"
FLAT = "ps(asynchronous)"
MODES = {
    "waiting leaves": "hierarchical({group}, root=asynchronous)",
    "caching leaves": "hierarchical({group}, leaf=asynchronous, root=asynchronous)",
}


@dataclass(frozen=True)
class HierarchicalServer(Claim):
    """Claim: leaf servers divide the root server's traffic by the size of their groups, but make gradients staler."""

    statement = (
        "If each group of workers has a leaf server, the root server's traffic falls by a factor equal to the size "
        "of the groups; gradients become staler, because they pass through one more server"
    )
    source = "Gupta, Zhang & Wang 2016, section 3.3 (Rudra-adv); Chen et al. 2015, section 3.2 (MXNet)"
    setting = (
        f"softmax regression, {WORKERS} workers, {STEPS} steps each, exponential gradient times, virtual {NETWORK} "
        f"network; groups of {', '.join(map(str, GROUPS))}"
    )
    tolerance = (
        "the root receives exactly 1 / group size of the bytes that a single server receives; it also sends that "
        "fraction, plus at most one final copy per leaf; mean staleness in gradients is reported, and must exceed that "
        "of a single server if leaves cache the parameters"
    )
    quick = True

    def check(self, say: Say) -> Verdict:
        """Compare the root server's traffic and the gradients' staleness with those of a single server."""
        flat, rows, figures = self._run(FLAT), [], {}
        alone = staleness(flat)
        figures["staleness, single server"] = alone
        for name, text in MODES.items():
            for group in GROUPS:
                strategy = text.format(group=group)
                say(strategy)
                run = self._run(strategy)
                rows += self._traffic(f"{name}, group {group}", group, flat, run)
                late = staleness(run) * group
                figures[f"mean staleness in gradients, {name}, groups of {group}"] = late
                if "leaf" in strategy:
                    rows.append(
                        ClaimRow(
                            f"mean staleness in gradients, {name}, groups of {group}",
                            f"> {alone:.3g}",
                            late,
                            late > alone,
                        )
                    )
        late = figures["mean staleness in gradients, waiting leaves, groups of 4"]
        note = (
            f"if workers wait for their leaf's answer from the root, {WORKERS // 4} leaves exchange in turn with the "
            f"root as single workers would, and a sum of 4 gradients has a staleness of {late:.3g} gradients; only "
            "answers from a leaf's cache add staleness"
        )
        return Verdict(tuple(rows), note, figures)

    def _run(self, strategy: str) -> SimulatedRun:
        return run_strategy(strategy, WORKERS, STEPS, network=NETWORK)

    def _traffic(self, name: str, group: int, flat: SimulatedRun, run: SimulatedRun) -> list[ClaimRow]:
        single, root = flat.totals[MASTER], run.totals[MASTER]
        size = run.params[MASTER].nbytes
        copies = (root.sent_bytes - single.sent_bytes / group) / size
        return [
            ClaimRow(
                f"bytes received by the root / by a single server, {name}",
                f"1/{group}",
                root.received_bytes / single.received_bytes,
                root.received_bytes * group == single.received_bytes,
            ),
            ClaimRow(
                f"final copies of the parameters sent by the root, {name}",
                f"<= {WORKERS // group}",
                copies,
                0 <= copies <= WORKERS // group,
            ),
        ]


def staleness(run: SimulatedRun) -> float:
    """Return the mean staleness: the number of updates between a worker's reading of the parameters and the use of its
    gradient.
    """
    late = [event.staleness for event in run.of(UpdateEvent) if event.staleness is not None]
    return sum(late) / len(late)
