"""Unscaling and the verdict on a step's gradients.

Rules (docs/spec.md, section 4)
- Gradients are unscaled in float32, by the reciprocal of the scale, which stays normal over the whole range of scales.
- The verdict is on raw and unscaled gradients. One look at the unscaled ones decides both: the reciprocal is finite and positive, so a
  non-finite raw gradient stays non-finite, and a finite one that leaves float32 when it is unscaled (scale < 1) is seen too.
- None means "no gradient" and counts as finite. Sparse gradients are judged by their values.
- A variable with `overwrite_with_gradient` (float8 scales and histories) receives its new value as its gradient: it is judged, never unscaled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

__all__ = ["all_finite", "only_nan", "unscale"]

Tensor = Any


def unscale(gradients: Sequence[Tensor | None], variables: Sequence[Any], scale: Tensor) -> list[Tensor | None]:
    """Gradients of the unscaled loss, float32.

    Args:
        gradients: one a variable, scaled, of any float dtype, dense or sparse; None where there is none.
        variables: the variables they belong to.
        scale: float32, 0-d.
    """
    inverse = ops.divide(ops.ones_like(scale), scale)

    def times_inverse(values: Tensor) -> Tensor:
        return ops.multiply(ops.cast(values, "float32"), inverse)

    return [
        gradient if gradient is None or getattr(variable, "overwrite_with_gradient", False) else _on_values(times_inverse, gradient)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def all_finite(gradients: Sequence[Tensor | None]) -> Tensor:
    """Whether every element of every gradient is finite: bool, 0-d."""
    verdicts = [ops.all(ops.isfinite(_values(gradient))) for gradient in gradients if gradient is not None]
    return ops.all(ops.stack(verdicts)) if verdicts else ops.convert_to_tensor(True)


def only_nan(gradients: Sequence[Tensor | None]) -> Tensor:
    """Whether some element is NaN and none is infinite, so that no overflow of these gradients explains it: bool, 0-d."""
    present = [_values(gradient) for gradient in gradients if gradient is not None]
    if not present:
        return ops.convert_to_tensor(False)
    nan = ops.any(ops.stack([ops.any(ops.isnan(values)) for values in present]))
    infinite = ops.any(ops.stack([ops.any(ops.isinf(values)) for values in present]))
    return ops.logical_and(nan, ops.logical_not(infinite))


def _is_indexed_slices(gradient: Tensor) -> bool:
    # tf.IndexedSlices, the gradient of a gathered embedding, without importing TensorFlow.
    return type(gradient).__name__ == "IndexedSlices"


def _values(gradient: Tensor) -> Tensor:
    return gradient.values if _is_indexed_slices(gradient) else gradient


def _on_values(function: Callable[[Tensor], Tensor], gradient: Tensor) -> Tensor:
    if _is_indexed_slices(gradient):
        return type(gradient)(values=function(gradient.values), indices=gradient.indices, dense_shape=gradient.dense_shape)
    return function(gradient)
