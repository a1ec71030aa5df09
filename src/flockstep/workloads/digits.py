"""A workload with handwritten digits of 8 × 8 pixels from scikit-learn: the default demonstration."""

from __future__ import annotations

import gzip
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flockstep.errors import MissingDependency
from flockstep.frameworks.base import Data, Job
from flockstep.optimizers.base import Optimizer
from flockstep.optimizers.sgd import SGD
from flockstep.workloads.base import Workload, generator, require_at_least, require_module, tuned_job

TRAIN = 1437
"""Number of training samples. The other samples, of 1,797 in total, are the test set."""


@dataclass(frozen=True)
class Digits(Workload):
    """Classify 8 × 8 handwritten digits (Alpaydin & Kaynak 1998) with a small CNN; 1,437 samples are for training, 360
    for testing.

    With 240 hidden units the network has 38,170 parameters.
    """

    batch: int = 32
    epochs: float = 22.0
    optimizer: Optimizer = SGD(lr=0.125)
    target: float = 0.95
    hidden: int = 240
    data_seed: int = 0
    local: bool = False
    """Whether the network has locally connected layers in place of convolutions, as in Coates et al. (2013)."""

    def __post_init__(self) -> None:
        require_at_least(1, hidden=self.hidden)
        require_at_least(0, data_seed=self.data_seed)

    def job(self, seed: int) -> Job:
        require_module("torch", "torch", "the workload digits")
        table = table_file()
        from flockstep.workloads import models

        return tuned_job(
            self,
            "digits",
            model=lambda: models.image_network(seed, self.hidden, self.local),
            data=lambda: self._data(table),
            loss=models.cross_entropy,
            least_steps=240,
        )

    def _data(self, table: Path) -> Data:
        with gzip.open(table, "rt", encoding="ascii") as text:
            rows = np.loadtxt(text, delimiter=",", dtype=np.int64)
        rows = generator("digits", self.data_seed).permutation(rows)
        x = (rows[:, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
        y = rows[:, -1].copy()
        return Data(x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:])


def table_file() -> Path:
    """Return the file of the digits in scikit-learn; importing scikit-learn would take each process a second."""
    try:
        package = importlib.util.find_spec("sklearn")
    except ValueError:
        package = None
    for folder in (package and package.submodule_search_locations) or ():
        table = Path(folder, "datasets", "data", "digits.csv.gz")
        if table.is_file():
            return table
    raise MissingDependency.of("scikit-learn", "workloads", "the workload digits")
