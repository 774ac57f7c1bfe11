"""Tape: reverse-mode differentiation in which every 16-bit value and cotangent is rounded once.

Rules
- A node holds its float64 value, its parents and its vector-Jacobian product. `half` says whether it lives in the compute dtype:
  then its value was rounded, and each contribution to its cotangent, and each sum of two, is rounded as well.
- `Recorder` keeps what the judge needs: the largest magnitude of every cotangent before rounding, the bits that exact accumulation
  needs, and the largest partial sum that a bias gradient can reach in some order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from polyamp_conformance.data import Array
from polyamp_conformance.oracle.rounding import Rounder

__all__ = ["Node", "Recorder", "backward", "granule"]


@dataclass
class Recorder:
    """What a forward and backward pass observed.

    Attributes:
        cotangents: name -> largest |cotangent| before rounding; infinite when any is not finite.
        bias_sum: largest partial sum that a bias gradient can reach in the worst order: its positive or its negative terms alone.
        bits: bits that any partial sum needs; None when not certifying. At most 24: exact in float32 in any order.
    """

    cotangents: dict[str, float] = field(default_factory=dict)
    bias_sum: float = 0.0
    bits: float | None = None

    def cotangent(self, name: str, value: Array) -> None:
        top = float(np.max(np.abs(value), initial=0.0))
        self.cotangents[name] = max(self.cotangents.get(name, 0.0), top if np.isfinite(top) else np.inf)

    def accumulation(self, magnitudes: Array, *factors: Array) -> None:
        """Certifies one sum of products: `magnitudes` are the sums of |terms|, `factors` the arrays that were multiplied."""
        if self.bits is not None and np.isfinite(magnitudes).all() and (top := float(np.max(magnitudes, initial=0.0))) > 0:
            self.bits = max(self.bits, float(np.log2(top)) - sum(granule(f) for f in factors))


def granule(values: Array) -> float:
    """log2 of the largest power of two that divides every element of a dyadic array."""
    finite = values[np.isfinite(values) & (values != 0)]
    if finite.size == 0:
        return 0.0
    significand, exponent = np.frexp(finite)
    whole = np.abs(np.ldexp(significand, 53)).astype(np.int64)
    return float(np.min(np.log2((whole & -whole).astype(np.float64)) + exponent - 53))


class Node:
    """A value on the tape.

    Args:
        value: float64 array.
        parents: nodes that it was computed from.
        vjp: cotangent -> one contribution per parent.
        half: whether the value lives in the compute dtype.
        name: name in the recorder.
        needs_grad: False for data: no cotangent flows into it.
    """

    def __init__(
        self,
        value: Array,
        parents: Sequence[Node] = (),
        vjp: Callable[[Array], Sequence[Array]] | None = None,
        *,
        half: bool = True,
        name: str = "",
        needs_grad: bool = True,
    ) -> None:
        self.value, self.parents, self.vjp, self.half, self.name, self.needs_grad = value, tuple(parents), vjp, half, name, needs_grad
        self.grad: Array | None = None

    def receive(self, contribution: Array, rounder: Rounder, recorder: Recorder) -> None:
        """Adds a contribution to the cotangent: rounded on arrival, and once more after the addition."""
        if self.half:
            recorder.cotangent(self.name, contribution)
            contribution = rounder(contribution)
        if self.grad is not None:
            contribution = self.grad + contribution
            if self.half:
                recorder.cotangent(self.name, contribution)
                contribution = rounder(contribution)
        self.grad = contribution


def backward(loss: Node, seed: float, rounder: Rounder, recorder: Recorder) -> None:
    """Fills `grad` of every node that `loss` depends on, starting from the cotangent `seed` of the loss."""
    order: list[Node] = []
    seen: set[int] = set()

    def visit(node: Node) -> None:
        if id(node) not in seen:
            seen.add(id(node))
            for parent in node.parents:
                visit(parent)
            order.append(node)

    visit(loss)
    loss.grad = np.asarray(seed, np.float64)
    for node in reversed(order):
        if node.vjp is None or node.grad is None:
            continue
        for parent, contribution in zip(node.parents, node.vjp(node.grad), strict=True):
            if parent.needs_grad:
                parent.receive(contribution, rounder, recorder)
