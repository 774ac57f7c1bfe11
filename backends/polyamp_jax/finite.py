"""Finiteness of a tree of arrays, and choosing between two trees by a flag. Pure functions, made for use inside `jax.jit`.

Rules (docs/spec.md, section 4)
- A leaf that can't be infinite (integer, bool, PRNG key, None) counts as finite; so does an empty leaf and an empty tree.
- The check is exact: large finite values never count as infinite, which a test of their sum would do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array

__all__ = ["INF", "NAN", "all_finite", "gradient_status", "leaf_names", "select"]

Tree = TypeVar("Tree")

INF, NAN = 1, 2
"""Bits of `gradient_status`."""


def _checked(tree: Any) -> list[Array]:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    return [jnp.asarray(leaf) for leaf in leaves]


def _any(mask: Array) -> Array:
    # A maximum of bytes is exact and vectorises in XLA, where a reduction of bools does not (2.6 times slower on a CPU), and max(|x|)
    # is not to be trusted: the CPU backend of jaxlib 0.10 loses a NaN in it.
    return jnp.max(mask.astype(jnp.uint8)) > jnp.uint8(0)


def all_finite(tree: Any) -> Array:
    """Whether every value of every floating or complex leaf is finite.

    Args:
        tree: any pytree, such as raw scaled gradients.

    Returns:
        Bool, 0-d. One pass over the leaves, no host synchronisation.
    """
    flags = [jnp.min(jnp.isfinite(leaf).astype(jnp.uint8)) > jnp.uint8(0) for leaf in _checked(tree) if leaf.size]
    return jnp.all(jnp.stack(flags)) if flags else jnp.ones((), jnp.bool_)


def gradient_status(grads: Any) -> Array:
    """What each leaf holds, for `TraceRecorder.record`: a few bytes that a jitted step can return beside its state.

    Args:
        grads: gradients as `value_and_grad` returned them, scaled.

    Returns:
        uint8, (leaves,): 0 for a finite leaf, else the sum of 1 (has an infinity) and 2 (has a NaN). Order and names: `leaf_names`.
    """
    leaves = _checked(grads)
    if not leaves:
        return jnp.zeros((0,), jnp.uint8)
    zero = jnp.zeros((), jnp.bool_)
    inf = jnp.stack([_any(jnp.isinf(leaf)) if leaf.size else zero for leaf in leaves])
    nan = jnp.stack([_any(jnp.isnan(leaf)) if leaf.size else zero for leaf in leaves])
    return inf.astype(jnp.uint8) * jnp.uint8(INF) + nan.astype(jnp.uint8) * jnp.uint8(NAN)


def leaf_names(tree: Any) -> tuple[str, ...]:
    """Paths of the floating and complex leaves, such as `"encoder/0/kernel"`, in the order of `gradient_status`."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return tuple("/".join(map(_key, path)) for path, leaf in paths if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def _key(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def select(flag: Array | bool, on_true: Tree, on_false: Tree) -> Tree:
    """Chooses between two trees of one structure, leaf by leaf, by a 0-d flag. Nothing of the other tree leaks, NaN included."""
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), on_true, on_false)
