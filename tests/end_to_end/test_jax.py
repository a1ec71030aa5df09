"""JAX on several workers: a script's own loop and jobs; one process that computes on all batches is the oracle."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from support.matrix import few
from support.processes import Ended, RealRun

pytest.importorskip("jax")
pytest.importorskip("optax")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits_jax.py"
BEFORE = """
import os, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, optax
import flockstep, flockstep.jax

HERE = Path(__file__).parent
rank, workers = flockstep.rank(), flockstep.workers()
start = {"w": 0.1 * jax.random.normal(jax.random.key(rank), (4, 2)), "b": jnp.zeros(2)}
batches = [jax.random.normal(jax.random.key(100 + each), (8, 4)) for each in range(12)]

@jax.jit
def slopes(params, x):
    return jax.grad(lambda tree: jnp.mean((jnp.tanh(x @ tree["w"]) + tree["b"] - x[:, :2]) ** 2))(params)

def save(params):
    np.save(HERE / f"model-{rank}", np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)]))

"""
SCRIPT = """
with flockstep.jax.distribute(start, {optimizer}, {strategy!r}) as trainer:
    params = trainer.params
    for x in flockstep.shard(batches):
        params = trainer.step(slopes(params, x))
save(trainer.params)
assert os.environ["NPROC"] == os.environ["OMP_NUM_THREADS"]
"""


def outcome(body: str, folder: Path, workers: int = 2) -> Ended:
    (folder / "script.py").write_text(BEFORE + body)
    return RealRun(["launch", "-n", str(workers), str(folder / "script.py")], folder / "run").end(400)


def models(folder: Path, workers: int = 2) -> list[np.ndarray]:
    return [np.load(folder / f"model-{rank}.npy") for rank in range(workers)]


def oracle(optimizer: str, folder: Path, workers: int = 2) -> np.ndarray:
    """The model of one process that steps with the mean gradient over the batches of all workers."""
    space: dict[str, object] = {"__file__": str(folder / "alone.py")}
    body = f"""
optimizer, params = {optimizer}, start
state = optimizer.init(params)
for number in range(0, 12, {workers}):
    each = [slopes(params, x) for x in batches[number : number + {workers}]]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / {workers}, *each)
    updates, state = optimizer.update(mean, state, params)
    params = optax.apply_updates(params, updates)
save(params)
"""
    exec(BEFORE + body, space)
    return models(folder, 1)[0]


@pytest.mark.parametrize(
    ("strategy", "text"),
    few(
        [
            ("all_reduce", ""),
            ("bucketed", ""),
            ("ps(bsp)", "'adam(lr=0.05)'"),
            ("scatter_reduce", "'adam(lr=0.05)'"),
        ],
        ("all_reduce", ""),
        ("ps(bsp)", "'adam(lr=0.05)'"),
    ),
)
def test_a_synchronous_run_equals_one_process_with_all_batches(strategy: str, text: str, tmp_path: Path) -> None:
    adam = "optax.adam(0.05)"
    ended = outcome(SCRIPT.format(strategy=strategy, optimizer=text or adam), tmp_path)
    assert (ended.code, "Warning" in ended.err) == (0, False), ended.err
    one, other = models(tmp_path)
    assert np.array_equal(one, other)
    assert np.allclose(one, oracle(adam, tmp_path), 1e-4, 1e-5)


@pytest.mark.parametrize("strategy", few(["local_sgd(period=3)", "gossip", "easgd(period=1)"], "local_sgd(period=3)"))
def test_workers_that_step_themselves_end_with_one_model(strategy: str, tmp_path: Path) -> None:
    ended = outcome(SCRIPT.format(strategy=strategy, optimizer="optax.sgd(0.3)"), tmp_path)
    assert ended.code == 0, ended.err
    one, other = models(tmp_path)
    assert np.array_equal(one, other)
    assert not np.allclose(one, oracle("optax.sgd(0.0)", tmp_path))


def test_states_that_differ_are_refused(tmp_path: Path) -> None:
    ended = outcome(
        """
optimizer = optax.adam(0.1)
state = optimizer.init(start)
if rank == 1:
    state = optimizer.update(start, state, start)[1]
