"""Applier: one call of the optimizer with given gradients, on either side of the compile boundary.

Rules
- "eager" calls `optimizer.apply` as a custom loop would.
- "compiled" is `tf.function` round `apply` on TensorFlow and `jax.jit` round `stateless_apply` on JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from polyamp.backend import Execution
from polyamp_keras.loss_scale_optimizer import LossScaleOptimizer
from polyamp_keras.native import BACKEND, compiled

__all__ = ["make_applier"]


def make_applier(optimizer: LossScaleOptimizer, variables: Sequence[Any], execution: Execution) -> Callable[[Sequence[Any]], None]:
    """Function of the gradients, numpy arrays in the order of `variables`, that takes one step."""
    optimizer.build(list(variables))
    if execution == "compiled" and BACKEND == "jax":
        pure = compiled(optimizer.stateless_apply)

        def step(gradients: Any) -> None:
            values, state = pure([v.value for v in optimizer.variables], gradients, [v.value for v in variables])
            for variable, value in zip([*variables, *optimizer.variables], [*values, *state], strict=True):
                variable.assign(value)
    elif execution == "compiled":
        step = compiled(lambda gradients: optimizer.apply(gradients, variables))
    else:

        def step(gradients: Any) -> None:
            optimizer.apply(gradients, variables)

    return lambda gradients: step([ops.convert_to_tensor(gradient, dtype="float32") for gradient in gradients])
