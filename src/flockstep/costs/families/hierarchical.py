"""Two levels of servers, both synchronous, g workers to a leaf and k leaves, b = (m + header) / B.

Constant times: T_c + 4L + (g + k + 2) b, as gradients wait at the leaf's card, and answers at the root's.
"""

from __future__ import annotations

import numpy as np

from flockstep.arrays.schema import slices
from flockstep.costs import order_statistics, rounds
from flockstep.costs.forms import form, no_form
from flockstep.costs.setting import Setting, StepCost, step
from flockstep.strategies.hierarchical import Hierarchical


@form.register
def _(strategy: Hierarchical, setting: Setting) -> StepCost:
    if strategy.leaf == "asynchronous" or strategy.root == "asynchronous":
        raise no_form(strategy, "what an asynchronous level passes on depends on who meets there")
    n, nbytes, busy, latency = setting.workers, float(setting.nbytes), setting.busy(setting.nbytes), setting.latency
    groups = slices(n, -(-n // strategy.group))
    adding = [setting.reducing((part.stop - part.start - 1) * setting.elements) for part in groups]
    stepping = setting.reducing((len(groups) - 1) * setting.elements) + setting.updating(setting.elements)
    longest: list[float] = []

    def turn(workers: rounds.Workers) -> None:
        done = workers.compute()
        longest.append(float((done - workers.at).max()))
        sums = np.array(
            [
                rounds.served(np.sort(done[part] + latency), busy)[-1] + add
                for part, add in zip(groups, adding, strict=True)
            ]
        )
        begins = rounds.served(np.sort(sums + latency), busy)[-1] + stepping
        for place, part in enumerate(groups):  # the root answers in order of leaves, a leaf in order of workers
            got = begins + (place + 1) * busy + latency
            workers.at[part] = got + np.arange(1, part.stop - part.start + 1) * busy + latency

    seconds = rounds.settled(setting, turn) + rounds.bias(setting, n, 1, longest)
    most = max(part.stop - part.start for part in groups)
    up = max((most + 1) * nbytes, len(groups) * nbytes)
    notes = [] if order_statistics.certain(setting.compute) else ["messages of one step do not meet those of another"]
    return step(setting, seconds, nbytes, 1.0, copies=1.0, slots=0, servers=(up, up), staleness=(0.0, 0), notes=notes)
