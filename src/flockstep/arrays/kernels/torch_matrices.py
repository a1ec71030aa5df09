"""Low-rank factors and cosine transforms of matrices, for torch."""

from __future__ import annotations

import numpy as np
import torch

from flockstep.arrays.kernels import name_of, numpy_matrices


def gaussian(like: torch.Tensor, rows: int, columns: int, seed: int | tuple[int, ...]) -> torch.Tensor:
    """Return a tensor (rows, columns) of standard normal numbers in the dtype of `like`; equal seeds give equal
    numbers.
    """
    drawn = torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, columns)))
    return drawn.to(like.device, like.dtype)


def times(matrix: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the product of a matrix (n, m) and a few columns (m, r)."""
    return matrix @ columns


def times_transposed(matrix: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the product of the transpose of a matrix (n, m) and a few columns (n, r)."""
    return matrix.T @ columns


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis (n, r), r ≤ n, whose first columns span those of `matrix`, in the dtype of `matrix`.

    numpy computes the basis, because the factors are small.
    """
    basis = numpy_matrices.orthonormal(matrix.detach().cpu().numpy())
    return torch.from_numpy(basis).to(matrix.device, matrix.dtype)


def add_product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> None:
    """Add scale · left (n, r) · rightᵀ (r, m) to `out` (n·m,), with every element of the product summed in the order of
    the columns.

    Values beyond the range of the dtype of `out` become infinite.
    """
    block = left[:, :1] * right[:, 0]
    for index in range(1, right.shape[1]):
        block += left[:, index : index + 1] * right[:, index]
    out += (block if scale == 1 else block * scale).reshape(-1).to(out.dtype)


def cosines(like: torch.Tensor, size: int) -> torch.Tensor:
    """Return the matrix (size, size) of the orthonormal DCT-II in the dtype of `like`; each row is one frequency."""
    wide = numpy_matrices.cosines(np.empty(0, name_of(like)), size)
    return torch.tensor(wide, dtype=like.dtype, device=like.device)


def tiles(matrix: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Cut a matrix into tiles, left to right and top to bottom; return a tensor of shape (tiles, height, width)."""
    rows, columns = matrix.shape
    cut = matrix.reshape(rows // height, height, columns // width, width)
    return cut.permute(0, 2, 1, 3).reshape(-1, height, width)


def untiled(tiles: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the matrix that has the given tiles, left to right and top to bottom; the inverse of `tiles`."""
    height, width = tiles.shape[1:]
    cut = tiles.reshape(rows // height, columns // width, height, width)
    return cut.permute(0, 2, 1, 3).reshape(rows, columns)


def packed_integers(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack flat integers from 0 to 2^bits - 1 into `bits` bits each, lowest bit first; the last byte is filled up with
    zero bits.
    """
    shifts = torch.arange(bits, device=numbers.device)
    ones = ((numbers.to(torch.int64)[:, None] >> shifts) & 1).reshape(-1)
    ones = torch.nn.functional.pad(ones, (0, -len(ones) % 8)).reshape(-1, 8)
    return (ones << torch.arange(8, device=numbers.device)).sum(1).to(torch.uint8)


def unpacked_integers(data: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """Return the first `count` integers of `bits` bits each that `packed_integers` has packed into `data`."""
    ones = ((data.to(torch.int64)[:, None] >> torch.arange(8, device=data.device)) & 1).reshape(-1)
    ones = ones[: count * bits].reshape(count, bits)
    return (ones << torch.arange(bits, device=data.device)).sum(1)
