"""The few places where the three Keras backends need different code. Each backend's package is imported only where it is in use.

Rules
- `branch` runs one of two functions: in Python where the flag is a concrete value, as a traced conditional elsewhere. JAX would otherwise
  trace and compile both sides anew in every eager step.
- Under a tf.distribute strategy of several replicas the verdict is reduced over the replicas before anything reads it.
- `compiled` is the backend's own compile boundary: `jax.jit`, `tf.function`; torch has none here, and the function comes back as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

__all__ = ["BACKEND", "branch", "compiled", "host", "in_merge_call_strategy", "merge_replicas", "reduce_over_replicas"]

Tensor = Any

BACKEND: str = keras.backend.backend()


def branch(flag: Tensor, when_true: Callable[[], Any], when_false: Callable[[], Any]) -> Any:
    """One of two functions' results; both must return the same structure of tensors.

    Args:
        flag: bool, 0-d.
    """
    if BACKEND == "jax":
        import jax

        if not isinstance(flag, jax.core.Tracer):
            return when_true() if bool(flag) else when_false()
    return ops.cond(flag, when_true, when_false)


def host(variable: Any) -> Any:
    """Copy of a Keras variable's value as a numpy array. Waits for the device."""
    # Through the tensor: numpy 2 warns about the variable's own __array__.
    return np.array(ops.convert_to_numpy(variable.value))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind the backend's compile boundary."""
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    return function


def in_merge_call_strategy() -> bool:
    """Whether `apply` runs on a replica of a strategy that updates variables across replicas (MirroredStrategy on several devices).

    Raises:
        RuntimeError: the call is made outside of a replica's context.
    """
    if BACKEND != "tensorflow":
        return False
    import tensorflow as tf

    if tf.distribute.in_cross_replica_context():
        raise RuntimeError("apply() was called across replicas; call it inside the function that strategy.run() runs on each replica")
    return not tf.__internal__.distribute.strategy_supports_no_merge_call()


def reduce_over_replicas(finite: Tensor) -> Tensor:
    """Verdict of all replicas, seen on each of them; the verdict itself where there is one replica."""
    if BACKEND != "tensorflow":
        return finite
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return finite
    overflowed = tf.cast(tf.logical_not(finite), tf.float32)
    return tf.equal(context.all_reduce(tf.distribute.ReduceOp.SUM, overflowed), 0.0)


def merge_replicas(
    gradients: list[Tensor | None],
    verdict: Callable[[list[Tensor | None]], Tensor],
    take: Callable[[list[Tensor | None]], Tensor],
    skip: Callable[[list[Tensor | None]], Tensor],
    finish: Callable[[Tensor, Tensor], None],
) -> None:
    """The step under a strategy that updates across replicas, where a conditional must stand outside of the replicas' own functions.

    Args:
        gradients: this replica's gradients.
        verdict: gradients -> bool, 0-d, run on each replica.
        take: gradients -> reason code, run on each replica when every verdict holds.
        skip: gradients -> reason code, run on each replica otherwise.
        finish: (verdict, reason code), run on each replica after either.
    """
    import tensorflow as tf

    def across(strategy: Any, per_replica: Any) -> None:
        extended, local = strategy.extended, strategy.experimental_local_results
        finite = tf.reduce_all(tf.stack(local(extended.call_for_each_replica(verdict, args=(per_replica,)))))

        def everywhere(function: Callable[..., Tensor]) -> Callable[[], Tensor]:
            return lambda: tf.reduce_max(tf.stack(local(extended.call_for_each_replica(function, args=(per_replica,)))))

        code = tf.cond(finite, everywhere(take), everywhere(skip))
        extended.call_for_each_replica(finish, args=(finite, code))

    tf.distribute.get_replica_context().merge_call(across, args=(gradients,))
