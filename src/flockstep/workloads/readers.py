"""Readers of files for `flockstep.Data.of`: text, folders of images, Hugging Face data sets, Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flockstep.errors import ConfigurationError
from flockstep.workloads.base import require_module

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm")


@dataclass(frozen=True, eq=False)
class TextWindows:
    """Consecutive windows of the bytes of a text file, for models that predict the next byte.

    Sample i is x = bytes i·length … (i+1)·length − 1 and y = the same window shifted by one byte, both int64 (length,).
    The file is mapped into memory, and its pages are read when they are needed.

    Args:
        file: path of the file.
        length: number of bytes in a window.

    Raises:
        ConfigurationError: the file is too short for one window.
    """

    file: Path | str
    length: int

    def __post_init__(self) -> None:
        if self.length < 1 or len(self) < 1:
            raise ConfigurationError(
                f"windows must have at least one byte and fewer bytes than the file, got windows of {self.length} "
                f"bytes and a file of {len(self._bytes)} bytes ({self.file}); use a length between"
            )

    @cached_property
    def _bytes(self) -> npt.NDArray[np.uint8]:
        if not Path(self.file).is_file() or not Path(self.file).stat().st_size:
            raise ConfigurationError(
                f"there is no text in the file {self.file}; give the path of a file that is not empty"
            )
        return np.memmap(self.file, np.uint8, "r")

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // max(self.length, 1)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        window = np.array(self._bytes[index * self.length : (index + 1) * self.length + 1], np.int64)
        return window[:-1], window[1:]


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """Images in one subfolder for each class: `folder/cat/1.png`; classes are numbered in the order of their names.

    Sample i is x float32 (3, height, width) with values in [0, 1], and y the number of its class. An image is read when
    it is needed.

    Args:
        folder: path of the folder.
        size: (height, width) to which images are resized; None if all images have the same size.

    Raises:
        ConfigurationError: the folder has no images, or an image has more than 8 bits per color.
        MissingDependency: Pillow is not installed.
    """

    folder: Path | str
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        require_module("PIL", "readers", "reading images")
        if not self._files:
            raise ConfigurationError(
                f"{self.folder} holds no images, got none of {', '.join(SUFFIXES)} in a subfolder; put the images of "
                "each class into a subfolder"
            )

    @cached_property
    def classes(self) -> list[str]:
        """Names of the classes, which are the names of the subfolders, in alphabetical order."""
        return sorted({file.parent.name for file in self._files})

    @cached_property
    def targets(self) -> list[int]:
        """Index of the class of every image, in order of the images."""
        numbers = {name: number for number, name in enumerate(self.classes)}
        return [numbers[file.parent.name] for file in self._files]

    @cached_property
    def _files(self) -> list[Path]:
        return sorted(file for file in Path(self.folder).glob("*/*") if file.suffix.lower() in SUFFIXES)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        from PIL import Image

        with Image.open(self._files[index]) as image:
            if image.mode in ("I", "F") or image.mode.startswith("I;"):
                raise ConfigurationError(
                    f"{self._files[index]} must have 8 bits per color, got an image of mode {image.mode}, whose values "
                    "would be cut off at 255; convert it to 8 bits, or write a data set that scales its values"
                )
            shown = image.convert("RGB")
            if self.size is not None:
                shown = shown.resize(self.size[::-1])
            pixels = np.asarray(shown, np.float32) / np.float32(255)
        return pixels.transpose(2, 0, 1), self.targets[index]


class columns:  # noqa: N801 - called like a function
    """Return samples (row[x], row[y]) from rows that are mappings, such as the rows of a Hugging Face data set.

    Raises:
        ConfigurationError: the rows have no such columns.
    """

    def __init__(self, rows: Any, x: str, y: str):
        self._rows, self._x, self._y = rows, x, y
        names = sorted(rows[0]) if len(rows) else []
        for name in (x, y):
            if len(rows) and name not in names:
                raise ConfigurationError(f"the rows have no column {name!r}, got {', '.join(names)}; name one of these")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row = self._rows[index]
        return row[self._x], row[self._y]


class _HuggingFace(columns):
    @cached_property
    def targets(self) -> Any:
        return np.asarray(self._rows[:][self._y])


def hugging_face(folder: Path | str, x: str, y: str) -> columns:
    """Return the samples of a Hugging Face data set that `save_to_disk` wrote. Rows are read when they are needed.

    Args:
        folder: folder of one data set, such as the `train` of a `DatasetDict`.
        x: column of the inputs.
        y: column of the targets.

    Raises:
        ConfigurationError: the folder holds no data set, or several, or the data set lacks a column.
        MissingDependency: `datasets` is not installed.
    """
    require_module("datasets", "readers", "reading Hugging Face data sets")
    import datasets

    try:
        found = datasets.load_from_disk(str(folder))
    except FileNotFoundError as error:
        raise ConfigurationError(f"{folder} holds no data set of save_to_disk: {error}; check the path") from None
    if not isinstance(found, datasets.Dataset):
        raise ConfigurationError(
            f"{folder} holds several data sets, got {', '.join(sorted(found))}; name the folder of one of these"
        )
    rows = found.select_columns([x, y]) if {x, y} <= set(found.column_names) else found
    return _HuggingFace(rows.with_format("numpy"), x, y)


def parquet(file: Path | str, x: str | Sequence[str], y: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return inputs and targets from a Parquet file, or from a folder of such files. The named columns are read into
    memory.

    Args:
        file: path of the file or folder.
        x: columns of the inputs: names of columns of numbers, or one column of lists of equal length.
        y: column of the targets.

    Raises:
        ConfigurationError: a column is missing, has missing values, holds something other than numbers, or has lists of
            different lengths.
        MissingDependency: pyarrow is not installed.
    """
    require_module("pyarrow", "readers", "reading Parquet")
    import pyarrow.parquet

    names = [x] if isinstance(x, str) else list(x)
    known = pyarrow.parquet.ParquetDataset(str(file)).schema.names
    for name in (*names, y):
        if name not in known:
            raise ConfigurationError(f"{file} has no column {name!r}, got {', '.join(known)}; name one of these")
    table = pyarrow.parquet.read_table(str(file), columns=[*names, y])
    found = [_array(table[name], name, file) for name in names]
    return found[0] if isinstance(x, str) else np.column_stack(found), _array(table[y], y, file)


def _array(column: Any, name: str, file: Path | str) -> npt.NDArray[Any]:
    """A column of numbers (rows,), or of lists of numbers (rows, length)."""
    import pyarrow as pa

    if column.null_count:
        raise ConfigurationError(
            f"column {name!r} of {file} must have a value in every row, got {column.null_count} missing; fill or drop "
            "these rows"
        )
    whole = column.combine_chunks()
    values = whole.flatten() if isinstance(whole, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)) else whole
    if values.null_count:
        raise ConfigurationError(
            f"the lists of column {name!r} of {file} must have no missing values, got {values.null_count}; fill them "
            "or drop these rows"
        )
    lengths = {len(row) for row in whole} if values is not whole else set()
    if len(lengths) > 1:
        raise ConfigurationError(
            f"the lists of column {name!r} of {file} must have one length, got {min(lengths)} to {max(lengths)}; pad "
            "or cut them"
        )
    found: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    if found.dtype.kind not in "biuf":
        raise ConfigurationError(
            f"column {name!r} of {file} must hold numbers or lists of numbers, got {whole.type}; store numbers there, "
            "such as the number of each class"
        )
    return found.reshape(len(whole), *lengths)
