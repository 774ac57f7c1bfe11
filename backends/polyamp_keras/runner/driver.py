"""Scale driver: scripted finite and non-finite steps through `LossScaleOptimizer`, with real gradients of a small variable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from polyamp import LossScale
from polyamp.backend import Execution
from polyamp_keras.loss_scale_optimizer import LossScaleOptimizer
from polyamp_keras.runner.applier import make_applier
from polyamp_keras.runner.devices import device_scope

__all__ = ["KerasScaleDriver"]


class KerasScaleDriver:
    """Implements `polyamp.backend.ScaleDriver`."""

    def __init__(self, loss_scale: LossScale, device: str, execution: Execution) -> None:
        self._device = device
        with device_scope(device):
            variables = [keras.Variable(np.zeros(shape, "float32"), name=name) for name, shape in (("a", (2, 3)), ("b", (4,)))]
            self._optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), loss_scale)
            self._apply = make_applier(self._optimizer, variables, execution)
        good = [np.ones((2, 3), "float32"), np.ones(4, "float32")]
        self._gradients = {True: good, False: [good[0], np.array([1, 1, np.inf, 1], "float32")]}

    def update(self, finite: bool) -> None:
        with device_scope(self._device):
            self._apply(self._gradients[finite])

    def state_dict(self) -> Mapping[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, mapping: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(mapping)
