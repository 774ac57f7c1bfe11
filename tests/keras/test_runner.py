"""The conformance runner builds what the task says, and trains it through the public classes."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest

from polyamp import LossScale, Policy, StateError, UnsupportedError
from polyamp.backend import Backend, Trainer
from polyamp.registry import get_backend
from polyamp.task import Dense, OptimizerSpec, Snap, TrainingTask
from polyamp_keras.runner.layers import TaskDense

from .models import same, tensors

SGD = OptimizerSpec("sgd", {"learning_rate": 0.25, "momentum": 0.5})
ADAMW = OptimizerSpec("adamw", {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-12, "weight_decay": 0.1})


@pytest.fixture
def runner(backend: str) -> Backend:
    return get_backend(f"keras-{backend}")


def task(**changes: Any) -> TrainingTask:
    r = np.random.default_rng(3)
    parameters = {
        "b2": np.zeros(4, "float32"),
        "w1": (r.standard_normal((8, 16)) / 4).astype("float32"),
        "b1": (r.standard_normal(16) / 4).astype("float32"),
        "w2": (r.standard_normal((16, 4)) / 4).astype("float32"),
    }
    values: dict[str, Any] = {
        "workload": "test",
        "layers": (Dense("w1", "b1", "tanh"), Dense("w2", "b2")),
        "loss": "softmax_cross_entropy",
        "parameters": parameters,
        "optimizer": SGD,
        "policy": Policy("mixed_float16"),
        "loss_scale": LossScale.dynamic(init_scale=1024, growth_interval=2),
        "batch_size": 8,
    }
    return TrainingTask(**{**values, **changes})


def batch() -> tuple[np.ndarray, np.ndarray]:
    r = np.random.default_rng(4)
    return r.standard_normal((8, 8)).astype("float32"), r.integers(0, 4, 8).astype("int32")


def flat(trainer: Trainer) -> list[np.ndarray]:
    snapshot = trainer.snapshot()
    return [*snapshot.parameters.values(), *(value for slot in snapshot.slots.values() for value in slot.values())]


def half(x: Any) -> np.ndarray:
    return np.asarray(x).astype("float16").astype("float64")


def gradients(parameters: dict[str, np.ndarray], x: np.ndarray, labels: np.ndarray, scale: float) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and scaled gradients of `task`, in float64 with a rounding to float16 after every float16 operation."""
    p = {name: half(value) for name, value in parameters.items()}
    inputs = half(x)
    hidden = half(np.tanh(half(half(inputs @ p["w1"]) + p["b1"])))
    logits = half(half(hidden @ p["w2"]) + p["b2"])
    e = np.exp(logits - logits.max(1, keepdims=True))
    rows = np.arange(len(labels))
    probabilities = e / e.sum(1, keepdims=True)
    loss = -np.log(probabilities[rows, labels]).mean()
    probabilities[rows, labels] -= 1
    g2 = half(probabilities * scale / len(labels))
    g1 = half(half(g2 @ p["w2"].T) * (1 - hidden**2))
    return loss, {"w1": half(inputs.T @ g1), "b1": g1.sum(0), "w2": half(hidden.T @ g2), "b2": g2.sum(0)}


def test_one_step_against_numpy(runner: Backend, execution: Any) -> None:
    t, (x, y) = task(), batch()
    trainer = runner.trainer(t, "cpu", execution)
    outcome = trainer.step(x, y)
    loss, scaled = gradients(dict(t.parameters), x, y, 1024)
    assert (outcome.scale, outcome.scale_after, outcome.skipped) == (1024, 1024, False)
    assert outcome.loss == pytest.approx(loss, rel=1e-4)
    snapshot = trainer.snapshot()
    assert list(snapshot.parameters) == list(t.parameters)
    assert set(snapshot.slots) == {"v"}
    for name, gradient in scaled.items():
        np.testing.assert_allclose(snapshot.slots["v"][name], gradient / 1024, atol=2e-3 * np.abs(gradient / 1024).max())
        np.testing.assert_array_equal(snapshot.parameters[name], t.parameters[name] - np.float32(0.25) * snapshot.slots["v"][name])
    assert snapshot.optimizer_steps == 1


