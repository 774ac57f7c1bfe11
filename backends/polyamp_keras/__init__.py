"""polyamp for Keras 3, on its TensorFlow, JAX and torch backends: the loss scale as an optimizer, the trace as a callback.

`LossScaleOptimizer` wraps an optimizer and is passed to `compile`; `MixedPrecision` is passed to `fit(callbacks=[...])`.
"""

from __future__ import annotations

from polyamp_keras.callback import MixedPrecision
from polyamp_keras.loss_scale_optimizer import LossScaleOptimizer

__all__ = ["LossScaleOptimizer", "MixedPrecision"]
