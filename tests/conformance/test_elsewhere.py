"""Every strategy runs on torch tensors that numpy cannot read, as those on a GPU, with the results it has in numpy."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from flockstep import registry
from flockstep.arrays.namespace import to_host
from flockstep.arrays.schema import FlatArray
from flockstep.nodes import Worker
from flockstep.optimizers.base import Optimizer
from flockstep.strategies.all_reduce import AllReduce
from flockstep.strategies.base import Strategy
from flockstep.testing.strategies import OPTIMIZER, SimulatedRun, accepts, run_strategy, small_job
from support.elsewhere import Elsewhere, EngineElsewhere, elsewhere

STEPS = 12
OTHERS = [
    "ps(asynchronous, server_update=delay_compensated, codec=topk(0.2), feedback=residual)",
    "ps(asynchronous, server_update=staleness_scaled)",
    "ps(bsp, server_update=proximal(0.01))",
    "ps(ssp(2), server_update=momentum_corrected)",
    "ps(ssp(2), filters=(random_skip(0.5), kkt(0.01), key_caching))",
    "ps(value_bound, shards=3)",
    "all_reduce(codec=dgc(0.25), collective=sparse)",
    "all_reduce(codec=topk(0.1), feedback=momentum(clip=1), collective=sparse(ssar_split))",
    "all_reduce(codec=powersgd(1), feedback=residual)",
    "all_reduce(collective=recursive_doubling)",
    "local_sgd(4, outer_optimizer=adam)",
    "local_sgd(4, outer_optimizer=bmuf(nesterov=True))",
    "local_sgd(adaptive(4))",
    "gradient_coding(1, cyclic)",
    "majority_vote(0.9)",
    "partial(0.2, average)",
    "streaming_diloco(period=4, overlap=3)",
]


def both(
    text: str | Strategy, optimizer: str = OPTIMIZER, restarts: tuple[float, ...] = ()
) -> tuple[SimulatedRun, SimulatedRun]:
    """A strategy's run on numpy arrays, and the one on tensors."""
    strategy = Strategy.parse(text)
    n = next(n for n in (4, 3, 2) if accepts(strategy, n))
    plain = run_strategy(strategy, n, STEPS, job=small_job(optimizer))
    times = [share * plain.seconds for share in restarts]
    return plain, run_strategy(strategy, n, STEPS, job=small_job(optimizer), engine=EngineElsewhere, restarts=times)


def check_equal(plain: SimulatedRun, away: SimulatedRun) -> None:
    """The same models, but for the last bits of roots and quotients, which the two libraries may round in two ways."""
    for address, params in plain.params.items():
        np.testing.assert_allclose(to_host(away.params[address]), params, rtol=1e-4, atol=1e-5)
    assert len(away.events) == len(plain.events)
    assert [replace(total, hash="") for total in away.totals.values()] == [
        replace(total, hash="") for total in plain.totals.values()
    ]


@pytest.mark.parametrize("text", [*registry.names("strategy"), *OTHERS])
def test_strategy(text: str) -> None:
    plain, away = both(text)
    assert {type(params) for params in away.params.values()} == {Elsewhere}
    check_equal(plain, away)


def test_a_run_on_tensors_begins_anew_from_bytes() -> None:
    check_equal(*both("ps(ssp(2), codec=topk(0.2), feedback=residual)", restarts=(0.3, 0.7)))


@pytest.mark.parametrize("name", registry.names("optimizer"))
def test_optimizer(name: str) -> None:
    optimizer, random = Optimizer.parse(name), np.random.default_rng(0)
    start, slopes = random.normal(size=40).astype("f4"), random.normal(size=(3, 40)).astype("f4")

    def stepped(params: FlatArray, gradients: list[FlatArray]) -> FlatArray:
        state = optimizer.init(params)
        state.tensors = slice(0, 24), slice(24, 40)
        for gradient in gradients:
            optimizer.step(params, gradient, state, 0.1, 0.5)
        return params

    away = stepped(elsewhere(start), [elsewhere(slope) for slope in slopes])
    assert type(away) is Elsewhere
    np.testing.assert_allclose(to_host(away), stepped(start.copy(), list(slopes)), rtol=1e-5, atol=1e-7)


class InNumpy(AllReduce):
    """Wrong strategy: works on numpy arrays only."""

    async def worker(self, me: Worker) -> None:
        while me.training:
            me.optimizer_step(np.sign(await me.gradient()))


def test_what_works_on_numpy_alone_fails() -> None:
    with pytest.raises(TypeError, match="does not lie in the host's memory"):
        both(InNumpy())
