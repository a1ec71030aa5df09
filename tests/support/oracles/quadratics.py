"""Unequal quadratics f_i(w) = ½ (w - b_i)ᵀ A_i (w - b_i), on which the oracles check themselves."""

from dataclasses import dataclass

import numpy as np

from support.oracles.interfaces import Array


@dataclass(frozen=True)
class Quadratics:
    """Clients' functions: `A` of shape (clients, d, d), symmetric positive definite, and `b` of shape (clients, d)."""

    A: Array
    b: Array

    def gradient(self, client: int, w: Array, step: int = 0) -> Array:
        """A_i (w - b_i), exact at every step."""
        return np.asarray(self.A[client] @ (w - self.b[client]))

    def optimum(self, weights: Array | None = None) -> Array:
        """Minimizer of Σ p_i f_i, with p_i equal unless `weights` are given."""
        p = np.ones(len(self.b)) if weights is None else weights
        return np.linalg.solve(np.einsum("i,ijk->jk", p, self.A), np.einsum("i,ijk,ik->j", p, self.A, self.b))

    def mean_gradient(self, w: Array) -> Array:
        """Mean of the clients' gradients at w."""
        return np.asarray(np.mean([self.gradient(client, w) for client in range(len(self.b))], axis=0))


def quadratics(clients: int, d: int, rng: np.random.Generator) -> Quadratics:
    """Random quadratics with eigenvalues between 0.5 and 2 and different minimizers."""
    bases = [np.linalg.qr(rng.normal(size=(d, d)))[0] for _ in range(clients)]
    A = np.stack([Q @ np.diag(rng.uniform(0.5, 2.0, d)) @ Q.T for Q in bases])
    return Quadratics(A, rng.normal(size=(clients, d)))
