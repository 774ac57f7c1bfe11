"""What `LossScaleOptimizer` accepts as its inner optimizer and its loss scale.

Rules
- A loss scale is a `polyamp.LossScale`, a preset's name, "dynamic", "none", a number (static), None (dynamic, with the spec's defaults),
  or a mapping of the fields of `LossScale`, as a saved config holds it.
- The inner optimizer is an optimizer, its name, or its Keras config; one that scales by itself is refused, because gradients would be
  scaled twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from polyamp import LossScale, LossScaleError

__all__ = ["as_inner_optimizer", "as_loss_scale"]


def as_loss_scale(value: LossScale | Mapping[str, Any] | str | float | None) -> LossScale:
    """Configuration that `loss_scale=` stands for.

    Raises:
        LossScaleError: an unknown name, a number out of range, or another type.
    """
    if value is None or value == "dynamic":
        return LossScale.dynamic()
    if isinstance(value, LossScale):
        return value
    if isinstance(value, str):
        return LossScale.none() if value == "none" else LossScale.like(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return LossScale.static(float(value))
    if isinstance(value, Mapping):
        return LossScale(**value)
    raise LossScaleError(
        f"loss_scale={value!r}: expected a polyamp.LossScale, a preset's name, a number for static scaling, or None for the defaults"
    )


def as_inner_optimizer(value: Any) -> keras.optimizers.Optimizer:
    """Optimizer that `inner=` stands for.

    Raises:
        LossScaleError: an optimizer that already scales the loss.
    """
    optimizer = keras.optimizers.get(value)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise LossScaleError(
            f"inner={optimizer.name!r} is a {type(optimizer).__name__}, which scales the loss itself; pass its inner_optimizer "
            f"({type(optimizer.inner_optimizer).__name__}) instead, or use it as it is"
        )
    if getattr(optimizer, "loss_scale_factor", None) is not None:
        raise LossScaleError(
            f"inner={optimizer.name!r} has loss_scale_factor={optimizer.loss_scale_factor}, so gradients would be scaled twice; "
            "leave loss_scale_factor out and pass that number as loss_scale= to polyamp_keras.LossScaleOptimizer"
        )
    return optimizer
