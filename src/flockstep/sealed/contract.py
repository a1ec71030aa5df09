"""What a sealed job demands of the data on which it is trained, and the reading of a folder of such data."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from flockstep.arrays.namespace import is_tensor
from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Data
from flockstep.frameworks.streams import SampleColumn, labels_of
from flockstep.workloads.readers import ImageFolder, TextWindows, parquet

KINDS = {"f": "floating-point numbers", "i": "whole numbers", "b": "truth values"}
PARTS = ("train", "test")
TRIED = 64
"""Number of samples that are checked where samples are read when they are needed."""
SCALE = "scale the data as the sender's, or ask the sender for a job with another range"
NUMBER = "number the classes from 0, or ask the sender for a job with more classes"
PIECES, PIECE = 64, 4096
"""Number of files of a folder, and of pieces of a file, from which a digest is made, and bytes of a piece."""
WIDER = 1.0
"""Floating-point inputs may lie outside the range of the sender's by this share of the width of the range."""


class Column(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The inputs or the targets of one sample."""

    shape: tuple[int, ...]
    kind: str
    """One of `KINDS`."""
    low: float
    high: float
    names: tuple[str, ...] = ()
    """Names of the columns of a Parquet file."""

    @classmethod
    def of(cls, values: Any, names: tuple[str, ...]) -> Column:
        """Return the demand that is met by values like those of the sender, (samples, …)."""
        found = _array(values)
        kind = _kind(found)
        low, high = (float(found.min()), float(found.max())) if found.size else (0.0, 0.0)
        more = WIDER * (high - low) if kind == "f" else 0.0
        low = low - more if kind == "f" else min(low, 0.0)
        return cls(tuple(found.shape[1:]), kind, low, high + more, names)

    def check(self, values: Any, what: str, way_out: str = SCALE) -> None:
        """Raise `ConfigurationError` if values (samples, …), called `what` in the error, do not meet the demand;
        `way_out`: what helps if they lie outside the range.
        """
        found = _array(values)
        if (kind := _kind(found)) != self.kind:
            raise ConfigurationError(
                f"{what} must hold {KINDS[self.kind]}, got {KINDS.get(kind, found.dtype)}; convert the data"
            )
        if found.shape[1:] != self.shape:
            raise ConfigurationError(
                f"a sample of {what} must have the shape {self.shape}, got {tuple(found.shape[1:])}; reshape or resize "
                "the data"
            )
        if not found.size:
            return
        low, high = found.min(), found.max()
        if np.isnan(low):
            raise ConfigurationError(
                f"the values of {what} must be numbers, got nan; replace or leave out such samples"
            )
        if not self.low <= low <= high <= self.high:
            raise ConfigurationError(
                f"the values of {what} must be between {self.low:g} and {self.high:g}, got "
                f"{low if low < self.low else high:g}; {way_out}"
            )


class Contract(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a sealed job demands of its data."""

    x: Column
    y: Column
    classes: int | None
    """Number of classes, which are numbered from 0; None if the targets are no classes."""

    @classmethod
    def of(cls, data: Data, names: tuple[str, ...], label: str, classes: int | None) -> Contract:
        """Return the demands that data like those of the sender meet.

        Args:
            data: the sender's data, of which the shapes, types and ranges remain.
            names: columns of the inputs in a Parquet file.
            label: column of the targets in a Parquet file.
            classes: number of classes; None for the number that the sender's targets have, if they are classes.
        """
        x, y = Column.of(data.train_x, names), Column.of(data.train_y, (label,))
        if y.kind == "i" and not y.shape:
            classes = classes or int(y.high) + 1
        return cls(x, y, classes)

    def check(self, data: Data, where: str) -> None:
        """Raise `ConfigurationError` if data read from the folder `where` do not meet the demands."""
        for part in PARTS:
            x, y = getattr(data, f"{part}_x"), getattr(data, f"{part}_y")
            self.x.check(x, f"the inputs of {part} in {where}")
            labels, what = labels_of(y), f"the labels of {part} in {where}"
            if self.classes is None:
                self.y.check(y, f"the targets of {part} in {where}")
                continue
            found = _array(y if labels is None else labels)
            msgspec.structs.replace(self.y, low=0.0, high=self.classes - 1.0).check(found, what, NUMBER)

    def __str__(self) -> str:
        shapes = [f"samples of shape {one.shape}, {KINDS.get(one.kind, one.kind)}" for one in (self.x, self.y)]
        labels = shapes[1] if self.classes is None else f"{self.classes} classes, numbered from 0"
        return f"inputs: {shapes[0]} between {self.x.low:g} and {self.x.high:g}; targets: {labels}"

    def read(self, folder: Path | str) -> Data:
        """Return the data in a folder, which meet the demands.

        The folder has `train` and `test`, both in one form: arrays (`train_x.npy`, `train_y.npy`), Parquet
        (`train.parquet`, a file or a folder), text (`train.txt`), or images (`train/CLASS/1.png`).

        Raises:
            ConfigurationError: the folder holds no data in one of these forms, or they do not meet the demands.
            MissingDependency: the package that reads this form is not installed.
        """
        place = Path(folder)
        try:
            data = Data.of(*(self._part(place, part) for part in PARTS))
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"cannot read the data in {place}: {error}; repair or replace the file") from None
        self.check(data, str(place))
        return data

    def _part(self, folder: Path, part: str) -> Any:
        if (folder / f"{part}_x.npy").is_file():
            return tuple(_loaded(folder / f"{part}_{name}.npy") for name in "xy")
        if (file := folder / f"{part}.parquet").exists():
            names = self.x.names
            x, y = parquet(file, names[0] if len(names) == 1 else names, self.y.names[0])
            x = x.astype(np.float32) if self.x.kind == "f" else x
            return (x.reshape(len(x), *self.x.shape) if x[:1].size == math.prod(self.x.shape) else x), y
        if (file := folder / f"{part}.txt").is_file() and self.x.shape:
            return TextWindows(file, self.x.shape[0])
        if (folder / part).is_dir():
            return ImageFolder(folder / part, self.x.shape[-2:] if len(self.x.shape) == 3 else None)
        raise ConfigurationError(
            f"{folder} has no data of {part}; put there {part}_x.npy and {part}_y.npy, {part}.parquet, {part}.txt, or "
            f"a folder {part} with a folder of images for each class"
        )


