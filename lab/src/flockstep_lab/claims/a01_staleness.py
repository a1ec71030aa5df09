"""Claim: the mean staleness of n-softsync is (workers - 1) / c, for every distribution of compute times; c is the
number of gradients per update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flockstep.messages import Address, Message
from flockstep.records.events import Event, UpdateEvent
from flockstep.strategies.consistency.softsync import SoftSync
from flockstep.strategies.parameter_server import ParameterServer
from flockstep_lab.claims.base import Claim, Say, Verdict, near, same
from flockstep_lab.claims.real_run import events_of
from flockstep_lab.claims.update_trace import Updates, timed, trace_of

WORKERS = 30
REAL_WORKERS = 4
SPLITS = (1, 2, 5, 15, 30)
LAWS = ("normal(1, cv=0.1)", "exponential(1)", "lognormal(1, sigma=1)")


class InFlight(Updates):
    """A simulation that adds up, over all versions of the parameters, how many other workers compute when a version is
    formed.
    """

    total = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        workers, strategy = self.plan.cluster.workers, self.plan.strategy
        assert isinstance(strategy, ParameterServer)
        assert isinstance(strategy.consistency, SoftSync)
        self.collected = workers // strategy.consistency.n
        self.computing = set(range(workers))
        self.left = dict.fromkeys(range(workers), self.plan.steps)

    def send(self, to: Address, message: Message) -> None:
        """Update the set of workers that are computing: a push ends a gradient, and the reply to the push begins the
        next gradient.
        """
        if message.tag == "push" and message.source >= 0:
            self.computing.discard(message.source)
            self.left[message.source] -= 1
        elif message.tag == "push" and self.left[to]:
            self.computing.add(to)
        super().send(to, message)

    def note(self, event: Event) -> None:
        """Whenever `collected` gradients have formed a new version, increase `total` by the number of workers that are
        computing.
        """
        super().note(event)
        if isinstance(event, UpdateEvent) and len(self.log) % self.collected == 0:
            self.total += len(self.computing)


@dataclass(frozen=True)
class Staleness(Claim):
    """Claim: the mean staleness of n-softsync grows linearly with the number of workers."""

    steps: int = 300
    real_steps: int = 1500
    statement = (
        "n-softsync collects c = floor(workers / n) gradients before each step, so the mean staleness is (workers - "
        "1) / c, about n, for every distribution of the service times; if the server steps after each gradient, the "
        "mean staleness is about the number of workers"
    )
    source = "Gupta, Zhang & Wang 2016 (average staleness of n-softsync); Zhang et al. 2016, figure 1"
    setting = (
        "parameter server with 30 workers in virtual time, with normal (coefficient of variation 0.1), exponential "
        "and lognormal (sigma 1) gradient times and messages that take no time; the same on 4 real processes; "
        "measured until the first worker ends"
    )
    tolerance = (
        "mean staleness within 0.5 % in virtual time and within 2 % on real processes, without the first 5 updates "
        "per worker; the sum of all staleness equals exactly the number of gradients of other workers in flight, "
        "summed over the updates"
    )

    def check(self, say: Say) -> Verdict:
        """Compare measured with predicted mean staleness, for every n and every distribution in virtual time, then on
        real processes.
        """
        rows = []
        for n in SPLITS:
            expected = (WORKERS - 1) / (WORKERS // n)
            for law in LAWS:
                mean, total, in_flight = self._virtual(n, law)
                rows.append(near(f"n={n}, {law}: mean staleness", expected, mean, 0.005))
                what = f"n={n}, {law}: total staleness of all gradients (published: the number of gradients in flight)"
                rows.append(same(what, total, in_flight))
            say(f"n={n} of {WORKERS} workers: {rows[-2].ours:.4f}")
        for n in (1, 2, REAL_WORKERS):
            expected = (REAL_WORKERS - 1) / (REAL_WORKERS // n)
            rows.append(near(f"n={n}, {REAL_WORKERS} real processes: mean staleness", expected, self._real(n), 0.02))
            say(f"n={n}, real processes: {rows[-1].ours:.4f}")
        return Verdict(tuple(rows))

    def _virtual(self, n: int, law: str) -> tuple[float, int, int]:
        """Mean staleness after the start; over the whole run, its sum and the gradients in flight."""
        trace, simulation = timed(f"ps(consistency=softsync({n}))", WORKERS, self.steps, law, simulation=InFlight)
        assert isinstance(simulation, InFlight)
        settled = trace.until_first_end(self.steps).staleness[5 * WORKERS :]
        return float(settled.mean()), int(trace.staleness.sum()), simulation.total

    def _real(self, n: int) -> float:
        events = events_of("softmax", f"ps(consistency=softsync({n}))", REAL_WORKERS, self.real_steps)
        trace = trace_of([event for event in events if isinstance(event, UpdateEvent)])
        return float(trace.until_first_end(self.real_steps).staleness[5 * REAL_WORKERS :].mean())
