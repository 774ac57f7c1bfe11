"""Network: builds a task's forward pass on the tape and differentiates it.

Rules (docs/spec.md, sections 4.1 and 9.2)
- The scale enters as the cotangent of the loss: scale x loss factor, in float32.
- `probe` gives what the judge needs of a step: headroom, whether a bias sum is order-ambiguous, whether an infinity was masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from polyamp.task import TrainingTask
from polyamp_conformance.data import Array
from polyamp_conformance.oracle.ops import Ops
from polyamp_conformance.oracle.rounding import Mode, Rounder
from polyamp_conformance.oracle.tape import Node, Recorder, backward

__all__ = ["Gradients", "Probe", "forward", "gradients", "probe"]


@dataclass(frozen=True)
class Gradients:
    """Loss and scaled gradients (float32, by parameter name) of one pass, with what was recorded."""

    loss: float
    scaled: Mapping[str, Array]
    recorder: Recorder


@dataclass(frozen=True)
class Probe:
    """How decided a step is.

    Attributes:
        headroom: log2(overflow threshold's maximum / largest |cotangent|): bits left before an overflow, negative after one.
        where: name of the cotangent that comes closest.
        ambiguous: some order of adding up a bias gradient in 16 bits overflows although the sum is finite.
        masked_inf: an infinite cotangent reached no parameter: frameworks disagree on it.
    """

    headroom: float
    where: str
    ambiguous: bool
    masked_inf: bool


def forward(task: TrainingTask, parameters: Mapping[str, Array], inputs: Array, ops: Ops) -> tuple[Node, dict[str, Node]]:
    """Output node (float32) and the parameters' leaf nodes."""
    leaves = {name: ops.leaf(value, name) for name, value in parameters.items()}
    x = ops.leaf(inputs, "inputs", needs_grad=False)
    for number, layer in enumerate(task.layers, 1):
        weight = leaves[layer.weight]
        if layer.snap is not None:
            weight = ops.snap(weight, layer.snap.step, layer.snap.limit, f"{layer.weight}.snapped")
        x = ops.matmul(x, weight, f"layer{number}.product")
        if layer.bias is not None:
            x = ops.add_bias(x, leaves[layer.bias], f"layer{number}.sum")
        if layer.activation == "relu":
            x = ops.relu(x, f"layer{number}.relu")
        elif layer.activation == "tanh":
            x = ops.tanh(x, f"layer{number}.tanh")
    return ops.to_output(x, "output"), leaves


def gradients(
    task: TrainingTask,
    parameters: Mapping[str, Array],
    inputs: Array,
    targets: Array,
    seed: float,
    *,
    mode: Mode = "ieee",
    certify: bool = False,
) -> Gradients:
    """One forward and backward pass.

    Args:
        task: network, loss and policy.
        parameters: float32 masters.
        inputs: float32 (batch, features).
        targets: float32 (batch, outputs) or int32 (batch,).
        seed: cotangent of the loss, scale x loss factor.
        mode: rounding mode.
        certify: whether to work out the bits that exact accumulation needs.
    """
    recorder = Recorder(bits=0.0 if certify else None)
    rounder = Rounder(task.policy.compute_dtype, mode)
    ops = Ops(rounder, recorder)
    with np.errstate(all="ignore"):
        output, leaves = forward(task, parameters, inputs, ops)
        loss = ops.mse(output, targets.astype(np.float64)) if task.loss == "mse" else ops.softmax_cross_entropy(output, targets)
        backward(loss, float(np.float32(seed)), rounder, recorder)
        scaled = {name: np.asarray(leaf.grad, np.float32) for name, leaf in leaves.items()}
    return Gradients(float(loss.value), scaled, recorder)


def probe(task: TrainingTask, parameters: Mapping[str, Array], inputs: Array, targets: Array, seed: float) -> Probe:
    """Measures how far a step is from the other decision; see `Probe`."""
    limit = Rounder(task.policy.compute_dtype).format
    wide = gradients(task, parameters, inputs, targets, seed, mode="wide").recorder
    where = max(wide.cotangents, key=lambda name: wide.cotangents[name])
    top = wide.cotangents[where]
    real = gradients(task, parameters, inputs, targets, seed)
    leaves_finite = all(np.isfinite(g).all() for g in real.scaled.values())
    infinite = any(v >= limit.overflow_threshold for v in real.recorder.cotangents.values())
    headroom = float(np.log2(limit.max / top)) if 0 < top < np.inf else float("inf" if top == 0 else "-inf")
    return Probe(headroom, where, leaves_finite and real.recorder.bias_sum >= limit.overflow_threshold, leaves_finite and infinite)
