"""A new exchange scheme in twenty lines: after a step, a rank and a random peer move half way toward each other."""

import numpy as np

import flockstep

with flockstep.join() as comm:
    random = np.random.default_rng(comm.rank)
    truth = np.random.default_rng(9).standard_normal(20)  # the same on every rank
    data = random.standard_normal((500, 20))  # every rank has its own
    target = data @ truth + 0.1 * random.standard_normal(500)

    model = comm.window("model", np.zeros(20))
    for _ in range(400):
        batch = random.integers(0, 500, 8)
        with model.local() as params:  # no rank adds to it during a step
            params -= 0.01 * data[batch].T @ (data[batch] @ params - target[batch])
        peer = int(random.integers(comm.workers))
        difference = model.array - model.get(peer)
        model.accumulate(peer, difference, scale=0.5, codec="half")
        model.accumulate(comm.rank, difference, scale=-0.5, codec="half")
    model.fence()

    mean = comm.all_reduce(model.array, average=True)
    print(f"rank {comm.rank}: the mean of all models is {np.abs(mean - truth).max():.3f} from the truth")
