"""Workloads: seeded training runs as framework-free arrays.

Rules (docs/spec.md, sections 9.2 and 9.3)
- Workloads are cached: treat their arrays as constants.
- A workload gives its task (network, initial values, optimizer, policy, loss scale), its batches in order and its held-out rows.
- `digits-mlp` is an ordinary network: judged by replay and injection; of its free run only the first 25 steps must match.
- `digits-exact` is its dyadic sister: every product and partial sum is exact in float32 in any order, so scale, skips and master bits
  must match on every step. The oracle certifies it (at most 24 bits).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from polyamp.loss_scale import LossScale
from polyamp.policy import Policy
from polyamp.task import Dense, OptimizerSpec, Snap, TrainingTask
from polyamp_conformance.data import Array, batch_order, digits, stream

__all__ = ["OPTIMIZERS", "Workload", "digits_exact", "digits_mlp"]

_WEIGHTS, _BATCHES = 101, 7

OPTIMIZERS: Mapping[str, OptimizerSpec] = {
    "sgd": OptimizerSpec("sgd", {"learning_rate": 0.05, "momentum": 0.9}),
    # Epsilon lies far below any gradient that float16 can carry at these scales: frameworks place it differently, and here it must not matter.
    "adamw": OptimizerSpec("adamw", {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-16, "weight_decay": 0.01}),
}


@dataclass(frozen=True)
class Workload:
    """A training run.

    Attributes:
        task: what is trained.
        inputs: float32 (steps, batch, features).
        targets: float32 (steps, batch, outputs) or int32 (steps, batch).
        held_out_inputs: float32 (rows, features).
        held_out_classes: int32 (rows,).
    """

    task: TrainingTask
    inputs: Array
    targets: Array
    held_out_inputs: Array
    held_out_classes: Array

    @property
    def steps(self) -> int:
        return len(self.inputs)

    def accuracy(self, outputs: Array) -> float:
        """Share of held-out rows whose largest output is their class."""
        return float(np.mean(np.argmax(np.asarray(outputs)[:, :10], axis=1) == self.held_out_classes))

    def with_task(self, **changes: Any) -> Workload:
        """The same run with fields of the task changed."""
        return replace(self, task=replace(self.task, **changes))


@lru_cache(maxsize=16)
def digits_mlp(seed: int, optimizer: str, *, steps: int = 800, policy: str = "mixed_float16", loss_scale: LossScale | None = None) -> Workload:
    """64-64-32-10 tanh network with biases, softmax cross-entropy, batch 32; the scale saw-tooths through natural overflows.

    Args:
        seed: fixes initial values and batch order.
        optimizer: a key of `OPTIMIZERS`.
        steps: training steps.
        policy: dtype policy.
        loss_scale: by default dynamic from 2^20 with a growth interval of 20.
    """
    rng, sizes = stream(seed, _WEIGHTS), (64, 64, 32, 10)
    parameters: dict[str, Array] = {}
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes), 1):
        parameters[f"w{i}"] = (rng.standard_normal((fan_in, fan_out)) / np.sqrt(fan_in)).astype(np.float32)
        parameters[f"b{i}"] = (0.1 * rng.standard_normal(fan_out)).astype(np.float32)
    layers = (Dense("w1", "b1", "tanh"), Dense("w2", "b2", "tanh"), Dense("w3", "b3"))
    pixels, classes, held_pixels, held_classes = digits()
    order = batch_order(stream(seed, _BATCHES), len(classes), steps, 32)
    task = TrainingTask(
        workload=f"digits-mlp/{optimizer}",
        layers=layers,
        loss="softmax_cross_entropy",
        parameters=parameters,
        optimizer=OPTIMIZERS[optimizer],
        policy=Policy(policy),
        loss_scale=loss_scale or LossScale.dynamic(init_scale=2.0**20, growth_interval=20),
        batch_size=32,
    )
    return Workload(task, pixels[order], classes[order], held_pixels, held_classes)


@lru_cache(maxsize=16)
def digits_exact(seed: int, *, steps: int = 300, init_scale: float = 2.0**20) -> Workload:
    """64-32-16 ReLU network without biases on pixels rounded to quarters: dyadic, so that every float32 sum is exact.

    Weights are snapped to multiples of 1/16 within +-2, targets are one-hot vectors times 4 padded to 16, the loss is the mean square
    over 256 elements, SGD has learning rate 1/4 and momentum 1/2.
    """
    rng = stream(seed, _WEIGHTS)
    snap = Snap(step=2.0**-4, limit=2.0)

    def dyadic(*shape: int) -> Array:
        return (np.clip(np.rint(rng.standard_normal(shape) * 4), -8, 8) / 16 + 0.0).astype(np.float32)

    pixels, classes, held_pixels, held_classes = digits()
    order = batch_order(stream(seed, _BATCHES), len(classes), steps, 16)
    one_hot = (4 * np.eye(16)[classes]).astype(np.float32)
    quarters = np.rint(pixels * 4).astype(np.float32) / 4
    task = TrainingTask(
        workload="digits-exact",
        layers=(Dense("w1", activation="relu", snap=snap), Dense("w2", snap=snap)),
        loss="mse",
        parameters={"w1": dyadic(64, 32), "w2": dyadic(32, 16)},
        optimizer=OptimizerSpec("sgd", {"learning_rate": 0.25, "momentum": 0.5}),
        policy=Policy("mixed_float16"),
        loss_scale=LossScale.dynamic(init_scale=init_scale, growth_interval=4),
        batch_size=16,
    )
    return Workload(task, quarters[order], one_hot[order], np.rint(held_pixels * 4).astype(np.float32) / 4, held_classes)
