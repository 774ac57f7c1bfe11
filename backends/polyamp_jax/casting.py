"""Casting by role, and splitting a parameter tree into what is differentiated and what is not.

Rules (docs/spec.md, sections 2 and 5)
- Only floating leaves are ever cast: integers, bools, PRNG keys and complex numbers stay as they are.
- Masters are fresh, strongly typed float32 arrays: a donated state never takes the caller's own arrays with it.
- Leaves that have no gradient are None in a gradient tree, as in equinox; optax treats None as an empty subtree.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyamp.errors import MisuseError

__all__ = ["cast_floating", "combine", "differentiable", "masters", "strong"]


def cast_floating(tree: Any, dtype: Any) -> Any:
    """Casts the floating array leaves of a tree.

    Args:
        tree: any pytree. Python numbers stay as they are: they take the dtype of what they meet.
        dtype: target, such as `"float16"`.
    """
    target = jnp.dtype(dtype)

    def cast(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.asarray(leaf).astype(target)

    return jax.tree.map(cast, tree)


def strong(tree: Any) -> Any:
    """Makes every leaf a strongly typed array of the dtype that it has, so that a step never changes the type of a carried state."""
    return jax.tree.map(lambda leaf: _strong(jnp.asarray(leaf)), tree)


def _strong(array: Any) -> Any:
    return array.astype(array.dtype) if getattr(array, "weak_type", False) else array


def masters(params: Any) -> Any:
    """Authoritative copies of parameters: floating leaves in float32, others in their own dtype; every leaf a new array.

    Raises:
        MisuseError: a leaf that is neither an array nor a number.
    """

    def master(path: Any, leaf: Any) -> Any:
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float, complex)):
            raise MisuseError(
                f"params{jax.tree_util.keystr(path)} is a {type(leaf).__name__}, expected an array or a number; "
                "separate arrays from the rest of the model first (equinox: eqx.partition(model, eqx.is_array); flax nnx: nnx.split)"
            )
        array = jnp.array(leaf, copy=True)
        return array.astype(jnp.float32) if jnp.issubdtype(array.dtype, jnp.floating) else _strong(array)

    return jax.tree_util.tree_map_with_path(master, params)


def differentiable(params: Any) -> Any:
    """The tree with None in place of every leaf that has no gradient."""
    return jax.tree.map(lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else None, params)


def combine(trainable: Any, params: Any) -> Any:
    """Inverse of `differentiable`: fills its Nones from `params`."""
    return jax.tree.map(lambda new, old: old if new is None else new, trainable, params, is_leaf=lambda x: x is None)
