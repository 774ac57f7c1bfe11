"""The conformance runner: plug-in, capabilities, probe, drivers, and a trainer whose arithmetic is checked against numpy."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import polyamp_torch
from polyamp import LossScale, LossScaleStalled, Policy, UnsupportedError, get_backend
from polyamp.registry import get_environment
from polyamp.task import Dense, OptimizerSpec, Snap, TrainingTask
from polyamp_torch.runner import TorchBackend, compiler, probe
from polyamp_torch.runner.model import TaskModel, task_loss

pytestmark = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\.")  # torch.compile uses deprecated parts of torch

SGD = OptimizerSpec("sgd", {"learning_rate": 0.25, "momentum": 0.5})
ADAMW = OptimizerSpec("adamw", {"learning_rate": 0.125, "beta1": 0.5, "beta2": 0.75, "epsilon": 1e-8, "weight_decay": 0.125})
BACKEND = TorchBackend()


def dyadic_task(**changes):
    rng = np.random.default_rng(0)
    parameters = {name: (rng.integers(-8, 9, shape) / 16).astype(np.float32) for name, shape in {"w1": (8, 8), "w2": (8, 4)}.items()}
    task = TrainingTask(
        workload="dyadic",
        layers=(Dense("w1", activation="relu", snap=Snap(1 / 16, 2.0)), Dense("w2", snap=Snap(1 / 16, 2.0))),
        loss="mse",
        parameters=parameters,
        optimizer=SGD,
        policy=Policy("mixed_float16"),
        loss_scale=LossScale.dynamic(2.0**18, growth_interval=3),
        batch_size=8,
    )
    return replace(task, **changes)


def batches(count, outputs=4):
    rng = np.random.default_rng(1)
    for _ in range(count):
        yield (rng.integers(0, 5, (8, 8)) / 4).astype(np.float32), (rng.integers(0, 2, (8, outputs)) * 4).astype(np.float32)


class Reference:
    """The dyadic network, momentum and loss scale in numpy; exact, so any correct implementation gives the same bits."""

    def __init__(self, task):
        self.w = {k: v.copy() for k, v in task.parameters.items()}
        self.v = {k: np.zeros_like(v) for k, v in self.w.items()}
        self.config, self.state = task.loss_scale, task.loss_scale.init()

    @staticmethod
    def half(x):
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(x, np.float64).astype(np.float16).astype(np.float64)

    def snapped(self, name):
        return np.clip(np.rint(self.half(self.w[name]) * 16), -32, 32) / 16

    def step(self, x, y):
        half, w1, w2 = self.half, self.snapped("w1"), self.snapped("w2")
        hidden = half(x @ w1)
        active = np.maximum(hidden, 0)
        out = half(active @ w2)
        loss = np.mean((out - y) ** 2)
        with np.errstate(invalid="ignore"):
            d_out = half(2 * (out - y) / y.size * self.state.scale)
            g2 = half(active.T @ d_out)
            d_hidden = np.where(hidden > 0, half(d_out @ w2.T), 0)
            g1 = half(x.T @ d_hidden)
        finite = bool(np.isfinite(g1).all() and np.isfinite(g2).all())
        before, self.state = self.state, self.config.update(self.state, finite)
        if finite:
            for name, g in (("w1", g1), ("w2", g2)):
                self.v[name] = np.float32(0.5) * self.v[name] + (g / before.scale).astype(np.float32)
                self.w[name] = self.w[name] - np.float32(0.25) * self.v[name]
        return before.scale, self.state.scale, not finite, loss


@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_dyadic_training_is_bit_identical_to_numpy(execution):
    task = dyadic_task()
    trainer, reference = BACKEND.trainer(task, "cpu", execution), Reference(task)
    skips = 0
    for x, y in batches(60):
        outcome = trainer.step(x, y)
        scale, scale_after, skipped, loss = reference.step(x, y)
        assert (outcome.scale, outcome.scale_after, outcome.skipped) == (scale, scale_after, skipped)
        assert outcome.loss == pytest.approx(loss, rel=1e-6)
        after = trainer.snapshot()
        skips += skipped
        for name in task.parameters:
            assert np.array_equal(after.parameters[name], reference.w[name])
            assert np.array_equal(after.slots["v"][name], reference.v[name])
        assert after.optimizer_steps == reference.state.steps - reference.state.skipped
    assert 5 < skips < 40


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=lambda o: o.name)
@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_a_snapshot_of_one_trainer_continues_in_another(optimizer, execution):
    task = dyadic_task(optimizer=optimizer)
    first = BACKEND.trainer(task, "cpu", execution)
    data = list(batches(12))
    for x, y in data[:6]:
        first.step(x, y)
    second = BACKEND.trainer(dyadic_task(optimizer=optimizer, loss_scale=LossScale.static(2.0)), "cpu", execution)
    second.restore(first.snapshot())
    for x, y in data[6:]:
        assert first.step(x, y) == second.step(x, y)
    left, right = first.snapshot(), second.snapshot()
    assert left.loss_scale == right.loss_scale
    assert left.optimizer_steps == right.optimizer_steps
    for name in task.parameters:
        assert np.array_equal(left.parameters[name], right.parameters[name])
        for slot in left.slots:
            assert np.array_equal(left.slots[slot][name], right.slots[slot][name])


def test_the_first_step_from_zero_slots_is_the_first_step():
    """torch copies the first gradient into an absent momentum; zeros that are there must give the same."""
    fresh, restored = (BACKEND.trainer(dyadic_task(loss_scale=LossScale.static(8.0)), "cpu", "eager") for _ in range(2))
    restored.restore(fresh.snapshot())
    x, y = next(batches(1))
    fresh.step(x, y)
    restored.step(x, y)
    assert np.array_equal(fresh.snapshot().slots["v"]["w1"], restored.snapshot().slots["v"]["w1"])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=lambda o: o.name)
def test_given_gradients_are_scaled_ones(optimizer, bad):
    task = dyadic_task(optimizer=optimizer, loss_scale=LossScale.dynamic(8.0))
    trainer = BACKEND.trainer(task, "cpu", "eager")
    gradients = {name: np.full_like(w, 8.0) for name, w in task.parameters.items()}
    outcome = trainer.apply(gradients)
    assert (outcome.scale, outcome.skipped, math.isnan(outcome.loss)) == (8.0, False, True)
    before = trainer.snapshot()
    if optimizer is SGD:
        assert np.array_equal(before.slots["v"]["w1"], np.ones((8, 8), np.float32))
        assert np.array_equal(before.parameters["w1"], task.parameters["w1"] - 0.25)
    gradients["w2"][-1, -1] = bad
    outcome = trainer.apply(gradients)
    assert (outcome.scale, outcome.scale_after, outcome.skipped) == (8.0, 4.0, True)
    after = trainer.snapshot()
    assert after.optimizer_steps == before.optimizer_steps == 1
    assert all(np.array_equal(before.parameters[n], after.parameters[n]) for n in task.parameters)
    assert all(np.array_equal(before.slots[s][n], after.slots[s][n]) for s in before.slots for n in task.parameters)


def test_loss_factor_is_left_out_of_the_recorded_loss():
    task = dyadic_task(loss_scale=LossScale.dynamic(8.0))
    x, y = next(batches(1))
    plain, poisoned = (BACKEND.trainer(task, "cpu", "eager").step(x, y, factor) for factor in (1.0, math.inf))
    assert plain.loss == poisoned.loss
    assert (plain.skipped, poisoned.skipped) == (False, True)


def test_without_momentum_the_velocity_is_the_gradient():
    task = dyadic_task(optimizer=OptimizerSpec("sgd", {"learning_rate": 1.0, "momentum": 0.0}), loss_scale=LossScale.static(4.0))
    trainer = BACKEND.trainer(task, "cpu", "eager")
    trainer.apply({name: np.full_like(w, 8.0) for name, w in task.parameters.items()})
    assert np.array_equal(trainer.snapshot().slots["v"]["w2"], np.full((8, 4), 2.0, np.float32))


def test_predict_rounds_as_training_does():
    task = dyadic_task()
    x, _ = next(batches(1))
    reference = Reference(task)
    expected = reference.half(np.maximum(reference.half(x @ reference.snapped("w1")), 0) @ reference.snapped("w2"))
    result = BACKEND.trainer(task, "cpu", "eager").predict(x)
    assert result.dtype == np.float32
    assert np.array_equal(result, expected)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32"])
def test_biases_tanh_and_cross_entropy(policy):
    """Against float32 by hand, within the compute dtype's precision."""
    rng = np.random.default_rng(3)
    parameters = {name: rng.normal(size=shape).astype(np.float32) / 4 for name, shape in {"w1": (8, 8), "b1": (8,), "w2": (8, 4), "b2": (4,)}.items()}
    layers = (Dense("w1", "b1", "tanh"), Dense("w2", "b2"))
    task = dyadic_task(layers=layers, parameters=parameters, loss="softmax_cross_entropy", policy=Policy(policy), loss_scale=LossScale.static(16.0))
    x, classes = rng.normal(size=(8, 8)).astype(np.float32), rng.integers(0, 4, 8).astype(np.int32)
    logits = np.tanh(x @ parameters["w1"] + parameters["b1"]) @ parameters["w2"] + parameters["b2"]
    likelihood = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    outcome = BACKEND.trainer(task, "cpu", "eager").step(x, classes)
    tolerance = {"mixed_float16": 2e-3, "mixed_bfloat16": 2e-2, "float32": 1e-6}[policy]
    assert outcome.loss == pytest.approx(-likelihood[np.arange(8), classes].mean(), rel=tolerance)


