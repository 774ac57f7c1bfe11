"""Numerics of a device that could fake a mismatch, measured through Keras with compiled functions.

Rules (docs/spec.md, section 9.5)
- Every operand is an argument: a compiler folds constants with other arithmetic than the device has.
- A probe reports what it sees; whether that is acceptable is the preflight's decision.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from keras import ops

from polyamp.formats import FORMATS
from polyamp_keras.native import BACKEND, compiled
from polyamp_keras.runner.devices import device_scope

__all__ = ["FORMAT_NAMES", "probe"]

FORMAT_NAMES = ("float32", "float16", "bfloat16")


def probe(device: str) -> dict[str, str]:
    """Measures one device.

    Returns:
        float16_matmul_accumulation: `"float32"` or `"float16"`.
        float16_subnormals, bfloat16_subnormals, float32_subnormals: `"kept"` or `"flushed"`, in arithmetic.
        float16_round_trip: whether a compiled cast to float16 and back rounds: `"kept"` or `"removed"`.
        float16_multiply_add: whether a * b + c rounds its product: `"rounded"` or `"fused"`.
        float16_matmul_add: whether a matmul rounds before a bias is added to it: `"rounded"` or `"fused"`.
        xla_flags: value of `XLA_FLAGS`, on JAX.
    """
    with device_scope(device):
        subnormals = {f"{name}_subnormals": "kept" if _halved(name) > 0 else "flushed" for name in FORMAT_NAMES}
        trip = _run(lambda x: ops.cast(ops.cast(x, "float16"), "float32"), ("float32", np.array([1 + 2**-12, 70000])))
        # 2048 + 1 is 2048 in float16, in whatever order partial sums are formed; in float32 the row adds up to 3072.
        row = np.array([2048] + [1] * 1024)
        product = _run(ops.matmul, ("float16", np.tile(row, (16, 1))), ("float16", np.ones((row.size, 16))))
        multiplied = _run(lambda a, b, c: a * b + c, ("float16", 300), ("float16", 300), ("float16", -60000))
        # 2049 rounds to 2048 in float16, and 2048 + 1 to 2048 again; unrounded it is 2050.
        matmul = _run(lambda a, b, c: ops.add(ops.matmul(a, b), c), ("float16", [[2048, 1]]), ("float16", [[1], [1]]), ("float16", [1]))
    found = {
        "float16_matmul_accumulation": "float32" if (product == 3072).all() else "float16",
        **subnormals,
        "float16_round_trip": "kept" if trip[0] == 1 and np.isinf(trip[1]) else "removed",
        "float16_multiply_add": "rounded" if np.isinf(multiplied) else "fused",
        "float16_matmul_add": "rounded" if (matmul == 2048).all() else "fused",
    }
    return {**found, "xla_flags": os.environ.get("XLA_FLAGS", "")} if BACKEND == "jax" else found


def _halved(name: str) -> float:
    return float(_run(lambda x, y: x * y, (name, FORMATS[name].smallest_normal), (name, 0.5)))


def _run(function: Callable[..., Any], *arguments: tuple[str, Any]) -> Any:
    tensors = [ops.cast(ops.convert_to_tensor(np.asarray(value, dtype="float32")), dtype) for dtype, value in arguments]
    result = compiled(function)(*tensors)
    return np.asarray(ops.convert_to_numpy(ops.cast(result, "float32") if BACKEND != "torch" else result.float()), dtype="float64")
