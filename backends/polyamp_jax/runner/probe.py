"""Numerics of a device that could fake a mismatch, measured with compiled functions.

Rules (docs/spec.md, section 9.5)
- Every operand is an argument: XLA folds constants with other arithmetic than the device has.
- A probe reports what it sees; whether that is acceptable is the preflight's decision.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jax import Device

__all__ = ["probe"]


def probe(device: Device) -> dict[str, str]:
    """Measures one device.

    Returns:
        float16_matmul_accumulation: `"float32"` or `"float16"`.
        float16_subnormals, bfloat16_subnormals, float32_subnormals: `"kept"` or `"flushed"`, in arithmetic.
        float16_round_trip: whether a compiled cast to float16 and back rounds: `"kept"` or `"removed"`.
        float16_multiply_add: whether a * b + c rounds its product: `"rounded"` or `"fused"`.
        bfloat16_intermediates: whether each bfloat16 result is rounded: `"rounded"` or `"wide"`.
        constant_scale: whether multiplying by a constant and dividing by it again still overflows: `"kept"` or `"cancelled"`.
        bias_gradient: dtype in which the gradient of a plainly added float16 bias is reduced: `"float32"` or `"float16"`.
        maximum_of_nan: whether a maximum over an array that holds a NaN is NaN: `"kept"` or `"lost"`.
        xla_flags: value of `XLA_FLAGS`.
    """

    def run(function: Callable[..., Any], *args: Any) -> np.ndarray:
        return np.asarray(jax.jit(function)(*jax.device_put(args, device))).astype(np.float64)

    def choose(condition: Any, yes: str, no: str) -> str:
        return yes if bool(condition) else no

    def halved(dtype: Any) -> str:
        return choose(run(lambda x, y: x * y, smallest_normal(dtype), dtype(0.5)) > 0, "kept", "flushed")

    def smallest_normal(dtype: Any) -> Any:
        return dtype(jnp.finfo(dtype).smallest_normal)

    half, bf16 = np.float16, jnp.bfloat16
    # 2048 + 1 is 2048 in float16, in whatever order partial sums are formed; in float32 the row adds up to 3072.
    row = np.array([2048] + [1] * 1024, half)
    product = run(jnp.matmul, np.tile(row, (16, 1)), np.ones((row.size, 16), half))
    fused = run(lambda a, b, c: a * b + c, half(300), half(300), half(-60000))
    narrow = run(lambda a, b, c: a + b - c, bf16(256), bf16(1), bf16(256))
    trip = run(lambda x: x.astype(jnp.float16).astype(jnp.float32), np.array([1 + 2**-12, 70000], np.float32))
    cancelled = run(lambda x: x * half(1024) / half(1024), half(100))
    cotangents = np.array([[60000], [60000], [-60000]], half)
    bias = run(jax.grad(lambda b, g: jnp.sum((g * jnp.float16(0) + b) * g, dtype=jnp.float32)), np.zeros(1, half), cotangents)
    maxima = run(lambda x: jnp.max(x, axis=0), np.where(np.arange(4096) == 1234, np.nan, 1).astype(np.float32))
    return {
        "float16_matmul_accumulation": choose((product == 3072).all(), "float32", "float16"),
        "float16_subnormals": halved(half),
        "bfloat16_subnormals": halved(bf16),
        "float32_subnormals": halved(np.float32),
        "float16_round_trip": choose(trip[0] == 1 and np.isinf(trip[1]), "kept", "removed"),
        "float16_multiply_add": choose(np.isinf(fused), "rounded", "fused"),
        "bfloat16_intermediates": choose(narrow == 0, "rounded", "wide"),
        "constant_scale": choose(np.isinf(cancelled), "kept", "cancelled"),
        "bias_gradient": choose(bias == 60000, "float32", "float16"),
        "maximum_of_nan": choose(np.isnan(maxima), "kept", "lost"),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