def test_bias_is_added_after_the_product_is_rounded():
    """2048 + 1 has no float16: rounding before the bias gives 2048 + 1 -> 2048, rounding once 2050."""
    parameters = {"w": np.array([[2048.0], [1.0]], np.float32), "b": np.array([1.0], np.float32)}
    task = dyadic_task(layers=(Dense("w", "b"),), parameters=parameters)
    assert BACKEND.trainer(task, "cpu", "eager").predict(np.ones((1, 2), np.float32)).item() == 2048.0


@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_bias_gradients_are_reduced_in_float32(execution):
    """Partial sums beyond 65504 in a column whose sum is finite: a reduction in 16 bits would overflow or lose ones."""
    model = TaskModel(dyadic_task(layers=(Dense("w", "b"),), parameters={"w": np.zeros((1, 1), np.float32), "b": np.zeros(1, np.float32)}), "cpu")
    loss = compiler.compile_whole(task_loss, "cpu") if execution == "compiled" else task_loss
    for column, expected in (([4e4, 4e4, -4e4], 4e4), ([2048.0] + [1.0] * 2048, 4096.0)):
        model.zero_grad()
        targets = -torch.tensor(column)[:, None] * len(column) / 2
        loss(model, torch.zeros(len(column), 1), targets).backward()
        assert model.by_name["b"].grad.item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_a_driver_follows_the_reference_and_restores(execution):
    config = LossScale.dynamic(8.0, growth_interval=3, hysteresis=2, min_scale=2.0)
    driver, state = BACKEND.scale_driver(config, "cpu", execution), config.init()
    for number, event in enumerate("..X...XXX.XXXX....."):
        if number == 7:
            saved = dict(driver.state_dict())
            driver = BACKEND.scale_driver(LossScale.static(4.0), "cpu", execution)
            driver.load_state_dict(saved)
        driver.update(event == ".")
        state = config.update(state, event == ".")
        assert {k: v for k, v in driver.state_dict().items() if k in state.__dataclass_fields__} == {
            name: getattr(state, name) for name in state.__dataclass_fields__
        }


