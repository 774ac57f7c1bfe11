"""Numerics of a device, measured.

Rules (docs/spec.md, section 9.5)
- Everything is measured here and now; nothing is inferred from a name or a version.
- A probe compares with a value that is exact in any order of summation, so one wrong bit shows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from polyamp.formats import Format
from polyamp_torch.runner.compiler import compile_backend, compile_whole

__all__ = ["probe", "subnormals"]


def subnormals(device: str, dtype: str) -> str:
    """`"kept"` or `"flushed"`: whether half of twice the smallest subnormal is that subnormal again."""
    tiny = Format.of(dtype).smallest_subnormal
    # Long enough for the vector unit, which may flush where the scalar one does not.
    values = torch.full((256,), 2 * tiny, dtype=getattr(torch, dtype), device=device) * 0.5
    return "kept" if bool((values.double() == tiny).all()) else "flushed"


def probe(device: str) -> Mapping[str, str]:
    """See `polyamp.backend.Backend.probe`. Beyond its keys: `float16_round_trip_default` (torch.compile as it comes),
    `float16_sum_accumulation`, subnormals of bfloat16, and whether matmuls keep float16 subnormals.
    """
    return {
        "float16_matmul_accumulation": _matmul_accumulation(device),
        "float16_sum_accumulation": _sum_accumulation(device),
        "float16_subnormals": subnormals(device, "float16"),
        "bfloat16_subnormals": subnormals(device, "bfloat16"),
        "float32_subnormals": subnormals(device, "float32"),
        "float16_matmul_subnormals": _matmul_subnormals(device),
        "float16_round_trip": _round_trip(device, emulate=True),
        "float16_round_trip_default": _round_trip(device, emulate=False),
        "compile_backend": compile_backend(device),
    }


def _matmul_accumulation(device: str) -> str:
    # 2048 + 1 has no float16: ones that are added to it one by one in float16 are lost. 2048 + 64 * 32 is exact.
    for ones in (64, 2048):
        row = torch.ones(16, ones + 1, dtype=torch.float16, device=device)
        row[:, 0] = 2048
        columns = torch.ones(ones + 1, 16, dtype=torch.float16, device=device)
        flipped = row.flip(1)
        products = (row @ columns, flipped @ columns, (columns.T @ row.T), columns.T @ flipped.T)
        if any(bool((product != 2048 + ones).any()) for product in products):
            return "float16"
    return "float32"


def _sum_accumulation(device: str) -> str:
    values = torch.ones(2049, 32, dtype=torch.float16, device=device)
    values[0] = 2048
    return "float32" if bool((values.sum(0) == 4096).all()) else "float16"


def _matmul_subnormals(device: str) -> str:
    tiny = Format.of("float16").smallest_subnormal
    product = torch.full((32, 32), tiny, dtype=torch.float16, device=device) @ torch.eye(32, dtype=torch.float16, device=device)
    return "kept" if bool((product.double() == tiny).all()) else "flushed"


def _double_of_round_trip(values: torch.Tensor) -> torch.Tensor:
    return values.half().float() * 2


def _round_trip(device: str, *, emulate: bool) -> str:
    values = torch.full((64,), 70000.0, device=device)
    result = compile_whole(_double_of_round_trip, device, emulate_precision_casts=emulate)(values)
    return "kept" if bool(torch.isinf(result).all()) else "removed"
