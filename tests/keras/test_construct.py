"""What LossScaleOptimizer takes, and what it refuses."""

from __future__ import annotations

import keras
import pytest

from polyamp import LossScale, LossScaleError
from polyamp_keras import LossScaleOptimizer

from .models import small_model


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, LossScale.dynamic()),
        ("dynamic", LossScale.dynamic()),
        ("none", LossScale.none()),
        ("megatron", LossScale.like("megatron")),
        (128, LossScale.static(128)),
        (0.5, LossScale.static(0.5)),
        (LossScale.dynamic(growth_interval=7), LossScale.dynamic(growth_interval=7)),
    ],
)
def test_loss_scale(given: object, expected: LossScale) -> None:
    assert LossScaleOptimizer("sgd", given).loss_scale == expected


@pytest.mark.parametrize("given", ["keras2", True, 0.0, float("inf"), object()])
def test_wrong_loss_scale(given: object) -> None:
    with pytest.raises(LossScaleError):
        LossScaleOptimizer("sgd", given)


def test_inner_by_name_config_and_instance() -> None:
    sgd = keras.optimizers.SGD(0.25)
    assert LossScaleOptimizer(sgd).inner_optimizer is sgd
    assert type(LossScaleOptimizer("adam").inner_optimizer).__name__ == "Adam"
    config = keras.optimizers.serialize(sgd)
    assert float(LossScaleOptimizer(config).learning_rate.value) == 0.25


@pytest.mark.parametrize("outer", [LossScaleOptimizer, keras.optimizers.LossScaleOptimizer])
def test_wrapping_twice_is_refused(outer: type) -> None:
    with pytest.raises(LossScaleError, match=r"inner_optimizer \(SGD\)"):
        LossScaleOptimizer(outer(keras.optimizers.SGD()))


def test_an_inner_loss_scale_factor_is_refused() -> None:
    with pytest.raises(LossScaleError, match="scaled twice"):
        LossScaleOptimizer(keras.optimizers.SGD(loss_scale_factor=8.0))


@pytest.mark.parametrize("capacity", [0, 1, True, 2.5])
def test_wrong_ring_capacity(capacity: object) -> None:
    with pytest.raises(LossScaleError, match="ring_capacity"):
        LossScaleOptimizer("sgd", ring_capacity=capacity)


def test_compile_takes_it_as_it_is() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    model = small_model()
    optimizer = LossScaleOptimizer("sgd")
    model.compile(optimizer, "mse")
    assert model.dtype_policy.name == "mixed_float16"
    assert model.optimizer is optimizer
    model.compile("sgd", "mse")
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer  # what compile does to any other optimizer


def test_attributes_of_the_stock_class_stay_meaningful() -> None:
    optimizer = LossScaleOptimizer("sgd", LossScale.dynamic(init_scale=256, growth_interval=5))
    assert (optimizer.initial_scale, optimizer.dynamic_growth_steps) == (256.0, 5)
    assert float(keras.ops.convert_to_numpy(optimizer.dynamic_scale.value)) == 256.0
    assert int(keras.ops.convert_to_numpy(optimizer.step_counter.value)) == 0
    optimizer.learning_rate = 0.5
    assert float(optimizer.inner_optimizer.learning_rate.value) == 0.5


def test_dtypes_of_the_state() -> None:
    optimizer = LossScaleOptimizer("sgd")
    names = {v.name: v.dtype for v in optimizer.variables}
    assert names["dynamic_scale"] == "float32"
    assert {names[n] for n in ("step_counter", "hysteresis_left", "skipped", "consecutive_skips", "steps")} == {"int32"}
    assert len({id(v) for v in optimizer.variables}) == len(optimizer.variables)


def test_two_optimizers_do_not_share_state() -> None:
    a, b = LossScaleOptimizer("sgd", 2), LossScaleOptimizer("sgd", 4)
    assert (a.state_dict()["scale"], b.state_dict()["scale"]) == (2.0, 4.0)
