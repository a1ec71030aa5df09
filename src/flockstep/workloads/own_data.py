"""Samples that one process of a run reads from files, instead of the job's samples."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.base import Data, Indices, Job


@dataclass(frozen=True)
class OwnData:
    """The samples that one process of a run reads from files: one worker's, or the test set of an evaluation."""

    folder: str
    """Path of the folder with the samples in `x.npy` and `y.npy`; the first axis of both arrays counts samples."""
    sizes: tuple[int, ...]
    """Number of training samples of every worker."""
    facts: dict[str, str] = field(default_factory=dict)
    """Facts about the samples that must be the same when the run is repeated, such as a hash."""

    @property
    def parts(self) -> list[Indices]:
        """The indices of each worker's samples within the worker's own files."""
        return [np.arange(size) for size in self.sizes]

    def job(self, job: Job) -> Job:
        """Return the job with these samples as both training set and test set. A process uses only one of the two."""
        return dataclasses.replace(job, data=self._data, facts=self.facts)

    def _data(self) -> Data:
        x, y = (np.load(Path(self.folder) / f"{name}.npy", allow_pickle=False) for name in "xy")
        return Data(x, y, x, y)


def write_samples(folder: Path, x: FlatArray, y: FlatArray) -> None:
    """Write the arrays of samples to the files from which `OwnData` reads them."""
    np.save(folder / "x.npy", x, allow_pickle=False)
    np.save(folder / "y.npy", y, allow_pickle=False)


def digest_of(x: FlatArray, y: FlatArray) -> str:
    """Return 16 hexadecimal digits of the samples' SHA-256, which depends on their order, shape and type."""
    found = hashlib.sha256(f"{x.shape} {x.dtype} {y.shape} {y.dtype}".encode())
    for array in (x, y):
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()[:16]
