"""Claim: formulas give lower bounds on the communication time of one step, for eight parameter layouts."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.collectives.layouts import LAYOUTS, Times
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict
from flockstep_lab.claims.figure_14 import simulated, times

WORKERS = 16
COMPUTED = {
    "VGG-A": (132.9e6, ("14.60", "4.698", "1.942", "1.098", "7.052", "0.859", "2.147", "1.091")),
    "ResNet-152": (60.2e6, ("6.613", "2.128", "0.880", "0.497", "3.194", "0.389", "0.972", "0.494")),
    "GoogLeNet": (6.8e6, ("0.747", "0.240", "0.099", "0.056", "0.361", "0.044", "0.110", "0.056")),
}
"""Model → number of float32 parameters, and communication seconds per step, in the order of `LAYOUTS`: golden values
that were computed with the formulas, because figure 14 draws curves and prints no numbers.
"""


@dataclass(frozen=True)
class LayoutDelays(Claim):
    """Claim: the communication time of one step follows from a formula for eight parameter layouts, from one server to
    a ring.
    """

    statement = (
        "With 16 workers on 10 Gbit Ethernet a step of VGG-A spends at least 14.6 s on communication with a naive "
        "parameter server and 1.09 s with a ring, and eight layouts take as long as eight formulas predict"
    )
    source = "Langer, He, Rahayu & Xue 2020, figure 14 (the text does not state the link speeds)"
    setting = (
        f"formulas with 1.25e9 bytes/s, reducing at 10 GiB/s, updating at 2 GiB/s, n = {WORKERS} workers; the "
        "exchanges as programs in virtual time, without latency, including the time to compute"
    )
    tolerance = (
        "formulas equal to delays that were computed separately, in all their digits (figure 14 prints no numbers); a "
        "simulated exchange takes at least the "
        "formula's time, and at most 1.02 times as long"
    )
    quick = True

    def check(self, say: Say) -> Verdict:
        """Evaluate the formula of each layout, and simulate the layout's exchange in virtual time."""
        rows = []
        for network, (parameters, seconds) in COMPUTED.items():
            t = Times.of(4 * parameters)
            for (name, formula), computed in zip(LAYOUTS.items(), seconds, strict=True):
                ours = f"{formula(WORKERS, t):.{len(computed.partition('.')[2])}f}"
                rows.append(ClaimRow(f"{network}, {name}: seconds", f"{computed}, computed", ours, ours == computed))
        for name, formula in LAYOUTS.items():
            say(name)
            ratio = simulated(name, WORKERS) / formula(WORKERS, times(WORKERS))
            rows.append(ClaimRow(f"{name}: simulated ÷ formula", 1.0, ratio, 1 - 1e-9 <= ratio <= 1.02))
        vgg = Times.of(4 * COMPUTED["VGG-A"][0])
        gain = LAYOUTS["naive server"](WORKERS, vgg) / LAYOUTS["ring"](WORKERS, vgg)
        what = "VGG-A: seconds per step of the naive server ÷ seconds per step of the ring"
        rows.append(ClaimRow(what, "13.4, computed", f"{gain:.1f}", f"{gain:.1f}" == "13.4"))
        note = "a simulated exchange takes longer than its formula because of the 64-byte headers of its messages"
        return Verdict(tuple(rows), note)