def facts_of(folder: Path | str) -> dict[str, str]:
    """Return a digest by which a run notices other data in a folder.

    It covers names and sizes of all files, and of at most `PIECES` files, evenly spaced, at most `PIECES` pieces of
    `PIECE` bytes each, so that at most 16 MiB are read. Values that change elsewhere are not noticed.
    """
    place = Path(folder)
    files = sorted(file for file in place.rglob("*") if file.is_file())
    found = hashlib.sha256("".join(f"{file.relative_to(place)} {file.stat().st_size}\n" for file in files).encode())
    for file in files[:: -(-len(files) // PIECES) or 1]:
        size = file.stat().st_size
        with file.open("rb") as opened:
            for start in range(0, size, max(PIECE, -(-size // PIECES))):
                opened.seek(start)
                found.update(opened.read(PIECE))
    return {"data": found.hexdigest()[:16]}


def notices(folder: Path | str, samples: int, in_a_step: int) -> list[str]:
    """Return sentences on data in a folder that are trained on, but perhaps not as they should be.

    Args:
        folder: the folder.
        samples: number of training samples.
        in_a_step: number of samples that all workers together use in a step.
    """
    file, said = Path(folder) / "train_x.npy", list[str]()
    if file.is_file() and np.load(file, mmap_mode="r").dtype == np.float64:
        said.append(f"the inputs in {folder} are float64, and were rounded to the dtype of the model; save them in it")
    if samples < in_a_step:
        said.append(
            f"{folder} has {samples} training samples, and the workers use {in_a_step} in a step, some of them several "
            "times; use fewer workers or a smaller batch"
        )
    return said


def _loaded(file: Path) -> Any:
    try:
        return np.load(file, allow_pickle=False)
    except (ValueError, EOFError):
        raise ConfigurationError(
            f"{file} must be an array of numbers that numpy.save wrote, got another or a damaged file; write it with "
            "numpy.save"
        ) from None


def _array(values: Any) -> Any:
    """Return a column as an array; of samples that are read when they are needed, some, evenly spaced."""
    if isinstance(values, SampleColumn):
        count = min(TRIED, len(values))
        values = values[np.arange(count) * len(values) // count]
    return values.detach().cpu().numpy() if is_tensor(values) else np.asarray(values)


def _kind(values: Any) -> str:
    kind: str = values.dtype.kind
    return "i" if kind == "u" else kind
