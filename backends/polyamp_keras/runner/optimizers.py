"""Optimizers of a `TrainingTask` in Keras, and their slots by the names that all backends share.

Rules (docs/spec.md, section 9.2)
- Keras' SGD keeps m = momentum * m - learning_rate * g and adds it; the shared slot is v = -m / learning_rate, exact for powers of two.
- Keras' AdamW divides by sqrt(v) + epsilon where the task's recipe divides by sqrt(v / (1 - beta2^t)) + epsilon: Keras' epsilon counts as
  epsilon / sqrt(1 - beta2^t) there. Tasks keep epsilon far below sqrt(v), so that the difference stays below their tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from polyamp.task import Array, OptimizerSpec
from polyamp_keras.native import host

__all__ = ["build", "read_slots", "write_slots"]

_SUFFIXES = {"sgd": {"v": "momentum"}, "adamw": {"m": "momentum", "v": "velocity"}}
"""By optimizer: shared slot name -> how the names of Keras' slot variables end."""


def build(spec: OptimizerSpec) -> keras.optimizers.Optimizer:
    """The Keras optimizer of a spec."""
    h = {name: float(value) for name, value in spec.hyperparameters.items()}
    if spec.name == "sgd":
        return keras.optimizers.SGD(h["learning_rate"], momentum=h["momentum"])
    return keras.optimizers.AdamW(h["learning_rate"], beta_1=h["beta1"], beta_2=h["beta2"], epsilon=h["epsilon"], weight_decay=h["weight_decay"])


def read_slots(spec: OptimizerSpec, optimizer: keras.optimizers.Optimizer, names: Sequence[str]) -> dict[str, dict[str, Array]]:
    """Slots by shared name, then by parameter; `names` are those of the variables that the optimizer was built on, in order."""
    found = {slot: [host(v) for v in variables] for slot, variables in _slot_variables(spec, optimizer).items()}
    return {slot: dict(zip(names, (_shared(spec, value) for value in values), strict=True)) for slot, values in found.items() if values}


def write_slots(spec: OptimizerSpec, optimizer: keras.optimizers.Optimizer, names: Sequence[str], slots: Mapping[str, Mapping[str, Array]]) -> None:
    """Sets the slots from shared ones."""
    for slot, variables in _slot_variables(spec, optimizer).items():
        for name, variable in zip(names, variables, strict=bool(variables)):
            variable.assign(_native(spec, np.asarray(slots[slot][name], dtype="float32")))


def _slot_variables(spec: OptimizerSpec, optimizer: keras.optimizers.Optimizer) -> dict[str, list[Any]]:
    return {
        slot: [variable for variable in optimizer.variables if variable.name.endswith(f"_{suffix}")] for slot, suffix in _SUFFIXES[spec.name].items()
    }


def _shared(spec: OptimizerSpec, value: Array) -> Array:
    # + 0 turns the -0 of an untouched slot into 0.
    return value / np.float32(-spec.hyperparameters["learning_rate"]) + np.float32(0) if spec.name == "sgd" else value


def _native(spec: OptimizerSpec, value: Array) -> Array:
    return value * np.float32(-spec.hyperparameters["learning_rate"]) if spec.name == "sgd" else value
