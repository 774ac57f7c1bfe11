"""State travels: state_dict to any backend, .keras files and weights files, and into train functions that are compiled already."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from polyamp import LossScale, StateError
from polyamp_keras import LossScaleOptimizer

from .models import data, read, replay, same, small_model, state_of, tensors, variables

CONFIG = LossScale.dynamic(init_scale=2.0**30, growth_interval=3, hysteresis=2, backoff_factor=0.25, growth_factor=4.0)


def trained(config: LossScale = CONFIG, epochs: int = 2) -> keras.Model:
    x, y = data()
    model = small_model()
    model.compile(LossScaleOptimizer(keras.optimizers.Adam(0.01), config), "mse")
    model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, shuffle=False)
    return model


def train_on(model: keras.Model) -> list[tuple[float, bool]]:
    x, y = data()
    since = state_of(model.optimizer).steps
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return [(record.scale_after, record.skipped) for record in model.optimizer.recent_steps(since)]


def test_config_round_trip() -> None:
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.25, momentum=0.5), CONFIG, name="scaled", ring_capacity=16)
    text = json.dumps(keras.saving.serialize_keras_object(optimizer))
    again = keras.saving.deserialize_keras_object(json.loads(text))
    assert type(again) is LossScaleOptimizer
    assert (again.name, again.loss_scale, again.ring_capacity) == ("scaled", CONFIG, 16)
    assert again.get_config() == optimizer.get_config()
    assert again.inner_optimizer.momentum == 0.5


def test_model_file_resumes_exactly(tmp_path: Path) -> None:
    model = trained()
    path = tmp_path / "model.keras"
    model.save(path)
    again = keras.models.load_model(path)
    assert type(again.optimizer) is LossScaleOptimizer
    assert again.optimizer.state_dict() == model.optimizer.state_dict()
    trajectory = train_on(model)
    assert train_on(again) == trajectory
    assert any(skipped for _, skipped in trajectory)
    assert same(model.get_weights(), again.get_weights())
    assert again.optimizer.state_dict() == model.optimizer.state_dict()


def test_weights_file_resumes_exactly(tmp_path: Path) -> None:
    model = trained()
    path = tmp_path / "run.weights.h5"
    model.save_weights(path)
    again = trained(LossScale.dynamic(), epochs=1)
    again.load_weights(path)
    assert again.optimizer.loss_scale == CONFIG
    trajectory = train_on(model)
    assert train_on(again) == trajectory
    assert same(model.get_weights(), again.get_weights())


def test_importing_the_package_registers_its_classes(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    model = trained()
    model.save(path)
    code = f"import keras, polyamp_keras; print(keras.models.load_model({str(path)!r}).optimizer.state_dict()['scale'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(result.stdout) == state_of(model.optimizer).scale


def test_the_ring_is_not_saved_and_is_cleared_by_loading(tmp_path: Path) -> None:
    model = trained()
    model.save_weights(tmp_path / "run.weights.h5")
    small = small_model()
    small.compile(LossScaleOptimizer(keras.optimizers.Adam(0.01), ring_capacity=4), "mse")
    small.optimizer.build(small.trainable_variables)
    small.load_weights(tmp_path / "run.weights.h5")
    assert small.optimizer.state_dict() == model.optimizer.state_dict()
    model.load_weights(tmp_path / "run.weights.h5")
    assert model.optimizer.recent_steps() == ()


def test_the_scale_loads_into_an_optimizer_that_is_not_built_yet(tmp_path: Path) -> None:
    model = trained()
    model.save_weights(tmp_path / "run.weights.h5")
    other = small_model()
    other.compile(LossScaleOptimizer("adam"), "mse")
    with pytest.warns(UserWarning, match="Skipping variable loading"):  # Keras, of Adam's slots
        other.load_weights(tmp_path / "run.weights.h5")
    assert other.optimizer.state_dict() == model.optimizer.state_dict()


def test_a_run_of_the_stock_optimizer_goes_on(tmp_path: Path) -> None:
    x, y = data()
    stock = small_model()
    inner = keras.optimizers.Adam(0.01)
    stock.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**40, dynamic_growth_steps=7), "mse")
    stock.fit(x, y, batch_size=8, epochs=3, verbose=0)
    stock.save_weights(tmp_path / "run.weights.h5")
    model = trained(LossScale.like("keras", growth_interval=7))
    model.load_weights(tmp_path / "run.weights.h5")
    state = state_of(model.optimizer)
    scale, good_steps = (value.item() for value in read([stock.optimizer.dynamic_scale, stock.optimizer.step_counter]))
    assert (state.scale, state.good_steps) == (scale, good_steps)
    assert (scale, good_steps) != (2.0**15, 0)
    assert same(read(inner.variables), read(model.optimizer.inner_optimizer.variables))


@pytest.mark.parametrize(("name", "value"), [("dynamic_scale", -1.0), ("dynamic_scale", np.inf), ("switches", 99), ("hysteresis_left", 0)])
def test_a_damaged_store_changes_nothing(name: str, value: float) -> None:
    optimizer = LossScaleOptimizer("sgd", CONFIG)
    optimizer.build(variables([1.0]))
    store: dict[str, np.ndarray] = {}
    optimizer.save_own_variables(store)
    store[name] = np.full_like(store[name], value)
    before = optimizer.state_dict()
    with pytest.raises(StateError, match="can't be loaded"):
        optimizer.load_own_variables(store)
    assert optimizer.state_dict() == before


def test_state_dict_round_trips_through_json() -> None:
    optimizer = LossScaleOptimizer("sgd", CONFIG)
    w = variables([0.0])
    for value in (1.0, np.inf, np.nan, 1.0):
        optimizer.apply(tensors([value]), w)
    mapping = json.loads(json.dumps(optimizer.state_dict()))
    other = LossScaleOptimizer("adam")
    other.load_state_dict(mapping)
    assert other.state_dict() == optimizer.state_dict()
    assert other.loss_scale == CONFIG
    for value in (np.inf, 1.0, 1.0, 1.0):
        optimizer.apply(tensors([value]), w)
        other.apply(tensors([value]), w)
    assert other.state_dict() == optimizer.state_dict()


def test_torch_state_is_read() -> None:
    optimizer = LossScaleOptimizer("sgd", LossScale.dynamic(hysteresis=3))
    optimizer.load_state_dict({"scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 10, "_growth_tracker": 9})
    state = state_of(optimizer)
    assert (state.scale, state.good_steps, optimizer.loss_scale.growth_interval, optimizer.loss_scale.hysteresis) == (512.0, 9, 10, 3)
    optimizer.apply(tensors([1.0]), variables([0.0]))
    assert state_of(optimizer).scale == 1024.0


@pytest.mark.parametrize("change", [{"scale": -1.0}, {"version": 99}, {"scale": 2.0**90}, {"good_steps": -1}])
def test_a_bad_mapping_changes_nothing(change: dict[str, float]) -> None:
    optimizer = LossScaleOptimizer("sgd", CONFIG)
    before = optimizer.state_dict()
    with pytest.raises(StateError):
        optimizer.load_state_dict({**before, **change})
    assert optimizer.state_dict() == before
    assert optimizer.loss_scale == CONFIG


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_loaded_configuration_takes_effect_in_a_train_function_that_exists(run_eagerly: bool) -> None:
    x, y = data(8)
    model = small_model()
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), LossScale.dynamic(init_scale=2.0, growth_interval=2000))
    model.compile(optimizer, "mse", run_eagerly=run_eagerly)
    model.train_on_batch(x, y)
    function = model.train_function
    config = LossScale.dynamic(init_scale=4.0, growth_interval=2, growth_factor=8.0, backoff_factor=0.25, hysteresis=2, max_scale=2.0**6)
    mapping = {**optimizer.state_dict(), **LossScaleOptimizer("sgd", config).state_dict()}
    optimizer.load_state_dict(mapping)
    events = [True, True, False, False, True, True, True, True]
    for finite in events:
        model.train_on_batch(x, y if finite else y * np.float32(np.nan))
    assert model.train_function is function
    assert state_of(optimizer) == replay(config, events)[-1]


def test_check_can_be_loaded_before_the_first_step_and_not_after() -> None:
    checked = LossScaleOptimizer("sgd", LossScale.none(check=True))
    checked.load_state_dict(LossScaleOptimizer("sgd", LossScale.none()).state_dict())
    assert checked.loss_scale == LossScale.none()
    w = variables([1.0])
    checked.apply(tensors([0.0]), w)
    before = checked.state_dict()
    with pytest.raises(StateError, match="before the first step"):
        checked.load_state_dict(LossScaleOptimizer("sgd").state_dict())
    assert checked.state_dict() == before


def test_recompiling_keeps_the_scale() -> None:
    model = trained()
    before = model.optimizer.state_dict()
    model.compile(model.optimizer, "mae")
    assert model.optimizer.state_dict() == before


def test_another_layout_is_refused() -> None:
    optimizer = LossScaleOptimizer("sgd", CONFIG)
    before = optimizer.state_dict()
    with pytest.raises(StateError, match="has scale; expected dynamic_scale"):
        optimizer.load_own_variables({"scale": np.float32(8)})
    assert optimizer.state_dict() == before
