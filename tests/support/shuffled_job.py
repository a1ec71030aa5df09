"""Job file whose samples are shuffled anew in every process, for runs of processes."""

import dataclasses

import numpy as np

from flockstep.frameworks.base import Data
from support.split_jobs import chain, job_of


def job():
    """The regression of `split_jobs`, with samples in an order that no seed fixes."""
    ordered = job_of(chain)
    return dataclasses.replace(ordered, data=lambda: shuffled(ordered.data()))


def shuffled(data: Data) -> Data:
    order = np.random.default_rng().permutation(len(data.train_x))
    return Data(data.train_x[order], data.train_y[order], data.test_x, data.test_y)
