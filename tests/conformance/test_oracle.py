"""The oracle itself: rounding, gradients, headroom and certificate, against values worked out by hand or by other means."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp.formats import FORMATS
from polyamp.loss_scale import LossScale
from polyamp.policy import Policy
from polyamp.task import Dense, OptimizerSpec, Snap, TrainingTask
from polyamp_conformance.oracle import network, optimizers
from polyamp_conformance.oracle.rounding import Rounder
from polyamp_conformance.oracle.tape import granule
from polyamp_conformance.oracle.trainer import OracleTrainer

X = np.array([[1.0, 2.0], [3.0, -1.0]], np.float32)


def task(**changes) -> TrainingTask:
    """Two inputs, one output, weights (1, -0.5), no bias: small enough to work out by hand."""
    base = TrainingTask(
        workload="hand",
        layers=(Dense("w"),),
        loss="mse",
        parameters={"w": np.array([[1.0], [-0.5]], np.float32)},
        optimizer=OptimizerSpec("sgd", {"learning_rate": 0.25, "momentum": 0.5}),
        policy=Policy("mixed_float16"),
        loss_scale=LossScale.dynamic(init_scale=4.0, growth_interval=2),
        batch_size=2,
    )
    return replace(base, **changes)


Y = np.array([[1.0], [3.0]], np.float32)
# Predictions 0 and 3.5, errors -1 and 0.5, loss (1 + 0.25) / 2; d loss / d w = x^T (2 error / 2) = (-1 + 1.5, -2 - 0.5).
LOSS, GRADIENT = 0.625, np.array([[0.5], [-2.5]], np.float32)


def test_loss_and_scaled_gradient_by_hand() -> None:
    result = network.gradients(task(), task().parameters, X, Y, 4.0)
    assert result.loss == LOSS
    np.testing.assert_array_equal(result.scaled["w"], 4 * GRADIENT)


def test_two_steps_of_sgd_with_momentum_by_hand() -> None:
    trainer = OracleTrainer(task())
    outcome = trainer.step(X, Y)
    assert (outcome.scale, outcome.scale_after, outcome.skipped, outcome.loss) == (4.0, 4.0, False, LOSS)
    np.testing.assert_array_equal(trainer.slots["v"]["w"], GRADIENT)
    np.testing.assert_array_equal(trainer.weights["w"], [[1 - 0.125], [-0.5 + 0.625]])
    second = trainer.apply({"w": np.array([[4.0], [8.0]], np.float32)})
    assert (second.scale, second.scale_after) == (4.0, 8.0)
    np.testing.assert_array_equal(trainer.slots["v"]["w"], [[0.25 + 1.0], [-1.25 + 2.0]])
    np.testing.assert_array_equal(trainer.weights["w"], [[0.875 - 0.3125], [0.125 - 0.1875]])


def test_adamw_first_step_moves_by_the_learning_rate() -> None:
    spec = OptimizerSpec("adamw", {"learning_rate": 0.125, "beta1": 0.5, "beta2": 0.75, "epsilon": 1e-16, "weight_decay": 0.5})
    w, slots = optimizers.update(
        spec, {"w": np.float32([2.0])}, {"m": {"w": np.float32([0])}, "v": {"w": np.float32([0])}}, {"w": np.float32([-4.0])}, 1
    )
    assert slots["m"]["w"] == -2.0
    assert slots["v"]["w"] == 4.0
    assert w["w"] == 2.0 - 0.125 * (-1.0 + 0.5 * 2.0)


def test_bias_relu_and_snap_gradients_by_hand() -> None:
    layers = (Dense("w", "b", "relu", Snap(0.25, 0.5)),)
    parameters = {"w": np.array([[0.3], [-0.9]], np.float32), "b": np.array([1.0], np.float32)}  # snapped: 0.25, -0.5
    t = task(layers=layers, parameters=parameters)
    # Sums 0.25 - 1 + 1 = 0.25 and 0.75 + 0.5 + 1 = 2.25; targets 1 and 3: errors -0.75 and -0.75; the gradient passes the snap.
    result = network.gradients(t, parameters, X, Y, 1.0)
    assert result.loss == 0.5625
    np.testing.assert_array_equal(result.scaled["b"], [-1.5])
    np.testing.assert_array_equal(result.scaled["w"], [[-0.75 - 2.25], [-1.5 + 0.75]])


@pytest.mark.parametrize("loss", ["mse", "softmax_cross_entropy"])
def test_gradients_agree_with_finite_differences(loss: str) -> None:
    rng = np.random.default_rng(3)
    parameters = {
        name: rng.standard_normal(shape).astype(np.float32) / 2 for name, shape in (("w1", (3, 4)), ("b1", (4,)), ("w2", (4, 3)), ("b2", (3,)))
    }
    layers = (Dense("w1", "b1", "tanh"), Dense("w2", "b2"))
    t = task(layers=layers, parameters=parameters, loss=loss, policy=Policy("float32"))
    x = rng.standard_normal((5, 3)).astype(np.float32)
    y = rng.standard_normal((5, 3)).astype(np.float32) if loss == "mse" else np.array([0, 1, 2, 1, 0], np.int32)
    got = network.gradients(t, parameters, x, y, 1.0).scaled
    for name, value in parameters.items():
        for index in np.ndindex(value.shape):
            step = np.zeros_like(value)
            step[index] = 2.0**-6
            up, down = (network.gradients(t, {**parameters, name: value + sign * step}, x, y, 1.0).loss for sign in (1, -1))
            assert got[name][index] == pytest.approx((up - down) / 2**-5, abs=2e-3)


def test_each_cotangent_is_rounded_to_the_compute_dtype() -> None:
    y = Y + np.float32(2.0**-13)  # errors with bits that float16 drops
    scaled = network.gradients(task(), task().parameters, X, y, 1.0).scaled["w"]
    np.testing.assert_array_equal(scaled, scaled.astype(np.float16).astype(np.float32))
    assert (network.gradients(task(policy=Policy("float32")), task().parameters, X, y, 1.0).scaled["w"] != scaled).any()


def test_overflow_gives_infinity_and_negative_headroom() -> None:
    # The largest |cotangent| is 2.5 per unit of scale.
    for scale, finite in ((2.0**14, True), (2.0**15, False)):
        result = network.gradients(task(), task().parameters, X, Y, scale)
        assert np.isfinite(result.scaled["w"]).all() == finite
        about = network.probe(task(), task().parameters, X, Y, scale)
        assert about.headroom == pytest.approx(np.log2(65504 / (2.5 * scale)))
        assert (about.headroom > 0) == finite


def test_ambiguous_is_a_finite_bias_sum_that_some_order_overflows() -> None:
    t = task(layers=(Dense("w", "b"),), parameters={"w": np.zeros((2, 1), np.float32), "b": np.zeros(1, np.float32)}, batch_size=4)
    x = np.zeros((4, 2), np.float32)
    opposing, alike = np.array([[1], [1], [-1], [-1]], np.float32), np.array([[1], [1], [1], [1]], np.float32)
    assert network.probe(t, t.parameters, x, opposing, 2.0**16).ambiguous  # two terms of 2^15 either way, sum 0
    assert not network.probe(t, t.parameters, x, opposing, 2.0**13).ambiguous
    assert not network.probe(t, t.parameters, x, alike, 2.0**16).ambiguous  # simply an overflow


def test_masked_infinity_is_seen() -> None:
    layers = (Dense("w1", None, "relu"), Dense("w2"))
    parameters = {"w1": np.array([[-1.0]], np.float32), "w2": np.array([[4.0]], np.float32)}
    t = task(layers=layers, parameters=parameters)
    x, y = np.array([[1.0]], np.float32), np.array([[-1.0]], np.float32)
    assert network.probe(t, parameters, x, y, 2.0**14).masked_inf  # 2^15 x 4 overflows behind a closed ReLU
    assert not network.probe(t, parameters, x, y, 2.0**12).masked_inf


def test_certificate_counts_bits_of_the_largest_partial_sum() -> None:
    # Forward: |1 x 1| + |2 x 0.5| = 2, units 1 and 1/2: 2 bits; |3| + |0.5| = 3.5 in units of 1/2: log2(7).
    recorder = network.gradients(task(), task().parameters, X, Y, 1.0, certify=True).recorder
    # Backward: x^T g with g = (-1, 0.5): |1| + |1.5| and |2| + |0.5| in units of 1/2: log2(5). The forward sum decides.
    assert recorder.bits == pytest.approx(np.log2(7))


@pytest.mark.parametrize(("values", "exponent"), [([1.0], 0), ([3.0, 0.5], -1), ([4.0, 12.0], 2), ([0.0], 0), ([np.inf, 2.0], 1), ([0.1], -55)])
def test_granule_is_the_largest_power_of_two_that_divides_all(values: list[float], exponent: int) -> None:
    assert granule(np.array(values)) == exponent


_BITS = st.integers(0, 2**32 - 1).map(lambda bits: float(np.uint32(bits).view(np.float32)))


@given(_BITS)
def test_ieee_rounding_agrees_with_the_written_format(value: float) -> None:
    for name in ("float16", "bfloat16"):
        expected = FORMATS[name].round(value)
        got = float(Rounder(name)(np.array([value]))[0])
        assert got == expected or (np.isnan(got) and np.isnan(expected))


@given(st.floats(-65504, 65504))
def test_wide_rounding_is_ieee_rounding_within_range(value: float) -> None:
    assert Rounder("float16", "wide")(np.array([value]))[0] == Rounder("float16")(np.array([value]))[0]


def test_wide_rounding_has_no_upper_end() -> None:
    assert Rounder("float16", "wide")(np.array([65520.0, 2.0**20 + 1, -(2.0**30)])).tolist() == [65536.0, 2.0**20, -(2.0**30)]
    assert ml_dtypes.finfo(np.float16).max == 65504