def test_adamw_slots(runner: Backend, execution: Any) -> None:
    t, (x, y) = task(optimizer=ADAMW), batch()
    trainer = runner.trainer(t, "cpu", execution)
    trainer.step(x, y)
    _, scaled = gradients(dict(t.parameters), x, y, 1024)
    snapshot = trainer.snapshot()
    for name, gradient in scaled.items():
        unscaled = gradient / 1024
        np.testing.assert_allclose(snapshot.slots["m"][name], 0.1 * unscaled, atol=2e-3 * np.abs(0.1 * unscaled).max())
        np.testing.assert_allclose(snapshot.slots["v"][name], 0.01 * unscaled**2, atol=5e-3 * np.abs(0.01 * unscaled**2).max())
        m, v = snapshot.slots["m"][name], snapshot.slots["v"][name]
        expected = t.parameters[name] * (1 - 0.01 * 0.1) - 0.01 * (m / 0.1) / np.maximum(np.sqrt(v / 0.01), 1e-30)
        np.testing.assert_allclose(snapshot.parameters[name], expected, atol=2e-6)


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=lambda spec: spec.name)
@pytest.mark.parametrize("factor", [math.inf, -math.inf, math.nan, 2.0**40])
def test_loss_factor(runner: Backend, execution: Any, optimizer: OptimizerSpec, factor: float) -> None:
    x, y = batch()
    trainer = runner.trainer(task(optimizer=optimizer), "cpu", execution)
    plain = trainer.step(x, y)
    before, steps = flat(trainer), trainer.snapshot().optimizer_steps
    outcome = trainer.step(x, y, factor)
    assert outcome.skipped
    assert (outcome.scale, outcome.scale_after) == (1024, 512)
    assert 0 < outcome.loss < plain.loss
    assert same(before, flat(trainer))
    assert trainer.snapshot().optimizer_steps == steps


def test_a_factor_of_two_doubles_the_gradients(runner: Backend, execution: Any) -> None:
    x, y = batch()
    a, b = (runner.trainer(task(loss_scale=LossScale.static(64)), "cpu", execution) for _ in range(2))
    a.step(x, y)
    b.step(x, y, 2.0)
    for name, value in a.snapshot().slots["v"].items():
        np.testing.assert_allclose(b.snapshot().slots["v"][name], 2 * value, atol=2e-3 * np.abs(value).max())


def test_a_sample_weight_of_one_changes_no_bit(execution: Any) -> None:
    """Keras' behaviour that `loss_factor` relies on."""
    x, y = batch()
    results = []
    for weight in (None, np.ones(8, "float32")):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, dtype="mixed_float16")])
        model.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=execution == "eager")
        losses = [float(model.train_on_batch(x, y, sample_weight=weight)) for _ in range(5)]
        results.append((losses, model.get_weights()))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=lambda spec: spec.name)
def test_restore_continues_exactly(runner: Backend, execution: Any, optimizer: OptimizerSpec) -> None:
    x, y = batch()
    trainer = runner.trainer(task(optimizer=optimizer), "cpu", execution)
    for _ in range(3):
        trainer.step(x, y)
    snapshot = trainer.snapshot()
    outcomes, values, state = [trainer.step(x, y), trainer.step(x, y)], flat(trainer), trainer.snapshot().loss_scale
    other = runner.trainer(task(optimizer=optimizer, loss_scale=LossScale.static(1)), "cpu", execution)
    for again in (trainer, other):
        again.restore(snapshot)
        assert [again.step(x, y), again.step(x, y)] == outcomes
        assert again.snapshot().loss_scale == state
        assert same(values, flat(again))


def test_restoring_the_wrong_parameters_is_refused(runner: Backend, execution: Any) -> None:
    trainer = runner.trainer(task(), "cpu", execution)
    snapshot = trainer.snapshot()
    with pytest.raises(StateError, match="the task has b1, b2, w1, w2"):
        trainer.restore(type(snapshot)({"w1": snapshot.parameters["w1"]}, snapshot.slots, 0, snapshot.loss_scale))