@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_a_driver_stalls(execution):
    driver = BACKEND.scale_driver(LossScale.dynamic(max_consecutive_skips=2), "cpu", execution)
    driver.update(False)
    with pytest.raises(LossScaleStalled, match="2 steps in a row"):
        driver.update(False)


@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_a_driver_without_a_check_never_skips(execution):
    driver = BACKEND.scale_driver(LossScale.none(), "cpu", execution)
    driver.update(False)
    assert driver.state_dict()["skipped"] == 0
    assert driver.state_dict()["steps"] == 1


def test_capabilities_are_those_of_this_machine():
    claimed = BACKEND.capabilities()
    assert claimed.executions == ("eager", "compiled")
    assert claimed.formats["cpu"] == ("float32", "bfloat16", "float16")
    assert ("cuda" in claimed.devices) is torch.cuda.is_available()
    assert set(claimed.subnormals["cpu"].values()) <= {"kept", "flushed"}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"policy": Policy("bf16-true")}, "param_dtype 'bfloat16'"),
        ({"loss": "hinge"}, "loss 'hinge'"),
        ({"optimizer": OptimizerSpec("lion", {})}, "optimizer 'lion'"),
        ({"layers": (Dense("w1", activation="gelu"), Dense("w2"))}, "activation 'gelu'"),
    ],
)
def test_what_is_not_claimed_is_refused(changes, match):
    with pytest.raises(UnsupportedError, match=match):
        BACKEND.trainer(dyadic_task(**changes), "cpu", "eager")
    for call in (BACKEND.probe, lambda device: BACKEND.trainer(dyadic_task(), device, "eager")):
        with pytest.raises(UnsupportedError, match="device 'tpu'"):
            call("tpu")


