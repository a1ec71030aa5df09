"""The job of predicting the next character of Python's standard library, with a small network in plain numpy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import Model, Views, cross_entropies, cross_entropy
from flockstep.workloads.charlm import SYMBOLS, encoded, library

CONTEXT = 4
WIDTH = 12
HIDDEN = 48
CHARACTERS = 120_000
HELD_OUT = 6_000


class NextCharacter(Model):
    """A network that predicts a character from the four before it: embedded characters → 48 rectified units → logits
    (Bengio et al. 2003, figure 1).
    """

    dtype = "float32"

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name → shape of the parameters: the embedding, and the weights and biases of two layers."""
        inner = CONTEXT * WIDTH
        return {"E": (SYMBOLS, WIDTH), "W": (inner, HIDDEN), "b": (HIDDEN,), "V": (HIDDEN, SYMBOLS), "c": (SYMBOLS,)}

    def initial(self, random: np.random.Generator) -> Views:
        """Return normally distributed embeddings, weights of variance 2 / inputs, and zero biases."""
        return {
            name: random.standard_normal(shape) * (1.0 if name == "E" else (2 / shape[0]) ** 0.5)
            if len(shape) == 2
            else np.zeros(shape)
            for name, shape in self.shapes.items()
        }

    def gradients(self, params: Views, x: FlatArray, y: FlatArray, out: Views) -> FlatArray:
        """Write the gradients, computed by backpropagation, to `out`, and return the losses.

        The gradient of the embedding is a product with the one-hot characters.
        """
        codes = np.asarray(x, np.int64).reshape(len(x), -1)
        units = (codes[..., None] == np.arange(SYMBOLS)).astype(self.dtype)
        inputs = (units @ params["E"]).reshape(*x.shape[:2], -1)
        hidden = np.maximum(inputs @ params["W"] + params["b"][:, None], 0)
        losses, error = cross_entropies(hidden @ params["V"] + params["c"][:, None], np.asarray(y, np.int64))
        np.matmul(hidden.transpose(0, 2, 1), error, out=out["V"])
        np.sum(error, axis=1, out=out["c"])
        error = (error @ params["V"].transpose(0, 2, 1)) * (hidden > 0)
        np.matmul(inputs.transpose(0, 2, 1), error, out=out["W"])
        np.sum(error, axis=1, out=out["b"])
        error = (error @ params["W"].transpose(0, 2, 1)).reshape(len(x), -1, WIDTH)
        np.matmul(units.transpose(0, 2, 1), error, out=out["E"])
        return losses

    def outputs(self, params: Views, x: FlatArray) -> FlatArray:
        """Return the logits of N samples, of shape (N, 96)."""
        inputs = params["E"][np.asarray(x, np.int64)].reshape(len(x), -1)
        logits: FlatArray = np.maximum(inputs @ params["W"] + params["b"], 0) @ params["V"] + params["c"]
        return logits

    def loss(self, params: Views, outputs: FlatArray, y: FlatArray) -> float:
        return cross_entropy(outputs, np.asarray(y, np.int64))


def characters_job(optimizer: str, batch: int) -> Job:
    """Return the job that predicts a character from the four characters before it; the run's seed determines weights
    and sample order.
    """

    def data() -> Data:
        text = b"".join(file.read_bytes() for file in library()[:40])
        codes = encoded(text)[:CHARACTERS]
        x = np.lib.stride_tricks.sliding_window_view(codes, CONTEXT)[:-1]
        y = codes[CONTEXT:]
        order = np.random.default_rng(0).permutation(len(x) - HELD_OUT)
        return Data(x[order], y[order], x[-HELD_OUT:], y[-HELD_OUT:])

    def likelihood(outputs: FlatArray, targets: FlatArray) -> float:
        """Mean cross-entropy, in nats per character."""
        return NextCharacter().loss({}, outputs, targets)

    return Job(
        NextCharacter, data, optimizer, metric=likelihood, higher_is_better=False, batch=batch, name="characters"
    )
