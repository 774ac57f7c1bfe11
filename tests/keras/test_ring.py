"""The step ring: each step once, in order, whatever a batch of steps is run as one."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from polyamp import LossScale
from polyamp_keras import LossScaleOptimizer
from polyamp_keras.runner.applier import make_applier

from .models import data, replay, small_model, tensors, variables


def test_holds_the_last_steps(execution: str) -> None:
    config = LossScale.dynamic(init_scale=64, growth_interval=2)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), config, ring_capacity=5)
    apply = make_applier(optimizer, variables([0.0]), execution)
    events = [mark == "." for mark in "..X.X..X....X"]
    for finite in events:
        apply([np.array([1.0 if finite else np.inf])])
    states = replay(config, events)
    expected = [(step, states[step].scale, states[step + 1].scale, not events[step]) for step in range(8, 13)]
    assert [(r.step, r.scale, r.scale_after, r.skipped) for r in optimizer.recent_steps()] == expected
    assert [r.step for r in optimizer.recent_steps(11)] == [11, 12]
    assert optimizer.recent_steps(13) == ()


def test_rows_of_another_life_are_recognised() -> None:
    optimizer = LossScaleOptimizer("sgd", ring_capacity=8)
    w = variables([0.0])
    for _ in range(6):
        optimizer.apply(tensors([1.0]), w)
    state = optimizer.state_dict()
    optimizer.load_state_dict({**state, "steps": 2})
    optimizer.apply(tensors([1.0]), w)
    assert [r.step for r in optimizer.recent_steps()] == [2]


@pytest.mark.only("tensorflow", "jax")
def test_many_steps_in_one_execution() -> None:
    x, y = data(96)
    config = LossScale.dynamic(init_scale=2.0**40, growth_interval=3)
    trajectories = []
    for per_execution in (1, 4):
        keras.utils.set_random_seed(0)
        model = small_model()
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.01), config)
        model.compile(optimizer, "mse", steps_per_execution=per_execution)
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
        trajectories.append(optimizer.recent_steps())
    assert [record.step for record in trajectories[0]] == list(range(24))
    assert trajectories[0] == trajectories[1]
