"""Training task: a workload as it is handed to a backend - arrays and data, no framework.

Rules (docs/spec.md, section 9)
- Arrays are numpy arrays (anything with the buffer protocol), C-contiguous. Weights are float32 with layout (in, out), biases (out,).
- A `Dense` layer computes `activation(x @ w + b)`; x, w and b are cast to the policy's compute dtype, the matmul accumulates in float32 and
  rounds once, the bias is added in the compute dtype and its gradient is reduced in float32.
- `snap` replaces w, after the cast, by its nearest multiple of `step` within +-limit; the gradient passes straight through.
- The last layer's result is cast to the policy's output dtype (float32) and the loss is computed in float32.
- `"mse"` is the mean over all elements of (prediction - target)^2, targets float32; `"softmax_cross_entropy"` is the mean over the batch of
  the negative log-likelihood, targets int32 class numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from polyamp.loss_scale import LossScale
from polyamp.policy import Policy

__all__ = ["Array", "Dense", "OptimizerSpec", "Snap", "StepOutcome", "TrainingTask"]

Array = Any
"""A numpy array. The core does not import numpy."""


@dataclass(frozen=True)
class Snap:
    """Grid of a snapped weight: multiples of `step`, a power of two, within +-limit."""

    step: float
    limit: float


@dataclass(frozen=True)
class Dense:
    """One fully connected layer; `weight` and `bias` name entries of `TrainingTask.parameters`."""

    weight: str
    bias: str | None = None
    activation: Literal["relu", "tanh"] | None = None
    snap: Snap | None = None


@dataclass(frozen=True)
class OptimizerSpec:
    """Optimizer and its hyperparameters.

    `"sgd"`: learning_rate, momentum; v = momentum * v + g, w = w - learning_rate * v. Slots: `{"v": ...}`.
    `"adamw"`: learning_rate, beta1, beta2, epsilon, weight_decay, bias-corrected, decay decoupled and scaled by the learning rate.
    Slots: `{"m": ..., "v": ...}`.
    """

    name: Literal["sgd", "adamw"]
    hyperparameters: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """Everything that a backend needs to build and train a workload.

    Attributes:
        workload: name for headers and messages.
        layers: the network, first layer first.
        loss: loss function.
        parameters: initial float32 values by name, in the order in which digests and reports take them.
        optimizer: optimizer of all parameters.
        policy: dtype policy.
        loss_scale: loss-scale configuration.
        batch_size: rows of every batch.
    """

    workload: str
    layers: tuple[Dense, ...]
    loss: Literal["mse", "softmax_cross_entropy"]
    parameters: Mapping[str, Array]
    optimizer: OptimizerSpec
    policy: Policy
    loss_scale: LossScale
    batch_size: int


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one training step did.

    Attributes:
        scale: scale in force for the step.
        scale_after: scale in force for the next one.
        skipped: whether nothing but the loss scale moved.
        loss: unscaled loss; NaN where the step was given its gradients.
    """

    scale: float
    scale_after: float
    skipped: bool
    loss: float
