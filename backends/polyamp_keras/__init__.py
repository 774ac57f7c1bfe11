"""polyamp for Keras 3, on its TensorFlow, JAX and torch backends: the loss scale as an optimizer, the trace as a callback.

`LossScaleOptimizer` wraps an optimizer and is passed to `compile`; `MixedPrecision` is passed to `fit(callbacks=[...])`.

Where Keras is loaded already, both classes load with this package, and are registered for `keras.models.load_model`. Elsewhere they load on
first use (PEP 562): Keras chooses its backend for good when it is imported, and the plug-in beside this file must be able to say which one
a process needs before that happens.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from polyamp.lazy import attach

if TYPE_CHECKING:
    from polyamp_keras.callback import MixedPrecision
    from polyamp_keras.loss_scale_optimizer import LossScaleOptimizer

__all__ = ["LossScaleOptimizer", "MixedPrecision"]

__getattr__, __dir__ = attach(
    __name__,
    {"polyamp_keras.loss_scale_optimizer": ("LossScaleOptimizer",), "polyamp_keras.callback": ("MixedPrecision",)},
)

if "keras" in sys.modules:
    for _name in __all__:
        __getattr__(_name)
