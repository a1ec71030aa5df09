"""Lays out a pytree of JAX arrays as one flat numpy array."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flockstep.arrays.kernels import FLOATS
from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import ConfigurationError

Tree = Any
"""A JAX pytree: arrays in nested containers, such as dicts, lists and modules."""


class FlatTree:
    """The layout of a pytree of parameters in a flat array: its leaves are the tensors, in JAX's order."""

    def __init__(self, tree: Tree):
        """Take names, shapes, dtypes and devices from `tree`; raise `ConfigurationError` if a leaf is no floating-point
        array, lies on several devices, or JAX would round it.
        """
        paths, self.structure = jax.tree_util.tree_flatten_with_path(tree)
        named = {_name(path): leaf for path, leaf in paths}
        if len(named) < len(paths):
            twice = next(name for name, count in Counter(_name(path) for path, _ in paths).items() if count > 1)
            raise ConfigurationError(f"every parameter must have a different name, got {twice!r} twice; rename a key")
        for name, leaf in named.items():
            _require_parameter(name, leaf)
        leaves = {name: jnp.asarray(leaf) for name, leaf in named.items()}
        self.schema = Schema.of(
            {name: leaf.shape for name, leaf in leaves.items()},
            {name: leaf.dtype.name for name, leaf in leaves.items()},
        )
        self._dtypes = [leaf.dtype for leaf in leaves.values()]
        self._places = [leaf.sharding for leaf in leaves.values()]

    def write(self, tree: Tree, flat: FlatArray, what: str = "the parameters") -> None:
        """Copy the leaves of `tree`, called `what` in errors, into the flat array (K,); raise `ConfigurationError` if
        structure or shapes differ from those of the parameters, or `tree` is being traced.
        """
        leaves, structure = jax.tree.flatten(tree)
        if structure != self.structure:
            raise ConfigurationError(
                f"{what} must be a tree with the structure of the parameters, {self.structure}, got {structure}; "
                "pass the tree that belongs to these parameters"
            )
        for entry, leaf, view in zip(self.schema.entries, leaves, self.schema.views(flat).values(), strict=True):
            if isinstance(leaf, jax.core.Tracer):
                raise ConfigurationError(
                    f"{what} must be arrays, got a traced value for {entry.name}; call flockstep outside jax.jit, and "
                    "compile only the function that computes the gradients"
                )
            values = np.asarray(leaf)
            if values.shape != entry.shape:
                raise ConfigurationError(
                    f"{what} must have {entry.name} of shape {entry.shape}, got {values.shape}; pass the tree "
                    "that belongs to these parameters"
                )
            view[...] = values

    def read(self, flat: FlatArray) -> Tree:
        """Return a tree of new arrays with the values of the flat array (K,), each on its leaf's device."""
        views = zip(self.schema.views(flat).values(), self._dtypes, strict=True)
        # A copy first: on the CPU a JAX array may share the memory of the numpy array that it is made of.
        leaves = jax.device_put([np.array(view, dtype) for view, dtype in views], self._places)
        return jax.tree.unflatten(self.structure, leaves)

    def unflatten(self, flat: jax.Array, narrow: bool = True) -> Tree:
        """Return the tree for a flat JAX array (K,), traced or not; without `narrow`, in the array's dtype."""
        dtypes = self._dtypes if narrow else [flat.dtype] * len(self._dtypes)
        parts = zip(self.schema.entries, self.schema.slices, dtypes, strict=True)
        leaves = [flat[part].reshape(entry.shape).astype(dtype) for entry, part, dtype in parts]
        return jax.tree.unflatten(self.structure, leaves)

    def flatten(self, tree: Tree) -> jax.Array:
        """Return the leaves of `tree` as one JAX array (K,), traced or not."""
        return jnp.concatenate([leaf.reshape(-1).astype(self.schema.dtype) for leaf in jax.tree.leaves(tree)])


def _name(path: Any) -> str:
    """Return the name of a leaf, such as `layers.0.kernel`; a leaf that is the whole tree is `w`."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value") or "w"


def _require_parameter(name: str, leaf: Any) -> None:
    dtype = getattr(getattr(leaf, "dtype", None), "name", type(leaf).__name__)
    if dtype not in FLOATS:
        raise ConfigurationError(
            f"parameter {name} must be an array of {', '.join(FLOATS)}, got {dtype}; leave arrays that are not "
            "trained out of the tree"
        )
    if dtype == "float64" and not jax.config.read("jax_enable_x64"):
        raise ConfigurationError(
            f"parameter {name} is float64, which JAX would round to float32; call "
            'jax.config.update("jax_enable_x64", True) first, or convert the parameters to float32'
        )
    if isinstance(leaf, jax.core.Tracer):
        raise ConfigurationError(
            f"parameter {name} must be an array, got a traced value; call flockstep outside jax.jit"
        )
    devices = leaf.devices() if isinstance(leaf, jax.Array) else ()
    if len(devices) > 1:
        raise ConfigurationError(
            f"parameter {name} must be on one device, got {len(devices)} devices; start one worker per device, with "
            "flockstep launch -n"
        )
