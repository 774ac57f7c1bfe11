"""Conformance runner: the Keras side of `polyamp.backend.Backend`, through `LossScaleOptimizer`, `compile` and `train_on_batch`."""

from polyamp_keras.runner.backend import KerasBackend

__all__ = ["KerasBackend"]