def test_apply_takes_scaled_gradients(runner: Backend, execution: Any) -> None:
    t = task()
    trainer = runner.trainer(t, "cpu", execution)
    given = {name: np.full(value.shape, 2.0, "float32") for name, value in t.parameters.items()}
    outcome = trainer.apply(given)
    assert math.isnan(outcome.loss)
    assert (outcome.scale, outcome.skipped) == (1024, False)
    snapshot = trainer.snapshot()
    for name, value in t.parameters.items():
        np.testing.assert_array_equal(snapshot.slots["v"][name], np.full(value.shape, 2**-9, "float32"))
        np.testing.assert_array_equal(snapshot.parameters[name], value - np.float32(2**-11))
    for name in t.parameters:
        bad = {**given, name: given[name].copy()}
        bad[name].flat[-1] = np.nan
        assert trainer.apply(bad).skipped
    with pytest.raises(StateError, match="gradients are given for w1"):
        trainer.apply({"w1": given["w1"]})


def test_step_and_apply_share_one_state(runner: Backend, execution: Any) -> None:
    x, y = batch()
    t = task()
    trainer = runner.trainer(t, "cpu", execution)
    trainer.step(x, y)
    outcome = trainer.apply({name: np.zeros_like(value) for name, value in t.parameters.items()})
    assert outcome.scale_after == 2048  # the second finite step
    assert trainer.step(x, y).scale == 2048
    assert trainer.snapshot().optimizer_steps == 3


def test_predict(runner: Backend, execution: Any) -> None:
    t, (x, _) = task(), batch()
    outputs = runner.trainer(t, "cpu", execution).predict(x)
    p = {name: half(value) for name, value in t.parameters.items()}
    hidden = half(np.tanh(half(half(half(x) @ p["w1"]) + p["b1"])))
    assert (outputs.dtype, outputs.shape) == (np.dtype("float32"), (8, 4))
    np.testing.assert_allclose(outputs, half(half(hidden @ p["w2"]) + p["b2"]), atol=2e-3)


def test_momentum_slot_of_keras() -> None:
    """Keras' form of SGD that the slots are converted from."""
    w = keras.Variable(np.ones(1, "float32"))
    sgd = keras.optimizers.SGD(0.25, momentum=0.5)
    for gradient in (2.0, 4.0):
        sgd.apply(tensors([gradient]), [w])
    (momentum,) = (v for v in sgd.variables if v.name.endswith("_momentum"))
    v = 0.5 * 2.0 + 4.0
    assert keras.ops.convert_to_numpy(momentum.value).tolist() == [-0.25 * v]


def layer_gradients(layer: TaskDense, x: np.ndarray, upstream: np.ndarray, backend: str) -> dict[str, np.ndarray]:
    """Gradients of sum(layer(x) * upstream) by the name of the layer's variables."""
    inputs, g = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(upstream)
    names = [v.name for v in layer.trainable_variables]

    def total() -> Any:
        return keras.ops.sum(keras.ops.multiply(keras.ops.cast(layer(inputs), "float32"), g))

    if backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            result = total()
        values = tape.gradient(result, [v.value for v in layer.trainable_variables])
    elif backend == "torch":
        total().backward()
        values = [v.value.grad for v in layer.trainable_variables]
    else:
        import jax

        def of_values(values: list[Any]) -> Any:
            with keras.StatelessScope(state_mapping=list(zip(layer.trainable_variables, values, strict=True))):
                return total()

        values = jax.grad(of_values)([v.value for v in layer.trainable_variables])
    return {name: keras.ops.convert_to_numpy(value) for name, value in zip(names, values, strict=True)}


def test_bias_gradient_is_reduced_in_float32(backend: str) -> None:
    layer = TaskDense(Dense("w", "b"), 1, dtype="mixed_float16")
    layer.build((3, 2))
    upstream = np.array([[40000], [40000], [-40000]], "float32")  # the first two add up to infinity in float16
    found = layer_gradients(layer, np.zeros((3, 2), "float32"), upstream, backend)
    assert found["bias"].dtype == np.float32
    assert found["bias"].tolist() == [40000.0]


