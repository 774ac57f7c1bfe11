"""Model of a `TrainingTask`: pure functions of parameters and a batch.

Rules (docs/spec.md, section 9.2)
- Parameters arrive in the compute dtype. A product accumulates in float32 and is rounded once; the bias is added after that.
- A bias is broadcast in float32 and then cast, so that its gradient is reduced in float32: a plain addition reduces in 16 bits.
- tanh is evaluated in float32 and rounded; its derivative is taken at the rounded value.
- Snapping follows the cast, and its gradient passes straight through.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from polyamp.task import Dense, Snap, TrainingTask

if TYPE_CHECKING:
    from jax import Array

__all__ = ["forward", "loss"]


def forward(task: TrainingTask, params: Mapping[str, Array], inputs: Array) -> Array:
    """Output of the network.

    Args:
        task: network and policy.
        params: compute dtype, by name.
        inputs: (batch, features), any floating dtype.

    Returns:
        Output dtype of the policy, (batch, outputs).
    """
    x = inputs.astype(task.policy.compute_dtype)
    for layer in task.layers:
        x = _dense(layer, params, x)
    return x.astype(task.policy.output_dtype)


def loss(task: TrainingTask, outputs: Array, targets: Array) -> Array:
    """Loss of a batch: float32, 0-d. `targets` are float32 (batch, outputs), or int32 (batch,) class numbers."""
    outputs = outputs.astype(jnp.float32)
    if task.loss == "mse":
        return jnp.mean(jnp.square(outputs - targets))
    log_likelihood = jnp.take_along_axis(jax.nn.log_softmax(outputs), targets[:, None], axis=1)
    return -jnp.mean(log_likelihood)


def _dense(layer: Dense, params: Mapping[str, Array], x: Array) -> Array:
    weight = params[layer.weight]
    if layer.snap is not None:
        weight = _snap(layer.snap, weight)
    y = jnp.matmul(x, weight, preferred_element_type=jnp.float32).astype(x.dtype)
    if layer.bias is not None:
        y = y + jnp.broadcast_to(params[layer.bias].astype(jnp.float32), y.shape).astype(y.dtype)
    if layer.activation == "relu":
        return jax.nn.relu(y)
    return _tanh(y) if layer.activation == "tanh" else y


@jax.custom_vjp
def _tanh(x: Array) -> Array:
    return jnp.tanh(x.astype(jnp.float32)).astype(x.dtype)


def _tanh_forward(x: Array) -> tuple[Array, Array]:
    y = _tanh(x)
    return y, y


def _tanh_backward(y: Array, g: Array) -> tuple[Array]:
    wide = y.astype(jnp.float32)
    return ((g.astype(jnp.float32) * (jnp.float32(1) - wide * wide)).astype(g.dtype),)


_tanh.defvjp(_tanh_forward, _tanh_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _snap(grid: Snap, weight: Array) -> Array:
    step, limit = (jnp.asarray(value, weight.dtype) for value in (grid.step, grid.limit))
    return jnp.clip(jnp.round(weight / step) * step, -limit, limit)


def _snap_forward(grid: Snap, weight: Array) -> tuple[Array, None]:
    return _snap(grid, weight), None


def _snap_backward(grid: Snap, _: None, g: Array) -> tuple[Array]:
    return (g,)


_snap.defvjp(_snap_forward, _snap_backward)
