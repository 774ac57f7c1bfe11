"""The Keras preset beside Keras' own LossScaleOptimizer: the same scales on the same events, step by step."""

from __future__ import annotations

import random

import keras
import numpy as np
from keras import ops

from polyamp import LossScale
from polyamp_keras.native import BACKEND, host


def test_keras_preset_follows_the_stock_optimizer() -> None:
    config = LossScale.like("keras", init_scale=1024.0, growth_interval=4)
    variable = keras.Variable(np.ones(1, "float32"))
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=1024.0, dynamic_growth_steps=4)
    theirs.build([variable])
    state, rng = config.init(), random.Random(5)
    for step in range(120):
        finite = rng.random() > 0.15
        gradient = ops.convert_to_tensor(np.array([1.0 if finite else np.inf], "float32"))
        if BACKEND == "jax":
            _, values = theirs.stateless_apply([v.value for v in theirs.variables], [gradient], [variable.value])
            for own, value in zip(theirs.variables, values, strict=True):
                own.assign(value)
        else:
            theirs.apply([gradient], [variable])
        state = config.update(state, finite)
        assert float(host(theirs.dynamic_scale)) == state.scale, step
        assert int(host(theirs.step_counter)) == state.good_steps, step


def test_keras_defaults() -> None:
    theirs, config = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), LossScale.like("keras")
    assert (theirs.initial_scale, theirs.dynamic_growth_steps) == (config.init_scale, config.growth_interval)