flockstep.jax.distribute(start, optimizer, "all_reduce", optimizer_state=state)
""",
        tmp_path,
    )
    assert ended.code != 0
    assert "got different states on ranks" in ended.err


@pytest.mark.parametrize(
    ("strategy", "optimizer", "sentence"),
    few(
        [
            ("all_reduce", "optax.sgd(0.1 + 0.1 * rank)", "an optax optimizer whose step is"),
            ("all_reduce", "(optax.sgd if rank else optax.adam)(0.1)", "an optax optimizer whose step is"),
            ("all_reduce", "'sgd(lr=0.1)' if rank else optax.sgd(0.1)", "an optax optimizer whose step is"),
            ("ps(bsp)", "f'sgd(lr=0.{1 + rank})'", "sgd(lr=0.1)"),
            ("asgd", "f'sgd(momentum=0.{1 + rank})'", "sgd(lr=1.0, momentum=0.1)"),
        ],
        ("all_reduce", "optax.sgd(0.1 + 0.1 * rank)", "an optax optimizer whose step is"),
    ),
)
def test_optimizers_that_differ_are_refused(strategy: str, optimizer: str, sentence: str, tmp_path: Path) -> None:
    ended = outcome(SCRIPT.format(strategy=strategy, optimizer=optimizer), tmp_path)
    assert ended.code != 0
    assert "must have the same optimizer, got " in ended.err
    assert sentence in ended.err


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [("local_sgd(period=3)", "optax.sgd(0.1 + 0.1 * rank)"), ("asgd", "f'sgd(lr=0.{1 + rank})'")],
)
def test_optimizers_may_differ_where_every_rank_steps_with_its_own(
    strategy: str, optimizer: str, tmp_path: Path
) -> None:
    ended = outcome(SCRIPT.format(strategy=strategy, optimizer=optimizer), tmp_path)
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    few(
        [
            ("bsp", "'sgd(lr=0.5)'"),
            ("local_sgd(period=4)", "optax.chain(optax.clip(0.5), optax.adamw(0.1))"),
            ("local_sgd(period=4)", "optax.adamw(optax.linear_schedule(0.1, 0.0, 20))"),
        ],
        ("bsp", "'sgd(lr=0.5)'"),
        ("local_sgd(period=4)", "optax.chain(optax.clip(0.5), optax.adamw(0.1))"),
    ),
)
def test_a_job_trains_as_in_virtual_time(strategy: str, optimizer: str, tmp_path: Path) -> None:
    support = Path(__file__).parents[1]
    (tmp_path / "own.py").write_text(
        f"import sys\nsys.path.insert(0, {str(support)!r})\nimport optax\nfrom support.jax_jobs import job as made\n"
        f"def job():\n    return made(optimizer={optimizer})\n"
    )
    losses = []
    for words in (["simulate"], ["train"]):
        folder = tmp_path / words[0]
        run = [*words, str(tmp_path / "own.py"), "-s", strategy, "-n", "2", "--steps", "20", "--json"]
        ended = RealRun(run, folder).end(400)
        assert ended.code == 0, ended.err
        assert ended.summary is not None
        losses.append(ended.summary["final_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] < 1.0


def test_flax_modules_with_batch_statistics_end_equal_on_all_ranks(tmp_path: Path) -> None:
    """The recipe of docs/how-to/jax.md: parameters by the strategy, statistics by a communicator."""
    pytest.importorskip("flax")
    body = """
from flax import nnx

rngs = nnx.Rngs(rank)
model = nnx.Sequential(nnx.Linear(4, 6, rngs=rngs), nnx.BatchNorm(6, rngs=rngs), nnx.Linear(6, 2, rngs=rngs))

@nnx.jit
def module_slopes(model, x):
    return nnx.grad(lambda m: jnp.mean((m(x) - x[:, :2]) ** 2))(model)

trainer = flockstep.jax.distribute(nnx.state(model, nnx.Param), optax.adam(0.01), "local_sgd(period=2)")
nnx.update(model, trainer.params)
for x in flockstep.shard(batches):
    nnx.update(model, trainer.step(module_slopes(model, x)))
own = jax.tree.leaves(nnx.state(model, nnx.BatchStat))
np.save(HERE / f"own-{rank}", np.concatenate([np.ravel(leaf) for leaf in own]))
with flockstep.join() as ranks:
    mean = lambda leaf: ranks.all_reduce(np.asarray(leaf)) / workers
    nnx.update(model, jax.tree.map(mean, nnx.state(model, nnx.BatchStat)))
nnx.update(model, trainer.finish())
model.eval()
now = jax.tree.leaves(nnx.state(model, nnx.BatchStat))
np.save(HERE / f"statistics-{rank}", np.concatenate([np.ravel(leaf) for leaf in now]))
save([model(batches[0])])
"""
    ended = outcome(body, tmp_path)
    assert ended.code == 0, ended.err
    own = [np.load(tmp_path / f"own-{rank}.npy") for rank in range(2)]
    assert not np.allclose(*own)  # without the recipe the ranks' models differ
    for rank in range(2):
        np.testing.assert_allclose(np.load(tmp_path / f"statistics-{rank}.npy"), sum(own) / 2, rtol=1e-6)
    np.testing.assert_array_equal(*models(tmp_path))


@pytest.mark.full
def test_the_example_learns(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    ended = RealRun(["launch", "-n", "2", str(EXAMPLE)], tmp_path / "run").end(400)
    assert ended.code == 0, ended.err
    assert float(ended.out.split("test accuracy ")[1].split()[0]) > 0.8
