"""Trainer: a `TrainingTask` as a stock Keras model, trained with `train_on_batch` through `LossScaleOptimizer`.

Rules (docs/spec.md, section 9.2)
- "eager" is `run_eagerly=True`; "compiled" is what `compile` does by default: `jax.jit` on JAX, `tf.function` on TensorFlow.
- `loss_factor` travels as a sample weight, which Keras multiplies into each row's loss before the mean; a weight of 1 changes no bit.
  The recorded loss is then taken without weights, before the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from polyamp import Policy, StateError, UnsupportedError
from polyamp.backend import Execution, Snapshot
from polyamp.task import Array, StepOutcome, TrainingTask
from polyamp_keras.loss_scale_optimizer import LossScaleOptimizer
from polyamp_keras.native import host
from polyamp_keras.runner.applier import make_applier
from polyamp_keras.runner.devices import device_scope
from polyamp_keras.runner.layers import TaskDense
from polyamp_keras.runner.optimizers import build, read_slots, write_slots

__all__ = ["KerasTrainer"]


class KerasTrainer:
    """Implements `polyamp.backend.Trainer`."""

    def __init__(self, task: TrainingTask, device: str, execution: Execution) -> None:
        self.task = task
        self._device = device
        with device_scope(device):
            self._model, named = _build_model(task)
            self._optimizer = LossScaleOptimizer(build(task.optimizer), task.loss_scale)
            self._model.compile(optimizer=self._optimizer, loss=_loss(task.loss), run_eagerly=execution == "eager")
            self._optimizer.build(self._model.trainable_variables)
            by_id = {id(variable): name for name, variable in named.items()}
            self._names = [by_id[id(variable)] for variable in self._model.trainable_variables]
            self._variables = [named[name] for name in self._names]
            self._assign(task.parameters)
            self._apply: Callable[[list[Array]], None] = make_applier(self._optimizer, self._variables, execution)

    def step(self, inputs: Array, targets: Array, loss_factor: float = 1.0) -> StepOutcome:
        weights = np.full(len(inputs), loss_factor, dtype="float32")
        with device_scope(self._device):
            # Keras before 3.15 returns the mean loss of all steps since the last reset.
            self._model.reset_metrics()
            loss = None if loss_factor == 1.0 else self._model.test_on_batch(inputs, targets, return_dict=True)["loss"]

            def train() -> float:
                weighted = self._model.train_on_batch(inputs, targets, sample_weight=weights, return_dict=True)["loss"]
                return float(weighted if loss is None else loss)

            return self._outcome(train)

    def apply(self, gradients: Mapping[str, Array]) -> StepOutcome:
        _check_names("gradients", gradients, self._names)
        with device_scope(self._device):

            def train() -> float:
                self._apply([np.asarray(gradients[name], dtype="float32") for name in self._names])
                return math.nan

            return self._outcome(train)

    def snapshot(self) -> Snapshot:
        values = {name: host(variable) for name, variable in zip(self._names, self._variables, strict=True)}
        inner = self._optimizer.inner_optimizer
        return Snapshot(
            parameters={name: values[name] for name in self.task.parameters},
            slots=read_slots(self.task.optimizer, inner, self._names),
            optimizer_steps=int(host(inner.iterations)),
            loss_scale=self._optimizer.state_dict(),
        )

    def restore(self, snapshot: Snapshot) -> None:
        inner = self._optimizer.inner_optimizer
        with device_scope(self._device):
            self._assign(snapshot.parameters)
            write_slots(self.task.optimizer, inner, self._names, snapshot.slots)
            inner.iterations.assign(snapshot.optimizer_steps)
            self._optimizer.load_state_dict(snapshot.loss_scale)

    def predict(self, inputs: Array) -> Array:
        with device_scope(self._device):
            return np.asarray(self._model.predict_on_batch(np.asarray(inputs, dtype="float32")), dtype="float32")

    def _assign(self, values: Mapping[str, Array]) -> None:
        _check_names("parameters", values, self._names)
        for name, variable in zip(self._names, self._variables, strict=True):
            variable.assign(np.asarray(values[name], dtype="float32"))

    def _outcome(self, train: Callable[[], float]) -> StepOutcome:
        before = self._optimizer.state_dict()
        loss = train()
        after = self._optimizer.state_dict()
        return StepOutcome(before["scale"], after["scale"], after["skipped"] > before["skipped"], loss)


def _build_model(task: TrainingTask) -> tuple[keras.Model, dict[str, Any]]:
    dtype = _keras_policy(task.policy)
    features = task.parameters[task.layers[0].weight].shape[0]
    layers = [TaskDense(spec, task.parameters[spec.weight].shape[1], dtype=dtype) for spec in task.layers]
    model = keras.Sequential([keras.Input((features,)), *layers, keras.layers.Identity(dtype=task.policy.output_dtype)])
    named = {spec.weight: layer.kernel for spec, layer in zip(task.layers, layers, strict=True)}
    named |= {spec.bias: layer.bias for spec, layer in zip(task.layers, layers, strict=True) if spec.bias is not None}
    if len(named) != len(model.trainable_variables):
        raise UnsupportedError(f"{task.workload}: a parameter is shared by two layers, which this backend does not build")
    return model, named


def _keras_policy(policy: Policy) -> str:
    if policy.ops or policy.islands:
        raise UnsupportedError(f"policy {policy}: this backend builds no op overrides and no islands")
    if not policy.is_mixed:
        return policy.param_dtype
    if policy.param_dtype != "float32":
        raise UnsupportedError(f"policy {policy}: Keras' mixed policies keep float32 parameters")
    return f"mixed_{policy.compute_dtype}"


def _loss(name: str) -> keras.losses.Loss:
    if name == "mse":
        return keras.losses.MeanSquaredError(dtype="float32")
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float32")


def _check_names(what: str, given: Mapping[str, Array], names: list[str]) -> None:
    if set(given) != set(names):
        raise StateError(f"{what} are given for {', '.join(sorted(given))}; the task has {', '.join(sorted(names))}")