def test_probe_measures():
    measured = BACKEND.probe("cpu")
    assert measured["float16_round_trip"] == "kept"
    assert set(measured) >= {"float16_matmul_accumulation", "float16_subnormals", "float32_subnormals", "compile_backend"}
    assert measured["compile_backend"] == compiler.compile_backend("cpu") == BACKEND.versions()["torch.compile"]


def test_probe_notices_flushed_subnormals():
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU can't flush")
    try:
        assert probe.subnormals("cpu", "float32") == "flushed"
    finally:
        torch.set_flush_denormal(False)
    assert probe.subnormals("cpu", "float32") == "kept"


def test_without_a_compiler_the_graph_is_run_by_aot_eager(monkeypatch):
    compiler.compile_backend.cache_clear()
    monkeypatch.setattr(compiler.shutil, "which", lambda _: None)
    try:
        assert compiler.compile_backend("cpu") == "aot_eager"
        assert compiler.compile_whole(lambda x: x.half().float(), "cpu")(torch.tensor([70000.0])).item() == math.inf
    finally:
        compiler.compile_backend.cache_clear()


def test_the_registry_finds_the_backend():
    assert isinstance(get_backend("torch"), TorchBackend)
    assert get_environment("torch") == {}


def test_the_package_offers_its_names_and_no_others():
    assert {"GradScaler", "autocast"} <= set(dir(polyamp_torch))
    assert polyamp_torch.__all__ == ["GradScaler", "autocast"]
    with pytest.raises(AttributeError, match="no attribute 'scaler'"):
        _ = polyamp_torch.scaler


def test_the_plug_in_module_imports_no_framework():
    code = "import polyamp_torch.plugin, sys; polyamp_torch.plugin.polyamp_get_environment('torch'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_compiler_that_removes_casts_is_not_claimed(monkeypatch):
    measured = dict(BACKEND.probe("cpu"))
    monkeypatch.setattr(TorchBackend, "probe", lambda self, device: measured | {"float16_round_trip": "removed"})
    with pytest.raises(UnsupportedError, match="removes casts to float16"):
        BACKEND.trainer(dyadic_task(), "cpu", "compiled")
    outcome = BACKEND.trainer(dyadic_task(), "cpu", "eager").step(np.ones((8, 8), np.float32), np.ones((8, 4), np.float32))
    assert math.isfinite(outcome.loss)
