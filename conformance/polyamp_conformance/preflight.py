"""Preflight: numerics of a host that would fake a mismatch, found before anything runs.

Rules (docs/spec.md, section 9.5)
- The honest environment is set before the backend's process starts; a probe in that process says whether it took effect.
- A training mismatch on a host with such numerics is "undecided" and names them: still not green, but not the backend's fault either.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["faults"]

_REQUIRED = {
    "float16_matmul_accumulation": (("float32", "float64"), "float16 products are accumulated in 16 bits"),
    "float16_subnormals": (("kept",), "float16 subnormals are flushed"),
    "float16_round_trip": (("kept",), "the compiler removes casts to float16 and back, so overflows vanish"),
    "float16_multiply_add": (("rounded",), "float16 multiply and add are contracted to one rounding"),
    "float16_matmul_add": (("rounded",), "a bias is added to a float16 product before it is rounded"),
    "constant_scale": (("kept",), "the compiler cancels the loss scale against its inverse"),
}


def faults(probe: Mapping[str, str]) -> list[str]:
    """What a probe shows that can fake a mismatch, in words; empty on an honest host."""
    return [text for key, (allowed, text) in _REQUIRED.items() if key in probe and probe[key] not in allowed]
