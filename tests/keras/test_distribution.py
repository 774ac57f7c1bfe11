"""Several devices: the verdict is that of all of them."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from polyamp import LossScale
from polyamp_keras import LossScaleOptimizer

from .models import same, small_model, state_of

pytestmark = pytest.mark.only("tensorflow")


@pytest.mark.parametrize("jit_compile", [False])
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_mirrored_strategy_sees_an_overflow_on_any_replica(jit_compile: bool) -> None:
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = small_model()
        optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.01), LossScale.dynamic(init_scale=8, growth_interval=2))
        model.compile(optimizer, "mse", jit_compile=jit_compile)
    x, y = np.ones((16, 4), "float32"), np.zeros((16, 1), "float32")
    for replica, expected in ((None, 8), (0, 4), (1, 2), (None, 2), (None, 4)):
        inputs = x.copy()
        if replica is not None:
            inputs[8 * replica] = np.inf
        before = model.get_weights()
        model.fit(inputs, y, batch_size=16, epochs=1, verbose=0, shuffle=False)
        assert same(before, model.get_weights()) == (replica is not None)
        copies = [float(v.numpy()) for v in strategy.experimental_local_results(optimizer.dynamic_scale.value)]
        assert copies == [expected, expected]
    assert (state_of(optimizer).steps, state_of(optimizer).skipped) == (5, 2)
    assert [(r.step, r.skipped) for r in optimizer.recent_steps()] == [(0, False), (1, True), (2, True), (3, False), (4, False)]


def test_apply_across_replicas_is_refused() -> None:
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        optimizer = LossScaleOptimizer("sgd")
        w = [keras.Variable(np.ones(1, "float32"))]
        with pytest.raises(RuntimeError, match=r"strategy\.run\(\)"):
            optimizer.apply([tf.ones(1)], w)
