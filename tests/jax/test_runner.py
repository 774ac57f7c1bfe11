"""The conformance runner: exact arithmetic against a reference written out in numpy, on both sides of the compile boundary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyamp
from polyamp import LossScale, Policy, UnsupportedError
from polyamp.backend import Execution
from polyamp.task import Dense, OptimizerSpec, Snap, TrainingTask
from polyamp_jax.runner import model

EXECUTIONS: tuple[Execution, ...] = ("eager", "compiled")
SGD = OptimizerSpec("sgd", {"learning_rate": 0.25, "momentum": 0.5})
ADAMW = OptimizerSpec("adamw", {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.1})
F16, F32 = np.float16, np.float32

backend = polyamp.get_backend("jax")


def dyadic_task(**changes: Any) -> TrainingTask:
    """Two snapped layers on small dyadic numbers: every product and sum is exact in float32, in any order."""
    rng, snap = np.random.default_rng(5), Snap(2.0**-4, 2.0)
    task = TrainingTask(
        workload="dyadic",
        layers=(Dense("w1", activation="relu", snap=snap), Dense("w2", snap=snap)),
        loss="mse",
        parameters={"w1": (rng.integers(-8, 9, (8, 4)) / 16).astype(F32), "w2": (rng.integers(-8, 9, (4, 2)) / 16).astype(F32)},
        optimizer=SGD,
        policy=Policy("mixed_float16"),
        loss_scale=LossScale.dynamic(init_scale=2.0**18, growth_interval=3),
        batch_size=8,
    )
    return replace(task, **changes)


def batches(steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(6)
    return [((rng.integers(0, 5, (8, 8)) / 4).astype(F32), rng.integers(-4, 5, (8, 2)).astype(F32)) for _ in range(steps)]


class Numpy:
    """The dyadic task in numpy: float32 sums, one rounding to float16 for each operation of the network."""

    def __init__(self, task: TrainingTask) -> None:
        self.w = {k: v.copy() for k, v in task.parameters.items()}
        self.v = {k: np.zeros_like(v) for k, v in self.w.items()}
        self.config, self.state = task.loss_scale, task.loss_scale.init()

    def step(self, x: np.ndarray, y: np.ndarray) -> tuple[float, float, bool]:
        def snap(w: np.ndarray) -> np.ndarray:
            return np.clip(np.round(w.astype(F16).astype(F32) * 16) / 16, -2, 2)

        def half(a: np.ndarray) -> np.ndarray:
            return a.astype(F16).astype(F32)

        with np.errstate(over="ignore", invalid="ignore"):
            w1, w2 = snap(self.w["w1"]), snap(self.w["w2"])
            z = half(x @ w1)
            a = np.maximum(z, 0)
            out = half(a @ w2)
            d_out = half(F32(self.state.scale) * 2 * (out - y) / out.size)
            d_z = np.where(z > 0, half(d_out @ w2.T), 0)
            grads = {"w1": half(x.T @ d_z), "w2": half(a.T @ d_out)}
        finite = all(np.isfinite(g).all() for g in grads.values())
        if finite:
            for k, g in grads.items():
                self.v[k] = F32(0.5) * self.v[k] + g / F32(self.state.scale)
                self.w[k] = self.w[k] - F32(0.25) * self.v[k]
        before, self.state = self.state.scale, self.config.update(self.state, finite)
        return before, self.state.scale, not finite


@pytest.mark.parametrize("execution, steps", [("compiled", 60), ("eager", 12)])
def test_dyadic_training_is_bit_identical_to_numpy(execution: Execution, steps: int) -> None:
    task = dyadic_task()
    trainer, reference = backend.trainer(task, "cpu", execution), Numpy(task)
    skips = 0
    for x, y in batches(steps):
        outcome = trainer.step(x, y)
        assert (outcome.scale, outcome.scale_after, outcome.skipped) == reference.step(x, y)
        skips += outcome.skipped
        snapshot = trainer.snapshot()
        for name, weights in reference.w.items():
            assert snapshot.parameters[name].tobytes() == weights.tobytes()
            assert (snapshot.slots["v"][name] == reference.v[name]).all()
    assert snapshot.optimizer_steps == steps - skips
    assert skips > 1


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.standard_promotion
def test_a_snapshot_continues_as_if_nothing_happened(execution: Execution, optimizer: OptimizerSpec) -> None:
    task = dyadic_task(optimizer=optimizer)
    trainer, data = backend.trainer(task, "cpu", execution), batches(8)
    for x, y in data[:4]:
        trainer.step(x, y)
    saved = trainer.snapshot()
    copies = {k: v.copy() for k, v in saved.parameters.items()}
    expected = [trainer.step(x, y) for x, y in data[4:]]
    for name, weights in copies.items():
        assert (saved.parameters[name] == weights).all()
    for other in (trainer, backend.trainer(task, "cpu", execution)):
        other.restore(saved)
        assert [other.step(x, y) for x, y in data[4:]] == expected


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_given_gradients_are_checked_unscaled_and_applied(execution: Execution) -> None:
    trainer = backend.trainer(dyadic_task(loss_scale=LossScale.dynamic(init_scale=8)), "cpu", execution)
    before = trainer.snapshot()
    ones = {k: np.ones_like(v) for k, v in before.parameters.items()}
    bad = {**ones, "w2": np.full_like(ones["w2"], np.nan)}
    skipped = trainer.apply(bad)
    assert (skipped.scale, skipped.scale_after, skipped.skipped) == (8, 4, True)
    assert np.isnan(skipped.loss)
    outcome = trainer.apply({k: v * 4 for k, v in ones.items()})
    assert (outcome.scale, outcome.scale_after, outcome.skipped) == (4, 4, False)
    after = trainer.snapshot()
    assert after.optimizer_steps == 1
    for name, weights in before.parameters.items():
        assert (after.parameters[name] == weights - 0.25).all()


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("factor", [np.inf, -np.inf, np.nan, 2.0**40])
def test_an_injected_loss_factor_skips_and_is_not_recorded(execution: Execution, factor: float) -> None:
    trainer = backend.trainer(dyadic_task(loss_scale=LossScale.dynamic(init_scale=8)), "cpu", execution)
    (x, y), *_ = batches(1)
    injected = trainer.step(x, y, factor)
    assert injected.skipped
    plain = trainer.step(x, y)
    assert not plain.skipped
    assert injected.loss == plain.loss
    assert np.isfinite(plain.loss)


@pytest.mark.standard_promotion
def test_adamw_is_the_formula_of_the_spec() -> None:
    """Pins optax: epsilon outside the root, decay decoupled and scaled by the learning rate, both moments corrected."""
    trainer = backend.trainer(dyadic_task(optimizer=ADAMW, loss_scale=LossScale.static(1)), "cpu", "compiled")
    h = ADAMW.hyperparameters
    w = {k: v.astype(np.float64) for k, v in trainer.snapshot().parameters.items()}
    m, v = ({k: np.zeros_like(a) for k, a in w.items()} for _ in range(2))
    rng = np.random.default_rng(0)
    for t in range(1, 6):
        grads = {k: rng.standard_normal(a.shape).astype(F32) for k, a in w.items()}
        trainer.apply(grads)
        for k, g in grads.items():
            m[k] = h["beta1"] * m[k] + (1 - h["beta1"]) * g
            v[k] = h["beta2"] * v[k] + (1 - h["beta2"]) * g.astype(np.float64) ** 2
            step = (m[k] / (1 - h["beta1"] ** t)) / (np.sqrt(v[k] / (1 - h["beta2"] ** t)) + h["epsilon"])
            w[k] = w[k] - h["learning_rate"] * (step + h["weight_decay"] * w[k])
    after = trainer.snapshot()
    assert after.optimizer_steps == 5
    for k in w:
        np.testing.assert_allclose(after.parameters[k], w[k], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(after.slots["m"][k], m[k], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(after.slots["v"][k], v[k], rtol=1e-5, atol=1e-7)


def test_optax_sgd_is_the_formula_of_the_spec() -> None:
    """Pins optax: trace = g + momentum * trace, update = -learning_rate * trace, each rounded once for powers of two."""
    rng = np.random.default_rng(3)
    tx = optax.sgd(optax.constant_schedule(0.25), momentum=0.5)
    w, v = rng.standard_normal(64).astype(F32), np.zeros(64, F32)
    params, state = jnp.asarray(w), tx.init(jnp.asarray(w))
    update = jax.jit(tx.update)
    for _ in range(20):
        g = rng.standard_normal(64).astype(F32)
        v = F32(0.5) * v + g
        w = w - F32(0.25) * v
        updates, state = update(jnp.asarray(g), state)
        params = optax.apply_updates(params, updates)
        assert (np.asarray(params) == w).all()


@pytest.mark.parametrize("compiled", [False, True])
def test_bias_gradients_are_reduced_in_float32(compiled: bool) -> None:
    """60000 + 60000 - 60000 is 60000; a plain float16 addition reduces to infinity."""
    task = dyadic_task(layers=(Dense("w", "b"),), parameters={"w": np.zeros((1, 1), F32), "b": np.zeros(1, F32)})
    cotangents = jnp.array([[60000], [60000], [-60000]], jnp.float32)

    def loss(b: jax.Array) -> jax.Array:
        return jnp.sum(model.forward(task, {"w": jnp.zeros((1, 1), jnp.float16), "b": b}, jnp.zeros((3, 1))) * cotangents)

    gradient = jax.grad(loss)
    assert (jax.jit(gradient) if compiled else gradient)(jnp.zeros(1, jnp.float16)).tolist() == [60000]


@pytest.mark.parametrize("compiled", [False, True])
def test_products_accumulate_in_float32_and_round_once(compiled: bool) -> None:
    task = dyadic_task(layers=(Dense("w"),), parameters={"w": np.ones((1025, 1), F32)})
    x = jnp.array([[2048.0] + [1.0] * 1024])

    def loss(w: jax.Array) -> jax.Array:
        return jnp.sum(model.forward(task, {"w": w}, jnp.concatenate([x, x, x])) * jnp.array([[60000.0], [60000.0], [-60000.0]]))

    run = jax.value_and_grad(loss)
    value, grad = (jax.jit(run) if compiled else run)(jnp.ones((1025, 1), jnp.float16))
    assert float(value) == 3072 * 60000
    assert grad.dtype == jnp.float16
    assert grad[1:].tolist() == [[60000]] * 1024
    assert grad[0].tolist() == [np.inf]
    program = str(jax.make_jaxpr(run)(jnp.ones((1025, 1), jnp.float16)))
    assert program.count("dot_general[") == program.count("preferred_element_type=float32") == 2


def test_tanh_is_differentiated_at_its_rounded_value() -> None:
    task = dyadic_task(layers=(Dense("w", activation="tanh"),), parameters={"w": np.ones((1, 1), F32)})
    w = np.float16(1.37)
    y = np.float16(np.tanh(w.astype(F32)))
    value, grad = jax.jit(jax.value_and_grad(lambda w: model.forward(task, {"w": w}, jnp.ones((1, 1)))[0, 0]))(jnp.full((1, 1), w))
    assert float(value) == float(y)
    assert grad.tolist() == [[float(np.float16(F32(1) - y.astype(F32) ** 2))]]


def test_snapping_follows_the_cast_and_passes_gradients_through() -> None:
    task = dyadic_task(layers=(Dense("w", snap=Snap(0.25, 1.0)),), parameters={"w": np.ones((4, 1), F32)})
    w = jnp.array([[0.124], [0.126], [-3.0], [0.375]], jnp.float16)
    out, grad = jax.value_and_grad(lambda w: jnp.sum(model.forward(task, {"w": w}, jnp.array([[1.0, 8.0, 64.0, 512.0]]))))(w)
    assert float(out) == 0 + 0.25 * 8 - 64 + 0.5 * 512
    assert grad[:, 0].tolist() == [1, 8, 64, 512]


def test_losses_are_float32() -> None:
    task = dyadic_task(loss="softmax_cross_entropy")
    logits = jnp.array([[70000.0, 0.0], [1.0, 1.0]])
    value = model.loss(task, logits, jnp.array([1, 0]))
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, (70000 + np.log(2)) / 2, rtol=1e-6)
    assert float(model.loss(dyadic_task(), jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 2.0]]))) == 2


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_scale_driver_follows_a_script(execution: Execution) -> None:
    config = LossScale.dynamic(init_scale=8, growth_interval=3)
    driver, state = backend.scale_driver(config, "cpu", execution), config.init()
    for event in "..X...XX...":
        driver.update(event == ".")
        state = config.update(state, event == ".")
        mapping = driver.state_dict()
        assert {k: mapping[k] for k in ("scale", "good_steps", "skipped", "consecutive_skips", "steps")} == {
            k: getattr(state, k) for k in ("scale", "good_steps", "skipped", "consecutive_skips", "steps")
        }
    other = backend.scale_driver(LossScale.none(), "cpu", execution)
    other.load_state_dict(mapping)
    assert other.state_dict() == mapping


def test_prediction_is_float32_under_the_policy() -> None:
    trainer = backend.trainer(dyadic_task(), "cpu", "compiled")
    out = trainer.predict(np.ones((3, 8), F32))
    assert out.dtype == F32
    assert out.shape == (3, 2)


def test_capabilities_and_probe_answer_for_this_machine() -> None:
    claims, probe = backend.capabilities(), backend.probe("cpu")
    assert "cpu" in claims.devices
    assert claims.subnormals["cpu"]["float16"] == probe["float16_subnormals"]
    assert probe["float16_matmul_accumulation"] in ("float32", "float16")
    assert probe["bias_gradient"] == "float16"  # why the model broadcasts biases in float32
    assert set(backend.versions()) == {"jax", "jaxlib", "optax", "numpy"}


def test_what_is_not_claimed_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="device 'tpu9'"):
        backend.trainer(dyadic_task(), "tpu9", "compiled")
    with pytest.raises(UnsupportedError, match="'gelu'"):
        backend.trainer(dyadic_task(layers=(Dense("w1", activation="gelu"),)), "cpu", "compiled")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="'hinge'"):
        backend.trainer(dyadic_task(loss="hinge"), "cpu", "compiled")
    with pytest.raises(UnsupportedError, match="'lamb'"):
        backend.trainer(dyadic_task(optimizer=OptimizerSpec("lamb", {})), "cpu", "compiled")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="'traced'"):
        backend.trainer(dyadic_task(), "cpu", "traced")  # type: ignore[arg-type]
