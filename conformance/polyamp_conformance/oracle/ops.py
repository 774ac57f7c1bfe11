"""Operations of the oracle: each accumulates in float64 and rounds its result once, if it lives in the compute dtype.

Rules (docs/spec.md, section 9.2)
- The bias is added after the product was rounded, in the compute dtype; its gradient is the sum over rows, accumulated wide, rounded once.
- `snap` passes its cotangent straight through.
- Losses are float32 nodes: nothing is rounded to 16 bits there.
"""

from __future__ import annotations

import numpy as np

from polyamp_conformance.data import Array
from polyamp_conformance.oracle.rounding import Rounder
from polyamp_conformance.oracle.tape import Node, Recorder

__all__ = ["Ops"]


class Ops:
    """Operations that share a rounder and a recorder."""

    def __init__(self, rounder: Rounder, recorder: Recorder) -> None:
        self.round, self.recorder = rounder, recorder

    def leaf(self, value: Array, name: str, *, needs_grad: bool = True) -> Node:
        """A float32 array cast to the compute dtype."""
        return Node(self.round(np.asarray(value, np.float64)), name=name, needs_grad=needs_grad)

    def matmul(self, a: Node, b: Node, name: str) -> Node:
        record = self.recorder.accumulation
        certify = self.recorder.bits is not None  # the sums of magnitudes cost three more products

        def vjp(g: Array) -> tuple[Array, Array]:
            if certify:
                record(np.abs(g) @ np.abs(b.value.T), g, b.value)
                record(np.abs(a.value.T) @ np.abs(g), a.value, g)
            return g @ b.value.T, a.value.T @ g

        if certify:
            record(np.abs(a.value) @ np.abs(b.value), a.value, b.value)
        return Node(self.round(a.value @ b.value), (a, b), vjp, name=name)

    def add_bias(self, a: Node, bias: Node, name: str) -> Node:
        def vjp(g: Array) -> tuple[Array, Array]:
            one_sign = np.maximum(np.maximum(g, 0).sum(0), np.maximum(-g, 0).sum(0))
            self.recorder.bias_sum = max(self.recorder.bias_sum, float(np.nan_to_num(one_sign, nan=np.inf).max()))
            self.recorder.accumulation(np.abs(g).sum(0), g)
            return g, g.sum(0)

        return Node(self.round(a.value + bias.value), (a, bias), vjp, name=name)

    def relu(self, a: Node, name: str) -> Node:
        mask = a.value > 0
        return Node(np.where(mask, a.value, 0.0), (a,), lambda g: (np.where(mask, g, 0.0),), name=name)

    def tanh(self, a: Node, name: str) -> Node:
        y = self.round(np.tanh(a.value))
        return Node(y, (a,), lambda g: (g * (1 - y * y),), name=name)

    def snap(self, a: Node, step: float, limit: float, name: str) -> Node:
        return Node(np.clip(np.rint(a.value / step) * step, -limit, limit), (a,), lambda g: (g,), name=name)

    def to_output(self, a: Node, name: str) -> Node:
        """Cast to float32: exact."""
        return Node(a.value, (a,), lambda g: (g,), half=False, name=name)

    def mse(self, prediction: Node, target: Array) -> Node:
        difference = prediction.value - target
        size = difference.size
        return Node(np.mean(difference * difference), (prediction,), lambda g: (g * 2 * difference / size,), half=False, name="loss")

    def softmax_cross_entropy(self, logits: Node, classes: Array) -> Node:
        rows = np.arange(len(classes))
        shifted = logits.value - logits.value.max(axis=1, keepdims=True)
        log_sum = np.log(np.exp(shifted).sum(axis=1))
        error = np.exp(shifted - log_sum[:, None])
        error[rows, classes] -= 1
        loss = np.mean(log_sum - shifted[rows, classes])
        return Node(loss, (logits,), lambda g: (g * error / len(classes),), half=False, name="loss")
