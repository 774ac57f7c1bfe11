"""Float formats: their constants, and correct rounding of one value in plain Python.

Rules (docs/spec.md, section 1)
- Conversion rounds to nearest, ties to even, with gradual underflow.
- A value that rounds beyond `max` becomes infinity, or NaN in a format without infinities.
- Names are the ones that numpy, ml_dtypes, torch and JAX share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from polyamp.errors import PolicyError

__all__ = ["FORMATS", "Format"]


@dataclass(frozen=True, slots=True)
class Format:
    """Constants of one binary float format.

    Attributes:
        name: dtype name, e.g. `"float16"`.
        bits: storage bits.
        precision: significand bits, the implicit one included (float16: 11).
        min_exponent: exponent e of the smallest normal 2^e.
        max: largest finite value.
        has_inf: whether overflow gives infinity (otherwise NaN).
    """

    name: str
    bits: int
    precision: int
    min_exponent: int
    max: float
    has_inf: bool = True

    @property
    def smallest_normal(self) -> float:
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        return math.ldexp(1.0, self.min_exponent - self.precision + 1)

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger value."""
        return math.ldexp(1.0, 1 - self.precision)

    @property
    def overflow_threshold(self) -> float:
        """Magnitude half a step beyond `max` (float16: 65520). What lies beyond it overflows.

        The tie itself overflows too where the significand of `max` is odd: in every format but float8_e4m3fn, whose 464 rounds to 448.
        """
        top = math.frexp(self.max)[1] - 1
        half_ulp = math.ldexp(1.0, top - self.precision)
        return self.max + half_ulp

    def round(self, value: float) -> float:
        """Rounds a float64 to this format, to nearest with ties to even.

        Args:
            value: any Python float, infinities and NaN included.

        Returns:
            The represented value, as a float64 that holds it exactly.
        """
        if math.isnan(value) or value == 0.0:
            return value
        if math.isinf(value):
            return value if self.has_inf else math.nan
        if abs(value) > 2 * self.max:  # settled before ldexp could leave the range of float64
            return self.round(math.copysign(math.inf, value))
        exponent = max(math.frexp(value)[1] - 1, self.min_exponent)
        unit = exponent - self.precision + 1
        rounded = math.ldexp(float(round(math.ldexp(value, -unit))), unit)
        if abs(rounded) > self.max:
            return math.copysign(math.inf, value) if self.has_inf else math.nan
        return math.copysign(rounded, value)

    @classmethod
    def of(cls, dtype: object) -> Format:
        """Finds the format of a dtype of any framework, or of its name.

        Args:
            dtype: a `Format`, a name (`"float16"`, `"f16"`, `"torch.bfloat16"`), or a dtype object of numpy, torch, JAX or TF.

        Raises:
            PolicyError: nothing of that name is known; the message lists the names.
        """
        if isinstance(dtype, cls):
            return dtype
        name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
        key = str(name).strip().lower().removeprefix("torch.")
        found = FORMATS.get(_SHORT.get(key, key))
        if found is None:
            short = ", ".join(sorted(_SHORT))
            raise PolicyError(f"unknown dtype {name!r}; polyamp knows {', '.join(FORMATS)} (short: {short})")
        return found

    def __str__(self) -> str:
        return self.name


FLOAT32 = Format("float32", 32, 24, -126, 3.4028234663852886e38)
FLOAT16 = Format("float16", 16, 11, -14, 65504.0)
BFLOAT16 = Format("bfloat16", 16, 8, -126, 3.3895313892515355e38)
FLOAT8_E4M3FN = Format("float8_e4m3fn", 8, 4, -6, 448.0, has_inf=False)
FLOAT8_E5M2 = Format("float8_e5m2", 8, 3, -14, 57344.0)

FORMATS: dict[str, Format] = {f.name: f for f in (FLOAT32, FLOAT16, BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2)}

_SHORT = {
    "f32": "float32",
    "fp32": "float32",
    "float": "float32",
    "f16": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3fn",
    "e4m3fn": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}
