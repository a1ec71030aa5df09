"""Hogwild! against plain numpy, and what is lost when processes really write at the same time."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flockstep.errors import CompositionError
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import QuadraticModel
from flockstep.links.shared_memory import SharedMemory
from flockstep.nodes import Worker
from flockstep.records.events import ScalarEvent
from flockstep.strategies.hogwild import Hogwild, Segment
from flockstep.testing.strategies import GradientSource, equal_bits, run_strategy, small_job
from support.processes import PATIENCE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory without a name needs Linux")


@pytest.mark.oracle("strategy:hogwild")
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1)", "sgd(lr=0.1, momentum=0.9)", "adam(lr=0.02)"])
def test_alone_is_plain_sgd_in_every_bit(optimizer):
    source = GradientSource(1, small_job(optimizer))
    w = source.start()
    stepper = source.stepper(w)
    for _ in range(15):
        stepper.step(w, source.gradient(0, w))
    assert equal_bits(run_strategy("hogwild", 1, 15, job=small_job(optimizer)).result, w)


@pytest.mark.oracle("strategy:hogwild")
def test_workers_in_turn_are_sequential_sgd_with_the_gradients_of_what_they_had_read():
    """In order of the times at which gradients end, each of the parameters that its worker had read before it."""
    pace = (1, 1.1, 1.3)
    run = run_strategy("hogwild", 3, 5, compute=f"speeds(constant(1), {pace})", network="ideal")
    source = GradientSource(3)
    w = source.start()
    read = [w.copy() for _ in range(3)]
    for _, rank in sorted((pace[rank] * step, rank) for rank in range(3) for step in range(1, 6)):
        w -= np.float32(0.1) * source.gradient(rank, read[rank])
        read[rank] = w.copy()
    assert equal_bits(w, *run.replicas)


def disjoint_job() -> Job:
    """Sample j of 6 pulls coordinate j only: gradients of different workers have no coordinate in common."""

    def data() -> Data:
        return Data(np.eye(6), np.zeros(6), np.ones((1, 6)), np.zeros(1))

    class Sparse(QuadraticModel):
        def gradients(self, params, x, y, out):  # type: ignore[no-untyped-def]
            losses = super().gradients(params, x, y, out)
            out["w"] *= x.any(axis=1)
            return losses

    return Job(
        lambda: Sparse(np.ones(6), np.full(6, 4.0), "float64"),
        data,
        "sgd(lr=0.25)",
        metric=lambda outputs, targets: float(np.mean(np.square(outputs))),
        higher_is_better=False,
        batch=1,
    )


def test_only_the_support_of_the_gradient_is_read_and_written():
    """Niu et al. 2011: sparse updates seldom collide. What others write elsewhere meanwhile stays as it is."""
    run = run_strategy("hogwild", 3, 8, job=disjoint_job())
    assert {event.name: event.value for event in run.of(ScalarEvent)} == {"updates": 24, "lost_updates": 0}
    worker, written = run.nodes[0], Written(np.full(6, 4.0))
    segment = Segment(None, written, np.zeros(6, np.int64))
    Hogwild().update(worker, segment, np.array([0, 0, 1.0, 0, 2.0, 0]))
    assert written.touched == {2, 4}
    assert np.array_equal(written, [4, 4, 3.75, 4, 3.5, 4])
    assert segment.counts.tolist() == [0, 0, 1, 0, 1, 0]


class Written(np.ndarray):
    """An array that knows which of its elements were assigned."""

    def __new__(cls, values):
        made = values.view(cls)
        made.touched = set()
        return made

    def __array_finalize__(self, other):
        self.touched = getattr(other, "touched", None)

    def __setitem__(self, index, value):
        if self.touched is not None:
            self.touched |= set(np.arange(self.size)[index].tolist())
        super().__setitem__(index, value)


class Overtaken(Hogwild):
    """Writes back what it had read before it computed: what others did meanwhile is lost, as in a race."""

    def update(self, me: Worker, segment: Segment, gradient: np.ndarray) -> None:
        segment.counts[:] = self._seen(me, segment)
        super().update(me, segment, gradient)

    def _seen(self, me: Worker, segment: Segment) -> np.ndarray:
        return np.full_like(segment.counts, me.step - 1)


@pytest.mark.negative_control("strategy:hogwild")
def test_lost_updates_are_counted():
    run = run_strategy(Overtaken(), 4, 10, compute="constant(1)", network="ideal")
    assert {figure.name: figure.value for figure in run.of(ScalarEvent)} == {
        "updates": 720,
        "lost_updates": 720 - 10 * 18,
    }


INCREMENTS, ELEMENTS = 20, 1000
RACER = """
import os, sys
from contextlib import nullcontext
import numpy as np
from flockstep.links.shared_memory import SharedMemory
memory, me = SharedMemory.attach(sys.argv[1]), int(sys.argv[2])
counts, reads = memory.array(np.int64, {elements}), memory.array(np.int64, 2, 8 * {elements})
reads[me] = 1
while not reads.all():
    os.sched_yield()
