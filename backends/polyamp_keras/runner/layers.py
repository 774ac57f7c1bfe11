"""Layers of a `TrainingTask`, as a Keras user would write them: a `Dense` with a few lines of its own.

Rules (docs/spec.md, section 9.2)
- Kernel and bias are read in float32 and cast here: Keras' autocast would hand out the bias in 16 bits already.
- The bias is cast, broadcast in float32 and cast again, so that its gradient is reduced in float32 and then rounded; the stock layer
  reduces in 16 bits on JAX and TensorFlow.
- Snapping follows the cast, and its gradient passes straight through.
- tanh is evaluated in float32 and rounded; its derivative is taken at the rounded value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from polyamp.task import Dense, Snap

__all__ = ["TaskDense"]

Tensor = Any


class TaskDense(keras.layers.Dense):
    """`activation(x @ w + b)` by the recipe of section 9.2.

    Args:
        spec: the layer.
        units: outputs.
        dtype: Keras dtype policy.
    """

    def __init__(self, spec: Dense, units: int, *, dtype: str) -> None:
        super().__init__(units, use_bias=spec.bias is not None, dtype=dtype)
        self._snap = _snapper(spec.snap) if spec.snap is not None else None
        self._activate = {None: _identity, "relu": ops.relu, "tanh": ops.custom_gradient(_tanh)}[spec.activation]

    def add_weight(self, *args: Any, **kwargs: Any) -> Any:
        return super().add_weight(*args, **{**kwargs, "autocast": False})

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        x = ops.cast(inputs, self.compute_dtype)
        kernel = ops.cast(self.kernel, self.compute_dtype)
        if self._snap is not None:
            kernel = self._snap(kernel)
        y = ops.matmul(x, kernel)
        if self.bias is not None:
            bias = ops.cast(ops.cast(self.bias, self.compute_dtype), "float32")
            y = ops.add(y, ops.cast(ops.broadcast_to(bias, ops.shape(y)), self.compute_dtype))
        return self._activate(y)


def _identity(x: Tensor) -> Tensor:
    return x


def _snapper(grid: Snap) -> Callable[[Tensor], Tensor]:
    def snap(weight: Tensor) -> tuple[Tensor, Callable[..., Tensor]]:
        # 1 / step and step are powers of two: both products are exact in any float format.
        nearest = ops.multiply(ops.round(ops.multiply(weight, 1 / grid.step)), grid.step)

        def gradient(*args: Tensor, upstream: Tensor | None = None) -> Tensor:
            return args[0] if upstream is None else upstream

        return ops.clip(nearest, -grid.limit, grid.limit), gradient

    return ops.custom_gradient(snap)


def _tanh(x: Tensor) -> tuple[Tensor, Callable[..., Tensor]]:
    y = ops.cast(ops.tanh(ops.cast(x, "float32")), x.dtype)

    def gradient(*args: Tensor, upstream: Tensor | None = None) -> Tensor:
        wide, g = ops.cast(y, "float32"), ops.cast(args[0] if upstream is None else upstream, "float32")
        return ops.cast(ops.multiply(g, ops.subtract(1.0, ops.square(wide))), y.dtype)

    return y, gradient
