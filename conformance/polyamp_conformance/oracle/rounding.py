"""Rounding: what a 16-bit compute dtype does to a float64 value.

Rules (docs/spec.md, section 1.1)
- `ieee`: round to nearest, ties to even, gradual underflow, overflow to infinity. ml_dtypes does it.
- `wide`: the same significand and subnormals with an unbounded exponent. How far a value lies below the overflow threshold there is the
  headroom of a step; infinities don't hide it.
- Operations accumulate in float64 and round once: the value that any exact or float32 accumulation must agree with up to ties.
"""

from __future__ import annotations

from typing import Literal

import ml_dtypes
import numpy as np

from polyamp.formats import FORMATS
from polyamp_conformance.data import Array

__all__ = ["Mode", "Rounder"]

Mode = Literal["ieee", "wide"]
_DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class Rounder:
    """Rounds float64 arrays to a format, keeping them float64.

    Args:
        dtype: `"float32"`, `"float16"` or `"bfloat16"`.
        mode: `"ieee"` or `"wide"`.
    """

    def __init__(self, dtype: str, mode: Mode = "ieee") -> None:
        self.format, self.mode = FORMATS[dtype], mode
        self._dtype = _DTYPES[dtype]

    def __call__(self, values: Array) -> Array:
        if self.mode == "ieee":
            with np.errstate(over="ignore", invalid="ignore"):
                return values.astype(self._dtype).astype(np.float64)
        _, exponent = np.frexp(values)
        unit = np.exp2(np.maximum(exponent - 1, self.format.min_exponent) - self.format.precision + 1.0)
        rounded: Array = np.rint(values / unit) * unit
        return rounded