for _ in range({increments}):
    with memory.lock() if sys.argv[3] == "locked" else nullcontext():
        before = reads[1 - me]
        seen = counts.copy()
        reads[me] += 1
        for _ in range(10_000):  # lets the other in between read and write, where nothing keeps it out
            if reads[1 - me] != before:
                break
            os.sched_yield()
        counts[:] = seen + 1
"""


def raced(how: str) -> int:
    """How many increments two processes lose that begin at the same time."""
    memory = SharedMemory.create(8 * (ELEMENTS + 2))
    script = RACER.format(elements=ELEMENTS, increments=INCREMENTS)
    racers = [subprocess.Popen([sys.executable, "-c", script, memory.address, str(rank), how]) for rank in range(2)]
    assert [racer.wait(PATIENCE) for racer in racers] == [0, 0]
    return 2 * INCREMENTS * ELEMENTS - int(memory.array(np.int64, ELEMENTS).sum())


def test_with_a_lock_nothing_is_lost():
    assert raced("locked") == 0


@pytest.mark.negative_control("strategy:hogwild")
def test_without_a_lock_increments_are_lost():
    assert raced("unlocked") > 0


def test_memory_of_another_host_or_of_a_dead_process_is_refused():
    memory = SharedMemory.create(64)
    host, _, path = memory.address.partition(":")
    with pytest.raises(CompositionError, match="the memory is on another host; start all workers on one host"):
        SharedMemory.attach(f"elsewhere:{path}")
    with pytest.raises(CompositionError, match=r"cannot attach to shared memory: .*No such file"):
        SharedMemory.attach(f"{host}:/proc/{2**22 + 1}/fd/3")


def test_it_leaves_no_file():
    memory = SharedMemory.create(1 << 16)
    SharedMemory.attach(memory.address).array(np.int64, 3)[:] = 5
    assert (memory.array(np.int64, 4) == [5, 5, 5, 0]).all()
    held = Path(memory.address.partition(":")[2])
    assert str(held.readlink()).startswith("/memfd:"), "it is in no folder, and gone with its last process"


def test_workers_may_die():
    run = run_strategy("hogwild", 3, 10, compute="constant(1)", network="ideal", faults=["dies(2, 4.5)"])
    assert equal_bits(run.replicas[0], run.replicas[1])
    assert run.of(ScalarEvent) == []  # nobody knows how many updates the dead one had made


def test_one_may_die_before_it_has_the_memory():
    run = run_strategy("hogwild", 3, 5, faults=["dies(1, 0.0)"])
    assert run.nodes[0].step == run.nodes[2].step == 5


def test_what_is_not_used_any_more_is_closed():
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        run_strategy("hogwild", 4, 3)
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
