"""Range of the loss scale, and rounding to the float32 that carries it.

Rules (docs/spec.md, section 3.1)
- Within [2^-100, 2^100] both the scale and its inverse are normal float32 values, so that no backend flushes one to zero.
"""

from __future__ import annotations

import math
import struct

__all__ = ["MAX_SCALE", "MIN_SCALE", "SMALLEST_NORMAL", "float32"]

MIN_SCALE = 2.0**-100
MAX_SCALE = 2.0**100
SMALLEST_NORMAL = 2.0**-126


def float32(value: float) -> float:
    """Rounds a Python float to the nearest float32 (ties to even); beyond the largest float32 it gives infinity."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", float(value)))[0])
    except OverflowError:
        return -math.inf if value < 0 else math.inf