def test_snap_follows_the_cast_and_passes_the_gradient(backend: str) -> None:
    layer = TaskDense(Dense("w", snap=Snap(1 / 16, 2.0)), 5, dtype="mixed_float16")
    layer.build((1, 1))
    # In float32 the first is above the midpoint of 0 and 1/16 and would go up; float16 rounds it onto the midpoint, which goes to even.
    weights = np.array([[1 / 32 + 2**-20, 0.1, -0.1, 3000.0, -2.01]], "float32")
    layer.kernel.assign(weights)
    output = keras.ops.convert_to_numpy(keras.ops.cast(layer(keras.ops.ones((1, 1))), "float32"))
    assert output.tolist() == [[0.0, 0.125, -0.125, 2.0, -2.0]]
    found = layer_gradients(layer, np.ones((1, 1), "float32"), np.array([[1, 2, 3, 4, 5]], "float32"), backend)
    assert found["kernel"].tolist() == [[1, 2, 3, 4, 5]]


def test_tanh_derivative_is_taken_at_the_rounded_value(backend: str) -> None:
    layer = TaskDense(Dense("w", activation="tanh"), 1, dtype="mixed_float16")
    layer.build((1, 1))
    layer.kernel.assign([[4.0]])
    y = np.float32(np.float16(np.tanh(4.0)))
    found = layer_gradients(layer, np.ones((1, 1), "float32"), np.ones((1, 1), "float32"), backend)
    assert found["kernel"].tolist() == [[float(np.float16(1 - y * y))]]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32", "float16", "bfloat16"])
def test_policies(runner: Backend, policy: str) -> None:
    x, y = batch()
    trainer = runner.trainer(task(policy=Policy(policy), loss_scale=LossScale.static(64)), "cpu", "eager")
    losses = [trainer.step(x, y).loss for _ in range(5)]
    assert losses[-1] < losses[0]
    assert trainer.predict(x).dtype == np.float32


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": Policy("bfloat16", "float16")},
        {"policy": Policy("mixed_float16", ops={"relu": "float32"})},
        {"loss": "hinge"},
        {"optimizer": OptimizerSpec("lion", {})},
        {"layers": (Dense("w1", "b1", "gelu"),)},
        {"layers": (Dense("w1", "b1"), Dense("w2", "b1"))},
    ],
)
def test_what_is_not_claimed_is_refused(runner: Backend, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        runner.trainer(task(**changes), "cpu", "eager")


def test_unknown_device_and_execution(runner: Backend) -> None:
    with pytest.raises(UnsupportedError, match="visible: cpu"):
        runner.trainer(task(), "tpu9", "eager")
    with pytest.raises(UnsupportedError, match="execution"):
        runner.scale_driver(LossScale.dynamic(), "cpu", "interpreted")  # type: ignore[arg-type]


def test_scale_driver(runner: Backend, execution: Any) -> None:
    config = LossScale.dynamic(init_scale=8, growth_interval=3)
    driver = runner.scale_driver(config, "cpu", execution)
    scales = []
    for mark in "..X...XX...":
        driver.update(mark == ".")
        scales.append(driver.state_dict()["scale"])
    assert scales == [8, 8, 4, 4, 4, 8, 4, 2, 2, 2, 4]
    other = runner.scale_driver(LossScale.static(1), "cpu", execution)
    other.update(True)
    other.load_state_dict(driver.state_dict())
    for finite in (False, True, True, True):
        driver.update(finite)
        other.update(finite)
    assert other.state_dict() == driver.state_dict()


def test_capabilities_and_probe(runner: Backend, backend: str) -> None:
    claims = runner.capabilities()
    assert claims.executions == (("eager",) if backend == "torch" else ("compiled", "eager"))
    assert "cpu" in claims.devices
    probe = runner.probe("cpu")
    assert set(claims.subnormals["cpu"]) == set(claims.formats["cpu"])
    assert probe["float16_round_trip"] == "kept"
    assert probe["float16_matmul_add"] == "rounded"  # on TensorFlow thanks to the remapping that the runner turns off
