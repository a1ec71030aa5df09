"""The order in which a worker draws its samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flockstep.errors import ConfigurationError, require
from flockstep.frameworks.base import Indices

_STREAM = 0x5A3B
"""Spawn key that separates the samplers' random numbers from others drawn with the same seed."""


BLOCK = 1024
"""Number of samples that are permuted at a time, which spares random generators for small shards."""


@dataclass(frozen=True)
class SamplerState:
    """Position of a sampler: blocks of permutations used up, and samples used of the current block."""

    block: int = 0
    position: int = 0


class Sampler:
    """A worker's endless stream of batches: the worker's shard `indices` in a new random order each epoch, cut into
    consecutive batches.

    A batch that reaches the end of a permutation continues with the next permutation, so every batch is full and every
    sample is drawn equally often, even from a shard smaller than a batch. The order depends only on seed and rank.
    """

    def __init__(
        self, indices: Indices, batch: int, seed: int, rank: int, state: SamplerState = SamplerState()
    ) -> None:
        """Begin at a position of the stream, which `restore` checks."""
        if len(indices) == 0:
            raise ConfigurationError(f"the shard of worker {rank} must hold >= 1 sample, got 0; use fewer workers")
        require(batch >= 1, "batch", ">= 1", batch, "use 1 for single samples")
        require(seed >= 0 and rank >= 0, "seed and rank", ">= 0", f"{seed} and {rank}", "use for example 0")
        self._indices = np.asarray(indices, dtype=np.int64)
        self._batch, self._seed, self._rank = batch, seed, rank
        self._repeats = max(1, BLOCK // len(self._indices))
        self._block: int
        self._position: int
        self._order: Indices
        self.restore(state)

    def next(self, batch: int | None = None) -> Indices:
        """Return the sample indices of the next batch, int64 (batch,), perhaps a view that must not be written to."""
        size = self._batch if batch is None else batch
        whole = self.peek(size)
        if whole is not None:
            self._position += size
            return whole
        parts, missing = [], size
        while missing:
            if self._position == len(self._order):
                self._block, self._position = self._block + 1, 0
                self._order = self._permutations(self._block)
            part = self._order[self._position : self._position + missing]
            parts.append(part)
            self._position += len(part)
            missing -= len(part)
        return np.concatenate(parts)

    def peek(self, batch: int) -> Indices | None:
        """Return the next `batch` indices without drawing them; None if another permutation would begin."""
        end = self._position + batch
        return self._order[self._position : end] if end <= len(self._order) else None

    def state(self) -> SamplerState:
        """Return the position of the sampler in its stream of batches."""
        return SamplerState(self._block, self._position)

    def restore(self, state: SamplerState) -> None:
        """Continue as the sampler from which `state` was taken; the state of a larger shard is refused."""
        size = self._repeats * len(self._indices)
        if not (state.block >= 0 and 0 <= state.position <= size):
            raise ConfigurationError(
                f"position must be in [0, {size}] and block must be >= 0, got {state}; restore the state "
                "on the shard from which it was saved"
            )
        self._block, self._position = state.block, state.position
        self._order = self._permutations(state.block)

    def _permutations(self, block: int) -> Indices:
        stream = np.random.SeedSequence(self._seed, spawn_key=(_STREAM, self._rank, block))
        rows = self._indices[None].repeat(self._repeats, axis=0)
        return np.random.default_rng(stream).permuted(rows, axis=1).reshape(-1)


def steps_for(epochs: float, train_size: int, workers: int, batch: int) -> int:
    """Return the steps, at least 1, in which all workers together draw the training set `epochs` times."""
    require(0 < epochs < math.inf, "epochs", "> 0 and finite", epochs, "use for example 10")
    for name, value in (("train_size", train_size), ("workers", workers), ("batch", batch)):
        require(value >= 1, name, ">= 1", value, "use for example 1")
    # A product such as 0.1 × 30 that exceeds an integer by rounding alone must not cost a step.
    return max(1, math.ceil(epochs * train_size / (workers * batch) - 1e-9))
